"""One model under every pipeline schedule of torch and under ours: time, bubble, memory, and whether the losses agree.

Processes of one thread over gloo (torch) and shared memory (ours), fp32, heads of 64, micro-batch 1, the same weights,
data and seed. An arm is a schedule with an attention: torch's own, or ours. In segments, torch's attention is its flash
attention in two calls, over prefix and segment, the fastest form that it offers (`torch_attention.py`). "torch's
runtime, our order" is torch's own engine on our order, equal segments as its micro-batches.

Rounds run every arm once, forwards and backwards in turn. A step counts only while other processes use less than 8 % of
a core; a ratio is the median over the rounds in which both steps counted, with its 95 % interval (bootstrap), and fewer
than 15 are "unmeasured". Before, each arm's loss and gradients are compared with the model run whole in float64.
Memory is measured in processes of its own: the peak of resident memory in a step over what is resident before it, on
the rank where it is largest. `bubble` is the time in no unit, from the first unit to the last; `least` what it would
still be if the busiest rank never waited, so that no order of the same units has less.

    python benchmarks/pipeline.py --length 2048 --microbatches 2 4           # every schedule, both attentions
    python benchmarks/pipeline.py --schedules 1F1B seq1f1b --segments 1 2 4 8 16 --split even flops profiled
    python benchmarks/pipeline.py --memory --length 8192 --microbatches 2    # peaks in place of times
    python benchmarks/pipeline.py --results FILE --minutes 5                 # adds to FILE; again until it is complete
    python benchmarks/pipeline.py --results FILE --show --plot FILE.png      # tables, bars and picture of what it holds
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from arms import (
    AUTO,
    AUTO_SPLIT,
    MEASURED,
    RUNTIME,
    TORCH,
    Arm,
    Case,
    OurArm,
    Spec,
    Unavailable,
    errors,
    idle_shares,
    make_arm,
    timed,
    whole_model,
)
from common import FOREIGN_LIMIT, ForeignLoad, Pairs, Records, spawn
from decoder import cross_entropy

LARGEST_ERROR = 1e-4  # of the loss, and of the gradients; rounding in float32 is 1e-7 and 1e-6
BASE = "1F1B"
SHARES = (1.0, 0.75, 0.6875, 0.625, 0.5)  # of the units that 1F1B holds, to which our auto orders may be held
ATTENTIONS = {"torch": "torch's attention", "ours": "our attention"}
A = TypeVar("A", bound=Arm)


def base_of(spec: Spec) -> Spec:
    return Spec(BASE, spec.attention)


# -- measuring -----------------------------------------------------------------------------------------------------


class Results(Records):
    """Cases, arms with their errors or refusals, rounds, and peaks.

    limit: cores that other processes may use during a step that counts.
    """

    def __init__(self, path: str, limit: float = FOREIGN_LIMIT) -> None:
        super().__init__(path)
        self.limit = limit

    def of(self, what: str, case: Case) -> list[dict[str, Any]]:
        return [r for r in self.records if r["what"] == what and r["case"] == str(case)]

    def cases(self) -> list[Case]:
        """In the order of their lengths and micro-batches."""
        fields = {str(Case(**r["fields"])): r["fields"] for r in self.records if r["what"] == "case"}
        return [Case(**f) for f in sorted(fields.values(), key=lambda f: (f["length"], f["microbatches"]))]

    def specs(self, case: Case) -> list[Spec]:
        return list(dict.fromkeys(Spec(**r["spec"]) for r in self.of("arm", case)))

    def arm(self, case: Case, spec: Spec) -> dict[str, Any] | None:
        return next((r for r in reversed(self.of("arm", case)) if Spec(**r["spec"]) == spec), None)

    def pairs(self, case: Case, a: Spec, b: Spec) -> Pairs:
        """Seconds of both arms in the rounds that hold both."""
        pairs = Pairs()
        for r in self.of("round", case):
            if a.label in r["steps"] and b.label in r["steps"]:
                (x, foreign_x, *_), (y, foreign_y, *_) = r["steps"][a.label], r["steps"][b.label]
                pairs.add(x, y, max(foreign_x, foreign_y) < self.limit)
        return pairs

    def counted(self, case: Case, spec: Spec) -> tuple[list[tuple[float, ...]], int]:
        """(seconds, bubble, least bubble) of every step that counts, and the number of those that do not."""
        steps = [r["steps"][spec.label] for r in self.of("round", case) if spec.label in r["steps"]]
        counted = [(seconds, *shares) for seconds, foreign, *shares in steps if foreign < self.limit]
        return counted, len(steps) - len(counted)

    def peak(self, case: Case, spec: Spec) -> dict[str, Any] | None:
        return next((r for r in reversed(self.of("peak", case)) if Spec(**r["spec"]) == spec), None)


def measure(
    rank: int, case: Case, specs: Sequence[Spec], rounds: int, deadline: float, limit: float, path: str
) -> None:
    """Rounds of all arms, until each has as many counted steps beside 1F1B's, or the time is over."""
    results = Results(path, limit) if rank == 0 else None
    truth = whole_model(case) if rank == 0 else None
    arms = {}
    for spec in specs:
        record: dict[str, Any] = {"what": "arm", "case": str(case), "spec": dataclasses.asdict(spec)}
        try:
            arm = arms[spec] = make_arm(case, spec, rank)
        except Unavailable as error:
            record["refused"] = str(error)
        else:
            loss, loss_error, gradient_error = errors(arm, rank, truth)
            if not max(loss_error, gradient_error) <= LARGEST_ERROR:
                raise RuntimeError(f"{case}, {spec.label}: error of loss {loss_error}, of gradients {gradient_error}")
            record |= {"loss": loss, "loss_error": loss_error, "gradient_error": gradient_error}
            if isinstance(arm, OurArm):
                record["sizes"] = arm.sizes
        if results is not None:
            results.add(**record)
    for arm in arms.values():
        timed(arm)

    pids: list[int] = [0] * case.ranks
    dist.all_gather_object(pids, os.getpid())
    load = ForeignLoad(pids)
    for turn in range(2 * rounds):
        go = [results is not None and missing(results, case, list(arms), rounds) > 0 and time.time() < deadline]
        dist.broadcast_object_list(go)
        if not go[0]:
            break
        steps = {}
        for spec, arm in list(arms.items())[:: -1 if turn % 2 else 1]:
            load.start()
            seconds, foreign = timed(arm), load.cores()
            steps[spec.label] = (seconds, foreign, *idle_shares(arm))
        if results is not None:
            results.add(what="round", case=str(case), steps=steps)


