"""The time of a step over the memory that it needs: our plans under caps, and torch's schedules beside them.

Two processes of one thread, fp32, heads of 64, micro-batch 1, the same weights and data, our attention in every arm.
The layers are profiled first, with recomputation and a tier in the output folder. Ours are the plans that
`seq1f1b.planning.search` chooses from this profile, without a cap and under smaller and smaller ones, each run from its
plan as the engine takes it; and the plan without a cap with a share of its units recomputed, or moved to the tier, by
hand. Torch's are 1F1B plain, 1F1B with every block under `torch.utils.checkpoint`, and ZBV.

Memory is the growth of resident memory in a step over what is resident before it, of each rank, each arm in processes
of its own. Times come from rounds that run every arm once, forwards and backwards in turn; a step counts only while
other processes use less than 8 % of a core. Before, each arm's loss and gradients are compared with the model run
whole in float64. All processes give freed memory back to the kernel, so that time and memory are of one configuration.

Then the longest sequence under a cap on the growth of each rank, in the first step of processes of its own, which also
allocates what an engine keeps: the cache and receive places. These lie in memory that two ranks hold: half of it counts
for each. At one of ours that is as long as is wanted, five steps of SGD are compared with the whole model, its blocks
checkpointed, on one process with torch's attention.

    python benchmarks/memory.py                     # all of it, some hours; again, it goes on where it was
    python benchmarks/memory.py --minutes 55        # begins nothing after that; again until it is complete
    python benchmarks/memory.py --show              # table and picture of what is measured
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from arms import Arm, Case, OurArm, Spec, errors, make_arm, timed, whole_model
from common import FOREIGN_LIMIT, ForeignLoad, Pairs, Records, show_and_write, spawn
from decoder import HeadLoss, Stage, cross_entropy
from pipeline import LARGEST_ERROR, peaks_of_steps, status_bytes
from predict import PARTS, Setup, measure_part

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
FASTEST, BASE = "ours, no cap", PEERS[0].name
RECOMPUTED, LONG = "ours, all recomputed", f"ours, {SEGMENTS[-1]} equal segments, all recomputed"
PLANNED = "ours, planned"
MOVED = "ours, a half moved"
LEVERS = {  # shares of the units of the plan without a cap that are recomputed, and moved
    "ours, a half recomputed": (0.5, 0.0),
    RECOMPUTED: (1.0, 0.0),
    MOVED: (0.0, 0.5),
    "ours, all moved": (0.0, 1.0),
}
WANTED = ((0.40, 1.10), (0.25, 1.35))  # of 1F1B's growth at so many times our fastest step
WANTED_LONGER, STEPS, RATE = 4.0, 5, 0.1  # times torch's longest sequence; steps of SGD at it, and their rate
LARGEST_LOSS_ERROR = 1e-4
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Ours:
    """An arm: a plan, and the shares of its units that are recomputed and moved beyond it."""

    name: str
    plan: str  # the text of its file
    recomputed: float = 0.0
    moved: float = 0.0


@dataclasses.dataclass(frozen=True)
class Share:
    """So many of a stage's units, spread over its micro-batches and segments."""

    share: float
    num_segments: int

    def __call__(self, unit: seq1f1b.Unit) -> bool:
        number = unit.microbatch * self.num_segments + unit.segment
        return int((number + 1) * self.share) > int(number * self.share)


class PlannedArm(OurArm):
    """The engine as its plan has it."""

    def __init__(self, case: Case, arm: Ours, rank: int, directory: str) -> None:
        plan = Plan.from_json(arm.plan)
        order = plan.engine_arguments()["schedule"]
        own = [stage for stage, at in enumerate(order.rank_of_stage) if at == rank]
        self.has_first, self.has_last = 0 in own, order.num_stages - 1 in own
        sizes = {"hidden": case.hidden, "blocks": case.blocks, "vocab": case.vocab, "layers": plan.layout.layers}
        self.modules = [Stage(i, order.num_stages, head=False, **sizes) for i in own]
        loss_fn = HeadLoss(case.hidden, case.vocab) if self.has_last else cross_entropy
        levers: dict[str, Any] = {}
        if arm.recomputed:
            levers["recompute"] = Share(arm.recomputed, plan.num_segments)
        if arm.moved:
            levers["units"] = Share(arm.moved, plan.num_segments)
        if arm.moved or "O" in order.kinds:
            levers["offload"] = directory
        self.engine = seq1f1b.PipelineEngine(
            list(self.modules), schedule=plan, loss_fn=loss_fn, memory=seq1f1b.Memory(**levers)
        )
        if self.has_last:
            self.modules.append(loss_fn)
        self._tokens, self._targets = case.batch()
        self._dtype = torch.float32
        self.losses: list[float | None] = []  # of every step

    def step(self) -> float | None:
        self.losses.append(super().step())
        return self.losses[-1]


