"""Does a profile foretell the step, and is the planned best the best? Real steps of 2 to 4 processes on this machine.

For each of four models `seq1f1b.planning.profiler` measures a stage, the embedding and the head, alone and in as many
processes as there are cores; and how much longer the same work takes where twice as many share them. From that alone
come the predictions of its steps, printed before any of them is measured: every unit takes its profiled seconds in a
replay of the order in which running ranks share the cores. Nothing is fitted to steps.

The interval of a step is the hypotenuse of independent parts, each moved on its own through the replay:
    fit      two of its relative residual of each pass, and of the ends, as if all units of a pass erred alike
    runs     two of half the interquartile range from run to run in the profile
    drift    the same of a fixed work, timed between the parts of the profile: how the machine's speed changes meanwhile
    sharing  half of what it costs the step that ranks run beside each other: the replay changes a unit's speed at once,
             caches take their time
    crowding half of what it costs, beyond the cores' fair shares, that more processes run than there are cores
    waking   a rank that sleeps wakes 53 us after its message (results/p2p.txt); at once if it still spins
    others   their share of all cores up to the limit below, in profile or step

A step counts while other processes use less than 8 % of a core; the median of a configuration's steps is compared, once
as it is, and once at the speed that the machine had during the profile: a fixed work, F and B of a layer in as many
processes as cores, is timed between the parts of the profile, and before and after the steps of each configuration. On
a shared machine it changes by 10 % within minutes, which no profile foretells. The parts of a profile are brought to
one speed in the same way.

    python benchmarks/predict.py                 # all of it, up to about fifteen minutes
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import FOREIGN_LIMIT, KEPT_HEAP, ForeignLoad, agreed, gathered, header, spawn
from decoder import HEAD_DIM, Block, add_adapters, cross_entropy, make_head
from torch import Tensor, nn

import seq1f1b
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware
from seq1f1b.planning.profile import PASSES, Profile
from seq1f1b.planning.profiler import StageTimes, make_profile, measure_stage
from seq1f1b.planning.search import search_plans
from seq1f1b.unit import inputs_of

MACHINE = load_hardware("cpu-zen5")
CORES, RANKS = 2, 4
WAKING = 53e-6
BLOCK_SECONDS = 1.0  # of steps between two looks at the machine's load, whose clock ticks at 10 ms
LEAST_STEPS = 5
PAUSE = 0.3  # seconds over which the load is looked at before another try
SMALL = 8  # times shorter sequences, in a model of hidden 64, where it is only tried out
WORK_STEPS = 12  # of F and B of a layer, which are the fixed work
PARTS = ("layer", "embedding", "head")
KINDS = "FBIW"  # of units of the orders below, which recompute nothing


@dataclass(frozen=True)
class Setup:
    """A model in a dtype, and the longest sequence that its profile covers."""

    name: str
    hidden: int
    vocab: int
    seq_len: int
    bf16: bool
    lora: int = 0  # rank of adapters in the layers

    def shape(self, layers: int) -> seq1f1b.ModelShape:
        heads = self.hidden // HEAD_DIM
        return seq1f1b.ModelShape(self.hidden, layers, heads, heads, 4 * self.hidden * 2 // 3, self.vocab)


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("h256 fp32", 256, 1024, 2048, False),
        Setup("h256 bf16", 256, 1024, 2048, True),
        Setup("h512 fp32", 512, 2048, 1024, False),
        Setup("h512 bf16", 512, 2048, 1024, True),
    )
}


@dataclass(frozen=True)
class Configuration:
    setup: str
    family: str
    num_ranks: int
    layers: tuple[int, ...]  # of each stage
    num_microbatches: int
    num_segments: int
    seq_len: int
    split: str = "even"  # or "profiled"

    def __str__(self) -> str:
        return (
            f"{self.setup} {self.family} P{self.num_ranks} M{self.num_microbatches} k{self.num_segments} "
            f"S{self.seq_len} layers {'+'.join(map(str, self.layers))} {self.split}"
        )

    def order(self) -> seq1f1b.Schedule:
        return seq1f1b.build_schedule(
            self.family,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_segments=self.num_segments,
            stages_per_rank=len(self.layers) // self.num_ranks,
        )


CONFIGURATIONS = [
    Configuration("h256 fp32", "gpipe", 2, (2, 2), 4, 1, 1024),
    Configuration("h256 fp32", "1f1b", 2, (2, 2), 3, 1, 2048),
    Configuration("h256 fp32", "seq1f1b", 2, (2, 2), 2, 4, 2048),
    Configuration("h256 fp32", "seq1f1b", 2, (3, 2), 3, 8, 2048, "profiled"),
    Configuration("h256 fp32", "interleaved-1f1b", 2, (1, 1, 1, 1), 4, 1, 1024),
    Configuration("h256 fp32", "seq1f1b", 3, (2, 1, 1), 4, 2, 1024, "profiled"),
    Configuration("h256 fp32", "seq1f1b", 4, (1, 1, 1, 1), 4, 4, 2048),
    Configuration("h256 bf16", "1f1b", 2, (3, 3), 6, 1, 1024),
    Configuration("h256 bf16", "seq1f1b-interleaved", 2, (1, 1, 1, 1), 4, 2, 2048),
    Configuration("h256 bf16", "breadth-first", 2, (1, 2, 2, 1), 4, 1, 1024),
    Configuration("h256 bf16", "gpipe", 4, (1, 1, 1, 1), 6, 1, 1024),
    Configuration("h512 fp32", "seq1f1b", 2, (1, 1), 4, 2, 1024),
    Configuration("h512 fp32", "terapipe", 2, (2, 1), 2, 4, 1024, "profiled"),
    Configuration("h512 fp32", "kfkb", 2, (2, 2), 4, 1, 512),
    Configuration("h512 fp32", "1f1b", 3, (1, 1, 1), 4, 1, 512),
    Configuration("h512 fp32", "hanayo", 2, (1, 1, 1, 1), 2, 1, 1024),
    Configuration("h512 bf16", "seq1f1b", 2, (2, 2), 2, 8, 1024),
    Configuration("h512 bf16", "1f1b", 2, (2, 2), 8, 1, 512),
    Configuration("h512 bf16", "seq1f1b", 4, (1, 1, 1, 1), 4, 2, 1024, "profiled"),
    Configuration("h512 bf16", "interleaved-1f1b", 2, (1, 1, 1, 1), 6, 1, 1024),
    # orders that split the backward
    Configuration("h256 fp32", "seq-zb-h1", 2, (2, 2), 2, 4, 2048),
    Configuration("h256 fp32", "zbv", 2, (1, 1, 1, 1), 4, 1, 1024),
    Configuration("h256 fp32", "seq-zb-h1", 4, (1, 1, 1, 1), 4, 2, 2048, "profiled"),
    Configuration("h256 bf16", "zb-h1", 2, (3, 3), 6, 1, 1024),
    Configuration("h256 bf16", "seq-zbv", 2, (1, 1, 1, 1), 4, 2, 2048),
    Configuration("h512 fp32", "seq-zb-h2", 2, (2, 2), 4, 2, 1024, "profiled"),
    Configuration("h512 fp32", "dualpipev", 2, (1, 1, 1, 1), 4, 1, 512),
    Configuration("h512 bf16", "zb-h2", 3, (2, 1, 1), 6, 1, 1024),
    Configuration("h512 bf16", "seq-v-half", 2, (1, 1, 1, 1), 4, 2, 1024),
]
# By setup, layers, M, S: plans for two ranks, each on a core of its own
PLANNED = {"h256 fp32": [(4, 4, 2048)], "h512 bf16": [(6, 3, 1024)]}
FAMILIES = ["gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "kfkb", "seq1f1b", "seq1f1b-interleaved", "auto"]


# -- stages ------------------------------------------------------------------------------------------------------------


def make_stage(setup: Setup, index: int, layers: Sequence[int]) -> nn.Module:
    torch.manual_seed(index)
    first = sum(layers[:index])
    modules: list[nn.Module] = [Block(setup.hidden, i, "ours") for i in range(first, first + layers[index])]
    if index == 0:
        modules.insert(0, nn.Embedding(setup.vocab, setup.hidden))
    if index == len(layers) - 1:
        modules.append(make_head(setup.hidden, setup.vocab))
    return nn.Sequential(*modules)


def autocast(setup: Setup) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=setup.bf16)


# -- profiles ----------------------------------------------------------------------------------------------------------


def measure_part(
    setup: Setup, part: str, wait: Callable[[], object], segments: Sequence[int] = (1, 2, 4, 8), **options: Any
) -> StageTimes:
    def hidden(tokens: int) -> Tensor:
        return torch.randn(1, tokens, setup.hidden)

    def words(tokens: int) -> Tensor:
        return torch.randint(setup.vocab, (1, tokens))

    torch.manual_seed(0)
    settings = {"seq_len": setup.seq_len, "wait": wait, "segments": segments, **options}
    with autocast(setup):
        if part == "embedding":
            return measure_stage(nn.Embedding(setup.vocab, setup.hidden), words, **settings)
        if part == "head":
            head = make_head(setup.hidden, setup.vocab)
            return measure_stage(head, hidden, loss_fn=cross_entropy, make_target=words, **settings)
        blocks = nn.Sequential(*(Block(setup.hidden, i, "ours") for i in range(2)))
        if setup.lora:
            add_adapters(blocks, setup.lora)
        return measure_stage(blocks, hidden, layers=2, **settings)


def measure_work(setup: Setup, wait: Callable[[], object]) -> float:
    """Seconds of a fixed amount of a layer's work, several steps of F and B."""
    block, begin = Block(setup.hidden, 0, "ours"), 0.0
    x = torch.randn(1, setup.seq_len, setup.hidden, requires_grad=True)
    for step in range(1 + WORK_STEPS):
        if step == 1:
            wait()
            begin = time.perf_counter()
        with autocast(setup):
            output = block(x)
        output.sum().backward()
    wait()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Profiles:
    """What is known of a setup before its steps.

    Attributes:
        alone, together: of a process by itself, and of as many as there are cores, at once.
        crowding: by what factor the work of twice as many takes longer than twice the time.
        work: seconds of a fixed work in as many processes as there are cores, the mean from between the parts.
        drift: half the interquartile range of these, relative.
    """

    alone: Profile
    together: Profile
    crowding: float
    work: float
    drift: float


