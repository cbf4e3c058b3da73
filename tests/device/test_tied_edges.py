"""Do gradients of tied parameters go by edges between GPUs (stand-ins), to the same bits as over the host?"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes
from stand_in_engine import StandInEdges, StandInEngine
from stand_in_library import SENDER_FAILS, SENDER_LOST, stand_in
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException

import seq1f1b
from seq1f1b import Limits, PipelineEngine, PipelineError
from seq1f1b.device import edge_ways
from seq1f1b.testing import run_ranks
from seq1f1b.transport import RankGroup
from seq1f1b.transport.group import TIED

VOCAB, HIDDEN, TOKENS, P = 11, 7, 8, 3
WAYS = {way.name: way for way in edge_ways.WAYS}
BATCH = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
TARGET = seq1f1b.shift_labels(BATCH)
EMBEDDING_PIECES = -(-VOCAB * HIDDEN * 4 // StandInEdges.piece_bytes)  # gradients of 16-bit weights grow in float32
SCALE_PIECES = 1


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()
    stand_in().reset(5, foreign_memory=1)
    yield
    stand_in().end_faults()


class Part(nn.Module):
    """The first stage embeds, the last one is the head with the same weight; all three share a scale.

    Args:
        ties: names of what is listed.
    """

    def __init__(self, rank: int, ties: tuple[str, ...] = ("embedding", "scale"), is_used: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rank, self.is_used = rank, is_used
        self.scale = nn.Parameter(1 + torch.randn(HIDDEN, generator=generator) / 8)
        if rank != 1:
            self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.bfloat16()
        tied = {"scale": self.scale} | ({} if rank == 1 else {"embedding": self.weight})
        self.tied_parameters = {name: tied[name] for name in ties if name in tied}

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = F.embedding(x, self.weight)
        x = x * self.scale
        if self.rank == 2:
            x = F.linear(x, self.weight if self.is_used else self.weight.detach())
        return x


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def make_engine(kind: type[PipelineEngine], group: Any, stage: nn.Module | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"num_microbatches": 2, "num_segments": 2, "loss_fn": cross_entropy}
    return kind(Part(group.rank) if stage is None else stage, group=group, **defaults | options)


def gradients_of(engine: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in engine.named_parameters()}


def steps_of(kind: type[PipelineEngine], steps: int = 3, **options: Any) -> tuple[list[Any], list[Any]]:
    """By rank and step, gradients that grow; and ways of its edges for ties, by rank."""

    def run(group: Any) -> Any:
        engine = make_engine(kind, group, **options)
        found = []
        for _ in range(steps):
            engine.step(BATCH, target=TARGET)
            found.append(gradients_of(engine))
        edges = getattr(engine._pipeline.device_edges, "chosen", {})
        ways = {edge[:2]: chosen.transport for edge, chosen in edges.items() if edge.channel == TIED}
        engine.close()
        return found, ways

    found, ways = zip(*run_ranks(P, run), strict=True)
    return list(found), list(ways)


def assert_equal_bits(found: list[Any], truth: list[Any]) -> None:
    for theirs, expected in zip(found, truth, strict=True):
        for step, wanted in zip(theirs, expected, strict=True):
            assert step.keys() == wanted.keys() and all(torch.equal(step[name], wanted[name]) for name in wanted)


@pytest.fixture
def host_sends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every tensor that went to another rank over the host in an exchange."""
    sent: list[int] = []
    exchange = RankGroup.exchange

    def counted(group: Any, mine: Any, receivers: Any, senders: Any, like: Tensor) -> Any:
        sent.extend([0 if mine is None else mine.nbytes] * len(receivers))
        return exchange(group, mine, receivers, senders, like)

    monkeypatch.setattr(RankGroup, "exchange", counted)
    return sent


