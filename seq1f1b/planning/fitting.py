"""Orders that fit: made for the costs of their units within a cap of memory, or changed until no rank exceeds it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from seq1f1b.planning.cost import CostModel, RankBytes
from seq1f1b.schedule import Costs, Family, Schedule, StepMemory

__all__ = ["Made", "fit_under", "options_for_costs", "order_for_costs", "order_with_remedies"]

_CAP_TRIES = 4  # orders for one cap
_LEVELS = (1.0, 2.0, 4.0, 0.5)  # what an order with remedies holds, of what 1F1B does beyond its first micro-batch


class Made(NamedTuple):
    """An order, the options that it was built with, and its bytes."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]

    @property
    def peak(self) -> int:
        return max(rank.total for rank in self.ranks)


def options_for_costs(family: Family, cost: CostModel, sizes: Sequence[int]) -> dict[str, Any]:
    """The seconds of units and messages, as far as the family takes them."""
    seconds_of = cost.unit_seconds(sizes)
    options: dict[str, Any] = {"costs": [seconds_of.forward, seconds_of.input, seconds_of.weight]}
    if "transfer" in family.options:
        latencies, rates = cost.links(range(cost.num_ranks))
        message = statistics.fmean(cost.message_bytes(sizes))
        times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
        options["transfer"] = statistics.fmean(times) if times else 0.0
    return options


def order_for_costs(
    family: Family,
    cost: CostModel,
    sizes: Sequence[int],
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    seconds: Callable[[Schedule], float],
) -> Made:
    """The order of a family that takes costs, ``build`` of its options; of one that takes a cap in bytes, too, the
    fastest by ``seconds`` that fits in ``cap``, of several made for what the one before left of it; of one that may
    split the backward or not, the faster of both.

    Such a family counts every unit at the most that it ever holds, so what fits is found step by step: activations and
    cache are its to change, what else a rank holds is taken as it was. Where none fits: the one that holds least.
    """
    takes_cap = "cap_bytes" in family.options and cap < math.inf
    options = [options_for_costs(family, cost, sizes) | way for way in _ways(family, cost, sizes)]
    if takes_cap and cost.least_bytes(sizes) > cap:  # no order fits: this one holds about as little as any
        limits = {"unit_bytes": cost.held_bytes(sizes), "cap_bytes": _one_microbatch(cost, sizes)}
        options = [options[-1] | limits]

    def place(made: Made) -> tuple[bool, float, int]:
        return made.peak > cap, seconds(made.schedule) if len(options) > 1 else 0.0, made.peak

    def make(given: dict[str, Any]) -> Made:
        schedule = build(given)
        return Made(schedule, given, cost.rank_bytes(schedule, sizes))

    made = min(map(make, options), key=place)
    if made.peak <= cap or not takes_cap or "cap_bytes" in made.options:
        return made
    free, schedule = made.options, made.schedule
    held, share = cost.held_bytes(sizes), 1 + cost.hardware.allocator_reserve
    least = [0] * cost.num_ranks  # one micro-batch
    for rank, row in zip(schedule.rank_of_stage, held, strict=True):
        least[rank] += sum(row)
    room, aim = [rank.activations + rank.kv for rank in made.ranks], cap
    orders: list[tuple[float, int, Made]] = []
    for _ in range(_CAP_TRIES):
        left = [math.floor((aim - rank.total) / share) for rank in made.ranks]
        room = [max(x + y, z) for x, y, z in zip(room, left, least, strict=True)]
        made = make(free | {"unit_bytes": held, "cap_bytes": room})
        schedule = made.schedule
        orders.append((seconds(schedule) if made.peak <= cap else math.inf, made.peak, made))
        aim -= max(0, made.peak - cap)  # one order is not the next one plus a little: aim lower where one held too much
    return min(orders, key=lambda order: order[:2])[2]


