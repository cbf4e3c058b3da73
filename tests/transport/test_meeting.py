"""Do ranks meet, however often each has tried, and does each of them hear why they do not?"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import resource
import signal
import socket
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import AT_ONCE, PipedProcesses, join_and_run, outcome, results_of, running
from slices import each_value, full_only
from torch import nn

from seq1f1b import Limits, PipelineEngine, PipelineError, transport
from seq1f1b.transport.meeting import Meeting, SharedStore

TRANSPORTS = ["shm", "c10d"]


def engine(**options: Any) -> PipelineEngine:
    options = {"num_microbatches": 2, "loss_fn": lambda y, target: (y - target).square().mean()} | options
    return PipelineEngine(nn.Linear(4, 4), **options)


def step(made: PipelineEngine) -> Any:
    x = torch.ones(2, 3, 4)
    return outcome(lambda: made.step(x, target=x))


# -- set-up ------------------------------------------------------------------------------------------------------------


def make_wrongly(rank: int, pipe: Connection, kind: str, options: dict[str, Any]) -> Any:
    """Rank 1 fails while the others wait for it, and then all make a good engine."""
    if rank == 1:
        time.sleep(1.0)
    began = time.monotonic()
    found = outcome(lambda: engine(transport=kind, **(options if rank == 1 else {})))
    waited = time.monotonic() - began
    if rank == 1:  # who comes so late that another attempt has begun joins that one
        time.sleep(1.0)
    good = engine(transport=kind, limits=Limits(step=30.0))
    ended = step(good)
    good.close()
    return found, waited, ended


@pytest.mark.parametrize(
    ("options", "error", "kind"),
    each_value(
        [
            ({"seq_dim": 0}, "ValueError: seq_dim is 0, must be at least 1"),
            ({"num_microbatches": None}, "TypeError: PipelineEngine needs num_microbatches=, or a plan as schedule="),
            ({"num_microbatches": None, "schedule": Path("/no/such/plan")}, "FileNotFoundError"),
        ],
        TRANSPORTS,
    ),
)
def test_a_rank_that_fails_before_it_comes(tmp_path: Path, kind: str, options: dict[str, Any], error: str) -> None:
    """The others wait with time-outs of minutes, and hear it at once."""
    results = results_of(3, tmp_path, make_wrongly, kind, options)
    for rank, ((name, text, attributes, _), waited, ended) in enumerate(results):
        if rank == 1:
            assert error.startswith(name)
        else:
            assert name == "PipelineError" and text.startswith(f"rank 1 ended the pipeline's set-up: {error}")
            assert attributes[0] == 1 and waited < AT_ONCE
        assert ended[0] == "", ended


def make_without_descriptors(rank: int, pipe: Connection, kind: str, free: int) -> Any:
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    if rank == 0:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, hard))
    began = time.monotonic()
    found = outcome(lambda: engine(transport=kind, limits=Limits(step=4.0)))
    return found, time.monotonic() - began


def join_over_tcp(port: int, run: int, rank: int) -> None:
    store = dist.PrefixStore(f"run {run}", dist.TCPStore("127.0.0.1", port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_rank_without_descriptors(kind: str) -> None:
    """Wherever in set-up they run out, the other rank hears it in time; from some number on, they are enough."""
    launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []
    for free in range(6):
        with PipedProcesses(
            2, join_and_run, partial(join_over_tcp, launchers.port, free), make_without_descriptors, kind, free
        ) as ranks:
            ((name, text, _, _), _), (others, waited) = [ranks.result(rank) for rank in range(2)]
        made.append(name == "")
        assert waited < 4.0 + AT_ONCE
        if name:
            assert "open files" in text, text
            assert others[0] == "PipelineError" and "open files" in others[1] and others[2][0] == 0, (free, others)
    assert made[-1] and not made[0], made


def come_late(rank: int, pipe: Connection, kind: str) -> Any:
    """Rank 1 comes when the others have given up twice; then all try until it works."""
    if rank == 1:
        time.sleep(6.0)
    found = []
    while len(found) < 10:
        limit = 1.5 if len(found) < 2 and rank != 1 else 30.0  # also that of the step, which a busy machine delays
        try:
            made = engine(transport=kind, limits=Limits(step=limit, first_step=limit))
        except PipelineError as error:
            found.append((str(error), error.rank))
        else:
            ended = step(made)
            made.close()
            return found, ended
    return found, None


@pytest.mark.parametrize("kind", ["c10d", *full_only(("shm",))])
def test_a_rank_that_does_not_come_is_named_and_may_come_late(tmp_path: Path, kind: str) -> None:
    results = results_of(3, tmp_path, come_late, kind)
    for rank, (found, ended) in enumerate(results):
        assert ended is not None and ended[0] == "", (found, ended)
        if rank != 1:
            assert found[0][0].startswith("rank 1 has not come to the pipeline's set-up for 2 s"), found
            assert all(lost == 1 for _, lost in found)


# -- recovery ----------------------------------------------------------------------------------------------------------


def fail_in_eval(rank: int, pipe: Connection, kind: str) -> Any:
    """The last rank fails in the last unit of an eval, which the first one has left well by then."""
    made = engine(transport=kind, limits=Limits(step=3.0, first_step=3.0))
    x = torch.ones(2, 3, 4)
    made.step(x, target=x)
    made.eval(x, target=x)
    done = outcome(lambda: made.eval(x, target=x if rank < 2 else torch.ones(2, 3, 5)))
    dist.barrier()
    again = meet_again(made)
    made.close()
    return done, again


def meet_again(made: PipelineEngine) -> list[tuple[str, str]]:
    """Steps until one goes well on every rank, or five have failed."""
    again: list[tuple[str, str]] = []
    everyones = ["not yet"]
    while any(everyones) and len(again) < 5:
        again.append(step(made)[:2])
        everyones = [""] * dist.get_world_size()
        dist.all_gather_object(everyones, again[-1][0])
    return again


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_ranks_meet_again_where_one_had_left_the_step_well(tmp_path: Path, kind: str) -> None:
    """Over c10d such a rank began all its transfers anew, and no rank ever took them."""
    results = results_of(3, tmp_path, fail_in_eval, kind)
    assert results[2][0][0] != ""
    for _, again in results:
        assert again[-1][0] == "", again


def interrupt_transfers(rank: int, pipe: Connection) -> Any:
    """Rank 1 gets a Ctrl-C just as a transfer has begun: each time a later one of the step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = engine(transport="c10d", limits=Limits(step=3.0, first_step=3.0))
    assert step(made)[0] == ""
    left = -1

    def interrupted(begin: Any) -> Any:
        def begin_and_interrupt(*args: Any, **options: Any) -> Any:
            nonlocal left
            work = begin(*args, **options)
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
            return work

        return begin_and_interrupt

    dist.isend, dist.irecv = interrupted(dist.isend), interrupted(dist.irecv)
    rounds = []
    for nth in range(1, 12, 2):
        left = nth if rank == 1 else -1
        ended = outcome(lambda: (made.step(torch.ones(2, 3, 4), target=torch.ones(2, 3, 4)), time.sleep(0.5)))[0]
        left = -1
        rounds.append((ended, meet_again(made)))
    made.close()
    return rounds


