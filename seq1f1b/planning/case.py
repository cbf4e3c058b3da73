"""One way to train on a machine: its units' prices, its orders, their bytes and seconds, the plan that they make."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import CostModel, Price, RankBytes
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import LEVELS, Made, Orders
from seq1f1b.schedule import Costs, Family, Schedule, build_schedule
from seq1f1b.seconds import Span, arrays_of, seconds_of

__all__ = ["GIB", "REMEDIES", "STEPS", "Candidate", "Case", "Uncertain", "Work", "group_lengths"]

GIB = 1 << 30
_MOST_UNITS = 10_000_000  # of one candidate, about 300 bytes each
_MOST_LENGTHS = 8  # that sequences are padded to, where they have more
STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
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
class Work:
    """The work that all candidates do, and the prices that they share.

    Attributes:
        lengths: of the sequences, ascending; longest: tokens of the last one.
        cap: bytes of a device.
        balances: values of ``Candidate.balance`` that are worth trying.
        num_simulated: orders that were simulated.
    """

    model: ModelShape
    hardware: Hardware
    lengths: Sequence[Length]
    num_ranks: int
    num_microbatches: int
    layout: Layout
    optimizer_sync: bool
    cap: int
    num_simulated: int = 0

    def __post_init__(self) -> None:
        self._cost, self._price = cache(self._make_cost), cache(self._make_price)  # candidates share them
        self._bounds = cache(self._find_bounds)
        self.longest = self.lengths[-1].seq_len
        alone = [self._cost_of(each.seq_len, 1, self.layout) for each in self.lengths]  # raises unless all is sound
        seconds = []
        for each, cost in zip(self.lengths, alone, strict=True):
            whole, parts = cost.span(0, cost.seq_len), cost.parts
            layers = (n * parts.layer(whole, kind).total for kind, n in enumerate(parts.counts))
            seconds.append(each.share * sum(layers))
        main = self.lengths[seconds.index(max(seconds))].seq_len  # most of the time goes to this length
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def mean(self, values: Iterable[float]) -> float:
        """Over the steps, of one value for each length."""
        return sum(each.share * value for each, value in zip(self.lengths, values, strict=True))

    def period(self, schedule: Schedule, costs: Costs) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(costs, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None and isinstance(costs.optimizer, Sequence)
        return run.period, 1 - (sum(run.busy) + sum(costs.optimizer)) / (run.period * self.num_ranks)

    # -- orders

    def rule(self, candidate: Candidate) -> str | None:
        """The rule of the family, or of the model's layers, that the counts break; None if they break none."""
        if self.num_ranks * candidate.stages_per_rank > self.model.layers:
            return f"P v <= {self.model.layers} layers"
        if self.num_units(candidate) > _MOST_UNITS:
            return f"2 P v M k <= {_MOST_UNITS} units"
        return candidate.family.broken_rule(**self._counts(candidate))

    def _counts(self, candidate: Candidate) -> dict[str, Any]:
        counts = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        return counts | {"num_segments": candidate.num_segments, "stages_per_rank": candidate.stages_per_rank}

    def build(self, candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
        """The order."""
        return build_schedule(candidate.family.name, options=options, **self._counts(candidate))

    def num_units(self, candidate: Candidate) -> int:
        """F and B of all ranks."""
        return 2 * self.num_ranks * candidate.stages_per_rank * self.num_microbatches * candidate.num_segments

    # -- prices

    def _cost_of(self, seq_len: int, stages_per_rank: int, layout: Layout) -> CostModel:
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": stages_per_rank, "seq_len": seq_len}
        return CostModel(self.model, self.hardware, layout=layout, **counts)

    def _make_cost(self, v: int, inside: str, balance: int, vocabulary: str, seq_len: int) -> CostModel:
        layout = replace(self.layout, inside=inside, layers=None, vocabulary=vocabulary)
        if balance:
            layout = replace(layout, layers=self._cost_of(balance, v, layout).balanced_layers())
        return self._cost_of(seq_len, v, layout)

    def _make_price(self, k: int, mix: float, *of_cost: Any) -> Price:
        cost = self._cost(*of_cost)
        step = math.lcm(self.layout.tensor * self.layout.context, 128)
        step = 1 if cost.seq_len < 8 * step * k else step
        return cost.price(cost.split(k, mix=mix, multiple_of=step))

    def prices(self, candidate: Candidate) -> list[Price]:
        """The price of its units in sequences of each length. Candidates share stages and segments."""
        _, v, k, mix, inside, balance, _, vocabulary = candidate
        return [self._price(k, mix, v, inside, balance, vocabulary, each.seq_len) for each in self.lengths]

    def is_repeated(self, candidate: Candidate) -> bool:
        """Whether its layers are those of a balance before it."""
        before = self.balances[: self.balances.index(candidate.balance)]
        layers = self.prices(candidate)[-1].cost.layers
        others = (self.prices(candidate._replace(balance=balance))[-1] for balance in before)
        return any(other.cost.layers == layers for other in others)

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no order of these units can beat, in the mean over the steps."""
        return self.mean(self.bounds(candidate))

    def bounds(self, candidate: Candidate) -> list[float]:
        """The least seconds of the steps of each length."""
        return [self._bounds(price, candidate.family.splits_backward) for price in self.prices(candidate)]

    def _find_bounds(self, price: Price, splits: bool) -> float:
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
        least: float = (sum(work[0]) + sum(work[1]) + sum(optimizer)) / self.num_ranks + M * _of_shards(price)
        down, up = optimizer[0], 0.0
        for stage, (forward, back, back_up) in enumerate(zip(*work, strict=True)):
            least = max(least, optimizer[stage] + forward + back)
            if self.optimizer_sync:
                least = max(least, down + forward + back_up + up)
            down += seconds.forward[stage][0]
            up += way_up[stage][0]
        return least

    def fill_tokens(self) -> int:
        """Tokens from which on a segment fills the device: its time per token is at most twice that of a long one."""
        sizes = [1 << i for i in range(5, 21)]
        cost = self._cost_of(self.longest, 1, self.layout)
        none = (0.0,) * len(cost.parts.windows)
        found = seconds_of(cost.source, arrays_of([Span(size, 0.0, size, none) for size in sizes]))
        rates = [(f + b) / n for f, b, n in zip(found.forward[0], found.backward[0], sizes, strict=True)]
        return next(n for n, rate in zip(sizes, rates, strict=True) if rate <= 2 * rates[-1])


@dataclass(eq=False)
class Case:
    """A candidate in the steps of each length; once it is priced, with its order.

    Attributes:
        prices: of its units, for each length.
        made: the order; if none fits, the one that needs least.
        periods: of the step of each length; ``seconds``: their mean; inf if the order does not fit.
        bubble: share of that in which ranks neither compute nor update.
    """

    work: Work
    candidate: Candidate
    made: Made = field(init=False)
    periods: list[float] = field(init=False)
    seconds: float = math.inf
    bubble: float = 0.0

    def __post_init__(self) -> None:
        self.prices = self.work.prices(self.candidate)

    @property
    def longest(self) -> Price:
        return self.prices[-1]

    @property
    def sort_key(self) -> tuple[int, int]:
        """Sorts by time; of times that differ by less than about 0.2% the one that needs less memory comes first."""
        return round(math.log(self.seconds) / _TIE), self.made.peak

    # -- the order

    def priced(self, levels: Sequence[float] = LEVELS) -> Case | None:
        """The candidate with its order, simulated if it fits; None: it fits without the remedies that it has."""
        cap, remedies, candidate = self.work.cap, self.candidate.remedies, self.candidate
        orders = Orders(candidate.family, self.prices, cap, remedies, self._build, self._seconds)
        if candidate.is_searched:
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
        found = [self._with(made) for made in choices]
        return min(found, key=lambda case: (case.seconds, case.made.peak if case.seconds == math.inf else 0))

    def _build(self, options: Mapping[str, Any]) -> Schedule:
        schedule, seconds = self.work.build(self.candidate, options), self._spread_seconds
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
        return self.work.mean(self.work.period(schedule, costs)[0] for costs in self._costs(schedule))

    def _with(self, made: Made) -> Case:
        """The case with an order, simulated if it fits."""
        found, work = copy.copy(self), self.work
        found.made = made
        if made.peak <= work.cap:
            work.num_simulated += 1
            runs = [work.period(made.schedule, costs) for costs in self._costs(made.schedule)]
            # A few steps in a row may still be settling.
            found.periods = [max(run[0], bound) for bound, run in zip(work.bounds(self.candidate), runs, strict=True)]
            found.seconds = work.mean(found.periods)
            idle = work.mean(period * share for period, (_, share) in zip(found.periods, runs, strict=True))
            found.bubble = idle / found.seconds
        return found

    def uncertain(self) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        schedule, work = self.made.schedule, self.work
        known = self._costs(schedule)
        periods = [work.period(schedule, costs)[0] for costs in known]

        def change(name: str, end: float) -> float:
            at_end: dict[str, Any] = {name: end}
            changed = zip(self._costs(schedule, replace(work.hardware, **at_end)), known, periods, strict=True)
            return work.mean(
                0.0 if costs == before else work.period(schedule, costs)[0] - period
                for costs, before, period in changed
            )

        terms = []
        for name, ends in work.hardware.spread.items():
            changes = [change(name, end) for end in ends]
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    def share_again(self) -> float:
        """The share of the step in which ranks compute what they had computed before, or wait for the tier."""
        kept, work, P = [], self.work, self.work.num_ranks
        for price in work.prices(self.candidate._replace(inside="none")):
            seconds = price.seconds
            backward = [seconds.backward]
            if "W" in self.made.schedule.kinds:
                backward = [seconds.input, seconds.weight]
            each = sum(sum(map(sum, table)) for table in (seconds.forward, *backward)) + P * _of_shards(price)
            kept.append((work.num_microbatches * each + sum(price.cost.optimizer_seconds())) / P)
        return max(0.0, 1 - self.bubble - work.mean(kept) / self.seconds)

    # -- the plan

    def plan(self, uncertain: tuple[Uncertain, ...]) -> Plan:
        work, candidate, schedule = self.work, self.candidate, self.made.schedule
        faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in uncertain))
        slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in uncertain))
        ends: dict[str, Any] = {
            name: high for name, (_, high) in work.hardware.spread.items() if name in _UNCERTAIN_BYTES
        }
        high = self._prices_on(replace(work.hardware, **ends))[-1].rank_bytes(schedule)
        sequences = work.num_microbatches * work.layout.data
        lengths = [
            StepLength(
                **each._asdict(),
                segment_sizes=tuple(price.sizes),
                seconds=period,
                tokens_per_second=sequences * each.tokens / period,
                peak=_totals(price.rank_bytes(schedule)),
            )
            for each, price, period in zip(work.lengths, self.prices, self.periods, strict=True)
        ]
        cost = self.longest.cost
        return Plan(
            model=work.model,
            hardware=work.hardware.name,
            seq_len=cost.seq_len,
            layout=replace(cost.layout, layers=cost.layers),
            schedule=candidate.family.name,
            num_ranks=work.num_ranks,
            num_microbatches=work.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            segment_sizes=lengths[-1].segment_sizes,
            mix=candidate.mix,
            seconds=self.seconds,
            low=max(0.0, self.seconds - faster),
            high=self.seconds + slower,
            bubble=self.bubble,
            tokens_per_second=sequences * work.mean(each.tokens for each in work.lengths) / self.seconds,
            peak=_totals(self.made.ranks),
            peak_high=_totals(high),
            cap=work.cap,
            optimizer_sync=work.optimizer_sync,
            options=self.made.options,
            prefetch=schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=schedule.cell_kinds() if schedule.kinds & {"R", "L"} else (),
            spread=self._spread_seconds,
        )


def _totals(ranks: Iterable[RankBytes]) -> tuple[int, ...]:
    return tuple(rank.total for rank in ranks)


def _of_shards(price: Price) -> float:
    """Seconds of a rank's passes of the vocabulary in one micro-batch; 0 where it is not over the ranks."""
    return sum(sum(table[0]) for table in price.shard_seconds.values())
