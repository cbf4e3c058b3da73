"""One model under every pipeline schedule of torch and under ours: time, bubble, memory, and whether the losses agree.

Processes of one thread over gloo (torch) and shared memory (ours), fp32, heads of 64, micro-batch 1, the same weights,
data and seed. An arm is a schedule with an attention: torch's own, or ours. In segments, torch's attention is its flash
attention in two calls, over prefix and segment, the fastest form that it offers (`torch_attention.py`).

Rounds run every arm once, forwards and backwards in turn. A step counts only while other processes use less than 8 % of
a core; a ratio is the median over the rounds in which both steps counted, with its 95 % interval (bootstrap), and fewer
than 15 are "unmeasured". Ratios are to torch's 1F1B and ZBV with the same attention, and to 1F1B with torch's. Before,
each arm's loss and gradients are compared with the model run whole in float64.

Memory is measured in processes of its own: the peak of resident memory in a step over what is resident before it, on
the rank where it is largest. `bubble` is the time in no unit, from the first unit to the last; `least` what it would
still be if the busiest rank never waited, so that no order of the same units has less.

    python benchmarks/pipeline.py --length 2048 --microbatches 2 4           # every schedule, both attentions
    python benchmarks/pipeline.py --schedules 1F1B seq1f1b --segments 1 2 4 8 16 --split even flops profiled
    python benchmarks/pipeline.py --memory --length 8192 --microbatches 2    # peaks in place of times
    python benchmarks/pipeline.py --results FILE --minutes 5                 # adds to FILE; again until it is complete
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from arms import (
    AUTO,
    MEASURED,
    TORCH,
    Arm,
    Case,
    OurArm,
    Spec,
    Unavailable,
    check_arm,
    idle_shares,
    make_arm,
    take_rounds,
    whole_model,
)
from common import Records, gathered, parser_of, quartiles, resident_bytes, spawn, status_bytes
from decoder import cross_entropy

BASE = "1F1B"
ATTENTIONS = {"torch": "torch's attention", "ours": "our attention"}
A = TypeVar("A", bound=Arm)


def base_label(label: str) -> str:
    """Label of 1F1B with the same attention."""
    return Spec(BASE, label.rpartition(" | ")[2]).label


# -- measuring -----------------------------------------------------------------------------------------------------


def cases_of(results: Records) -> list[Case]:
    """In the order of their lengths and micro-batches."""
    cases = {Case(**r["fields"]): None for r in results.of("case")}
    return sorted(cases, key=lambda case: (case.length, case.microbatches))


def specs_in(results: Records, case: Case) -> list[Spec]:
    """Arms whose times or peaks were measured, with what refused: torch's schedules, then ours."""

    def key(spec: Spec) -> tuple[Any, ...]:
        place = TORCH.index(spec.schedule) if spec.is_torchs else len(TORCH)
        return place, spec.schedule, spec.head_in_loss, spec.segments, spec.split

    found = [Spec(**r["spec"]) for what in ("arm", "peak") for r in results.of(what, case=str(case))]
    return sorted(dict.fromkeys(found), key=key)


def last_of(results: Records, what: str, case: Case, spec: Spec) -> dict[str, Any]:
    """The last "arm" or "peak" of it; empty if there is none."""
    return results.last(what, case=str(case), spec=dataclasses.asdict(spec)) or {}


def measure(
    rank: int, case: Case, specs: Sequence[Spec], rounds: int, deadline: float, limit: float, path: str
) -> None:
    """Rounds of all arms, until each has as many counted steps beside 1F1B's, or the time is over; arms that the file
    does not hold are compared with the whole model before."""
    results = Records(path, limit)
    compared = [spec for spec in specs if "loss" in last_of(results, "arm", case, spec)]
    truth = whole_model(case) if rank == 0 and len(compared) < len(specs) else None
    arms: dict[Spec, Arm] = {}
    for spec in specs:
        record: dict[str, Any] = {"what": "arm", "case": str(case), "spec": dataclasses.asdict(spec)}
        try:
            arm = arms[spec] = make_arm(case, spec, rank)
        except Unavailable as error:
            record["refused"] = str(error)
        else:
            if spec in compared:
                arm.step()  # as warm as after a comparison
                continue
            record |= check_arm(arm, f"{case}, {spec.label}", truth)
            record |= {"sizes": arm.sizes} if isinstance(arm, OurArm) else {}
        if rank == 0:
            results.add(**record)
    labels = {spec.label: arm for spec, arm in arms.items()}
    take_rounds(labels, results, rounds, base=base_label, deadline=deadline, also=idle_shares, case=str(case))


