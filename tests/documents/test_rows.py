"""Does a step of rows, micro-batches of their own lengths and segments, train as the whole model does row by row?"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from tiny_model import cross_entropy, stage_of, whole_model
from tree_runs import CONFIG, Trees, cut, data_of

from seq1f1b import (
    LoopbackGroup,
    PipelineEngine,
    ScheduleError,
    build_schedule,
)
from seq1f1b.testing import run_ranks


def of_rows(rows: Any) -> Trees:
    return Trees(rows, [None] * len(rows))


def test_many_steps_leave_nothing_behind() -> None:
    """60 steps, no two alike: no descriptor more, at most 16 orders, slabs as large as the longest row needs."""
    rng = random.Random(3)
    longest = [[10, 10, 10, 10], [20, 20], [40], *[[1]] * 6]
    model = whole_model(CONFIG)
    steps: list[Any] = [longest]
    for _ in range(60):
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))]
        steps.append([cut(rng, length, rng.randint(1, min(4, length))) for length in lengths])

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2), num_microbatches=1, loss_fn=cross_entropy, group=group
        )
        seen = []
        for rows in steps:
            tokens, targets = data_of(of_rows(rows), size=1)
            engine.step(tokens, target=targets, segment_sizes=rows)
            seen.append((engine.report().kv_bytes, len(os.listdir("/proc/self/fd"))))
        assert len(engine._runner.orders) == 16
        return seen

    for seen in run_ranks(2, run):
        kv_bytes, descriptors = zip(*seen, strict=True)
        assert kv_bytes[-1] <= 7 / 3 * kv_bytes[0]  # a step of more short rows may hold more slots
        assert max(descriptors[20:]) <= descriptors[20] + 4


# -- bad input ---------------------------------------------------------------------------------------------------------


def step_alone(rows: Any, tokens: Any = None, targets: Any = None, **options: Any) -> None:
    engine = PipelineEngine(
        whole_model(CONFIG), num_microbatches=2, loss_fn=cross_entropy, group=LoopbackGroup(1)[0], **options
    )
    known = data_of(of_rows([[3, 2], [4]]))
    try:
        engine.step(tokens or known[0], target=targets or known[1], segment_sizes=rows)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], TypeError, "must be a list: for every micro-batch"),
        ("balanced", TypeError, "must be a list: for every micro-batch"),
        ([3, 2], TypeError, r"segment_sizes\[0\] of a step must be a list of token counts, got int"),
        ([[3, 2], []], ValueError, r"segment_sizes\[1\] is empty"),
        ([[3, 0], [4]], ValueError, r"segment_sizes\[0\]\[1\] is 0, must be at least 1"),
        ([[3, -2], [4]], ValueError, r"segment_sizes\[0\]\[1\] is -2"),
        ([[3, 2.0], [4]], TypeError, r"segment_sizes\[0\]\[1\] must be an int, got float"),
        ([[3, 2**62], [4]], ValueError, r"segment_sizes\[0\]\[1\] is 4611686018427387904, must be at most"),
        ([[3, 2]], ValueError, "is a list of 2 micro-batches, the engine runs 1"),
        ([[3, 2], [4], [1]], ValueError, "is a list of 2 micro-batches, the engine runs 3"),
        ([[3, 3], [4]], ValueError, r"inputs of micro-batch 0 of shape \(2, 5\) has no dimension 1 of 6 tokens"),
        ([[3, 2], [4, 1]], ValueError, r"inputs of micro-batch 1 of shape \(2, 4\) has no dimension 1 of 5 tokens"),
    ],
)
def test_bad_rows(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_alone(rows)


def test_an_order_of_its_own() -> None:
    order = build_schedule("seq1f1b", num_ranks=1, num_microbatches=2, num_segments=1)
    with pytest.raises(ValueError, match="give the engine the name of a schedule"):
        step_alone([[3, 2], [4]], schedule=order)
    with pytest.raises(ValueError, match="the schedule is for rows of unequal segments: give its name"):
        rows = build_schedule("seq1f1b", num_ranks=1, num_microbatches=2, num_segments=[2, 1])
        step_alone([[3, 2], [4]], schedule=rows)
    with pytest.raises(ScheduleError, match="breadth-first needs the same k for all micro-batches"):
        step_alone([[3, 2], [4]], schedule="breadth-first")
