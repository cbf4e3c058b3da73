"""The time of a step over the memory that it needs: our plans under caps, and torch's schedules beside them.

Two processes of one thread, fp32, heads of 64, micro-batch 1, the same weights and data, our attention in every arm.
The layers are profiled first, with recomputation and a tier in the output folder. Ours are the plans that
`seq1f1b.planning.search` chooses from this profile, without a cap and under smaller and smaller ones, each run from its
plan as the engine takes it. Torch's are 1F1B plain, 1F1B with every block under `torch.utils.checkpoint`, and ZBV.

Memory is the growth of resident memory in a step over what is resident before it, of each rank, each arm in processes
of its own. Times come from rounds that run every arm once, forwards and backwards in turn; a step counts only while
other processes use less than 8 % of a core. Before, each arm's loss and gradients are compared with the model run
whole in float64. All processes give freed memory back to the kernel, so that time and memory are of one configuration.

Then the longest sequence under a cap on the growth of each rank, in the first step of processes of its own, which also
allocates what an engine keeps: the cache and receive places. These lie in memory that two ranks hold: half of it counts
for each.

    python benchmarks/memory.py                     # all of it, some hours; again, it goes on where it was
    python benchmarks/memory.py --minutes 55        # begins nothing after that; again until it is complete
    python benchmarks/memory.py --quick --output /tmp/try --foreign inf     # whether it runs

Writes memory.jsonl, memory.txt and memory.png into the output folder. What moving costs under malloc's own settings is
in `moves.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from arms import Arm, Case, EngineArm, Spec, check_arm, make_arm, take_rounds, whole_model
from common import Records, gathered, parser_of, quartiles, show_and_write, spawn, status_bytes
from decoder import HeadLoss, Stage, add_adapters, cross_entropy
from pipeline import peaks_of_steps
from predict import PARTS, Setup, measure_part
from torch import nn

import seq1f1b
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.profiler import make_profile
from seq1f1b.planning.search import search_plans

TITLE = "Step time over memory: plans under caps, and torch's schedules"
# What a plan counts is what a step holds: no share of a process that has imported torch and run a product, and no
# optimizer's state; beside tensors, what the tier, the objects of graphs and holes in the heap take, and 3 % for what
# allocations round up to pages.
MACHINE = dataclasses.replace(
    load_hardware("cpu-zen5"), context_bytes=3.0 * 2**20, allocator_reserve=0.03, optimizer_bytes=0.0
)
WARM_TOKENS = 1024
CAPS = (0.8, 0.6, 0.5, 0.4, 0.35, 0.3, 0.25, 0.2)  # of the peak of the plan without one
SEGMENTS = (1, 2, 4, 8, 16, 32, 64)  # that plans may have
PEERS = (Spec("1F1B", "ours"), Spec("1F1B", "ours", checkpoint=True), Spec("ZBVZeroBubble", "ours"))
FASTEST, BASE, PLANNED = "ours, no cap", PEERS[0].name, "ours, planned"
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Ours:
    """An arm: a plan; of its units every other one moves to the tier, if asked for."""

    name: str
    plan: str  # the text of its file
    moves_half: bool = False


def is_every_other(num_segments: int, unit: seq1f1b.Unit) -> bool:
    """Half of a stage's units, spread over its micro-batches and segments."""
    return (unit.microbatch * num_segments + unit.segment) % 2 == 1


