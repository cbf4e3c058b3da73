"""Does the engine train over edges between GPUs (stand-ins); do faults end a step?"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import shutil
import time
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import running
from slices import each_value
from stand_in_engine import StandInEdges, StandInEngine
from stand_in_library import CORRUPT, StandIn, stand_in
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import nn

from seq1f1b import _C, Limits, LoopbackGroup, PipelineEngine, PipelineError, init_process_group
from seq1f1b.cli import doctor
from seq1f1b.testing import run_ranks
from seq1f1b.transport.edges import TRANSPORTS

LENGTH = 16


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()  # what an engine of the last test still holds goes before the stand-ins forget it


def make_engine(model: Any, config: Config, rank: int, P: int, v: int = 1, **options: Any) -> StandInEngine:
    """The engine of a rank, four micro-batches of two segments unless told otherwise."""
    stages = [stage_of(model, config, i, P * v) for i in range(rank, P * v, P)]
    defaults = {"num_microbatches": 4, "num_segments": 2, "loss_fn": cross_entropy}
    return StandInEngine(stages, **defaults | options)


ORDERS = [("seq1f1b", 2, 1), ("seq1f1b", 3, 1), ("seq1f1b-interleaved", 2, 2)]
BETWEEN_GPUS = [name for name, row in TRANSPORTS.items() if row.between_gpus]


@pytest.mark.parametrize(("transport", "schedule", "P", "v", "queues"), each_value(BETWEEN_GPUS, ORDERS, [8, 1]))
def test_gradients_are_those_of_the_whole_model(transport: str, schedule: str, P: int, v: int, queues: int) -> None:
    stand_in().reset(P * queues, queues=queues)
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, 2 * P, LENGTH)
    losses, truth = run_whole(model, tokens, target, 2 * P)

    def run(group):
        engine = make_engine(
            model, config, group.rank, P, v, schedule=schedule, num_microbatches=2 * P, segment_sizes=[9, 7],
            group=group, transport=transport,
        )  # fmt: skip
        for _ in range(2):
            for p in engine.parameters():
                p.grad = None
            found = engine.step(tokens, target=target)
        evaluated = engine.eval(tokens, target=target)
        gradients = {name: p.grad for name, p in engine.named_parameters()}
        edges = {edge.transport for edge in engine.edges}
        engine.close()
        return found, evaluated, gradients, edges

    results = run_ranks(P, run)
    assert stand_in().complaints() == []
    gradients = {}
    for rank, (found, evaluated, of_rank, carried_by) in enumerate(results):
        gradients |= of_rank
        assert carried_by == {transport}
        for losses_of_rank in (found, evaluated):
            assert len(losses_of_rank) == (2 * P if rank == P - 1 else 0)
            for mine, theirs in zip(losses_of_rank, losses, strict=False):
                assert torch.allclose(mine, theirs, rtol=1e-12)
    assert gradient_error(gradients, truth) < 1e-10
    del results
    gc.collect()
    for kind in ("allocations", "communicators", "streams", "events"):
        assert stand_in().count(f"live_{kind}") == 0


@pytest.mark.parametrize("transport", BETWEEN_GPUS)
def test_a_report_has_the_times_of_the_gpu(transport: str) -> None:
    """A forward of 50 ms is one there, and the stage behind it waits that long."""
    stand_in().reset(6)
    config = Config()
    model = whole_model(config)
    tokens, target = batch(config, 4, LENGTH)

    def run(group):
        engine = make_engine(model, config, group.rank, 2, group=group, transport=transport)
        engine.step(tokens, target=target)
        before = stand_in().count("cuEventElapsedTime")
        engine.step(tokens, target=target)
        engine.all_gather_object(None)
        unread = stand_in().count("cuEventElapsedTime") == before
        engine.all_gather_object(None)
        handle = engine.modules()[0].register_forward_pre_hook(lambda *_: time.sleep(0.05 * (group.rank == 0)))
        engine.step(tokens, target=target)
        handle.remove()
        report = engine.report(gather=True)
        engine.step(tokens, target=target)
        asked, record = engine._runner, engine._runner.last_step
        engine.eval(tokens, target=target)
        asked.last_step = record  # as where verify has run since
        with pytest.raises(RuntimeError, match="read a report before the next step, eval or verify"):
            engine.report()
        engine.close()
        return unread, report

    (unread, report), (_, same) = run_ranks(2, run)
    first, second = report.ranks
    assert unread  # a step that nobody asks about reads no event
    assert str(report) == str(same) and {rank.clock for rank in report.ranks} == {"device"}
    for rank in report.ranks:
        spans = [span for _, *span in rank.timeline]
        assert all(a <= b for a, b in spans)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
        assert rank.busy == pytest.approx(sum(b - a for a, b in spans))
        assert rank.seconds >= rank.busy + rank.wait - 1e-6
    forwards = [b - a for unit, a, b in first.timeline if unit.kind == "F"]
    assert len(forwards) == 8 and min(forwards) > 0.05
    assert second.wait > 0.05 and report.makespan > 8 * 0.05
    assert report.tokens_per_second == pytest.approx(tokens.numel() / report.makespan)


def share_then_die(rank: int, pipe: Connection) -> None:
    """Memory and events of each process by handles; then one dies while the other waits for it on its device."""
    stand_in().reset(rank)
    config = Config(kv_heads=2)
    model = whole_model(config)
    tokens, target = batch(config, 4, LENGTH)
    engine = make_engine(model, config, rank, 2, segment_sizes=[9, 7], limits=Limits(step=30.0))
    assert {edge.transport for edge in engine.edges} == {"copy"}  # the first that proves itself
    for _ in range(4):
        for p in engine.parameters():
            p.grad = None
        engine.step(tokens, target=target)
    gradients = {name: p.grad for name, p in engine.named_parameters()}
    for theirs in engine.all_gather_object({name: g.tolist() for name, g in gradients.items()}):
        gradients |= {name: torch.tensor(g, dtype=torch.float64) for name, g in theirs.items()}
    assert gradient_error(gradients, run_whole(model, tokens, target, 4)[1]) < 1e-10
    assert stand_in().complaints() == []
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(PipelineError, match="rank 1 is gone") as caught:
        engine.step(tokens, target=target)
    assert caught.value.edge is not None and time.monotonic() - began < 20
    engine.close()


def test_copies_between_processes_and_a_process_that_dies(tmp_path: Path) -> None:
    with running(2, tmp_path, share_then_die) as ranks:
        ranks.result(0)


def test_the_doctor_tells_the_rate_of_each_edge_or_why_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(fn: Any, num_ranks: int, transport: str) -> list[list[str]]:
        if transport == "nccl":
            stand_in().damage("nccl", StandInEdges.proof_bytes, CORRUPT)

        def run(group: Any) -> list[str]:
            return doctor.sending_edges(group.rank, nn.Linear(1, 1), transport=transport, group=group)

        return run_ranks(num_ranks, run)

    stand_in().reset(1)  # once: engines that failed still hold what they have of it
    monkeypatch.setattr("seq1f1b.launch", launch)
    monkeypatch.setattr("seq1f1b.PipelineEngine", StandInEngine)
    lines = list(doctor.edges_between(3))
    for transport in ("copy", "auto"):
        told = [line for line in lines if line.startswith(f"transport={transport!r}: GPU ")]
        assert [line.split(": ")[1] for line in told] == [
            f"GPU {a} to GPU {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
        ]
        assert all(": copy, " in line and " GB/s, " in line for line in told)
    (failed,) = (line for line in lines if line.startswith("transport='nccl'"))
    assert "failed its proof" in failed
    assert len(lines) >= 4 * (1 + sum(row.between_gpus for row in TRANSPORTS.values())) - 3


def test_a_process_group_asks_for_hardware_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA starts; later the user is told. What the user has set stays."""
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *arguments, **options: None)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for has_started, given, found in ((False, None, "32"), (False, "4", "4"), (True, "4", "4"), (True, None, None)):
        monkeypatch.setattr("torch.cuda.is_initialized", lambda has_started=has_started: has_started)
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            init_process_group("gloo")
        assert os.environ.get(name) == found
        assert ["had started before" in str(warning.message) for warning in told] == [True] * (found is None)


