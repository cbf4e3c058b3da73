"""Which order, how many segments, which split, what to recompute: the fastest that fits, and why the others do not."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seq1f1b.files import nearest_name
from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.hardware import Hardware, ProfiledHardware
from seq1f1b.planning.layout import RECOMPUTE
from seq1f1b.planning.pricing import GIB, REMEDIES, Candidate, Found, Pricing, Uncertain, group_lengths
from seq1f1b.schedule import Family, families
from seq1f1b.view.table import rounded, table_text

__all__ = ["PlanSearch", "Uncertain", "search_plans"]

_MIXES = (0.75, 0.5, 0.0)  # tried on the best orders beside 1; between them lie the optima of StateFlow's measurements
_ONLY_BY_NAME = ("auto",)
_NOT_TRIED = "not tried: it searches for seconds per candidate, ask for it by name"


@dataclass(frozen=True)
class PlanSearch:
    """Result of a search for plans.

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

    def to_text(self, model: str, *, verbose: bool = False) -> str:
        """A table of the plans and what stands behind it. Times and rates have three digits.

        Args:
            model: its name.
            verbose: also say of each family why it is left out.
        """
        first = self.plans[0]
        lines = [
            f"{model}, {_tokens(first)}, P {first.num_ranks}, M {first.num_microbatches} on {first.hardware}",
            f"cap {first.cap / GIB:.1f} GiB; {self.num_candidates} candidates, {self.num_simulated} simulated",
            "",
            *table_text(self._rows()).splitlines(),
            "",
            "GiB of each rank + what is left of the cap:",
        ]
        for number, plan in enumerate(self.plans, 1):
            ranks = zip(plan.peak, plan.margin, strict=True)
            lines += _list(f"{number:>2}", _runs(f"{peak / GIB:.1f}+{left / GIB:.1f}" for peak, left in ranks))
        lines += [
            "plan 1:",
            *_list("   GiB if its uncertain bytes are high:", _runs(f"{x / GIB:.1f}" for x in first.peak_high)),
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
        if verbose:
            lines += ["left out:", *(f"   {name}: {reason}" for name, reason in self.fallen.items())]
        elif self.fallen:
            kinds = Counter(reason.partition(":")[0] for reason in self.fallen.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"left out: {counts} (--verbose says why)")
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, ...]]:
        """A head and a row for each plan; what is the same usual value in all is left empty."""
        shows_stages = any(plan.stages_per_rank > 1 for plan in self.plans)
        shows_mix = any(plan.mix != 1 for plan in self.plans)
        shows_recompute = any(plan.layout.recompute != "none" or _share(plan, "R") for plan in self.plans)
        shows_moved = any(_share(plan, "L") for plan in self.plans)
        head = ("   schedule", "k", "v", "mix", "recompute", "moved", "step s", "interval", "bubble", "tokens/s", "GiB")
        return [
            head,
            *(
                (
                    f"{number:>2} {plan.schedule}",
                    str(plan.num_segments),
                    str(plan.stages_per_rank) if shows_stages else "",
                    f"{plan.mix:.2f}" if shows_mix else "",
                    _share(plan, "R") or plan.layout.recompute if shows_recompute else "",
                    _share(plan, "L") if shows_moved else "",
                    rounded(plan.seconds),
                    f"{rounded(plan.low)}..{rounded(plan.high)}",
                    f"{plan.bubble:.1%}",
                    rounded(plan.tokens_per_second),
                    f"{max(plan.peak) / GIB:.1f}",
                )
                for number, plan in enumerate(self.plans, 1)
            ),
        ]


def _list(head: str, items: Iterable[str]) -> list[str]:
    """The head and the items, in lines of at most 80 columns."""
    return textwrap.wrap(f"{head} {', '.join(items)}", 80, subsequent_indent=" " * 6)


def _runs(texts: Iterable[str]) -> list[str]:
    """Equal neighbours as one: 2 x16, 1 x48."""
    runs = ((text, len(list(run))) for text, run in itertools.groupby(texts))
    return [text if count == 1 else f"{text} x{count}" for text, count in runs]


