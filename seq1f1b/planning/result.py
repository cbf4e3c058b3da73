"""Result of a search for plans: the best plans, the uncertain numbers, and reasons of families left out."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from seq1f1b.plan import Plan
from seq1f1b.planning.hardware import Hardware
from seq1f1b.table import rounded, table_text

__all__ = ["GIB", "PlanSearch", "Uncertain"]

GIB = 1 << 30
_HEADS = (
    "k segments of a sequence; v stages of a rank; mix 1: segments of equal time, 0: of equal length; vocab: embedding "
    "and head at the ends, or over the ranks; GiB of the fullest rank"
)


class Uncertain(NamedTuple):
    """Uncertain number of a machine: both ends of the range, and the change of the step in seconds at each end."""

    name: str
    low: float
    high: float
    change_at_low: float
    change_at_high: float


@dataclass(frozen=True)
class PlanSearch:
    """Result of a search for plans.

    Attributes:
        plans: the best plans, fastest first; if times differ by less than 0.2 %, the plan with less memory comes first.
        uncertain: uncertain numbers that change the best plan's step, largest change first.
        fallen: reason for each family without a plan among the best.
        num_candidates, num_simulated: number of candidates, and of simulated orders.
        machine: the machine of the plans.
    """

    plans: tuple[Plan, ...]
    uncertain: tuple[Uncertain, ...]
    fallen: Mapping[str, str]
    num_candidates: int
    num_simulated: int
    machine: Hardware

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
            },
            indent=1,
        )

    def to_text(self, model: str, *, verbose: bool = False, file: str = "FILE") -> str:
        """Returns a table of the plans, and details of the best plan. Times and rates have three digits.

        Args:
            model: the model's name.
            verbose: adds the reason for each family left out.
            file: name of the best plan's file.
        """
        first = self.plans[0]
        lengths = ", ".join(str(each.seq_len) for each in first.lengths or (first,))
        lines = [
            f"{model}, {lengths} tokens, P {first.num_ranks}, M {first.num_microbatches} on {first.hardware}, "
            f"{self.machine.rates}",
            f"cap {first.cap / GIB:.1f} of {self.machine.memory / GIB:.1f} GiB; {self.num_candidates} candidates, "
            f"{self.num_simulated} simulated",
            "",
            *table_text(self._rows()).splitlines(),
            *_list(_HEADS, ()),
            "",
            "plan 1:",
            *_list("   GiB of each rank:", (f"{x / GIB:.1f}" for x in first.peak)),
            *_list("   GiB in the worst case of the estimate:", (f"{x / GIB:.1f}" for x in first.peak_high)),
            *_list("   layers of each stage:", map(str, first.layout.layers or ())),
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
        lines += _list("run plan 1:", [self._call(first, file)])
        if verbose:
            lines += ["left out:", *(f"   {name}: {reason}" for name, reason in self.fallen.items())]
        elif self.fallen:
            kinds = Counter(reason.partition(":")[0] for reason in self.fallen.values())
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            lines.append(f"left out: {counts} (--verbose says why)")
        return "\n".join(lines)

    def _call(self, plan: Plan, file: str) -> str:
        """Returns the call of the engine that runs a plan."""
        if plan.layout.inside != "none":
            return (
                f'PipelineEngine(stages, schedule="{plan.schedule}", num_microbatches={plan.num_microbatches}, '
                f"num_segments={plan.num_segments}, ...), blocks in torch.utils.checkpoint"
            )
        tier = "seq1f1b.HOST" if self.machine.device_type == "cuda" else '"FOLDER"'
        memory = f", memory=Memory(offload={tier})" * any("L" in row for row in plan.units)
        return f'PipelineEngine(stages, schedule="{file}"{memory}, ...), with the file of --output {file}'

    def _rows(self) -> list[tuple[str, ...]]:
        """Returns the table's head and a row for each plan; the usual v, mix, vocab and recompute stay empty."""
        plans = self.plans
        columns = {
            "   schedule": [f"{number:>2} {plan.schedule}" for number, plan in enumerate(plans, 1)],
            "k": [str(plan.num_segments) for plan in plans],
            "v": [str(plan.stages_per_rank) * (plan.stages_per_rank > 1) for plan in plans],
            "mix": [f"{plan.mix:.2f}" * (plan.mix != 1) for plan in plans],
            "vocab": [plan.layout.vocabulary.removeprefix("ends") for plan in plans],
            "recompute": [_share(plan, "R") or plan.layout.inside.removeprefix("none") for plan in plans],
            "moved": [_share(plan, "L") for plan in plans],
            "step s": [rounded(plan.seconds) for plan in plans],
            "interval": [f"{rounded(plan.low)}..{rounded(plan.high)}" for plan in plans],
            "bubble": [f"{plan.bubble:.1%}" for plan in plans],
            "tokens/s": [rounded(plan.tokens_per_second) for plan in plans],
            "GiB": [f"{max(plan.peak) / GIB:.1f}" for plan in plans],
        }
        return [tuple(columns), *zip(*columns.values(), strict=True)]


def _list(head: str, items: Iterable[str]) -> list[str]:
    """Returns the head and the items in lines of at most 80 columns, with equal neighbours joined: 2 x16, 1 x48."""
    runs = ((text, len(list(run))) for text, run in itertools.groupby(items))
    texts = (text if count == 1 else f"{text} x{count}" for text, count in runs)
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}  # names of files and options
    return textwrap.wrap(f"{head} {', '.join(texts)}".rstrip(), 80, subsequent_indent=" " * 6, **whole)


def _share(plan: Plan, kind: str) -> str:
    """Returns the share of units of a kind, as text; empty if the plan has no unit of the kind."""
    kinds = "".join(plan.units).replace(" ", "")
    return f"{kinds.count(kind) / len(kinds):.0%} of units" if kind in kinds else ""
