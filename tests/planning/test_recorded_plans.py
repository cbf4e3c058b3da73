"""Does the planner choose the plans that it chose before, at the same price?

Requests are of plans, tables of compare, prices of units, and plans of single steps.

    export PYTHONPATH=tests/support
    python tests/planning/test_recorded_plans.py   # records anew, where plans are meant to change
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from slices import slice_of

from seq1f1b import ModelShape, build_schedule, partition_sequence
from seq1f1b.plan import Layout
from seq1f1b.planning.compare import compare
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware, ProfiledHardware, load_hardware, load_model
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.search import LEAST_GAIN, PlanSearch, search_plans
from seq1f1b.planning.step_plan import plan_step

RECORD = Path(__file__).parent / "recorded_plans.json.gz"
PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "lengths-profile.json"
NUM_PLANS, NUM_OTHERS = 200, 60
SMALL = ModelShape(hidden=512, layers=8, heads=8, kv_heads=2, ffn=1024, vocab=4000)
MIXTURE = ModelShape(hidden=512, layers=8, heads=8, kv_heads=4, ffn=512, vocab=8000, experts=8, experts_per_token=2)


def _profile(kind: str) -> Profile:
    """The recorded one; with a tier and ends; or without ends."""
    found = Profile.load(PROFILE)
    if kind == "plain":
        return found
    if kind == "no ends":
        return replace(found, embedding=None, head=None)
    return replace(found, tier_out=2e9, tier_in=3e9, move_out=1e-11, move_in=2e-11)


class _Draw:
    """Choices that are the same wherever they are drawn."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def of(self, *values: Any) -> Any:
        return values[int(self._random.random() * len(values))]

    def likely(self, usual: Any, *others: Any) -> Any:
        """The usual value three times in four."""
        return usual if self._random.random() < 0.75 else self.of(*others)


