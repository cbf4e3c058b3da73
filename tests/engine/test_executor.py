"""Does the walk keep what the program says: order, spans, peaks, slots, and nothing of one step in the next?"""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
from slices import each_value
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import _C, PipelineEngine, build_schedule
from seq1f1b.attention.unit import LiveUnit, current
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=4)
LENGTH = 12
_, WAIT, _, SEND, _ = range(5)  # opcodes
SHAPES = [
    ("seq1f1b", 1, 2, 3, 1), ("seq1f1b", 2, 1, 4, 0), ("seq1f1b", 4, 3, 2, 1),
    ("1f1b", 3, 4, 1, 0), ("gpipe", 2, 2, 3, 1),
]  # fmt: skip


class Recorded(nn.Module):
    """A stage that keeps an eye on its outputs, so that a test can tell whether they die."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.stage = stage_of(whole_model(CONFIG), CONFIG, index, num_stages)
        self.outputs: list[weakref.ref[Tensor]] = []
        self.units: list[weakref.ref[LiveUnit]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.stage(x)
        self.outputs.append(weakref.ref(y))
        unit = current()
        assert unit is not None
        self.units.append(weakref.ref(unit))
        return y


@pytest.mark.parametrize(("training", "name", "P", "M", "k", "prefetch"), each_value([True, False], SHAPES))
def test_the_walk(name: str, P: int, M: int, k: int, prefetch: int, training: bool) -> None:
    """Orders and peaks: test_random_steps.py; tests/c/test_executor.c has what is refused."""
    tokens, target = batch(CONFIG, M, LENGTH, size=1)

    def run(group: Any) -> None:
        rank = group.rank
        stage = Recorded(rank, P)
        engine = PipelineEngine(
            stage,
            schedule=partial(build_schedule, name, prefetch=prefetch),
            num_microbatches=M,
            num_segments=k,
            loss_fn=cross_entropy,
            group=group,
        )
        for _ in range(2):
            stage.outputs.clear()
            stage.units.clear()
            (engine.step if training else engine.eval)(tokens, target=target)
        executor = engine._runner.last_step.order.executor
        opcodes = [opcode for opcode, *_ in _C.executor_timeline(executor, rank)[0]]
        into, out = int(rank > 0) + training * int(rank < P - 1), int(rank < P - 1) + training * int(rank > 0)
        assert (opcodes.count(WAIT), opcodes.count(SEND)) == (into * M * k, out * M * k)
        assert training or _C.executor_stage_measure(executor, rank)[0] == 1

        gc.collect()
        alive = [ref for ref in stage.outputs if ref() is not None]
        assert not alive, f"{len(alive)} outputs outlive the step"
        assert len(stage.units) == M * k and current() is None
        assert all(ref() is None for ref in stage.units), "the step outlives its end"

    run_ranks(P, run)


def test_a_timeline_of_a_failed_step_ends_where_it_failed() -> None:
    tokens, target = batch(CONFIG, 2, LENGTH, size=1)
    stage = Recorded(0, 1)
    engine = PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=lambda output, target: output)
    with pytest.raises(ValueError, match=r"\[0\]F0.0: loss_fn must return a scalar"):
        engine.step(tokens, target=target)
    executor = engine._runner.order(training=True).executor
    walked, _ = _C.executor_timeline(executor, 0)
    assert walked[0][1] == _C.executor_last_unit(executor) and walked[0][3] > 0
    assert all((start, end) == (0, 0) for _, _, start, end in walked[1:])
    gc.collect()
    assert all(ref() is None for ref in stage.outputs), "a failed step holds its outputs"
    assert all(ref() is None for ref in stage.units), "a failed step outlives its end"


def test_an_executor_is_not_entered_twice() -> None:
    tokens, target = batch(CONFIG, 1, LENGTH, size=1)
    engine: PipelineEngine

    def again(output: Tensor, target: Tensor) -> Tensor:
        _C.executor_step(engine._runner.order(training=True).executor, 1, True, 0, None, None, None, None, None)
        return cross_entropy(output, target)

    engine = PipelineEngine(Recorded(0, 1), num_microbatches=1, loss_fn=again)
    with pytest.raises(RuntimeError, match="the executor is inside a step already"):
        engine.step(tokens, target=target)
    with pytest.raises(TypeError, match="handle"):
        _C.executor_last_unit(object())
