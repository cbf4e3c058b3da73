"""Orders of a family for the units of a step: built for the units' costs, and made to fit within a cap of memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from seq1f1b.files import nearest_name
from seq1f1b.planning.cost import Price, RankBytes
from seq1f1b.schedule import Costs, Family, Schedule, Simulation, build_schedule, families

__all__ = ["BuiltOrder", "Orders", "families_named"]

_CAP_TRIES = 4  # orders tried for one cap
_TIER_PARTS = (1.0, 0.9, 0.75, 0.5, 0.0)  # shares of the host memory, tried until an order fits
_LEVELS = (1.0, 2.0, 4.0, 0.5)  # caps of orders with remedies are 1 + level (P - 1) / k micro-batches


def families_named(names: Collection[str]) -> list[Family]:
    """Returns the families with the given names."""
    known = {family.name: family for family in families()}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, known)}")
    return [known[name] for name in names]


class BuiltOrder(NamedTuple):
    """An order, the options of its construction, and the bytes of its ranks."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]
    peak: int  # bytes of the rank that holds most


class Orders(NamedTuple):
    """Orders of one family for the units of a step.

    Attributes:
        prices: prices of the units, for steps of each length, the longest last.
        num_microbatches: micro-batches of a step; steps of rows have as many as rows.
        cap: bytes that a rank may hold.
        remedies: ways of units to save memory until an order fits, see :meth:`seq1f1b.Schedule.fit`.
        shares: share of the steps of each length.
        steps: arguments of :meth:`seq1f1b.Schedule.simulate` for several steps in a row; {}: a single step counts.
        options: further options of the family, for orders without a cap in bytes.
        prefetch: receive places of orders.
        is_quick: tries one order for each cap, and one level: a first look at a searched order.
        is_whole: tries whole backwards alone; the last order counts recomputation even in a first look.
    """

    family: Family
    prices: Sequence[Price]
    num_microbatches: int
    cap: float
    remedies: Sequence[str] = ()
    shares: Sequence[float] = (1.0,)
    steps: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    prefetch: int | None = None
    is_quick: bool = False
    is_whole: bool = False

    @property
    def price(self) -> Price:
        """Price of the longest steps, for which orders are made."""
        return self.prices[-1]

    def build(self, options: Mapping[str, Any]) -> Schedule:
        """Builds the order with the given options of the family."""
        price, num_ranks = self.price, self.price.cost.num_ranks
        schedule = build_schedule(
            self.family.name,
            num_ranks=num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=price._segments,
            stages_per_rank=price.cost.num_stages // num_ranks,
            options={**({} if "cap_bytes" in options else self.options), **options},
            parents=price.parents,
            prefetch=self.prefetch,
        )
        if not price.shard_seconds:
            return schedule
        return schedule.spread_vocabulary(costs=Costs(**price._spread_seconds), embedding=True)

    def run(self, schedule: Schedule) -> list[Simulation]:
        """Simulates the order with the steps of each length."""
        costs = (price.costs(schedule, moves="L" in schedule.kinds) for price in self.prices)
        return [schedule.simulate(each, **self.steps) for each in costs]

    def seconds(self, schedule: Schedule) -> float:
        """Returns the seconds of a step, the mean over the lengths."""
        runs = zip(self.shares, self.run(schedule), strict=True)
        return sum([share * (run.makespan if run.period is None else run.period) for share, run in runs])

    def with_bytes(self, schedule: Schedule, options: dict[str, Any]) -> BuiltOrder:
        """Returns the order with the bytes of each rank, the most over all lengths."""
        ranks = self.prices[0].rank_bytes(schedule)
        for price in self.prices[1:]:
            both = zip(ranks, price.rank_bytes(schedule), strict=True)
            ranks = [one if one.total >= other.total else other for one, other in both]
        return BuiltOrder(schedule, options, ranks, max([rank.total for rank in ranks]))

    def make(self, options: dict[str, Any]) -> BuiltOrder:
        """Builds the order with the given options, and counts the bytes."""
        return self.with_bytes(self.build(options), options)

    def made_for(self, cap: float) -> BuiltOrder:
        """Returns the family's order within ``cap``; if no order fits, the order that holds least.

        A family with a choice gets the faster of split and whole backwards. A family with a cap in bytes counts every
        unit at the unit's largest size, and has no count of weights or workspace. So several orders are made in turn,
        each for the bytes that the order before left to activations and cache; the fastest order that fits is returned.
        """
        if "costs" not in self.family.options:
            return self.make({})
        price, takes_cap = self.price, "cap_bytes" in self.family.options and cap < math.inf
        held, options = price.held_bytes(), self._ways()
        if takes_cap and price.least_bytes() > cap:  # no order fits: room for a single micro-batch holds about least
            return self.make(options[-1] | {"unit_bytes": held, "cap_bytes": self._one_microbatch()})
        choices = list(map(self.make, options))
        if len(choices) > 1:
            choices.sort(key=lambda made: (made.peak > cap, self.seconds(made.schedule), made.peak))
        made = choices[0]
        if made.peak <= cap or not takes_cap:
            return made
        free, share = made.options, 1 + price.cost.hardware.allocator_reserve
        least = [0] * made.schedule.num_ranks  # bytes of one micro-batch
        for rank, row in zip(made.schedule.rank_of_stage, held, strict=True):
            least[rank] += max(int(units.sum()) for units in price.microbatches(row))
        room, aim = [rank.activations + rank.kv for rank in made.ranks], cap
        tried: list[BuiltOrder] = []
        for _ in range(1 if self.is_quick else _CAP_TRIES):
            left = [math.floor((aim - rank.total) / share) for rank in made.ranks]
            room = [max(x + y, z) for x, y, z in zip(room, left, least, strict=True)]
            made = self.make(free | {"unit_bytes": held, "cap_bytes": room})
            tried.append(made)
            aim -= max(0, made.peak - cap)  # peaks jump from order to order: aim lower after an order above the cap
        return min(tried, key=lambda made: self._place(made, cap))

    def with_remedies(self, first: BuiltOrder | None = None) -> BuiltOrder:
        """Returns the order of a family with a cap in bytes, with units that recompute or move.

        Tries orders that hold more or fewer micro-batches, makes each fit, and takes the fastest. The fastest is then
        searched for again, with the seconds of recomputation in the costs.

        first: the order of a first look, ``is_quick``, at equal units.
        """
        held, one = self.price.held_bytes(), self._one_microbatch()
        tried = [] if first is None else [(self._place(first, self.cap), first)]

        def best() -> tuple[tuple[float, int], BuiltOrder]:
            return min(tried, key=lambda each: each[0])

        def consider(options: dict[str, Any]) -> None:
            made = self.make(options)
            made = self.fit(made) if made.peak > self.cap else made
            tried.append((self._place(made, self.cap), made))

        def at_level(level: float) -> dict[str, Any]:
            share = 1 + level * (self.price.cost.num_ranks - 1) / len(self.price.longest)
            return {"unit_bytes": held, "cap_bytes": [math.ceil(share * x) for x in one]}

        for way in self._ways() if first is None else ():
            consider(way | at_level(_LEVELS[0]))
        for level in () if self.is_quick else _LEVELS[1:]:
            consider(best()[1].options | at_level(level))
        (taken, _), made = best()
        if taken < math.inf and (self.is_whole or not self.is_quick):
            consider(made.options | {"costs": _with_recompute(made, self.price)})
        return best()[1]

    def fit(self, made: BuiltOrder) -> BuiltOrder:
        """Returns the order with units that recompute or move until every rank fits in the cap, or no unit is left.

        The machine's host memory limits moves. Smaller shares of the host memory are tried if a rank could not hold the
        bytes that come back.
        """
        price, schedule, hw = self.price, made.schedule, self.price.cost.hardware
        memory, costs = price.memory(schedule.rank_of_stage), price.costs(schedule, moves="offload" in self.remedies)
        held = schedule.peak_memory(memory, costs).total
        left = [math.floor((self.cap - rank.total) / (1 + hw.allocator_reserve)) for rank in made.ranks]
        room = [max(0, x + y) for x, y in zip(held, left, strict=True)]
        tier, parts = hw.host_share, _TIER_PARTS[: 1 if len(self.remedies) == 1 else None]
        for share in [int(part * tier) for part in parts] if tier else [None]:
            made = self.with_bytes(schedule.fit(memory, room, self.remedies, costs, share), made.options)
            if made.peak <= self.cap:
                break
        return made

    def _place(self, made: BuiltOrder, cap: float) -> tuple[float, int]:
        """Returns the sort key of an order: seconds if the order fits, else infinity, and then bytes."""
        return self.seconds(made.schedule) if made.peak <= cap else math.inf, made.peak

    def _ways(self) -> list[dict[str, Any]]:
        """Returns the options to try, each with costs: split backwards, and whole backwards with the seconds of B,
        if the family has the choice."""
        seconds, cost, taken = self.price.seconds, self.price.cost, self.family.options
        options: dict[str, Any] = {"costs": [seconds.forward, seconds.input, seconds.weight]}
        if "transfer" in taken:
            latencies, rates, _ = cost.links(range(cost.num_ranks))
            message = statistics.fmean(self.price.message_bytes)
            times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
            options["transfer"] = statistics.fmean(times) if times else 0.0
        if "backward" not in taken:
            return [options]
        whole = options | {"backward": "whole", "costs": [seconds.forward, seconds.backward, 0.0]}
        return [whole] if self.is_whole else [options, whole]

    def _one_microbatch(self) -> list[int]:
        """Returns the bytes of one micro-batch on each rank, the larger of two placements of stages: a loop and a V."""
        price, P = self.price, self.price.cost.num_ranks
        loop, wave = [0] * P, [0] * P
        for stage, row in enumerate(price.held_bytes()):
            turn, place = divmod(stage, P)
            most = max(int(units.sum()) for units in price.microbatches(row))
            loop[place] += most
            wave[place if turn % 2 == 0 else P - 1 - place] += most
        return list(map(max, loop, wave))


def _with_recompute(made: BuiltOrder, price: Price) -> list[Any]:
    """Returns the seconds of F, I and W, where I includes R times the share of recomputed units among equal units."""
    forward, inputs, weight = made.options["costs"]
    kinds = np.array([list(row.replace(" ", "")) for row in made.schedule.cell_kinds()])
    again = (kinds == "R").reshape(len(kinds), -1, len(price.sizes))  # [stage, one of equal micro-batches, unit]
    return [forward, inputs + price.seconds.recompute * again.sum(1) / again.shape[1], weight]
