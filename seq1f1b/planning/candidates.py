"""Candidates of a search: ways to train on a machine, with prices of units, orders, seconds and plans."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import BuiltOrder, Orders
from seq1f1b.schedule import Family
from seq1f1b.seconds import Span

__all__ = ["STEPS", "Candidate", "Pricing", "RatedCandidate", "Uncertain", "group_lengths", "of_shards"]

STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; True makes all steps after the first equal
_TIE = 0.002  # shares of a step below this are a tie: the costs are less certain
_MOST_UNITS = 10_000_000  # most units of one candidate, at about 300 bytes each
_MOST_LENGTHS = 8  # groups of lengths; sequences are padded to the longest of a group
_UNCERTAIN_BYTES = ("activation_factor", "allocator_reserve", "context_bytes")


class Uncertain(NamedTuple):
    """Uncertain number of a machine: both ends of the range, and the change of the step in seconds at each end."""

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
    balance: int  # sequence length at which all stages, head included, take equal time; 0: equal numbers of layers
    remedies: tuple[str, ...] = ()  # members of REMEDIES: single units recompute or move until the order fits
    vocabulary: str = "ends"  # Layout's field

    def __str__(self) -> str:
        return f"{self.family.name} with {self.counts}"

    @property
    def counts(self) -> str:
        """Text of the candidate without the family's name."""
        said = [f"k {self.num_segments}", f"v {self.stages_per_rank}", f"inside {self.inside}"]
        if self.vocabulary == "ranks":
            said.append("vocabulary over the ranks")
        return ", ".join(said + [f"{remedy} by units" for remedy in self.remedies])

    @property
    def is_searched(self) -> bool:
        """Whether the search for the order includes the choice of remedies."""
        return bool(self.remedies) and "cap_bytes" in self.family.options


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
class RatedCandidate:
    """Candidate with the search's results so far.

    Attributes:
        prices: prices of the units for each length, the longest last.
        bounds: lower bound of the seconds of every order of the units, for each length; ``bound``: mean over the steps.
        units: number of F and B of all ranks.
        made: the order; if no order fits, the order with the least memory; None before an order was built.
        periods: period of the step of each length; ``seconds``: mean period; inf if the order does not fit.
        bubble: share of ``seconds`` in which ranks neither compute nor update.
        sort_key: key that sorts by time, and by memory where times differ by less than about 0.2 %.
        least: bytes of the order with the least memory if no order fits, else 0.
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

    def is_alike(self, other: RatedCandidate) -> bool:
        """Returns whether the two candidates differ only in the split, or only in the family's name."""
        mine, its = self.candidate, other.candidate._replace(mix=self.candidate.mix)
        if mine == its:
            return True
        counts = mine._replace(family=its.family, remedies=its.remedies)
        return counts == its and self.made.schedule == other.made.schedule