def _share(plan: Plan, kind: str) -> str:
    """The share of the units that are of this kind; the text is empty where there are none."""
    kinds = "".join(plan.units).replace(" ", "")
    return f"{kinds.count(kind) / len(kinds):.0%} of units" if kind in kinds else ""


def _tokens(plan: Plan) -> str:
    """How long its sequences are."""
    lengths = [each.seq_len for each in plan.lengths] or [plan.seq_len]
    return f"{', '.join(map(str, lengths))} tokens"


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
    remedies: Sequence[str] = ("recompute",),
    best: int = 5,
    within: float = 1.2,
    progress: Callable[[int, int], None] | None = None,
) -> PlanSearch:
    """Simulates every family that these counts allow, and keeps the fastest that fit.

    The fastest has the shortest period: seconds from step to step, of several in a row with their optimizer.
    Each family is tried with every number of segments, stages per rank and recomputation asked for, first with
    segments of equal time; the best of them then with splits nearer to equal length. If nothing fits, all of them with
    segments of equal length. What cannot be faster than those
    found, by its busiest rank and the way to it, is not simulated.

    Args:
        seq_len: tokens of every sequence.
        lengths: in place of it, how many sequences have each number of tokens. All sequences of one step have the same
            length, so each length has its share of the steps. More than eight lengths are padded to the longest of
            their neighbours, in groups of about as many tokens. All lengths share one order; each has its own split.
            The mean period counts, and the cap holds for every length.
        memory: cap in bytes of one device; None: all that the device has.
        layout: degrees beside the pipeline. The search sets its ``recompute`` and ``layers``: the stage with the head
            has fewer layers, or as many as the others.
        optimizer_sync: whether the optimizer waits until all ranks are through with the step, as a norm over all
            stages makes it. Otherwise each rank goes on by itself, and orders that end early on some ranks gain.
        names: families; None: all but ``auto``, whose own search takes seconds per candidate.
            ``1f1b`` and ``gpipe`` with several segments pass them on one by one and still hold whole micro-batches.
        segments: numbers of segments; None: powers of two up to 16.
        recompute: None: all, or "none" with a profile, which measured stages as they are.
        remedies: what single units may do in an order that would not fit, and that recomputes nothing else: one or both
            of "recompute" (their forward runs once more, before their backward) and "offload" (what they save moves to
            the tier of the machine). Which units do is chosen for the cap; with both, each way is tried alone, too.
        best, within: how many plans to return at most, none slower than ``within`` times the fastest.
        progress: called with what is done and how much there is: of the candidates, of the splits of the best, of the
            plans whose uncertain terms are tried.
    Raises:
        ValueError: a count is out of range, or nothing fits: then it says the least that could.
    """
    cap = int(hardware.memory if memory is None else memory)
    counts = {"memory": cap, "best": best, "num_ranks": num_ranks, "num_microbatches": num_microbatches}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    grouped = group_lengths(seq_len, lengths, layout)
    pricing = Pricing(model, hardware, grouped, num_ranks, num_microbatches, layout or Layout(), optimizer_sync)
    wanted = _Wanted(
        _wanted_families(names),
        stages_per_rank,
        _wanted_segments(segments, grouped[0].seq_len),
        _wanted_recompute(recompute, hardware),
        _wanted_remedies(remedies, hardware),
    )
    candidates = wanted.candidates(pricing.balances)
    fitting = _best_that_fit(pricing, candidates, cap, best, within, progress)
    terms = []
    for done, found in enumerate(fitting):
        if progress is not None:
            progress(done, len(fitting))
        terms.append(pricing.uncertain(found))
    plans = tuple(pricing.plan(found, cap, moved) for found, moved in zip(fitting, terms, strict=True))
    shown = {plan.schedule for plan in plans}
    fallen = {name: why for name, why in pricing.reasons(plans[-1].seconds).items() if name not in shown}
    if not names:
        fallen |= dict.fromkeys(_ONLY_BY_NAME, _NOT_TRIED)
    return PlanSearch(plans, terms[0], fallen, len(candidates), pricing.num_simulated)


