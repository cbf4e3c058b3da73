"""Does a script end cleanly that forgets to close its engine, and one that fails a step and makes a new engine?"""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import Script, environment, free_port

import seq1f1b
from seq1f1b.testing import run_ranks


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


LOST = """
import os, signal, sys, torch, torch.distributed as dist, seq1f1b
from seq1f1b.transport.meeting import Meeting

transport, how, turn, limits = *sys.argv[1:3], int(sys.argv[3]), seq1f1b.Limits(step=4.0, first_step=6.0)
signal.alarm(40)  # ends a rank that waits for ever
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
def strike(now):
    if rank == 0 and now == turn:
        while how == "stopped late" and not os.path.exists("read"): pass
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
def gather_or_be_struck(meeting, value):
    strike(meeting._round)
    found = gather(meeting, value)
    if rank == 2 and meeting._round == turn:
        open("read", "w").close()
    return found
def look_or_be_late(meeting):
    while is_late and meeting._round == turn - 1 and "stopped" not in open(of_first).read(): pass
    return look(meeting)
is_late, of_first = how == "stopped late" and rank == 1, f"/proc/{sys.argv[-1]}/status"
gather, Meeting.gather, look, Meeting._look = Meeting.gather, gather_or_be_struck, Meeting._look, look_or_be_late
strike(-1)
try:
    engine = seq1f1b.PipelineEngine(
        torch.nn.Linear(4, 4), num_microbatches=2, num_segments=2, loss_fn=torch.nn.functional.mse_loss,
        transport=transport, limits=limits,
    )
    x = torch.ones(2, 8, 4)
    for number in range(1000):
        engine.eval(x, target=x)
        strike(number)
except seq1f1b.PipelineError as error:
    print(error, flush=True)
    if rank == 2:
        raise
    sys.exit(3)
"""


LOSSES = [("c10d", "killed", 50), ("c10d", "stopped", -1), ("c10d", "killed", 1), ("shm", "stopped late", 2)]


@pytest.mark.parametrize(("transport", "how", "turn"), LOSSES)
def test_a_rank_ends_with_its_own_exit_code_once_the_store_is_lost(
    tmp_path: Path, transport: str, how: str, turn: int
) -> None:
    """Rank 0 holds the store; it is struck before the engine is made, in a round of that, or between two steps."""
    script = tmp_path / "script.py"
    script.write_text(LOST)
    port = free_port()
    lost, *others = (environment(rank, 3, port) for rank in range(3))
    arguments = [transport, how, str(turn)]
    first = Script(script, arguments, tmp_path, lost)  # forked: how it ends is nobody's question
    ranks = []
    try:
        for variables in others:
            command = [sys.executable, str(script), *arguments, str(first.pid)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            ranks.append(subprocess.Popen(command, cwd=tmp_path, env=variables, text=True, **pipes))
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        with contextlib.suppress(ProcessLookupError):
            first.send_signal(signal.SIGKILL)
        first.finish()
    assert [rank.returncode for rank in ranks] == [3, 1], said
    assert "rank 0" in said[0][0], said
    assert "rank 0" in said[1][0] or "lost the launcher's store" in said[1][0], said  # it is no neighbour of rank 0


ENDS = """
import os, socket, sys, time, weakref, torch, torch.distributed as dist, seq1f1b
import seq1f1b.engine.engine, seq1f1b.transport, torch.nn.parallel

torch.set_num_threads(1)
for way in sys.argv[1:]:
    ranks = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(3):  # torch is imported once for all
        pid = os.fork()
        if pid == 0:
            break
        ranks.append(pid)
    if pid == 0:
        break
    codes = {os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in ranks}
    print(codes, way, flush=True)
else:
    sys.exit()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", WORLD_SIZE="3", RANK=f"{rank}")
dist.init_process_group("gloo")
def make():
    return seq1f1b.PipelineEngine(
        torch.nn.Linear(4, 4), num_microbatches=2, num_segments=2, loss_fn=torch.nn.functional.mse_loss,
        transport="c10d" if "c10d" in way else "shm", attention="unchecked",
    )
engine, x = make(), torch.randn(2, 8, 4)
for _ in range(3):
    engine.step(x, target=x)
if "failed" in way:  # the next engine is forgotten
    try:
        engine.step(x if rank else "nonsense", target=x)
        sys.exit("the step did not fail")
    except (TypeError, seq1f1b.PipelineError):
        pass
    engine.close()
    engine = make()
    engine.step(x, target=x)
if "ddp" in way:
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    wrapped(torch.randn(2, 4)).sum().backward()
for _ in range(20):
    dist.all_reduce(torch.ones(1))
if "late" in way:  # one of gloo's threads drops a tensor while the script ends
    mine = torch.ones(1)
    weakref.finalize(mine, time.sleep, 0.0 if rank else 1.0).atexit = False
    time.sleep(0.2 if rank else 0.0)
    work = dist.all_reduce(mine, async_op=rank == 0)
    del mine, work
    time.sleep(0.0 if rank else 0.6)
if "close" in way:
    engine.close()
if "destroy" in way:
    dist.destroy_process_group()
sys.exit(4)
"""


def test_a_script_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """While a thread of gloo drops a tensor, and after a failed step; closed or not, the group held by DDP or not."""
    ways = ["late destroy", "late c10d close destroy", "late ddp close destroy", "failed", "failed c10d"]
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    command = [sys.executable, str(script), *ways]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines() == [f"{{4}} {way}" for way in ways], (said.stdout, said.stderr)
