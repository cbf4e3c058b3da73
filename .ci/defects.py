"""Do the tests see as many faults after a suite was cut as before? Defects planted by seed, and tests that must fail.

    python .ci/defects.py plant --seed 63 --number 30 FILE ... >>defects.jsonl
    python .ci/defects.py try defects.jsonl [--tests "tests/device"] [--c "test_device_end"] [--tree FOLDER]

``plant`` chooses lines of code in these files (C or Python) and changes one operator, number, name or statement in
each; it leaves out what does not compile. ``try`` makes each defect in a copy of this tree, or of FOLDER, and runs
tests until one fails, those of the file's room (ROOMS) if none are named: prints a line for each defect and how many
were found. A defect whose line the tree lacks is not tried. Tests that are named must pass without a defect; those of
rooms are taken to pass, as CI has run them. Builds take seconds with CC="ccache gcc".
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What one place of the code may become. Each pair is one defect; the first group of a pattern is replaced.
SWAPS = [
    (r"[^<\-](<)[^<=]", "<="), (r"[^>\-](>)[^>=]", ">="), (r"(<=)", "<"), (r"(>=)", ">"),
    (r"(==)", "!="), (r"(!=)", "=="),
    (r"[\w)\]] (\+) ", "-"), (r"[\w)\]] (-) ", "+"), (r"(&&)", "||"), (r"(\|\|)", "&&"), (r"\b(and)\b", "or"),
    (r"\b(or)\b", "and"), (r"\b(not )(?!in\b)", ""), (r"(!)[\w(]", ""), (r"\b(True|true)\b", "False"),
    (r"\b(False|false)\b", "True"), (r"\b(min)\(", "max"), (r"\b(max)\(", "min"), (r"\b(0)\b", "1"), (r"\b(1)\b", "2"),
]  # fmt: skip
IN_C = {"False": "false", "True": "true"}
QUICK = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--timeout", "120")
# The tests of each room, by the first words of a path: a folder, of which those files are run whose names share a word
# with the defect's; files that are always run, after these; and programs of tests/c, which run first.
ENGINE = "tests/engine/test_engine.py tests/engine/test_random_steps.py tests/engine/test_bad_input.py"
ORDERS = "tests/core tests/schedules/test_pinned_orders.py tests/schedules/test_families.py"
ROOMS = {
    "csrc/core": ("tests/core", ORDERS, "test_schedule test_partition"),
    "csrc/schedules": ("tests/schedules", f"{ORDERS} tests/schedules/test_auto.py", ""),
    "csrc/model": ("tests/model", "tests/model tests/core/test_fit.py", ""),
    "csrc/run": (
        "tests/engine",
        "tests/engine/test_executor.py tests/attention/test_kv_cache.py tests/transport/test_transport.py",
        "test_executor test_kv_cache test_p2p",
    ),
    "csrc/device": ("tests/device", "tests/device/test_edges.py tests/device/test_gpu_errors.py", "test_device_end"),
    "csrc/torch": ("tests/attention", "tests/attention", ""),
    "csrc/binding": ("tests/core", "tests/core tests/model tests/engine/test_executor.py tests/attention", ""),
    "kernels": ("tests/kernels", "tests/kernels tests/attention/test_attention.py", "test_attention"),
    "seq1f1b/engine": ("tests/engine", ENGINE, ""),
    "seq1f1b/attention": ("tests/attention", f"tests/attention {ENGINE}", ""),
    "seq1f1b/transport": ("tests/transport", "tests/transport tests/engine/test_failures.py", ""),
    "seq1f1b/device": ("tests/device", "tests/device", ""),
    "seq1f1b/checks": ("tests/checks", "tests/checks", ""),
    "seq1f1b/report": ("tests/report", "tests/report", ""),
    "seq1f1b/documents": ("tests/documents", "tests/documents", ""),
    "seq1f1b/adapters": ("tests/adapters", "tests/adapters", ""),
    "seq1f1b/transformers": ("tests/hf", "tests/hf", ""),
    "seq1f1b/planning": ("tests/planning", "tests/planning", ""),
    "seq1f1b/view": ("tests/view", "tests/view", ""),
    "seq1f1b/cli": ("tests/front", "tests/front/test_command_line.py", ""),
    "seq1f1b/data.py": ("tests/planning", "tests/planning/test_documents.py", ""),
    "seq1f1b/launcher.py": ("tests/transport", "tests/transport/test_launch.py", ""),
    "seq1f1b": ("tests", "tests/core tests/model tests/view tests/checks tests/front", ""),
}


def code_lines(path: Path) -> dict[int, str]:
    """The lines of a file that hold code, by number, with comments and texts blanked out."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = [list(line) for line in text.split("\n")]
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                for row in range(token.start[0] - 1, token.end[0]):
                    first = token.start[1] if row == token.start[0] - 1 else 0
                    last = token.end[1] if row == token.end[0] - 1 else len(lines[row])
                    lines[row][first:last] = "\0" * (last - first)
        blanked = ["".join(line) for line in lines]
    else:
        quiet = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', re.DOTALL)
        hidden = quiet.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
        blanked = hidden.split("\n")
    skipped = re.compile(r"\s*(#|import |from |def |class |@|assert|static_assert|typedef|__all__|\0|$)")
    return {number: line for number, line in enumerate(blanked) if not skipped.match(line)}


