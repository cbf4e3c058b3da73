"""Does the pipeline survive random faults? A fixed slice of them; 300 with `pytest -m faults`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import failed_steps
import pytest
from processes import run_processes

HARNESS = Path(__file__).with_name("fault_harness.py")


@pytest.mark.parametrize(
    "count",
    [
        6,
        pytest.param(15, marks=pytest.mark.full),
        pytest.param(300, marks=[pytest.mark.faults, pytest.mark.timeout(3600)]),
    ],
)
def test_faults(tmp_path: Path, count: int) -> None:
    results = tmp_path / "faults.txt"
    command = [sys.executable, str(HARNESS), "--faults", str(count), "--seed", "3", "--results", str(results)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    text = results.read_text()
    assert f"{count} of {count} faults" in text and f"tests/faults/fault_harness.py --faults {count} --seed 3" in text
    (total,) = [line.split() for line in text.splitlines() if line.startswith("all ")]
    assert int(total[1]) == count and int(total[2]) < count / 4, total
    assert set(total[3:10]) == {"0"}
    print(text)


@pytest.mark.parametrize("count", [9, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_steps_after_failed_ones(count: int) -> None:
    run_processes(failed_steps.WORLD, failed_steps.work, 30, 30 + count)