class TimeUp(Exception):
    """Other processes used the cores until nothing is tried any more; raised on every rank."""


def quietly(world: World, processes: int, work: Callable[[Callable[[], object]], Any]) -> list[Any]:
    """What the first processes found, at the same time and with nobody else on the cores; on every rank."""
    while world.await_quiet():
        load, mine = ForeignLoad(world.pids), None
        if world.rank < processes:
            group = world.groups[processes]
            mine = work(lambda g=group: dist.barrier(g))
        everyone = gathered(mine)
        if world.agreed(load.cores() < FOREIGN_LIMIT):
            return everyone[:processes]
    raise TimeUp


def work_seconds(setup: Setup, world: World, processes: int = CORES) -> float:
    """Seconds of the fixed work in so many processes at once."""
    return statistics.fmean(quietly(world, processes, partial(measure_work, setup)))


def at_speed(measured: StageTimes, factor: float) -> StageTimes:
    """Scales the seconds of all units by ``factor``."""
    units = {
        key: {kind: [factor * t for t in times] for kind, times in by_kind.items()}
        for key, by_kind in measured.units.items()
    }
    return measured._replace(units=units)


def profile_setup(setup: Setup, world: World) -> Profiles:
    profiles, found, took, work = [], {}, dict.fromkeys((1, CORES), 0.0), [work_seconds(setup, world)]
    for processes, part in itertools.product((1, CORES), PARTS):
        begin = time.perf_counter()
        found[processes, part] = quietly(world, processes, partial(measure_part, setup, part))
        took[processes] += time.perf_counter() - begin
        work.append(work_seconds(setup, world))
    mean = statistics.fmean(work)
    around = dict(zip(found, map(statistics.fmean, itertools.pairwise(work)), strict=True))
    for processes in (1, CORES):
        parts = {
            part: [at_speed(each, mean / around[processes, part]) for each in found[processes, part]] for part in PARTS
        }
        dtype = "bfloat16 autocast" if setup.bf16 else "float32"
        about = {"seq_len": setup.seq_len, "threads": 1, "dtype": dtype, "seconds": took[processes]}
        # Each rank's own fit differs in the last digits, and so may its plans.
        profiles.append(agreed(make_profile(setup.shape(1), **parts, **about)))
    low, _, high = statistics.quantiles(work, n=4)
    return Profiles(
        *profiles,
        # Below 1 it is noise: no share of a core does more than its part of what a whole one does.
        crowding=max(1.0, work_seconds(setup, world, 2 * CORES) / (2 * mean)),
        work=mean,
        drift=(high - low) / 2 / mean,
    )