class PlannedArm(EngineArm):
    """The engine as its plan has it."""

    def __init__(self, case: Case, arm: Ours, rank: int, directory: str) -> None:
        plan = Plan.from_json(arm.plan)
        order = plan.engine_arguments()["schedule"]
        own = [stage for stage, at in enumerate(order.rank_of_stage) if at == rank]
        has_last = order.num_stages - 1 in own
        sizes = {"hidden": case.hidden, "blocks": case.blocks, "vocab": case.vocab, "layers": plan.layout.layers}
        modules: list[nn.Module] = [Stage(i, order.num_stages, head=False, **sizes) for i in own]
        loss_fn = HeadLoss(case.hidden, case.vocab) if has_last else cross_entropy
        if case.lora:
            for module in modules:
                add_adapters(module, case.lora)
            for module in [loss_fn] * has_last:
                module.requires_grad_(False)
        levers: dict[str, Any] = {"units": partial(is_every_other, plan.num_segments)} if arm.moves_half else {}
        if arm.moves_half or "O" in order.kinds:
            levers["offload"] = directory
        engine = seq1f1b.PipelineEngine(list(modules), schedule=plan, loss_fn=loss_fn, memory=seq1f1b.Memory(**levers))
        super().__init__(modules + [loss_fn] * has_last, engine, case.batch())


def make(case: Case, arm: Spec | Ours, rank: int, directory: str) -> Arm:
    return make_arm(case, arm, rank) if isinstance(arm, Spec) else PlannedArm(case, arm, rank, directory)


# -- what was measured -------------------------------------------------------------------------------------------------


class Results(Records):
    """The case and the cap, a profile, arms with their errors and peaks, rounds, and attempts at a length."""

    def again(self, done: bool, processes: int, work: Callable[..., None], *arguments: Any) -> None:
        """Runs this piece in new processes, which write to the file, unless it is there."""
        if not done:
            spawn(processes, work, *arguments, self.path)
            self.reload()

    @property
    def case(self) -> Case:
        return Case(**self.of("case")[0]["fields"])

    @property
    def cap(self) -> int:
        """Bytes by which the longest sequence may let a rank grow."""
        return int(self.of("case")[0]["cap"])

    @property
    def profile(self) -> Profile:
        return Profile.from_json(self.of("profile")[0]["text"])

    def arms(self) -> list[Spec | Ours]:
        return [(Ours if "plan" in r["fields"] else Spec)(**r["fields"]) for r in self.of("arm")]

    def seconds(self, name: str) -> list[float]:
        """Those of the steps that count."""
        return [seconds for seconds, *_ in self.counted(name)[0]]

    def longest(self, name: str) -> int:
        """Tokens; 0 where no attempt was within the cap."""
        return max((r["tokens"] for r in self.of("attempt", arm=name) if r["fits"]), default=0)


# -- plans -------------------------------------------------------------------------------------------------------------


def measure_profile(rank: int, case: Case, segments: tuple[int, ...], directory: str, path: str) -> None:
    """Profiles the model's parts, in as many processes as there are ranks."""
    setup, begin = Setup("", case.hidden, case.vocab, case.length, False, case.lora), time.perf_counter()
    parts: dict[str, Any] = {}
    for part in PARTS:
        parts[part] = gathered(measure_part(setup, part, dist.barrier, segments, repeats=3, offload=directory))
    if rank == 0:
        settings = {"seq_len": case.length, "threads": 1, "dtype": "float32", "seconds": time.perf_counter() - begin}
        profile = make_profile(case.shape._replace(layers=1), lora=case.lora, **parts, **settings)
        Records(path).add(what="profile", text=profile.to_json())


def search(case: Case, profile: Profile, cap: int | None, **wanted: Any) -> Plan:
    """The fastest plan under a cap in bytes of a rank. ValueError: nothing fits."""
    found = search_plans(
        case.shape,
        ProfiledHardware.of(profile, MACHINE),
        seq_len=case.length,
        num_ranks=case.ranks,
        num_microbatches=case.microbatches,
        memory=cap,
        layout=Layout(head_in_loss=True, lora=case.lora),
        vocabulary="ends",
        remedies=("recompute", "offload"),
        best=1,
        **{"segments": [k for k in SEGMENTS if 16 * k <= case.length], "stages_per_rank": [1, 2], **wanted},
    )
    return found.plans[0]


