"""Three stages of a small model that call a trap in one of their units, for tests of what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tiny_model import Config, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import PipelineEngine
from seq1f1b.engine.split_backward import WeightGradients

P, M, K = 3, 3, 2
CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=4)


class Trapped(nn.Module):
    """A stage that calls ``trap`` in one of its units.

    Attributes:
        at: the unit, as F1.0, B1.0 or I1.0; W after :func:`trap_weights`.
        calls: forwards so far.
        last_work: when the stage was last seen to work: no wait of its rank that is open began before.
    """

    def __init__(self, rank: int, at: str = "", trap: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.stage = stage_of(whole_model(CONFIG), CONFIG, rank, P)
        self.at, self.trap, self.calls = at, trap, 0
        self.last_work = 0.0

    def forward(self, x: Tensor) -> Tensor:
        unit = f"{self.calls // K % M}.{self.calls % K}"
        self.calls += 1
        y = self.stage(x)
        if self.at == f"F{unit}":
            self.trap()
        if y.requires_grad:
            y.register_hook(lambda grad: self.backward(unit, grad))
        self.last_work = time.monotonic()
        return y

    def backward(self, unit: str, grad: Tensor) -> None:
        self.last_work = time.monotonic()
        if self.at in (f"B{unit}", f"I{unit}"):
            self.trap()


def trap_weights(engine: PipelineEngine, stage: Trapped) -> None:
    """The stage calls its trap in W of a unit, too: once I has left its products, before W takes the first."""
    (feature,) = (f for f in engine._runner.stages[engine.rank].features if isinstance(f, WeightGradients))
    weight = feature.weight

    def trapped(cell: int, received: Any) -> None:
        if stage.at == f"W{cell // K}.{cell % K}":
            assert feature._step.units[cell].tape.products
            stage.trap()
        weight(cell, received)

    feature.weight = trapped  # type: ignore[method-assign]  # of this engine's stage alone
