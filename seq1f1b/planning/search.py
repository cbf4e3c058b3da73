"""Search for the fastest plan that fits: order, number of segments, split, recomputation; reasons of plans left out.

Candidates are priced, the promising ones get an order, a simulation counts the seconds, and the best stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from seq1f1b.families import families_named
from seq1f1b.flat import whole
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import BuiltOrder, Candidate, Length, Orders, Rated, group_lengths
from seq1f1b.planning.result import GIB, PlanSearch, Uncertain
from seq1f1b.schedule import families
from seq1f1b.seconds import Span
from seq1f1b.table import rounded

__all__ = ["PlanSearch", "Uncertain", "search_plans"]

REMEDIES = ("recompute", "offload")
"""Ways of single units to make an order fit: arguments of :meth:`seq1f1b.Schedule.fit`."""
VOCABULARIES = ("any", "ends", "ranks")
_MIXES = (0.75, 0.5, 0.0)  # tried on the best orders after 1; the optima of StateFlow's measurements lie between
_FINER = (0.125, 0.0625)  # then steps to both sides of the best mix
_FIRST_SEGMENTS = (1, 2, 4, 8, 16)  # tried with every family; good candidates also try more, as long as more gain
STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; True makes all steps after the first equal
LEAST_GAIN = 0.002  # share of the step; smaller gains are not looked for, and are a tie: costs are less certain
_MOST_OF_AUTO = 25_000  # units of all searched orders unless auto is asked for: about a second
_MOST_OF_ROUND = 200_000  # units, F and B, priced for each number of segments after the first numbers
_MOST_SPREAD = 3  # plans that are also tried with the vocabulary over the ranks
_SHARE_OF_MEMORY = 0.85  # of a device: the rest is for the worst case and for fragments of torch's allocator
_MOST_UNITS = 10_000_000  # most units of one candidate, at about 300 bytes each
_OTHERS = {
    "slimpipe": "not tried: its order is that of seq1f1b-interleaved, whose ranks also even out attention",
}
"""Families that are tried by name alone, and why."""


def memory_cap(hardware: Hardware, memory: int | None) -> int:
    """Returns the bytes of a device that a plan may use: ``memory``, or 85 % of the device. Raises ``ValueError`` for
    bytes that must be a number of GiB."""
    if memory is not None and memory < 1 << 20:
        raise ValueError(f"memory is {memory} bytes, less than any device has: {memory}GiB?")
    return int(_SHARE_OF_MEMORY * hardware.memory) if memory is None else memory


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
    inside: Sequence[str] | None = None,
    remedies: Sequence[str] = ("recompute",),
    vocabulary: str = "any",
    best: int = 5,
    within: float = 1.2,
    progress: Callable[[int, int], None] | None = None,
) -> PlanSearch:
    """Simulates every family that the counts allow, and keeps the fastest plans that fit.

    The fastest plan has the shortest period: seconds from step to step, in a row of steps with optimizer. Each family
    is tried with every wanted number of segments, stages per rank and recomputation, first with segments of equal time.
    The best candidates are then tried with splits nearer to equal length. If no candidate fits, all are tried with
    segments of equal length. A candidate is not simulated if a lower bound, by the busiest rank and the way to it, is
    already slower than the plans found.

    Without wanted numbers of segments, the search doubles the number as long as the best plan, or the need of memory,
    lies at the end of the range, and until segments no longer fill the device; then numbers between the last are tried.
    ``auto`` searches an order for the costs and cap of the best plans.

    Args:
        seq_len: tokens of every sequence.
        lengths: number of sequences for each number of tokens, instead of seq_len. All sequences of a step have equal
            length, so each length has a share of the steps. More than eight lengths are padded to the longest of a
            group of neighbours; groups have about equal numbers of tokens. All lengths share one order, with a split
            for each length. The mean period counts, and the cap holds for every length.
        memory: cap in bytes of one device; None: 85 % of the device.
        layout: degrees beside the pipeline. The search sets ``inside`` and ``layers``: the stage with the head has
            fewer layers, or as many as the remaining stages.
        optimizer_sync: whether the optimizer waits until all ranks have finished the step, as for a norm over all
            stages. Otherwise each rank goes on by itself, and orders that end early on some ranks gain.
        names: families; None: all, each with the segments of the family's source, and ``auto`` for the best plans.
            ``1f1b`` and ``gpipe`` with several segments send segments one by one, but hold whole micro-batches.
        segments: numbers of segments; None: as many as help.
        inside: recomputation inside of blocks, of ``Layout``; None: all, or "none" with a profile, since a profile
            measures stages without recomputation.
        remedies: ways of single units to save memory, in an order that does not fit and has no other recomputation:
            "recompute" (a second forward before the backward), "offload" (saved tensors move to the machine's tier), or
            both, tried together and alone. The search chooses the units for the cap.
        vocabulary: "ends": embedding and head in the first and the last stage; "ranks": shards on all ranks; "any": at
            the ends, and the best plans also with shards on all ranks.
        best, within: most plans to return, none slower than ``within`` times the fastest.
        progress: called with a finished and a total number: of candidates, of splits of the best plans.
    Raises:
        ValueError: a count out of range; or no plan fits: the message has the least possible bytes.
    """
    cap = memory_cap(hardware, memory)
    for name, value in (("best", best), ("num_ranks", num_ranks), ("num_microbatches", num_microbatches)):
        whole(name, value, 1)
    grouped = group_lengths(seq_len, lengths, layout)
    layout = replace(layout or Layout(), vocabulary="ranks" if vocabulary == "ranks" else "ends")
    of_step = (grouped, num_ranks, num_microbatches, layout, optimizer_sync, cap)
    search = _Search(model, hardware, *of_step, best, within, progress)  # raises for an unsound model, layout or length
    shortest = grouped[0].seq_len
    tried = segments or [k for k in _FIRST_SEGMENTS if k <= shortest]
    if min(tried) < 1 or max(tried) > shortest:
        raise ValueError(f"segments are {list(tried)}, must be in 1..{shortest}, the tokens of the shortest sequence")
    if vocabulary not in VOCABULARIES:
        raise ValueError(f"vocabulary is {vocabulary!r}, must be one of {', '.join(VOCABULARIES)}")
    # Without names, all families but auto, which comes last, and _OTHERS.
    tries = families_named(names) if names else [each for each in families() if each.name not in (*_OTHERS, "auto")]
    for remedy in remedies:
        if remedy not in REMEDIES:
            raise ValueError(f"remedies hold {remedy!r}, must be of {', '.join(REMEDIES)}")
    if "offload" in remedies and not hardware.tier_bandwidth:
        raise ValueError(
            f"units cannot move: {hardware.name} states no tier. Set its tier_bandwidth, bytes per second each way"
        )
    insides = hardware.insides if inside is None else inside
    ways: list[tuple[str, tuple[str, ...]]] = [(kind, ()) for kind in insides]
    if "none" in insides:  # each remedy alone, and both together
        ways += [("none", (remedy,)) for remedy in REMEDIES if remedy in remedies]
        ways += [("none", REMEDIES)] * (len(set(remedies)) > 1)

    wanted = [
        Candidate(family, v, 0, 1.0, kind, balance, way, layout.vocabulary)
        for family, v, (kind, way), balance in itertools.product(tries, stages_per_rank, ways, search.balances)
    ]
    search.try_all(wanted, tried, shortest if segments is None else 0, with_any=bool(names))
    if not names:
        search.is_quick = True  # until the best order is refined
        search.consider(search.instead(family=families_named(["auto"])[0]))
    if vocabulary == "any" and model.vocab > 0 and num_ranks > 1 and layout.head_in_loss:
        search.consider(search.instead(_MOST_SPREAD, vocabulary="ranks"), _MOST_OF_ROUND)
    if not names:
        search.refine()
    best_found, *_ = search.fitting
    terms = best_found.uncertain(hardware)
    # The terms are taken to be independent, and to change the other plans in proportion to their seconds.
    faster = math.hypot(*(max(0.0, -term.change_at_low, -term.change_at_high) for term in terms))
    slower = math.hypot(*(max(0.0, term.change_at_low, term.change_at_high) for term in terms))
    shares = faster / best_found.seconds, slower / best_found.seconds
    plans = tuple(found.plan(hardware, *shares) for found in search.fitting)
    tried_names = [family.name for family in tries]
    return PlanSearch(
        plans,
        terms,
        search.fallen(tried_names, plans) if names else _OTHERS | search.fallen([*tried_names, "auto"], plans),
        search.num_candidates,
        search.num_simulated,
        hardware,
    )


@dataclass(eq=False)
class _Search:
    """Search that prices candidates, keeps the best, and chooses further candidates."""

    model: ModelShape
    hardware: Hardware
    lengths: Sequence[Length]  # ascending
    num_ranks: int
    num_microbatches: int
    layout: Layout
    optimizer_sync: bool
    cap: int  # bytes that a plan may use of a device
    best: int
    within: float
    progress: Callable[[int, int], None] | None
    fitting: list[Rated] = field(default_factory=list)  # fastest first: at most best, none slower than within times it
    is_quick: bool = False  # whether an order of auto gets a single search, before refine
    num_candidates: int = 0
    num_simulated: int = 0

    def __post_init__(self) -> None:
        self._told: list[Rated] = []  # candidates with a bound, a size or seconds so far
        self._broken: dict[str, dict[str, None]] = {}  # by family: rules broken by counts
        self._left_of_auto = _MOST_OF_AUTO
        # Results shared by candidates. Orders are large, so only the last stay.
        self.cost, self.price = cache(self._cost), cache(self._price)
        self.look = cache(self._look)
        self._made: Callable[[Candidate, bool], BuiltOrder] = lru_cache(4)(
            lambda candidate, is_quick: self.look(candidate).orders._replace(is_quick=is_quick).within_cap()
        )
        self.longest, self.shares = self.lengths[-1].seq_len, [each.share for each in self.lengths]
        seconds = []  # of whole sequences in all stages, by share of a run's steps of each length
        for each in self.lengths:
            cost = self.cost(1, self.layout.inside, 0, self.layout.vocabulary, each.seq_len)
            seconds.append(each.share * cost.price([each.seq_len]).seconds.total.sum())
        # Values of Candidate.balance to try: the longest sequence, the length that takes most of a run's time, and 0.
        self.balances = tuple(dict.fromkeys((self.longest, self.lengths[seconds.index(max(seconds))].seq_len, 0)))

    # -- prices and bounds

    def _cost(self, v: int, inside: str, balance: int, vocabulary: str, seq_len: int) -> CostModel:
        layout = replace(self.layout, inside=inside, layers=None, vocabulary=vocabulary)
        if balance:
            layout = replace(layout, layers=self.cost(v, inside, 0, vocabulary, balance).balanced_layers())
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": v, "seq_len": seq_len}
        return CostModel(self.model, self.hardware, layout=layout, **counts)

    def _price(self, k: int, mix: float, *of_cost: Any) -> tuple[Price, list[float]]:
        """Returns the price of k segments, and lower bounds of the seconds of orders without split backwards and with.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        add to the work of a stage the first segment's way down to the stage and the way back up.
        """
        cost, step, bounds = self.cost(*of_cost), math.lcm(self.layout.tensor * self.layout.context, 128), []
        step = 1 if cost.seq_len < 8 * step * k else step
        sizes = partition_sequence(cost.seq_len, k, strategy="profiled", profile=cost, mix=mix, multiple_of=step)
        price = cost.price(sizes)
        forward, inputs, weight, whole, _ = price.seconds
        optimizer, M = np.array(cost.parts.optimizer_seconds), self.num_microbatches
        shards = sum(table[0].sum() for table in price.shard_seconds.values())  # of a rank, in one micro-batch
        # Seconds of a backward, and the part of the seconds on the way up: a separate W is off the way. An order may
        # split some backwards and run others whole.
        split = np.minimum(whole, inputs + weight), np.minimum(whole, inputs)
        for backward, way_up in ((whole, whole), split):
            down, back, up = (M * table.sum(axis=1) for table in (forward, backward, way_up))
            mean = (down.sum() + back.sum() + optimizer.sum()) / self.num_ranks + M * shards
            least = max(mean, (optimizer + down + back).max())
            if self.optimizer_sync:
                way = optimizer[0] + forward[:, 0].cumsum() - forward[:, 0] + way_up[:, 0].cumsum() - way_up[:, 0]
                least = max(least, (way + down + up).max())
            bounds.append(float(least))
        return price, bounds

    def _look(self, candidate: Candidate) -> Rated:
        """Returns the prices and bounds of a candidate, without an order."""
        family, v, k, mix, inside, balance, remedies, vocabulary = candidate
        of_lengths = [self.price(k, mix, v, inside, balance, vocabulary, each.seq_len) for each in self.lengths]
        prices, bounds = [price for price, _ in of_lengths], [least[family.splits_backward] for _, least in of_lengths]
        steps = {"steps": STEPS[self.optimizer_sync], "optimizer_sync": self.optimizer_sync}
        orders = Orders(family, prices, self.num_microbatches, self.cap, remedies, self.lengths, steps)
        units = 2 * self.num_ranks * v * self.num_microbatches * k
        return Rated(candidate, orders, bounds, fmean(bounds, self.shares), units)

    # -- the loop: build, fit, simulate, keep

    def allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates that can be built, lowest bound first, and notes the rules broken by other counts."""
        self.num_candidates += len(candidates)
        P, M, sound = self.num_ranks, self.num_microbatches, set[Any]()  # counts that break no rule
        for family, v, k in dict.fromkeys(each[:3] for each in candidates):
            if P * v > self.model.layers:
                rule: str | None = f"P v <= {self.model.layers} layers"
            elif 2 * P * v * M * k > _MOST_UNITS:
                rule = f"2 P v M k <= {_MOST_UNITS} units"
            else:
                rule = family.broken_rule(num_ranks=P, num_microbatches=M, num_segments=k, stages_per_rank=v)
            if rule is None:
                sound.add((family, v, k))
            else:
                self._broken.setdefault(family.name, {})[rule] = None
        possible, known = [], set()
        for each in (each for each in candidates if each[:3] in sound):
            layers = self.cost(each.stages_per_rank, each.inside, each.balance, each.vocabulary, self.longest).layers
            if (each._replace(balance=0), layers) not in known:  # else an earlier balance has equal layers
                known.add((each._replace(balance=0), layers))
                possible.append(each)
        return sorted(possible, key=lambda each: self.look(each).bound)

    def consider(self, tried: Sequence[Candidate], most_units: float = math.inf) -> None:
        """Prices candidates in turn, until ``most_units`` units are priced, and keeps the best. A candidate gets no
        order if a bound of time or memory rules the candidate out."""
        for done, candidate in enumerate(tried):
            if self.progress is not None:
                self.progress(done, len(tried))
            if most_units <= 0:
                continue
            known, fitting = self.look(candidate), self.fitting
            limit = self.within * fitting[0].seconds if fitting else math.inf
            if known.bound >= (min(limit, fitting[-1].seconds) if len(fitting) >= self.best else limit):
                self._told.append(known)
                continue
            if fitting and not candidate.remedies and (least := known.orders.prices[-1].least_bytes) > self.cap:
                self._told.append(replace(known, least=math.ceil(least)))
                continue
            found = self.priced(known)
            is_built_alone = found is not None and found.least and not candidate.remedies  # and not simulated
            most_units -= known.units // 4 if is_built_alone else known.units
            if found is None:  # remedies are not needed: a candidate without remedies fits, too
                continue
            self._told.append(found)
            if found.least:
                continue
            alike = []  # plans that differ only in the split, or only in the family's name
            for other in fitting:
                its = other.candidate._replace(mix=candidate.mix)
                renamed = its._replace(family=candidate.family, remedies=candidate.remedies)
                if its == candidate or (renamed == candidate and other.made.schedule == found.made.schedule):
                    alike.append(other)
            if all(other.sort_key > found.sort_key for other in alike):
                kept = sorted([*(each for each in fitting if each not in alike), found], key=lambda each: each.sort_key)
                self.fitting = [each for each in kept[: self.best] if each.seconds <= self.within * kept[0].seconds]

    def priced(self, known: Rated) -> Rated | None:
        """Returns the candidate with an order, simulated if the order fits; None if the order fits without remedies."""
        candidate, orders = known.candidate, known.orders._replace(is_quick=self.is_quick)
        if candidate.remedies and "cap_bytes" in candidate.family.options:  # the remedies are part of the order
            choices = [orders.with_remedies(known.made)]
        else:
            made = self._made(candidate._replace(remedies=()), self.is_quick)
            if candidate.remedies and made.peak <= self.cap:
                return None
            choices = [orders.fit(made)]
            if choices[0].peak > self.cap:
                # Fewer receive places: one beyond the order's need.
                smaller = orders.with_bytes(made.schedule.replace(prefetch=1), made.options)
                if smaller.ranks != made.ranks:
                    choices.append(orders.fit(smaller))
        tried = [replace(known, made=made, least=made.peak if made.peak > self.cap else 0) for made in choices]
        for found, made in zip(tried, choices, strict=True):
            if found.least:
                continue
            self.num_simulated += 1
            _, runs = orders.run(made.schedule)
            # Steps in a row settle slowly: the period of a few simulated steps may lie below the bound.
            found.periods = [max(run.period or 0.0, bound) for bound, run in zip(found.bounds, runs, strict=True)]
            found.seconds = fmean(found.periods, self.shares)
            optimizer = [sum(price.cost.parts.optimizer_seconds) for price in orders.prices]
            work = [sum(run.busy) + seconds for run, seconds in zip(runs, optimizer, strict=True)]
            found.bubble = 1 - fmean(work, self.shares) / self.num_ranks / found.seconds
            found.sort_key = round(math.log(found.seconds) / LEAST_GAIN), made.peak
        return min(tried, key=lambda each: (each.seconds, each.least))

    # -- what to try

    def try_all(
        self, candidates: Sequence[Candidate], segments: Sequence[int], shortest: int, *, with_any: bool
    ) -> None:
        """Tries the candidates, lowest bound first, then more segments, then further splits of the best.

        Args:
            candidates: with any number of segments.
            segments: numbers of segments to try first.
            shortest: tokens of the shortest sequence, the most segments to try; 0: no more segments than in
                ``segments``.
            with_any: whether a family is tried with every number, or segments only if the source has them.
        """
        most = 0
        if shortest:  # a segment fills the device if it takes at most twice a long segment's time per token
            sizes = np.array([1 << i for i in range(5, 21)], float)
            cost = self.cost(1, self.layout.inside, 0, self.layout.vocabulary, self.longest)
            span = Span(sizes, 0.0 * sizes, sizes, (0.0 * sizes,) * len(cost.parts.windows))
            rates = cost.source.seconds(span)[0].total[0] / sizes
            filled = self.longest // int(sizes[np.argmax(rates <= 2 * rates[-1])])
            most = min(shortest, max(*segments, filled))
        counts, limit = list(segments), math.inf
        all_remedies = max((len(each.remedies) for each in candidates), default=0)
        while counts:
            k = max(counts)
            tried = self.allowed(
                [
                    each._replace(num_segments=count)
                    for each, count in itertools.product(candidates, counts)
                    if with_any or (count == 1) != each.family.has_segments
                    # Later only both remedies: one alone rarely beats both, and costs as much.
                    if limit == math.inf or len(each.remedies) in (0, all_remedies)
                ]
            )
            self.consider(tried, limit)
            known = [told for told in self._told if told.periods]
            own = min((told.seconds for told in known if told.candidate.num_segments == k), default=math.inf)
            fewer = min((told.seconds for told in known if told.candidate.num_segments < k), default=math.inf)
            # More segments may help if no candidate fits, or if k segments beat fewer segments.
            helps = not self.fitting or own <= fewer * (1 - LEAST_GAIN)
            counts, limit = [2 * k] if helps and 2 * k <= most else [], _MOST_OF_ROUND
        if not self.fitting:  # equal lengths need less memory: with equal times the first segment is by far the longest
            self.consider([each._replace(mix=0.0) for each in tried if each.num_segments > 1])
        if not self.fitting:
            raise ValueError(self._explain_nothing())
        if shortest and k > 4:
            numbers = [(each.candidate, k * each.candidate.num_segments // 4) for each in self.fitting for k in (3, 6)]
            between = [each._replace(num_segments=k) for each, k in numbers if 4 < k <= most]
            self.consider(self.allowed(between), _MOST_OF_ROUND // 2)
        limit = _MOST_OF_ROUND // 2 if shortest else math.inf
        for step in (0.0, *_FINER) if shortest else (0.0,):
            mix = self.fitting[0].candidate.mix
            mixes = (mix - step, mix + step) if step else _MIXES
            cut = [each.candidate for each in self.fitting[: 1 if step else self.best]]
            other = [each._replace(mix=mix) for each in cut for mix in mixes if mix != each.mix and 0 <= mix <= 1]
            self.consider([each for each in other if each.num_segments > 1], limit)
            limit = _MOST_OF_ROUND // 4

    def instead(self, most: float = math.inf, **changes: Any) -> list[Candidate]:
        """Returns up to ``most`` changed candidates of the best plans that may gain; units of ``auto`` are limited."""
        found = list[Candidate]()
        for each in self.fitting:
            candidate = each.candidate._replace(**changes)
            known = self.look(candidate)
            if candidate in found or known.bound > self.fitting[0].seconds * (1 - LEAST_GAIN):
                continue
            units = known.units if candidate.family.name == "auto" else 0
            if units <= self._left_of_auto and len(found) < most:
                self._left_of_auto -= units
                found.append(candidate)
        return found

    def refine(self) -> None:
        """Replaces the best order of ``auto`` by the result of a longer search, if faster."""
        self.is_quick = False
        made = next((i for i, each in enumerate(self.fitting) if each.candidate.family.name == "auto"), None)
        if made is not None:
            first = self.fitting[made]
            again = self.priced(replace(self.look(first.candidate), made=first.made))
            self.fitting[made] = min((each for each in (first, again) if each), key=lambda each: each.seconds)
            self.fitting.sort(key=lambda each: each.sort_key)

    # -- what is told

    def _explain_nothing(self) -> str:
        if not self._told:
            rules = sorted(f"{name} needs {rule}" for name, broken in self._broken.items() for rule in broken)
            return f"no schedule can be built for these counts: {'; '.join(rules)}"
        least = min(self._told, key=lambda told: told.least)
        rank = max(least.made.ranks, key=lambda rank: rank.total)
        return (
            f"nothing fits in {self.cap / GIB:.2f} GiB: the least possible is {least.least / GIB:.2f} GiB (weights and "
            f"their training {rank.static / GIB:.2f}, K and V {rank.kv / GIB:.2f}, gradients of K and V "
            f"{rank.kv_gradients / GIB:.2f}), {least.candidate.family.name} with {least.candidate.counts}; more ranks, "
            "a higher tensor or context degree, or more segments need less"
        )

    def fallen(self, names: Iterable[str], plans: Sequence[Plan]) -> dict[str, str]:
        """Returns why families are not among the plans, by family: a kind of reason, a colon, and numbers."""
        reasons = dict[str, str]()
        for name in (each for each in names if each not in {plan.schedule for plan in plans}):
            own = [told for told in self._told if told.candidate.family.name == name]
            known = [told.seconds if told.periods else told.bound for told in own if not told.least]
            large = min((told for told in own if told.least), key=lambda told: told.least, default=None)
            if known:
                reasons[name] = f"slower: at least {rounded(min(known), 4)} s against {rounded(plans[-1].seconds, 4)} s"
            elif large is not None:
                reasons[name] = f"too large: at least {large.least / GIB:.1f} GiB ({large.candidate.counts})"
            elif name in self._broken:
                reasons[name] = f"cannot be built: needs {', and '.join(self._broken[name])}"
            else:
                reasons[name] = f"not tried: no order could gain {LEAST_GAIN:.1%}, or all have too many units"
        return reasons