def _workload(draw: _Draw) -> tuple[ModelShape, Hardware, Layout, int]:
    """A model, a machine, a layout, and tokens of a sequence."""
    if draw.of(0, 1, 2) == 0:
        profile = _profile(draw.of("plain", "tier", "no ends"))
        model = profile.model._replace(layers=draw.of(4, 8, 9))
        if profile.head is None:
            model = model._replace(vocab=0)
            profile = replace(profile, model=profile.model._replace(vocab=0))
        machine: Hardware = ProfiledHardware.of(profile, load_hardware("cpu-zen5"))
        tokens = draw.of(1024, 4096, 16384)
        layout = Layout(data=draw.likely(1, 2), head_in_loss=draw.likely(True, False))
    else:
        shapes = {"small": SMALL, "mixture": MIXTURE}
        name = draw.of("gpt-2.7b", "llama3-8b", "qwen3-4b", "qwen3-30b-a3b", "small", "mixture")
        model = shapes.get(name) or load_model(name)
        machine = load_hardware(draw.of("h100", "a100", "rtx4090", "cpu-zen5"))
        changes = draw.of({}, {"length_pools": 1.0, "collective_buffers": 1.5}, {"attention_forward_rows": 40.0})
        machine = replace(machine, **changes, tier_bandwidth=2e10)
        tokens = draw.of(4096, 16384, 65536)
        layout = Layout(
            tensor=draw.likely(1, 2, 4),
            context=draw.likely(1, 2),
            data=draw.of(1, 2, 4),
            expert=1,
            head_in_loss=draw.likely(True, False),
            copies_prefix=draw.likely(False, True),
        )
        if model.experts > 1:
            layout = replace(layout, expert=draw.of(1, layout.data))
    if draw.likely(False, True):
        layout = replace(layout, documents=(tokens // 2, tokens // 8, tokens - tokens // 2 - tokens // 8))
    return model, machine, layout, tokens


def _plan_request(number: int, cap: int | None) -> Callable[[], Any]:
    draw = _Draw(number)
    model, machine, layout, tokens = _workload(draw)
    lengths = None
    if layout.documents is None and draw.likely(False, True):
        lengths = {tokens: 3, tokens // 2: 5, tokens // 4: draw.of(1, 20)}
    v: Any = draw.of((1,), (1,), (2,), (1, 2))
    names: Any = [draw.of("seq1f1b", "seq-zb-h1", "1f1b") if v[0] == 1 else draw.of("seq1f1b-interleaved", "seq-zbv")]
    names += [draw.of("gpipe", "zb-h1", "seq1f1b")] if v[0] == 1 else []
    names += ["seq1f1b-interleaved"] if v == (1, 2) else []
    ranks, segments = draw.of(2, 2, 3), draw.of([2], [4], [1, 3], [1, 2])
    microbatches = draw.of(2, 3, 5)
    remedies = draw.of((), ("recompute",), ("recompute",), ("recompute", "offload"), ("offload",))
    if number % 5 == 0:
        names, v, segments, microbatches, remedies = ["auto"], v[:1], segments[-1:], 2, remedies[:1]
    elif number % 40 == 1:
        names, segments, v, ranks = None, [2], (1,), 2
    elif number % 20 == 2:
        names, segments, tokens = names[:1], None, 4096
        layout, lengths = replace(layout, documents=None), None
    given: dict[str, Any] = {
        "num_ranks": ranks,
        "num_microbatches": microbatches,
        "seq_len": None if lengths else tokens,
        "lengths": lengths,
        "memory": cap,
        "layout": layout,
        "optimizer_sync": draw.likely(True, False),
        "names": names,
        "segments": segments,
        "stages_per_rank": v,
        "remedies": remedies if machine.tier_bandwidth else tuple(x for x in remedies if x != "offload"),
        "vocabulary": draw.of("any", "ends"),
        "best": draw.of(1, 3, 5),
    }
    if draw.of(True, False) and not isinstance(machine, ProfiledHardware):
        given["inside"] = draw.of(["none"], ["full"], ["none", "ffn"])
    return lambda: _found(search_plans(model, machine, **given))


_OF_PLAN = (
    "schedule",
    "num_segments",
    "stages_per_rank",
    "segment_sizes",
    "mix",
    "prefetch",
    "units",
    "lengths",
    "seconds",
    "peak",
)


def _found(found: PlanSearch) -> Any:
    """The plans with their seconds and bytes, and not how the search came to them."""
    plans = []
    for plan in found.plans:
        told, layout = asdict(plan), plan.layout
        tables = {name: {key: _sum(table) for key, table in told[name].items()} for name in ("options", "spread")}
        of_layout = {"layers": layout.layers, "vocabulary": layout.vocabulary, "inside": layout.inside}
        plans.append({name: told[name] for name in _OF_PLAN} | tables | of_layout)
    return {"plans": plans}


def _sum(value: Any) -> Any:
    """Long tables as one number for each row."""
    if isinstance(value, (list, tuple)):
        flat = [x for x in value if not isinstance(x, (list, tuple))]
        return [*([sum(flat)] if flat else []), *(_sum(x) for x in value if isinstance(x, (list, tuple)))]
    return value


def _other_request(number: int) -> Callable[[], Any]:
    draw = _Draw(10_000 + number)
    model, machine, layout, tokens = _workload(draw)
    is_profiled = isinstance(machine, ProfiledHardware)
    ranks, v, k = draw.of(2, 3, 4), draw.of(1, 1, 2), draw.of(1, 2, 4, 5)
    if ranks * v > model.layers:
        v = 1
    counts: dict[str, Any] = {"num_ranks": ranks, "seq_len": tokens}
    if number % 3 == 0:
        cap = draw.of(None, 4 << 30, 30 << 30, 60 << 30)
        given = {"layout": layout, "model": model, "hardware": machine, "num_segments": k, "cap_bytes": cap}
        families = draw.of(
            [], ["1f1b", "seq1f1b", "seq-zb-h1", "auto"], ["gpipe", "seq1f1b-interleaved", "zbv", "auto"]
        )
        M = draw.of(2, 4)
        return lambda: asdict(compare(families, num_microbatches=M, stages_per_rank=v, **counts, **given))
    if not is_profiled and not layout.copies_prefix:
        layout = replace(layout, inside=draw.of("none", "ffn", "full"))
    if number % 3 == 1:
        if model.vocab and layout.head_in_loss and draw.of(True, False):
            layout = replace(layout, vocabulary="ranks")
        cost = CostModel.balanced(model, machine, stages_per_rank=v, layout=layout, **counts)
        return lambda: _prices(cost, k, draw.of(1.0, 0.5))
    layout = replace(layout, copies_prefix=False, documents=None)
    cost = CostModel.balanced(model, machine, stages_per_rank=v, layout=layout, **counts)
    longest = draw.of(600, 2000, 9000)
    lengths = [1 + (i * i * 7919 + number) % longest for i in range(draw.of(5, 9))]
    schedule = draw.of("seq1f1b", ("seq1f1b", "auto"), "auto") if v == 1 else "seq1f1b-interleaved"
    options: dict[str, Any] = {"schedule": schedule}
    if draw.of(True, False):
        state = machine.element_bytes + machine.gradient_bytes + machine.optimizer_bytes / layout.data
        least = max(sum(cost.parts.stage_parameters[rank::ranks]) for rank in range(ranks)) * state
        options["memory"] = 1.05 * least + machine.context_bytes + draw.of(2e4, 2e5, 2e6) * longest
        options["remedies"] = draw.of(("recompute",), ("recompute", "offload"))
        if not machine.tier_bandwidth:
            options["remedies"] = ("recompute",)
    return lambda: _step(plan_step(lengths, cost, **options))


def _prices(cost: CostModel, k: int, mix: float) -> Any:
    """Everything that a cost model tells of k segments, under two orders."""
    sizes = partition_sequence(cost.seq_len, k, strategy="profiled", profile=cost, mix=mix)
    v = cost.num_stages // cost.num_ranks
    kinds = ["seq1f1b", "seq-zb-h1"] if v == 1 else ["seq1f1b-interleaved", "seq-zbv"]
    orders = [
        build_schedule(kind, num_ranks=cost.num_ranks, num_microbatches=4, num_segments=len(sizes), stages_per_rank=v)
        for kind in kinds
        if kind != "seq-zbv" or cost.num_ranks == 2
    ]
    placement = orders[0].rank_of_stage
    price, links = cost.price(sizes), cost.links(placement)
    told = {
        "sizes": sizes,
        "seconds": price.seconds._asdict(),
        "shard": price.shard_seconds,
        "moving": price.moving_seconds() if cost.hardware.tier_bandwidth else None,
        "message": price.message_bytes,
        "held": price.held_bytes(),
        "least": price.least_bytes,
        "memory": asdict(price.memory(placement)),
        "step memory": asdict(price.step_memory(placement)),
        "links": links[:2],
        "send": links[2],
        "optimizer": cost.optimizer_seconds(),
        "parameters": [cost.parts.stage_parameters[stage] for stage in range(cost.num_stages)],
        "layers": cost.balanced_layers(),
    }
    told["ranks"] = [[asdict(rank) for rank in price.rank_bytes(order)] for order in orders]
    told["steps"] = [order.simulate(price.costs(order)).makespan for order in orders]
    return told


def _step(plan: Any) -> Any:
    """A plan of one step."""
    costs = plan.costs

    def sums(table: Any) -> Any:
        """Totals of each micro-batch of each stage."""
        return [[[math.fsum(units)] for units in costs.microbatches(row)] for row in table]

    return {
        "rows": plan.rows,
        "sizes": plan.segment_sizes,
        "order": plan.digest,
        "ranks": [asdict(rank) for rank in plan.ranks],
        "seconds": plan.seconds,
        "imbalance": plan.imbalance,
        "units": list(map(sums, costs.seconds)),
        "held": sums(costs.held_bytes()),
        "message": sums([costs.message_bytes])[0],
        "memory": sums(costs.memory(plan.schedule.rank_of_stage).activations),
        "least": costs.least_bytes,
    }


def names() -> list[str]:
    """Names of all requests."""
    return [f"plan {number}" for number in range(NUM_PLANS)] + [f"other {number}" for number in range(NUM_OTHERS)]


def answer(name: str, cap: int | None) -> Any:
    """What the planner says, as JSON has it; of a refusal its text. cap: bytes of a device, of a plan."""
    kind, _, number = name.partition(" ")
    try:
        found = (_plan_request(int(number), cap) if kind == "plan" else _other_request(int(number)))()
    except ValueError as error:
        found = {"refused": str(error)}
    return json.loads(json.dumps(found, default=lambda array: array.tolist()))


def record(name: str) -> Any:
    """The cap of a request, which two plans of three lack room for, and its answer."""
    cap = None
    if name.startswith("plan"):
        free = answer(name, 1 << 50)
        share = (0.5, 0.75, 0.9, 1.0, 4.0, 4.0)[int(name.split()[1]) * 7 % 6]
        cap = max(1, int(share * max(free["plans"][0]["peak"]))) if "plans" in free else 1 << 50
    return {"cap": cap, "answer": answer(name, cap)}


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """The first place where two answers differ, numbers by more than a part in 10^12."""
    if {type(one), type(other)} in ({float}, {int, float}):
        is_equal = one == other or abs(one - other) <= 1e-12 * max(abs(one), abs(other))
        return None if is_equal else f"{where}: {one!r} is not {other!r}"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (difference(one[key], other[key], f"{where}/{key}") for key in one)), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(x, y, f"{where}/{i}") for i, (x, y) in pairs)), None)
    return None if one == other else f"{where}: {one!r} is not {other!r}"