# -- orders whose ranks share the cores of a machine -------------------------------------------------------------------

UnitSeconds = Mapping[tuple[str, int, int], float]  # (kind, stage, segment) -> seconds


def replay(
    order: seq1f1b.Schedule,
    alone: UnitSeconds,
    together: UnitSeconds,
    *,
    cores: int,
    crowding: float = 1.0,
    waking: float = 0.0,
) -> float:
    """Makespan in seconds. Every rank runs its units in order, each once its message is there; places are not counted.

    A running unit goes at a speed that changes whenever a rank starts or stops: its seconds are those ``alone`` while
    nothing else runs, those ``together`` while all cores do, on a line between; with more running ranks than cores all
    get equal shares, and together ``crowding`` times less is done where they are twice as many.

    Args:
        waking: seconds from the end of a unit to the start of what waits on another rank.
    """
    ranks, now = order.ranks, 0.0
    inputs = inputs_of(unit for rank in ranks for unit in rank)
    arrives: dict[seq1f1b.Unit, float] = {}
    position = [0] * len(ranks)
    left: dict[int, float] = {}  # running ranks, and what is left of their units, 1 to 0

    def starts_at(rank: int) -> float:
        """Infinite while what the next unit waits for has not ended."""
        unit = ranks[rank][position[rank]]
        is_near = {other: order.rank_of_stage[other.stage] == rank for other in inputs[unit]}
        times = (arrives.get(other, math.inf) - (waking if near else 0.0) for other, near in is_near.items())
        return max(times, default=0.0)

    def speed(rank: int) -> float:
        unit = ranks[rank][position[rank]]
        key = unit.kind, unit.stage, unit.segment
        if len(left) <= cores:
            share = (len(left) - 1) / max(1, cores - 1)
            return 1 / (alone[key] + share * (together[key] - alone[key]))
        crowded = 1 + (crowding - 1) * min(1.0, (len(left) - cores) / cores)
        return cores / len(left) / (together[key] * crowded)

    while True:
        idle = [r for r in range(len(ranks)) if r not in left and position[r] < len(ranks[r])]
        coming = {r: starts_at(r) for r in idle}
        left |= {r: 1.0 for r, start in coming.items() if start <= now}
        if not left and not coming:
            return now
        speeds = {r: speed(r) for r in left}
        ends = {r: now + left[r] / speeds[r] for r in left}
        event = min([*ends.values(), *(start for r, start in coming.items() if r not in left)])
        assert event < math.inf, "an order that was checked does not stop"
        for r, end in ends.items():
            if end <= event:
                ended = ranks[r][position[r]]
                arrives[ended] = event + waking
                position[r] += 1
                del left[r]
            else:
                left[r] -= (event - now) * speeds[r]
        now = event