@pytest.mark.parametrize(("way", "queues"), [(way, 8) for way in WAYS] + [("nccl", 1)])
def test_bits_are_those_of_the_host(
    way: str, queues: int, host_sends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between first and last stage, too, which share no other edge; and of three copies, in the order of ranks."""
    truth, _ = steps_of(PipelineEngine)
    over_host = len(host_sends)
    if way == "host":
        for other in (edge_ways.Copies, edge_ways.Nccl):
            monkeypatch.setattr(other, "over", ())
    stand_in().set("queues", queues)
    found, ways = steps_of(StandInEngine, transport="auto" if way == "host" else way)
    assert_equal_bits(found, truth)
    assert all(torch.equal(truth[0][0][name], truth[2][0][name]) for name in ("embedding", "scale"))
    for rank, theirs in enumerate(ways):
        assert theirs == {edge: way for edge in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)) if rank in edge}
    first_values = 3  # rank 0's copies, as they were at first: one embedding, and two scales
    assert over_host == first_values + 3 * (2 + 6) and len(host_sends) - over_host == first_values
    assert stand_in().complaints() == []


@pytest.mark.parametrize("way", ["nccl", "copy"])
def test_every_byte_goes_by_its_edge(way: str) -> None:
    """A piece is one send, or one copy between GPUs and one out of its place; from the first step on."""
    functions = ["send" if way == "nccl" else "cuMemcpyAsync", "cuMemcpyDtoHAsync_v2"]

    def run(group: Any, ties: tuple[str, ...]) -> list[int]:
        engine = make_engine(StandInEngine, group, Part(group.rank, ties), transport=way)
        counts = []
        for _ in range(2):
            engine.all_gather_object(None)
            counts.append([stand_in().count(function) for function in functions])
            engine.all_gather_object(None)
            engine.step(BATCH, target=TARGET)
        engine.all_gather_object(None)
        counts.append([stand_in().count(function) for function in functions])
        engine.close()
        (_, host), (sent, to_host), (all_sent, _) = counts
        return [all_sent - sent, to_host - host]

    def count(*ties: str) -> list[int]:
        return run_ranks(P, lambda group: run(group, ties))[0]

    (without, host_without), (of_one, _), (of_both, host_of_both) = (
        count(),
        count("embedding"),
        count("embedding", "scale"),
    )
    calls = 1 if way == "nccl" else 2
    assert of_one - without == 2 * EMBEDDING_PIECES * calls
    assert of_both - of_one == 6 * SCALE_PIECES * calls
    assert host_of_both == host_without


def test_no_edge_without_a_trained_tie() -> None:
    def run(group: Any) -> int:
        stage = Part(group.rank)
        stage.scale.requires_grad_(False)
        if group.rank != 1:
            stage.weight.requires_grad_(False)
        engine = make_engine(StandInEngine, group, stage)
        edges = [edge.channel for edge in engine._pipeline.device_edges.chosen]
        reported = len(engine.edges)
        engine.close()
        return edges.count(TIED) or reported - len(edges)

    assert run_ranks(P, run) == [0, 0, 0]


def test_a_tie_that_is_listed_late_goes_over_the_host(host_sends: list[int]) -> None:
    """Beside another that has edges."""

    def run(group: Any, kind: type[PipelineEngine]) -> Any:
        stage = Part(group.rank, ("scale",) if group.rank < 2 else ())
        engine = make_engine(kind, group, stage)
        if group.rank != 1:
            stage.tied_parameters["embedding"] = stage.weight
        engine.step(BATCH, target=TARGET)
        found = gradients_of(engine)
        engine.close()
        return [found]

    truth = run_ranks(P, lambda group: run(group, PipelineEngine))
    assert host_sends.count(VOCAB * HIDDEN * 4) == 2 and host_sends.count(HIDDEN * 4) == 2
    host_sends.clear()
    assert_equal_bits(run_ranks(P, lambda group: run(group, StandInEngine)), truth)
    assert host_sends.count(VOCAB * HIDDEN * 4) == 2 and host_sends.count(HIDDEN * 4) == 0


def test_a_way_that_fails_leaves_ties_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning, which names the edge; the units' edges stay as they are."""
    truth, _ = steps_of(PipelineEngine, steps=2)
    make = edge_ways.Copies.make

    def refuse_ties(way: Any, edge: Any, *rest: Any) -> object:
        if edge.channel == TIED:
            raise RuntimeError("not here")
        return make(way, edge, *rest)

    monkeypatch.setattr(edge_ways.Copies, "make", refuse_ties)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, ways = steps_of(StandInEngine, steps=2)
    assert_equal_bits(found, truth)
    assert {way for theirs in ways for way in theirs.values()} == {"nccl"}
    warned = [str(w.message) for w in caught if "transport=" in str(w.message)]
    assert len(warned) == 1
    assert "tied gradients of stage 0 to stage 1 (and 5 more edges): transport='copy' failed its proof" in warned[0]


def test_a_rank_leaves_the_step_once_its_peers_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 has a gradient to give: it waits for nothing that others compute, and may fail in its next step."""
    exchange, has_received = StandInEdges.exchange, threading.Event()

    def slow(edges: Any, *arguments: Any) -> Any:
        found = exchange(edges, *arguments)
        if edges._group.rank == 2:
            time.sleep(0.3)
            has_received.set()
        return found

    monkeypatch.setattr(StandInEdges, "exchange", slow)

    def run(group: Any) -> Any:
        stage = Part(group.rank, ("embedding",), is_used=False)
        engine = make_engine(StandInEngine, group, stage, transport="nccl")
        engine.step(BATCH, target=TARGET)
        was_in_time = has_received.is_set() or group.rank != 0
        found = stage.weight.grad if group.rank == 2 else None
        engine.close()
        return was_in_time, found

    (first, _), _, (_, gradient) = run_ranks(P, run)
    assert first and gradient is not None and bool(gradient.any())


@pytest.mark.parametrize("way", ["copy"])  # NCCL's communicators do not survive it
def test_a_rank_that_fails_in_an_exchange_ends_the_step_of_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers hear why; gradients from before stay, and the next step goes well."""
    truth, _ = steps_of(PipelineEngine, steps=2)
    exchange, fails = StandInEdges.exchange, threading.Event()

    def fail_once(edges: Any, mine: Tensor, *arguments: Any) -> Any:
        if edges._group.rank == 2 and mine.numel() == HIDDEN and fails.is_set():
            fails.clear()
            raise OverflowError("not now")
        return exchange(edges, mine, *arguments)

    monkeypatch.setattr(StandInEdges, "exchange", fail_once)

    def run(group: Any) -> Any:
        engine, told = make_engine(StandInEngine, group, transport=way), ""
        engine.step(BATCH, target=TARGET)
        found = [gradients_of(engine)]
        engine.all_gather_object(None)
        fails.set()
        try:
            engine.step(BATCH, target=TARGET)
        except (PipelineError, OverflowError) as error:
            told = str(error)
        before = gradients_of(engine)
        engine.step(BATCH, target=TARGET)
        found.append(gradients_of(engine))
        engine.close()
        return told, before, found

    told, before, found = zip(*run_ranks(P, run), strict=True)
    assert told[2] == "not now"
    assert all("rank 2 ended" in text and "OverflowError: not now" in text for text in told[:2])
    assert_equal_bits(list(found), truth)
    for theirs, (expected, _) in zip(before, truth, strict=True):
        assert all(torch.equal(theirs[name], expected[name]) for name in theirs)


@pytest.mark.parametrize("kind", [SENDER_LOST, SENDER_FAILS])
def test_a_fault_of_a_transfer_is_named(kind: int) -> None:
    stand_in().fault(kind, 0, 2, len(StandInEdges.proof_sizes) + EMBEDDING_PIECES + 1)  # in the second step
    all_have_left = threading.Barrier(P)

    def run(group: Any) -> Any:
        stage, limits = Part(group.rank, ("embedding",)), Limits(step=1.0, first_step=1.0)
        engine = make_engine(StandInEngine, group, stage, transport="nccl", limits=limits)
        engine.step(BATCH, target=TARGET)
        try:
            engine.step(BATCH, target=TARGET)
        except PipelineError as error:
            return str(error), error.unit
        finally:
            all_have_left.wait(30)  # rank 1, which has no copy, is patient with the others
            engine.close()
        return "", ""

    found = run_ranks(P, run)
    for text, unit in (found[0], found[2]):
        assert re.search(r"tied gradients of stage [02] to stage [02], message \d \(tied gradients\)", text), text
        assert unit == "tied gradients"


def dies_in_an_exchange(rank: int, world: int, folder: str) -> None:
    """Over memory and events of each process by handles."""
    stand_in().reset(rank, foreign_memory=1, shared_memory=1)
    engine = make_engine(StandInEngine, None, Part(2 * rank, ("embedding",)), limits=Limits(step=30.0))
    truth = make_engine(PipelineEngine, None, Part(2 * rank, ("embedding",)))
    for _ in range(2):
        engine.step(BATCH, target=TARGET)
        truth.step(BATCH, target=TARGET)
    assert_equal_bits([[gradients_of(engine)]], [[gradients_of(truth)]])
    truth.close()
    ways = {chosen.transport for edge, chosen in engine._pipeline.device_edges.chosen.items() if edge.channel == TIED}
    assert ways == {"copy"} and stand_in().complaints() == []
    if rank == 1:
        StandInEdges.exchange = lambda *_: os._exit(0)  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(PipelineError, match="rank 1 is gone") as caught:
        engine.step(BATCH, target=TARGET)
    assert str(caught.value.edge).startswith("tied gradients") and time.monotonic() - began < 20
    Path(folder, "told").touch()
    os._exit(0)  # torch's own group misses rank 1


def test_a_process_that_dies_in_an_exchange_is_named(tmp_path: Path) -> None:
    with contextlib.suppress(ProcessExitedException):
        run_processes(2, dies_in_an_exchange, str(tmp_path))
    assert (tmp_path / "told").exists()
