"""Do units that compute all or some of their blocks again give the same gradients, and hold as little as is planned?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from order_runs import CONFIG, LENGTH, run_order
from tiny_model import batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import seq1f1b
from seq1f1b import LoopbackGroup, Memory, PipelineEngine, PipelineError, build_schedule
from seq1f1b.attention.unit import current
from seq1f1b.testing import run_ranks


def engine_of(stage, group=None, **options):
    """An engine that recomputes all units of two micro-batches in two segments, unless told otherwise."""
    given = {"num_microbatches": 2, "num_segments": 2, "loss_fn": squares, "memory": Memory(recompute="all")}
    return PipelineEngine(stage, group=group, **(given | options))


def squares(output, target):
    return (output.float() if output.dtype == torch.bfloat16 else output).sub(target).square().mean()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("gpipe", 8), ("seq1f1b", 3)])
def test_measured_bytes_fall_as_planned(name: str, most: int) -> None:
    """One of ``most`` units is held at a time where all run again, and some blocks' share of each; K and V stay."""
    tokens, target = batch(CONFIG, 4, 16)
    held, kv = [], []
    for recompute, share in (("none", 0.0), ("none", 0.5), ("none", 1.0), ("all", 0.0)):
        order = build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=2, recompute=recompute)
        memory = Memory(blocks=("blocks", share)) if share else Memory()
        reports = run_order(whole_model(CONFIG), order, tokens, target, memory=memory)[2]
        for report in reports:
            [stage] = report.stages
            assert stage.activation_bytes == stage.planned_activation_bytes
            assert stage.peak_live_units == stage.planned_live_units
            assert report.recomputed_units == 8 * (recompute == "all")
            assert report.recomputed_blocks == 8 * 4 * share
        held.append(reports[0].stages[0].activation_bytes)
        kv.append(reports[0].kv_bytes)
    kept, half, least, recomputed = held
    assert kept == most * recomputed > 0 and kv == [kv[0]] * 4
    assert half - least == pytest.approx(kept - half) and least < 0.25 * kept


# -- random numbers ----------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Notes by unit what it has made each time."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.made = stage, {}

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.stage(x), 0.4, training=self.training)
        unit = current()
        self.made.setdefault((unit.microbatch, unit.segment), []).append(y.detach().clone())
        return y


def with_dropout(group, recompute: str, rank: int = 0, num_stages: int = 1):
    tokens, target = batch(CONFIG, 3, LENGTH)
    stage = Dropping(stage_of(whole_model(CONFIG), CONFIG, rank, num_stages))
    sizes, memory = {"num_segments": 3, "segment_sizes": [1, 7, 5]}, Memory(recompute=recompute)
    options = {"num_microbatches": 3, "loss_fn": cross_entropy, "attention": "unchecked"} | sizes
    engine = engine_of(stage, group, memory=memory, **options)
    torch.manual_seed(7)
    engine.all_gather_object(None)  # ranks that are threads have one generator: nobody draws before all have seeded it
    losses = [*engine.step(tokens, target=target), *engine.step(tokens, target=target)]
    engine.all_gather_object(None)
    after = torch.rand(3)
    engine.close()
    return stage, losses, [p.grad for p in stage.parameters()], after


def test_dropout_is_bit_equal() -> None:
    """Both ways draw the same numbers, also afterwards."""
    _, *kept = with_dropout(LoopbackGroup(1)[0], "none")
    stage, *recomputed = with_dropout(LoopbackGroup(1)[0], "all")
    for a, b in zip(itertools.chain(*kept), itertools.chain(*recomputed), strict=True):
        assert torch.equal(a, b)
    made = list(stage.made.values())
    assert all(torch.equal(first, again) for each in made for first, again in (each[:2], each[2:]))
    assert not torch.equal(made[0][0], made[0][2]), "another step draws other numbers"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_dropout_in_compiled_code(backend: str) -> None:
    """F runs another graph than R, and both draw the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.5))
    inner.compile(backend=backend)
    stage = Dropping(inner)
    engine = engine_of(stage, attention="unchecked")
    engine.step(torch.randn(4, 12, 16), target=torch.zeros(4, 12, 16))
    assert all(torch.equal(first, again) for first, again in stage.made.values())


def test_dropout_of_ranks_that_are_threads() -> None:
    """They share a generator, so nobody may draw while another is in its forward."""

    def run(group):
        return with_dropout(group, "all", group.rank, 3)[0].made

    for made in run_ranks(3, run):
        assert all(torch.equal(first, again) for each in made.values() for first, again in (each[:2], each[2:]))


# -- with other things -------------------------------------------------------------------------------------------------


def test_autocast(tmp_path: Path) -> None:
    """R makes the gradient of a weight that autocast has cast in F, where nothing records (pytorch#158232)."""
    found = []
    for memory in (Memory(), Memory(recompute="all"), Memory(offload=tmp_path)):
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        engine = engine_of(stage, schedule="seq-zb-h1", num_microbatches=4, memory=memory)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = engine.step(torch.linspace(-1, 1, 4096).view(8, 32, 16), target=torch.zeros(8, 32, 16))
        report = engine.report()
        assert (report.recomputed_units > 0, report.moved_bytes > 0) == (
            memory.recompute == "all",
            bool(memory.offload),
        )
        found.append([*losses, *(p.grad for p in stage.parameters())])
    for own in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], own, strict=True))


