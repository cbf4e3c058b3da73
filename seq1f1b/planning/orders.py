"""Candidates of a search: ways to train on a machine, with orders built for the units' costs, made to fit within a cap,
rated, and written as plans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from seq1f1b.flat import whole
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import Price, RankBytes
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.result import Uncertain
from seq1f1b.schedule import Costs, Family, Schedule, Simulation, build_schedule

__all__ = ["BuiltOrder", "Candidate", "Length", "Orders", "Rated", "group_lengths"]

_MOST_LENGTHS = 8  # groups of lengths; sequences are padded to the longest of a group
_UNCERTAIN_BYTES = ("activation_factor", "allocator_reserve", "context_bytes")
_CAP_TRIES = 4  # orders tried for one cap
_TIER_PARTS = (1.0, 1.0, 1.0, 0.75, 0.5, 0.0)  # shares of the host memory, tried until an order fits
_NEAR_CAP = 1.05  # an order above so many caps is not tried again
_LEVELS = (1.0, 2.0, 4.0, 0.5)  # caps of orders with remedies are 1 + level (P - 1) / k micro-batches


class Candidate(NamedTuple):
    family: Family
    stages_per_rank: int
    num_segments: int
    mix: float
    inside: str  # recomputation inside of blocks, of Layout
    balance: int  # sequence length at which all stages, head included, take equal time; 0: equal numbers of layers
    remedies: tuple[str, ...] = ()  # members of REMEDIES: single units recompute or move until the order fits
    vocabulary: str = "ends"  # Layout's field

    @property
    def counts(self) -> str:
        """Text of the candidate without the family's name."""
        said = [f"k {self.num_segments}", f"v {self.stages_per_rank}", f"inside {self.inside}"]
        if self.vocabulary == "ranks":
            said.append("vocabulary over the ranks")
        return ", ".join(said + [f"{remedy} by units" for remedy in self.remedies])


class Length(NamedTuple):
    """Steps of one length: padded length, share of all steps, mean tokens of a sequence before padding."""

    seq_len: int
    share: float
    tokens: float


def group_lengths(seq_len: int | None, lengths: Mapping[int, int] | None, layout: Layout | None) -> list[Length]:
    """Returns the lengths, ascending, in at most ``_MOST_LENGTHS`` groups of about equal numbers of tokens."""
    if (seq_len is None) == (lengths is None):
        raise ValueError("give seq_len, or lengths where sequences differ: one of the two")
    if lengths is None:
        lengths = {seq_len or 0: 1}
    elif layout is not None and layout.documents is not None:
        raise ValueError("documents are packed into sequences of one length: give seq_len, not lengths")
    whole("a length" if seq_len is None else "seq_len", min(lengths, default=0), 1)
    whole("the number of sequences of a length", min(lengths.values()), 1)
    total, before = sum(length * count for length, count in lengths.items()), 0
    groups: dict[int, tuple[int, int, int]] = {}  # longest length, sequences and tokens
    for number, (length, count) in enumerate(sorted(lengths.items())):
        group = number if len(lengths) <= _MOST_LENGTHS else _MOST_LENGTHS * before // total
        _, sequences, tokens = groups.get(group, (0, 0, 0))
        groups[group] = length, sequences + count, tokens + length * count
        before += length * count
    return [Length(length, n / sum(lengths.values()), tokens / n) for length, n, tokens in groups.values()]