# -- predictions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    seconds: float
    half_width: float
    parts: dict[str, float]  # of the half width


def sizes_of(configuration: Configuration, profiles: Profiles) -> list[int]:
    k, length = configuration.num_segments, configuration.seq_len
    if configuration.split == "even":
        return seq1f1b.partition_sequence(length, k, strategy="even")
    profile = replace(profiles.together, model=SETUPS[configuration.setup].shape(sum(configuration.layers)))
    return seq1f1b.partition_sequence(length, k, strategy="profiled", profile=profile, multiple_of=16)


def unit_costs(
    configuration: Configuration, profile: Profile, sizes: Sequence[int], factors: dict[str, float]
) -> UnitSeconds:
    """Seconds of every pass. They include the copy of its message, which the sender makes."""
    num_stages = len(configuration.layers)
    model = CostModel(
        SETUPS[configuration.setup].shape(sum(configuration.layers)),
        replace(ProfiledHardware.of(profile, MACHINE), **factors),
        num_ranks=configuration.num_ranks,
        stages_per_rank=num_stages // configuration.num_ranks,
        seq_len=configuration.seq_len,
        layout=Layout(layers=configuration.layers, head_in_loss=False),
    )
    price = model.price(sizes)
    seconds = price.seconds
    copying = [size / MACHINE.inside_bandwidth for size in price.message_bytes]
    costs = {}
    for stage, s in itertools.product(range(num_stages), range(len(sizes))):
        for kind in KINDS:
            costs[kind, stage, s] = getattr(seconds, PASSES[kind])[stage][s] + copying[s] * (kind != "W")
    return costs


