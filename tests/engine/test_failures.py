"""Does a step end on every rank, with the cause, when a rank fails, dies, sleeps or is interrupted? Real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import AT_ONCE, PipedProcesses, outcome, running, shared_memory_names
from slices import each_value
from tiny_model import batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import nn
from traps import CONFIG, K, M, P, Trapped, trap_weights

from seq1f1b import Limits, PipelineEngine

LENGTH = 8
TOKENS, TARGET = batch(CONFIG, M, LENGTH, size=1)


def make_engine(stage: nn.Module, kind: str, **options: Any) -> PipelineEngine:
    counts = {"num_microbatches": M, "num_segments": K}
    return PipelineEngine(stage, **counts, loss_fn=cross_entropy, transport=kind, **options)


def step_into_a_trap(
    rank: int, pipe: Connection, kind: str, trapped: int, at: str, trap_kind: str, options: dict
) -> Any:
    """A good step, one in which rank ``trapped`` meets its trap, and after a failure that all survive a good one."""

    def trap() -> None:
        pipe.send(("trap", time.monotonic()))
        if trap_kind == "raise":
            raise ValueError("no such token")
        while True:  # killed, or asleep for good
            time.sleep(1)

    stage = Trapped(rank, trap=trap)
    engine = make_engine(stage, kind, **options)
    trap_weights(engine, stage)
    limits = options.get("limits", Limits())
    if limits.first_step > limits.step:  # else the trap is in the first one
        engine.step(TOKENS, target=TARGET)
    pipe.send(("ready", os.getpid()))
    stage.calls, stage.at = 0, at if rank == trapped else ""
    found = outcome(lambda: engine.step(TOKENS, target=TARGET))
    if trap_kind != "raise":
        return found, stage.last_work
    stage.at = ""
    engine.step(TOKENS, target=TARGET)  # until all have met again
    stage.zero_grad()
    engine.step(TOKENS, target=TARGET)
    gradients = {n.removeprefix("stage."): p.grad.numpy() for n, p in engine.named_parameters()}
    engine.close()
    return found, gradients


TRANSPORTS = ["shm", "c10d"]


@pytest.mark.parametrize(
    ("trapped", "at", "kind"),
    each_value([(0, "F1.1"), (1, "B0.1"), (2, "F2.0"), (0, "W0.0"), (1, "W1.1")], list(TRANSPORTS)),
)
def test_a_rank_that_raises(tmp_path: Path, kind: str, trapped: int, at: str) -> None:
    """Before W of a unit its products wait: no later step may find them."""
    options = {"schedule": "seq-zb-h1"} if at[0] == "W" else {}
    with running(P, tmp_path, step_into_a_trap, kind, trapped, at, "raise", options) as ranks:
        for rank in range(P):
            ranks.result(rank)
        raised = ranks.result(trapped)
        results = [ranks.result(rank) for rank in range(P)]
    unit = f"[{trapped}]{at}"
    for rank, ((name, text, attributes, ended), _) in enumerate(results):
        if rank == trapped:
            assert (name, text) == ("ValueError", f"{unit}: no such token")
        else:
            assert (name, text) == (
                "PipelineError",
                f"rank {trapped} ended the step: {unit}: ValueError: no such token",
            )
            assert attributes[0] == trapped
        assert ended - raised < AT_ONCE
    _, truth = run_whole(whole_model(CONFIG), TOKENS, TARGET, M)
    found = {name: torch.from_numpy(g) for _, own in results for name, g in own.items()}
    assert gradient_error(found, truth) <= 1e-10


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("at", ["F1.0", "B1.1"])
def test_a_rank_that_is_killed(tmp_path: Path, kind: str, at: str) -> None:
    """Seen at once, long before any time-out; nothing of the pipeline has a name that could be left."""
    before = shared_memory_names()
    with running(P, tmp_path, step_into_a_trap, kind, 1, at, "sleep", {}) as ranks:
        pids = [ranks.result(rank) for rank in range(P)]
        ranks.result(1)
        time.sleep(0.5)  # over c10d progress is published five times a second
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        results = {rank: ranks.result(rank) for rank in (0, 2)}
    for (name, text, (rank, unit, edge), ended), _ in results.values():
        assert name == "PipelineError" and rank == 1
        assert f"rank 1 is gone, last seen in {at} " in text and unit == at
        assert edge in (
            "activations of stage 1 to stage 2",
            "gradients of stage 1 to stage 0",
            "activations of stage 0 to stage 1",
            "gradients of stage 2 to stage 1",
        )
        assert ended - killed < AT_ONCE
    assert shared_memory_names() <= before


@pytest.mark.parametrize(
    ("limits", "kind"),
    # Over c10d progress is published five times a second: a limit has to be well above that to name the unit.
    each_value(
        [{"limits": Limits(step=2.0, first_step=100.0)}, {"limits": Limits(step=2.0, first_step=2.0)}], TRANSPORTS
    ),
)
def test_a_rank_that_sleeps(tmp_path: Path, kind: str, limits: dict) -> None:
    """Named with its unit and seconds by those who wait for it, directly or not."""
    with running(P, tmp_path, step_into_a_trap, kind, 1, "F2.1", "sleep", limits) as ranks:
        for rank in range(P):
            ranks.result(rank)
        asleep = ranks.result(1)
        results = [ranks.result(rank) for rank in (0, 2)]
        ranks.processes[1].kill()
    first_work = min(last_work for _, last_work in results)
    for (name, text, (rank, unit, _), ended), _ in results:
        assert name == "PipelineError" and rank == 1 and unit == "F2.1"
        assert "rank 1 has been in F2.1 for " in text
        # The rank that began to wait first tells the other, maybe before the sleeping rank fell asleep.
        assert ended - first_work >= limits["limits"].step
        assert ended - asleep < limits["limits"].step + AT_ONCE


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_an_interrupt_during_a_wait(tmp_path: Path, kind: str) -> None:
    with running(P, tmp_path, step_into_a_trap, kind, 1, "F2.0", "sleep", {}) as ranks:
        pids = [ranks.result(rank) for rank in range(P)]
        ranks.result(1)
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGINT)
        sent = time.monotonic()
        first, last = ranks.result(0)[0], ranks.result(2)[0]
        ranks.processes[1].kill()
    assert last[0] == "KeyboardInterrupt" and last[3] - sent < AT_ONCE
    assert first[0] == "PipelineError" and first[2][0] == 2 and "KeyboardInterrupt" in first[1]
    assert first[3] - sent < AT_ONCE


# -- an error of the next step -----------------------------------------------------------------------------------------


def endings(count: int, before: Callable[[int], None], call: Callable[[], Any]) -> Any:
    """Names and texts of what so many calls end with, ``before(n)`` each of them."""
    found = []
    for n in range(count):
        before(n)
        found.append(outcome(call)[:2])
    return found


def ahead_by_an_error(results: list[Any]) -> None:
    """The first call goes well on every rank, the second one ends with rank 0's error, the third one goes well."""
    text = "[0]F0.0: ValueError: no such token"
    assert results[0] == [("", ""), ("ValueError", "[0]F0.0: no such token"), ("", "")]
    for found in results[1:]:
        assert found == [("", ""), ("PipelineError", f"rank 0 ended the step: {text}"), ("", "")]