def _best_that_fit(
    pricing: Pricing,
    candidates: Sequence[Candidate],
    cap: int,
    best: int,
    within: float,
    progress: Callable[[int, int], None] | None,
) -> list[Found]:
    """Tries what could be fastest first, and then other splits of the best."""
    fitting: list[Found] = []

    def consider(tried: Sequence[Candidate]) -> None:
        for done, candidate in enumerate(tried):
            if progress is not None:
                progress(done, len(tried))
            pricing.consider(candidate, fitting, cap, best, within)

    possible = [(candidate, i) for i, candidate in enumerate(candidates) if pricing.rule(candidate) is None]
    allowed = sorted((pricing.bound(candidate), i) for candidate, i in possible if not pricing.is_repeated(candidate))
    wanted = [candidates[i] for _, i in allowed]
    consider(wanted)
    if not fitting:  # equal segments need less: of equal time the first one is the longest by far
        consider([each._replace(mix=0.0) for each in wanted if each.num_segments > 1])
    if not fitting:
        raise ValueError(pricing.explain_nothing(cap))
    mixed = [found.candidate._replace(mix=mix) for found in fitting for mix in _MIXES]
    consider([candidate for candidate in mixed if candidate.num_segments > 1])
    return fitting


class _Wanted(NamedTuple):
    """Values that a search tries."""

    families: Sequence[Family]
    stages_per_rank: Sequence[int]
    segments: Sequence[int]
    recompute: Sequence[str]
    remedies: Sequence[tuple[str, ...]]

    def candidates(self, balances: Sequence[int]) -> list[Candidate]:
        ways: list[tuple[str, tuple[str, ...]]] = [(kind, ()) for kind in self.recompute]
        if "none" in self.recompute:
            ways += [("none", remedies) for remedies in self.remedies]
        return [
            Candidate(family, v, k, 1.0, kind, balance, remedies)
            for family in self.families
            for v in self.stages_per_rank
            for k in self.segments
            for kind, remedies in ways
            for balance in balances
        ]


def _wanted_families(names: Sequence[str] | None) -> list[Family]:
    """Those named; else all but ``auto``."""
    known = {family.name: family for family in families()}
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, known)}")
    return [known[name] for name in names or (name for name in known if name not in _ONLY_BY_NAME)]


def _wanted_segments(segments: Sequence[int] | None, shortest: int) -> Sequence[int]:
    wanted = segments or [k for k in (1, 2, 4, 8, 16) if k <= shortest]
    if min(wanted) < 1 or max(wanted) > shortest:
        raise ValueError(f"segments are {list(wanted)}, must be in 1..{shortest}, the tokens of the shortest sequence")
    return wanted


def _wanted_remedies(remedies: Sequence[str], hardware: Hardware) -> list[tuple[str, ...]]:
    """Each alone, and all together."""
    for remedy in remedies:
        if remedy not in REMEDIES:
            raise ValueError(f"remedies hold {remedy!r}, must be of {', '.join(REMEDIES)}")
    if "offload" in remedies and not hardware.tier_bandwidth:
        raise ValueError(
            f"units cannot move: {hardware.name} states no tier. Set its tier_bandwidth, bytes per second each way"
        )
    wanted: list[tuple[str, ...]] = [(remedy,) for remedy in REMEDIES if remedy in remedies]
    return [*wanted, REMEDIES] if len(wanted) > 1 else wanted


def _wanted_recompute(recompute: Sequence[str] | None, hardware: Hardware) -> Sequence[str]:
    """A profile measured stages as they are, without recomputation."""
    if recompute is None:
        return ("none",) if isinstance(hardware, ProfiledHardware) else RECOMPUTE
    for kind in recompute:
        if kind not in RECOMPUTE:
            raise ValueError(f"recompute is {kind!r}, must be one of {', '.join(RECOMPUTE)}")
    return recompute