def make(case: Case, arm: Spec | Ours, rank: int, directory: str) -> Arm:
    return make_arm(case, arm, rank) if isinstance(arm, Spec) else PlannedArm(case, arm, rank, directory)


# -- what was measured -------------------------------------------------------------------------------------------------


class Results(Records):
    """The case and the cap, a profile, arms with their errors and peaks, rounds, attempts at a length, and steps at the
    longest.

    limit: cores that other processes may use during a step that counts.
    """

    def __init__(self, path: str, limit: float) -> None:
        super().__init__(path)
        self.limit = limit

    def reload(self) -> None:
        """Reads what other processes have added."""
        self.records = Results(self.path, self.limit).records

    def again(self, done: bool, processes: int, work: Callable[..., None], *arguments: Any) -> None:
        """Runs this piece in new processes, which write to the file, unless it is there."""
        if not done:
            spawn(processes, work, *arguments, self.path)
            self.reload()

    def of(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"what": what, **fields}
        return [r for r in self.records if all(r.get(name) == value for name, value in wanted.items())]

    def last(self, what: str, **fields: Any) -> dict[str, Any] | None:
        return next(iter(self.of(what, **fields)[::-1]), None)

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

    def counted(self, name: str) -> list[float]:
        """Seconds of the steps that count."""
        steps = [r["steps"][name] for r in self.of("round") if name in r["steps"]]
        return [seconds for seconds, foreign in steps if foreign < self.limit]

    def pairs(self, a: str, b: str) -> Pairs:
        """Seconds of both arms in the rounds that hold both."""
        pairs = Pairs()
        for r in self.of("round"):
            if a in r["steps"] and b in r["steps"]:
                (x, foreign_x), (y, foreign_y) = r["steps"][a], r["steps"][b]
                pairs.add(x, y, max(foreign_x, foreign_y) < self.limit)
        return pairs

    def points(self) -> dict[str, tuple[float, float]]:
        """Growth of the largest rank in bytes, and median seconds, of every arm that has both."""
        found = {}
        for arm in self.arms():
            peak, seconds = self.last("peak", arm=arm.name), self.counted(arm.name)
            if peak is not None and seconds:
                found[arm.name] = max(peak["growth"]), statistics.median(seconds)
        return found

    def longest(self, name: str) -> int:
        """Tokens; 0 where no attempt was within the cap."""
        return max((r["tokens"] for r in self.of("attempt", arm=name) if r["fits"]), default=0)


# -- plans -------------------------------------------------------------------------------------------------------------


def measure_profile(rank: int, case: Case, segments: tuple[int, ...], directory: str, path: str) -> None:
    """Profiles the model's parts, in as many processes as there are ranks."""
    setup, begin = Setup("", case.hidden, case.vocab, case.length, False), time.perf_counter()
    parts: dict[str, Any] = {}
    for part in PARTS:
        everyone: list[Any] = [None] * case.ranks
        found = measure_part(setup, part, dist.barrier, segments, 3, directory)
        dist.all_gather_object(everyone, found)
        parts[part] = everyone
    if rank == 0:
        settings = {"seq_len": case.length, "threads": 1, "dtype": "float32", "seconds": time.perf_counter() - begin}
        profile = make_profile(case.shape._replace(layers=1), **parts, **settings)
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
        layout=Layout(head_in_loss=True),
        vocabulary="ends",
        remedies=("recompute", "offload"),
        best=1,
        **{"segments": [k for k in SEGMENTS if 16 * k <= case.length], "stages_per_rank": [1, 2], **wanted},
    )
    return found.plans[0]