def test_compiled_blocks_have_one_more_kind_of_graph() -> None:
    """At most 2 per code and grad mode, over uneven segments: F has gradients off, R has them on."""
    torch._dynamo.reset()
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, 23)
    _, truth = run_whole(model, tokens, target, 2)
    stage = stage_of(model, CONFIG, 0, 1)
    counter = CompileCounterWithBackend("aot_eager")
    for block in stage.blocks.values():
        block.compile(fullgraph=True, backend=counter)
    engine = engine_of(stage, num_segments=4, segment_sizes=[9, 2, 5, 7], loss_fn=cross_entropy)
    counts = []
    for step in (1, 2):
        engine.step(tokens, target=target)
        found = {name: p.grad for name, p in stage.named_parameters()}
        assert gradient_error(found, {name: step * g for name, g in truth.items()}) <= 1e-10
        counts.append(counter.frame_count)
    assert counts[0] <= 4 and counts[1] == counts[0]


# -- errors ------------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises where gradients are on, in one unit; so in its R."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self.at = stage, None

    def forward(self, x: Tensor) -> Tensor:
        unit = current()
        if torch.is_grad_enabled() and self.at == (unit.microbatch, unit.segment):
            raise ValueError("no such token")
        return self.stage(x)


def test_an_r_that_fails_is_named_and_the_next_step_works() -> None:
    tokens, target = batch(CONFIG, 2, LENGTH)
    model = whole_model(CONFIG)
    _, truth = run_whole(model, tokens, target, 2)

    def run(group):
        stage = Failing(stage_of(model, CONFIG, group.rank, 2))
        engine = engine_of(stage, group, loss_fn=cross_entropy)
        engine.step(tokens, target=target)
        stage.at = (1, 0) if group.rank == 1 else None
        error = ValueError if group.rank == 1 else PipelineError
        with pytest.raises(error, match=r"\[1\]R1.0: (ValueError: )?no such token"):
            engine.step(tokens, target=target)
        stage.at = None
        stage.zero_grad()
        engine.step(tokens, target=target)
        return {name.removeprefix("stage."): p.grad for name, p in engine.named_parameters()}

    found = {name: g for own in run_ranks(2, run) for name, g in own.items()}
    assert gradient_error(found, truth) <= 1e-10


class Counting(nn.Linear):
    """Counts in what it carried in; adds a loss that has a graph also where gradients are off."""

    in_place = leaves_once = False

    def forward(self, x: Tensor) -> Tensor:
        count = seq1f1b.carry_in(0, torch.zeros(1))
        if self.in_place:
            count += x.shape[1]
        with torch.enable_grad():
            y = super().forward(x)
            seq1f1b.add_loss(y.square().mean())
        if not (self.leaves_once and y.requires_grad and torch.is_grad_enabled()):
            seq1f1b.carry_out(0, count.detach() + x.shape[1])
        return y


def step_of_counting(recompute: str, **flags: bool) -> Tensor:
    torch.manual_seed(0)
    stage = Counting(3, 3)
    stage.__dict__.update(flags)
    options = {"num_microbatches": 1, "num_segments": 3, "loss_fn": lambda o, t: o.sin().mean()}
    engine = engine_of(stage, memory=Memory(recompute=recompute), **options)
    engine.step(torch.linspace(-1, 1, 36).view(2, 6, 3), target=torch.zeros(2, 6))
    return stage.weight.grad


def test_auxiliary_losses_with_a_graph_of_their_own_count_once() -> None:
    assert torch.equal(step_of_counting("none"), step_of_counting("all"))


def test_a_carried_state_that_is_changed_or_left_out_is_told() -> None:
    with pytest.raises(
        RuntimeError, match=r"\[0\]F0.1: the stage has changed its input, or a state that it carried in"
    ):
        step_of_counting("all", in_place=True)
    with pytest.raises(RuntimeError, match=r"\[0\]R0.2: stage 0 has carried out states \[\] in R, and \[0\] in F"):
        step_of_counting("all", leaves_once=True)


class Multiplying(nn.Linear):
    """Multiplies by the number of its forwards."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_verify_tells_of_a_stage_that_does_something_else_in_r() -> None:
    batch = {"inputs": torch.randn(2, 4, 3), "target": torch.zeros(2, 4)}
    for memory, is_right in ((Memory(), True), (Memory("all"), False)):
        options = {"num_microbatches": 1, "num_segments": 1, "loss_fn": lambda o, t: o.mean(), "memory": memory}
        assert engine_of(Multiplying(), **options).verify(**batch, show=False).ok is is_right


# -- some of a unit's blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "compiled", "message"),
    [
        (("blocks", True), None, "the share is True"),
        (("layers", 0.5), None, "stage 0 has no list of blocks named 'layers'"),
        (("head", 0.5), None, "'head' of stage 0 is a Linear, must be a ModuleList"),
        (("blocks", 1.0), "blocks.2", "Memory.blocks: blocks.2 of stage 0 is compiled"),
        (("blocks", 1.0), "", "Memory.blocks: the module of stage 0 is compiled"),
    ],
)
def test_what_is_refused(choice: Any, compiled: str | None, message: str) -> None:
    stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
    if compiled is not None:
        stage.get_submodule(compiled).compile(backend="eager")
    with pytest.raises(ValueError, match=message):
        PipelineEngine(stage, num_microbatches=1, memory=Memory(blocks=choice), group=LoopbackGroup(1)[0])


def test_a_callable_that_returns_no_share() -> None:
    stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
    engine = PipelineEngine(
        stage, num_microbatches=1, num_segments=2, loss_fn=cross_entropy, group=LoopbackGroup(1)[0],
        memory=Memory(blocks=("blocks", lambda unit: 2 * unit.segment)),
    )  # fmt: skip
    tokens, target = batch(CONFIG, 1, LENGTH)
    with pytest.raises(ValueError, match=r"the share of F0\.1 is 2, must be in 0\.\.1"):
        engine.step(tokens, target=target)
    assert not any("forward" in block.__dict__ for block in stage.blocks.values())
