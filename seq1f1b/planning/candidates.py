"""Candidates of a search: ways to train on a machine, with the prices of their units, orders, seconds and plans."""

from __future__ import annotations

import copy
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import Made, Orders
from seq1f1b.schedule import Costs, Family, Schedule, build_schedule
from seq1f1b.seconds import Span

__all__ = ["STEPS", "Candidate", "Found", "Pricing", "Uncertain", "group_lengths", "of_shards"]

STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
_TIE = 0.002  # share of a step by which times are alike: the costs are less certain
_MOST_UNITS = 10_000_000  # of one candidate, about 300 bytes each
_MOST_LENGTHS = 8  # that sequences are padded to, where they have more
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


class Length(NamedTuple):
    """Steps of one length: what sequences are padded to, their share of all steps, tokens of a sequence in the mean."""

    seq_len: int
    share: float
    tokens: float


def group_lengths(seq_len: int | None, lengths: Mapping[int, int] | None, layout: Layout | None) -> list[Length]:
    """Ascending, at most ``_MOST_LENGTHS``."""
    if (seq_len is None) == (lengths is None):
        raise ValueError("give seq_len, or lengths where sequences differ: one of the two")
    if lengths is None:
        lengths = {seq_len or 0: 1}
    elif layout is not None and layout.documents is not None:
        raise ValueError("documents are packed into sequences of one length: give seq_len, not lengths")
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"{'seq_len' if seq_len is not None else 'a length'} is {min(lengths, default=0)}, must be at least 1"
        )
    if min(lengths.values()) < 1:
        raise ValueError(f"a length has {min(lengths.values())} sequences, must have at least 1")
    total, before = sum(length * count for length, count in lengths.items()), 0
    groups: dict[int, list[tuple[int, int]]] = {}
    for number, (length, count) in enumerate(sorted(lengths.items())):
        group = number if len(lengths) <= _MOST_LENGTHS else _MOST_LENGTHS * before // total
        groups.setdefault(group, []).append((length, count))
        before += length * count
    grouped = []
    for members in groups.values():
        sequences = sum(count for _, count in members)
        tokens = sum(length * count for length, count in members)
        grouped.append(Length(members[-1][0], sequences / sum(lengths.values()), tokens / sequences))
    return grouped


@dataclass(eq=False)
class Found:
    """A candidate with what the search has found of it.

    Attributes:
        prices: of its units in sequences of each length, the longest last.
        bounds: seconds that no order of these units can beat, for each length; ``bound``: their mean over the steps.
        units: F and B of all ranks.
        made: the order; if none fits, the one that needs least; before it was built, none.
        periods: of the step of each length; ``seconds``: their mean; inf if the order does not fit.
        bubble: share of that in which ranks neither compute nor update.
        sort_key: sorts by time; of times within about 0.2 % the one that needs less memory comes first.
        least: bytes that it needs at least, where it does not fit; else 0.
    """

    candidate: Candidate
    prices: Sequence[Price]
    bounds: Sequence[float]
    bound: float
    units: int
    made: Any = None  # a Made
    periods: Sequence[float] = ()
    seconds: float = math.inf
    bubble: float = 0.0
    sort_key: tuple[int, int] = (0, 0)
    least: int = 0

    def is_alike(self, other: Found) -> bool:
        """Whether both differ in the split, or the family's name, alone."""
        mine, its = self.candidate, other.candidate._replace(mix=self.candidate.mix)
        if mine == its:
            return True
        counts = mine._replace(family=its.family, remedies=its.remedies)
        return counts == its and self.made.schedule == other.made.schedule


