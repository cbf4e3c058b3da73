"""Do edges between GPUs (stand-ins) take the first way that proves itself, whatever is wrong with the others?"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import running
from stand_in_engine import StandInEdges, StandInEngine
from stand_in_library import CORRUPT, FAILS, LOST, STALLED, stand_in
from tiny_model import Config, cross_entropy, stage_of, whole_model

from seq1f1b import PipelineError
from seq1f1b.device import edges
from seq1f1b.engine.options import agreement_of
from seq1f1b.testing import run_ranks
from seq1f1b.transport.agreement import Disagreement, check_agreement

CONFIG = Config(kv_heads=2)
SIZE = StandInEdges.proof_bytes


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()
    stand_in().reset(3)
    yield
    stand_in().damage("", 0, CORRUPT)  # nothing that a test has stopped stays


class Outcome(NamedTuple):
    """By rank: the transport of each edge, and why; or the error. And the warnings of all."""

    carried: list[dict[tuple[int, int], str]]
    whys: list[list[str]]
    errors: list[str]
    warned: list[str]


def settle(P: int = 2, transport: str = "auto", two_hosts: bool = False) -> Outcome:
    """Makes engines and closes them. With two hosts, rank 0 is alone on the first."""
    model = whole_model(CONFIG)

    def run(group: Any) -> Any:
        if two_hosts:
            group.transport_to = lambda peer: "c10d" if {group.rank, peer} == {0, 1} else "loopback"
        stage = stage_of(model, CONFIG, group.rank, P)
        options: dict[str, Any] = {"num_microbatches": 4, "num_segments": 2, "loss_fn": cross_entropy}
        try:
            engine = StandInEngine(stage, group=group, transport=transport, **options)
        except (RuntimeError, ZeroDivisionError) as error:
            return {}, [], str(error)
        found = engine.edges
        engine.close()
        assert all((e.rate > 0) == (e.transport in ("copy", "nccl")) for e in found)
        return {(e.source_stage, e.destination_stage): e.transport for e in found}, [e.why for e in found], ""

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        carried, whys, errors = zip(*run_ranks(P, run), strict=True)
    warned = [str(w.message) for w in caught if "transport=" in str(w.message)]
    return Outcome(list(carried), list(whys), list(errors), warned)


def hold_refused(found: Outcome, way: str, instead: str, reason: str, remedy: str) -> None:
    """One warning names edge, reason and remedy, and all edges go another way."""
    assert found.errors == ["", ""]
    assert found.carried == [dict.fromkeys(found.carried[0], instead)] * 2
    [warned] = found.warned
    for part in (" of stage ", f"transport={way!r} failed its proof and is not used", reason, remedy):
        assert part in warned, warned


Plant = Callable[[pytest.MonkeyPatch], None]


def refuse(function: str, result: int, index: int = 0) -> Plant:
    return lambda patch: stand_in().fail_call(function, index, result)


def damage(function: str, size: int, kind: int) -> Plant:
    return lambda patch: stand_in().damage(function, size, kind)


def lose(sends: bool, result: int) -> Plant:
    return lambda patch: stand_in().fault(sends, 0, 1, 0, result)


# What fails in copies of one edge, or of all, and what the warning says of it.
COPIES = {
    "export of memory": (refuse("cuIpcGetMemHandle", 801), "cuIpcGetMemHandle"),
    "opening memory": (refuse("cuIpcOpenMemHandle", 205), "cuIpcOpenMemHandle: CUDA_ERROR_MAP_FAILED"),
    "memory of a place": (refuse("cuMemAlloc_v2", 2), "bytes for a message: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"),
    "the copy": (refuse("cuMemcpyAsync", 1), "cuMemcpyAsync: CUDA_ERROR_INVALID_VALUE"),
    "bytes": (damage("cuMemcpyAsync", SIZE, CORRUPT), "1 of 65535 bytes arrived wrong, the first is byte 65534"),
}


@pytest.mark.parametrize("defect", COPIES)
def test_copies_that_fail_leave_their_edges_to_nccl(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, reason = COPIES[defect]
    plant(monkeypatch)
    found = settle()
    hold_refused(found, "copy", "nccl", reason, "docker run --ipc=host")
    assert all("the first that proved itself; copy: " in why and reason in why for why in found.whys[0])
    assert stand_in().complaints() == []


NCCL = {
    "the library": (lambda patch: patch.setenv("SEQ1F1B_NCCL", "libnothing.so"), "no NCCL"),
    "an id": (refuse("ncclGetUniqueId", 2), "ncclGetUniqueId: unhandled system error"),
    "creation": (refuse("ncclCommInitRankConfig", 2), "ncclCommInitRankConfig: unhandled system error"),
    "connecting": (refuse("ncclCommGetAsyncError", 6, index=-1), "remote process exited"),
    "a call": (refuse("ncclGroupEnd", 3), "ncclGroupEnd: internal error"),
    "the other process": (lose(False, FAILS), "remote process exited"),
    "a stalled receive": (lose(False, LOST), "its transfer has been under way for 0."),
    "bytes": (damage("nccl", SIZE, CORRUPT), "1 of 65535 bytes arrived wrong"),
}


@pytest.mark.parametrize("defect", NCCL)
def test_nccl_that_fails_leaves_its_edges_to_host_memory(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "EDGE_WAYS", (edges.NCCL,))  # as between hosts
    plant, reason = NCCL[defect]
    waits = defect in ("the other process", "a stalled receive")  # somebody, in vain
    # As somebody does where a call fails, which it does at once; on a busy machine the proof may end before it.
    for limit in (2.0, 20.0) if defect == "a call" else (0.4,) if waits else (StandInEdges.proof_limit_s,):
        monkeypatch.setattr(StandInEdges, "proof_limit_s", limit)
        plant(monkeypatch)
        found = settle()
        if found.warned and reason in found.warned[0]:
            break
    hold_refused(found, "nccl", "loopback", reason, "NCCL_DEBUG=INFO")
    assert all(f"no way between the GPUs proved itself; nccl: {why.split(': ')[1]}" in why for why in found.whys[0])
    assert stand_in().drain()  # what was aborted has ended


def test_copies_that_stall_are_an_error_that_names_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be aborted: every rank hears it, and none goes on beside them."""
    monkeypatch.setattr(StandInEdges, "proof_limit_s", 0.2)
    stand_in().damage("cuMemcpyAsync", SIZE, STALLED)
    for error in settle().errors:
        assert "of stage 0 to stage 1: messages by transport='copy' do not arrive (its transfer has been" in error
        assert 'start again with another transport=, as "nccl" or "shm"' in error