def predict(configuration: Configuration, profiles: Profiles, sizes: Sequence[int]) -> Prediction:
    order, overhead = configuration.order(), profiles.alone.step_overhead

    def step(crowding: float = profiles.crowding, waking: float = WAKING, **factors: float) -> float:
        alone, together = (
            unit_costs(configuration, profile, sizes, factors) for profile in (profiles.alone, profiles.together)
        )
        return replay(order, alone, together, cores=CORES, crowding=crowding, waking=waking) + overhead

    middle, layer = step(), profiles.together.layer
    all_alone, all_together = (
        replay(order, costs, costs, cores=CORES, crowding=profiles.crowding)
        for costs in (unit_costs(configuration, profile, sizes, {}) for profile in (profiles.alone, profiles.together))
    )
    fits = {
        f"fit {kind}": {f"measured_{PASSES[kind]}": 1 + 2 * getattr(layer, PASSES[kind]).residual} for kind in KINDS
    }
    parts = {
        **{name: step(**factor) - middle for name, factor in fits.items()},
        "fit ends": step(measured_ends=1 + 2 * profiles.together.spread("ends")) - middle,
        "runs": 2 * layer.noise * middle,
        "drift": 2 * profiles.drift * middle,
        "sharing": (all_together - all_alone) / 2,
        "waking": step(waking=0.0) - middle,
        "crowding": (step(crowding=1.0) - middle) / 2,
        "others": FOREIGN_LIMIT / CORES * middle,
    }
    return Prediction(middle, math.hypot(*parts.values()), parts)


# -- steps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """This process among the four."""

    rank: int
    pids: list[int]
    groups: dict[int, Any]  # of the first n ranks
    any_load: bool
    deadline: float  # by rank 0's clock; nothing is tried again after it

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def agreed(self, value: bool, group: Any = None) -> bool:
        """Rank 0's; always true where any load will do."""
        return agreed(value or self.any_load, group)

    def await_quiet(self, group: Any = None) -> bool:
        """Waits until other processes leave the cores alone; False where time is up."""
        while self.agreed(time.perf_counter() < self.deadline, group):
            load = ForeignLoad(self.pids)
            time.sleep(0.0 if self.any_load else PAUSE)
            if self.agreed(load.cores() < FOREIGN_LIMIT, group):
                return True
        return False


def measure(
    world: World, setup: Setup, layers: Sequence[int], length: int, num_ranks: int, M: int, arguments: dict[str, Any]
) -> list[float]:
    """Seconds of the steps that counted; on every rank."""
    times: list[float] = []
    if world.rank < num_ranks:
        group = world.groups[num_ranks]
        given = arguments["schedule"]
        order = given.build() if isinstance(given, Plan) else given
        mine = [i for i, rank in enumerate(order.rank_of_stage) if rank == world.rank]
        engine = seq1f1b.PipelineEngine(
            [make_stage(setup, i, layers) for i in mine], loss_fn=cross_entropy, group=group, **arguments
        )
        tokens = torch.randint(setup.vocab, (M, length), generator=torch.Generator().manual_seed(1))
        target = seq1f1b.shift_labels(tokens)

        def step() -> float:
            for parameter in engine.parameters():  # gradients stay and are added to, as in the profile
                if parameter.grad is not None:
                    parameter.grad.zero_()
            dist.barrier(group)
            begin = time.perf_counter()
            with autocast(setup):
                engine.step(tokens, target=target)
            dist.barrier(group)
            return time.perf_counter() - begin

        longest = max(step() for _ in range(2))
        times = take_blocks(world, group, step, longest)
        engine.close()
    return agreed(times)