def raise_error() -> None:
    raise ValueError("no such token")


def fail_while_another_is_stopped(rank: int, pipe: Connection, kind: str) -> Any:
    """Rank 0 is late in the first step, whose last collective the others then wait in."""
    stage = Trapped(rank)
    engine = make_engine(stage, kind)

    def wait() -> None:
        pipe.send(("waits", 0))
        pipe.recv()

    def before(n: int) -> None:
        stage.calls, stage.at = 0, ""
        if rank == 0 and n < 2:
            stage.at, stage.trap = (f"B{M - 1}.0", wait) if n == 0 else ("F0.0", raise_error)
        elif n == 0:
            pipe.send(("pid", os.getpid()))
        elif rank == 0:
            pipe.send(("meets", 0))

    found = endings(3, before, lambda: engine.step(TOKENS, target=TARGET))
    engine.close()
    return found


def test_an_error_ends_no_collective_of_the_step_before(tmp_path: Path) -> None:
    """Rank 0 gives to the last collective of a step, fails in the next one and meets again before rank 1 looks.

    In shared memory rank 1 gives to it only after rank 0's units: tests/c/test_p2p.c has that collective alone.
    """
    with running(P, tmp_path, fail_while_another_is_stopped, "c10d") as ranks:
        _, pid, _ = [ranks.result(rank) for rank in range(P)]
        time.sleep(0.5)  # so that it waits in the collective
        os.kill(pid, signal.SIGSTOP)
        try:
            ranks.pipes[0].send("go")
            ranks.result(0)
            time.sleep(0.5)
        finally:
            os.kill(pid, signal.SIGCONT)
        ahead_by_an_error([ranks.result(rank) for rank in range(P)])