def choose_arms(case: Case, profile: Profile, quick: bool) -> list[Spec | Ours]:
    """Torch's, the plan without a cap and under each cap that changes it, and the first of these with levers."""
    fastest = search(case, profile, None)
    plans = {FASTEST: fastest}
    for share in () if quick else CAPS:
        cap = int(share * max(fastest.peak))
        with contextlib.suppress(ValueError):
            plan = search(case, profile, cap)
            if all(dataclasses.replace(plan, cap=other.cap) != other for other in plans.values()):
                plans[f"ours, cap {cap / MIB:.0f} MiB"] = plan
    arms: list[Spec | Ours] = [*PEERS[: 1 if quick else None]]
    arms += [Ours(name, plan.to_json()) for name, plan in plans.items()]
    levers = {RECOMPUTED: LEVERS[RECOMPUTED]} if quick else LEVERS
    return arms + [Ours(name, fastest.to_json(), *shares) for name, shares in levers.items()]


# -- measuring ---------------------------------------------------------------------------------------------------------


def gathered(case: Case, value: Any) -> list[Any]:
    everyone: list[Any] = [None] * case.ranks
    dist.all_gather_object(everyone, value)
    return everyone


def measure_memory(rank: int, case: Case, arm: Spec | Ours, directory: str, path: str) -> None:
    """Peaks over four steps: the largest growth after the first, and the total; what of it was planned."""
    made, growth, total = peaks_of_steps(
        case, "ours", lambda: make(case, arm, rank, directory), 4, warm_tokens=WARM_TOKENS
    )
    own: dict[str, Any] = {"growth": max(growth[1:]), "total": total}
    if isinstance(made, OurArm):
        report = made.engine.report()
        own["planned"] = sum(stage.planned_activation_bytes or 0 for stage in report.stages)
        own["units"] = [report.kept_units, report.recomputed_units, report.moved_units]
    everyone = gathered(case, own)
    if rank == 0:
        Records(path).add(what="peak", arm=arm.name, **{name: [each[name] for each in everyone] for name in own})


def missing(results: Results, rounds: int) -> int:
    """Counted steps that the arm with the fewest lacks."""
    return max(rounds - len(results.counted(arm.name)) for arm in results.arms())


def measure_rounds(
    rank: int, case: Case, rounds: int, deadline: float, limit: float, directory: str, path: str
) -> None:
    """Rounds of all arms, until each has as many counted steps, or the time is over."""
    results = Results(path, limit)
    truth = whole_model(case) if rank == 0 else None
    made = {}
    for arm in results.arms():
        runner = made[arm.name] = make(case, arm, rank, directory)
        loss, loss_error, gradient_error = errors(runner, rank, truth)
        if not max(loss_error, gradient_error) <= LARGEST_ERROR:
            raise RuntimeError(f"{arm.name}: error of loss {loss_error}, of gradients {gradient_error}")
        if rank == 0:
            found = {"loss": loss, "loss_error": loss_error, "gradient_error": gradient_error}
            results.add(what="checked", arm=arm.name, **found)
        timed(runner)
    load = ForeignLoad(gathered(case, os.getpid()))
    for turn in range(2 * rounds):
        go = [rank == 0 and missing(results, rounds) > 0 and time.time() < deadline]
        dist.broadcast_object_list(go)
        if not go[0]:
            break
        steps = {}
        for name, runner in list(made.items())[:: -1 if turn % 2 else 1]:
            load.start()
            steps[name] = timed(runner), load.cores()
        if rank == 0:
            results.add(what="round", steps=steps)


# -- the longest sequence ----------------------------------------------------------------------------------------------


def half_of_shared(growth: int) -> int:
    """What a first step grows by, where memory that both ranks hold counts half for each."""
    return growth - status_bytes("RssShmem") // 2


def try_length(rank: int, case: Case, arm: Spec | Ours, cap: int, directory: str, path: str) -> None:
    """One step, the first, in processes of its own."""
    made, growth, _ = peaks_of_steps(case, "ours", lambda: make(case, arm, rank, directory), 1, warm_tokens=WARM_TOKENS)
    everyone = gathered(case, half_of_shared(growth[0]))
    del made  # not before: its receive places go with it
    if rank == 0:
        found = {"growth": everyone, "fits": max(everyone) <= cap}
        Records(path).add(what="attempt", arm=arm.name, tokens=case.length, **found)