def missing(results: Results, case: Case, specs: Iterable[Spec], rounds: int) -> int:
    """Counted pairs with 1F1B that the arm with the fewest lacks."""
    return max((rounds - len(results.pairs(case, base_of(spec), spec).a) for spec in specs), default=0)


def reset_peak() -> int:
    """Forgets the peak of resident memory; returns what is resident now, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def peaks_of_steps(
    case: Case,
    attention: str,
    make: Callable[[], A],
    steps: int,
    after: Callable[[A], object] = Arm.zero_grad,
    warm_tokens: int = 64,
) -> tuple[A, list[int], int]:
    """Makes an arm and takes so many steps, each followed by ``after``. Returns it, and peaks of resident memory of
    this rank, in bytes.

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
        after(arm)
    return arm, growth, total


def measure_memory(rank: int, case: Case, spec: Spec, path: str) -> None:
    """Peaks over four steps: the largest growth after the first, and the total."""
    try:
        _, growth, total = peaks_of_steps(case, spec.attention, lambda: make_arm(case, spec, rank), 4)
    except Unavailable as error:
        if rank == 0:
            Results(path).add(what="peak", case=str(case), spec=dataclasses.asdict(spec), refused=str(error))
        return
    gathered: list[Any] = [None] * case.ranks
    dist.all_gather_object(gathered, (max(growth[1:]), total))
    if rank == 0:
        growths, totals = zip(*gathered, strict=True)
        Results(path).add(
            what="peak", case=str(case), spec=dataclasses.asdict(spec), growth=growths, total=totals
        )  # fmt: skip


