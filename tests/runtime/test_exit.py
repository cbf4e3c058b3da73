"""Does a script end cleanly that forgets to close its engine, and one that fails a step and makes a new engine?"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import seq1f1b
from seq1f1b.testing import run_ranks

SCRIPT = """
import sys, torch, torch.distributed as dist, seq1f1b

def make():
    return seq1f1b.PipelineEngine(
        torch.nn.Linear(4, 4), num_microbatches=2, num_segments=2, loss_fn=lambda o, t: (o - t).square().mean(),
        transport=sys.argv[2],
    )

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
engine, x = make(), torch.randn(4, 8, 4)
engine.step(x, target=x)
if sys.argv[1] == "fails":
    try:
        engine.step(x if rank else "nonsense", target=x)
        sys.exit("the step did not fail")
    except (TypeError, seq1f1b.PipelineError):
        pass
    engine.close()
    engine = make()
    engine.step(x, target=x)
print(f"end of rank {rank}", end="; ")
"""


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("what", ["forgets", "fails"])
def test_every_process_exits_with_0(tmp_path: Path, what: str, transport: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, what, transport], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "end of rank 0" in done.stdout and "end of rank 1" in done.stdout


def test_a_pipeline_of_threads_goes_without_the_garbage_collector() -> None:
    """Each holds tebibytes of address space: a reference cycle would exhaust it before memory runs short."""

    def address_space() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * 4096

    def run(group) -> None:
        engine = seq1f1b.PipelineEngine(
            torch.nn.Linear(4, 4), num_microbatches=2, loss_fn=lambda o, t: (o - t).square().mean(), group=group
        )
        engine.step(x, target=x)

    x = torch.randn(4, 8, 4)
    run_ranks(3, run)  # imports torch's lazy parts, whose frames are garbage in cycles
    gc.collect()
    gc.disable()
    try:
        before = address_space()
        for _ in range(3):
            run_ranks(3, run)
        assert address_space() - before < 1 << 40
    finally:
        gc.enable()
