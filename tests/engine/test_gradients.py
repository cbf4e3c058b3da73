"""Are losses and gradients those of the unsplit model, in every family's order and any legal one, however units run?"""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from order_runs import CONFIG, LENGTH, SIZES, all_cases, few_cases, run_order
from orders import random_order, with_recomputation
from slices import full_only, whole
from tiny_model import batch, gradient_error, run_whole, whole_model
from torch import nn
from wide_products import wide_products

from seq1f1b import build_schedule

RECOMPUTE, FILL = {"recompute": "all"}, {"weights": "fill"}
SPREAD = {"head": {}}
WAYS = {  # of the model, of the order, the dtype, whether layers add their products in one call, and of the run
    "plain": ({}, {}, torch.float64, False),
    "filled": ({"kv_heads": 2}, FILL, torch.float64, False),
    "recomputed": ({"checkpoint": True}, RECOMPUTE, torch.float64, False),
    "filled, recomputed": ({"kv_heads": 2, "checkpoint": True}, FILL | RECOMPUTE, torch.float32, False),
    "added": ({}, {}, torch.float64, True),
    "16 bit": ({"kv_heads": 2}, {}, torch.bfloat16, False),
    "16 bit, added": ({}, RECOMPUTE, torch.bfloat16, True),
    "spread": ({}, {}, torch.float64, False, SPREAD),
    "spread, filled, recomputed": ({}, FILL | RECOMPUTE, torch.float64, False, SPREAD | {"embeds": True}),
}


FEW = [(*case, way) for number, way in enumerate(WAYS) for case in few_cases(number)]
ALL = full_only(*((*case, way) for way in WAYS for case in whole(all_cases())))


@pytest.mark.parametrize(("name", "P", "M", "k", "v", "uneven", "way"), FEW + ALL)
def test_families_and_features(name, P, M, k, v, uneven, way):
    """No further from the whole model in float64 than the same model run whole by torch in this dtype."""
    of_model, of_order, dtype, adds, *spreads = WAYS[way]
    config, steps = replace(CONFIG, **of_model), 2 if dtype == torch.float64 else 1
    counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
    schedule = build_schedule(name, **counts, **of_order)
    tokens, target = batch(config, M, LENGTH)
    model = whole_model(config, dtype)
    losses, exact = run_whole(copy.deepcopy(model).double(), tokens, target, M)
    own_losses, own = run_whole(model, tokens, target, M)
    options = {"sizes": SIZES[k] if uneven else None, "steps": steps, "config": config} | (
        spreads[0] if spreads else {}
    )
    with wide_products() if adds else nullcontext([]) as calls:
        found, gradients, reports = run_order(model, schedule, tokens, target, **options)
    layers = sum(isinstance(part, nn.Linear) for part in model.modules())
    assert len(calls) == (M * k * layers if adds and dtype == torch.bfloat16 else 0)  # of one dtype: no wide result
    assert all(gradient.dtype == dtype for gradient in gradients.values())
    rounding = 0.0 if dtype == torch.float64 else 1e-6
    limit = max(1e-10, 1.5 * gradient_error(own, exact) + rounding)
    assert gradient_error({name: g.double() / steps for name, g in gradients.items()}, exact) <= limit
    if dtype != torch.bfloat16:
        for ours, torchs, wanted in zip(found, own_losses, losses, strict=True):
            error, limit = abs(float(ours) - float(wanted)), 2 * abs(float(torchs) - float(wanted))
            assert error <= max(1e-12, limit + rounding * abs(float(wanted)))
    order = schedule if "W" in schedule.kinds or not schedule.fills else schedule.defer_weights()
    order = order.spread_vocabulary(embedding=options.get("embeds", False)) if spreads else order
    for report, expected in zip(reports, order.ranks, strict=True):
        assert tuple(unit for unit, _, _ in report.timeline) == expected
        assert report.recomputed_units == (M * k * v if "recompute" in of_order else 0)
        for stage in report.stages:
            live, planned = stage.peak_live_units, stage.planned_live_units
            assert live <= planned if schedule.fills else live == planned
            assert schedule.fills or stage.peak_live_tokens == stage.planned_live_tokens


def random_orders(kind, count):
    """Orders with a unit of this pass, W or R anywhere between the units that it lies between."""
    rng, found = random.Random(5), []
    while len(found) < count:
        order = random_order(rng)
        order = with_recomputation(order, rng) if kind == "R" else order
        if kind in order.kinds:
            found.append(order)
    return found


FILLED = [
    build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=2, stages_per_rank=v, weights="fill")
    for name, v in (("seq1f1b", 1), ("seq-zbv", 2))
]  # an order of whole backwards, and one with planned Ws


@pytest.mark.parametrize("order", [*random_orders("W", 12), *random_orders("R", 12), *FILLED], ids=str)
def test_w_and_r_anywhere(order):
    """Gradients are equal to rounding wherever W and R stand; bit for bit where the order is the same."""
    tokens, target = batch(CONFIG, order.num_microbatches, LENGTH)
    model = whole_model(CONFIG)
    truth = run_whole(model, tokens, target, order.num_microbatches)[1]
    found = [run_order(model, order, tokens, target, sizes=SIZES[order.num_segments]) for _ in range(3)]
    for losses, gradients, reports in found:
        assert gradient_error(gradients, truth) <= 1e-10
        assert all(map(torch.equal, losses, found[0][0]))
        assert all(torch.equal(gradient, found[0][1][name]) for name, gradient in gradients.items())
        for report, units in zip(reports, order.ranks, strict=True):
            assert order.fills or tuple(unit for unit, _, _ in report.timeline) == units