def arm_at(case: Case, profile: Profile, name: str, cap: int) -> Spec | Ours:
    """The arm of this name for a length. ValueError: no plan is within the cap."""
    peers = {peer.name: peer for peer in PEERS}
    if name in peers:
        return peers[name]
    if name == LONG:  # in equal segments, of which the longest is shortest
        plan = search(case, profile, None, names=["seq1f1b"], segments=SEGMENTS[-1:])
        sizes = seq1f1b.partition_sequence(case.length, plan.num_segments, strategy="even")
        return Ours(name, dataclasses.replace(plan, segment_sizes=tuple(sizes), mix=0.0).to_json(), 1.0)
    return Ours(name, search(case, profile, cap).to_json())


def find_longest(results: Results, name: str, step: int, deadline: float, attempt: Callable[[Case], None]) -> None:
    """Tries lengths, multiples of ``step``, until the longest within the cap is known or the time is over. Ours begins
    where it would be as long as is wanted, and is known to a sixteenth.

    Growth rises with the length, nearly in proportion, so each attempt tells where to go on.
    """
    is_ours = name.startswith("ours")
    begin = WANTED_LONGER * results.longest(BASE) if is_ours else 0
    tokens = math.ceil(max(begin, results.case.length, step) / step) * step
    while time.time() < deadline:
        known = {r["tokens"]: r for r in results.of("attempt", arm=name)}
        if tokens not in known:
            attempt(dataclasses.replace(results.case, length=tokens))
            continue
        fits = max((t for t, r in known.items() if r["fits"]), default=0)
        too_long = min((t for t, r in known.items() if not r["fits"]), default=None)
        if too_long is not None and too_long - fits <= (max(step, fits // 16) if is_ours else step):
            return
        growth = max(known[tokens]["growth"], default=0)
        tokens = int(tokens * results.cap / growth if growth else tokens / 2) // step * step
        tokens = max(tokens, fits + step)
        tokens = min(tokens, (too_long if too_long is not None else 4 * max(fits, step)) - step)


def measure_longest(results: Results, step: int, names: Iterable[str], deadline: float, directory: str) -> None:
    for name in names:

        def attempt(case: Case, name: str = name) -> None:
            try:
                arm = arm_at(case, results.profile, name, results.cap)
            except ValueError:
                results.add(what="attempt", arm=name, tokens=case.length, growth=[], fits=False)
                return
            spawn(case.ranks, try_length, case, arm, results.cap, directory, results.path)
            results.reload()

        find_longest(results, name, step, deadline, attempt)


def train_ranks(rank: int, case: Case, arm: Spec | Ours, directory: str, path: str) -> None:
    """Some steps of SGD: the mean loss of each, and the growth in the step where it is largest."""

    def update(made: PlannedArm) -> None:
        torch.optim.SGD(made.engine.parameters(), lr=RATE).step()
        made.zero_grad()

    assert isinstance(arm, Ours)
    made, growth, _ = peaks_of_steps(
        case, "ours", lambda: PlannedArm(case, arm, rank, directory), STEPS, update, warm_tokens=WARM_TOKENS
    )
    everyone = gathered(case, (max(half_of_shared(growth[0]), *growth[1:]), made.losses))
    if rank == 0:
        [losses] = [each for _, each in everyone if each[0] is not None]
        found = {"growth": [each for each, _ in everyone], "losses": losses}
        Records(path).add(what="trained", arm=arm.name, tokens=case.length, **found)


def train_whole(rank: int, case: Case, path: str) -> None:
    """Trains the whole model on one process by the same steps: torch's attention, every block checkpointed."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = case.stage(0, 1, "whole sequences")
    model.checkpoints = True
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    tokens, targets = case.batch()
    losses = []
    for _ in range(STEPS):
        found = []
        for x, y in zip(tokens.split(1), targets.split(1), strict=True):
            loss = cross_entropy(model(x), y)
            (loss / case.microbatches).backward()
            found.append(float(loss.detach()))
        losses.append(statistics.fmean(found))
        optimizer.step()
        optimizer.zero_grad()
    Records(path).add(what="whole", tokens=case.length, losses=losses)


def train_long(results: Results, names: Iterable[str], directory: str) -> None:
    """Trains at the shortest length of ours that was as long as is wanted; else at the longest."""
    name = max(names, key=results.longest)
    fitting = [r["tokens"] for r in results.of("attempt", arm=name) if r["fits"]]
    long = [tokens for tokens in fitting if tokens >= WANTED_LONGER * results.longest(BASE) > 0]
    if not fitting:
        return
    case = dataclasses.replace(results.case, length=min(long, default=max(fitting)))
    arm = arm_at(case, results.profile, name, results.cap)
    if not results.of("trained", tokens=case.length):
        spawn(case.ranks, train_ranks, case, arm, directory, results.path)
    if not results.of("whole", tokens=case.length):
        spawn(1, train_whole, case, results.path)


# -- showing -----------------------------------------------------------------------------------------------------------


def show(results: Results) -> None:
    print(results.header())
    print(f"# {results.case}; a step counts while other processes use less than {results.limit:g} of a core")
    if results.of("profile"):
        print("".join(f"# {line}\n" for line in results.profile.to_text().splitlines()), end="")
    base, fastest = results.last("peak", arm=BASE), results.counted(FASTEST)
    print(
        f"\n{'arm':36} {'s/step':>7} {'quartiles':>15} {'/ no cap':>8}  {'growth MiB, ranks':>17} {'/ 1F1B':>6}  "
        f"{'planned MiB':>15}  {'units kept, recomputed, moved':>30}  {'error':>7}  {'steps':5}  plan"
    )
    for arm in results.arms():
        seconds, peak = sorted(results.counted(arm.name)), results.last("peak", arm=arm.name)
        checked = results.last("checked", arm=arm.name)
        text = f"{arm.name:36} "
        if seconds:
            quartiles = f"{seconds[len(seconds) // 4]:.3f}..{seconds[-1 - len(seconds) // 4]:.3f}"
            ratio = f"{statistics.median(seconds) / statistics.median(fastest):8.3f}" if fastest else f"{'':8}"
            text += f"{statistics.median(seconds):7.3f} {quartiles:>15} {ratio}  "
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
    print("\n## What must hold")
    for line in verdicts(results):
        print(line)


def mib(sizes: Iterable[int]) -> str:
    return ", ".join(f"{size / MIB:.0f}" for size in sizes)


def show_longest(results: Results) -> None:
    print(f"\n## Longest sequence whose first step grows by at most {results.cap / MIB:.0f} MiB per rank")
    for name in dict.fromkeys(r["arm"] for r in results.of("attempt")):
        tried = sorted(results.of("attempt", arm=name), key=lambda r: r["tokens"])
        text = ", ".join(f"{r['tokens']}: {mib(r['growth']) or 'no plan'}" for r in tried)
        print(f"{name:40} {results.longest(name):7} tokens; growth in MiB of ranks at {text}")
    for trained in results.of("trained"):
        whole = results.last("whole", tokens=trained["tokens"])
        print(f"{STEPS} steps of {trained['arm']}, {trained['tokens']} tokens: growth {mib(trained['growth'])} MiB")
        print(f"   losses       {', '.join(f'{loss:.6f}' for loss in trained['losses'])}")
        if whole is not None:
            print(f"   one process  {', '.join(f'{loss:.6f}' for loss in whole['losses'])}")


def judged(text: str, holds: bool) -> str:
    return f"{text}: {'passed' if holds else 'FAILED'}"


def verdicts(results: Results) -> list[str]:
    points = results.points()
    ours = {name: point for name, point in points.items() if name.startswith("ours")}
    lines = []
    for share, slower in WANTED:
        text = f"at most {share} of 1F1B's growth at {slower} times our fastest step"
        if BASE not in points or not ours:
            lines.append(f"{text}: unmeasured")
            continue
        fastest = min(seconds for _, seconds in ours.values())
        within = {name: growth for name, (growth, seconds) in ours.items() if seconds <= slower * fastest}
        best = min(within, key=within.__getitem__)
        found = within[best] / points[BASE][0]
        lines.append(judged(f"{text}: {found:.3f}, {best}, {ours[best][1] / fastest:.3f} times", found <= share))
    for peer in (peer.name for peer in PEERS if peer.name in points):
        growth = points[peer][0]
        within = {name: seconds for name, (size, seconds) in ours.items() if size <= growth}
        text = f"faster than {peer} in its {growth / MIB:.0f} MiB"
        if not within:
            lines.append(judged(f"{text}: no arm of ours needs as little", False))
            continue
        best = min(within, key=within.__getitem__)
        pairs = results.pairs(peer, best)
        ratio, low, high = pairs.ratio()
        found = f"{text}: {ratio:.3f} [{low:.3f}, {high:.3f}] times by {best}, {len(pairs.a)} pairs"
        lines.append(judged(found, low > 1) if pairs.measured else f"{found}: unmeasured")
    tried = {r["arm"] for r in results.of("attempt")}
    if BASE in tried and results.longest(BASE):
        text = f"longest sequence at least {WANTED_LONGER:g} times that of {BASE}"
        ours_tried = [name for name in tried if name.startswith("ours")]
        if ours_tried:
            best = max(ours_tried, key=results.longest)
            longer = results.longest(best) / results.longest(BASE)
            lines.append(judged(f"{text}: {longer:.2f}, {best}", longer >= WANTED_LONGER))
        else:
            lines.append(f"{text}: unmeasured")
    for trained in results.of("trained"):
        whole = results.last("whole", tokens=trained["tokens"])
        if whole is not None:
            pairs_of_losses = zip(trained["losses"], whole["losses"], strict=True)
            worst = max(abs(a - b) / abs(b) for a, b in pairs_of_losses)
            lines.append(judged(f"losses of these steps equal one process's: {worst:.1e}", worst <= LARGEST_LOSS_ERROR))
            lines.append(judged("their losses fall", trained["losses"][-1] < trained["losses"][0]))
            lines.append(judged("they stay below the cap", max(trained["growth"]) <= results.cap))
    return lines


def draw(results: Results, path: str) -> None:
    from figures import Dot, trade_off

    points = results.points()
    if BASE not in points or FASTEST not in points:
        return
    dots = {}
    for name, (growth, _) in points.items():
        seconds = sorted(results.counted(name))
        low, high = seconds[len(seconds) // 4], seconds[-1 - len(seconds) // 4]
        dots[name.removeprefix("ours, ")] = Dot(growth / MIB, statistics.median(seconds), low, high)
    peers = {peer.name for peer in PEERS}
    case = results.case
    head = [line.removeprefix("# ") for line in results.header().split("\n")]
    trade_off(
        path,
        {name: dot for name, dot in dots.items() if name not in peers},
        {name: dot for name, dot in dots.items() if name in peers},
        base=BASE,
        title="What a step takes in less memory: our plans under caps, and torch's schedules\n"
        f"{case.ranks} ranks, {case.microbatches} micro-batches of {case.length} tokens, {case.blocks} blocks of "
        f"hidden size {case.hidden}, the same attention",
        caption=f"{head[2]}; {head[1]}; medians and quartiles",
    )


# -- the command -------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, results: Results) -> None:
    results.begin(TITLE)
    quick, directory, deadline = options.quick, options.output, time.time() + 60 * options.minutes
    case, cap = (Case(256, 2, hidden=64), 16 * MIB) if quick else (Case(8192, 2), 1024 * MIB)
    rounds = 1 if quick else options.rounds
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
    left = missing(results, rounds) <= 0 or time.time() > deadline
    again(left, case.ranks, measure_rounds, case, rounds, deadline, results.limit, directory)
    ours = [LONG] if quick else [PLANNED, LONG]
    peers = [] if quick else [BASE, PEERS[1].name]
    measure_longest(results, 2048 if quick else 1024, [*peers, *ours], deadline, directory)
    if time.time() < deadline:
        train_long(results, ours, directory)


def arguments(about: str | None) -> argparse.Namespace:
    """The options of this command, and of `moves.py`; makes the output folder."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = Path(__file__).parent / "results"
    parser.add_argument("--output", default=str(folder), help="folder of the results and of the tier's file: on a disk")
    parser.add_argument("--rounds", type=int, default=16, help="counted steps of each arm (%(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="nothing new is begun after these")
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few arms: whether it runs")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.output = str(Path(options.output).resolve())
    os.makedirs(options.output, exist_ok=True)
    return options


def main() -> None:
    options = arguments(__doc__)
    results = Results(f"{options.output}/memory.jsonl", options.foreign)
    if not options.show:
        run(options, results)
        results = Results(results.path, options.foreign)
    show_and_write(lambda: show(results), Path(options.output) / "memory.txt")
    draw(results, f"{options.output}/memory.png")


if __name__ == "__main__":
    main()