def test_an_interrupt_as_a_transfer_begins(tmp_path: Path) -> None:
    """Ranks that counted their transfers differently could never meet again."""
    results = results_of(3, tmp_path, interrupt_transfers)
    assert sum(ended == "KeyboardInterrupt" for ended, _ in results[1]) >= 4, results[1]
    for rounds in results:
        for _, again in rounds:
            assert again[-1][0] == "", again


def held(expected: tuple[int, int] | None = None) -> tuple[int, int]:
    """Descriptors and threads of this process. A thread that ends by itself may still be at the store: a while."""
    deadline = time.monotonic() + AT_ONCE
    while True:
        gc.collect()
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if expected in (None, found) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


STRUCK: dict[str, tuple[Any, str]] = {
    "fails": (lambda: divmod(1, 0), "ZeroDivisionError"),
    "is late": (partial(time.sleep, 10.0), "PipelineError"),
    "is interrupted": (partial(signal.raise_signal, signal.SIGINT), "KeyboardInterrupt"),
    "is killed": (partial(signal.raise_signal, signal.SIGKILL), ""),
}


def be_struck(rank: int, pipe: Connection, kind: str, how: str, turn: int) -> Any:
    """Rank 1 is struck as it comes to a round of a meeting. Returns how the attempt ended, and what stays of it."""

    def struck(meeting: Meeting, value: Any) -> list[Any]:
        if rank == 1 and meeting._round == turn:
            STRUCK[how][0]()
        return gather(meeting, value)

    engine(transport=kind).close()
    before, gather, _, began = held(), Meeting.gather, dist.barrier(), time.monotonic()  # all begin within the limit
    Meeting.gather = struck  # type: ignore[method-assign] # in this process alone
    limits = Limits(step=2.0, first_step=2.0)
    name, text, _, ended = outcome(lambda: engine(transport=kind, limits=limits).close())
    Meeting.gather = gather  # type: ignore[method-assign] # as it was
    if how == "is killed":
        return name, text, ended - began, before, before
    dist.barrier()
    after, made = held(before), engine(transport=kind)
    assert step(made)[0] == ""
    made.close()
    return name, text, ended - began, before, after


@pytest.mark.parametrize(("kind", "how", "turn"), each_value(TRANSPORTS, list(STRUCK), [2, 1, 0]))
def test_a_rank_that_is_struck_in_a_round_of_the_set_up(tmp_path: Path, kind: str, how: str, turn: int) -> None:
    """A late one may find that all have come to the last round, which the others have left meanwhile."""
    with running(3, tmp_path, be_struck, kind, how, turn) as ranks:
        for rank in (0, 2) if how == "is killed" else range(3):
            name, text, waited, before, after = ranks.result(rank)
            assert name == (STRUCK[how][1] if rank == 1 else "PipelineError"), (rank, name, text)
            assert rank == 1 or ("rank 1" in text and waited < 9.0), (rank, text, waited)
            assert after == before, (rank, before, after)


