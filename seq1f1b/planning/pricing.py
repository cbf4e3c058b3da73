"""The price of one way to train: its seconds from step to step, its bytes, and why a family is not among the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import CostModel, RankBytes, Span
from seq1f1b.planning.fitting import LEVELS, Made, fit_under, order_for_costs, order_with_remedies
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.unit_costs import SequenceCosts
from seq1f1b.schedule import Costs, Family, Schedule, build_schedule
from seq1f1b.table import rounded

__all__ = ["GIB", "REMEDIES", "STEPS", "Candidate", "Found", "Length", "Pricing", "Uncertain", "group_lengths"]

GIB = 1 << 30
STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
_MOST_UNITS = 10_000_000  # of one candidate, about 300 bytes each
_MOST_KEPT = 4_000_000  # units of the orders that several candidates share, kept for the next one
_MOST_LENGTHS = 8  # that sequences are padded to, where they have more
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


class Candidate(NamedTuple):
    family: Family
    stages_per_rank: int
    num_segments: int
    mix: float
    recompute: str
    balance: int  # length of the sequences at which all stages take the same time, head included; 0: as many layers
    remedies: tuple[str, ...] = ()  # what single units do until the order fits: of REMEDIES
    vocabulary: str = "ends"  # of Layout

    def __str__(self) -> str:
        return f"{self.family.name} with {self.counts}"

    @property
    def counts(self) -> str:
        """All but the family."""
        said = [f"k {self.num_segments}", f"v {self.stages_per_rank}", f"recompute {self.recompute}"]
        if self.vocabulary == "ranks":
            said.append("vocabulary over the ranks")
        return ", ".join(said + [f"{remedy} by units" for remedy in self.remedies])


@dataclass(eq=False)
class Found:
    """A candidate with its order and price."""

    candidate: Candidate
    periods: list[float]  # of the step of each length
    seconds: float
    bubble: float
    made: Made

    @property
    def place(self) -> tuple[int, int]:
        """Sorts by time; of times that differ by less than about 0.2% the one that needs less memory comes first."""
        return round(math.log(self.seconds) / _TIE), self.made.peak


class Pricing:
    """The price of candidates, and what became of each family."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        lengths: Sequence[Length],
        num_ranks: int,
        num_microbatches: int,
        layout: Layout,
        optimizer_sync: bool,
    ) -> None:
        self.model, self.hardware, self.lengths, self.layout = model, hardware, lengths, layout
        self.num_ranks, self.num_microbatches, self.optimizer_sync = num_ranks, num_microbatches, optimizer_sync
        self.is_quick = False  # whether orders with remedies are searched for by one level, until :meth:`refine`
        self.num_simulated = 0
        self.units_priced = 0  # of all ranks, in F and B
        self.too_large: dict[Candidate, int] = {}  # peak bytes of what did not fit, by all but k and the split
        self._bounds: dict[tuple[Any, ...], float] = {}
        self._costs: dict[tuple[int, str, int, int, str], CostModel] = {}
        self._sizes: dict[tuple[int, int, float, str, str], list[int]] = {}
        self._orders: dict[tuple[str, int, int], Schedule] = {}  # that do not depend on costs
        self._few: dict[tuple[str, int, int], Schedule] = {}  # these orders with few places, where asked for
        self._rules: dict[tuple[str, int, int], str | None] = {}
        self._least: dict[str, tuple[int, Candidate]] = {}  # peak bytes, of what does not fit
        self._slower: dict[str, tuple[float, bool]] = {}  # seconds; whether they are only a lower bound
        self.longest = lengths[-1].seq_len
        alone = [
            self._cost_of_layout(each.seq_len, 1, self.layout, hardware) for each in lengths
        ]  # raises unless all is sound
        seconds = [
            each.share * cost.layer_seconds(0, each.seq_len).total for each, cost in zip(lengths, alone, strict=True)
        ]
        main = lengths[seconds.index(max(seconds))].seq_len  # most of the time goes to this length
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def rule(self, candidate: Candidate) -> str | None:
        """The rule of the family, or of the model's layers, that the counts break; None if they break none."""
        v, k = candidate.stages_per_rank, candidate.num_segments
        key = (candidate.family.name, v, k)
        if key not in self._rules:
            if self.num_ranks * v > self.model.layers:
                broken: str | None = f"P v <= {self.model.layers} layers"
            elif 2 * self.num_ranks * v * self.num_microbatches * k > _MOST_UNITS:
                broken = f"2 P v M k <= {_MOST_UNITS} units"
            else:
                broken = candidate.family.broken_rule(
                    num_ranks=self.num_ranks, num_microbatches=self.num_microbatches, num_segments=k, stages_per_rank=v
                )
            self._rules[key] = broken
        return self._rules[key]

    def _cost_of_layout(self, seq_len: int, stages_per_rank: int, layout: Layout, hardware: Hardware) -> CostModel:
        return CostModel(
            self.model,
            hardware,
            num_ranks=self.num_ranks,
            stages_per_rank=stages_per_rank,
            seq_len=seq_len,
            layout=layout,
        )

    def _cost(self, candidate: Candidate, seq_len: int) -> CostModel:
        v, balance = candidate.stages_per_rank, candidate.balance
        key = (v, candidate.recompute, balance, seq_len, candidate.vocabulary)
        if key not in self._costs:
            layout = replace(self.layout, recompute=candidate.recompute, layers=None, vocabulary=candidate.vocabulary)
            if balance:
                balanced = self._cost_of_layout(balance, v, layout, self.hardware)
                layout = replace(layout, layers=balanced.balanced_layers())
            self._costs[key] = self._cost_of_layout(seq_len, v, layout, self.hardware)
        return self._costs[key]

    def is_repeated(self, candidate: Candidate) -> bool:
        """Whether its layers are those of a balance before it."""
        before = self.balances[: self.balances.index(candidate.balance)]
        layers = self._cost(candidate, self.longest).layers
        return any(self._cost(candidate._replace(balance=x), self.longest).layers == layers for x in before)

    def _split(self, candidate: Candidate, seq_len: int) -> list[int]:
        key = (seq_len, candidate.num_segments, candidate.mix, candidate.recompute, candidate.vocabulary)
        if key not in self._sizes:
            step = math.lcm(self.layout.tensor * self.layout.context, 128)
            if seq_len < 8 * step * candidate.num_segments:
                step = 1
            cost = self._cost(candidate, seq_len)
            self._sizes[key] = cost.split(candidate.num_segments, mix=candidate.mix, multiple_of=step)
        return self._sizes[key]

    def _mean(self, values: Iterable[float]) -> float:
        """Over the steps, of one value for each length."""
        return sum(each.share * value for each, value in zip(self.lengths, values, strict=True))

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no order of these units can beat, in the mean over the steps."""
        return self._mean(self._bound(candidate, each.seq_len) for each in self.lengths)

    def _bound(self, candidate: Candidate, seq_len: int) -> float:
        """The least seconds of the steps of one length."""
        splits = candidate.family.splits_backward
        key = (candidate._replace(family=None, remedies=()), splits, seq_len)  # type: ignore[arg-type]
        if key not in self._bounds:
            self._bounds[key] = self._find_bound(candidate, seq_len)
        return self._bounds[key]

    def _find_bound(self, candidate: Candidate, seq_len: int) -> float:
        """The least seconds of the steps of one length.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        the first segment's way down to that stage and the way back up come on top.
        """
        cost = self._cost(candidate, seq_len)
        seconds = cost.unit_seconds(self._split(candidate, seq_len))
        # What a backward takes, and its part on the way up: a W that is its own unit may run beside that.
        backward = way_up = seconds.backward
        if candidate.family.splits_backward:  # some such orders have whole backwards, too
            tables = zip(seconds.backward, seconds.input, seconds.weight, strict=True)
            backward = [[min(b, i + w) for b, i, w in zip(*rows, strict=True)] for rows in tables]
            tables_up = zip(seconds.backward, seconds.input, strict=True)
            way_up = [[min(b, i) for b, i in zip(*rows, strict=True)] for rows in tables_up]
        optimizer = cost.optimizer_seconds()
        of_shards = self.num_microbatches * self._of_shards(candidate, seq_len)
        work = [[self.num_microbatches * sum(row) for row in part] for part in (seconds.forward, backward, way_up)]
        least = (sum(work[0]) + sum(work[1]) + sum(optimizer)) / self.num_ranks + of_shards
        down, up = optimizer[0], 0.0
        for stage, (forward, back, back_up) in enumerate(zip(*work, strict=True)):
            least = max(least, optimizer[stage] + forward + back)
            if self.optimizer_sync:
                least = max(least, down + forward + back_up + up)
            down += seconds.forward[stage][0]
            up += way_up[stage][0]
        return least

    def _of_shards(self, candidate: Candidate, seq_len: int) -> float:
        """Seconds of a rank's passes of the vocabulary in one micro-batch; 0 where it is not over the ranks."""
        if candidate.vocabulary != "ranks":
            return 0.0
        shards = self._cost(candidate, seq_len).shard_seconds(self._split(candidate, seq_len))
        return sum(sum(table[0]) for table in shards.values())

    def fill_tokens(self) -> int:
        """Tokens from which on a segment fills the device: its time per token is at most twice that of a long one."""
        cost = self._cost_of_layout(self.longest, 1, self.layout, self.hardware)
        sizes = [1 << i for i in range(5, 21)]
        found = cost.seconds_of([Span(size, 0.0, size) for size in sizes])
        rates = [(f + b) / n for f, b, n in zip(found.forward[0], found.backward[0], sizes, strict=True)]
        return next(n for n, rate in zip(sizes, rates, strict=True) if rate <= 2 * rates[-1])

    def num_units(self, candidate: Candidate) -> int:
        """F and B of all ranks."""
        return 2 * self.num_ranks * candidate.stages_per_rank * self.num_microbatches * candidate.num_segments

    def consider(self, candidate: Candidate, fitting: list[Found], cap: int, best: int, within: float) -> float | None:
        """Prices a candidate unless it cannot be among the best; keeps it if it fits and is.

        Returns:
            Its seconds, where it was priced and fits.
        """
        name, bound = candidate.family.name, self.bound(candidate)
        limit = within * fitting[0].seconds if fitting else math.inf
        if len(fitting) >= best:
            limit = min(limit, fitting[-1].seconds)
        if bound >= limit:
            if bound < self._slower.get(name, (math.inf, True))[0]:
                self._slower[name] = (bound, True)
            return None
        if fitting and not candidate.remedies:
            least = self._cost(candidate, self.longest).least_bytes(self._split(candidate, self.longest))
            if least > cap:
                self._least.setdefault(name, (math.ceil(least), candidate))
                return None
        found = self._price(candidate, cap)
        is_dear = candidate.remedies or isinstance(found, Found)  # else it was only looked at
        self.units_priced += self.num_units(candidate) // (1 if is_dear else 4)
        if found is None:
            return None  # it fits without its remedies, and so does the candidate without
        if isinstance(found, int):
            self.too_large[candidate._replace(num_segments=0, mix=1.0)] = found
            if found < self._least.get(name, (math.inf, candidate))[0]:
                self._least[name] = (found, candidate)
            return None
        if found.seconds < self._slower.get(name, (math.inf, True))[0] or self._slower[name][1]:
            self._slower[name] = (found.seconds, False)
        alike = [other for other in fitting if self._is_alike(other, found)]
        if any(other.place <= found.place for other in alike):
            return found.seconds  # another split or name of the same is as good
        fitting[:] = [other for other in fitting if other not in alike]
        fitting.append(found)
        fitting.sort(key=lambda each: each.place)
        fitting[:] = [each for each in fitting[:best] if each.seconds <= within * fitting[0].seconds]
        return found.seconds

    @staticmethod
    def _is_alike(one: Found, other: Found) -> bool:
        """Whether they differ in the split, or the family's name, alone."""
        of_other = other.candidate._replace(mix=one.candidate.mix)
        if one.candidate == of_other:
            return True
        counts = one.candidate._replace(family=of_other.family, remedies=of_other.remedies)
        return counts == of_other and one.made.schedule == other.made.schedule

    def _price(self, candidate: Candidate, cap: int) -> Found | int | None:
        """The candidate simulated, or the bytes that it needs where they are more than the cap; None: it fits without
        the remedies that it has."""
        if self.is_searched(candidate):
            searched = self._search_with_remedies(candidate, cap, LEVELS[:1] if self.is_quick else LEVELS)
            return self._simulated(candidate, searched) if searched.peak <= cap else searched.peak
        made = self._order(candidate, cap if not candidate.remedies else math.inf)
        choices = [made]
        if made.peak > cap:
            choices += self._with_few_places(candidate, made)
        if candidate.remedies:
            if made.peak <= cap:
                return None
            choices = [self._fit(candidate, each, cap) for each in choices]
        fitting = [each for each in choices if each.peak <= cap]
        if not fitting:
            return min(each.peak for each in choices)
        return min((self._simulated(candidate, each) for each in fitting), key=lambda found: found.seconds)

    def _with_few_places(self, candidate: Candidate, made: Made) -> list[Made]:
        """The order with one place beyond those that it needs, if that is another number than by time."""
        schedule = made.schedule.replace(prefetch=1)
        if "costs" not in candidate.family.options and candidate.vocabulary == "ends":
            schedule = self._few.setdefault(_order_key(candidate), schedule)
        if schedule.places == made.schedule.places:
            return []
        return [made._replace(schedule=schedule, ranks=self._most_of_any(candidate, schedule))]

    def _simulated(self, candidate: Candidate, made: Made) -> Found:
        runs = self._periods(candidate, made.schedule)
        self.num_simulated += 1
        # A few steps in a row may still be settling.
        periods = [
            max(period, self._bound(candidate, each.seq_len))
            for each, (period, _) in zip(self.lengths, runs, strict=True)
        ]
        seconds = self._mean(periods)
        bubble = self._mean(period * share for period, (_, share) in zip(periods, runs, strict=True)) / seconds
        return Found(candidate, periods, seconds, bubble, made)

    @staticmethod
    def is_searched(candidate: Candidate) -> bool:
        """Whether the order is searched for together with its remedies."""
        return bool(candidate.remedies) and "cap_bytes" in candidate.family.options

    def refine(self, found: Found, cap: int) -> Found:
        """Searches for the same candidate for longer, and returns the faster of both."""
        searched = self._search_with_remedies(found.candidate, cap, LEVELS)
        again = self._simulated(found.candidate, searched) if searched.peak <= cap else found
        return min(found, again, key=lambda each: each.seconds)

    def _search_with_remedies(self, candidate: Candidate, cap: int, levels: Sequence[float]) -> Made:
        """The order and what its units give up, of a family that takes costs and a cap."""

        def build(options: dict[str, Any]) -> Schedule:
            return self._build(candidate, options)

        def fit(made: Made) -> Made:
            return self._fit(candidate, made, cap)

        def seconds(schedule: Schedule) -> float:
            return self._mean(period for period, _ in self._periods(candidate, schedule))

        costs = self._longest_costs(candidate)
        return order_with_remedies(candidate.family, costs, cap, build, fit, seconds, levels=levels)

    def _fit(self, candidate: Candidate, made: Made, cap: int) -> Made:
        """The order in which units recompute, or move, until it fits, for the longest sequences."""
        costs = self._longest_costs(candidate)
        schedule = fit_under(cap, made.schedule, made.ranks, costs, candidate.remedies)
        return made._replace(schedule=schedule, ranks=self._most_of_any(candidate, schedule))

    def _most_of_any(self, candidate: Candidate, schedule: Schedule) -> list[RankBytes]:
        """Bytes of the ranks under the length that takes most."""
        lengths = [self._ranks(candidate, schedule, each.seq_len, self.hardware) for each in self.lengths]
        return [max(ranks, key=lambda rank: rank.total) for ranks in zip(*lengths, strict=True)]

    def _order(self, candidate: Candidate, cap: float) -> Made:
        """The candidate's order; of one that is made for the cap the fastest that fits it, if any does. Bytes are the
        most of any length."""
        costs = self._longest_costs(candidate)
        if "costs" not in candidate.family.options:
            schedule = self._spread(candidate, self._shared_order(candidate))
            made = Made(schedule, {}, costs.rank_bytes(schedule))
        else:

            def build(options: dict[str, Any]) -> Schedule:
                return self._build(candidate, options)

            def seconds(schedule: Schedule) -> float:
                return self._mean(period for period, _ in self._periods(candidate, schedule))

            made = order_for_costs(candidate.family, costs, cap, build, seconds)
        if len(self.lengths) == 1:
            return made
        return made._replace(ranks=self._most_of_any(candidate, made.schedule))

    def _longest_costs(self, candidate: Candidate) -> SequenceCosts:
        return SequenceCosts(self._cost(candidate, self.longest), self._split(candidate, self.longest))

    def _ranks(self, candidate: Candidate, schedule: Schedule, seq_len: int, hardware: Hardware) -> list[RankBytes]:
        cost = self._on(candidate, seq_len, hardware)
        return cost.rank_bytes(schedule, self._split(candidate, seq_len))

    def _on(self, candidate: Candidate, seq_len: int, hardware: Hardware) -> CostModel:
        """The candidate with its layers on another machine."""
        cost = self._cost(candidate, seq_len)
        if hardware is self.hardware:
            return cost
        return self._cost_of_layout(seq_len, candidate.stages_per_rank, cost.layout, hardware)

    def _build(self, candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
        return self._spread(candidate, self._build_plain(candidate, options))

    def _spread_seconds(self, candidate: Candidate) -> dict[str, Any]:
        """By which the passes of a vocabulary over the ranks find their places; {} where it is not."""
        if candidate.vocabulary != "ranks":
            return {}
        cost, sizes = self._cost(candidate, self.longest), self._split(candidate, self.longest)
        return cost.unit_seconds(sizes)._asdict() | cost.shard_seconds(sizes)

    def _spread(self, candidate: Candidate, schedule: Schedule) -> Schedule:
        seconds = self._spread_seconds(candidate)
        return schedule.spread_vocabulary(costs=Costs(**seconds), embedding=True) if seconds else schedule

    def _build_plain(self, candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
        return build_schedule(
            candidate.family.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            options=options,
        )

    def _shared_order(self, candidate: Candidate) -> Schedule:
        """An order that does not depend on costs: that of all candidates which differ in recomputation, layers or split
        alone. The oldest kept ones go first."""
        key = _order_key(candidate)
        if key not in self._orders:
            self._orders[key] = self._build_plain(candidate, {})
            while len(self._orders) > 1 and sum(map(self._num_units, self._orders)) > _MOST_KEPT:
                oldest = next(iter(self._orders))
                del self._orders[oldest]
                self._few.pop(oldest, None)
        return self._orders[key]

    def _num_units(self, key: tuple[str, int, int]) -> int:
        _, v, k = key
        return 2 * self.num_ranks * v * self.num_microbatches * k

    def _step_costs(self, candidate: Candidate, schedule: Schedule, seq_len: int, hardware: Hardware) -> Costs:
        moves = "offload" in candidate.remedies
        return self._on(candidate, seq_len, hardware).costs(schedule, self._split(candidate, seq_len), moves=moves)

    def _period(self, schedule: Schedule, costs: Costs) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(costs, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None and isinstance(costs.optimizer, Sequence)
        return run.period, 1 - (sum(run.busy) + sum(costs.optimizer)) / (run.period * self.num_ranks)

    def _periods(self, candidate: Candidate, schedule: Schedule) -> list[tuple[float, float]]:
        """Period and idle share of the steps of each length."""
        return [
            self._period(schedule, self._step_costs(candidate, schedule, each.seq_len, self.hardware))
            for each in self.lengths
        ]

    def uncertain(self, found: Found) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        candidate, schedule = found.candidate, found.made.schedule
        known = [self._step_costs(candidate, schedule, each.seq_len, self.hardware) for each in self.lengths]
        periods = [self._period(schedule, costs)[0] for costs in known]

        def change(name: str, end: float) -> float:
            hardware, changes = _with(self.hardware, {name: end}), []
            for each, before, period in zip(self.lengths, known, periods, strict=True):
                costs = self._step_costs(candidate, schedule, each.seq_len, hardware)
                changes.append(0.0 if costs == before else self._period(schedule, costs)[0] - period)
            return self._mean(changes)

        terms = []
        for name, ends in self.hardware.spread.items():
            changes = [change(name, end) for end in ends]
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    @staticmethod
    def as_uncertain(found: Found, terms: Iterable[Uncertain], like: Found) -> tuple[Uncertain, ...]:
        """The terms of another plan, taken to move this one by the same share."""
        scale = found.seconds / like.seconds
        return tuple(
            each._replace(change_at_low=scale * each.change_at_low, change_at_high=scale * each.change_at_high)
            for each in terms
        )

    def plan(self, found: Found, cap: int, uncertain: tuple[Uncertain, ...]) -> Plan:
        faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in uncertain))
        slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in uncertain))
        candidate = found.candidate
        cost, schedule = self._cost(candidate, self.longest), found.made.schedule
        ends = {name: high for name, (_, high) in self.hardware.spread.items() if name in _UNCERTAIN_BYTES}
        high = self._ranks(candidate, schedule, self.longest, _with(self.hardware, ends))
        sequences = self.num_microbatches * self.layout.data
        lengths = [
            StepLength(
                each.seq_len,
                each.share,
                each.tokens,
                tuple(self._split(candidate, each.seq_len)),
                period,
                sequences * each.tokens / period,
                tuple(rank.total for rank in self._ranks(candidate, schedule, each.seq_len, self.hardware)),
            )
            for each, period in zip(self.lengths, found.periods, strict=True)
        ]
        return Plan(
            model=self.model,
            hardware=self.hardware.name,
            seq_len=self.longest,
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
            tokens_per_second=sequences * self._mean(each.tokens for each in self.lengths) / found.seconds,
            peak=tuple(rank.total for rank in found.made.ranks),
            peak_high=tuple(rank.total for rank in high),
            cap=cap,
            optimizer_sync=self.optimizer_sync,
            options=found.made.options,
            prefetch=schedule.prefetch,
            lengths=tuple(lengths) if len(lengths) > 1 else (),
            units=schedule.cell_kinds() if schedule.kinds & {"R", "L"} else (),
            spread=self._spread_seconds(candidate),
        )

    def share_again(self, found: Found) -> float:
        """The share of the step in which ranks compute what they had computed before, or wait for the tier."""
        candidate, kept = found.candidate, []
        for each in self.lengths:
            cost = self._cost(candidate._replace(recompute="none"), each.seq_len)
            seconds = cost.unit_seconds(self._split(candidate, each.seq_len))
            backward = [seconds.backward]
            if "W" in found.made.schedule.kinds:
                backward = [seconds.input, seconds.weight]
            work = sum(sum(map(sum, table)) for table in (seconds.forward, *backward))
            work += self.num_ranks * self._of_shards(candidate, each.seq_len)
            kept.append((self.num_microbatches * work + sum(cost.optimizer_seconds())) / self.num_ranks)
        return max(0.0, 1 - found.bubble - self._mean(kept) / found.seconds)

    def explain_nothing(self, cap: int) -> str:
        """Why there is no plan."""
        if not self._least:
            rules = sorted({f"{name} needs {rule}" for (name, _, _), rule in self._rules.items() if rule})
            return f"no schedule can be built for these counts: {'; '.join(rules)}"
        peak, candidate = min(self._least.values(), key=lambda least: least[0])
        return (
            f"nothing fits in {cap / GIB:.2f} GiB: the least possible is {peak / GIB:.2f} GiB, {candidate}; "
            "more ranks, a higher tensor or context degree, or more segments need less"
        )

    def reasons(self, slowest: float) -> dict[str, str]:
        """Why each family is not among the best: a kind of reason, a colon, and what says it."""
        broken: dict[str, dict[str, None]] = {}
        for (name, _, _), rule in self._rules.items():
            if rule is not None:
                broken.setdefault(name, {})[rule] = None
        reasons = {name: f"cannot be built: needs {', and '.join(rules)}" for name, rules in broken.items()}
        too_large = {
            name: f"too large: at least {peak / GIB:.1f} GiB ({candidate.counts})"
            for name, (peak, candidate) in self._least.items()
        }
        reasons |= too_large
        for name, (seconds, is_bound) in self._slower.items():
            digits = next((n for n in (3, 4) if f"{seconds:.{n}g}" != f"{slowest:.{n}g}"), None)
            if digits is None:
                last = rounded(slowest)
                reason = (
                    f"as fast: {last} s like the last, in more memory" if not is_bound else f"slower: than {last} s"
                )
            else:
                texts = [rounded(x, digits) for x in (seconds, slowest)]
                reason = f"slower: {'at least ' if is_bound else ''}{texts[0]} s against {texts[1]} s"
            reasons[name] = f"{reason}; or {too_large[name]}" if name in too_large else reason
        return reasons


def _order_key(candidate: Candidate) -> tuple[str, int, int]:
    return candidate.family.name, candidate.stages_per_rank, candidate.num_segments


def _with(hardware: Hardware, values: Mapping[str, Any]) -> Hardware:
    """The machine with other numbers."""
    return replace(hardware, **values)