def take_blocks(world: World, group: Any, step: Callable[[], float], seconds: float) -> list[float]:
    count = agreed(max(1, math.ceil(BLOCK_SECONDS / seconds)), group)
    times: list[float] = []
    while len(times) < LEAST_STEPS and world.await_quiet(group):
        load = ForeignLoad(world.pids)
        block = [step() for _ in range(count)]
        if world.agreed(load.cores() < FOREIGN_LIMIT, group):
            times += block
    return times if len(times) >= LEAST_STEPS else []


Judged = tuple[float, bool | None, bool]
"""Half width of an interval, as a share; whether the steps are inside, None: unmeasured; and whether the order splits
the backward."""


def text_of(tally: Sequence[Judged]) -> str:
    widths, found, _ = zip(*tally, strict=True)
    split = sum(bool(is_inside and is_split) for _, is_inside, is_split in tally)
    return (
        f"{found.count(True)} of {len(found) - found.count(None)} measured ones inside at the profile's speed, of "
        f"{len(found)}, {split} of them with a split backward; half width: median {statistics.median(widths):.1%}, "
        f"most {max(widths):.1%}"
    )


def check_predictions(world: World, profiles: Profiles, chosen: dict[int, Configuration]) -> list[Judged]:
    sizes = [sizes_of(c, profiles) for c in chosen.values()]
    predictions = [predict(c, profiles, s) for c, s in zip(chosen.values(), sizes, strict=True)]
    world.say("\npredictions, made before any step; the largest two parts of the half width in %")
    for (number, c), p in zip(chosen.items(), predictions, strict=True):
        largest = sorted(p.parts.items(), key=lambda part: -abs(part[1]))[:2]
        world.say(
            f"{number:>3} {c!s:<76} {p.seconds * 1e3:>8.1f} ms +- {p.half_width / p.seconds:>5.1%}  "
            + ", ".join(f"{name} {seconds / p.seconds:.1%}" for name, seconds in largest)
        )
    world.say(
        f"\n{'':>3} {'measured ms':>12}{'least':>9}{'most':>9}{'steps':>6}{'interval ms':>20}{'error':>8}"
        f"{'fixed work':>12}{'error at its speed':>20}"
    )
    tally: list[Judged] = []
    work = work_seconds(SETUPS[next(iter(chosen.values())).setup], world)
    for (number, c), s, p in zip(chosen.items(), sizes, predictions, strict=True):
        arguments = {"schedule": c.order(), "num_microbatches": c.num_microbatches, "num_segments": c.num_segments}
        arguments["segment_sizes"] = s
        times = measure(world, SETUPS[c.setup], c.layers, c.seq_len, c.num_ranks, c.num_microbatches, arguments)
        low, high = ((p.seconds + sign * p.half_width) * 1e3 for sign in (-1, 1))
        if not times:
            world.say(f"{number:>3} UNMEASURED: other processes used the cores")
            tally.append((p.half_width / p.seconds, None, False))
            continue
        before, work = work, work_seconds(SETUPS[c.setup], world)
        slower = (before + work) / 2 / profiles.work
        median = statistics.median(times) * 1e3
        is_inside = low <= median / slower <= high
        tally.append((p.half_width / p.seconds, is_inside, "I" in c.order().kinds))
        world.say(
            f"{number:>3} {median:>12.1f}{min(times) * 1e3:>9.1f}{max(times) * 1e3:>9.1f}{len(times):>6}"
            f"{f'{low:.1f}..{high:.1f}':>20}{p.seconds * 1e3 / median - 1:>+8.1%}{slower:>12.3f}"
            f"{p.seconds * 1e3 * slower / median - 1:>+20.1%}  {'inside' if is_inside else 'OUTSIDE'}"
        )
    return tally