# -- bars ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bar:
    """What must hold: ratio of step times at least, or of peaks at most ``wanted``.

    ours: arms that a user may choose from; the best one by its median is judged, and named.
    within: only arms of ours count whose peak growth is at most so much of 1F1B's.
    """

    text: str
    case: Case
    theirs: Spec
    ours: tuple[Spec, ...]
    wanted: float
    memory: bool = False
    within: float | None = None

    def judge(self, results: Results) -> str:
        if self.memory:
            return self._judge_memory(results)
        refused = (results.arm(self.case, self.theirs) or {}).get("refused")
        if refused:
            return f"there is none: {refused}"
        found = [(results.pairs(self.case, self.theirs, ours), ours) for ours in self.ours]
        found = [(pairs, ours) for pairs, ours in found if pairs.a and self._is_within(results, ours)]
        if not found:
            return "unmeasured"
        pairs, ours = max(found, key=lambda of: (of[0].measured, of[0].ratio()[0]))
        ratio, low, high = pairs.ratio()
        verdict = "unmeasured" if not pairs.measured else "passed" if ratio >= self.wanted else "FAILED"
        state = f"{len(pairs.a)} pairs, {pairs.discarded} discarded"
        return f"{ratio:.3f} [{low:.3f}, {high:.3f}] by {ours.name}, wanted {self.wanted}, {state}: {verdict}"

    def _is_within(self, results: Results, ours: Spec) -> bool:
        if self.within is None:
            return True
        peaks = [(results.peak(self.case, spec) or {}).get("growth") for spec in (base_of(ours), ours)]
        return None not in peaks and max(peaks[1]) <= self.within * max(peaks[0])

    def _judge_memory(self, results: Results) -> str:
        theirs = results.peak(self.case, self.theirs)
        peaks = [(results.peak(self.case, ours), ours) for ours in self.ours]
        found = [(peak, ours) for peak, ours in peaks if peak is not None and "growth" in peak]
        if theirs is None or "growth" not in theirs or not found:
            return "unmeasured"
        peak, ours = min(found, key=lambda of: max(of[0]["growth"]))
        growth, total = (max(peak[what]) / max(theirs[what]) for what in ("growth", "total"))
        verdict = "passed" if growth <= self.wanted else "FAILED"
        kept = f"{total:.3f} with weights and all that is kept"
        return f"{growth:.3f} by {ours.name}, wanted at most {self.wanted} ({kept}): {verdict}"