def reset_peak() -> int:
    """Forgets the peak of resident memory; returns what is resident now, in bytes."""
    resident = resident_bytes()
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return resident


def peaks_of_steps(
    case: Case, attention: str, make: Callable[[], A], steps: int, warm_tokens: int = 64
) -> tuple[A, list[int], int]:
    """Makes an arm and takes so many steps. Returns it, and peaks of resident memory of this rank, in bytes.

    growth: of each step over what is resident before it. total: over what is resident before the arm is made, with its
    weights, its buffers and all that it keeps between steps. Before that, so many tokens run through a model, which
    loads the code that steps run, and what libraries keep for products of this size.
    """
    warm, tokens = case.stage(0, 1, "ours" if attention == "ours" else "two calls"), torch.zeros(1, warm_tokens).long()
    cross_entropy(warm(tokens), tokens).backward()
    del warm
    dist.barrier()
    empty = reset_peak()
    arm = make()
    growth, total = [], 0
    for _ in range(steps):
        dist.barrier()
        before = reset_peak()
        arm.step()
        peak = status_bytes("VmHWM")
        growth.append(peak - before)
        total = max(total, peak - empty)
        arm.zero_grad()
    return arm, growth, total


def measure_memory(rank: int, case: Case, spec: Spec, path: str) -> None:
    """Peaks over four steps: the largest growth after the first, and the total."""
    about = {"what": "peak", "case": str(case), "spec": dataclasses.asdict(spec)}
    try:
        _, growth, total = peaks_of_steps(case, spec.attention, lambda: make_arm(case, spec, rank), 4)
    except Unavailable as error:
        found: dict[str, Any] = {"refused": str(error)}
    else:
        growths, totals = zip(*gathered((max(growth[1:]), total)), strict=True)
        found = {"growth": growths, "total": totals}
    if rank == 0:
        Records(path).add(**about, **found)


# -- showing -------------------------------------------------------------------------------------------------------

COLUMNS = (
    f"{'schedule':44} {'s/step':>7} {'spread':>15} {'tokens/s':>8} {'over 1F1B':>26} {'over ZBV':>26} "
    f"{'over 1F1B, torch attention':>26} {'bubble':>6} {'least':>5} {'peak MB':>8} {'error of loss, gradients':>24}"
    "  steps"
)


def show(results: Records) -> None:
    loads = sorted(foreign for r in results.of("round") for _, foreign, *_ in r["steps"].values())
    if loads:
        print(
            f"# a step counts while other processes use less than {results.limit:g} of a core; in all of them it was "
            f"{statistics.median(loads):.3f}, in nine of ten less than {loads[len(loads) * 9 // 10]:.3f}"
        )
    for case in cases_of(results):
        for attention in ("torch", "ours"):
            rows = [row(results, case, spec) for spec in specs_in(results, case) if spec.attention == attention]
            if rows:
                print(f"\n## {case}, {ATTENTIONS[attention]}\n{COLUMNS}")
                print("\n".join(rows))


def over(results: Records, case: Case, base: Spec, spec: Spec) -> str:
    """How many times as fast as another arm."""
    pairs = results.pairs(base.label, spec.label, case=str(case))
    if pairs.measured:
        return "{:.3f} [{:.3f}, {:.3f}]".format(*pairs.ratio())
    return f"unmeasured ({len(pairs.a)})" if pairs.a else "-"


