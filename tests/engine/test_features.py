"""Does a feature that is one file see every unit, and does a stage without features cost nothing for them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model

from seq1f1b import PipelineEngine, Schedule, build_schedule
from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.features import Feature, Received
from seq1f1b.engine.runner import FEATURES
from seq1f1b.engine.stage import StageStep
from seq1f1b.testing import run_ranks

P, M, K, LENGTH = 2, 3, 2, 8
CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=4)
NAMES = ["around", "returned", "left", "after_backward"]


class Counting(Feature):
    """What a new feature is: this class, a line in runner.py, and a field of the report for its figure."""

    def start(self, step: StageStep) -> bool:
        self.seen = {name: list[int]() for name in NAMES}
        return step.batch.training

    @contextmanager
    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        self.seen["around"].append(unit.cell)
        yield
        self.seen["left"].append(unit.cell)

    def returned(self, unit: LiveUnit, output: Any) -> None:
        assert isinstance(output, torch.Tensor)
        self.seen["returned"].append(unit.cell)

    def after_backward(self, unit: LiveUnit, received: Received) -> None:
        assert self._step.units[unit.cell] is unit
        self.seen["after_backward"].append(unit.cell)

    def figures(self) -> Mapping[str, Any]:
        return {"counted": len(self.seen["after_backward"]), "seen": self.seen}


def trainer(schedule: str, recompute: str) -> Callable[[Any], tuple[PipelineEngine, list[torch.Tensor]]]:
    """What each rank runs; the model is drawn here, before the ranks are threads."""
    model, data = whole_model(CONFIG), batch(CONFIG, M, LENGTH, size=1)
    order = build_schedule(schedule, num_ranks=P, num_microbatches=M, num_segments=K, recompute=recompute)
    return lambda group: train(group, stage_of(model, CONFIG, group.rank, P), order, *data)


def train(
    group: Any, stage: Any, order: Schedule, tokens: Any, target: Any
) -> tuple[PipelineEngine, list[torch.Tensor]]:
    engine = PipelineEngine(
        stage, schedule=order, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, group=group
    )
    for _ in range(2):
        stage.zero_grad()
        engine.step(tokens, target=target)
    return engine, [p.grad for p in stage.parameters() if p.grad is not None]


@pytest.mark.parametrize(("schedule", "recompute"), [("seq1f1b", "none"), ("seq1f1b", "all"), ("seq-zb-h1", "none")])
def test_a_new_feature_sees_every_unit(monkeypatch: pytest.MonkeyPatch, schedule: str, recompute: str) -> None:
    plain = [gradients for _, gradients in run_ranks(P, trainer(schedule, recompute))]
    monkeypatch.setattr("seq1f1b.engine.runner.FEATURES", (*FEATURES, Counting))
    steps = trainer(schedule, recompute)

    def run(group: Any) -> Any:
        engine, gradients = steps(group)
        record = engine._runner.last_step
        assert record is not None and record.total("counted") == M * K
        return record.figures[group.rank]["seen"], gradients

    twice = 2 if recompute == "all" else 1
    for (seen, gradients), expected in zip(run_ranks(P, run), plain, strict=True):
        cells = list(range(M * K))
        assert sorted(seen["after_backward"]) == cells
        for name in ("around", "left", "returned"):  # in F and in R
            assert sorted(seen[name]) == sorted(cells * twice), name
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_stage_without_parts_has_nothing_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step of a shape, in which features look and measure."""
    ends: list[tuple[int, int]] = []
    end = StageStep.end

    def watched(step: StageStep) -> None:
        if step.stage.num_stages == P:  # and not of a stage that is looked at by itself
            ends.append((len(step.features), len(step._around) + len(step._returned)))
        end(step)

    monkeypatch.setattr(StageStep, "end", watched)
    run_ranks(P, trainer("seq1f1b", "none"))
    first, second = ends[:P], ends[P:]
    assert all(parts > 0 and hooks > 0 for parts, hooks in first)
    assert second == [(0, 0)] * P
