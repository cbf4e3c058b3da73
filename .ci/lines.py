"""Lines of the product by room, beside those of another commit, so that growth is seen.

    python .ci/lines.py [COMMIT]

Without a commit: the last one, or the one before it if nothing has changed since.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("csrc", "kernels", "seq1f1b", "setup.py")
SUFFIXES = (".c", ".h", ".cu", ".cuh", ".py", ".pyi")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def room_of(path: str) -> str:
    folders = path.split("/")[:-1]
    return "/".join(folders[:2]) or "."


def lines_now() -> Counter[str]:
    counts: Counter[str] = Counter()
    for place in PRODUCT:
        for file in [ROOT / place, *(ROOT / place).rglob("*")]:
            if file.is_file() and file.suffix in SUFFIXES:
                counts[room_of(str(file.relative_to(ROOT)))] += file.read_text(encoding="utf-8").count("\n")
    return counts


def lines_of(commit: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in git("grep", "-c", "", commit, "--", *PRODUCT).splitlines():
        _, path, count = line.rsplit(":", 2)
        if path.endswith(SUFFIXES):
            counts[room_of(path)] += int(count)
    return counts


def main() -> None:
    now = lines_now()
    try:
        changed = git("status", "--porcelain", "--", *PRODUCT) != ""
        commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD" if changed else "HEAD~1"
        before = lines_of(commit)
        title = git("log", "-1", "--format=%h %s", commit).strip()
    except (OSError, subprocess.CalledProcessError):  # an archive, or a clone of one commit
        before, title = now, "nothing to compare with"
    print(f"lines of the product, and what was added since {title}" if before is not now else title)
    for room in sorted(now | before):
        difference = now[room] - before[room]
        print(f"{now[room]:7} {f'{difference:+}' if difference else '':>7} {room}")
    print(f"{now.total():7} {now.total() - before.total():+7} all")


if __name__ == "__main__":
    main()
