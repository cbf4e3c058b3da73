"""Does I with W give the gradients of the whole model, in every family's order and in any legal one?"""

from __future__ import annotations

import random

import pytest
import torch
from order_runs import CONFIG, LENGTH, SIZES, all_cases, few_cases, run_order
from orders import random_order
from slices import whole
from tiny_model import batch, gradient_error, run_whole, whole_model

from seq1f1b import build_schedule

GRID = all_cases()


def check(name, P, M, k, v, uneven, weights):
    """Two steps beside the whole model. Orders of whole backwards may fill waits, too."""
    counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
    schedule = build_schedule(name, **counts, weights=weights)
    tokens, target = batch(CONFIG, M, LENGTH)
    model = whole_model(CONFIG)
    truth = run_whole(model, tokens, target, M)
    sizes = SIZES[k] if uneven else None
    losses, gradients, reports = run_order(model, schedule, tokens, target, sizes=sizes, steps=2)
    assert gradient_error(gradients, {name: 2 * g for name, g in truth[1].items()}) <= 1e-10
    assert max(abs(float(a) - float(b)) for a, b in zip(losses, truth[0], strict=True)) <= 1e-12
    has_weights = any(unit.kind == "W" for rank in schedule.ranks for unit in rank)
    order = schedule if has_weights or weights == "planned" else schedule.defer_weights()
    for report, expected in zip(reports, order.ranks, strict=True):
        assert tuple(unit for unit, _, _ in report.timeline) == expected
        assert all(stage.peak_live_units <= stage.planned_live_units for stage in report.stages)


@pytest.mark.parametrize(
    ("name", "P", "M", "k", "v", "uneven", "weights"),
    [(*case, weights) for number, weights in ((1, "planned"), (2, "fill")) for case in few_cases(number)],
)
def test_slice_of_grid(name, P, M, k, v, uneven, weights):
    check(name, P, M, k, v, uneven, weights)


@pytest.mark.full
@pytest.mark.parametrize("weights", ["planned", "fill"])
@pytest.mark.parametrize(("name", "P", "M", "k", "v", "uneven"), whole(GRID))
def test_whole_grid(name, P, M, k, v, uneven, weights):
    check(name, P, M, k, v, uneven, weights)


def random_split_orders(count):
    rng = random.Random(5)
    found = []
    while len(found) < count:
        order = random_order(rng)
        if any(unit.kind == "W" for rank in order.ranks for unit in rank):
            found.append(order)
    return found


FILLED = [
    build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=2, stages_per_rank=v, weights="fill")
    for name, v in (("seq1f1b", 1), ("seq-zbv", 2))
]  # an order of whole backwards, and one with planned Ws


@pytest.mark.parametrize("order", [*random_split_orders(12), *FILLED], ids=str)
def test_w_anywhere(order):
    """Gradients are equal to rounding wherever W stands; bit for bit where the order is the same."""
    tokens, target = batch(CONFIG, order.num_microbatches, LENGTH)
    model = whole_model(CONFIG)
    truth = run_whole(model, tokens, target, order.num_microbatches)[1]
    sizes = SIZES[order.num_segments]
    _, gradients, _ = run_order(model, order, tokens, target, sizes=sizes)
    assert gradient_error(gradients, truth) <= 1e-10
    for _ in range(2):
        _, again, _ = run_order(model, order, tokens, target, sizes=sizes)
        assert all(torch.equal(gradients[name], again[name]) for name in truth)