def bars() -> list[Bar]:
    """At hidden 256, 4 blocks, P = 2, the same attention on both sides.

    Ours: one or two stages per rank (torch's zero-bubble schedules have two), 2, 4 or 8 segments of equal cost;
    for memory 8 or 16 equal ones, the head in the loss.
    """
    result, families = [], ("seq1f1b", "seq1f1b-interleaved", AUTO)
    for attention in ("torch", "ours"):
        ours = tuple(Spec(family, attention, k, "profiled") for family in families for k in (2, 4, 8))
        whose = ATTENTIONS[attention]
        for name in TORCH:
            text = f"2048 tokens, M 2, {whose}: faster than torch's {name}"
            result.append(Bar(text, Case(2048, 2), Spec(name, attention), ours, 1.0))
        text = f"2048 tokens, M 4, {whose}: 1.16 times as fast as torch's 1F1B"
        result.append(Bar(text, Case(2048, 4), Spec(BASE, attention), ours, 1.16))
        head = tuple(Spec("seq1f1b", attention, k, "even", head_in_loss=True) for k in (8, 16))
        for case in (Case(2048, 4), Case(8192, 2)):
            for name, wanted in ((BASE, 0.60), ("ZBVZeroBubble", 0.50)):
                text = f"{case.length} tokens, M {case.microbatches}, {whose}: peak against torch's {name}"
                result.append(Bar(text, case, Spec(name, attention), head, wanted, memory=True))
    families = ("seq1f1b-interleaved", AUTO, AUTO_SPLIT)
    for attention, M, name, wanted in (
        ("ours", 4, "ZBVZeroBubble", 1.08), ("torch", 4, "ZBVZeroBubble", 1.12), ("ours", 4, BASE, 1.28),
        ("ours", 2, "ZBVZeroBubble", 1.20), ("ours", 2, BASE, 1.42),
    ):  # fmt: skip
        ours = tuple(Spec(family, attention, k, "profiled") for family in families for k in (1, 2, 4))
        ours += tuple(Spec(family, attention, k, "even") for family in families for k in (1, 2, 4))
        ours += tuple(dataclasses.replace(spec, weights="fill") for spec in ours)
        ours += tuple(dataclasses.replace(s, spread=True) for s in ours if s.schedule in (AUTO, AUTO_SPLIT))
        text = f"2048 tokens, M {M}, {ATTENTIONS[attention]}, split backward too: over torch's {name}"
        result.append(Bar(text, Case(2048, M), Spec(name, attention), ours, wanted))
    text = "2048 tokens, M 4, our attention, at no more than 0.7 of 1F1B's peak: over torch's ZBVZeroBubble"
    ours = tuple(Spec(family, "ours", k, "even", weights=weights, spread=spread, share=share)
        for family in (AUTO, AUTO_SPLIT) for k in (2, 4, 8) for weights in ("planned", "fill")
        for spread in (False, True) for share in SHARES)  # fmt: skip
    ours += tuple(Spec("seq1f1b-interleaved", "ours", k, "even") for k in (2, 4, 8))
    ours += tuple(Spec("seq-zbv", "ours", k, "even", weights=weights, spread=spread)
        for k in (2, 4, 8) for weights in ("planned", "fill") for spread in (False, True))  # fmt: skip
    result.append(Bar(text, Case(2048, 4), Spec("ZBVZeroBubble", "ours"), ours, 1.05, within=0.7))
    text = "4096 tokens, M 2, our attention against torch's 1F1B with its own"
    ours = tuple(Spec(family, "ours", 8, "profiled") for family in families)
    result.append(Bar(text, Case(4096, 2), Spec(BASE, "torch"), ours, 1.80))
    return result


# -- showing -------------------------------------------------------------------------------------------------------

COLUMNS = (
    f"{'schedule':44} {'s/step':>7} {'spread':>15} {'tokens/s':>8} {'over 1F1B':>26} {'bubble':>6} {'least':>5} "
    f"{'peak MB':>8} {'error of loss, gradients':>24}  steps"
)


def show(results: Results) -> None:
    loads = sorted(foreign for r in results.records if r["what"] == "round" for _, foreign, *_ in r["steps"].values())
    if loads:
        print(
            f"# a step counts while other processes use less than {results.limit:g} of a core; in all of them it was "
            f"{statistics.median(loads):.3f}, in nine of ten less than {loads[len(loads) * 9 // 10]:.3f}"
        )
    for case in results.cases():
        specs = results.specs(case)
        specs += [s for s in (Spec(**r["spec"]) for r in results.of("peak", case)) if s not in specs]
        for attention in ("torch", "ours"):
            rows = [row(results, case, spec) for spec in sort(specs) if spec.attention == attention]
            if rows:
                print(f"\n## {case}, {ATTENTIONS[attention]}\n{COLUMNS}")
                print("\n".join(rows))
    print("\n## What must hold")
    for bar in bars():
        print(f"{bar.text}: {bar.judge(results)}")


def sort(specs: Iterable[Spec]) -> list[Spec]:
    """Torch's schedules, its runtime with our order, ours."""
    families = [*TORCH, RUNTIME]

    def key(spec: Spec) -> tuple[Any, ...]:
        place = families.index(spec.schedule) if spec.schedule in families else len(families)
        return place, spec.schedule, spec.head_in_loss, spec.segments, spec.split

    return sorted(set(specs), key=key)


