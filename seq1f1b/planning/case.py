"""One way to train under its own prices: its orders, their bytes and seconds, the plan that they make."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from seq1f1b.plan import Plan, StepLength
from seq1f1b.planning.cost import Price, RankBytes
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import LEVELS, Made, Orders
from seq1f1b.schedule import Costs, Family, Schedule

if TYPE_CHECKING:
    from seq1f1b.planning.pricing import Pricing

__all__ = ["REMEDIES", "Candidate", "Case", "Uncertain"]

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


@dataclass(eq=False)
class Case:
    """A candidate in the steps of each length; once it is simulated, with its order.

    Attributes:
        pricing: the work of all candidates.
        prices: of its units, for each length.
        bounds: seconds that no order of them can beat, likewise.
        made: the order.
        periods: of the step of each length; ``seconds``: their mean.
        bubble: share of that in which ranks neither compute nor update.
    """

    pricing: Pricing
    candidate: Candidate
    prices: Sequence[Price]
    bounds: Sequence[float]
    made: Made = field(init=False)
    periods: list[float] = field(init=False)
    seconds: float = field(init=False)
    bubble: float = field(init=False)

    @property
    def longest(self) -> Price:
        return self.prices[-1]

    @property
    def sort_key(self) -> tuple[int, int]:
        """Sorts by time; of times that differ by less than about 0.2% the one that needs less memory comes first."""
        return round(math.log(self.seconds) / _TIE), self.made.peak

    # -- the order

    def priced(self, levels: Sequence[float]) -> Case | int | None:
        """The candidate simulated, or the bytes that it needs where they are more than the cap; None: it fits without
        the remedies that it has. Bytes are the most of any length."""
        cap, orders, remedies = self.pricing.cap, self._orders, self.candidate.remedies
        if self.candidate.is_searched:
            choices = [orders.with_remedies(levels)]
        else:
            made = orders.made_for(math.inf if remedies else cap)
            choices = [made]
            if made.peak > cap:
                schedule = made.schedule.replace(prefetch=1)  # one place beyond those that it needs
                if schedule.places != made.schedule.places:
                    choices.append(orders.with_bytes(schedule, made.options))
            if remedies:
                if made.peak <= cap:
                    return None
                choices = list(map(orders.fit, choices))
        fitting = [each for each in choices if each.peak <= cap]
        if not fitting:
            return min(each.peak for each in choices)
        return min(map(self._simulated, fitting), key=lambda case: case.seconds)

    def refined(self) -> Case:
        """Searches for the same candidate for longer, and returns the faster of both."""
        again = self.priced(LEVELS)
        return min(self, again, key=lambda case: case.seconds) if isinstance(again, Case) else self

    @property
    def _orders(self) -> Orders:
        candidate = self.candidate
        build, cap = self._build, self.pricing.cap
        return Orders(candidate.family, self.prices, cap, candidate.remedies, build, self._seconds)

    def _build(self, options: Mapping[str, Any]) -> Schedule:
        schedule, seconds = self.pricing.build(self.candidate, options), self._spread_seconds
        return schedule.spread_vocabulary(costs=Costs(**seconds), embedding=True) if seconds else schedule

    @property
    def _spread_seconds(self) -> dict[str, Any]:
        """By which the passes of a vocabulary over the ranks find their places; {} where it is not."""
        shards = self.longest.shard_seconds
        return self.longest.seconds._asdict() | shards if shards else {}

    # -- its seconds

    def _costs(self, schedule: Schedule, hardware: Hardware | None = None) -> list[Costs]:
        """Costs of the steps of each length; hardware: another machine."""
        moves = "offload" in self.candidate.remedies
        return [price.costs(schedule, moves=moves) for price in self._prices_on(hardware)]

    def _prices_on(self, hardware: Hardware | None) -> Sequence[Price]:
        return self.prices if hardware is None else [each.cost.on(hardware).price(each.sizes) for each in self.prices]

    def _seconds(self, schedule: Schedule) -> float:
        return self.pricing.mean(self.pricing.period(schedule, costs)[0] for costs in self._costs(schedule))

    def _simulated(self, made: Made) -> Case:
        """Simulates an order, and returns the case with it."""
        found, pricing = copy.copy(self), self.pricing
        runs = [pricing.period(made.schedule, costs) for costs in self._costs(made.schedule)]
        pricing.num_simulated += 1
        # A few steps in a row may still be settling.
        found.made, found.periods = made, [max(run[0], bound) for bound, run in zip(self.bounds, runs, strict=True)]
        found.seconds = pricing.mean(found.periods)
        idle = pricing.mean(period * share for period, (_, share) in zip(found.periods, runs, strict=True))
        found.bubble = idle / found.seconds
        return found

    def uncertain(self) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        schedule, pricing = self.made.schedule, self.pricing
        known = self._costs(schedule)
        periods = [pricing.period(schedule, costs)[0] for costs in known]

        def change(name: str, end: float) -> float:
            at_end: dict[str, Any] = {name: end}
            changed = zip(self._costs(schedule, replace(pricing.hardware, **at_end)), known, periods, strict=True)
            return pricing.mean(
                0.0 if costs == before else pricing.period(schedule, costs)[0] - period
                for costs, before, period in changed
            )

        terms = []
        for name, ends in pricing.hardware.spread.items():
            changes = [change(name, end) for end in ends]
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    # -- the plan

    def plan(self, uncertain: tuple[Uncertain, ...]) -> Plan:
        pricing, candidate, schedule = self.pricing, self.candidate, self.made.schedule
        faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in uncertain))
        slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in uncertain))
        ends: dict[str, Any] = {
            name: high for name, (_, high) in pricing.hardware.spread.items() if name in _UNCERTAIN_BYTES
        }
        high = self._prices_on(replace(pricing.hardware, **ends))[-1].rank_bytes(schedule)
        sequences = pricing.num_microbatches * pricing.layout.data
        lengths = [
            StepLength(
                **each._asdict(),
                segment_sizes=tuple(price.sizes),
                seconds=period,
                tokens_per_second=sequences * each.tokens / period,
                peak=_totals(price.rank_bytes(schedule)),
            )
            for each, price, period in zip(pricing.lengths, self.prices, self.periods, strict=True)
        ]
        cost = self.longest.cost
        return Plan(
            model=pricing.model,
            hardware=pricing.hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=pricing.num_ranks,
            num_microbatches=pricing.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=self.seconds,
            low=max(0.0, self.seconds - faster),
            high=self.seconds + slower,
            bubble=self.bubble,
            tokens_per_second=sequences * pricing.mean(each.tokens for each in pricing.lengths) / self.seconds,
            peak=_totals(self.made.ranks),
            peak_high=_totals(high),
            cap=pricing.cap,
            optimizer_sync=pricing.optimizer_sync,
            options=self.made.options,
            prefetch=schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=schedule.cell_kinds() if schedule.kinds & {"R", "L"} else (),
            spread=self._spread_seconds,
        )


def _totals(ranks: Iterable[RankBytes]) -> tuple[int, ...]:
    return tuple(rank.total for rank in ranks)