def interrupt_set_up(rank: int, pipe: Connection, kind: str) -> Any:
    """Rank 1 gets a Ctrl-C at one line of the transport's set-up after another. Returns what stays of its attempts."""
    folder = str(Path(transport.__file__).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell does in the background
    left = -1

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith((folder, socket.__file__)):
            return None
        left -= event == "line"
        if left == 0:
            signal.raise_signal(signal.SIGINT)
        return trace

    engine(transport=kind).close()
    before, after, ended = held(), [], []
    for line in range(3, 400, 36):
        left = line
        if rank == 1:
            sys.settrace(trace)
        try:
            made = engine(transport=kind, limits=Limits(step=0.5, first_step=1.0))
        except (KeyboardInterrupt, PipelineError) as error:
            ended.append(type(error).__name__)
        else:
            ended.append("")
            made.close()
            del made
        finally:
            sys.settrace(None)
        dist.barrier()
        after.append(held(before))
    made = engine(transport=kind)
    assert step(made)[0] == ""
    made.close()
    return before, after, ended


@pytest.mark.parametrize("kind", ["shm", *full_only(("c10d",))])
def test_an_interrupt_in_the_set_up_leaves_nothing(tmp_path: Path, kind: str) -> None:
    """An interrupt may come when there is a thread or a socket, and nobody yet to close it."""
    results = results_of(2, tmp_path, interrupt_set_up, kind)
    assert results[1][2].count("KeyboardInterrupt") >= 6, results[1][2]
    for before, after, ended in results:
        assert after == [before] * len(after), (before, after, ended)


def make_several(rank: int, pipe: Connection, kind: str, closes: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Keys in the launcher's store, and what the process holds, after one engine after another."""
    store, counts, places = dist.group.WORLD.get_group_store(), [], []
    for number in range(6):
        made = engine(transport=kind)
        assert step(made)[0] == ""
        if closes:
            made.close()
        del made
        dist.barrier()
        counts.append(store.num_keys())
        places.append(held(places[-1] if number > 1 else None))
        dist.barrier()
    return counts, places


@pytest.mark.parametrize(("kind", "closes"), [("shm", True), ("c10d", True), ("shm", False), ("c10d", False)])
def test_an_engine_leaves_next_to_nothing(tmp_path: Path, kind: str, closes: bool) -> None:
    """Each rank leaves one value of set-up in the store, over c10d also what it did last; no thread, no descriptor."""
    for counts, places in results_of(2, tmp_path, make_several, kind, closes):
        most = 2 if kind == "c10d" else 1
        assert [later - earlier for earlier, later in itertools.pairwise(counts)] == [2 * most] * 5, counts
        assert len(set(places[1:])) == 1, places


# -- who writes to the store -------------------------------------------------------------------------------------------


def forge(rank: int, pipe: Connection, secret: str) -> Any:
    """Somebody who reaches the launcher's store writes into it, over everything that ranks read there."""
    os.environ["SEQ1F1B_SECRET"] = secret
    made = engine(transport="c10d", limits=Limits(step=3.0))
    assert step(made)[0] == ""
    dist.barrier()  # a rank may end its step before the other one does
    os.environ["SEQ1F1B_SECRET"] = ""
    if rank == 0:
        stranger = SharedStore(dist.group.WORLD.get_group_store(), made._group._store.prefix)
        for name in ("failure/0", "progress/1", "progress/0"):
            stranger.set(name, b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    time.sleep(1.0)
    return step(made)


@pytest.mark.parametrize("secret", ["", "of this run"])
def test_what_a_stranger_writes_into_the_store_is_never_code(tmp_path: Path, secret: str) -> None:
    results = results_of(2, tmp_path, forge, secret)
    for name, text, _, _ in results:
        assert name == "PipelineError"
        assert ("is not signed with SEQ1F1B_SECRET" if secret else "not a value of a peer") in text, text


def meet_with(rank: int, pipe: Connection) -> Any:
    os.environ["SEQ1F1B_SECRET"] = f"secret {rank}"
    return outcome(lambda: transport.connect(None, "shm", timeout=3.0, arrival_timeout=3.0))


def test_ranks_with_different_secrets_do_not_meet(tmp_path: Path) -> None:
    results = results_of(2, tmp_path, meet_with)
    assert any("is not signed with SEQ1F1B_SECRET" in text for _, text, _, _ in results), results


def listening() -> set[str]:
    """Addresses at which this process listens."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list itself
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def listen(rank: int, pipe: Connection) -> Any:
    before = listening()
    made = engine(transport="c10d")
    ended = step(made)
    after = listening()
    dist.barrier()
    made.close()
    return ended[0], before, after


def test_no_port_is_opened_beside_the_launchers() -> None:
    """What a pipeline's processes listen on is gloo's, as without a pipeline; the store is this process's."""
    launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with PipedProcesses(2, join_and_run, partial(join_over_tcp, launchers.port, 0), listen) as ranks:
        results = [ranks.result(rank) for rank in range(2)]
    for ended, before, after in results:
        assert ended == "" and before and after <= before, (ended, before, after)