def fail_while_another_works(rank: int, pipe: Connection, kind: str, late: str) -> Any:
    """Rank 1 is late in the first evaluation, which rank 0 has left then, and in which rank 2 waits for rank 1."""
    stage = Trapped(rank)
    engine = make_engine(stage, kind)
    engine.eval(TOKENS, target=TARGET)

    def wait() -> None:
        pipe.recv()
        if late == "raises":
            raise ValueError("too late")

    def before(n: int) -> None:
        stage.calls, stage.at = 0, ""
        if rank == 0 and n == 1:
            stage.at, stage.trap = "F0.0", raise_error
        elif rank == 1 and n == 0:
            stage.at, stage.trap = f"F{M - 1}.{K - 1}", wait
        elif rank == 0 and n == 2:
            pipe.send(("failed", 0))

    found = endings(3, before, lambda: engine.eval(TOKENS, target=TARGET))
    engine.close()
    return found


def let_rank_0_fail_first(ranks: PipedProcesses) -> list[Any]:
    ranks.result(0)
    time.sleep(0.3)  # rank 2 learns of it as it waits
    ranks.pipes[1].send("go")
    return [ranks.result(rank) for rank in range(P)]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_an_error_ends_no_unit_of_the_step_before(tmp_path: Path, kind: str) -> None:
    with running(P, tmp_path, fail_while_another_works, kind, "returns") as ranks:
        ahead_by_an_error(let_rank_0_fail_first(ranks))


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_an_error_that_comes_after_one_of_the_next_step(tmp_path: Path, kind: str) -> None:
    """It ends its step on every rank that is still there. The third calls of all ranks meet: rank 0 has left the second
    one by an error."""
    with running(P, tmp_path, fail_while_another_works, kind, "raises") as ranks:
        first, second, third = let_rank_0_fail_first(ranks)
    assert [name for name, _ in first[:2]] == ["", "ValueError"]
    assert second[0] == ("ValueError", f"[1]F{M - 1}.{K - 1}: too late")
    told = ("PipelineError", "rank 0 ended the step: [0]F0.0: ValueError: no such token")
    assert third[0] == third[1] == second[1] == told
    assert first[2] == second[2] == third[2] == ("", "")


# -- a rank that gives up between two steps ----------------------------------------------------------------------------


def give_up_between_steps(rank: int, pipe: Connection, kind: str) -> Any:
    engine = make_engine(stage_of(whole_model(CONFIG), CONFIG, rank, P), kind)
    engine.step(TOKENS, target=TARGET)
    pipe.send(("ready", rank))
    pipe.recv()
    if rank == 1:
        engine.fail("OSError: disk full")
        failed = outcome(lambda: None)
    else:  # one waits in a collective, the other in a step
        failed = outcome(lambda: engine.all_gather_object(0) if rank else engine.step(TOKENS, target=TARGET))
    pipe.send(("failed", failed))
    if rank == 2:  # code between steps that met the failure gives up as well
        engine.fail(failed[1])
    pipe.recv()
    losses = engine.step(TOKENS, target=TARGET)
    engine.close()
    engine.fail("too late to matter")
    return len(losses)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_that_gives_up_between_steps_ends_what_others_wait_for(tmp_path, kind):
    with running(P, tmp_path, give_up_between_steps, kind) as ranks:
        for rank in range(P):
            ranks.receive(rank)
        for pipe in ranks.pipes:
            pipe.send("go")
        start = time.monotonic()
        outcomes = [ranks.receive(rank)[1] for rank in range(P)]
        assert time.monotonic() - start < AT_ONCE
        for rank in (0, 2):
            name, text, (who, _, _), _ = outcomes[rank]
            assert (name, who) == ("PipelineError", 1) and "disk full" in text
        for pipe in ranks.pipes:
            pipe.send("go")
        assert [ranks.result(rank) for rank in range(P)] == [0, 0, M]
