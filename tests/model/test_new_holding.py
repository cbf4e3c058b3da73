"""What a new kind of bytes takes: an enum value, a row in unit.c and the fields that show it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from seq1f1b import _C
from seq1f1b.schedule import PeakMemory, StepMemory

ROOT = Path(__file__).resolve().parents[2]
CONSTANT = {"weights", "optimizer", "logits"}  # held throughout a step, so that no unit takes or frees them
CHANGES = {  # by file: what stands there, and what stands before it in the copy
    "csrc/core/unit.h": [("    S1F_NUM_HOLDINGS = 12", "    S1F_HOLDS_DUMMY = 12,\n"), ("= 12\n} s1f_holding", None)],
    "csrc/core/unit.c": [
        (
            "    [S1F_HOLDS_KV_ROWS]",
            '    [S1F_HOLDS_DUMMY] = {"dummy", "a dummy", S1F_PER_SEGMENT, S1F_HOLDS_DUMMY, OUTPUT, WEIGHT_GRADIENT,\n'
            "                         EACH, EACH, SAVES | GRADIENTS, ALWAYS},\n",
        )
    ],
    "seq1f1b/simulation.py": [
        ("    activations: int | ", "    dummy: int | Sequence[int] = 0\n"),
        ("    activations: tuple[int", "    dummy: tuple[int, ...]\n"),
    ],
}
USE = """
from seq1f1b import Costs, build_schedule
from seq1f1b.schedule import StepMemory
from itertools import accumulate
from seq1f1b.view.page import memory_changes, timeline_html

order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
memory = StepMemory(activations=10, dummy=[1, 3])
run = order.simulate(Costs(), memory=memory)
assert run.memory == order.peak_memory(memory)
assert run.memory.dummy == (1 + 3 + 1, 1 + 3), run.memory
assert run.memory.total == (35, 24), run.memory
peaks = [max(accumulate(by for _, by, name in rank if name == "dummy")) for rank in memory_changes(run)]
assert peaks == [5, 4], peaks
fitted = order.fit(memory, 30)
assert fitted != order and fitted.peak_memory(memory).dummy == run.memory.dummy
try:
    order.peak_memory(StepMemory(dummy=[1, 2, 3]))
except ValueError as error:
    assert str(error) == "dummy must be a number or hold 2, one of each segment: it holds 3"
"""


def test_fields_are_the_rows() -> None:
    names = [row.name for row in _C.HOLDINGS]
    assert set(names) | CONSTANT == {field.name for field in fields(StepMemory)}
    shown = {row.name for h, row in enumerate(_C.HOLDINGS) if row.counts_with == h}
    assert shown | CONSTANT | {"receive", "total"} == {field.name for field in fields(PeakMemory)}


def test_a_dummy_holding(tmp_path: Path) -> None:
    """Built in a copy of the sources."""
    for folder in ("csrc", "kernels", "seq1f1b"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    assert len(CHANGES) <= 6
    for name, changes in CHANGES.items():
        text = (tmp_path / name).read_text()
        for there, added in changes:
            assert text.count(there) == 1, (name, there)
            text = text.replace(there, there.replace("12", "13") if added is None else added + there)
        (tmp_path / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "SEQ1F1B_CUDA": "0", "SEQ1F1B_DEBUG": "1"}
    environment.pop("LD_PRELOAD", None)  # of the sanitizers: the compiler would run under them
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    for command in (build, [sys.executable, "-c", USE]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
