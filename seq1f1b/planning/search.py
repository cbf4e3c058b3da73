"""Search for the fastest plan that fits: order, number of segments, split, recomputation; reasons of plans left out."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from seq1f1b import where
from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.candidates import Candidate, Pricing, RatedCandidate, Uncertain, group_lengths, of_shards
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import families_named
from seq1f1b.schedule import Family, families
from seq1f1b.table import rounded, table_text

__all__ = ["PlanSearch", "Uncertain", "search_plans"]

GIB = 1 << 30
REMEDIES = ("recompute", "offload")
"""Ways of single units to make an order fit: arguments of :meth:`seq1f1b.Schedule.fit`."""
VOCABULARIES = ("any", "ends", "ranks")
_MIXES = (0.75, 0.5, 0.0)  # tried on the best orders after 1; the optima of StateFlow's measurements lie between
_FINER = (0.125, 0.0625)  # then steps to both sides of the best mix
_FIRST_SEGMENTS = (1, 2, 4, 8, 16)  # tried with every family; good candidates also try more, as long as more gain
LEAST_GAIN = 0.002  # share of the step; smaller gains are not looked for
_MOST_OF_AUTO = 40_000  # units of all searched orders unless auto is asked for: a second or two
_MOST_OF_ROUND = 350_000  # units, F and B, priced for each number of segments after the first numbers
_MOST_UNCERTAIN = 40_000  # units of the best plans that are all simulated at the ends of each uncertain number
_MOST_SPREAD = 3  # plans that are also tried with the vocabulary over the ranks
_SHARE_OF_MEMORY = 0.85  # of a device: the rest is for the worst case and for fragments of torch's allocator
_OTHERS = {
    "slimpipe": "not tried: its order is that of seq1f1b-interleaved, whose ranks also even out attention",
}
"""Families that are tried by name alone, and why."""


_MOVES = {  # by short name of the tier
    "folder": "to a file, by Memory(offload=FOLDER) of the engine",
    "host": "to pinned host memory, by Memory(offload=seq1f1b.HOST) of the engine",
}


@dataclass(frozen=True)
class PlanSearch:
    """Result of a search for plans.

    Attributes:
        plans: the best plans, fastest first; if times differ by less than 0.2 %, the plan with less memory comes first.
        uncertain: uncertain numbers that change the best plan's step, largest change first.
        fallen: reason for each family without a plan among the best.
        num_candidates, num_simulated: number of candidates, and of simulated orders.
        next_step: a line of advice on the next improvement.
        device: bytes of memory of one device.
        rates: origin of the seconds, in words.
        tier: short name, in ``seq1f1b/where.py``, of the machine's tier for units.
    """

    plans: tuple[Plan, ...]
    uncertain: tuple[Uncertain, ...]
    fallen: Mapping[str, str]
    num_candidates: int
    num_simulated: int
    next_step: str
    device: float
    rates: str
    tier: str | None = None

    def to_json(self) -> str:
        """Returns all fields but the machine's, as JSON."""
        plans = [{**json.loads(plan.to_json()), "margin": plan.margin} for plan in self.plans]
        terms = [term._asdict() for term in self.uncertain]
        return json.dumps(
            {
                "plans": plans,
                "uncertain": terms,
                "fallen": dict(self.fallen),
                "candidates": self.num_candidates,
                "simulated": self.num_simulated,
                "next_step": self.next_step,
            },
            indent=1,
        )

    def to_text(self, model: str, *, verbose: bool = False) -> str:
        """Returns a table of the plans, and details of the best plan. Times and rates have three digits.

        Args:
            model: the model's name.
            verbose: adds the reason for each family left out.
        """
        first = self.plans[0]
        lines = [
            f"{model}, {_tokens(first)}, P {first.num_ranks}, M {first.num_microbatches} on {first.hardware}, "
            f"{self.rates}",
            f"cap {first.cap / GIB:.1f} of {self.device / GIB:.1f} GiB; {self.num_candidates} candidates, "
            f"{self.num_simulated} simulated",
            "",
            *table_text(self._rows()).splitlines(),
            *_list("k", [self._legend()]),
            "",
            "GiB of each rank + what is left of the cap:",
        ]
        for number, plan in enumerate(self.plans, 1):
            ranks = zip(plan.peak, plan.margin, strict=True)
            lines += _list(f"{number:>2}", _runs(f"{peak / GIB:.1f}+{left / GIB:.1f}" for peak, left in ranks))
        lines += [
            "plan 1:",
            *_list(
                f"   GiB in the worst case of the estimate, {self._worst_case()}:",
                _runs(f"{x / GIB:.1f}" for x in first.peak_high),
            ),
            *_list("   layers of each stage:", _runs(map(str, first.layout.layers or ()))),
            *_list("   tokens of each segment:", map(str, first.segment_sizes)),
        ]
        for each in first.lengths:
            lines.append(
                f"   steps of {each.seq_len} tokens, {each.share:.1%}: {rounded(each.seconds)} s, "
                f"{rounded(each.tokens_per_second)} tokens/s, {max(each.peak) / GIB:.1f} GiB, "
                f"{each.tokens / each.seq_len:.1%} filled"
            )
            lines += _list("      tokens of each segment:", map(str, each.segment_sizes))
        lines.append("   the least certain numbers, and what their ends add to the step:")
        lines += [
            f"      {term.name} {term.low:g}..{term.high:g}: "
            f"{term.change_at_low:+.2g} s .. {term.change_at_high:+.2g} s"
            for term in self.uncertain[:3]
        ]
        if any("L" in row for row in first.units):
            lines += _list("units of plan 1 move:", [_MOVES[self.tier or "folder"]])
        lines += _list("next:", [self.next_step])
        if verbose:
            lines += ["left out:", *(f"   {name}: {reason}" for name, reason in self.fallen.items())]
        elif self.fallen:
            kinds = Counter(reason.partition(":")[0] for reason in self.fallen.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"left out: {counts} (--verbose says why)")
        return "\n".join(lines)

    def _worst_case(self) -> str:
        """Returns in words whether the worst case of the best plan fits."""
        worst, cap = max(self.plans[0].peak_high), self.plans[0].cap
        if worst <= cap:
            return "within the cap"
        return "above the device" if worst > self.device else "above the cap, within the device"

    def _legend(self) -> str:
        """Returns an explanation of the table's heads, for the columns present."""
        says = ["segments of a sequence"]
        if any(plan.stages_per_rank > 1 for plan in self.plans):
            says.append("v stages of a rank")
        if any(plan.mix != 1 for plan in self.plans):
            says.append("mix 1 segments of equal time, 0 of equal length")
        if any(plan.layout.vocabulary != "ends" for plan in self.plans):
            says.append("vocab: embedding and head at the ends, or over the ranks")
        return "; ".join([*says, "GiB of the fullest rank"])

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns the table's head and a row for each plan; a column with the usual value in all rows stays empty."""

        def told(texts: Iterable[str], usual: str) -> list[str]:
            found = list(texts)
            return found if set(found) != {usual} else [""] * len(found)

        plans = self.plans
        columns = {
            "   schedule": [f"{number:>2} {plan.schedule}" for number, plan in enumerate(plans, 1)],
            "k": [str(plan.num_segments) for plan in plans],
            "v": told((str(plan.stages_per_rank) for plan in plans), "1"),
            "mix": told((f"{plan.mix:.2f}" for plan in plans), "1.00"),
            "vocab": told((plan.layout.vocabulary for plan in plans), "ends"),
            "recompute": told((_share(plan, "R") or plan.layout.inside for plan in plans), "none"),
            "moved": [_share(plan, "L") for plan in plans],
            "step s": [rounded(plan.seconds) for plan in plans],
            "interval": [f"{rounded(plan.low)}..{rounded(plan.high)}" for plan in plans],
            "bubble": [f"{plan.bubble:.1%}" for plan in plans],
            "tokens/s": [rounded(plan.tokens_per_second) for plan in plans],
            "GiB": [f"{max(plan.peak) / GIB:.1f}" for plan in plans],
        }
        return [tuple(columns), *zip(*columns.values(), strict=True)]