def row(results: Results, case: Case, spec: Spec) -> str:
    arm, peak = results.arm(case, spec) or {}, results.peak(case, spec) or {}
    refused = arm.get("refused") or peak.get("refused")
    if refused:
        return f"{spec.name:44} {refused}"
    counted, discarded = results.counted(case, spec)
    text = f"{spec.name:44} "
    if counted:
        seconds = sorted(step[0] for step in counted)
        median, pairs = statistics.median(seconds), results.pairs(case, base_of(spec), spec)
        quartiles = f"{seconds[len(seconds) // 4]:.3f}..{seconds[-1 - len(seconds) // 4]:.3f}"
        ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*pairs.ratio()) if pairs.a else "-"
        ratio = ratio if pairs.measured else f"unmeasured ({len(pairs.a)})"
        rate = case.length * case.microbatches / median
        text += f"{median:7.3f} {quartiles:>15} {rate:8.0f} {ratio:>26} "
        text += f"{statistics.median(step[1] for step in counted):6.1%} "
        least = [step[2] for step in counted if len(step) > 2]
        text += f"{statistics.median(least):5.1%} " if least else f"{'-':>5} "
    else:
        text += f"{'':7} {'':15} {'':8} {'':26} {'':6} {'':5} "
    text += f"{max(peak['growth']) / 2**20:8.0f} " if "growth" in peak else f"{'-':>8} "
    if "loss_error" in arm:
        text += f"{arm['loss_error']:11.1e}, {arm['gradient_error']:11.1e}  {len(counted)}"
        text += f", {discarded} discarded" if discarded else ""
    return text.rstrip()


def caption(results: Results) -> str:
    lines = results.header().replace("# ", "").split("\n")
    return f"{lines[2]}; {lines[1]}"


def plot(results: Results, path: str) -> None:
    """Speed-up over 1F1B and peak of memory against it, with the same attention: a column of panels for each case."""
    from figures import Point, bars

    speed, memory = [], []
    for case in results.cases():
        ratios: dict[str, dict[str, Point]] = {text: {} for text in ATTENTIONS.values()}
        peaks: dict[str, dict[str, Point]] = {text: {} for text in ATTENTIONS.values()}
        measured = sort([*results.specs(case), *(Spec(**r["spec"]) for r in results.of("peak", case))])
        for spec in measured:
            pairs = results.pairs(case, base_of(spec), spec)
            peak, base = results.peak(case, spec), results.peak(case, base_of(spec))
            if pairs.measured:
                ratios[ATTENTIONS[spec.attention]][spec.name] = Point(*pairs.ratio())
            if peak is not None and base is not None and "growth" in peak:
                peaks[ATTENTIONS[spec.attention]][spec.name] = Point(max(peak["growth"]) / max(base["growth"]))
        title = f"{case.length} tokens, M = {case.microbatches}"
        if max(map(len, ratios.values())) > 1:
            speed.append((title, "times as fast as 1F1B", ratios))
        if max(map(len, peaks.values())) > 1:
            memory.append((title, "peak growth of a step / 1F1B's", peaks))
    if not speed and not memory:
        raise SystemExit("nothing to draw: no arm is measured beside 1F1B")
    bars(path, [panels for panels in (speed, memory) if panels], caption(results))


def plot_sweep(results: Results, path: str) -> None:
    """Speed-up of ours over 1F1B against k, a panel for each case and attention with three k or more."""
    from figures import Point, lines

    panels = []
    for case in results.cases():
        for attention, text in ATTENTIONS.items():
            series: dict[str, dict[float, Point]] = {}
            for spec in sort(results.specs(case)):
                pairs = results.pairs(case, base_of(spec), spec)
                if spec.attention == attention and not spec.is_torchs and not spec.head_in_loss and pairs.measured:
                    name = (
                        "torch's runtime, our order" if spec.schedule == RUNTIME else f"{spec.schedule}, {spec.split}"
                    )
                    series.setdefault(name, {})[spec.segments] = Point(*pairs.ratio())
            series = {name: points for name, points in series.items() if len(points) > 2}
            if series:
                title = f"{case.length} tokens, M = {case.microbatches}, {text}"
                panels.append((title, "segments k", "times as fast as 1F1B", series))
    if not panels:
        raise SystemExit("nothing to draw: no schedule of ours is measured at three k")
    lines(path, panels, caption(results))