class BuiltOrder(NamedTuple):
    """An order, the options of its construction, and the bytes of its ranks."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]
    peak: int  # bytes of the rank that holds most


class Orders(NamedTuple):
    """Orders of one family for the units of a step."""

    family: Family
    prices: Sequence[Price]  # of the units, for steps of each length, the longest last, for which orders are made
    num_microbatches: int  # of a step; a step of rows has as many as rows
    cap: float  # bytes that a rank may hold
    remedies: Sequence[str] = ()  # ways of units to save memory until an order fits, see Schedule.fit
    lengths: Sequence[Length] = (Length(0, 1.0, 0.0),)  # ascending
    steps: Mapping[str, Any] = {}  # arguments of Schedule.simulate for several steps in a row; {}: a single step counts
    options: Mapping[str, Any] = {}  # further options of the family, for orders without a cap in bytes
    is_quick: bool = False  # tries one order for each cap, and one level: a first look at a searched order
    is_whole: bool = False  # tries whole backwards alone; the last order counts recomputation even in a first look

    def run(self, schedule: Schedule) -> tuple[float, list[Simulation]]:
        """Simulates the order with the steps of each length. Returns the mean seconds, and all simulations."""
        costs = (price.costs(schedule, moves="L" in schedule.kinds) for price in self.prices)
        runs = [schedule.simulate(each, **self.steps) for each in costs]
        seconds = [run.makespan if run.period is None else run.period for run in runs]
        return statistics.fmean(seconds, [each.share for each in self.lengths]), runs

    def with_bytes(self, schedule: Schedule, options: dict[str, Any]) -> BuiltOrder:
        """Returns the order with the bytes of each rank, the most over all lengths."""
        ranks = self.prices[0].rank_bytes(schedule)
        for price in self.prices[1:]:
            both = zip(ranks, price.rank_bytes(schedule), strict=True)
            ranks = [one if one.total >= other.total else other for one, other in both]
        return BuiltOrder(schedule, options, ranks, max([rank.total for rank in ranks]))

    def make(self, options: dict[str, Any]) -> BuiltOrder:
        """Builds the order with the given options of the family, and counts the bytes."""
        price = self.prices[-1]
        num_ranks = price.cost.num_ranks
        schedule = build_schedule(
            self.family.name,
            num_ranks=num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=price.num_segments,
            stages_per_rank=price.cost.num_stages // num_ranks,
            options={**({} if "cap_bytes" in options else self.options), **options},
            parents=price.parents,
        )
        if price.shard_seconds:
            costs = Costs(**price.seconds._asdict(), **price.shard_seconds)
            schedule = schedule.spread_vocabulary(costs=costs, embedding=True)
        return self.with_bytes(schedule, options)

    def within_cap(self) -> BuiltOrder:
        """Returns the family's order within the cap; if no order fits, the order that holds least.

        A family with a choice gets the faster of split and whole backwards. A family with a cap in bytes counts every
        unit at the unit's largest size, and has no count of weights or workspace. So several orders are made in turn,
        each for the bytes that the order before left to activations and cache; the fastest order that fits is returned.
        """
        if "costs" not in self.family.options:
            return self.make({})
        price, cap = self.prices[-1], self.cap
        takes_cap = "cap_bytes" in self.family.options and cap < math.inf
        held, options = price.held_bytes(), self._ways()
        if takes_cap and price.least_bytes > cap:  # no order fits: room for a single micro-batch holds about least
            return self.make(options[-1] | {"unit_bytes": held, "cap_bytes": self._one_microbatch()})
        choices = list(map(self.make, options))
        if len(choices) > 1:
            choices.sort(key=lambda made: (made.peak > cap, self.run(made.schedule)[0], made.peak))
        made = choices[0]
        if made.peak <= cap or not takes_cap:
            return made
        free, share, least = made.options, 1 + price.cost.hardware.allocator_reserve, self._one_microbatch()
        room, aim = [rank.activations + rank.kv for rank in made.ranks], cap
        tried: list[BuiltOrder] = []
        for _ in range(1 if self.is_quick else _CAP_TRIES):
            left = [math.floor((aim - rank.total) / share) for rank in made.ranks]
            room = [max(x + y, z) for x, y, z in zip(room, left, least, strict=True)]
            made = self.make(free | {"unit_bytes": held, "cap_bytes": room})
            tried.append(made)
            aim -= max(0, made.peak - cap)  # peaks jump from order to order: aim lower after an order above the cap
        return min(tried, key=self._place)

    def with_remedies(self, first: BuiltOrder | None = None) -> BuiltOrder:
        """Returns the fastest order that fits, with units that recompute or move, for a family whose option is a cap in
        bytes; if none fits, the order that holds least.

        Tries orders that hold more or fewer micro-batches, and makes each fit. The fastest is then searched for again,
        with the seconds of recomputation in the costs.

        first: an order of equal units, from a search with ``is_quick``.
        """
        price, one = self.prices[-1], self._one_microbatch()
        held = price.held_bytes()
        tried = [] if first is None else [(self._place(first), first)]

        def best() -> tuple[tuple[float, int], BuiltOrder]:
            return min(tried, key=lambda each: each[0])

        def consider(options: dict[str, Any]) -> None:
            made = self.make(options)
            made = self.fit(made) if made.peak > self.cap else made
            tried.append((self._place(made), made))

        def at_level(level: float) -> dict[str, Any]:
            share = 1 + level * (price.cost.num_ranks - 1) / len(price.longest)
            return {"unit_bytes": held, "cap_bytes": [math.ceil(share * x) for x in one]}

        for way in self._ways() if first is None else ():
            consider(way | at_level(_LEVELS[0]))
        for level in () if self.is_quick else _LEVELS[1:]:
            consider(best()[1].options | at_level(level))
        (taken, _), made = best()
        if taken < math.inf and (self.is_whole or not self.is_quick):
            forward, inputs, weight = made.options["costs"]  # I gets R, times the share of recomputed units
            kinds = np.array([list(row.replace(" ", "")) for row in made.schedule.cell_kinds()])
            again = (kinds == "R").reshape(len(kinds), -1, len(price.sizes))  # the middle: equal micro-batches
            inputs = inputs + price.seconds.recompute * again.sum(1) / again.shape[1]
            consider(made.options | {"costs": [forward, inputs, weight]})
        return best()[1]

    def fit(self, made: BuiltOrder) -> BuiltOrder:
        """Returns the order with units that recompute or move until every rank fits in the cap, or no unit is left;
        without remedies the order as it is.

        The machine's host memory limits moves. Moves may need more receive places: then units are chosen again for less
        room on the ranks above the cap, and at last for smaller shares of the host memory.
        """
        if not self.remedies:
            return made
        price, schedule = self.prices[-1], made.schedule
        hw = price.cost.hardware
        memory, costs = price.memory(schedule.rank_of_stage), price.costs(schedule, moves="offload" in self.remedies)
        # Bytes of pinned host memory for each device of a full node; 0 if the tier is not host memory.
        tier, parts = hw.host_memory / hw.node_size, _TIER_PARTS[: 1 if len(self.remedies) == 1 else None]
        room, most = list(schedule.peak_memory(memory, costs).total), 1 << 62  # most: by which a rank's room may rise
        for part in parts:
            left = [math.floor((self.cap - rank.total) / (1 + hw.allocator_reserve)) for rank in made.ranks]
            room, most = [max(0, x + min(y, most)) for x, y in zip(room, left, strict=True)], 0
            fitted = schedule.fit(memory, room, self.remedies, costs, int(part * tier) if tier else None)
            made = self.with_bytes(fitted, made.options)
            if not self.cap < made.peak < _NEAR_CAP * self.cap:
                break
        return made

    def _place(self, made: BuiltOrder) -> tuple[float, int]:
        """Returns the sort key of an order: seconds if the order fits, else infinity, and then bytes."""
        return self.run(made.schedule)[0] if made.peak <= self.cap else math.inf, made.peak

    def _ways(self) -> list[dict[str, Any]]:
        """Returns the options to try, each with costs: split backwards, and whole backwards with the seconds of B,
        if the family has the choice."""
        price, taken = self.prices[-1], self.family.options
        seconds, cost = price.seconds, price.cost
        options: dict[str, Any] = {"costs": [seconds.forward, seconds.input, seconds.weight]}
        if "transfer" in taken:
            latencies, rates, _ = cost.links(range(cost.num_ranks))
            message = statistics.fmean(price.message_bytes)
            times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
            options["transfer"] = statistics.fmean(times) if times else 0.0
        if "backward" not in taken:
            return [options]
        whole = options | {"backward": "whole", "costs": [seconds.forward, seconds.backward, 0.0]}
        return [whole] if self.is_whole else [options, whole]

    def _one_microbatch(self) -> list[int]:
        """Returns the bytes of one micro-batch on each rank, the larger of two placements of stages: a loop and a V."""
        price = self.prices[-1]
        of_microbatches = [units.sum(0) for units in price.microbatches(price.held_bytes().T)]  # of each stage
        turns = np.max(of_microbatches, axis=0).reshape(-1, price.cost.num_ranks)
        wave = [row[::-1] if turn % 2 else row for turn, row in enumerate(turns)]
        return list(map(max, turns.sum(0).tolist(), np.sum(wave, axis=0).tolist()))


@dataclass(eq=False)
class Rated:
    """Candidate with the search's results so far."""

    candidate: Candidate
    orders: Orders
    bounds: Sequence[float]  # lower bound of the seconds of every order of the units, for each length
    bound: float  # mean over the steps
    units: int  # number of F and B of all ranks
    made: Any = None  # the BuiltOrder; if no order fits, the one with the least memory; None before one was built
    periods: Sequence[float] = ()  # period of the step of each length
    seconds: float = math.inf  # mean period; inf if the order does not fit
    bubble: float = 0.0  # share of the seconds in which ranks neither compute nor update
    sort_key: tuple[int, int] = (0, 0)  # by time, and by memory where times differ by less than about 0.2 %
    least: int = 0  # bytes of the order with the least memory if no order fits, else 0

    def uncertain(self, hardware: Hardware) -> tuple[Uncertain, ...]:
        """Returns the machine's uncertain numbers that change the step, largest change first, each varied alone."""
        schedule, orders, terms = self.made.schedule, self.orders, list[Uncertain]()
        seconds, _ = orders.run(schedule)
        for name, ends in hardware.spread.items():
            if name in _UNCERTAIN_BYTES and "L" not in schedule.kinds:  # the seconds of moves alone depend on bytes
                continue
            changes = []
            for end in ends:
                changed: dict[str, Any] = {name: end}
                machine = replace(hardware, **changed)
                prices = [price.cost.on(machine).price(price.sizes) for price in orders.prices]
                changes.append(orders._replace(prices=prices).run(schedule)[0] - seconds)
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(map(abs, term[3:]))))

    def plan(self, hardware: Hardware, faster: float, slower: float) -> Plan:
        """Returns the plan of a candidate with an order.

        faster, slower: shares of the seconds by which a step may be faster, and slower.
        """
        candidate, orders, made = self.candidate, self.orders, self.made
        spread, price = hardware.spread, orders.prices[-1]
        cost = price.cost
        ends: dict[str, Any] = {name: spread[name][1] for name in _UNCERTAIN_BYTES if name in spread}
        high = cost.on(replace(hardware, **ends)).price(price.sizes).rank_bytes(made.schedule)
        sequences, tables = orders.num_microbatches * cost.layout.data, price.seconds._asdict() | price.shard_seconds
        lengths = [
            StepLength(
                **each._asdict(),
                segment_sizes=tuple(price.sizes),
                seconds=period,
                tokens_per_second=sequences * each.tokens / period,
                peak=tuple([rank.total for rank in price.rank_bytes(made.schedule)]),
            )
            for each, price, period in zip(orders.lengths, orders.prices, self.periods, strict=True)
        ]
        options = {
            name: [np.asarray(each).tolist() for each in value] if isinstance(value, (list, np.ndarray)) else value
            for name, value in made.options.items()
        }
        return Plan(
            model=cost.model,
            hardware=hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=cost.num_ranks,
            num_microbatches=orders.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=self.seconds,
            low=max(0.0, (1 - faster) * self.seconds),
            high=(1 + slower) * self.seconds,
            bubble=self.bubble,
            tokens_per_second=sequences * sum(each.share * each.tokens for each in orders.lengths) / self.seconds,
            peak=tuple([rank.total for rank in made.ranks]),
            peak_high=tuple([rank.total for rank in high]),
            cap=int(orders.cap),
            optimizer_sync=orders.steps["optimizer_sync"],
            options=options,
            prefetch=made.schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=made.schedule.cell_kinds() if made.schedule.kinds & {"R", "L"} else (),
            spread={name: table.tolist() for name, table in tables.items()} if price.shard_seconds else {},
        )
