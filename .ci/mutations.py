"""Do the tests still see faults? Ten mutations of one line each, and the tests of their ring that must fail for each.

    python .ci/mutations.py [--tests FOLDER] [NAME ...]

makes each in a copy of the tree, builds what it needs, and runs the tests named with it, of FOLDER, another tree's, if
given; ends with 1 where one of them lives. Without a mutation the same tests must pass. A few minutes, of which the
builds take most.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    ring: str
    file: str
    line: str  # a part of one, which the file holds once
    instead: str
    tests: str  # folders, files or tests, of the ring's folders alone; and options, as a shell reads them


MUTATIONS = {
    "a backward that does not wait for its recomputation": Mutation(
        ring="core",
        file="csrc/core/unit.c",
        line="{B | I, RECOMPUTED,",
        instead="{I, RECOMPUTED,",
        tests="tests/core/test_schedule.py",
    ),
    "one place too few, counted by time": Mutation(
        ring="core",
        file="csrc/core/lower.c",
        line="num_freed > most ? n + 1 - num_freed",
        instead="num_freed > most ? n - num_freed",
        tests="tests/core/test_places.py",
    ),
    "a rank's first unit that may run twice": Mutation(
        ring="core",
        file="csrc/core/check.c",
        line="if (*number != 0)",
        instead="if (*number > 1)",
        tests="tests/core/test_schedule.py tests/core/test_schedule_text.py",
    ),
    "units that are never freed": Mutation(
        ring="core",
        file="csrc/run/executor.c",
        line="case S1F_OP_FREE: free_unit(executor, instruction->unit); break;",
        instead="case S1F_OP_FREE: break;",
        tests="tests/engine/test_executor.py",
    ),
    "a window that is wider by one": Mutation(
        ring="core",
        file="kernels/attention_ref.c",
        line="token - key < args->window",
        instead="token - key <= args->window",
        tests="tests/attention/test_attention.py",
    ),
    "a receiver that does not wait for the copy": Mutation(
        ring="gpu",
        file="csrc/device/copy_end.c",
        line="return S1F_CU(end->device->driver, stream_wait_event, end->stream, *copied, 0);",
        instead="return S1F_OK;",
        tests="tests/device/test_edges.py",
    ),
    "segments that weigh alike, whatever they count": Mutation(
        ring="core",
        file="seq1f1b/engine/weighting.py",
        line="seeds = [share * weight for",
        instead="seeds = [weight for",
        tests="tests/engine/test_random_steps.py",
    ),
    "ranks that agree before all have come": Mutation(
        ring="core",
        file="seq1f1b/transport/restart.py",
        line="if all(other == view for",
        instead="if any(other == view for",
        tests='tests/transport/test_restarts.py -k agree_on_a_name -m "slow and not full"',
    ),
    "a recomputation that saves time": Mutation(
        ring="planner",
        file="seq1f1b/planning/tables.py",
        line="1.5 * traffic + again",
        instead="1.5 * traffic - again",
        tests="tests/planning/test_cost.py tests/planning/test_recorded_plans.py",
    ),
    "chunks of one token more": Mutation(
        ring="hf",
        file="seq1f1b/transformers/attention_function.py",
        line="doc_ids=doc_ids) % chunk",
        instead="doc_ids=doc_ids) % (chunk + 1)",
        tests="tests/hf/test_decoders.py -k llama4",
    ),
}


def fails(tree: Path, tests: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *shlex.split(tests)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tree)})
    if done.returncode not in (0, 1):
        raise SystemExit(f"{tests} neither pass nor fail:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


class Tree:
    """A copy of this tree, in which one line at a time is another."""

    def __init__(self, folder: Path, tests: Path) -> None:
        self.folder, self._is_built = folder, True
        ignored = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=ignored)
        shutil.copytree(tests / "tests", folder / "tests", dirs_exist_ok=True, ignore=ignored)

    def is_caught(self, mutation: Mutation) -> bool:
        file = self.folder / mutation.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutation.line) != 1:
            raise SystemExit(f"{mutation.file} does not hold {mutation.line!r} once: it needs another mutation")
        in_c = file.suffix in (".c", ".h")
        try:
            file.write_text(text.replace(mutation.line, mutation.instead), encoding="utf-8")
            if in_c or not self._is_built:
                self._build()
                self._is_built = not in_c
            return fails(self.folder, mutation.tests)
        finally:
            file.write_text(text, encoding="utf-8")

    def _build(self) -> None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = os.environ | {"SEQ1F1B_CUDA": "0"}
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=ROOT, metavar="FOLDER", help="the tree whose tests are run")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations whose names begin so; without one, all")
    arguments = parser.parse_args()
    chosen = {name: each for name, each in MUTATIONS.items() if name.startswith(tuple(arguments.names) or "")}
    lives = 0
    with tempfile.TemporaryDirectory(prefix="seq1f1b-") as folder:
        tree = Tree(Path(folder), arguments.tests)
        for mutation in chosen.values():
            if fails(tree.folder, mutation.tests):
                raise SystemExit(f"{mutation.tests} fail without a mutation")
        for name, mutation in chosen.items():
            caught = tree.is_caught(mutation)
            lives += not caught
            print(f"{mutation.ring:8} {'caught' if caught else 'LIVES':7} {name}: {mutation.tests}", flush=True)
    return int(lives > 0)


if __name__ == "__main__":
    sys.exit(main())