def check_plans(world: World, profiles: Profiles, name: str) -> None:
    for layers, M, length in PLANNED.get(name, ()):
        setup, machine = SETUPS[name], ProfiledHardware.of(profiles.together, MACHINE)
        counts = {"seq_len": length, "num_ranks": 2, "num_microbatches": M}
        choices = {"names": FAMILIES, "segments": [1, 2, 4, 8], "stages_per_rank": [1, 2], "best": 6, "within": 2.0}
        choices["layout"] = Layout(head_in_loss=False)
        plans = search_plans(setup.shape(layers), machine, **counts, **choices).plans
        world.say(f"\nplans for {name}, {layers} layers, P2 M{M} S{length}")
        world.say(f"{'':>3} {'planned ms':>11}{'measured ms':>13}  plan")
        medians = []
        for number, plan in enumerate(plans, 1):
            assert plan.layout.layers is not None
            times = measure(world, setup, plan.layout.layers, length, 2, M, {"schedule": plan})
            medians.append(statistics.median(times) if times else math.nan)
            world.say(
                f"{number:>3} {plan.seconds * 1e3:>11.1f}{medians[-1] * 1e3:>13.1f}  {plan.schedule} "
                f"k{plan.num_segments} v{plan.stages_per_rank} mix {plan.mix} "
                f"layers {'+'.join(map(str, plan.layout.layers))}"
            )
        world.say(f"first plan over the measured best: {medians[0] / min(medians):.3f}")


def make_small() -> None:
    """Makes the models and sequences of all configurations small, in this process."""
    global BLOCK_SECONDS, WORK_STEPS
    BLOCK_SECONDS, WORK_STEPS = 0.1, 2
    SETUPS.update((s.name, replace(s, hidden=64, vocab=64, seq_len=s.seq_len // SMALL)) for s in [*SETUPS.values()])
    CONFIGURATIONS[:] = [replace(c, seq_len=c.seq_len // SMALL) for c in CONFIGURATIONS]


def worker(rank: int, options: argparse.Namespace) -> None:
    if options.quick:
        make_small()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    pids = gathered(os.getpid())
    groups = {n: dist.new_group(list(range(n))) for n in range(1, RANKS + 1)}
    begin = time.perf_counter()
    world = World(rank, pids, groups, options.quick, begin + 60 * options.minutes)
    try:
        run(world, options.first)
    except TimeUp:
        world.say("UNMEASURED: other processes used the cores while profiles were measured, so nothing is predicted")
    world.say(f"\n{time.perf_counter() - begin:.0f} s in all")


def run(world: World, number: int) -> None:
    """A setup's steps follow its profile at once: this machine's speed drifts within minutes."""
    tally: list[Judged] = []
    numbered = dict(enumerate(CONFIGURATIONS[:number], 1))
    for name in dict.fromkeys(c.setup for c in numbered.values()):
        profiles = profile_setup(SETUPS[name], world)
        for profile in (profiles.alone, profiles.together):
            world.say(f"\n{name}: {profile.to_text()}")
        world.say(f"twice as many processes as cores: {profiles.crowding:.3f} times their share")
        tally += check_predictions(world, profiles, {n: c for n, c in numbered.items() if c.setup == name})
        if number == len(CONFIGURATIONS):
            check_plans(world, profiles, name)
    world.say(f"\n{text_of(tally)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, whatever else runs: whether it runs")
    parser.add_argument("--first", type=int, default=len(CONFIGURATIONS), help="only so many configurations")
    parser.add_argument("--minutes", type=float, default=15.0, help="after which nothing is tried again (%(default)s)")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < CORES:
        parser.error(f"needs {CORES} cores")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= KEPT_HEAP
    print(header("Steps predicted from profiles, and plans against measured steps"))
    if options.quick:
        print("# COUNTS STEPS UNDER ANY LOAD: no result")
    spawn(RANKS, worker, options)


if __name__ == "__main__":
    main()
