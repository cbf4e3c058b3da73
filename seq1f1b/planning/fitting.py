"""Orders that fit: made for the costs of their units within a cap of memory, or changed until no rank exceeds it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from seq1f1b.planning.price import Price, RankBytes
from seq1f1b.schedule import Family, Schedule

__all__ = ["Made", "fit_under", "options_for_costs", "order_for_costs", "order_with_remedies"]

_CAP_TRIES = 4  # orders for one cap
LEVELS = (1.0, 2.0, 4.0, 0.5)  # of :func:`order_with_remedies`


class Made(NamedTuple):
    """An order, the options that it was built with, and its bytes."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]

    @property
    def peak(self) -> int:
        return max(rank.total for rank in self.ranks)


def options_for_costs(family: Family, costs: Price) -> dict[str, Any]:
    """The seconds of units and messages, as far as the family takes them."""
    seconds, cost = costs.seconds, costs.cost
    options: dict[str, Any] = {"costs": [seconds.forward, seconds.input, seconds.weight]}
    if "transfer" in family.options:
        latencies, rates = cost.links(range(cost.num_ranks))
        message = statistics.fmean(itertools.chain(*costs.microbatches(costs.message_bytes)))
        times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
        options["transfer"] = statistics.fmean(times) if times else 0.0
    return options


def order_for_costs(
    family: Family,
    costs: Price,
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    seconds: Callable[[Schedule], float],
    is_quick: bool = False,
) -> Made:
    """The order of a family that takes costs, ``build`` of its options; of one that takes a cap in bytes, too, the
    fastest by ``seconds`` that fits in ``cap``, of several made for what the one before left of it; of one that may
    split the backward or not, the faster of both.

    Such a family counts every unit at the most that it ever holds, so what fits is found step by step: activations and
    cache are its to change, what else a rank holds is taken as it was. Where none fits: the one that holds least.

    Args:
        is_quick: of whole backwards alone, and one order for the cap: a quarter of the time.
    """
    takes_cap = "cap_bytes" in family.options and cap < math.inf
    options = [options_for_costs(family, costs) | way for way in _ways(family, costs, is_quick)]
    if takes_cap and costs.least_bytes() > cap:  # no order fits: this one holds about as little as any
        limits = {"unit_bytes": costs.held_bytes(), "cap_bytes": _one_microbatch(costs)}
        options = [options[-1] | limits]

    def place(made: Made) -> tuple[bool, float, int]:
        return made.peak > cap, seconds(made.schedule) if len(options) > 1 else 0.0, made.peak

    def make(given: dict[str, Any]) -> Made:
        schedule = build(given)
        return Made(schedule, given, costs.rank_bytes(schedule))

    made = min(map(make, options), key=place)
    if made.peak <= cap or not takes_cap or "cap_bytes" in made.options:
        return made
    free, schedule = made.options, made.schedule
    held, share = costs.held_bytes(), 1 + costs.cost.hardware.allocator_reserve
    least = [0] * schedule.num_ranks  # one micro-batch
    for rank, row in zip(schedule.rank_of_stage, held, strict=True):
        least[rank] += max(map(sum, costs.microbatches(row)))
    room, aim = [rank.activations + rank.kv for rank in made.ranks], cap
    orders: list[tuple[float, int, Made]] = []
    for _ in range(1 if is_quick else _CAP_TRIES):
        left = [math.floor((aim - rank.total) / share) for rank in made.ranks]
        room = [max(x + y, z) for x, y, z in zip(room, left, least, strict=True)]
        made = make(free | {"unit_bytes": held, "cap_bytes": room})
        schedule = made.schedule
        orders.append((seconds(schedule) if made.peak <= cap else math.inf, made.peak, made))
        aim -= max(0, made.peak - cap)  # one order is not the next one plus a little: aim lower where one held too much
    return min(orders, key=lambda order: order[:2])[2]


def _one_microbatch(costs: Price) -> list[int]:
    """Bytes of one micro-batch on each rank, wherever its stages are: in a loop or in a V."""
    rows, P = [max(map(sum, costs.microbatches(row))) for row in costs.held_bytes()], costs.cost.num_ranks
    loop, wave = [0] * P, [0] * P
    for stage, row in enumerate(rows):
        turn, place = divmod(stage, P)
        loop[place] += row
        wave[place if turn % 2 == 0 else P - 1 - place] += row
    return list(map(max, loop, wave))