@pytest.mark.parametrize("transport", ["copy", "nccl"])
def test_a_transport_asked_for_by_name_is_not_replaced(transport: str) -> None:
    stand_in().damage("cuMemcpyAsync" if transport == "copy" else "nccl", SIZE, CORRUPT)
    found = settle(transport=transport)
    assert found.warned == [] and found.carried == [{}, {}]
    for error in found.errors:
        assert f"of stage 0 to stage 1: transport={transport!r} failed its proof: 1 of 65535 bytes" in error
        assert 'use transport="auto"' in error


def fails_in_its_proof(patch: pytest.MonkeyPatch, do: Callable[[], Any], rank: int = 1) -> None:
    """Does something in place of this rank's message."""
    known = edges.DeviceEdges._known_bytes

    def failing(self: edges.DeviceEdges, *arguments: Any) -> Any:
        if self.group.rank == rank:
            do()
        return known(self, *arguments)

    patch.setattr(edges.DeviceEdges, "_known_bytes", failing)


def test_a_rank_that_fails_ends_the_proof_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_in_its_proof(monkeypatch, lambda: 1 // 0)
    errors = settle(P=3).errors
    assert "by zero" in errors[1]
    assert all("rank 1 ended" in error and "by zero" in error for error in (errors[0], errors[2]))


@pytest.mark.parametrize("has_nccl", [True, False])
def test_edges_within_hosts_and_between_them(has_nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies reach one pair of ranks alone. Without NCCL between the others host memory carries all messages."""
    if not has_nccl:
        monkeypatch.setenv("SEQ1F1B_NCCL", "libnothing.so")
    carried = {edge: way for theirs in settle(P=3, two_hosts=True).carried for edge, way in theirs.items()}
    ways = ("nccl", "copy") if has_nccl else ("c10d", "loopback")
    assert carried == {(0, 1): ways[0], (1, 0): ways[0], (1, 2): ways[1], (2, 1): ways[1]}
    assert stand_in().complaints() == []


def test_a_place_without_memory_asks_torch_for_what_it_holds_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(True))
    stand_in().fail_call("cuMemAlloc_v2", 0, 2)
    assert set(settle().carried[0].values()) == {"copy"} and len(asked) == 1
    monkeypatch.setattr(StandInEdges, "proof_limit_s", 0.4)
    stand_in().fail_call("cuMemAlloc_v2", -1, 2)
    [warned, *_] = settle().warned
    assert "bytes for a message: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY" in warned


def test_ranks_that_share_a_gpu_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="ranks 1, 3 do not have a GPU each, and 4 are visible: give each"):
        edges._warn_of_shared_gpus(["a", "b", "c", "b"], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        edges._warn_of_shared_gpus(["a", "a"], 1)  # no other is there
        edges._warn_of_shared_gpus(["a", "b"], 2)


def dies_in_its_proof(rank: int, pipe: Connection) -> None:
    stand_in().reset(rank)
    stage = stage_of(whole_model(CONFIG), CONFIG, rank, 2)
    fails_in_its_proof(pytest.MonkeyPatch(), lambda: os._exit(0))
    with pytest.raises(PipelineError, match="rank 1 is gone"):
        StandInEngine(stage, num_microbatches=4, loss_fn=cross_entropy)


def test_a_process_that_dies_in_the_proof_is_named(tmp_path: Path) -> None:
    with running(2, tmp_path, dies_in_its_proof) as ranks:
        ranks.result(0)


def test_gpus_and_cpus_in_one_pipeline_are_refused() -> None:
    given: dict[str, Any] = {"num_microbatches": 2, "loss_fn": None}
    everyones = []
    for kind in ("cuda", "cpu"):
        engine = StandInEngine(torch.nn.Linear(1, 1), **given)
        everyones.append(agreement_of(engine._options, engine.schedule, engine.schedule, torch.device(kind)))
        engine.close()
    with pytest.raises(Disagreement, match=r'stages differs .*: cuda on rank 0; cpu \(which transport="shm" or "c10d"'):
        check_agreement(everyones)