class Pricing:
    """The work that all candidates do, and the prices that they share.

    Attributes:
        lengths: of the sequences, ascending; longest: tokens of the last one.
        cap: bytes of a device.
        balances: values of ``Candidate.balance`` that are worth trying.
        num_simulated: orders that were simulated.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        lengths: Sequence[Length],
        num_ranks: int,
        num_microbatches: int,
        layout: Layout,
        optimizer_sync: bool,
        cap: int,
    ) -> None:
        self.model, self.hardware, self.lengths, self.layout, self.cap = model, hardware, lengths, layout, cap
        self.num_ranks, self.num_microbatches, self.optimizer_sync = num_ranks, num_microbatches, optimizer_sync
        self.num_simulated = 0
        # Candidates share these.
        self.cost, self._price, self._bound = cache(self._find_cost), cache(self._find_price), cache(self._find_bound)
        self.look, self.rule = cache(self._look), cache(self._find_rule)
        self.longest = lengths[-1].seq_len
        alone = [self._cost_of(each.seq_len, 1, layout) for each in lengths]  # raises unless all is sound
        seconds = []
        for each, cost in zip(lengths, alone, strict=True):
            whole, parts = cost.span(0, cost.seq_len), cost.parts
            layers = (n * parts.layer(whole, kind).total for kind, n in enumerate(parts.counts))
            seconds.append(each.share * sum(layers))
        main = lengths[seconds.index(max(seconds))].seq_len  # most of the time goes to this length
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def mean(self, values: Iterable[float]) -> float:
        """Over the steps, of one value for each length."""
        return sum([each.share * value for each, value in zip(self.lengths, values, strict=True)])

    # -- candidates and their prices

    def _find_rule(self, family: Family, v: int, k: int) -> str | None:
        """The rule of the family, or of the model's layers, that the counts break; None if they break none."""
        if self.num_ranks * v > self.model.layers:
            return f"P v <= {self.model.layers} layers"
        if 2 * self.num_ranks * v * self.num_microbatches * k > _MOST_UNITS:
            return f"2 P v M k <= {_MOST_UNITS} units"
        counts: dict[str, Any] = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        return family.broken_rule(**counts, num_segments=k, stages_per_rank=v)

    def _cost_of(self, seq_len: int, v: int, layout: Layout) -> CostModel:
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": v, "seq_len": seq_len}
        return CostModel(self.model, self.hardware, layout=layout, **counts)

    def _find_cost(self, v: int, inside: str, balance: int, vocabulary: str, seq_len: int) -> CostModel:
        layout = replace(self.layout, inside=inside, layers=None, vocabulary=vocabulary)
        if balance:
            layout = replace(layout, layers=self._cost_of(balance, v, layout).balanced_layers())
        return self._cost_of(seq_len, v, layout)

    def _find_price(self, k: int, mix: float, *of_cost: Any) -> Price:
        cost, step = self.cost(*of_cost), math.lcm(self.layout.tensor * self.layout.context, 128)
        step = 1 if cost.seq_len < 8 * step * k else step
        return cost.price(cost.split(k, mix=mix, multiple_of=step))

    def _find_bound(self, price: Price, splits: bool) -> float:
        """Seconds that no order of these units can beat. splits: whether the order may split backwards.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        the first segment's way down to that stage and the way back up come on top.
        """
        forward, inputs, weight, backward, _ = price.seconds
        # What a backward takes, and its part on the way up: a W that is its own unit may run beside that.
        way_up = backward
        if splits:  # some such orders have whole backwards, too
            backward, way_up = np.minimum(backward, inputs + weight), np.minimum(backward, inputs)
        optimizer, M = np.array(price.cost.optimizer_seconds()), self.num_microbatches
        down, back, up = (M * table.sum(axis=1) for table in (forward, backward, way_up))
        mean = (down.sum() + back.sum() + optimizer.sum()) / self.num_ranks + M * of_shards(price)
        least = max(mean, (optimizer + down + back).max())
        if self.optimizer_sync:
            way = optimizer[0] + forward[:, 0].cumsum() - forward[:, 0] + way_up[:, 0].cumsum() - way_up[:, 0]
            least = max(least, (way + down + up).max())
        return float(least)

    def _look(self, candidate: Candidate) -> Found:
        """A candidate that can be built, before its order is."""
        family, v, k, mix, inside, balance, _, vocabulary = candidate
        prices = [self._price(k, mix, v, inside, balance, vocabulary, each.seq_len) for each in self.lengths]
        bounds = [self._bound(price, family.splits_backward) for price in prices]
        units = 2 * self.num_ranks * v * self.num_microbatches * k
        return Found(candidate, prices, bounds, self.mean(bounds), units)

    def fill_tokens(self) -> int:
        """Tokens from which on a segment fills the device: its time per token is at most twice that of a long one."""
        sizes = np.array([1 << i for i in range(5, 21)], float)
        cost = self._cost_of(self.longest, 1, self.layout)
        span = Span(sizes, 0.0 * sizes, sizes, (0.0 * sizes,) * len(cost.parts.windows))
        rates = cost.source.seconds(span)[cost.source.kinds[0]].total / sizes
        return int(sizes[np.argmax(rates <= 2 * rates[-1])])

    # -- orders

    def priced(self, found: Found, *, is_quick: bool = False) -> Found | None:
        """The candidate with its order, simulated if it fits; None: it fits without the remedies that it has.

        is_quick: an order that is searched for is searched for once, not for several levels or caps.
        """
        cap, candidate = self.cap, found.candidate
        build, seconds = partial(self._build, found), partial(self._seconds, found)
        orders = Orders(candidate.family, found.prices, cap, candidate.remedies, build, seconds, is_quick)
        if candidate.is_searched:
            choices = [orders.with_remedies()]
        else:
            made = orders.made_for(math.inf if candidate.remedies else cap)
            choices = [made]
            if made.peak > cap:
                schedule = made.schedule.replace(prefetch=1)  # one place beyond those that it needs
                if schedule.places != made.schedule.places:
                    choices.append(orders.with_bytes(schedule, made.options))
            if candidate.remedies:
                if made.peak <= cap:
                    return None
                choices = list(map(orders.fit, choices))
        simulated = [self._simulated(found, made) for made in choices]
        return min(simulated, key=lambda each: (each.seconds, each.least))

    def _build(self, found: Found, options: Mapping[str, Any]) -> Schedule:
        family, v, k, *_ = found.candidate
        counts: dict[str, Any] = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        schedule = build_schedule(family.name, options=options, **counts, num_segments=k, stages_per_rank=v)
        seconds = spread_seconds(found)
        return schedule.spread_vocabulary(costs=Costs(**seconds), embedding=True) if seconds else schedule

    def _costs(self, found: Found, schedule: Schedule) -> list[Costs]:
        """Costs of the steps of each length."""
        moves = "offload" in found.candidate.remedies
        return [price.costs(schedule, moves=moves) for price in found.prices]

    def _period(self, schedule: Schedule, costs: Costs) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(costs, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None and isinstance(costs.optimizer, Sequence)
        return run.period, 1 - (sum(run.busy) + sum(costs.optimizer)) / (run.period * self.num_ranks)

    def _seconds(self, found: Found, schedule: Schedule) -> float:
        return self.mean([self._period(schedule, costs)[0] for costs in self._costs(found, schedule)])

    def _simulated(self, found: Found, made: Made) -> Found:
        """The candidate with an order, simulated if it fits."""
        found = copy.copy(found)
        found.made = made
        if made.peak > self.cap:
            found.least = made.peak
            return found
        self.num_simulated += 1
        runs = [self._period(made.schedule, costs) for costs in self._costs(found, made.schedule)]
        # A few steps in a row may still be settling.
        found.periods = [max(run[0], bound) for bound, run in zip(found.bounds, runs, strict=True)]
        found.seconds = self.mean(found.periods)
        idle = self.mean([period * share for period, (_, share) in zip(found.periods, runs, strict=True)])
        found.bubble = idle / found.seconds
        found.sort_key = round(math.log(found.seconds) / _TIE), made.peak
        return found

    # -- plans

    def uncertain(self, found: Found) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        schedule, moves = found.made.schedule, "offload" in found.candidate.remedies
        periods = [self._period(schedule, costs)[0] for costs in self._costs(found, schedule)]

        def change(name: str, end: float) -> float:
            """Seconds by which the step takes longer where one number of the machine is this end."""
            changed: dict[str, Any] = {name: end}
            prices = (price.cost.on(replace(self.hardware, **changed)).price(price.sizes) for price in found.prices)
            later = (self._period(schedule, price.costs(schedule, moves=moves))[0] for price in prices)
            return self.mean(map(operator.sub, later, periods))

        terms = []
        for name, (low, high) in self.hardware.spread.items():
            moved = change(name, low), change(name, high)
            if any(moved):
                terms.append(Uncertain(name, low, high, *moved))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    def plan(self, found: Found, uncertain: tuple[Uncertain, ...]) -> Plan:
        """The plan that a candidate makes."""
        candidate, made, prices = found.candidate, found.made, found.prices
        faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in uncertain))
        slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in uncertain))
        spread, cost = self.hardware.spread, prices[-1].cost
        ends: dict[str, Any] = {name: spread[name][1] for name in _UNCERTAIN_BYTES if name in spread}
        high = cost.on(replace(self.hardware, **ends)).price(prices[-1].sizes).rank_bytes(made.schedule)
        sequences = self.num_microbatches * self.layout.data
        lengths = [
            StepLength(
                **each._asdict(),
                segment_sizes=tuple(price.sizes),
                seconds=period,
                tokens_per_second=sequences * each.tokens / period,
                peak=tuple([rank.total for rank in price.rank_bytes(made.schedule)]),
            )
            for each, price, period in zip(self.lengths, prices, found.periods, strict=True)
        ]
        return Plan(
            model=self.model,
            hardware=self.hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=found.seconds,
            low=max(0.0, found.seconds - faster),
            high=found.seconds + slower,
            bubble=found.bubble,
            tokens_per_second=sequences * self.mean([each.tokens for each in self.lengths]) / found.seconds,
            peak=tuple([rank.total for rank in made.ranks]),
            peak_high=tuple([rank.total for rank in high]),
            cap=self.cap,
            optimizer_sync=self.optimizer_sync,
            options=_told(made.options),
            prefetch=made.schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=made.schedule.cell_kinds() if made.schedule.kinds & {"R", "L"} else (),
            spread=_told(spread_seconds(found)),
        )


def _told(options: dict[str, Any]) -> dict[str, Any]:
    """Options with lists in place of arrays, as files have them."""
    return json.loads(json.dumps(options, default=lambda array: array.tolist()))  # type: ignore[no-any-return]


def of_shards(price: Price) -> float:
    """Seconds of a rank's passes of the vocabulary in one micro-batch; 0 where it is not over the ranks."""
    return float(sum(table[0].sum() for table in price.shard_seconds.values()))


def spread_seconds(found: Found) -> dict[str, Any]:
    """By which the passes of a vocabulary over the ranks find their places; {} where it is not."""
    price = found.prices[-1]
    return price.seconds._asdict() | price.shard_seconds if price.shard_seconds else {}
