"""Do units that compute some of their blocks again give the same gradients, and hold less?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from order_runs import CONFIG, LENGTH, run_order
from tiny_model import batch, cross_entropy, stage_of, whole_model
from torch import nn

from seq1f1b import LoopbackGroup, Memory, PipelineEngine, build_schedule


def uneven(unit: Any) -> float:
    """None of a micro-batch's first segment, half of the second, all of the others; half of the blocks elsewhere."""
    return 0.5 if unit.stage else min(1.0, 0.5 * unit.segment)


def test_a_share_for_every_unit(tmp_path: Path) -> None:
    """Also of units that go to a tier."""
    schedule = build_schedule("seq1f1b", num_ranks=2, num_microbatches=3, num_segments=3)
    tokens, target = batch(CONFIG, 3, LENGTH)
    model = whole_model(CONFIG)
    kept = run_order(model, schedule, tokens, target)
    options = {"memory": Memory(blocks=("blocks", uneven), offload=tmp_path)}
    losses, gradients, reports = run_order(model, schedule, tokens, target, **options)
    assert all(torch.equal(a, b) for a, b in zip(losses, kept[0], strict=True))
    assert all(torch.equal(g, kept[1][name]) for name, g in gradients.items())
    assert [report.recomputed_blocks for report in reports] == [3 * (0 + 2 + 4), 3 * 3 * 2]
    assert all(report.moved_units for report in reports)


def test_what_is_held_falls_as_planned() -> None:
    schedule = build_schedule("seq1f1b", num_ranks=2, num_microbatches=4, num_segments=2)
    tokens, target = batch(CONFIG, 4, 16)
    held = []
    for share in (0.0, 0.5, 1.0):
        _, _, reports = run_order(
            whole_model(CONFIG), schedule, tokens, target, memory=Memory(blocks=("blocks", share))
        )
        stages = [report.stages[0] for report in reports]
        assert all(stage.activation_bytes == stage.planned_activation_bytes for stage in stages)
        held.append([stage.activation_bytes for stage in stages])
    for kept, half, least in zip(*held, strict=True):
        assert half - least == pytest.approx(kept - half) and least < 0.25 * kept


def compiled(part: str) -> nn.Module:
    stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
    stage.get_submodule(part).compile(backend="eager")
    return stage


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        (("blocks", True), ValueError, "the share is True"),
        (("layers", 0.5), ValueError, "stage 0 has no list of blocks named 'layers'"),
        (("head", 0.5), ValueError, "'head' of stage 0 is a Linear, must be a ModuleList"),
    ],
)
def test_what_is_refused(choice: Any, error: type[Exception], message: str) -> None:
    stage = stage_of(whole_model(CONFIG), CONFIG, 0, 1)
    with pytest.raises(error, match=message):
        PipelineEngine(stage, num_microbatches=1, memory=Memory(blocks=choice), group=LoopbackGroup(1)[0])


@pytest.mark.parametrize(("part", "named"), [("blocks.2", "blocks.2"), ("", "the module")])
def test_what_is_compiled_is_refused(part: str, named: str) -> None:
    choice = ("blocks", 1.0)
    with pytest.raises(ValueError, match=f"Memory.blocks: {named} of stage 0 is compiled"):
        PipelineEngine(compiled(part), num_microbatches=1, memory=Memory(blocks=choice), group=LoopbackGroup(1)[0])


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