def defects_of(path: Path) -> Iterator[dict[str, object]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, code in code_lines(path).items():
        changed = []
        for pattern, instead in SWAPS:
            for match in re.finditer(pattern, code):
                new = IN_C.get(instead, instead) if path.suffix != ".py" else instead
                changed.append(lines[number][: match.start(1)] + new + lines[number][match.end(1) :])
        statement = re.fullmatch(r"(\s+)[\w.\[\]>()-]+(?: [+-]?= .*|\(.*\));?", code)  # a call or an assignment goes
        if statement and not re.search(r"\b(return|case|if|while)\b", code):
            changed.append(statement[1] + (";" if path.suffix != ".py" else "pass"))
        for line in changed:
            yield {"file": str(path.relative_to(ROOT)), "line": lines[number], "instead": line,
                   "before": lines[number - 1]}  # fmt: skip


def place_of(defect: dict[str, str], text: str) -> int:
    """The place of the line in a file: after the line that was before it when the defect was planted, or alone."""
    pair = f"{defect['before']}\n{defect['line']}\n"
    if text.count(pair) == 1:
        return text.index(pair) + len(defect["before"]) + 1
    return text.index(f"\n{defect['line']}\n") + 1 if text.count(f"\n{defect['line']}\n") == 1 else -1


def changed(defect: dict[str, str], text: str) -> str:
    place = place_of(defect, text)
    return text[:place] + defect["instead"] + text[place + len(defect["line"]) :]


def compiles(defect: dict[str, str]) -> bool:
    path = ROOT / defect["file"]
    text = path.read_text(encoding="utf-8")
    if place_of(defect, text) < 0:
        return False
    if path.suffix == ".py":
        try:
            compile(changed(defect, text), path, "exec")
        except SyntaxError:
            return False
        return True
    command = [*os.environ.get("CC", "cc").split(), "-std=c11", "-D_GNU_SOURCE=1", "-fsyntax-only", "-Werror=all"]
    command += ["-xc", "-", *(f"-I{folder}" for folder in ("csrc", "kernels", path.parent))]
    done = subprocess.run(command, cwd=ROOT, input=changed(defect, text), text=True, capture_output=True)
    return done.returncode == 0


def plant(arguments: argparse.Namespace) -> int:
    chosen = random.Random(arguments.seed)
    pool = [defect for name in arguments.files for defect in defects_of(ROOT / name)]
    chosen.shuffle(pool)
    taken: set[tuple[str, str]] = set()
    for defect in pool:
        if len(taken) == arguments.number:
            break
        if (defect["file"], defect["line"]) not in taken and compiles(defect):
            taken.add((defect["file"], defect["line"]))
            print(json.dumps(defect))
    return int(len(taken) < arguments.number)


def tests_of(file: str, tree: Path) -> list[list[str]]:
    """Returns the commands that run the tests for a defect in a file."""
    folder, always, programs = ROOMS[max((room for room in ROOMS if file.startswith(room)), key=len)]
    words = set(re.split(r"[_/.]", file)) - {"seq1f1b", "csrc", "engine", "c", "h", "py"}
    named = [path for path in sorted((tree / folder).rglob("test_*.py")) if words & set(re.split(r"[_/.]", path.name))]
    files = dict.fromkeys([*(str(path.relative_to(tree)) for path in named), *always.split()])
    commands = [[sys.executable, "tests/c/run.py", "sanitize", *programs.split()]] if programs else []
    return [*commands, [sys.executable, "-m", "pytest", *QUICK, *files]]


def run(command: list[str], tree: Path, seconds: float) -> bool:
    """Whether a command ends well and in time; what it started ends with it."""
    environment = os.environ | {"PYTHONPATH": str(tree), "SEQ1F1B_CUDA": "0", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **pipes) as process:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)


