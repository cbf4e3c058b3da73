"""Do messages pass between real processes as they were sent, and does every wait end, whatever happens to the peer?"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from core_extension import core
from processes import AT_ONCE, results_of, running

import seq1f1b
from seq1f1b import _C, PipelineError, transport
from seq1f1b.testing import run_ranks
from seq1f1b.transport import LoopbackGroup, RankGroup
from seq1f1b.transport.bootstrap import Handshake
from seq1f1b.transport.edges import place_tensor

PLACES = 2
EDGE = "activations of stage 0 to 1"

# -- processes ---------------------------------------------------------------------------------------------------------


def refuse(handshake: Handshake, name: str) -> socket.socket:
    raise ConnectionRefusedError("Connection refused")


def in_group(rank: int, pipe: Connection, kind: str, fn: Callable[..., Any]) -> Any:
    """What ``fn(group, pipe)`` returns on each rank of a group of its own."""
    if kind == "two hosts":  # rank 2 is elsewhere: it cannot dial the others
        if rank == 2:
            Handshake._dial = refuse
        kind = "auto"
    group = transport.connect(None, kind)
    try:
        return fn(group, pipe)
    finally:
        group.close()


# -- messages ----------------------------------------------------------------------------------------------------------


def send(end: object, n: int, tensors: list[torch.Tensor | None]) -> None:
    headers = [
        (0, _C.TENSOR_NONE, (), 0)
        if t is None
        else (transport.DTYPES.index(t.dtype), int(t.requires_grad), tuple(t.shape), t.data_ptr())
        for t in tensors
    ]
    core.edge_send(end, n, n % PLACES, headers)


def receive(end: object, n: int) -> list[torch.Tensor | None]:
    return [
        None if flags & _C.TENSOR_NONE else place_tensor(end, address, code, sizes)
        for code, flags, sizes, address in core.edge_wait(end, n, n % PLACES)
    ]


def open_both(group: RankGroup) -> tuple[object, object]:
    """The ends of rank 0 -> rank 1 and of rank 1 -> rank 0, as (out, back)."""
    ends = [
        group.edge_end((s, 1 - s), 1 - group.rank, s != group.rank, f"edge of stage {s} to {1 - s}") for s in (0, 1)
    ]
    return ends[group.rank], ends[1 - group.rank]


def begin(group: RankGroup, *ends: object) -> None:
    group.begin_step()
    for end in ends:
        core.edge_begin_step(end, PLACES)


def messages() -> list[list[torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    made: list[list[torch.Tensor | None]] = []
    for dtype in transport.DTYPES:
        bits = torch.randint(-128, 127, (3, 5, 16), generator=generator, dtype=torch.int8)
        made.append([bits.to(dtype) if dtype in (torch.bool, torch.complex64, torch.complex128) else bits.view(dtype)])
    for mib in (2, 8, 64):
        made.append([torch.randint(0, 255, (mib << 20,), generator=generator, dtype=torch.uint8)])
    made.append([torch.empty(0, 7, dtype=torch.bfloat16)])
    made.append([])
    made.append([torch.randn(3, 3, generator=generator), None, torch.arange(5), torch.tensor(2.5), None])
    return made


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    as_bytes = [t.reshape(-1).view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def exchange(group: RankGroup, pipe: Connection) -> int:
    """Both ranks send everything to each other, in three steps, with full places in both directions all the time."""
    out, back = open_both(group)
    expected = messages()
    count = len(expected)
    for _ in range(3):
        begin(group, out, back)
        for n in range(PLACES):
            core.edge_post(back, n, n)
        for n in range(PLACES):
            send(out, n, expected[n])
        for n in range(count):
            got = receive(back, n)
            assert len(got) == len(expected[n]) and all(map(same, got, expected[n])), f"message {n} changed"
            if n + PLACES < count:
                core.edge_post(back, n + PLACES, n % PLACES)
                send(out, n + PLACES, expected[n + PLACES])
        group.end_step(failed=False)
    return count


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_every_dtype_and_size(tmp_path: Path, kind: str) -> None:
    assert results_of(2, tmp_path, in_group, kind, exchange) == [len(messages())] * 2


def test_loopback_passes_the_same() -> None:
    assert run_ranks(2, lambda group: exchange(group, None)) == [len(messages())] * 2


# -- waits end: tests/engine/test_failures.py has more ----------------------------------------------------------------


def lose_a_peer_with_a_worker(group: RankGroup, pipe: Connection) -> tuple[str, float]:
    """Rank 1 is killed in F2.1, and a data loader's worker that it has forked lives on. What rank 0 hears, and when."""
    end = group.edge_end((1, 0), 1 - group.rank, group.rank == 0, "gradients of stage 1 to 0")
    begin(group, end)
    if group.rank == 1:
        if os.fork() == 0:
            time.sleep(AT_ONCE + 3)
            os._exit(0)
        group.barrier()
        _C.group_progress(group.group, "F2.1")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    core.edge_post(end, 0, 0)
    group.barrier()
    began = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        core.edge_wait(end, 0, 0)
    return str(caught.value), time.monotonic() - began