def _list(head: str, items: Iterable[str]) -> list[str]:
    """Returns the head and the items, in lines of at most 80 columns."""
    return textwrap.wrap(f"{head} {', '.join(items)}", 80, subsequent_indent=" " * 6)


def _runs(texts: Iterable[str]) -> list[str]:
    """Returns the texts with equal neighbours joined: 2 x16, 1 x48."""
    runs = ((text, len(list(run))) for text, run in itertools.groupby(texts))
    return [text if count == 1 else f"{text} x{count}" for text, count in runs]


def _share(plan: Plan, kind: str) -> str:
    """Returns the share of units of a kind, as text; empty if the plan has no unit of the kind."""
    kinds = "".join(plan.units).replace(" ", "")
    return f"{kinds.count(kind) / len(kinds):.0%} of units" if kind in kinds else ""


def _tokens(plan: Plan) -> str:
    """Returns the lengths of the plan's sequences, as text."""
    lengths = [each.seq_len for each in plan.lengths] or [plan.seq_len]
    return f"{', '.join(map(str, lengths))} tokens"


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
        progress: called with a finished and a total number: of candidates, of splits of the best plans, of plans whose
            uncertain numbers are tried.
    Raises:
        ValueError: a count out of range; or no plan fits: the message has the least possible bytes.
    """
    cap = memory_cap(hardware, memory)
    counts = {"memory": cap, "best": best, "num_ranks": num_ranks, "num_microbatches": num_microbatches}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    grouped = group_lengths(seq_len, lengths, layout)
    layout = replace(layout or Layout(), vocabulary="ranks" if vocabulary == "ranks" else "ends")
    counts_of_step = (grouped, num_ranks, num_microbatches, layout, optimizer_sync, cap)
    search = _Search(model, hardware, *counts_of_step, best=best, within=within, progress=progress)
    shortest = grouped[0].seq_len
    tried = segments or [k for k in _FIRST_SEGMENTS if k <= shortest]
    if min(tried) < 1 or max(tried) > shortest:
        raise ValueError(f"segments are {list(tried)}, must be in 1..{shortest}, the tokens of the shortest sequence")
    if vocabulary not in VOCABULARIES:
        raise ValueError(f"vocabulary is {vocabulary!r}, must be one of {', '.join(VOCABULARIES)}")
    # Without names, all families but auto, which comes last, and _OTHERS.
    tries = families_named(names) if names else [each for each in families() if each.name not in (*_OTHERS, "auto")]
    insides = hardware.insides if inside is None else inside
    ways: list[tuple[str, tuple[str, ...]]] = [(kind, ()) for kind in insides]
    ways += [("none", each) for each in _wanted_remedies(remedies, hardware) if "none" in insides]

    def candidates(counts: Sequence[int]) -> list[Candidate]:
        """Returns all wanted candidates with the given numbers of segments."""
        return [
            Candidate(family, v, k, 1.0, kind, balance, way, layout.vocabulary)
            for family, v, k in itertools.product(tries, stages_per_rank, counts)
            if names or (k == 1) != family.has_segments
            for kind, way in ways
            for balance in search.balances
        ]

    search.try_all(candidates, tried, shortest if segments is None else 0)
    if not names:
        search.is_quick = True  # until the best order is refined
        search.consider(search.instead(family=families_named(["auto"])[0]))
    if vocabulary == "any" and model.vocab > 0 and num_ranks > 1 and layout.head_in_loss:
        search.consider(search.instead(_MOST_SPREAD, vocabulary="ranks"), _MOST_OF_ROUND)
    if not names:
        search.refine()
    fitting = search.fitting
    is_small = sum(found.units for found in fitting) <= _MOST_UNCERTAIN
    terms: list[tuple[Uncertain, ...]] = []
    for done, found in enumerate(fitting):
        if progress is not None:
            progress(done, len(fitting))
        if done == 0 or is_small:
            terms.append(search.uncertain(found))
        else:  # assume changes in proportion to the best plan's
            scale = found.seconds / fitting[0].seconds
            terms.append(tuple(Uncertain(*each[:3], scale * each[3], scale * each[4]) for each in terms[0]))
    plans = tuple(search.plan(found, moved) for found, moved in zip(fitting, terms, strict=True))
    return PlanSearch(
        plans,
        terms[0],
        search.fallen(tries, plans) if names else _OTHERS | search.fallen([*tries, *families_named(["auto"])], plans),
        search.num_candidates,
        search.num_simulated,
        search.next_step(is_limited=segments is not None, names=names),
        hardware.memory,
        hardware.rates,
        where.tier_of(hardware.device_type),
    )


def _wanted_remedies(remedies: Sequence[str], hardware: Hardware) -> list[tuple[str, ...]]:
    """Returns the sets of remedies to try: each remedy alone, and both together."""
    for remedy in remedies:
        if remedy not in REMEDIES:
            raise ValueError(f"remedies hold {remedy!r}, must be of {', '.join(REMEDIES)}")
    if "offload" in remedies and where.tier_of(hardware.device_type) is None:
        raise ValueError(f"units cannot move: the engine has no tier on {hardware.device_type}")
    if "offload" in remedies and not hardware.tier_bandwidth:
        raise ValueError(
            f"units cannot move: {hardware.name} states no tier. Set its tier_bandwidth, bytes per second each way"
        )
    wanted: list[tuple[str, ...]] = [(remedy,) for remedy in REMEDIES if remedy in remedies]
    return [*wanted, REMEDIES] if len(wanted) > 1 else wanted


class _Search(Pricing):
    """Search that prices candidates, keeps the best, and chooses further candidates.

    Attributes:
        fitting: the best candidates, fastest first: at most ``best``, none slower than ``within`` times the fastest.
        is_quick: whether an order of ``auto`` gets a single search, before ``refine``.
        num_candidates: number of candidates so far.
    """

    def __init__(self, *of_pricing: Any, best: int, within: float, progress: Callable[[int, int], None] | None) -> None:
        super().__init__(*of_pricing)
        self._best, self._within, self._progress = best, within, progress
        self.fitting: list[RatedCandidate] = []
        self.is_quick, self.num_candidates = False, 0
        self._told: list[RatedCandidate] = []  # candidates with a bound, a size or seconds so far
        self._broken: dict[str, dict[str, None]] = {}  # by family: rules broken by counts
        self._left_of_auto = _MOST_OF_AUTO

    # -- the loop

    def allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates that can be built, lowest bound first."""
        self.num_candidates += len(candidates)
        possible, known = [], set()
        for each in candidates:
            if (rule := self.rule(each.family, each.stages_per_rank, each.num_segments)) is not None:
                self._broken.setdefault(each.family.name, {})[rule] = None
                continue
            of_cost = each.stages_per_rank, each.inside, each.balance, each.vocabulary, self.longest
            layers = self.cost(*of_cost).layers
            if (each._replace(balance=0), layers) not in known:  # else an earlier balance has equal layers
                known.add((each._replace(balance=0), layers))
                possible.append(each)
        return sorted(possible, key=lambda each: self.look(each).bound)

    def consider(self, tried: Sequence[Candidate], most_units: float = math.inf) -> None:
        """Prices candidates in turn, until ``most_units`` units are priced."""
        for done, candidate in enumerate(tried):
            if self._progress is not None:
                self._progress(done, len(tried))
            if most_units > 0:
                most_units -= self._consider(self.look(candidate))

    def _consider(self, known: RatedCandidate) -> int:
        """Prices a candidate unless a bound of time or memory rules it out; keeps the best. Returns priced units."""
        fitting, remedies = self.fitting, known.candidate.remedies
        limit = self._within * fitting[0].seconds if fitting else math.inf
        if len(fitting) >= self._best:
            limit = min(limit, fitting[-1].seconds)
        if known.bound >= limit:
            self._told.append(known)
            return 0
        if fitting and not remedies and (least := known.prices[-1].least_bytes()) > self.cap:
            self._told.append(replace(known, least=math.ceil(least)))
            return 0
        found = self.priced(known, is_quick=self.is_quick)
        if found is None:
            return known.units  # remedies are not needed: a candidate without remedies fits, too
        self._told.append(found)
        if found.least:
            return known.units if remedies else known.units // 4  # built, but not simulated
        alike = [other for other in fitting if other.is_alike(found)]
        if all(other.sort_key > found.sort_key for other in alike):  # else another split or family's name is as good
            kept = sorted([*(each for each in fitting if each not in alike), found], key=lambda each: each.sort_key)
            self.fitting = [each for each in kept[: self._best] if each.seconds <= self._within * kept[0].seconds]
        return known.units

    # -- what to try

    def try_all(
        self, candidates: Callable[[Sequence[int]], list[Candidate]], segments: Sequence[int], shortest: int
    ) -> None:
        """Tries the candidates, lowest bound first, then more segments, then further splits of the best.

        Args:
            shortest: tokens of the shortest sequence, the most segments to try; 0: no more segments than in
                ``segments``.
        """
        first = self.allowed(candidates(segments))
        self.consider(first)
        k, most = max(segments), 0
        if shortest:
            most = min(shortest, max(k, self.longest // self.fill_tokens()))
        while 2 * k <= most and self._goes_on(k):
            k *= 2
            wanted = candidates([k])
            most_remedies = max(len(each.remedies) for each in wanted)  # one alone rarely beats both, and costs as much
            wanted = [each for each in wanted if len(each.remedies) in (0, most_remedies)]
            self.consider(self._likeliest(self.allowed(wanted)), _MOST_OF_ROUND)
        if not self.fitting:  # equal lengths need less memory: with equal times the first segment is by far the longest
            last = first if k == max(segments) else self.allowed(candidates([k]))
            self.consider([each._replace(mix=0.0) for each in last if each.num_segments > 1])
        if not self.fitting:
            raise ValueError(self._explain_nothing())
        if shortest and k > 4:
            numbers = [(each.candidate, k * each.candidate.num_segments // 4) for each in self.fitting for k in (3, 6)]
            between = [each._replace(num_segments=k) for each, k in numbers if 4 < k <= most]
            self.consider(self.allowed(between), _MOST_OF_ROUND // 2)
        self.consider(_mixed(self.fitting, _MIXES), _MOST_OF_ROUND // 2 if shortest else math.inf)
        for finer in _FINER if shortest else ():
            mix = self.fitting[0].candidate.mix
            self.consider(_mixed(self.fitting[:1], (mix - finer, mix + finer)), _MOST_OF_ROUND // 4)

    def _goes_on(self, k: int) -> bool:
        """Returns whether more than k segments may help: no candidate fits, or k segments beat fewer segments."""
        if not self.fitting:
            return True
        known = [told for told in self._told if told.periods]
        own = min((told.seconds for told in known if told.candidate.num_segments == k), default=math.inf)
        fewer = min((told.seconds for told in known if told.candidate.num_segments < k), default=math.inf)
        return own <= fewer * (1 - LEAST_GAIN)

    def _likeliest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Returns the candidates, fastest expected seconds first: the bound, times a root of the ratio to the bound, or
        to the cap, of an equal candidate with other segments. More segments come nearer to the bound and need less."""
        found: dict[Candidate, RatedCandidate] = {}  # the fastest for other segments, or the last too large
        for told in self._told:
            of = told.candidate._replace(num_segments=0, mix=1.0)
            known = found.get(of)
            if told.made and (known is None or known.least or (told.seconds < known.seconds and not told.least)):
                found[of] = told

        def expected(candidate: Candidate) -> float:
            bound, told = self.look(candidate).bound, found.get(candidate._replace(num_segments=0))
            if told is None or told.least:
                return 1.05 * bound * math.sqrt(max(1.0, (0 if told is None else told.least) / self.cap))
            of_told = self.look(candidate._replace(num_segments=told.candidate.num_segments)).bound
            return bound * math.sqrt(math.sqrt(max(1.0, told.seconds / of_told)))

        return sorted(candidates, key=expected)

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
        made = next((i for i, each in enumerate(self.fitting) if each.candidate.family.name == "auto"), None)
        if made is not None:
            again = [self.fitting[made], self.priced(self.look(self.fitting[made].candidate))]
            self.fitting[made] = min((each for each in again if each is not None), key=lambda each: each.seconds)
            self.fitting.sort(key=lambda each: each.sort_key)

    # -- what is told

    def _share_again(self, found: RatedCandidate) -> float:
        """Returns the share of the step in which ranks recompute, or wait for the tier."""
        kept = []
        for price in self.look(found.candidate._replace(inside="none")).prices:
            forward, inputs, weight, backward, _ = (float(table.sum()) for table in price.seconds)
            each: float = forward + (inputs + weight if "W" in found.made.schedule.kinds else backward)
            each += self.num_ranks * of_shards(price)
            kept.append((self.num_microbatches * each + sum(price.cost.optimizer_seconds())) / self.num_ranks)
        return max(0.0, 1 - found.bubble - self.mean(kept) / found.seconds)

    def next_step(self, is_limited: bool, names: Sequence[str] | None) -> str:
        """Returns advice on the next improvement, from the largest loss of the best plan's time."""
        best = self.fitting[0]
        again, k = self._share_again(best), best.candidate.num_segments
        if again > max(best.bubble, 0.02):
            way = "more ranks, or a higher context degree, leave room to keep it"
            return f"{again:.0%} of the step is computed twice: {way}"
        if best.bubble < 0.03:
            way = "more ranks or a higher context degree share it"
            return f"{best.bubble:.1%} of the step is bubble, the rest is work: {way}"
        ways = []
        if is_limited:
            ways.append(f"segments beyond {k}" if k > 1 else "segments")
        if names:
            ways.append("another family (--schedules, the default tries all)")
        tokens = self.longest // k
        ways.append(f"more micro-batches in a step ({k} segments have {tokens} tokens)")
        return f"{best.bubble:.1%} of the step is bubble: {', or '.join(ways)}"

    def _explain_nothing(self) -> str:
        if not self._told:
            rules = sorted(f"{name} needs {rule}" for name, broken in self._broken.items() for rule in broken)
            return f"no schedule can be built for these counts: {'; '.join(rules)}"
        least = min(self._told, key=lambda told: told.least)
        return (
            f"nothing fits in {self.cap / GIB:.2f} GiB: the least possible is {least.least / GIB:.2f} GiB, "
            f"{least.candidate}; more ranks, a higher tensor or context degree, or more segments need less"
        )

    def fallen(self, tries: Sequence[Family], plans: Sequence[Plan]) -> dict[str, str]:
        """Returns why families are not among the plans, by family: a kind of reason, a colon, and numbers."""
        shown, reasons = {plan.schedule for plan in plans}, dict[str, str]()
        for name in (family.name for family in tries if family.name not in shown):
            own = [told for told in self._told if told.candidate.family.name == name]
            large = min((told for told in own if told.least), key=lambda told: told.least, default=None)
            slow = min(
                ((not told.periods, told.seconds if told.periods else told.bound) for told in own if not told.least),
                default=None,
            )
            found = []
            if slow is not None:
                texts = [rounded(x, 4) for x in (slow[1], plans[-1].seconds)]
                kind, least = "as fast" if texts[0] == texts[1] else "slower", "at least " * slow[0]
                found.append(f"{kind}: {least}{texts[0]} s against {texts[1]} s")
            if large is not None:
                found.append(f"too large: at least {large.least / GIB:.1f} GiB ({large.candidate.counts})")
            if not found and name in self._broken:
                found.append(f"cannot be built: needs {', and '.join(self._broken[name])}")
            if not found and name == "auto":
                found.append(f"not tried: no order could gain {LEAST_GAIN:.1%}, or all have too many units")
            reasons[name] = "; or ".join(found or ["not tried: no number of segments is left to it"])
        return reasons


def _mixed(found: Sequence[RatedCandidate], mixes: Sequence[float]) -> list[Candidate]:
    """Returns the found candidates with splits of the given mixes."""
    cut = [each.candidate for each in found if each.candidate.num_segments > 1]
    return [each._replace(mix=mix) for each in cut for mix in mixes if mix != each.mix and 0 <= mix <= 1]
