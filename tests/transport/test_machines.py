"""Does a pipeline over two hosts train as one process does, and does it end when a host or the link between them goes?

The hosts are network namespaces of this machine; an abstract Unix socket of one does not exist in the other.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hosts import INTERFACE, Host, two_hosts
from processes import AT_ONCE, PipedProcesses, join_and_run, outcome
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import Limits, PipelineEngine

P, M, K, LENGTH = 4, 3, 2, 13
CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=4)
TOKENS, TARGET = batch(CONFIG, M, LENGTH, size=1)
PORT = 29500  # of a network namespace's own


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


CARRIED = {(0, 1): "shm", (1, 2): "c10d", (2, 3): "shm"}
EDGES = [
    [[a, b, CARRIED[min(a, b), max(a, b)]] for a, b in [(r - 1, r), (r, r + 1), (r + 1, r), (r, r - 1)]
     if min(a, b) >= 0 and max(a, b) < P]
    for r in range(P)
]  # fmt: skip


# Ranks 0 and 1 are on the second host, so the process group's store is not on the host of the pipeline's rank 0.
HOST_OF = (1, 1, 0, 0)


def join(hosts: tuple[Host, Host], port: int, rank: int) -> None:
    hosts[HOST_OF[rank]].enter()
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore(hosts[1].name, port, P, is_master=rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=P)


class Trapped(nn.Module):
    """A stage that says so in its ``at``-th forward, and stays there."""

    def __init__(self, rank: int, at: int, pipe: Connection) -> None:
        super().__init__()
        self.stage = stage_of(whole_model(CONFIG), CONFIG, rank, P)
        self.at, self.calls, self.pipe = at, 0, pipe

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            self.pipe.send(("result", "in the trap"))
            time.sleep(120)
        return self.stage(x)


def make(rank: int, pipe: Connection, trapped_at: int = 0, **limits: float) -> PipelineEngine:
    return PipelineEngine(
        Trapped(rank, trapped_at, pipe), num_microbatches=M, num_segments=K, loss_fn=cross_entropy, **limits
    )


def step_twice(rank: int, pipe: Connection) -> Any:
    """A good step, one in which rank 2 stays in F1.0, and what another try ends with."""
    engine = make(rank, pipe, trapped_at=M * K + K + 1 if rank == 2 else 0)
    engine.step(TOKENS, target=TARGET)
    gradients = {name.removeprefix("stage."): p.grad.numpy() for name, p in engine.named_parameters()}
    reports = engine.report(gather=True).ranks
    pipe.send(("result", gradients))
    pipe.send(("result", [[[e.source_stage, e.destination_stage, e.transport] for e in r.edges] for r in reports]))
    first = outcome(lambda: engine.step(TOKENS, target=TARGET))
    again = outcome(lambda: engine.step(TOKENS, target=TARGET))
    engine.close()
    return first, again, time.monotonic()


def test_two_hosts_and_one_that_is_killed(hosts: tuple[Host, Host]) -> None:
    with PipedProcesses(P, join_and_run, partial(join, hosts, PORT + 1), step_twice) as ranks:
        found = {name: torch.from_numpy(g) for rank in range(P) for name, g in ranks.result(rank).items()}
        _, truth = run_whole(whole_model(CONFIG), TOKENS, TARGET, M)
        assert gradient_error(found, truth) < 1e-10
        for rank in range(P):  # only the edges between the hosts go over the process group
            assert [sorted(edges) for edges in ranks.result(rank)] == [sorted(edges) for edges in EDGES]
        assert ranks.result(2) == "in the trap"
        time.sleep(0.5)  # what a rank does is published five times a second
        for rank in (2, 3):
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
        killed = time.monotonic()
        results = [ranks.result(rank) for rank in (0, 1)]
    for (name, text, (rank, unit, edge), ended), again, closed in results:
        assert name == again[0] == "PipelineError"
        assert rank == 2 and unit == "F1.0" and "stage 2" in edge, (text, rank, unit, edge, results)
        assert f"rank 2 is gone, last seen in F1.0 ({edge}" in text
        assert ended - killed < AT_ONCE and again[3] - ended < AT_ONCE and closed - again[3] < AT_ONCE


def step_until_it_fails(rank: int, pipe: Connection, trapped: int = -1, asleep: int = -1, **limits: Any) -> Any:
    """A good step unless a rank falls asleep before it, and others until one fails; a rank may be trapped in its second
    one. Returns what it ends with, and when the engine is closed."""
    engine = make(rank, pipe, trapped_at=M * K + K + 1 if rank == trapped else 0, **limits)
    if asleep < 0:
        engine.step(TOKENS, target=TARGET)
    pipe.send(("result", "ready"))
    if rank == asleep:
        time.sleep(120)

    def steps() -> None:
        while True:
            engine.step(TOKENS, target=TARGET)

    failure = outcome(steps)
    engine.close()
    if limits:  # where nobody is killed
        dist.destroy_process_group()
    return failure, time.monotonic()


def test_the_host_of_the_launchers_store_is_killed(hosts: tuple[Host, Host]) -> None:
    """Neighbours of a rank there name it, the others the store; nobody waits."""
    with PipedProcesses(P, join_and_run, partial(join, hosts, PORT + 4), step_until_it_fails, 2) as ranks:
        assert [ranks.result(rank) for rank in range(P)] == ["ready"] * P
        assert ranks.result(2) == "in the trap"
        for rank in (0, 1):
            os.kill(ranks.processes[rank].pid, signal.SIGKILL)
        killed = time.monotonic()
        (name, text, _, ended), closed = ranks.result(3)
        ranks.processes[2].kill()
    assert name == "PipelineError" and ended - killed < AT_ONCE and closed - ended < AT_ONCE
    assert re.search(rf"lost the launcher's store at {hosts[1].name}:{PORT + 4}|rank [01] is gone", text), text


def test_a_rank_that_is_killed_before_its_first_step(hosts: tuple[Host, Host]) -> None:
    """Long before ``Limits.first_step``, though nobody waits for a message of that rank."""
    with PipedProcesses(P, join_and_run, partial(join, hosts, PORT + 2), step_until_it_fails, -1, 3) as ranks:
        assert [ranks.result(rank) for rank in range(P)] == ["ready"] * P
        time.sleep(0.5)
        os.kill(ranks.processes[3].pid, signal.SIGKILL)
        killed = time.monotonic()
        results = [ranks.result(rank) for rank in range(3)]
    for (name, text, (rank, _, _), ended), _ in results:
        assert name == "PipelineError" and rank == 3 and "rank 3 is gone" in text
        assert ended - killed < AT_ONCE


def test_a_link_that_goes_down(hosts: tuple[Host, Host]) -> None:
    """No connection ends: only time tells. The processes end by themselves, too.

    A rank that waits for a step's first message, which tells the length, allows for a new one: ``Limits.first_step``.
    """
    host = hosts[1]
    short = partial(step_until_it_fails, limits=Limits(step=2.0, first_step=15.0))
    with PipedProcesses(P, join_and_run, partial(join, hosts, PORT + 3), short) as ranks:
        assert [ranks.result(rank) for rank in range(P)] == ["ready"] * P
        with contextlib.ExitStack() as undo:
            undo.callback(host.run, "ip", "link", "set", INTERFACE, "up")
            host.run("ip", "link", "set", INTERFACE, "down")
            down = time.monotonic()
            results = [ranks.result(rank) for rank in range(P)]
            for process in ranks.processes:
                process.join(20)
    assert [process.exitcode for process in ranks.processes] == [0] * P
    for (name, text, (rank, _, _), ended), _ in results:
        assert name == "PipelineError" and rank is not None, text
        assert 1.0 < ended - down < 15.0 + 10.0