def test_a_worker_does_not_hide_the_death_of_its_rank(tmp_path: Path) -> None:
    """It must not keep the pipeline's sockets open. (It does keep gloo's: over c10d only time-outs help.)"""
    with running(2, tmp_path, in_group, "shm", lose_a_peer_with_a_worker) as ranks:
        text, seconds = ranks.result(0)
    assert "rank 1 is gone, last seen in F2.1 (waiting for gradients of stage 1 to 0" in text and seconds < AT_ONCE


# -- failed steps ------------------------------------------------------------------------------------------------------


def fail_and_go_on(group: RankGroup, pipe: Connection) -> list[Any]:
    """A chain 0 -> 1 -> 2. Rank 2 fails in step 2, when rank 0 has already left it; then all go on."""
    rank, last = group.rank, group.size - 1
    into = (
        group.edge_end((rank - 1, rank), rank - 1, True, f"activations of stage {rank - 1} to {rank}") if rank else None
    )
    out = group.edge_end((rank, rank + 1), rank + 1, False, EDGE) if rank < last else None
    errors = []

    def step(failing: bool) -> int:
        number = group.begin_step()
        for end in (into, out):
            if end is not None:
                core.edge_begin_step(end, PLACES)
        if into is not None:
            for n in range(PLACES if failing and rank == last else 1):
                core.edge_post(into, n, n)
            if failing and rank == last:
                time.sleep(0.3)
                raise ValueError("no such token")
            assert receive(into, 0)[0].item() == 41 + rank
        if out is not None:
            send(out, 0, [torch.tensor(42 + rank)])
            if failing and rank == 1:
                send(out, 1, [torch.tensor(0)])
                send(out, 2, [torch.tensor(0)])  # no place is granted: waits for the failure
        return number

    number = 0
    while number < 5:  # not a fixed count of attempts: rank 0 spends one on learning of the failure
        try:
            number = step(failing=number == 1 and not errors)
            group.end_step(failed=False)
        except (PipelineError, ValueError) as error:
            if isinstance(error, ValueError):
                group.fail(f"ValueError: {error}")
            errors.append((str(error), getattr(error, "rank", None)))
            group.end_step(failed=True)
        if number == 2 and rank == 0:
            time.sleep(1.0)  # so that it learns of the failure when it enters the next step
    return [number, errors, group.all_gather_object("x" * (10000 * rank + 1))]


@pytest.mark.parametrize("kind", ["shm", "c10d", "two hosts"])
def test_all_ranks_see_a_failure_and_go_on(tmp_path: Path, kind: str) -> None:
    numbers, errors, texts = zip(*results_of(3, tmp_path, in_group, kind, fail_and_go_on), strict=True)
    assert len(set(numbers)) == 1 and numbers[0] > 0
    text = "rank 2 ended the step: ValueError: no such token"
    again = f"{text} (in step 2; rank 0 heard of it in step 3)"  # so that all ranks come to step 4 together
    assert errors[0] == [("rank 2 ended step 2, which rank 0 had left well: ValueError: no such token", 2)]
    assert errors[1] == [(text, 2), (again, 2)]
    assert errors[2] == [("no such token", None), (again, 2)]
    assert all([len(t) for t in text] == [1, 10001, 20001] for text in texts)