def test_rocm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "6.4")

    class OnGpu(nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([SimpleNamespace(device=torch.device("cuda", 0))])

    with pytest.raises(ValueError, match=r"lie on cuda:0 of ROCm 6\.4: .* NVIDIA's GPUs alone; move the stages to the"):
        PipelineEngine(OnGpu(), num_microbatches=1, group=LoopbackGroup(1)[0])


def test_stages_on_the_cpu_are_refused() -> None:
    config = Config()

    def run(group):
        PipelineEngine(
            stage_of(whole_model(config), config, group.rank, 2),
            num_microbatches=2,
            loss_fn=cross_entropy,
            group=group,
            transport="nccl",
        )

    with pytest.raises(ValueError, match="moves messages between GPUs, the stages lie on cpu"):
        run_ranks(2, run)


def test_missing_libraries_are_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no CUDA driver: .*libnothing\.so"):
        _C.device_create("libnothing.so", 0)
    with pytest.raises(RuntimeError, match=r"no NCCL: .*libnothing\.so"):
        _C.nccl_find("libnothing.so")
    with pytest.raises(RuntimeError, match=r"libc\.so\.6 has no ncclGetVersion: it is too old, or another library"):
        _C.nccl_find("libc.so.6")
    old = shutil.copy(stand_in().path, tmp_path / "libnccl.so.2")
    StandIn(Path(old)).reset(0, nccl_version=21701)
    with pytest.raises(RuntimeError, match="is NCCL 21701, at least 21800 is needed"):
        _C.nccl_find(str(old))


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nccl") is None,
    reason="needs NCCL's Python package (pip install nvidia-nccl-cu13), of 200 MB",
)
def test_the_real_library() -> None:
    """Its version and ids."""
    package = importlib.util.find_spec("nvidia.nccl")
    assert package is not None and package.submodule_search_locations is not None
    path = f"{next(iter(package.submodule_search_locations))}/lib/libnccl.so.2"
    version, found = _C.nccl_find(path)
    assert version >= 21800 and found.endswith("libnccl.so.2")
    first, second = _C.nccl_unique_id(path), _C.nccl_unique_id(path)
    assert len(first) == len(second) == 128 and first != second
