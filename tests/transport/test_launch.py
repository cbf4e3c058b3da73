"""Does `seq1f1b.launch` run ranks as processes, from a script and from a notebook, and raise what failed?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import seq1f1b


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


def train(steps, fault=""):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    engine = seq1f1b.PipelineEngine(nn.Linear(4, 4), num_microbatches=2, num_segments=2, loss_fn=loss_fn)
    for step in range(steps):
        if fault and rank == 1 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL) if fault == "killed" else explode()
        losses = engine.step(torch.ones(2, 6, 4), target=torch.zeros(2, 6, 4))
    engine.close()
    return rank, torch.stack(losses) if losses else None


def explode():
    raise ValueError("on this rank alone")


def errors_of(fault):
    try:
        seq1f1b.launch(train, 2, 3, fault)
    except Exception as error:
        return f"{type(error).__name__}: {error}", str(error.__cause__)
"""

NOTEBOOK = """
(first, nothing), (second, losses) = seq1f1b.launch(train, 2, 1)
assert (first, nothing, second, losses.shape) == (0, None, 1, (2,))
error, place = errors_of("raised")
assert error == "ValueError: on this rank alone" and "rank 1:" in place and "in explode" in place, place
error, _ = errors_of("killed")
assert error in ("RuntimeError: rank 1 ended with exit code -9",), error
print("done")
"""

SCRIPT = """
if __name__ == "__main__":
    error, place = errors_of("raised")
    assert error == "ValueError: on this rank alone" and "in explode" in place, place
    try:
        seq1f1b.launch(lambda: None, 2)
    except ValueError as error:
        assert "define it at the top level" in str(error)
    print("done")
"""


def run_python(*arguments: str) -> str:
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_notebook_trains() -> None:
    notebook = json.loads((Path(__file__).parents[2] / "examples/notebook.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    first, last = re.search(r"loss (\S+), after 30 steps (\S+)", run_python("-c", "\n".join(code))).groups()
    assert float(last) < float(first) / 2


@pytest.mark.parametrize("kind", ["script", "notebook"])
def test_ranks_are_processes_and_the_error_that_came_first_is_raised(kind: str, tmp_path: Path) -> None:
    arguments = ["-c", TRAIN + NOTEBOOK]
    if kind == "script":
        (tmp_path / "train.py").write_text(TRAIN + SCRIPT)
        arguments = [str(tmp_path / "train.py")]
    assert run_python(*arguments) == "done\n"