def leave_an_edge_unused(group: RankGroup, pipe: Connection) -> list[float]:
    """A training step fails between two messages of an edge, an evaluation does not use it, a training step does."""
    end = group.edge_end((0, 1), 1 - group.rank, group.rank == 1, EDGE)
    begin(group, end)
    if group.rank == 0:
        for n in range(2):
            send(end, n, [torch.full((5,), float(n))])
    else:
        core.edge_post(end, 0, 0)
        receive(end, 0)
    group.barrier()
    if group.rank == 1:
        group.fail("ValueError: no such token")
    while _C.group_failure(group.group) is None:
        time.sleep(0.01)
    group.end_step(failed=True)
    group.begin_step(training=False)
    group.end_step(failed=False)
    begin(group, end)
    found = []
    for n in range(2):
        if group.rank == 0:
            send(end, n, [torch.full((7,), float(n))])
        else:
            core.edge_post(end, n, n)
            found.append(receive(end, n)[0].sum().item())
    group.end_step(failed=False)
    return found


def test_an_edge_that_is_not_used_in_the_step_after_a_failure(tmp_path: Path) -> None:
    assert results_of(2, tmp_path, in_group, "c10d", leave_an_edge_unused) == [[], [0.0, 7.0]]


def exchange_after_a_failure(group: RankGroup, pipe: Connection | None) -> list[list[float]]:
    """Rank 1 leaves with a message on its way to it, and rank 0 waits for one that never comes.

    What this and a later pipeline exchange is of another size, for which gloo would end the process.
    """

    def swap(through: RankGroup, value: float) -> list[float]:
        mine = torch.full((5,), value + through.rank)
        return through.exchange(mine, [1 - rank], [1 - rank], mine)[1 - rank].tolist()

    def fail() -> None:
        group.begin_step()
        group.barrier()
        if rank == 1:
            time.sleep(0.2)
            group.fail("ValueError: no such token")
        else:
            with pytest.raises(PipelineError, match="no such token"):
                group.exchange(torch.zeros(3), [1], [1], torch.zeros(3))
        group.end_step(failed=True)

    rank = group.rank
    fail()
    group.begin_step()
    found = [swap(group, 10.0), swap(group, 20.0)]
    group.end_step(failed=False)
    if pipe is None:
        return found
    fail()
    later = transport.connect(None, "shm")
    later.begin()
    later.begin_step()
    found.append(swap(later, 30.0))
    later.end_step(failed=False)
    later.close()
    return found


@pytest.mark.parametrize("kind", ["shm", "c10d"])
def test_exchanges_take_nothing_from_one_that_failed(kind: str, tmp_path: Path) -> None:
    found = results_of(2, tmp_path, in_group, kind, exchange_after_a_failure)
    assert found == [[[10.0 * n + 1 - rank] * 5 for n in (1, 2, 3)] for rank in range(2)]


def test_exchanges_of_threads_take_nothing_from_one_that_failed() -> None:
    found = run_ranks(2, lambda group: exchange_after_a_failure(group, None))
    assert found == [[[10.0 * n + 1 - rank] * 5 for n in (1, 2)] for rank in range(2)]


# -- set-up ------------------------------------------------------------------------------------------------------------


def open_and_close(group: RankGroup, pipe: Connection) -> tuple[int, int, list[int]]:
    """Arenas mapped beside the first pipeline's once a second one is closed: while a tensor lies in one, and after."""

    def count_arenas() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:seq1f1b")

    before = count_arenas()
    second = transport.connect(None, "shm")
    out, back = open_both(second)
    begin(second, out, back)
    core.edge_post(back, 0, 0)
    send(out, 0, [torch.arange(5)])
    (view,) = receive(back, 0)
    second.barrier()
    second.close()
    del second, out, back
    held, value = count_arenas() - before, view.tolist()
    del view
    return held, count_arenas() - before, value


