"""Does every input that fuzzing kept, or that once failed, end in a value or in a documented error?

The targets in C run under gcc's Address- and UndefinedBehaviorSanitizer. `tests/fuzz/run.py` makes new inputs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import run
from python_targets import TARGETS

HERE = Path(__file__).parent
INPUTS = sorted(path for name in TARGETS for path in (HERE / "corpus" / name).iterdir())


def test_inputs_of_the_targets_in_c() -> None:
    done = subprocess.run([sys.executable, HERE / "run.py", "--corpus"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = run.c_targets()
    assert [line.split()[0] for line in done.stdout.splitlines()] == names and len(names) >= 6
    assert all(line.endswith(" inputs, ok") for line in done.stdout.splitlines())


@pytest.mark.timeout(20)
@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_inputs_of_the_targets_in_python(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_inputs() -> None:
    assert set(run.PYTHON_TARGETS) == set(TARGETS)
    for name in [*run.c_targets(), *TARGETS]:
        assert any((HERE / "corpus" / name).iterdir()), name
