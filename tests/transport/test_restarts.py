"""Do ranks meet where an earlier start of their job has left its keys in the launcher's store?"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import AT_ONCE, PipedProcesses, join_and_run, outcome
from scripts import environment
from slices import every_pair, full_only, slice_of
from torch import nn

from seq1f1b import Limits, PipelineEngine, init_process_group
from seq1f1b.testing import run_ranks
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.meeting import SharedStore
from seq1f1b.transport.restart import agree_on_name

# -- one start after another, over one store ---------------------------------------------------------------------------


def strike(how: str) -> None:
    if how == "raise":
        raise RuntimeError("struck")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(60)


class Layer(nn.Linear):
    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        strike(self.how)
        return super().forward(x)


def train(rank: int, pipe: Connection, kind: str, failing: int, moment: str, how: str) -> Any:
    """What an engine and two steps end with on this rank; the failing one is struck at that moment."""

    def reached(name: str) -> None:
        if rank == failing and name == moment:
            strike(how)

    def run() -> None:
        reached("before")
        made = PipelineEngine(
            layer := Layer(4, 4),
            num_microbatches=2,
            num_segments=0 if rank == failing and moment == "argument" else 2,
            loss_fn=nn.functional.mse_loss,
            transport=kind,
            limits=Limits(step=1.0, first_step=1.0),
        )
        reached("made")
        layer.how = how if rank == failing and moment == "step" else ""
        x = torch.ones(2, 4, 4)
        made.step(x, target=x)
        reached("between")
        made.step(x, target=x)
        reached("close")
        made.close()

    return outcome(run)[:2]


def join(port: int, world: int, rank: int) -> None:
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "RANK": rank}
    os.environ |= {name: f"{value}" for name, value in found.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    init_process_group("gloo")


def start(store: dist.TCPStore, *arguments: Any) -> list[Any]:
    """One start of a job of two ranks: what each says; None of one that dies, or still runs when the other has failed.

    torchrun ends the others so, too.
    """
    found: list[Any] = [None, None]
    with PipedProcesses(2, join_and_run, partial(join, store.port, 2), train, *arguments) as ranks:
        left, until = {0, 1}, time.monotonic() + AT_ONCE
        while left and time.monotonic() < until:
            for rank in sorted(left):
                if ranks.pipes[rank].poll(0.01):
                    with contextlib.suppress(EOFError):
                        found[rank] = ranks.pipes[rank].recv()[1]
                    left.remove(rank)
                    if found[rank] != ("", "") or arguments[-1] == "hang":
                        until = min(until, time.monotonic() + 0.3)
        for process in ranks.processes:
            process.kill()
    return found


MOMENTS = [
    ("before", "kill"),
    ("before", "hang"),
    ("argument", "raise"),
    ("made", "exit"),
    ("step", "raise"),
    ("step", "kill"),
    ("step", "hang"),
    ("between", "exit"),
    ("close", "raise"),
]


@pytest.mark.parametrize(
    ("kind", "failing"),
    [("shm", 0), ("c10d", 1), *full_only(("shm", 1), ("c10d", 0))],
)
def test_a_start_after_others_that_failed(kind: str, failing: int) -> None:
    """They all find the keys of those before them, whatever these had come to."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for moment, how in MOMENTS:
        assert start(store, kind, failing, moment, how) != [("", "")] * 2
        assert start(store, kind, failing, "never", "") == [("", "")] * 2, (moment, how)


# -- one start ---------------------------------------------------------------------------------------------------------


def fail_early(rank: int, pipe: Connection, stays: bool) -> Any:
    """Rank 1 fails a second before rank 0 comes, and is gone by then, or not."""
    options: dict[str, Any] = {"num_segments": 0} if rank == 1 else {}
    if rank == 0:
        time.sleep(1.0)
    if rank == 1 and not stays:
        os._exit(1)
    began = time.monotonic()
    loss = nn.functional.mse_loss
    found = outcome(lambda: PipelineEngine(nn.Linear(4, 4), num_microbatches=2, loss_fn=loss, **options))
    return found[:3], time.monotonic() - began