def test_a_tensor_outlives_its_pipeline(tmp_path: Path) -> None:
    """Its arena and its group's block stay as long as it does."""
    assert results_of(2, tmp_path, in_group, "shm", open_and_close) == [(2, 0, [0, 1, 2, 3, 4])] * 2


def meet_all(handshakes: list[Handshake]) -> list[Any]:
    results: list[Any] = [None] * len(handshakes)

    names, tokens = [handshake.name for handshake in handshakes], [handshake.token for handshake in handshakes]
    unmet: list[dict[int, str]] = [{} for _ in handshakes]
    all_dialled = threading.Barrier(len(handshakes))

    def run(rank: int) -> None:
        try:
            unmet[rank] = handshakes[rank].dial(names, tokens)
            all_dialled.wait()
            above = range(rank + 1, len(handshakes))
            results[rank] = handshakes[rank].accept({r for r in above if rank not in unmet[r]}, tokens), unmet[rank]
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(handshakes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def close_all(results: list[Any]) -> None:
    for connections, _ in results:
        for connection in connections.values():
            connection.close()


def test_stranger_without_token_is_refused() -> None:
    handshakes = [Handshake(rank, timeout_s=20.0) for rank in range(3)]
    strangers = []
    for hello in (b"x" * 16 + b"\1" + b"\0" * 7, b"", handshakes[0].token + b"\7" + b"\0" * 7):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(handshakes[0].name)
        stranger.sendall(hello)
        if not hello:
            stranger.shutdown(socket.SHUT_WR)
        strangers.append(stranger)
    results = meet_all(handshakes)
    assert [(sorted(connections), unmet) for connections, unmet in results] == [
        ([1, 2], {}),
        ([0, 2], {}),
        ([0, 1], {}),
    ]
    for stranger in strangers:
        stranger.settimeout(5)
        assert stranger.recv(1) == b"", "a stranger was answered"
        stranger.close()
    close_all(results)


def test_who_cannot_meet_says_so_and_the_others_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over c10d: rank 2 finds that another user answers, or nobody (another network namespace)."""
    dial, why = Handshake._dial, ["another user answers", "[Errno 111] Connection refused"]
    uid, caller = os.getuid(), threading.local()

    def dial_as(handshake: Handshake, name: str) -> socket.socket:
        caller.rank = handshake.rank
        return dial(handshake, name + "-elsewhere" if handshake.rank == 2 and name == handshakes[1].name else name)

    monkeypatch.setattr(Handshake, "_dial", dial_as)
    monkeypatch.setattr("seq1f1b.transport.bootstrap._peer_uid", lambda _: uid + (getattr(caller, "rank", 0) == 2))
    handshakes = [Handshake(rank, timeout_s=20.0) for rank in range(3)]
    results = meet_all(handshakes)
    assert [sorted(connections) for connections, _ in results] == [[1], [0], []]
    assert [unmet for _, unmet in results] == [{}, {}, dict(enumerate(why))]
    close_all(results)


def step_in_limited_space(rank: int, pipe: Connection, limits: dict[int, int], kind: str) -> int:
    """A step where the rank's address space is limited to so many GiB. Returns what an edge reserved."""
    if rank in limits:
        resource.setrlimit(resource.RLIMIT_AS, (limits[rank] << 30, limits[rank] << 30))
    engine, x = make_engine(kind), torch.ones(2, 4, 4)
    engine.step(x, target=x)
    engine.close()
    return engine._group.arena_bytes


@pytest.mark.parametrize("kind", ["shm", "c10d"])
@pytest.mark.parametrize("limits", [{}, {0: 16, 1: 16}, {0: 64, 1: 12}, {0: 8}, {1: 8}])
def test_edges_take_what_address_space_there_is(tmp_path: Path, kind: str, limits: dict[int, int]) -> None:
    """Both ends of an edge agree on it, whoever has less."""
    wanted = min(limits.values()) << 26 if limits else transport.ARENA_BYTES
    assert results_of(2, tmp_path, step_in_limited_space, limits, kind) == [wanted] * 2


def make_engine(kind: str) -> seq1f1b.PipelineEngine:
    stage, loss_fn = torch.nn.Linear(4, 4), torch.nn.functional.mse_loss
    return seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=loss_fn, transport=kind)