def try_all(arguments: argparse.Namespace) -> int:
    defects = [json.loads(line) for line in arguments.list.read_text(encoding="utf-8").splitlines()]
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    named = [[sys.executable, "tests/c/run.py", "sanitize", *arguments.c.split()]] if arguments.c else []
    if arguments.tests:
        named.append([sys.executable, "-m", "pytest", *QUICK, *arguments.tests.split()])
    found = tried = 0
    is_stale = False  # whether the extension is built with the defect before
    with tempfile.TemporaryDirectory(prefix="seq1f1b-defects-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(arguments.tree, tree, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        if not all(run(command, tree, 3600) for command in [build, *named]):
            raise SystemExit(f"the tests do not pass without a defect: {named}")
        for defect in defects:
            file = tree / defect["file"]
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            if place_of(defect, text) < 0:
                print(f"gone    {defect['file']}: {defect['line'].strip()}", flush=True)
                continue
            file.write_text(changed(defect, text), encoding="utf-8")
            in_c = file.suffix != ".py"
            if (in_c or is_stale) and not run(build, tree, 600):
                raise SystemExit(f"does not build: {defect}")
            is_stale = in_c  # the next defect's build takes this one away
            commands = named or tests_of(defect["file"], tree)
            seen = not all(run(command, tree, arguments.seconds) for command in (commands if in_c else commands[-1:]))
            file.write_text(text, encoding="utf-8")
            found, tried = found + seen, tried + 1
            verdict = "found" if seen else "LIVES"
            print(f"{verdict:7} {defect['file']}: {defect['line'].strip()} -> {defect['instead'].strip()}", flush=True)
    print(f"{found} of {tried} found")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    planting = commands.add_parser("plant", help="print defects, one JSON object a line")
    planting.add_argument("--seed", type=int, required=True)
    planting.add_argument("--number", type=int, default=30)
    planting.add_argument("files", nargs="+", help="from the root of the repository")
    planting.set_defaults(run=plant)
    trying = commands.add_parser("try", help="run tests on each defect")
    trying.add_argument("list", type=Path)
    trying.add_argument("--tests", default="", help="arguments of pytest, in place of the room's tests")
    trying.add_argument("--c", default="", help="names of C tests, which run first on a defect in C")
    trying.add_argument("--tree", type=Path, default=ROOT)
    trying.add_argument(
        "--seconds", type=float, default=1200.0, help="the most of one command: what takes longer has failed"
    )
    trying.set_defaults(run=try_all)
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
