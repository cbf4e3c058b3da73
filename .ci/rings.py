"""The rings of the house: which files each holds, and which other ring it may import.

A commit that touches one ring alone is tested by that ring and the smoke set: ``.ci/run tests --ring NAME``.

    python .ci/rings.py tests NAME        prints the files that this runs
    python .ci/rings.py touched COMMIT    prints the ring that holds all changes since COMMIT, or "all"
    python .ci/rings.py stages NAME       prints the stages of .ci/run that its changes need beside its tests, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {"core": (), "gpu": ("core",), "planner": ("core",), "hf": ("core",)}

# The longest name that a path begins with decides; what no row names is the core's.
PLACES = {
    "csrc/device": "gpu",
    "kernels/cuda": "gpu",
    "seq1f1b/device": "gpu",
    "seq1f1b/device/__init__.py": "core",
    "seq1f1b/planning": "planner",
    "seq1f1b/view": "planner",
    "seq1f1b/cli": "planner",
    "seq1f1b/data.py": "planner",
    "seq1f1b/__main__.py": "planner",
    "seq1f1b/transformers": "hf",
    "docs/explorer": "planner",
    "tests/device": "gpu",
    "tests/gpu": "gpu",
    "tests/cuda": "gpu",
    "tests/stand_ins": "gpu",
    "tests/planning": "planner",
    "tests/view": "planner",
    "tests/data": "planner",
    "tests/hf": "hf",
}
# Rooms of the product, lowest first: a file imports or includes files of its own room and of those before it.
ROOMS = (
    *("csrc/core", "csrc/schedules", "csrc/model", "kernels", "kernels/cuda"),
    *("csrc/run", "csrc/device", "csrc/torch", "csrc/binding"),
    *("seq1f1b", "seq1f1b/attention", "seq1f1b/transport", "seq1f1b/documents", "seq1f1b/engine", "seq1f1b/device"),
    *("seq1f1b/checks", "seq1f1b/report", "seq1f1b/adapters", "seq1f1b/transformers", "seq1f1b/planning"),
    *("seq1f1b/data.py", "seq1f1b/view", "seq1f1b/cli"),
    *("seq1f1b/testing.py", "seq1f1b/__main__.py", "seq1f1b/__init__.py"),
)
OF_ALL = ("tests/front", "tests/support", "tests/conftest.py")  # test files that no ring owns

# What a ring's run adds to its own files: one look at each of the others, and what holds the house together.
SMOKE = (
    "tests/front/test_package.py",
    "tests/front/test_rings.py",
    "tests/front/test_walks.py",
    "tests/front/test_surface.py",
    "tests/core/test_schedule.py",
    "tests/core/test_orders_that_give_up.py",
    "tests/attention/test_attention.py",
    "tests/engine/test_random_steps.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_options.py",
    "tests/planning/test_plan.py",
)

# Stages of .ci/run that a change of one ring needs beside its tests; docs and the oldest torch have jobs of their own.
# What the core changes needs all.
STAGES = {
    "gpu": ("c", "cuda", "gpu", "lint", "sanitizers"),
    "planner": ("exact", "examples", "lint", "slow"),
    "hf": ("lint", "transformers"),
    "all": ("c", "cuda", "exact", "examples", "gpu", "isa", "lint", "sanitizers", "slow", "torchtitan",
            "transformers", "wheel"),
}  # fmt: skip


def ring_of(path: str) -> str:
    """The ring of a file, named from the root of the repository."""
    named = [place for place in PLACES if path == place or path.startswith(f"{place}/")]
    return PLACES[max(named, key=len)] if named else "core"


def room_of(path: str) -> str:
    """The room of a file of the product, named from the root of the repository."""
    return max((room for room in ROOMS if path == room or path.startswith(f"{room}/")), key=len)


def picture(arrows: set[tuple[str, str]]) -> str:
    """A picture of rooms, as a graph of Mermaid: an arrow for each room that another one imports from.

    What follows from two other arrows is left out, and so are files that are a room by themselves.
    """
    reached: dict[str, set[str]] = {}
    for room in ROOMS:  # lowest first
        own = {to for of, to in arrows if of == room and to != room}
        reached[room] = own.union(*(reached[to] for to in own))
    lines = ["graph TD"]
    for room in reversed([room for room in ROOMS if not room.endswith(".py")]):
        own = {to for of, to in arrows if of == room and to != room}
        kept = [to for to in ROOMS if to in own and not any(to in reached[other] for other in own)]
        lines += [f"    {room.replace('/', '_')}[{room}] --> {to.replace('/', '_')}[{to}]" for to in kept]
    return "\n".join(lines) + "\n"


def tests_of(ring: str) -> list[str]:
    """The files of tests that a ring's run takes."""
    if ring not in MAY_IMPORT:
        raise SystemExit(f"no ring {ring}; there are: {' '.join(MAY_IMPORT)}")
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("*/test_*.py"))]
    own = [file for file in files if ring_of(file) == ring and not file.startswith(OF_ALL)]
    return own + [file for file in SMOKE if file not in own]


def touched_since(commit: str) -> str:
    """The ring that holds all changed files, or "all": of two rings, of tests for all, of what builds and runs."""
    command = ["git", "diff", "--name-only", f"{commit}...HEAD"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    counted = [file for file in files if not file.endswith(".md")]
    rooms = ("csrc/", "kernels/", "seq1f1b/", "tests/", "docs/explorer/")
    if any(file.startswith(OF_ALL) or not file.startswith(rooms) for file in counted):
        return "all"
    rings = {ring_of(file) for file in counted}
    return rings.pop() if len(rings) == 1 else "all"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tests", name]:
            print("\n".join(tests_of(name)))
        case ["touched", commit]:
            print(touched_since(commit))
        case ["stages", name]:
            print(json.dumps(STAGES.get(name, STAGES["all"])))
        case _:
            raise SystemExit(__doc__)
