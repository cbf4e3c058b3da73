"""One way to train under its own prices: its orders, their bytes and seconds, the plan that they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.fitting import LEVELS, Made, fit_under, order_for_costs, order_with_remedies
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.price import Price, RankBytes
from seq1f1b.schedule import Costs, Family, Schedule, build_schedule

__all__ = ["REMEDIES", "STEPS", "Asked", "Candidate", "Case", "Found", "Length", "Uncertain"]

STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
_MOST_KEPT = 4_000_000  # units of the orders that several candidates share, kept for the next one
_TIE = 0.002  # share of a step by which times are alike: the costs are less certain
REMEDIES = ("recompute", "offload")
"""Ways of single units to make an order fit: arguments of :meth:`seq1f1b.Schedule.fit`."""
_UNCERTAIN_BYTES = ("activation_factor", "allocator_reserve", "context_bytes")


class Uncertain(NamedTuple):
    """A number of the machine that is not certain: its ends, and the seconds by which they move the step."""

    name: str
    low: float
    high: float
    change_at_low: float
    change_at_high: float


class Length(NamedTuple):
    """Steps of one length: what sequences are padded to, their share of all steps, tokens of a sequence in the mean."""

    seq_len: int
    share: float
    tokens: float


class Candidate(NamedTuple):
    family: Family
    stages_per_rank: int
    num_segments: int
    mix: float
    inside: str  # recomputation inside of blocks, of Layout
    balance: int  # length of the sequences at which all stages take the same time, head included; 0: as many layers
    remedies: tuple[str, ...] = ()  # what single units do until the order fits: of REMEDIES
    vocabulary: str = "ends"  # of Layout

    def __str__(self) -> str:
        return f"{self.family.name} with {self.counts}"

    @property
    def counts(self) -> str:
        """All but the family."""
        said = [f"k {self.num_segments}", f"v {self.stages_per_rank}", f"inside {self.inside}"]
        if self.vocabulary == "ranks":
            said.append("vocabulary over the ranks")
        return ", ".join(said + [f"{remedy} by units" for remedy in self.remedies])

    @property
    def is_searched(self) -> bool:
        """Whether the order is searched for together with its remedies."""
        return bool(self.remedies) and "cap_bytes" in self.family.options


@dataclass
class Asked:
    """The work of all candidates, and the orders that several of them share.

    Attributes:
        lengths: of the sequences, ascending.
        orders: those that do not depend on costs, by the family's name, v and k.
    """

    model: ModelShape
    hardware: Hardware
    lengths: Sequence[Length]
    num_ranks: int
    num_microbatches: int
    layout: Layout
    optimizer_sync: bool
    num_simulated: int = 0
    orders: dict[tuple[str, int, int], Schedule] = field(default_factory=dict)

    def mean(self, values: Iterable[float]) -> float:
        """Over the steps, of one value for each length."""
        return sum(each.share * value for each, value in zip(self.lengths, values, strict=True))

    def num_units(self, stages_per_rank: int, num_segments: int) -> int:
        """F and B of all ranks."""
        return 2 * self.num_ranks * stages_per_rank * self.num_microbatches * num_segments

    def bound(self, price: Price, splits: bool) -> float:
        """Seconds that no order of these units can beat. splits: whether the order may split backwards.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        the first segment's way down to that stage and the way back up come on top.
        """
        seconds, M = price.seconds, self.num_microbatches
        # What a backward takes, and its part on the way up: a W that is its own unit may run beside that.
        backward = way_up = seconds.backward
        if splits:  # some such orders have whole backwards, too
            tables = zip(seconds.backward, seconds.input, seconds.weight, strict=True)
            backward = [[min(b, i + w) for b, i, w in zip(*rows, strict=True)] for rows in tables]
            tables_up = zip(seconds.backward, seconds.input, strict=True)
            way_up = [[min(b, i) for b, i in zip(*rows, strict=True)] for rows in tables_up]
        optimizer = price.cost.optimizer_seconds()
        work = [[M * sum(row) for row in part] for part in (seconds.forward, backward, way_up)]
        least: float = (sum(work[0]) + sum(work[1]) + sum(optimizer)) / self.num_ranks + M * of_shards(price)
        down, up = optimizer[0], 0.0
        for stage, (forward, back, back_up) in enumerate(zip(*work, strict=True)):
            least = max(least, optimizer[stage] + forward + back)
            if self.optimizer_sync:
                least = max(least, down + forward + back_up + up)
            down += seconds.forward[stage][0]
            up += way_up[stage][0]
        return least

    def period(self, schedule: Schedule, costs: Costs) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(costs, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None and isinstance(costs.optimizer, Sequence)
        return run.period, 1 - (sum(run.busy) + sum(costs.optimizer)) / (run.period * self.num_ranks)

    def build(self, candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
        return build_schedule(
            candidate.family.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            options=options,
        )

    def order(self, candidate: Candidate) -> Schedule:
        """That of a family which takes no costs. The oldest kept ones go first."""
        key = (candidate.family.name, candidate.stages_per_rank, candidate.num_segments)
        if key not in self.orders:
            self.orders[key] = self.build(candidate, {})
            while len(self.orders) > 1 and sum(self.num_units(v, k) for _, v, k in self.orders) > _MOST_KEPT:
                del self.orders[next(iter(self.orders))]
        return self.orders[key]


def of_shards(price: Price) -> float:
    """Seconds of a rank's passes of the vocabulary in one micro-batch; 0 where it is not over the ranks."""
    return sum(sum(table[0]) for table in price.shard_seconds.values())