def worse(found: Any, told: Any, cap: int | None) -> str | None:
    """How an answer falls short of the recorded one: plans that differ must be as many, below the cap, and faster, or
    as fast to what the search takes for a tie, and then hold less."""
    other = difference(found, told)
    if other is None or cap is None or not ("plans" in found and "plans" in told):
        return other
    pairs = list(zip(found["plans"], told["plans"], strict=False))

    def is_as_good(one: Any, two: Any) -> bool:
        is_smaller = one["peak"] != two["peak"] and all(a <= b for a, b in zip(one["peak"], two["peak"], strict=True))
        most = two["seconds"] * (1 + LEAST_GAIN * is_smaller)
        return max(one["peak"]) <= cap and (difference(one, two) is None or one["seconds"] < most)

    is_better = len(pairs) == len(told["plans"]) and all(is_as_good(*pair) for pair in pairs)
    return None if is_better else other


@cache
def recorded() -> dict[str, Any]:
    """The answers that were written down, by the requests' names."""
    found: dict[str, Any] = json.loads(gzip.decompress(RECORD.read_bytes()))
    return found


KEPT = [(f"plan {n}",) for n in range(2, NUM_PLANS, 13)]
KEPT += [(f"other {n}",) for n in (1, 5, 10, 12, 22, 31, 33)]


@pytest.mark.parametrize("name", slice_of([(name,) for name in names()], KEPT))
def test_the_answer_is_the_recorded_one(name: str) -> None:
    """Plans, their order, tables, refusals: equal, numbers to twelve digits; or plans that are faster under the cap."""
    told = recorded()[name]
    found = answer(name, told["cap"])
    assert worse(found, told["answer"], told["cap"]) is None


if __name__ == "__main__":
    text = json.dumps({name: record(name) for name in names()}, separators=(",", ":")).encode()
    RECORD.write_bytes(gzip.compress(text, 9, mtime=0))