def go_on_alone(rank: int, pipe: Connection, kind: str, closes: bool, what: str) -> tuple[str, float]:
    """Rank 2 leaves after a step, and lives on. What the others hear, and after how many seconds."""
    engine, x = make_engine(kind), torch.ones(2, 4, 4)
    engine.step(x, target=x)
    begun = time.monotonic()
    if rank == 2:
        if closes:
            engine.close()
        del engine
        pipe.recv()
        return "", 0.0
    call = {"norm": lambda: engine.clip_grad_norm_(1.0), "step": lambda: engine.step(x, target=x)}[what]
    with pytest.raises(PipelineError) as caught:
        call()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.parametrize(
    ("kind", "closes", "what"), [("c10d", True, "step"), ("c10d", False, "norm"), ("shm", False, "step")]
)
def test_a_rank_that_has_left_is_heard_of_at_once(tmp_path: Path, kind: str, closes: bool, what: str) -> None:
    with running(3, tmp_path, go_on_alone, kind, closes, what) as ranks:
        for text, seconds in [ranks.result(rank) for rank in range(2)]:
            assert "the script of rank 2 has ended, or closed its engine (" in text, text
            assert "did its data end earlier?" in text and seconds < AT_ONCE, (text, seconds)
        ranks.pipes[2].send("go")


def test_a_message_for_which_there_is_no_address_space() -> None:
    groups = LoopbackGroup(2, arena_bytes=1 << 20)

    def step(rank: int) -> str:
        stage, loss_fn = torch.nn.Linear(64, 64), torch.nn.functional.mse_loss
        engine = seq1f1b.PipelineEngine(stage, num_microbatches=1, loss_fn=loss_fn, group=groups[rank])
        x = torch.ones(1, 8192, 64)
        with pytest.raises((ValueError, PipelineError)) as raised:
            engine.step(x, target=x)
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        for text in pool.map(step, range(2)):
            assert "bytes of address space); lift its limit: ulimit -v unlimited" in text, text


def test_no_address_space_at_all_is_explained() -> None:
    code = """
import resource
from seq1f1b.transport import LoopbackGroup
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
limit = used + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    LoopbackGroup(2)[0].edge_end((0, 1), 1, False, "edge")
    raise SystemExit("an edge was mapped")
except MemoryError as error:
    assert f"it may have {limit >> 20} MiB (ulimit -v)" in str(error), error
    assert str(error).endswith("lift the limit: ulimit -v unlimited"), error
LoopbackGroup(2, arena_bytes=1 << 22)[0].edge_end((0, 1), 1, False, "edge")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_arguments() -> None:
    groups = LoopbackGroup(2)
    with pytest.raises(ValueError, match="at least 1 rank"):
        LoopbackGroup(0)
    with pytest.raises(TypeError, match=r"LoopbackGroup\(P\)\[rank\]"):
        transport.connect(groups)
    with pytest.raises(TypeError, match="got str"):
        transport.connect("gloo")
    assert transport.connect(groups[1]) is groups[1]
    assert transport.connect(None).size == 1
    with pytest.raises(ValueError, match="timeout must be above 0"):
        groups[0].set_limits(0.0)
    end = groups[0].edge_end((0, 1), 1, False, EDGE)
    begin(groups[0], end)
    with pytest.raises(ValueError, match="17 tensors"):
        send(end, 0, [torch.zeros(1)] * 17)
    with pytest.raises(RuntimeError, match=f"{EDGE}, message 0: this is the sender's end"):
        core.edge_post(end, 0, 0)