def _one_microbatch(cost: CostModel, sizes: Sequence[int]) -> list[int]:
    """Bytes of one micro-batch on each rank, wherever its stages are: in a loop or in a V."""
    rows, P = [sum(row) for row in cost.held_bytes(sizes)], cost.num_ranks
    loop, wave = [0] * P, [0] * P
    for stage, row in enumerate(rows):
        turn, place = divmod(stage, P)
        loop[place] += row
        wave[place if turn % 2 == 0 else P - 1 - place] += row
    return list(map(max, loop, wave))


def order_with_remedies(
    family: Family,
    cost: CostModel,
    sizes: Sequence[int],
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    fit: Callable[[Made], Made],
    seconds: Callable[[Schedule], float],
) -> Made:
    """The order of a family that takes a cap in bytes, with the units that give up what they saved: the fastest of
    orders that hold more or fewer micro-batches, each made to fit by ``fit``, the best one then searched again with
    what its units compute twice.
    """
    options, held = options_for_costs(family, cost, sizes), cost.held_bytes(sizes)
    one, num_segments = _one_microbatch(cost, sizes), len(sizes)
    tried: list[tuple[float, int, Made]] = []

    def consider(given: dict[str, Any]) -> None:
        schedule = build(given)
        made = Made(schedule, given, cost.rank_bytes(schedule, sizes))
        if made.peak > cap:
            made = fit(made)
        tried.append((seconds(made.schedule) if made.peak <= cap else math.inf, made.peak, made))

    def at_level(level: float) -> dict[str, Any]:
        share = 1 + level * (cost.num_ranks - 1) / num_segments
        return {"unit_bytes": held, "cap_bytes": [math.ceil(share * x) for x in one]}

    for way in _ways(family, cost, sizes):
        consider(options | way | at_level(_LEVELS[0]))
    for level in _LEVELS[1:]:
        consider(min(tried, key=lambda each: each[:2])[2].options | at_level(level))
    taken, _, best = min(tried, key=lambda each: each[:2])
    if taken < math.inf:
        consider(best.options | {"costs": _with_recompute(best, cost, sizes)})
    return min(tried, key=lambda each: each[:2])[2]


def _with_recompute(made: Made, cost: CostModel, sizes: Sequence[int]) -> list[Any]:
    """Seconds of F, I and W, where I of a segment has the R of the share of its units that are recomputed."""
    (forward, before, weight), num_segments = made.options["costs"], len(sizes)
    again_of, inputs = cost.unit_seconds(sizes).recompute, []
    for kinds, row, again in zip(made.schedule.cell_kinds(), before, again_of, strict=True):
        words = kinds.split()
        shares = [sum(word[s] == "R" for word in words) / len(words) for s in range(num_segments)]
        inputs.append([x + share * r for x, share, r in zip(row, shares, again, strict=True)])
    return [forward, inputs, weight]


def _ways(family: Family, cost: CostModel, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Options of the backward that are tried: split, and whole, which has seconds of its own."""
    if "backward" not in family.options:
        return [{}]
    seconds = cost.unit_seconds(sizes)
    return [{}, {"backward": "whole", "costs": [seconds.forward, seconds.backward, 0.0]}]


def fit_under(
    cap: float,
    schedule: Schedule,
    ranks: Sequence[RankBytes],
    reserve: float,
    memory: StepMemory,
    remedies: Sequence[str],
    costs: Costs,
) -> Schedule:
    """Lets units of an order recompute or move until no rank holds more than ``cap``, or no unit is left.

    Args:
        ranks: its bytes as it is.
        reserve: the allocator's share of what changes.
        memory: of what units hold.
        costs: as of :meth:`seq1f1b.Schedule.simulate`.
    """
    held = schedule.peak_memory(memory, costs).total
    left = [math.floor((cap - rank.total) / (1 + reserve)) for rank in ranks]
    room = [max(0, x + y) for x, y in zip(held, left, strict=True)]
    return schedule.fit(memory, room, remedies, costs)
