"""Plants defects in the product, one at a time, and prints which of them the tests of their room find.

    python .ci/planted.py --seed 1 --each 10 [--room csrc/core ...] [--limit 300] [--list FILE]

Works in a copy of the last commit, built once. A defect is an operator, a constant or a condition that is changed, or a
statement that is dropped, drawn by the seed: the same sources and seed give the same defects. A defect that does not
compile is drawn again. ``--list`` appends a line of JSON per defect to FILE. If FILE has the defect already, the test
that found it runs first, so that a second run, with other tests over the same product, takes little time.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Defect = tuple[int, int, str, str]  # line, column, text before and after

TESTS = {
    "csrc/core": "core attention",
    "csrc/schedules": "schedules core",
    "csrc/model": "model",
    "csrc/run": "transport/test_transport.py engine/test_executor.py engine/test_engine.py engine/test_offload.py",
    "csrc/torch": "attention",
    "csrc/binding": "core attention model schedules engine/test_executor.py",
    "kernels": "attention",
    "seq1f1b/attention": "attention engine/test_vocabulary.py",
    "seq1f1b/transport": "transport",
    "seq1f1b/documents": "documents attention",
    "seq1f1b/engine": "engine/test_engine.py engine/test_gradients.py engine",
    "seq1f1b/report": "report engine/test_engine.py",
}
SWAPS = {
    **{" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "},
    **{" + ": " - ", " - ": " + ", " && ": " || ", " || ": " && ", " and ": " or ", " or ": " and "},
    **{" is None": " is not None", " is not None": " is None", "if not ": "if ", "if (!": "if (", "min(": "max("},
}
TOKENS = re.compile(
    "|".join(re.escape(swap) for swap in sorted(SWAPS, key=len, reverse=True)) + r"|(?<![\w.\"'])[01](?![\w.\"'])"
)


def code_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold code of a function: no comments, docstrings, imports, messages."""
    text, skipped = path.read_text(), set[int]()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text or isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Raise)):
                skipped.update(range(node.lineno, node.end_lineno + 1))
    else:
        text = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)
    for number, line in enumerate(text.splitlines(), 1):
        if number not in skipped and line.startswith("    ") and (path.suffix == ".py" or '"' not in line):
            yield number, line


def defects(path: Path) -> list[Defect]:
    found: list[Defect] = []
    for number, line in code_lines(path):
        code = line.split("  # ")[0] if path.suffix == ".py" else line.split("//")[0]
        for match in TOKENS.finditer(code):
            token = match[0]
            found.append((number, match.start(), token, SWAPS.get(token) or ("1" if token == "0" else "2")))
        if path.suffix == ".py" and re.fullmatch(r" +[\w.\[\]]+( [-+]?= [^(\[{]*[^(\[{,]|\([^()]*\))", code):
            found.append((number, len(code) - len(code.lstrip()), code.strip(), "pass"))
        elif path.suffix != ".py" and re.fullmatch(r" +[\w.>\[\]-]+( [-+]?= [^;{]*|\([^;]*\));", code):
            found.append((number, len(code) - len(code.lstrip()), code.strip(), ";"))
    return found


def build(root: Path) -> bool:
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    environment = {"CC": "ccache gcc"} | os.environ | {"SEQ1F1B_CUDA": "0", "PYTHONPATH": str(root)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True).returncode == 0


def finder(root: Path, tests: list[str], limit: float) -> str:
    """The first test that fails, or "" if none does, or none within ``limit`` seconds."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout=120"]
    command += ["-m", "not full and not faults", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=root, env=environment, **pipes)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return ""
    named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
    return "" if process.returncode == 0 else named[1] if named else f"exit {process.returncode}"


def plant(root: Path, room: str, rng: random.Random, known: dict[str, str], limit: float) -> tuple[str, str]:
    """Plants one defect, runs the tests, takes it out again: what it was, and which test found it."""
    while True:
        files = {p: defects(p) for p in sorted((root / room).glob("*")) if p.suffix in {".c", ".py"}}
        path = rng.choices(list(files), [len(own) for own in files.values()])[0]
        number, column, before, after = rng.choice(files[path])
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        line = lines[number - 1]
        lines[number - 1] = line[:column] + after + line[column + len(before) :]
        name = f"{path.relative_to(root)}:{number}:{column} {before.strip()} -> {after.strip()}"
        path.write_text("".join(lines))
        try:
            if path.suffix == ".py" or build(root):
                first = known.get(name, "").split("[")[0]
                if first and (root / first.split("::")[0]).exists():
                    found = finder(root, [first], limit)
                    if found and "exit" not in found:
                        return name, found
                return name, finder(root, [f"tests/{test}" for test in TESTS[room].split()], limit)
        finally:
            path.write_text(text)
            if path.suffix == ".c":
                build(root)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--each", type=int, default=10, help="defects of each room")
    options.add_argument("--room", nargs="*", choices=list(TESTS), default=list(TESTS))
    options.add_argument("--limit", type=float, default=600, help="seconds for the tests of one defect")
    options.add_argument("--list", type=Path, default=Path(os.devnull))
    given = options.parse_args()
    known = {row["defect"]: row["found"] for row in map(json.loads, given.list.read_text().splitlines())}
    results = []
    with tempfile.TemporaryDirectory(prefix="planted-") as directory:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
        assert build(Path(directory)), "the product does not build"
        for room in given.room:
            rng = random.Random(f"{given.seed} {room}")
            for _ in range(given.each):
                name, found = plant(Path(directory), room, rng, known, given.limit)
                results.append(bool(found))
                print(f"{'found' if found else 'NOT FOUND':9}  {name}  {found}", flush=True)
                with given.list.open("a") as file:
                    file.write(json.dumps({"defect": name, "found": found}) + "\n")
    print(f"{sum(results)} of {len(results)} found")


if __name__ == "__main__":
    main()
