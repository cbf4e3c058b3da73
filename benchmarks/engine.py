"""What the engine itself costs: per forward-backward pair, and on the way from one rank to the next.

    python benchmarks/engine.py pair     # one process: a step less the bare loop over the same pairs
    python benchmarks/engine.py two      # two processes over shared memory, beside torch over gloo
    python benchmarks/engine.py sleep --ranks 2 4 8 16 --results FILE --plot FILE.png

The bare loop is ``x = b.detach().requires_grad_(); y = f(x); autograd.backward(y, g)``; losses are left out of both.

`sleep` shows schedules of more ranks than this machine has cores: stages whose units only sleep, in one process each,
over real transports, beside torch's. A step, from the first sleep to the last, is compared with the ideal, and with the
simulation of the same order in which every unit takes as long as its own sleep did: the difference is what Python,
autograd, transfers and wake-ups cost. A sleeping process takes 0.1 ms and more to wake, per cents of units below 5 ms,
and the more processes share a core the longer they wait for it: that is this machine, not the schedule.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from arms import torch_runtime
from common import FOREIGN_LIMIT, MIN_COUNTED, ForeignLoad, Records, header, spawn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b
from seq1f1b.runtime.stage import StageStep

M, K, LENGTH, WIDTH = 8, 8, 64, 4
PAIRS = M * K
ROUNDS, STEPS_PER_ROUND = 30, 50  # at most 20 steps where there are two processes


class Scale(nn.Module):
    """A module that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def repeat(step: Callable[[], None], steps: int) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def bare_loop(module: nn.Module, inputs: Tensor, *, with_loss: bool) -> Callable[[], None]:
    segments = [s for m in inputs.split(1) for s in m.split(LENGTH // K, 1)]
    gradient = torch.ones_like(segments[0])

    def loop() -> None:
        for b in segments:
            x = b.detach().requires_grad_()
            y = module(x)
            if with_loss:
                torch.autograd.backward(sum_loss(y, b), torch.ones(()))
            else:
                torch.autograd.backward(y, gradient)

    return loop


def report(name: str, costs: list[float], discarded: int, steps: int) -> None:
    costs = sorted(costs)
    if len(costs) < 15:
        print(f"{name}: unmeasured, {len(costs)} rounds counted, {discarded} discarded")
        return
    low, high = costs[len(costs) // 10], costs[-1 - len(costs) // 10]
    print(
        f"{name}: {statistics.median(costs) * 1e6:.1f} us per pair [{low * 1e6:.1f}, {high * 1e6:.1f}], "
        f"{len(costs)} rounds of {steps} steps of {PAIRS} pairs, {discarded} discarded",
        flush=True,
    )


def check_gradients(module_of: dict[str, nn.Module], runs: dict[str, Callable[[], None]]) -> None:
    """Runs each arm once. Raises RuntimeError unless all make one gradient, but for its scale: some take means."""
    gradients = {}
    for name, run in runs.items():
        weight = module_of[name].get_parameter("weight")
        weight.grad = None
        run()
        gradients[name] = nn.functional.normalize(weight.grad, dim=0)
    first, *others = gradients.values()
    if not all(torch.allclose(first, other, rtol=1e-4) for other in others):
        raise RuntimeError(f"gradients differ: {gradients}")


def check_transport(engine: seq1f1b.PipelineEngine, transport: str) -> None:
    """Raises RuntimeError unless all messages go over this transport."""
    if {edge.transport for edge in engine.edges} != {transport}:
        raise RuntimeError(f"messages are to go by {transport}: {engine.edges}")


def pair(rounds: int, steps: int, limit: float) -> None:
    torch.set_num_threads(1)
    module, inputs = Scale(), torch.randn(M, LENGTH, WIDTH)
    engine = seq1f1b.PipelineEngine(
        module, num_microbatches=M, num_segments=K, loss_fn=sum_loss, loss=seq1f1b.Loss(reduction="sum")
    )

    def ours() -> None:
        engine.step(inputs, target=inputs)

    bare = bare_loop(module, inputs, with_loss=True)
    check_gradients(dict.fromkeys(("bare", "ours"), module), {"bare": bare, "ours": ours})
    for _ in range(min(3, rounds)):
        repeat(ours, steps), repeat(bare, steps)
    costs, discarded, load = [], 0, ForeignLoad([os.getpid()])
    for _ in range(3 * rounds):
        load.start()
        cost = (repeat(ours, steps) - repeat(bare, steps)) / PAIRS
        if load.cores() < limit:
            costs.append(cost)
        else:
            discarded += 1
        if len(costs) == rounds:
            break
    report("one process", costs, discarded, steps)


def two(rank: int, world: int, rounds: int, steps: int, limit: float) -> None:
    device = torch.device("cpu")
    batch = torch.randn(M, LENGTH, WIDTH)
    flat = batch.unflatten(1, (K, -1)).flatten(0, 1)
    first, last = rank == 0, rank == world - 1
    modules = [Scale() for _ in range(3)]
    engine = seq1f1b.PipelineEngine(
        modules[0],
        num_microbatches=M,
        num_segments=K,
        loss_fn=sum_loss,
        loss=seq1f1b.Loss(reduction="sum"),
        transport="shm",
    )
    order = seq1f1b.build_schedule("seq1f1b", num_ranks=world, num_microbatches=M, num_segments=K)
    check_transport(engine, "shm")
    one = Schedule1F1B(PipelineStage(modules[1], rank, world, device), PAIRS, sum_loss, scale_grads=False)
    general = torch_runtime(PipelineStage(modules[2], rank, world, device), order, sum_loss)

    def torch_step(schedule: Any) -> Callable[[], None]:
        def step() -> None:
            schedule.step(*([flat] if first else []), target=flat if last else None, losses=[] if last else None)

        return step

    arms: dict[str, Callable[[], None]] = {
        "seq1f1b over shared memory": lambda: engine.step(batch if first else None, target=batch if last else None),
        "torch Schedule1F1B over gloo": torch_step(one),
        "torch runtime, same order, over gloo": torch_step(general),
    }
    check_gradients(dict(zip(arms, modules, strict=True)), arms)
    bare = bare_loop(Scale(), batch, with_loss=last)
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    costs: dict[str, list[float]] = {name: [] for name in arms}
    discarded, load = 0, ForeignLoad(pids)
    for turn in range(3 * rounds):
        load.start()
        dist.barrier()
        own = repeat(bare, steps)
        taken = {}
        for name, step in arms.items():
            dist.barrier()
            taken[name] = repeat(step, steps)
        counted = [turn > 0 and load.cores() < limit]
        dist.broadcast_object_list(counted, src=0)
        for name, seconds in taken.items():
            if counted[0]:
                costs[name].append((seconds - own) / PAIRS)
        discarded += turn > 0 and not counted[0]
        if len(costs["seq1f1b over shared memory"]) == rounds:
            break
    if first:
        for name, values in costs.items():
            report(name, values, discarded, steps)


class Sleeps(torch.autograd.Function):
    """Sleeps in forward and twice as long in backward, and keeps when each sleep really began and ended."""

    measured: ClassVar[list[tuple[float, float]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        Sleeps.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        Sleeps.sleep(2 * ctx.seconds)
        return gradient, None

    @staticmethod
    def sleep(seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        Sleeps.measured.append((start, time.perf_counter()))


class Sleeper(nn.Module):
    """A stage. seconds: of one forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x * self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def bare_sleeps(seconds: float) -> float:
    """What torch alone, without an engine, adds to its own sleeps in one process: a fraction of them."""
    module, gradient, ratios = Sleeper(seconds), torch.ones(1, 4, WIDTH), []
    for _ in range(12):
        Sleeps.measured.clear()
        start = time.perf_counter()
        for _ in range(16):
            torch.autograd.backward(module(gradient.detach().requires_grad_()), gradient)
        ratios.append((time.perf_counter() - start) / sum(end - begin for begin, end in Sleeps.measured) - 1)
    return statistics.median(ratios)


def only_sleep(engine: seq1f1b.PipelineEngine, seconds: float) -> None:
    """Leaves nothing of torch in the units: the walk and the transport alone, handing over one tensor."""
    outputs = (torch.zeros(1, 4, WIDTH),)

    class OnlySleeps(StageStep):
        def forward(self, cell: int, received: Any) -> Any:
            Sleeps.sleep(seconds)
            return None if self.stage.is_last else outputs

        def backward(self, cell: int, received: Any) -> Any:
            Sleeps.sleep(2 * seconds)
            return None if self.stage.is_first else outputs

    for stage in engine._runner.stages.values():
        stage.begin = functools.partial(OnlySleeps, stage)  # type: ignore[method-assign]


def sleep(rank: int, world: int, options: argparse.Namespace, path: str) -> None:
    """One step of each arm in turn. The unit is a segment; 1F1B's, of whole micro-batches, is k times as long."""
    k, count, unit = options.segments, options.microbatches, options.unit_ms / 1e3
    first, last, device = rank == 0, rank == world - 1, torch.device("cpu")
    batch, flat = torch.randn(count, 4 * k, WIDTH), torch.randn(count * k, 4, WIDTH)
    orders = {
        family: seq1f1b.build_schedule(family, num_ranks=world, num_microbatches=count, num_segments=segments)
        for family, segments in (("1f1b", 1), ("seq1f1b", k))
    }

    def ours(family: str, transport: str, *, units: bool = True) -> Callable[[], None]:
        segments = orders[family].num_segments
        engine = seq1f1b.PipelineEngine(
            Sleeper(unit * k / segments), schedule=orders[family], num_microbatches=count, num_segments=segments,
            loss_fn=sum_loss, loss=seq1f1b.Loss(reduction="sum"), transport=transport,
        )  # fmt: skip
        check_transport(engine, transport)
        if not units:
            only_sleep(engine, unit)
        return lambda: engine.step(batch if first else None, target=batch if last else None)  # type: ignore[return-value]

    def theirs(schedule: Any, inputs: Tensor) -> Callable[[], None]:
        return lambda: schedule.step(
            *([inputs] if first else []), target=inputs if last else None, losses=[] if last else None
        )

    one = Schedule1F1B(PipelineStage(Sleeper(unit * k), rank, world, device), count, sum_loss, scale_grads=False)
    runtime = torch_runtime(PipelineStage(Sleeper(unit), rank, world, device), orders["seq1f1b"], sum_loss)
    arms: dict[str, tuple[str, Callable[[], None]]] = {
        "torch 1F1B, gloo": ("1f1b", theirs(one, batch)),
        "torch's runtime, our order, gloo": ("seq1f1b", theirs(runtime, flat)),
        "seq1f1b, gloo": ("seq1f1b", ours("seq1f1b", "c10d")),
        "seq1f1b, shared memory": ("seq1f1b", ours("seq1f1b", "shm")),
        "seq1f1b, shared memory, units without torch": ("seq1f1b", ours("seq1f1b", "shm", units=False)),
    }
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    load, taken = ForeignLoad(pids), {name: [] for name in arms}
    discarded = 0
    for turn in range(1 + 2 * options.steps):
        for name, (family, step) in list(arms.items())[:: -1 if turn % 2 else 1]:
            order = orders[family]
            dist.barrier()
            Sleeps.measured.clear()
            load.start()
            step()
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, list(Sleeps.measured))
            counts = [load.cores() < options.foreign]
            dist.broadcast_object_list(counts)
            if turn == 0 or not counts[0]:  # warm-up; torch also runs the module once more, for shapes
                discarded += turn > 0
                continue
            # perf_counter is the machine's monotonic clock: one for all processes
            makespan = max(track[-1][1] for track in gathered) - min(track[0][0] for track in gathered)
            durations = [[end - start for start, end in track] for track in gathered]
            busy = sum(map(sum, durations)) / world
            taken[name].append((makespan, order.simulate(durations=durations).makespan, busy))
        enough = [min(map(len, taken.values())) >= options.steps]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    if first:
        results = Records(path)
        results.add(what="bare", unit_ms=options.unit_ms, over=bare_sleeps(unit))
        for name, (family, _) in arms.items():
            segments = orders[family].num_segments
            ideal = 3 * unit * k * (count + (world - 1) / segments)
            results.add(
                what="sleep", ranks=world, arm=name, microbatches=count, segments=segments, unit_ms=options.unit_ms,
                ideal=ideal, steps=taken[name], discarded=discarded,
            )  # fmt: skip


def show_sleeps(results: Records) -> None:
    for r in (r for r in results.records if r["what"] == "bare"):
        print(f"torch alone, one process, no engine, units of {r['unit_ms']:g} ms: {r['over']:.2%} over its own sleeps")
    print(
        f"{'ranks':>5} {'arm':44} {'M':>3} {'k':>2} {'s/step':>7} {'ideal':>7} {'over ideal':>24} "
        f"{'over simulation of its sleeps':>29} {'bubble':>6} {'simulated':>9}  steps"
    )
    for r in (r for r in results.records if r["what"] == "sleep"):
        if len(r["steps"]) < MIN_COUNTED:
            print(f"{r['ranks']:5} {r['arm']:44} unmeasured, {len(r['steps'])} steps, {r['discarded']} discarded")
            continue
        seconds = statistics.median(makespan for makespan, _, _ in r["steps"])
        ideal = spread([makespan / r["ideal"] - 1 for makespan, _, _ in r["steps"]])
        simulated = spread([makespan / simulation - 1 for makespan, simulation, _ in r["steps"]])
        bubble, planned = (statistics.median(1 - row[2] / row[i] for row in r["steps"]) for i in (0, 1))
        print(
            f"{r['ranks']:5} {r['arm']:44} {r['microbatches']:3} {r['segments']:2} {seconds:7.3f} {r['ideal']:7.3f} "
            f"{ideal:>24} {simulated:>29} {bubble:6.1%} {planned:9.1%}  {len(r['steps'])}"
        )


def spread(values: list[float]) -> str:
    """Median and the middle four fifths."""
    values = sorted(values)
    tenth = len(values) // 10
    return f"{statistics.median(values):.1%} [{values[tenth]:.1%}, {values[-1 - tenth]:.1%}]"


def plot_sleeps(results: Records, path: str) -> None:
    """Bubble beside the simulated one, and what comes on top of the simulation, over the number of ranks."""
    from figures import Point, lines

    bubbles: dict[str, dict[float, Point]] = {}
    overheads: dict[str, dict[float, Point]] = {}
    for r in results.records:
        if r["what"] != "sleep" or len(r["steps"]) < MIN_COUNTED:
            continue
        for name, i in ((r["arm"], 0), (f"simulated: {r['arm']}", 1)):
            if i == 0 or r["arm"] in ("torch 1F1B, gloo", "seq1f1b, shared memory"):
                bubble = statistics.median(1 - row[2] / row[i] for row in r["steps"])
                bubbles.setdefault(name, {})[r["ranks"]] = Point(100 * bubble)
        over = sorted(100 * (makespan / simulation - 1) for makespan, simulation, _ in r["steps"])
        tenth = len(over) // 10
        point = Point(statistics.median(over), over[tenth], over[-1 - tenth])
        overheads.setdefault(r["arm"], {})[r["ranks"]] = point
    if not bubbles:
        raise SystemExit("nothing to draw: no ranks are measured")
    head = results.header().replace("# ", "").split("\n")
    panels = [
        ("bubble", "ranks P", "% of a step", bubbles),
        ("over the simulation of its own sleeps", "ranks P", "%", overheads),
    ]
    lines(path, panels, f"{head[2]}; {head[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="{pair,two,sleep}", help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted ones of pair and two (%(default)s)")
    parser.add_argument("--round-steps", type=int, default=STEPS_PER_ROUND, help="of each of them (%(default)s)")
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    group = parser.add_argument_group("sleep")
    group.add_argument("--ranks", type=int, nargs="+", default=[8])
    group.add_argument("--microbatches", type=int, default=16)
    group.add_argument("--segments", type=int, default=4)
    group.add_argument(
        "--unit-ms", type=float, default=5.0, help="a segment's forward; its backward takes twice as long"
    )
    group.add_argument("--steps", type=int, default=MIN_COUNTED, help="counted ones of each arm")
    group.add_argument("--results", help="file of JSON lines that is added to")
    group.add_argument("--show", action="store_true", help="measure nothing")
    group.add_argument("--plot", help="picture of what the file holds")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    modes = options.modes or ["pair", "two", "sleep"]
    if modes != ["sleep"]:
        print(header("Cost of the engine"))
    if "pair" in modes:
        pair(options.rounds, options.round_steps, options.foreign)
    if "two" in modes:
        spawn(2, two, 2, options.rounds, min(20, options.round_steps), options.foreign)
    if "sleep" in modes:
        with tempfile.TemporaryDirectory() as folder:
            results = Records(options.results or f"{folder}/results")
            if not options.show:
                results.begin("Stages that sleep, a process each")
                for world in options.ranks:
                    spawn(world, sleep, world, options, results.path)
            results = Records(results.path)
            print(results.header())
            show_sleeps(results)
            if options.plot:
                plot_sleeps(results, options.plot)


if __name__ == "__main__":
    main()
