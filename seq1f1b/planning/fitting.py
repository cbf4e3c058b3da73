"""Orders that fit: made for the costs of their units within a cap of memory, or changed until no rank exceeds it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from seq1f1b.planning.cost import CostModel, RankBytes
from seq1f1b.schedule import Costs, Family, Schedule, StepMemory

__all__ = ["Made", "fit_under", "order_for_costs"]

_CAP_TRIES = 4  # orders for one cap


class Made(NamedTuple):
    """An order, the options that it was built with, and its bytes."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]

    @property
    def peak(self) -> int:
        return max(rank.total for rank in self.ranks)


def order_for_costs(
    family: Family,
    cost: CostModel,
    sizes: Sequence[int],
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    seconds: Callable[[Schedule], float],
) -> Made:
    """The order of a family that takes costs, ``build`` of its options; of one that takes a cap in bytes, too, the
    fastest by ``seconds`` that fits in ``cap``, of several made for what the one before left of it.

    Such a family counts every unit at the most that it ever holds, so what fits is found step by step: activations and
    cache are its to change, what else a rank holds is taken as it was. Where none fits: the one that holds least.
    """
    seconds_of = cost.unit_seconds(sizes)
    options: dict[str, Any] = {"costs": [seconds_of.forward, seconds_of.input, seconds_of.weight]}
    if "transfer" in family.options:
        latencies, rates = cost.links(range(cost.num_ranks))
        message = statistics.fmean(cost.message_bytes(sizes))
        times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
        options["transfer"] = statistics.fmean(times) if times else 0.0
    schedule = build(options)
    made = Made(schedule, options, cost.rank_bytes(schedule, sizes))
    if made.peak <= cap or "cap_bytes" not in family.options:
        return made
    held, share = cost.held_bytes(sizes), 1 + cost.hardware.allocator_reserve
    least = [0] * cost.num_ranks  # one micro-batch
    for rank, row in zip(schedule.rank_of_stage, held, strict=True):
        least[rank] += sum(row)
    room, aim = [rank.activations + rank.kv for rank in made.ranks], cap
    orders: list[tuple[float, int, Made]] = []
    for _ in range(_CAP_TRIES):
        left = [math.floor((aim - rank.total) / share) for rank in made.ranks]
        room = [max(x + y, z) for x, y, z in zip(room, left, least, strict=True)]
        given = options | {"unit_bytes": held, "cap_bytes": room}
        schedule = build(given)
        made = Made(schedule, given, cost.rank_bytes(schedule, sizes))
        orders.append((seconds(schedule) if made.peak <= cap else math.inf, made.peak, made))
        aim -= max(0, made.peak - cap)  # one order is not the next one plus a little: aim lower where one held too much
    return min(orders, key=lambda order: order[:2])[2]


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
