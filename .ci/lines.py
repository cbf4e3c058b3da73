"""Lines by ring and language, beside their budget and those of another commit, so that growth is seen and meant.

    python .ci/lines.py [COMMIT]

Without a commit: the last one, or the one before it if nothing has changed since. Ends with an error if a row is above
its number in ``.ci/budget.txt``, or if a number there is higher than in that commit: the budget only falls.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import rings

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_name("budget.txt")
LANGUAGES = {".c": "C", ".h": "C", ".cu": "CUDA", ".cuh": "CUDA", ".py": "Python", ".pyi": "Python"}
LANGUAGES |= {".cpp": "C", ".js": "JavaScript", ".css": "JavaScript", ".html": "JavaScript"}
PRODUCT = ("csrc/", "kernels/", "seq1f1b/", "setup.py")
MOST = 600  # lines of a file of the product: an idea that takes more is two


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def row_of(path: str) -> tuple[str, str] | None:
    """The part that a file belongs to, and its language."""
    kind = Path(path).suffix
    if path == "README.md" or (path.startswith("docs/") and kind == ".md"):
        return "README" if path == "README.md" else "docs", "words"
    if kind not in LANGUAGES:
        return None
    for place in ("tests", "benchmarks", "examples"):
        if path.startswith(f"{place}/"):
            return f"{place} {rings.ring_of(path)}" if place == "tests" else place, LANGUAGES[kind]
    if path.startswith((*PRODUCT, "docs/explorer/")):
        return rings.ring_of(path), LANGUAGES[kind]
    return None


def counted(files: Iterable[tuple[str, bytes]]) -> Counter[tuple[str, str]]:
    """Lines, of pages words, by part and language."""
    counts: Counter[tuple[str, str]] = Counter()
    for path, text in files:
        row = row_of(path)
        if row is not None:
            counts[row] += len(text.split()) if row[1] == "words" else text.count(b"\n")
            if row[0] == "docs":
                counts["docs", "pages"] += 1
    return counts


def files_now() -> list[tuple[str, bytes]]:
    named = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    return [(path, (ROOT / path).read_bytes()) for path in named if (ROOT / path).is_file()]


def files_of(commit: str) -> list[tuple[str, bytes]]:
    named = git("ls-tree", "-r", "--name-only", commit).splitlines()
    wanted = [path for path in named if row_of(path) is not None]
    command = ["git", "cat-file", "--batch=%(objectsize)"]
    asked = "".join(f"{commit}:{path}\n" for path in wanted).encode()
    out = subprocess.run(command, cwd=ROOT, input=asked, capture_output=True, check=True).stdout
    found, place = [], 0
    for path in wanted:
        line = out.index(b"\n", place)
        size = int(out[place:line])
        found.append((path, out[line + 1 : line + 1 + size]))
        place = line + size + 2
    return found


def budget(text: str) -> dict[str, int]:
    """The most of each part, from the text of a ``budget.txt``: rows of a name, a number and a reason."""
    rows = (line.split(maxsplit=2) for line in text.splitlines() if line[:1] not in "#")
    return {name.replace("_", " "): int(most) for name, most, _ in rows}


def main() -> int:
    files = files_now()
    now = counted(files)
    try:
        commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD" if git("status", "--porcelain") else "HEAD~1"
        before, budget_before = counted(files_of(commit)), budget(git("show", f"{commit}:.ci/{BUDGET.name}"))
        title = f"and what was added since {git('log', '-1', '--format=%h %s', commit).strip()}"
    except (OSError, subprocess.CalledProcessError):  # an archive, or a clone of one commit
        before, budget_before, title = now, {}, "with nothing to compare with"
    print(f"lines by ring, {title}")
    totals: Counter[str] = Counter()
    for row in sorted(now | before):
        difference = now[row] - before[row]
        print(f"{now[row]:7} {f'{difference:+}' if difference else '':>7} {row[0]:14} {row[1]}")
        totals[f"docs {row[1]}" if row[0] == "docs" else row[0]] += now[row]
    totals["product"] = sum(totals[ring] for ring in rings.MAY_IMPORT)
    totals["tests"] = sum(lines for name, lines in totals.items() if name.startswith("tests "))
    totals["README lines"] = (ROOT / "README.md").read_text(encoding="utf-8").count("\n")
    budget_now = budget(BUDGET.read_text(encoding="utf-8"))
    wrong = [
        f"{name}: {totals[name]}, the budget is {most}: delete as much as was added"
        for name, most in budget_now.items()
        if totals[name] > most
    ]
    wrong += [
        f".ci/budget.txt: {name} has {budget_now[name]}, it had {most}: a budget only falls"
        for name, most in budget_before.items()
        if budget_now.get(name, 0) > most
    ]
    num_bytes = 0
    for path, text in files:
        row, lines = row_of(path), text.count(b"\n")
        if row is None or row[0] not in rings.MAY_IMPORT:
            continue
        num_bytes += len(text)
        if lines > MOST:
            wrong.append(f"{path}: {lines} lines, a file of the product has at most {MOST}")
    print(f"product: {totals['product']} lines, {num_bytes} bytes; tests: {totals['tests']} lines")
    print("\n".join(wrong), end="\n" * bool(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