class Pricing:
    """The work common to all candidates, with shared prices.

    Attributes:
        lengths: lengths of the sequences, ascending; longest: tokens of the last length.
        cap: bytes that a plan may use of a device.
        balances: values of ``Candidate.balance`` to try.
        num_simulated: number of simulated orders.
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
        # Caches shared by all candidates.
        self.cost, self._price, self._bound = cache(self._find_cost), cache(self._find_price), cache(self._find_bound)
        self.look, self.rule = cache(self._look), cache(self._find_rule)
        self.longest = lengths[-1].seq_len
        alone = [self._cost_of(each.seq_len, 1, layout) for each in lengths]  # raises unless all is sound
        seconds = []
        for each, cost in zip(lengths, alone, strict=True):
            whole, parts = cost.span(0, cost.seq_len), cost.parts
            layers = (n * parts.layer(whole, kind).total for kind, n in enumerate(parts.counts.sum(0).tolist()))
            seconds.append(each.share * sum(layers))
        main = lengths[seconds.index(max(seconds))].seq_len  # the length on which a run spends most of its time
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def mean(self, values: Iterable[float]) -> float:
        """Returns the mean over the steps of values given for each length."""
        return sum([each.share * value for each, value in zip(self.lengths, values, strict=True)])

    # -- candidates and their prices

    def _find_rule(self, family: Family, v: int, k: int) -> str | None:
        """Returns the rule of the family, or of the model's layers, broken by the counts; None if no rule is broken."""
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
        """Returns a lower bound of the seconds of every order. splits: whether an order may split backwards.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        add to the work of a stage the first segment's way down to the stage and the way back up.
        """
        forward, inputs, weight, backward, _ = price.seconds
        # Seconds of a backward, and the part of the seconds on the way up: a separate W is off the way.
        way_up = backward
        if splits:  # an order may split some backwards and run others whole
            backward, way_up = np.minimum(backward, inputs + weight), np.minimum(backward, inputs)
        optimizer, M = np.array(price.cost.optimizer_seconds()), self.num_microbatches
        down, back, up = (M * table.sum(axis=1) for table in (forward, backward, way_up))
        mean = (down.sum() + back.sum() + optimizer.sum()) / self.num_ranks + M * of_shards(price)
        least = max(mean, (optimizer + down + back).max())
        if self.optimizer_sync:
            way = optimizer[0] + forward[:, 0].cumsum() - forward[:, 0] + way_up[:, 0].cumsum() - way_up[:, 0]
            least = max(least, (way + down + up).max())
        return float(least)

    def _look(self, candidate: Candidate) -> RatedCandidate:
        """Returns the prices and bounds of a candidate, without an order."""
        family, v, k, mix, inside, balance, _, vocabulary = candidate
        prices = [self._price(k, mix, v, inside, balance, vocabulary, each.seq_len) for each in self.lengths]
        bounds = [self._bound(price, family.splits_backward) for price in prices]
        units = 2 * self.num_ranks * v * self.num_microbatches * k
        return RatedCandidate(candidate, prices, bounds, self.mean(bounds), units)

    def fill_tokens(self) -> int:
        """Returns the tokens of a segment that fills the device: at most twice a long segment's time per token."""
        sizes = np.array([1 << i for i in range(5, 21)], float)
        cost = self._cost_of(self.longest, 1, self.layout)
        span = Span(sizes, 0.0 * sizes, sizes, (0.0 * sizes,) * len(cost.parts.windows))
        rates = cost.source.seconds(span).total[0] / sizes
        return int(sizes[np.argmax(rates <= 2 * rates[-1])])

    # -- orders

    def orders(self, found: RatedCandidate) -> Orders:
        """Returns the orders for a candidate."""
        candidate, M = found.candidate, self.num_microbatches
        shares = [each.share for each in self.lengths]
        steps = {"steps": STEPS[self.optimizer_sync], "optimizer_sync": self.optimizer_sync}
        return Orders(candidate.family, found.prices, M, self.cap, candidate.remedies, shares, steps)

    def priced(self, found: RatedCandidate, *, is_quick: bool = False) -> RatedCandidate | None:
        """Returns the candidate with an order, simulated if the order fits; None if the order fits without remedies.

        is_quick: searches for an order at one level and cap, not at several.
        """
        cap, candidate, orders = self.cap, found.candidate, self.orders(found)._replace(is_quick=is_quick)
        if candidate.is_searched:
            choices = [orders.with_remedies()]
        else:
            made = orders.made_for(math.inf if candidate.remedies else cap)
            choices = [made]
            if made.peak > cap:
                schedule = made.schedule.replace(prefetch=1)  # fewer receive places: one beyond the order's need
                if schedule.places != made.schedule.places:
                    choices.append(orders.with_bytes(schedule, made.options))
            if candidate.remedies:
                if made.peak <= cap:
                    return None
                choices = list(map(orders.fit, choices))
        simulated = [self._simulated(found, orders, made) for made in choices]
        return min(simulated, key=lambda each: (each.seconds, each.least))

    def _simulated(self, found: RatedCandidate, orders: Orders, made: BuiltOrder) -> RatedCandidate:
        """Returns a copy of the candidate with the order, simulated if the order fits."""
        found = copy.copy(found)
        found.made = made
        if made.peak > self.cap:
            found.least = made.peak
            return found
        self.num_simulated += 1
        runs = orders.run(made.schedule)
        # Steps in a row settle slowly: the period of a few simulated steps may lie below the bound.
        found.periods = [max(run.period or 0.0, bound) for bound, run in zip(found.bounds, runs, strict=True)]
        found.seconds = self.mean(found.periods)
        work = [
            sum(run.busy) + sum(price.cost.optimizer_seconds()) for run, price in zip(runs, found.prices, strict=True)
        ]
        found.bubble = 1 - self.mean(work) / self.num_ranks / found.seconds
        found.sort_key = round(math.log(found.seconds) / _TIE), made.peak
        return found

    # -- plans

    def uncertain(self, found: RatedCandidate) -> tuple[Uncertain, ...]:
        """Returns the machine's uncertain numbers that change the step, largest change first, each varied alone."""
        schedule, orders = found.made.schedule, self.orders(found)
        seconds = orders.seconds(schedule)

        def change(name: str, end: float) -> float:
            """Returns by how many seconds the step takes longer if the named number has the value ``end``."""
            changed: dict[str, Any] = {name: end}
            machine = replace(self.hardware, **changed)
            prices = [price.cost.on(machine).price(price.sizes) for price in found.prices]
            return orders._replace(prices=prices).seconds(schedule) - seconds

        terms = []
        for name, (low, high) in self.hardware.spread.items():
            moved = change(name, low), change(name, high)
            if any(moved):
                terms.append(Uncertain(name, low, high, *moved))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    def plan(self, found: RatedCandidate, uncertain: tuple[Uncertain, ...]) -> Plan:
        """Returns the plan of a candidate with an order."""
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
            options=_lists(made.options),
            prefetch=made.schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=made.schedule.cell_kinds() if made.schedule.kinds & {"R", "L"} else (),
            spread=_lists(prices[-1]._spread_seconds),
        )


def _lists(value: Any) -> Any:
    """Returns arrays, also those within lists and dicts, as lists of numbers."""
    if isinstance(value, dict):
        return {name: _lists(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_lists, value))
    return value.tolist() if hasattr(value, "tolist") else value


def of_shards(price: Price) -> float:
    """Returns the seconds of a rank's vocabulary passes in one micro-batch; 0 if the vocabulary is not spread."""
    return float(sum(table[0].sum() for table in price.shard_seconds.values()))
