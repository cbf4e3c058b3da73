"""Which order, how many segments, which split, what to recompute: the fastest that fits, and why the others do not."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from seq1f1b import _C
from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan, StepLength
from seq1f1b.planning.cost import RECOMPUTE, CostModel, Hardware, ProfiledHardware, RankBytes
from seq1f1b.schedule import Family, Schedule, build_schedule, families, nearest_name

__all__ = ["Plan", "PlanSearch", "StepLength", "Uncertain", "search_plans"]

_MIXES = (0.75, 0.5, 0.0)  # tried on the best orders beside 1; between them lie the optima of StateFlow's measurements
_GIB = 1 << 30
_MOST_UNITS = 10_000_000  # of one candidate, about 300 bytes each
_MOST_KEPT = 4_000_000  # units of the orders that several candidates share, kept for the next one
STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
_CAP_TRIES = 4  # orders of "auto" for one candidate under a cap
_MOST_LENGTHS = 8  # that sequences are padded to, where they have more
_ONLY_BY_NAME = ("auto",)
_NOT_TRIED = "not tried: it searches for seconds per candidate, ask for it by name"
_SPLITS = "splits the backward, which the engine does not run"
EARLY_PREFETCH = 4  # of orders made for costs: messages come early, and from so many places on wait for none
_UNCERTAIN_BYTES = ("activation_factor", "allocator_reserve", "context_bytes")


class Uncertain(NamedTuple):
    """A number of the machine that is not certain: its ends, and the seconds by which they move the step."""

    name: str
    low: float
    high: float
    change_at_low: float
    change_at_high: float


@dataclass(frozen=True)
class PlanSearch:
    """What a search found.

    Attributes:
        plans: the best, fastest first.
        uncertain: terms of the best plan that move it most, largest first.
        fallen: why each family without a plan among the best fell out.
        num_candidates, num_simulated: how many were looked at, and simulated.
    """

    plans: tuple[Plan, ...]
    uncertain: tuple[Uncertain, ...]
    fallen: Mapping[str, str]
    num_candidates: int
    num_simulated: int

    def to_json(self) -> str:
        """All of it."""
        plans = [{**json.loads(plan.to_json()), "margin": plan.margin} for plan in self.plans]
        terms = [term._asdict() for term in self.uncertain]
        return json.dumps(
            {
                "plans": plans,
                "uncertain": terms,
                "fallen": dict(self.fallen),
                "candidates": self.num_candidates,
                "simulated": self.num_simulated,
            },
            indent=1,
        )

    def to_text(self, model: str) -> str:
        """A table of the plans, and what stands behind it. ``model``: its name."""
        first = self.plans[0]
        lines = [
            f"{model}, {_tokens(first)}, P {first.num_ranks}, M {first.num_microbatches} on {first.hardware}, "
            f"cap {first.cap / _GIB:.1f} GiB; {self.num_candidates} candidates, {self.num_simulated} simulated",
            f"   {'schedule':<20}{'k':>3}{'v':>3}{'mix':>6}{'recompute':>11}{'step s':>9}{'interval':>17}"
            f"{'bubble':>8}{'tokens/s':>10}{'peak GiB':>10}{'margin':>8}",
        ]
        for number, plan in enumerate(self.plans, 1):
            lines.append(
                f"{number:>2} {plan.schedule:<20}{plan.num_segments:>3}{plan.stages_per_rank:>3}{plan.mix:>6.2f}"
                f"{plan.layout.recompute:>11}{plan.seconds:>9.4g}{f'{plan.low:.4g}..{plan.high:.4g}':>17}"
                f"{plan.bubble:>8.1%}{plan.tokens_per_second:>10.4g}{max(plan.peak) / _GIB:>10.1f}"
                f"{min(plan.margin) / _GIB:>8.1f}"
            )
        lines.append("ranks, GiB: peak + margin to the cap")
        for number, plan in enumerate(self.plans, 1):
            ranks = zip(plan.peak, plan.margin, strict=True)
            lines.append(f"{number:>2} {_runs(f'{peak / _GIB:.1f} + {left / _GIB:.1f}' for peak, left in ranks)}")
        lines.append(f"ranks of 1 with its uncertain bytes: {_runs(f'{x / _GIB:.1f}' for x in first.peak_high)}")
        lines.append(f"layers of 1, by stage: {_runs(map(str, first.layout.layers or ()))}")
        lines.append(f"segments of 1: {' '.join(map(str, first.segment_sizes))} tokens")
        for each in first.lengths:
            lines.append(
                f"steps of {each.seq_len} tokens with 1, {each.share:.1%}: {each.seconds:.4g} s, "
                f"{each.tokens_per_second:.4g} tokens/s, {max(each.peak) / _GIB:.1f} GiB, "
                f"{each.tokens / each.seq_len:.1%} filled, segments {' '.join(map(str, each.segment_sizes))}"
            )
        lines += [
            f"uncertain: {term.name} {term.low:g}..{term.high:g} moves 1 by "
            f"{term.change_at_low:+.3g} s .. {term.change_at_high:+.3g} s"
            for term in self.uncertain[:3]
        ]
        lines += [f"out: {name}: {reason}" for name, reason in self.fallen.items()]
        return "\n".join(lines)


def _runs(texts: Iterable[str]) -> str:
    """Equal neighbours as one: 2 x16, 1 x48."""
    runs = ((text, len(list(run))) for text, run in itertools.groupby(texts))
    return ", ".join(text if count == 1 else f"{text} x{count}" for text, count in runs)


def _tokens(plan: Plan) -> str:
    """Of its sequences."""
    lengths = [each.seq_len for each in plan.lengths] or [plan.seq_len]
    return f"{', '.join(map(str, lengths))} tokens"


class _Candidate(NamedTuple):
    family: Family
    stages_per_rank: int
    num_segments: int
    mix: float
    recompute: str
    balance: int  # length of the sequences at which all stages take the same time, head included; 0: as many layers

    def __str__(self) -> str:
        return f"{self.family.name} with k {self.num_segments}, v {self.stages_per_rank}, recompute {self.recompute}"


class Made(NamedTuple):
    """An order, the options that it was built with, and its bytes."""

    schedule: Schedule
    options: dict[str, Any]
    ranks: list[RankBytes]

    @property
    def peak(self) -> int:
        return max(rank.total for rank in self.ranks)


@dataclass(eq=False)
class _Found:
    """A candidate with its order and price."""

    candidate: _Candidate
    periods: list[float]  # of the step of each length
    seconds: float
    bubble: float
    made: Made

    @property
    def place(self) -> tuple[float, int]:
        """Of equal times to four digits, beyond what the model knows, the one that needs least memory goes first."""
        return float(f"{self.seconds:.4g}"), self.made.peak


def search_plans(
    model: ModelShape,
    hardware: Hardware,
    *,
    seq_len: int | None = None,
    lengths: Mapping[int, int] | None = None,
    num_ranks: int,
    num_microbatches: int,
    memory: int | None = None,
    layout: Layout | None = None,
    optimizer_sync: bool = True,
    names: Sequence[str] | None = None,
    segments: Sequence[int] | None = None,
    stages_per_rank: Sequence[int] = (1, 2, 4),
    recompute: Sequence[str] | None = None,
    best: int = 5,
    within: float = 1.2,
    for_engine: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> PlanSearch:
    """Simulates every family that these counts allow, and keeps the fastest that fit.

    The fastest has the shortest period: seconds from step to step, of several in a row with their optimizer.
    Each family is tried with every number of segments, stages per rank and recomputation asked for, first with
    segments of equal time; the best of them then with splits nearer to equal length. What cannot be faster than those
    found, by its busiest rank and the way to it, is not simulated.

    Args:
        seq_len: tokens of every sequence, or lengths: how many sequences there are of each number of tokens. Of a mix
            the sequences of one step have one length, so a length has its share of the steps; where there are more than
            eight lengths neighbours are padded to the longest of them, in groups of about as many tokens. There is one
            order for all; each length has its own split. The mean period counts, and the cap holds for every length.
        memory: cap in bytes of one device; None: all of the device's.
        layout: degrees beside the pipeline; its ``recompute`` and ``layers`` are the search's, which gives the stage
            with the head fewer layers, or as many as others.
        optimizer_sync: whether the optimizer waits until all ranks are through with the step, as a norm over all
            stages makes it; else each rank goes on by itself, and orders that end early on some ranks gain.
        names: families; None: all but ``auto``, whose own search takes seconds per candidate; it is made for the cap.
            ``1f1b`` and ``gpipe`` with several segments pass them on one by one and still hold whole micro-batches.
        recompute: None: all, or with a profile, which is of stages as they are, "none".
        segments: None: powers of two up to 16. best: how many plans to return at most, none slower than
            ``within`` times the fastest.
        for_engine: only orders that ``PipelineEngine`` runs: families that split the backward fall out, and ``auto``
            leaves it whole.
        progress: called with what is done and how much there is: of the candidates, of the splits of the best, of the
            plans whose uncertain terms are tried.
    Raises:
        ValueError: a count out of range; for_engine, and a family in ``names`` splits the backward; or nothing fits:
            says the least that could.
    """
    cap = int(hardware.memory if memory is None else memory)
    for name, value in {
        "memory": cap, "best": best, "num_ranks": num_ranks, "num_microbatches": num_microbatches
    }.items():  # fmt: skip
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    grouped = _group_lengths(seq_len, lengths, layout)
    search = _Search(
        model, hardware, grouped, num_ranks, num_microbatches, layout or Layout(), optimizer_sync, for_engine
    )
    known = {family.name: family for family in families()}
    splits = [name for name, family in known.items() if for_engine and search.is_split(family)]
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, known)}")
        if name in splits:
            raise ValueError(f"{name} {_SPLITS}: leave it out, or plan without for_engine")
    if recompute is None:
        recompute = ("none",) if isinstance(hardware, ProfiledHardware) else RECOMPUTE
    for kind in recompute:
        if kind not in RECOMPUTE:
            raise ValueError(f"recompute is {kind!r}, must be one of {', '.join(RECOMPUTE)}")
    shortest = grouped[0].seq_len
    wanted = segments or [k for k in (1, 2, 4, 8, 16) if k <= shortest]
    if min(wanted) < 1 or max(wanted) > shortest:
        raise ValueError(f"segments are {list(wanted)}, must be in 1..{shortest}, the tokens of the shortest sequence")
    left_out = {*_ONLY_BY_NAME, *splits}
    candidates = [
        _Candidate(family, v, k, 1.0, kind, balance)
        for family in (known[name] for name in names or (name for name in known if name not in left_out))
        for v in stages_per_rank
        for k in wanted
        for kind in recompute
        for balance in search.balances
    ]
    possible = [(candidate, i) for i, candidate in enumerate(candidates) if search.rule(candidate) is None]
    allowed = sorted((search.bound(candidate), i) for candidate, i in possible if not search.is_repeated(candidate))
    fitting: list[_Found] = []
    for done, (_, i) in enumerate(allowed):
        if progress is not None:
            progress(done, len(allowed))
        search.consider(candidates[i], fitting, cap, best, within)
    if not fitting:
        raise ValueError(search.explain_nothing(cap))
    mixed = [found.candidate._replace(mix=mix) for found in fitting for mix in _MIXES]
    mixed = [candidate for candidate in mixed if candidate.num_segments > 1]
    for done, candidate in enumerate(mixed):
        if progress is not None:
            progress(done, len(mixed))
        search.consider(candidate, fitting, cap, best, within)
    terms = []
    for done, found in enumerate(fitting):
        if progress is not None:
            progress(done, len(fitting))
        terms.append(search.uncertain(found))
    plans = tuple(search.plan(found, cap, moved) for found, moved in zip(fitting, terms, strict=True))
    shown = {plan.schedule for plan in plans}
    fallen = {name: why for name, why in search.reasons(plans[-1].seconds).items() if name not in shown}
    if not names:
        fallen |= dict.fromkeys(splits, _SPLITS) | dict.fromkeys(_ONLY_BY_NAME, _NOT_TRIED)
    return PlanSearch(plans, terms[0], fallen, len(candidates), search.num_simulated)


class _Length(NamedTuple):
    """Steps of one length: what sequences are padded to, their share of all steps, tokens of a sequence in the mean."""

    seq_len: int
    share: float
    tokens: float


def _group_lengths(seq_len: int | None, lengths: Mapping[int, int] | None, layout: Layout | None) -> list[_Length]:
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
        grouped.append(_Length(members[-1][0], sequences / sum(lengths.values()), tokens / sequences))
    return grouped


class _Search:
    """The price of candidates, and what became of each family."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        lengths: Sequence[_Length],
        num_ranks: int,
        num_microbatches: int,
        layout: Layout,
        optimizer_sync: bool,
        for_engine: bool,
    ) -> None:
        self.model, self.hardware, self.lengths, self.layout = model, hardware, lengths, layout
        self.num_ranks, self.num_microbatches, self.optimizer_sync = num_ranks, num_microbatches, optimizer_sync
        self.for_engine = for_engine
        self.num_simulated = 0
        self._costs: dict[tuple[int, str, int, int], CostModel] = {}
        self._sizes: dict[tuple[int, int, float, str], list[int]] = {}
        self._orders: dict[tuple[str, int, int], Schedule] = {}  # that do not depend on costs
        self._split_backward: dict[str, bool] = {}
        self._rules: dict[tuple[str, int, int], str | None] = {}
        self._least: dict[str, tuple[int, _Candidate]] = {}  # peak bytes, of what does not fit
        self._slower: dict[str, tuple[float, bool]] = {}  # seconds; whether they are only a lower bound
        self.longest = lengths[-1].seq_len
        alone = [
            self._cost_of_layout(each.seq_len, 1, self.layout, hardware) for each in lengths
        ]  # raises unless all is sound
        seconds = [
            each.share * sum(cost.layer_seconds(0, each.seq_len)) for each, cost in zip(lengths, alone, strict=True)
        ]
        main = lengths[seconds.index(max(seconds))].seq_len  # most of the time goes to this length
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def rule(self, candidate: _Candidate) -> str | None:
        """What the counts break, of the family's rules or the model's layers."""
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

    def _cost(self, candidate: _Candidate, seq_len: int) -> CostModel:
        v, balance = candidate.stages_per_rank, candidate.balance
        key = (v, candidate.recompute, balance, seq_len)
        if key not in self._costs:
            layout = replace(self.layout, recompute=candidate.recompute, layers=None)
            if balance:
                balanced = self._cost_of_layout(balance, v, layout, self.hardware)
                layout = replace(layout, layers=balanced.balanced_layers())
            self._costs[key] = self._cost_of_layout(seq_len, v, layout, self.hardware)
        return self._costs[key]

    def is_repeated(self, candidate: _Candidate) -> bool:
        """Whether its layers are those of a balance before it."""
        before = self.balances[: self.balances.index(candidate.balance)]
        layers = self._cost(candidate, self.longest).layers
        return any(self._cost(candidate._replace(balance=x), self.longest).layers == layers for x in before)

    def _is_left_whole(self, family: Family) -> bool:
        """Whether the family is told to leave the backward whole, which it otherwise splits."""
        return self.for_engine and "backward" in family.options

    def _prefetch(self, family: Family) -> int:
        return EARLY_PREFETCH if self._is_left_whole(family) else 1

    def is_split(self, family: Family) -> bool:
        """Whether its orders have I and W."""
        if self._is_left_whole(family):
            return False
        if family.name not in self._split_backward:
            self._split_backward[family.name] = _splits_backward(family)
        return self._split_backward[family.name]

    def _split(self, candidate: _Candidate, seq_len: int) -> list[int]:
        key = (seq_len, candidate.num_segments, candidate.mix, candidate.recompute)
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

    def bound(self, candidate: _Candidate) -> float:
        """Seconds that no order of these units can beat, in the mean over the steps."""
        return self._mean(self._bound(candidate, each.seq_len) for each in self.lengths)

    def _bound(self, candidate: _Candidate, seq_len: int) -> float:
        """Of the steps of one length: the mean of the ranks' work, and the work of each stage, where steps do not
        overlap with the first segment's way down to it and the way back up."""
        cost = self._cost(candidate, seq_len)
        is_split = self.is_split(candidate.family)
        seconds = cost.unit_seconds(self._split(candidate, seq_len), split_backward=is_split)
        optimizer = cost.optimizer_seconds()
        work = [[self.num_microbatches * sum(row) for row in part] for part in seconds]
        least = (sum(map(sum, work)) + sum(optimizer)) / self.num_ranks
        down, up = optimizer[0], 0.0
        for stage in range(cost.num_stages):
            forward, back, weight = (part[stage] for part in work)
            least = max(least, optimizer[stage] + forward + back + weight)
            if self.optimizer_sync:  # a W that is its own unit may run beside the way up
                least = max(least, down + forward + back + (0.0 if is_split else weight) + up)
            down += seconds.forward[stage][0]
            up += seconds.input[stage][0] + (0.0 if is_split else seconds.weight[stage][0])
        return least

    def consider(self, candidate: _Candidate, fitting: list[_Found], cap: int, best: int, within: float) -> None:
        """Prices a candidate unless it cannot be among the best; keeps it if it fits and is."""
        name, bound = candidate.family.name, self.bound(candidate)
        limit = within * fitting[0].seconds if fitting else math.inf
        if len(fitting) >= best:
            limit = min(limit, fitting[-1].seconds)
        if bound >= limit:
            if bound < self._slower.get(name, (math.inf, True))[0]:
                self._slower[name] = (bound, True)
            return
        found = self._price(candidate, cap)
        if isinstance(found, int):
            if found < self._least.get(name, (math.inf, candidate))[0]:
                self._least[name] = (found, candidate)
            return
        if found.seconds < self._slower.get(name, (math.inf, True))[0] or self._slower[name][1]:
            self._slower[name] = (found.seconds, False)
        alike = [other for other in fitting if other.candidate._replace(mix=candidate.mix) == candidate]
        if any(other.place <= found.place for other in alike):
            return  # another mix of the same is as good
        fitting[:] = [other for other in fitting if other not in alike]
        fitting.append(found)
        fitting.sort(key=lambda each: each.place)
        fitting[:] = [each for each in fitting[:best] if each.seconds <= within * fitting[0].seconds]

    def _price(self, candidate: _Candidate, cap: int) -> _Found | int:
        """The candidate simulated, or the bytes that it needs where they are more than the cap."""
        made = self._order(candidate, cap)
        if made.peak > cap:
            return made.peak
        runs = self._periods(candidate, made.schedule)
        self.num_simulated += 1
        # A few steps in a row may still be settling.
        periods = [
            max(period, self._bound(candidate, each.seq_len))
            for each, (period, _) in zip(self.lengths, runs, strict=True)
        ]
        seconds = self._mean(periods)
        bubble = self._mean(period * share for period, (_, share) in zip(periods, runs, strict=True)) / seconds
        return _Found(candidate, periods, seconds, bubble, made)

    def _order(self, candidate: _Candidate, cap: int) -> Made:
        """The candidate's order; of one that is made for the cap the fastest that fits it, if any does. Bytes are the
        most of any length."""
        cost, sizes = self._cost(candidate, self.longest), self._split(candidate, self.longest)
        if "costs" not in candidate.family.options:
            schedule = self._shared_order(candidate)
            made = Made(schedule, {}, cost.rank_bytes(schedule, sizes))
        else:

            def build(options: dict[str, Any]) -> Schedule:
                return self._build(candidate, options)

            def seconds(schedule: Schedule) -> float:
                return self._mean(period for period, _ in self._periods(candidate, schedule))

            made = order_for_costs(
                candidate.family,
                cost,
                sizes,
                cap,
                build,
                seconds,
                leave_whole=self._is_left_whole(candidate.family),
                prefetch=self._prefetch(candidate.family),
            )
        shorter = [self._ranks(candidate, made.schedule, each.seq_len, self.hardware) for each in self.lengths[:-1]]
        most = [max(ranks, key=lambda rank: rank.total) for ranks in zip(made.ranks, *shorter, strict=True)]
        return made._replace(ranks=most)

    def _ranks(self, candidate: _Candidate, schedule: Schedule, seq_len: int, hardware: Hardware) -> list[RankBytes]:
        cost = self._on(candidate, seq_len, hardware)
        return cost.rank_bytes(schedule, self._split(candidate, seq_len), prefetch=self._prefetch(candidate.family))

    def _on(self, candidate: _Candidate, seq_len: int, hardware: Hardware) -> CostModel:
        """The candidate with its layers on another machine."""
        cost = self._cost(candidate, seq_len)
        if hardware is self.hardware:
            return cost
        return self._cost_of_layout(seq_len, candidate.stages_per_rank, cost.layout, hardware)

    def _build(self, candidate: _Candidate, options: Mapping[str, Any]) -> Schedule:
        return build_schedule(
            candidate.family.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=candidate.num_segments,
            stages_per_rank=candidate.stages_per_rank,
            options=options,
        )

    def _shared_order(self, candidate: _Candidate) -> Schedule:
        """An order that does not depend on costs: that of all candidates which differ in recomputation, layers or split
        alone. The oldest kept ones go first."""
        key = (candidate.family.name, candidate.stages_per_rank, candidate.num_segments)
        if key not in self._orders:
            self._orders[key] = self._build(candidate, {})
            while len(self._orders) > 1 and sum(map(self._num_units, self._orders)) > _MOST_KEPT:
                del self._orders[next(iter(self._orders))]
        return self._orders[key]

    def _num_units(self, key: tuple[str, int, int]) -> int:
        _, v, k = key
        return 2 * self.num_ranks * v * self.num_microbatches * k

    def _arguments(self, candidate: _Candidate, schedule: Schedule, seq_len: int, hardware: Hardware) -> dict[str, Any]:
        arguments = self._on(candidate, seq_len, hardware).simulation_arguments(
            schedule, self._split(candidate, seq_len), split_backward=self.is_split(candidate.family)
        )
        return arguments | {"prefetch": self._prefetch(candidate.family)}

    def _period(self, schedule: Schedule, arguments: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(**arguments, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None
        return run.period, 1 - (sum(run.busy) + sum(arguments["optimizer"])) / (run.period * self.num_ranks)

    def _periods(self, candidate: _Candidate, schedule: Schedule) -> list[tuple[float, float]]:
        """Of the steps of each length."""
        return [
            self._period(schedule, self._arguments(candidate, schedule, each.seq_len, self.hardware))
            for each in self.lengths
        ]

    def uncertain(self, found: _Found) -> tuple[Uncertain, ...]:
        """Terms that move the step, largest first, each alone at its ends."""
        candidate, schedule = found.candidate, found.made.schedule
        known = [self._arguments(candidate, schedule, each.seq_len, self.hardware) for each in self.lengths]
        periods = [self._period(schedule, arguments)[0] for arguments in known]

        def change(name: str, end: float) -> float:
            hardware, changes = _with(self.hardware, {name: end}), []
            for each, before, period in zip(self.lengths, known, periods, strict=True):
                arguments = self._arguments(candidate, schedule, each.seq_len, hardware)
                changes.append(0.0 if arguments == before else self._period(schedule, arguments)[0] - period)
            return self._mean(changes)

        terms = []
        for name, ends in self.hardware.spread.items():
            changes = [change(name, end) for end in ends]
            if any(changes):
                terms.append(Uncertain(name, *ends, *changes))
        return tuple(sorted(terms, key=lambda term: -max(abs(term.change_at_low), abs(term.change_at_high))))

    def plan(self, found: _Found, cap: int, uncertain: tuple[Uncertain, ...]) -> Plan:
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
            prefetch=self._prefetch(candidate.family),
            lengths=tuple(lengths) if len(lengths) > 1 else (),
        )

    def explain_nothing(self, cap: int) -> str:
        """Why there is no plan."""
        if not self._least:
            rules = sorted({f"{name} needs {rule}" for (name, _, _), rule in self._rules.items() if rule})
            return f"no schedule can be built for these counts: {'; '.join(rules)}"
        peak, candidate = min(self._least.values(), key=lambda least: least[0])
        return (
            f"nothing fits in {cap / _GIB:.2f} GiB: the least possible is {peak / _GIB:.2f} GiB, {candidate}; "
            "more ranks, a higher tensor or context degree, or more segments need less"
        )

    def reasons(self, slowest: float) -> dict[str, str]:
        """Of each family, why it is not among the best."""
        broken: dict[str, dict[str, None]] = {}
        for (name, _, _), rule in self._rules.items():
            if rule is not None:
                broken.setdefault(name, {})[rule] = None
        reasons = {name: f"needs {', and '.join(rules)}" for name, rules in broken.items()}
        too_large = {
            name: f"does not fit: at least {peak / _GIB:.1f} GiB (k {candidate.num_segments}, "
            f"v {candidate.stages_per_rank}, recompute {candidate.recompute})"
            for name, (peak, candidate) in self._least.items()
        }
        reasons |= too_large
        for name, (seconds, is_bound) in self._slower.items():
            reason = f"slower: {'at least ' if is_bound else ''}{seconds:.4g} s against {slowest:.4g}"
            if not is_bound and f"{seconds:.4g}" == f"{slowest:.4g}":
                reason = f"as fast as the last, {slowest:.4g} s, in more memory"
            reasons[name] = f"{reason}, or {too_large[name]}" if name in too_large else reason
        return reasons


def _with(hardware: Hardware, values: Mapping[str, Any]) -> Hardware:
    """The machine with other numbers."""
    return replace(hardware, **values)


def order_for_costs(
    family: Family,
    cost: CostModel,
    sizes: Sequence[int],
    cap: float,
    build: Callable[[dict[str, Any]], Schedule],
    seconds: Callable[[Schedule], float],
    *,
    leave_whole: bool = False,
    prefetch: int = 1,
) -> Made:
    """The order of a family that takes costs, ``build`` of its options; of one that takes a cap in bytes, too, the
    fastest by ``seconds`` that fits in ``cap``, of several made for what the one before left of it.

    Such a family counts every unit at the most that it ever holds, so what fits is found step by step: activations and
    cache are its to change, what else a rank holds is taken as it was. Where none fits: the one that holds least.

    leave_whole: the family is told to leave the backward whole. prefetch: receive places that bytes are counted for.
    """
    options: dict[str, Any] = {"costs": list(cost.unit_seconds(sizes, split_backward=not leave_whole))}
    if leave_whole:
        options["backward"] = "whole"
    if "transfer" in family.options:
        latencies, rates = cost.links(range(cost.num_ranks))
        message = statistics.fmean(cost.message_bytes(sizes))
        times = [latency + message / rate for latency, rate in zip(latencies, rates, strict=True)]
        options["transfer"] = statistics.fmean(times) if times else 0.0
    schedule = build(options)
    made = Made(schedule, options, cost.rank_bytes(schedule, sizes, prefetch=prefetch))
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
        made = Made(schedule, given, cost.rank_bytes(schedule, sizes, prefetch=prefetch))
        orders.append((seconds(schedule) if made.peak <= cap else math.inf, made.peak, made))
        aim -= max(0, made.peak - cap)  # one order is not the next one plus a little: aim lower where one held too much
    return min(orders, key=lambda order: order[:2])[2]


def _splits_backward(family: Family) -> bool:
    """Whether the family's orders have I and W, by one of them."""
    for microbatches, segments in ((4, 1), (2, 1), (4, 2)):
        try:
            order = build_schedule(
                family.name,
                num_ranks=2,
                num_microbatches=microbatches,
                num_segments=segments,
                stages_per_rank=family.stages_per_rank,
            )
        except _C.ScheduleError:
            continue
        return any(unit.kind == "W" for rank in order.ranks for unit in rank)
    return True