@dataclass(eq=False)
class Found:
    """A candidate with its order and price."""

    case: Case
    periods: list[float]  # of the step of each length
    seconds: float
    bubble: float
    made: Made

    @property
    def candidate(self) -> Candidate:
        return self.case.candidate

    @property
    def sort_key(self) -> tuple[int, int]:
        """Sorts by time; of times that differ by less than about 0.2% the one that needs less memory comes first."""
        return round(math.log(self.seconds) / _TIE), self.made.peak


class Case:
    """A candidate in the steps of each length.

    Args:
        prices: of its units, for each length.
        bounds: seconds that no order of them can beat, likewise.
    """

    def __init__(self, asked: Asked, candidate: Candidate, prices: Sequence[Price], bounds: Sequence[float]) -> None:
        self._asked = asked
        self.candidate, self.prices, self._bounds = candidate, prices, bounds
        self.longest = prices[-1]

    # -- the order

    def priced(self, cap: int, levels: Sequence[float]) -> Found | int | None:
        """The candidate simulated, or the bytes that it needs where they are more than the cap; None: it fits without
        the remedies that it has."""
        if self.candidate.is_searched:
            searched = self._search_with_remedies(cap, levels)
            return self._simulated(searched) if searched.peak <= cap else searched.peak
        made = self._order(cap if not self.candidate.remedies else math.inf)
        choices = [made]
        if made.peak > cap:
            schedule = made.schedule.replace(prefetch=1)  # one place beyond those that it needs
            if schedule.places != made.schedule.places:
                choices.append(self._changed(made, schedule))
        if self.candidate.remedies:
            if made.peak <= cap:
                return None
            choices = [self._fit(each, cap) for each in choices]
        fitting = [each for each in choices if each.peak <= cap]
        if not fitting:
            return min(each.peak for each in choices)
        return min((self._simulated(each) for each in fitting), key=lambda found: found.seconds)

    def refined(self, found: Found, cap: int) -> Found:
        """Searches for the same candidate for longer, and returns the faster of both."""
        searched = self._search_with_remedies(cap, LEVELS)
        again = self._simulated(searched) if searched.peak <= cap else found
        return min(found, again, key=lambda each: each.seconds)

    def _order(self, cap: float) -> Made:
        """The candidate's order; of one that is made for the cap the fastest that fits it, if any does. Bytes are the
        most of any length."""
        if "costs" not in self.candidate.family.options:
            schedule = self._spread(self._asked.order(self.candidate))
            made = Made(schedule, {}, self.longest.rank_bytes(schedule))
        else:
            made = order_for_costs(self.candidate.family, self.longest, cap, self._build, self._seconds)
        return made if len(self.prices) == 1 else self._changed(made, made.schedule)

    def _search_with_remedies(self, cap: int, levels: Sequence[float]) -> Made:
        """The order and what its units give up, of a family that takes costs and a cap."""

        def fit(made: Made) -> Made:
            return self._fit(made, cap)

        family = self.candidate.family
        return order_with_remedies(family, self.longest, cap, self._build, fit, self._seconds, levels=levels)

    def _fit(self, made: Made, cap: int) -> Made:
        """The order in which units recompute, or move, until it fits, for the longest sequences."""
        return self._changed(made, fit_under(cap, made.schedule, made.ranks, self.longest, self.candidate.remedies))

    def _changed(self, made: Made, schedule: Schedule) -> Made:
        """Another order, with the bytes of the ranks under the length that takes most."""
        lengths = [price.rank_bytes(schedule) for price in self.prices]
        return made._replace(
            schedule=schedule, ranks=[max(ranks, key=lambda rank: rank.total) for ranks in zip(*lengths, strict=True)]
        )

    def _build(self, options: Mapping[str, Any]) -> Schedule:
        return self._spread(self._asked.build(self.candidate, options))

    @property
    def _spread_seconds(self) -> dict[str, Any]:
        """By which the passes of a vocabulary over the ranks find their places; {} where it is not."""
        shards = self.longest.shard_seconds
        return self.longest.seconds._asdict() | shards if shards else {}

    def _spread(self, schedule: Schedule) -> Schedule:
        seconds = self._spread_seconds
        return schedule.spread_vocabulary(costs=Costs(**seconds), embedding=True) if seconds else schedule

    # -- its seconds

    def _costs(self, schedule: Schedule, hardware: Hardware | None = None) -> list[Costs]:
        """Costs of the steps of each length; hardware: another machine."""
        moves = "offload" in self.candidate.remedies
        return [price.costs(schedule, moves=moves) for price in self._prices_on(hardware)]

    def _prices_on(self, hardware: Hardware | None) -> Sequence[Price]:
        return self.prices if hardware is None else [each.cost.on(hardware).price(each.sizes) for each in self.prices]

    def _seconds(self, schedule: Schedule) -> float:
        return self._asked.mean(self._asked.period(schedule, costs)[0] for costs in self._costs(schedule))

    def _simulated(self, made: Made) -> Found:
        runs = [self._asked.period(made.schedule, costs) for costs in self._costs(made.schedule)]
        self._asked.num_simulated += 1
        # A few steps in a row may still be settling.
        periods = [max(period, bound) for bound, (period, _) in zip(self._bounds, runs, strict=True)]
        seconds = self._asked.mean(periods)
        idle = self._asked.mean(period * share for period, (_, share) in zip(periods, runs, strict=True))
        return Found(self, periods, seconds, idle / seconds, made)

    def uncertain(self, found: Found) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        schedule, hardware = found.made.schedule, self._asked.hardware
        known = self._costs(schedule)
        periods = [self._asked.period(schedule, costs)[0] for costs in known]

        def change(name: str, end: float) -> float:
            at_end: dict[str, Any] = {name: end}
            changed = zip(self._costs(schedule, replace(hardware, **at_end)), known, periods, strict=True)
            return self._asked.mean(
                0.0 if costs == before else self._asked.period(schedule, costs)[0] - period
                for costs, before, period in changed
            )

        terms = []
        for name, ends in hardware.spread.items():
            changes = [change(name, end) for end in ends]
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    # -- the plan

    def plan(self, found: Found, cap: int, uncertain: tuple[Uncertain, ...]) -> Plan:
        asked, candidate, schedule = self._asked, self.candidate, found.made.schedule
        faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in uncertain))
        slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in uncertain))
        ends: dict[str, Any] = {
            name: high for name, (_, high) in asked.hardware.spread.items() if name in _UNCERTAIN_BYTES
        }
        high = self._prices_on(replace(asked.hardware, **ends))[-1].rank_bytes(schedule)
        sequences = asked.num_microbatches * asked.layout.data
        lengths = [
            StepLength(
                each.seq_len,
                each.share,
                each.tokens,
                tuple(price.sizes),
                period,
                sequences * each.tokens / period,
                _totals(price.rank_bytes(schedule)),
            )
            for each, price, period in zip(asked.lengths, self.prices, found.periods, strict=True)
        ]
        cost = self.longest.cost
        return Plan(
            model=asked.model,
            hardware=asked.hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=asked.num_ranks,
            num_microbatches=asked.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=found.seconds,
            low=max(0.0, found.seconds - faster),
            high=found.seconds + slower,
            bubble=found.bubble,
            tokens_per_second=sequences * asked.mean(each.tokens for each in asked.lengths) / found.seconds,
            peak=_totals(found.made.ranks),
            peak_high=_totals(high),
            cap=cap,
            optimizer_sync=asked.optimizer_sync,
            options=found.made.options,
            prefetch=schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=schedule.cell_kinds() if schedule.kinds & {"R", "L"} else (),
            spread=self._spread_seconds,
        )


def _totals(ranks: Iterable[RankBytes]) -> tuple[int, ...]:
    return tuple(rank.total for rank in ranks)