def row(results: Records, case: Case, spec: Spec) -> str:
    arm, peak = (last_of(results, what, case, spec) for what in ("arm", "peak"))
    if refused := arm.get("refused") or peak.get("refused"):
        return f"{spec.name:44} {refused}"
    counted, discarded = results.counted(spec.label, case=str(case))
    text = f"{spec.name:44} "
    if counted:
        seconds, bubbles, least = zip(*counted, strict=True)
        median = statistics.median(seconds)
        text += f"{median:7.3f} {quartiles(seconds):>15} {case.tokens / median:8.0f} "
        for base in (Spec(BASE, spec.attention), Spec("ZBVZeroBubble", spec.attention), Spec(BASE, "torch")):
            text += f"{over(results, case, base, spec):>26} "
        text += f"{statistics.median(bubbles):6.1%} {statistics.median(least):5.1%} "
    else:
        text += f"{'':126} "
    text += f"{max(peak['growth']) / 2**20:8.0f} " if peak else f"{'-':>8} "
    if arm:
        text += f"{arm['loss_error']:11.1e}, {arm['gradient_error']:11.1e}  {len(counted)}"
        text += f", {discarded} discarded" if discarded else ""
    return text.rstrip()


# -- the command ---------------------------------------------------------------------------------------------------


def specs_of(options: argparse.Namespace) -> list[Spec]:
    """The arms that the options name, with 1F1B of each attention first."""
    specs = []
    heads = {"no": [False], "yes": [True], "both": [False, True]}[options.head_in_loss]
    for attention in options.attention:
        specs.append(Spec(BASE, attention))
        for schedule in options.schedules:
            if schedule in TORCH:
                specs.append(Spec(schedule, attention))
                continue
            for k, head in itertools.product(options.segments, heads):
                for split in ["even"] if k == 1 else options.split:
                    waits = options.weights if Spec(schedule, attention).splits else ["planned"]
                    specs += [Spec(schedule, attention, k, split, head, w) for w in waits]
    if options.spread:
        specs += [dataclasses.replace(spec, spread=True) for spec in specs if spec.schedule in MEASURED]
    return list(dict.fromkeys(specs))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, nargs="+", default=[2048], help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--segments", type=int, nargs="+", default=[8], help="k, of ours")
    parser.add_argument("--split", nargs="+", default=["profiled"], choices=["even", "flops", "profiled"])
    parser.add_argument("--attention", nargs="+", default=["torch", "ours"], choices=["torch", "ours"])
    parser.add_argument(
        "--schedules", nargs="+", default=[*TORCH, "seq1f1b", "seq1f1b-interleaved", AUTO],
        help=f"of torch's ({', '.join(TORCH)}), and families of ours",
    )  # fmt: skip
    parser.add_argument(
        "--head-in-loss", default="no", choices=["no", "yes", "both"], help="of ours: one segment's logits"
    )
    parser.add_argument(
        "--weights", nargs="+", default=["planned"], choices=["planned", "fill"], help="of split orders"
    )
    parser.add_argument(
        "--spread", action="store_true", help="our auto orders and seq-zbv also with the head's rows over the ranks"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=16, help="counted steps that each arm shall have beside 1F1B's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new round after these")
    parser.add_argument("--results", help="file of JSON lines that is added to; again with the same options goes on")
    parser.add_argument("--memory", action="store_true", help="peaks of memory in place of times")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.time() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        results = Records(options.results or f"{folder}/results", options.foreign)
        run(options, results, deadline)
        print(results.header())
        show(results)


def run(options: argparse.Namespace, results: Records, deadline: float) -> None:
    results.begin("Pipeline schedules of torch and ours, processes of one thread, fp32")
    for length, M in itertools.product(options.length, options.microbatches):
        case, specs = Case(length, M, hidden=options.hidden), specs_of(options)
        results.add(what="case", case=str(case), fields=dataclasses.asdict(case))
        if options.memory:
            os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
            for spec in specs:
                if not last_of(results, "peak", case, spec):
                    spawn(case.ranks, measure_memory, case, spec, results.path)
        else:
            running = [spec.label for spec in specs if "refused" not in last_of(results, "arm", case, spec)]
            if results.missing(running, options.rounds, base_label, case=str(case)) > 0:
                spawn(case.ranks, measure, case, specs, options.rounds, deadline, results.limit, results.path)
        results.reload()


if __name__ == "__main__":
    main()