def choose_arms(case: Case, profile: Profile, quick: bool) -> list[Spec | Ours]:
    """Torch's, the plan without a cap, and those under each cap that changes it."""
    fastest = search(case, profile, None)
    plans = {FASTEST: fastest}
    for share in () if quick else CAPS:
        cap = int(share * max(fastest.peak))
        with contextlib.suppress(ValueError):
            plan = search(case, profile, cap)
            if all(dataclasses.replace(plan, cap=other.cap) != other for other in plans.values()):
                plans[f"ours, cap {cap / MIB:.0f} MiB"] = plan
    return [*PEERS[: 1 if quick else None], *(Ours(name, plan.to_json()) for name, plan in plans.items())]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure_memory(rank: int, case: Case, arm: Spec | Ours, directory: str, path: str) -> None:
    """Peaks over four steps: the largest growth after the first, and the total; what of it was planned."""
    made, growth, total = peaks_of_steps(
        case, "ours", lambda: make(case, arm, rank, directory), 4, warm_tokens=WARM_TOKENS
    )
    own: dict[str, Any] = {"growth": max(growth[1:]), "total": total}
    if isinstance(made, EngineArm):
        report = made.engine.report()
        own["planned"] = sum(stage.planned_activation_bytes or 0 for stage in report.stages)
        own["units"] = [report.kept_units, report.recomputed_units, report.moved_units]
    everyone = gathered(own)
    if rank == 0:
        Records(path).add(what="peak", arm=arm.name, **{name: [each[name] for each in everyone] for name in own})


def measure_rounds(
    rank: int, case: Case, rounds: int, deadline: float, limit: float, directory: str, path: str
) -> None:
    """Rounds of all arms, until each has as many counted steps, or the time is over."""
    results = Results(path, limit)
    truth = whole_model(case) if rank == 0 else None
    made: dict[str, Arm] = {}
    for arm in results.arms():
        made[arm.name] = make(case, arm, rank, directory)
        found = check_arm(made[arm.name], arm.name, truth)
        if rank == 0:
            results.add(what="checked", arm=arm.name, **found)
    take_rounds(made, results, rounds, deadline=deadline)


# -- the longest sequence ----------------------------------------------------------------------------------------------


