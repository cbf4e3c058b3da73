"""What `seq1f1b plan --memory` would take for long contexts on H100s: time, memory, which remedies. Simulated alone.

    python benchmarks/memory_on_paper.py [--models llama3-8b llama3-70b] [--lengths 131072 262144 524288 1048576]
    python benchmarks/memory_on_paper.py --default     what `plan` finds where nothing is chosen for it, and how fast

P 8, four sequences a step, 80 GiB of each GPU. "GPUs" are those of one pipeline rank: tensor parallel up to eight,
context parallel beyond that. Every plan rests on the machine's assumed numbers (`seq1f1b/presets/hardware/h100.json`);
no GPU has run any of them. "whole units" lets units recompute, "and move" also lets them move to pinned host memory,
which the engine does on CPUs alone so far; "block by block" is recomputation inside the backward, by the module.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

from common import header

from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.planning.search import search_plans
from seq1f1b.schedule import families

GPUS = {  # of a pipeline rank, by length
    "llama3-8b": {2**17: 1, 2**18: 2, 2**19: 4, 2**20: 8},
    "llama3-70b": {2**17: 8, 2**18: 8, 2**19: 8, 2**20: 16},
}
WAYS = {
    "keeps all": {"inside": ["none"], "remedies": ()},
    "block by block": {"inside": ["ffn", "full"], "remedies": ()},
    "whole units": {"inside": ["none"], "remedies": ("recompute",)},
    "and move": {"inside": ["none"], "remedies": ("recompute", "offload")},
}
FEW = {  # what the default was before: up to 16 segments, no order of its own, the vocabulary at the ends
    "names": [family.name for family in families() if family.name not in ("auto", "slimpipe")],
    "segments": [1, 2, 4, 8, 16],
    "vocabulary": "ends",
}
PUBLISHED = """
Published, on other machines: figures beside which these stand, not against which they were measured.
  SPPO (arXiv:2503.10377), one long sequence in balanced parts of which shares are moved at 32 GB/s each way, A100s:
  13B at 512k tokens 1.23 times, 65B at 640k tokens 3.38 times its baseline without adaptive offload; moving all of it
  0.91 times.
  PipeOffload (arXiv:2503.01328), whole micro-batches on 4 ranks and more, A100s over PCIe: moving half of the units,
  those that live longest, leaves about a quarter of the peak; free where hidden >= 8192 or tokens >= 16384.
Here each unit is chosen by itself on a checked order of segments, and both ways stand beside each other in one plan."""


def share(plan: Plan, kind: str) -> float:
    kinds = "".join(plan.units).replace(" ", "")
    return kinds.count(kind) / len(kinds) if kinds else 0.0


def best_plan(model: str, tokens: int, **options: Any) -> Plan:
    """The fastest one that fits; options: of ``search_plans``."""
    gpus = GPUS[model][tokens]
    layout = Layout(tensor=min(8, gpus), context=max(1, gpus // 8))
    machine = load_hardware("h100")
    found = search_plans(
        load_model(model), machine, seq_len=tokens, num_ranks=8, num_microbatches=4, layout=layout, **options
    )
    return found.plans[0]


def row(model: str, tokens: int, way: str) -> str:
    gpus = GPUS[model][tokens]
    found = f"{model:<11}{tokens:>9}{gpus:>5}  {way:<15}"
    try:
        plan = best_plan(
            model,
            tokens,
            names=["1f1b", "seq1f1b", "seq1f1b-interleaved", "seq-zb-h1", "seq-v-half"],
            segments=[1, 4, 8, 16, 32, 64],
            stages_per_rank=[1, 2],
            best=1,
            **WAYS[way],
        )
    except ValueError as error:
        return f"{found}{str(error).partition(', ')[0]}"
    return (
        f"{found}{plan.schedule:<20}{plan.num_segments:>3}{plan.seconds:>9.1f}  {plan.low:>6.1f}..{plan.high:<8.1f}"
        f"{plan.bubble:>6.1%}{max(plan.peak) / 2**30:>7.1f}{share(plan, 'R'):>8.0%}{share(plan, 'L'):>7.0%}  "
        f"{plan.layout.inside}"
    )


def default_row(model: str, tokens: int, way: int) -> tuple[str, float]:
    """The default plan, recomputing units (way 0), or moving them as well (way 1); its share of the seconds before."""
    remedies = ("recompute", "offload")[: 1 + way]
    gpus, began = GPUS[model][tokens], time.process_time()
    plan = best_plan(model, tokens, remedies=remedies)
    taken, before = time.process_time() - began, best_plan(model, tokens, remedies=remedies, **FEW).seconds
    counts = f"{plan.num_segments:>5}{plan.stages_per_rank:>3}  {plan.layout.vocabulary:<7}"
    text = (
        f"{model:<11}{tokens:>9}{gpus:>5}  {('recompute', 'and move')[way]:<11}{plan.schedule:<20}{counts}"
        f"{plan.seconds:>8.1f}{before:>8.1f}{plan.seconds / before:>7.2f}{plan.bubble:>8.1%}"
        f"{max(plan.peak) / 2**30:>7.1f}{taken:>10.1f}"
    )
    return text, plan.seconds / before


def print_defaults(models: list[str], lengths: list[int]) -> None:
    print(
        header(
            "Default plans under 80 GiB on paper; before: named families, up to 16 segments, the vocabulary at the ends"
        )
    )
    print(
        f"{'model':<11}{'tokens':>9}{'GPUs':>5}  {'remedies':<11}{'schedule':<20}{'k':>5}{'v':>3}  {'vocab':<7}"
        f"{'step s':>8}{'before':>8}{'ratio':>7}{'bubble':>8}{'GiB':>7}{'CPU s':>10}"
    )
    ratios = []
    for model, tokens, way in itertools.product(models, lengths, (0, 1)):
        text, ratio = default_row(model, tokens, way)
        ratios.append(ratio)
        print(text, flush=True)
    print(f"mean ratio {statistics.fmean(ratios):.3f}, worst {max(ratios):.3f}, of {len(ratios)} plans")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(GPUS))
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[2**17, 2**18, 2**19, 2**20], choices=[*GPUS["llama3-8b"]]
    )
    parser.add_argument("--default", action="store_true", help="the plans of a search that nothing is chosen for")
    options = parser.parse_args()
    if options.default:
        print_defaults(options.models, options.lengths)
        return
    print(header("Plans under 80 GiB on paper"))
    print(
        f"{'model':<11}{'tokens':>9}{'GPUs':>5}  {'what gives up':<15}{'schedule':<20}{'k':>3}{'step s':>9}  "
        f"{'interval':<16}{'bubble':>6}{'GiB':>7}{'units R':>8}{'moved':>7}  blocks"
    )
    for model in options.models:
        for tokens in options.lengths:
            for way in WAYS:
                print(row(model, tokens, way), flush=True)
    print(PUBLISHED)


if __name__ == "__main__":
    main()