# -- the command ---------------------------------------------------------------------------------------------------


def specs_of(options: argparse.Namespace) -> list[Spec]:
    """The arms that the options name, with 1F1B of each attention first."""
    specs = []
    for attention in options.attention:
        specs.append(Spec(BASE, attention))
        for schedule in options.schedules:
            if schedule in TORCH:
                specs.append(Spec(schedule, attention))
                continue
            for k in options.segments:
                for split in ["even"] if schedule == RUNTIME or k == 1 else options.split:
                    heads = [False] if schedule == RUNTIME else {"no": [False], "yes": [True], "both": [False, True]}
                    heads = heads if isinstance(heads, list) else heads[options.head_in_loss]
                    waits = options.weights if Spec(schedule, attention).splits else ["planned"]
                    specs += [Spec(schedule, attention, k, split, head, w) for head in heads for w in waits]
    specs += [
        dataclasses.replace(s, share=share)
        for s in specs
        if s.schedule in (AUTO, AUTO_SPLIT)
        for share in options.share
    ]
    if options.spread:
        specs += [dataclasses.replace(spec, spread=True) for spec in specs if spec.schedule in MEASURED]
    return list(dict.fromkeys(specs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[2048], help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--segments", type=int, nargs="+", default=[8], help="k, of ours and of torch's runtime")
    parser.add_argument("--split", nargs="+", default=["profiled"], choices=["even", "flops", "profiled"])
    parser.add_argument("--attention", nargs="+", default=["torch", "ours"], choices=["torch", "ours"])
    parser.add_argument(
        "--schedules", nargs="+", default=[*TORCH, RUNTIME, "seq1f1b", "seq1f1b-interleaved", AUTO],
        help=f"of torch's ({', '.join(TORCH)}), {RUNTIME}: torch's with our order, and families of ours",
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
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[],
        help="our auto orders also in so much of the units that 1F1B holds",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=16, help="counted steps that each arm shall have beside 1F1B's")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no new round after these")
    parser.add_argument("--results", help="file of JSON lines that is added to; again with the same options goes on")
    parser.add_argument("--memory", action="store_true", help="peaks of memory in place of times")
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--plot", help="picture of schedules")
    parser.add_argument("--plot-sweep", help="picture of k and splits")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.time() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        results = Results(options.results or f"{folder}/results", options.foreign)
        if not options.show:
            run(options, results, deadline)
            results = Results(results.path, options.foreign)
        print(results.header())
        show(results)
        if options.plot:
            plot(results, options.plot)
        if options.plot_sweep:
            plot_sweep(results, options.plot_sweep)


def run(options: argparse.Namespace, results: Results, deadline: float) -> None:
    results.begin("Pipeline schedules of torch and ours, processes of one thread, fp32")
    specs = specs_of(options)
    for length in options.length:
        for M in options.microbatches:
            case = Case(length, M, options.ranks, options.hidden, options.blocks)
            results.add(what="case", case=str(case), fields=dataclasses.asdict(case))
            if options.memory:
                os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
                for spec in specs:
                    if results.peak(case, spec) is None:
                        spawn(case.ranks, measure_memory, case, spec, results.path)
            elif (
                missing(
                    results, case, [s for s in specs if "refused" not in (results.arm(case, s) or {})], options.rounds
                )
                > 0
            ):
                spawn(case.ranks, measure, case, specs, options.rounds, deadline, results.limit, results.path)


if __name__ == "__main__":
    main()