def order_with_remedies(
    family: Family,
    costs: Price,
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    fit: Callable[[Made], Made],
    seconds: Callable[[Schedule], float],
    *,
    levels: Sequence[float] = LEVELS,
    is_whole: bool = False,
) -> Made:
    """The order of a family that takes a cap in bytes, with the units that give up what they saved: the fastest of
    orders that hold more or fewer micro-batches, each made to fit by ``fit``, the best one then searched again with
    what its units compute twice.

    Args:
        levels: what the orders hold, of what 1F1B does beyond its first micro-batch.
        is_whole: of whole backwards alone.
    """
    options, held, one = options_for_costs(family, costs), costs.held_bytes(), _one_microbatch(costs)
    tried: list[tuple[float, int, Made]] = []

    def consider(given: dict[str, Any]) -> None:
        schedule = build(given)
        made = Made(schedule, given, costs.rank_bytes(schedule))
        if made.peak > cap:
            made = fit(made)
        tried.append((seconds(made.schedule) if made.peak <= cap else math.inf, made.peak, made))

    def at_level(level: float) -> dict[str, Any]:
        share = 1 + level * (costs.cost.num_ranks - 1) / len(costs.longest)
        return {"unit_bytes": held, "cap_bytes": [math.ceil(share * x) for x in one]}

    for way in _ways(family, costs, is_whole):
        consider(options | way | at_level(levels[0]))
    for level in levels[1:]:
        consider(min(tried, key=lambda each: each[:2])[2].options | at_level(level))
    taken, _, best = min(tried, key=lambda each: each[:2])
    if taken < math.inf:
        consider(best.options | {"costs": _with_recompute(best, costs)})
    return min(tried, key=lambda each: each[:2])[2]


def _with_recompute(made: Made, costs: Price) -> list[Any]:
    """Seconds of F, I and W, where I has the R of the share of its units that are recomputed: of those of its segment,
    or of a micro-batch of its own."""
    forward, before, weight = made.options["costs"]
    inputs = []
    for kinds, row, again in zip(made.schedule.cell_kinds(), before, costs.seconds.recompute, strict=True):
        words = kinds.split()
        rows = costs.microbatches(row)
        each = len(words) // len(rows)  # micro-batches that are alike
        found = [
            [
                x + r * sum(word[s] == "R" for word in words[m * each : (m + 1) * each]) / each
                for s, (x, r) in enumerate(zip(own, agains, strict=True))
            ]
            for m, (own, agains) in enumerate(zip(rows, costs.microbatches(again), strict=True))
        ]
        inputs.append(found if rows is row else found[0])
    return [forward, inputs, weight]


def _ways(family: Family, costs: Price, is_whole: bool) -> list[dict[str, Any]]:
    """Options of the backward that are tried: split, if it may be, and whole, which has seconds of its own."""
    if "backward" not in family.options:
        return [{}]
    whole = {"backward": "whole", "costs": [costs.seconds.forward, costs.seconds.backward, 0.0]}
    return [whole] if is_whole else [{}, whole]


def fit_under(
    cap: float, schedule: Schedule, ranks: Sequence[RankBytes], costs: Price, remedies: Sequence[str]
) -> Schedule:
    """Lets units of an order recompute or move until no rank holds more than ``cap``, or no unit is left.

    Units move only as far as the machine's host memory takes them: else none do, and the other remedies are left.

    Args:
        ranks: its bytes as it is.
    """
    memory, given = costs.memory(schedule.rank_of_stage), costs.costs(schedule, moves="offload" in remedies)
    held, share = schedule.peak_memory(memory, given).total, 1 + costs.cost.hardware.allocator_reserve
    left = [math.floor((cap - rank.total) / share) for rank in ranks]
    room = [max(0, x + y) for x, y in zip(held, left, strict=True)]
    fitted = schedule.fit(memory, room, remedies, given)
    most = costs.cost.hardware.host_share
    if most and "L" in fitted.kinds and max(away_bytes(fitted, costs)) > most:
        others = [remedy for remedy in remedies if remedy != "offload"]
        return fit_under(cap, schedule, ranks, costs, others) if others else schedule
    return fitted


def away_bytes(schedule: Schedule, costs: Price) -> list[int]:
    """Most bytes that each rank's moved units have in the tier at once: from O to the backward."""
    saved: Any = costs.memory(schedule.rank_of_stage).activations
    rows = [costs.microbatches(row) for row in saved]
    most = []
    for rank in range(schedule.num_ranks):
        away: dict[tuple[int, int, int], int] = {}
        held = peak = 0
        for letter, stage, m, s in schedule.units_of(rank):
            if letter == "O":
                away[stage, m, s] = rows[stage][min(m, len(rows[stage]) - 1)][s]
                held += away[stage, m, s]
                peak = max(peak, held)
            elif letter in "BI":
                held -= away.pop((stage, m, s), 0)
        most.append(peak)
    return most