def try_length(rank: int, case: Case, arm: Spec | Ours, cap: int, directory: str, path: str) -> None:
    """One step, the first, in processes of its own. Memory that both ranks hold counts half for each."""
    made, growth, _ = peaks_of_steps(case, "ours", lambda: make(case, arm, rank, directory), 1, warm_tokens=WARM_TOKENS)
    everyone = gathered(growth[0] - status_bytes("RssShmem") // 2)
    del made  # not before: its receive places go with it
    if rank == 0:
        found = {"growth": everyone, "fits": max(everyone) <= cap}
        Records(path).add(what="attempt", arm=arm.name, tokens=case.length, **found)


def find_longest(results: Results, name: str, step: int, deadline: float, attempt: Callable[[Case], None]) -> None:
    """Tries lengths, multiples of ``step``, until the longest within the cap is known or the time is over. Growth rises
    with the length, nearly in proportion, so each attempt tells where to go on."""
    tokens = math.ceil(max(results.case.length, step) / step) * step
    while time.time() < deadline:
        known = {r["tokens"]: r for r in results.of("attempt", arm=name)}
        if tokens not in known:
            attempt(dataclasses.replace(results.case, length=tokens))
            continue
        fits = max((t for t, r in known.items() if r["fits"]), default=0)
        too_long = min((t for t, r in known.items() if not r["fits"]), default=None)
        if too_long is not None and too_long - fits <= step:
            return
        growth = max(known[tokens]["growth"], default=0)
        tokens = int(tokens * results.cap / growth if growth else tokens / 2) // step * step
        tokens = max(tokens, fits + step)
        tokens = min(tokens, (too_long if too_long is not None else 4 * max(fits, step)) - step)


def measure_longest(results: Results, step: int, names: Iterable[str], deadline: float, directory: str) -> None:
    peers = {peer.name: peer for peer in PEERS}
    for name in names:

        def attempt(case: Case, name: str = name) -> None:
            try:
                arm = peers.get(name) or Ours(name, search(case, results.profile, results.cap).to_json())
            except ValueError:  # no plan is within the cap
                results.add(what="attempt", arm=name, tokens=case.length, growth=[], fits=False)
                return
            spawn(case.ranks, try_length, case, arm, results.cap, directory, results.path)
            results.reload()

        find_longest(results, name, step, deadline, attempt)


# -- showing -----------------------------------------------------------------------------------------------------------


def show(results: Results) -> None:
    print(results.header())
    print(f"# {results.case}; a step counts while other processes use less than {results.limit:g} of a core")
    if results.of("profile"):
        print("".join(f"# {line}\n" for line in results.profile.to_text().splitlines()), end="")
    base, fastest = results.last("peak", arm=BASE), results.seconds(FASTEST)
    print(
        f"\n{'arm':36} {'s/step':>7} {'quartiles':>15} {'/ no cap':>8}  {'growth MiB, ranks':>17} {'/ 1F1B':>6}  "
        f"{'planned MiB':>15}  {'units kept, recomputed, moved':>30}  {'error':>7}  {'steps':5}  plan"
    )
    for arm in results.arms():
        seconds, peak = results.seconds(arm.name), results.last("peak", arm=arm.name)
        checked = results.last("checked", arm=arm.name)
        text = f"{arm.name:36} "
        if seconds:
            ratio = f"{statistics.median(seconds) / statistics.median(fastest):8.3f}" if fastest else f"{'':8}"
            text += f"{statistics.median(seconds):7.3f} {quartiles(seconds):>15} {ratio}  "
        else:
            text += f"{'-':>7} {'':15} {'':8}  "
        if peak is not None:
            share = f"{max(peak['growth']) / max(base['growth']):6.3f}" if base is not None else f"{'':6}"
            text += f"{mib(peak['growth']):>17} {share}  {mib(peak.get('planned', ())):>15}  "
            text += f"{'; '.join(', '.join(map(str, each)) for each in peak.get('units', ())):>30}  "
        if checked is not None:
            text += f"{max(checked['loss_error'], checked['gradient_error']):7.1e}  {len(seconds):5}"
        if isinstance(arm, Ours) and peak is not None and checked is not None:
            plan = Plan.from_json(arm.plan)
            layers = "+".join(map(str, plan.layout.layers or ()))
            text += f"  {plan.schedule}, k {plan.num_segments}, layers {layers}, {plan.seconds:.2f} s, "
            text += f"{mib(plan.peak)} MiB"
        print(text.rstrip())
    show_longest(results)


def mib(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size / MIB:.0f}" for size in sizes)


def show_longest(results: Results) -> None:
    print(f"\n## Longest sequence whose first step grows by at most {results.cap / MIB:.0f} MiB per rank")
    for name in dict.fromkeys(r["arm"] for r in results.of("attempt")):
        tried = sorted(results.of("attempt", arm=name), key=lambda r: r["tokens"])
        text = ", ".join(f"{r['tokens']}: {mib(r['growth']) or 'no plan'}" for r in tried)
        print(f"{name:40} {results.longest(name):7} tokens; growth in MiB of ranks at {text}")


def draw(results: Results, path: str) -> None:
    """Seconds over memory: ours as the least time within each size, each of torch's as a point with its name."""
    from matplotlib.figure import Figure

    shown = []  # MiB, quartiles of the seconds, and the arm
    for arm in results.arms():
        peak, seconds = results.last("peak", arm=arm.name), results.seconds(arm.name)
        if peak is not None and len(seconds) > 1:
            shown.append((max(peak["growth"]) / MIB, statistics.quantiles(seconds, n=4), arm))
    if len(shown) < len(results.arms()):
        return
    figure, right = Figure(figsize=(8.0, 5.0), layout="constrained", dpi=200), 1.1 * max(size for size, *_ in shown)
    axis, steps = figure.subplots(), []
    for size, (low, middle, high), arm in sorted(shown, key=lambda each: each[0]):
        style = {"color": "#0072b2", "marker": "o"} if isinstance(arm, Ours) else {"color": "#d55e00", "marker": "s"}
        axis.errorbar(size, middle, yerr=[[middle - low], [high - middle]], capsize=2.0, **style)
        name = arm.name.removeprefix("ours, ")
        axis.annotate(name, (size, middle), (5, 7), textcoords="offset points", fontsize=8, rotation=50)
        if isinstance(arm, Ours):
            steps.append((size, min([middle, *(least for _, least in steps)])))
    axis.step(*zip(*steps, (right, steps[-1][1]), strict=True), where="post", color="#0072b2")
    axis.set_xlim(0, right)
    axis.set_ylim(0, None)
    axis.set_xlabel("growth of resident memory in a step, on the rank where it is largest (MiB)")
    axis.set_ylabel("seconds of a step, median and quartiles")
    case, head = results.case, results.header().replace("# ", "").split("\n")
    figure.suptitle(
        "What a step takes in less memory: our plans under caps, and torch's schedules\n"
        f"{case.ranks} ranks, {case.microbatches} micro-batches of {case.length} tokens, {case.blocks} blocks of "
        f"hidden size {case.hidden}, the same attention\n{head[2]}",
        fontsize=8, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path)


# -- the command -------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, results: Results) -> None:
    results.begin(TITLE)
    quick, directory, deadline = options.quick, options.output, time.time() + 60 * options.minutes
    case, cap = (Case(256, 2, hidden=64), 16 * MIB) if quick else (Case(8192, 2), 1024 * MIB)
    rounds = 2 if quick else options.rounds
    if not results.of("case"):
        results.add(what="case", fields=dataclasses.asdict(case), cap=cap)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
    segments, again = (1, 2, 4) if quick else (1, 4, 16), results.again
    again(bool(results.of("profile")), case.ranks, measure_profile, case, segments, directory)
    if not results.of("arm"):
        for arm in choose_arms(case, results.profile, quick):
            results.add(what="arm", fields=dataclasses.asdict(arm))
    for arm in results.arms():
        if time.time() < deadline:
            again(bool(results.of("peak", arm=arm.name)), case.ranks, measure_memory, case, arm, directory)
    left = results.missing((arm.name for arm in results.arms()), rounds) <= 0 or time.time() > deadline
    again(left, case.ranks, measure_rounds, case, rounds, deadline, results.limit, directory)
    peers = [] if quick else [BASE, PEERS[1].name]
    measure_longest(results, 2048 if quick else 1024, [*peers, PLANNED], deadline, directory)


def arguments(about: str | None, **own: float) -> argparse.Namespace:
    """The options of this command, of `moves.py` and `caps.py`, those of ``own``; makes the output folder."""
    parser = parser_of(about)
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", default=str(folder), help="folder of the results and of the tier's file: on a disk")
    parser.add_argument("--quick", action="store_true", help="a small model and few arms: whether it runs")
    for name, default in own.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help="(%(default)s)")
    options = parser.parse_args()
    options.output = str(Path(options.output).resolve())
    os.makedirs(options.output, exist_ok=True)
    return options


def main() -> None:
    options = arguments(__doc__, rounds=16, minutes=math.inf)
    results = Results(f"{options.output}/memory.jsonl", options.foreign)
    run(options, results)
    results.reload()
    show_and_write(lambda: show(results), Path(options.output) / "memory.txt")
    draw(results, f"{options.output}/memory.png")


if __name__ == "__main__":
    main()