@pytest.mark.parametrize(
    ("stays", "error"),
    [(True, "rank 1 ended the pipeline's set-up: ValueError: num_segments is 0"), (False, "rank 1 is gone")],
)
def test_a_rank_that_fails_before_rank_0_comes(stays: bool, error: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with PipedProcesses(3, join_and_run, partial(join, store.port, 3), fail_early, stays) as ranks:
        for rank in (0, 2):
            (name, text, (lost, *_)), waited = ranks.result(rank)
            assert name == "PipelineError" and lost == 1 and text.startswith(error), text
            assert waited < AT_ONCE


# -- the name of a start -----------------------------------------------------------------------------------------------


def leave(store: dist.Store, size: int, kinds: str) -> None:
    """What starts that broke off have left: tokens alone, views, or both, of some ranks or all."""
    shared = SharedStore(store, "start")
    for rank in range(size):
        if "t" in kinds:
            shared.set(f"token/{rank}", b"%016x" % rank)
        if "v" in kinds:
            shared.set(f"view/{rank}", b" ".join(b"%016x" % each for each in range(size)))
        if "p" in kinds and rank:  # a part of them had come
            shared.delete(f"token/{rank}")


NAMED = list(itertools.product(["", "t", "v", "tv", "tvp"], [1, 2, 5], ["", "of this run"]))


@pytest.mark.parametrize(("left", "size", "secret"), slice_of(NAMED, every_pair(NAMED)))
def test_ranks_agree_on_a_name_that_no_start_has_had(
    size: int, left: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQ1F1B_SECRET", secret)
    store = dist.HashStore()
    leave(store, size + 1, left)
    names = set()
    for late in range(3):

        def agree(group: RankGroup, late: int = late) -> str:
            time.sleep(0.05 * (group.rank == late))
            return agree_on_name(SharedStore(store, "start"), group.rank, size, AT_ONCE)

        found = run_ranks(size, agree)
        assert len(set(found)) == 1
        names |= set(found)
    assert len(names) == 3


def test_who_does_not_come_is_named() -> None:
    store = dist.HashStore()
    leave(store, 4, "tv")

    def agree(group: RankGroup) -> None:
        if group.rank != 2:
            with pytest.raises(TimeoutError, match=r"ranks \[2\] have not come to init_process_group for 0 s"):
                agree_on_name(SharedStore(store, "start"), group.rank, 4, 0.3)

    run_ranks(4, agree)


# -- torchrun ----------------------------------------------------------------------------------------------------------

CALLS = """
import os, sys, datetime, torch.distributed as dist
import seq1f1b
own = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
there = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
file = sys.argv[1]
minute = datetime.timedelta(minutes=1)
for given, named in [
    (["gloo"], {"init_method": "env://"}),
    (["cpu:gloo", "env://", minute], {"pg_options": None, "device_id": None}),
    (["gloo"], {"init_method": "tcp://" + there, **own}),
    (["gloo"], {"init_method": "file://" + file + ".method", **own}),
    (["gloo"], {"store": dist.FileStore(file + ".store", 2), "timeout": minute, **own}),
    (["gloo", None, None, own["world_size"], own["rank"]], {}),
    (["gloo", None, minute, -1, -1, None, "name"], {}),
]:
    seq1f1b.init_process_group(*given, **named)
    assert (dist.get_rank(), dist.get_world_size()) == (own["rank"], 2)
    dist.barrier()
    dist.destroy_process_group()
print("all done")
"""


def test_what_torchs_function_takes(tmp_path: Path) -> None:
    """Under torchrun, whose store torch takes for ``env://`` and ``tcp://`` alone."""
    script = tmp_path / "script.py"
    script.write_text(CALLS)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path / "file")], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all done") == 2
