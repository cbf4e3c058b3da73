"""What the engine itself costs: per forward-backward pair, and on the way from one rank to the next.

    python benchmarks/engine.py pair     # one process: a step less the bare loop over the same pairs
    python benchmarks/engine.py two      # two processes over shared memory, beside torch over gloo
    python benchmarks/engine.py sleep    # 8 processes whose stages only sleep, beside torch's runtime

The bare loop is ``x = b.detach().requires_grad_(); y = f(x); autograd.backward(y, g)``; losses are left out of both.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import FOREIGN_LIMIT, ForeignLoad, header
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import seq1f1b

M, K, LENGTH, WIDTH = 8, 8, 64, 4
PAIRS = M * K
ROUNDS, STEPS_PER_ROUND = 30, 50


class Scale(nn.Module):
    """A module that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def repeat(step: Callable[[], None]) -> float:
    """Seconds per step."""
    start = time.perf_counter()
    for _ in range(STEPS_PER_ROUND):
        step()
    return (time.perf_counter() - start) / STEPS_PER_ROUND


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


def report(name: str, costs: list[float], discarded: int) -> None:
    costs = sorted(costs)
    if len(costs) < 15:
        print(f"{name}: unmeasured, {len(costs)} rounds counted, {discarded} discarded")
        return
    low, high = costs[len(costs) // 10], costs[-1 - len(costs) // 10]
    print(
        f"{name}: {statistics.median(costs) * 1e6:.1f} us per pair [{low * 1e6:.1f}, {high * 1e6:.1f}], "
        f"{len(costs)} rounds of {STEPS_PER_ROUND} steps of {PAIRS} pairs, {discarded} discarded",
        flush=True,
    )


def pair() -> None:
    torch.set_num_threads(1)
    module, inputs = Scale(), torch.randn(M, LENGTH, WIDTH)
    engine = seq1f1b.PipelineEngine(module, num_microbatches=M, num_segments=K, loss_fn=sum_loss, loss_reduction="sum")

    def ours() -> None:
        engine.step(inputs, target=inputs)

    bare = bare_loop(module, inputs, with_loss=True)
    for _ in range(3):
        repeat(ours), repeat(bare)
    costs, discarded, load = [], 0, ForeignLoad([os.getpid()])
    for _ in range(3 * ROUNDS):
        load.start()
        cost = (repeat(ours) - repeat(bare)) / PAIRS
        if load.cores() < FOREIGN_LIMIT:
            costs.append(cost)
        else:
            discarded += 1
        if len(costs) == ROUNDS:
            break
    report("one process", costs, discarded)


def torch_runtime(stage: PipelineStage, order: seq1f1b.Schedule, loss_fn: Any) -> Any:
    """Torch's general runtime with our order, segments as micro-batches of a flat index."""
    runtime = _PipelineScheduleRuntime(
        [stage], order.num_microbatches * order.num_segments, loss_fn=loss_fn, scale_grads=False
    )
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(order.to_csv())
        file.flush()
        runtime._load_csv(file.name, format="compute_only")
    return runtime


def two(rank: int, world: int) -> None:
    device = torch.device("cpu")
    batch = torch.randn(M, LENGTH, WIDTH)
    flat = torch.randn(PAIRS, LENGTH // K, WIDTH)
    first, last = rank == 0, rank == world - 1
    engine = seq1f1b.PipelineEngine(
        Scale(), num_microbatches=M, num_segments=K, loss_fn=sum_loss, loss_reduction="sum", transport="shm"
    )
    order = seq1f1b.build_schedule("seq1f1b", num_ranks=world, num_microbatches=M, num_segments=K)
    one = Schedule1F1B(PipelineStage(Scale(), rank, world, device), PAIRS, sum_loss, scale_grads=False)
    general = torch_runtime(PipelineStage(Scale(), rank, world, device), order, sum_loss)

    def torch_step(schedule: Any) -> Callable[[], None]:
        def step() -> None:
            schedule.step(*([flat] if first else []), target=flat if last else None, losses=[] if last else None)

        return step

    arms: dict[str, Callable[[], None]] = {
        "seq1f1b over shared memory": lambda: engine.step(batch if first else None, target=batch if last else None),
        "torch Schedule1F1B over gloo": torch_step(one),
        "torch runtime, same order, over gloo": torch_step(general),
    }
    bare = bare_loop(Scale(), batch, with_loss=last)
    pids: list[int] = [0] * world
    dist.all_gather_object(pids, os.getpid())
    global STEPS_PER_ROUND
    STEPS_PER_ROUND = 20
    costs: dict[str, list[float]] = {name: [] for name in arms}
    discarded, load = 0, ForeignLoad(pids)
    for turn in range(3 * ROUNDS):
        load.start()
        dist.barrier()
        own = repeat(bare)
        taken = {}
        for name, step in arms.items():
            dist.barrier()
            taken[name] = repeat(step)
        counted = [turn > 0 and load.cores() < FOREIGN_LIMIT]
        dist.broadcast_object_list(counted, src=0)
        for name, seconds in taken.items():
            if counted[0]:
                costs[name].append((seconds - own) / PAIRS)
        discarded += not counted[0]
        if len(costs["seq1f1b over shared memory"]) == ROUNDS:
            break
    if first:
        for name, values in costs.items():
            report(name, values, discarded)


class Sleeps(torch.autograd.Function):
    """Sleeps in forward and backward, and keeps when each sleep really began and ended."""

    seconds = (0.005 / 4, 0.010 / 4)
    measured: ClassVar[list[tuple[float, float]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Sleeps.sleep(0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Sleeps.sleep(1)
        return gradient

    @staticmethod
    def sleep(which: int) -> None:
        start = time.perf_counter()
        time.sleep(Sleeps.seconds[which])
        Sleeps.measured.append((start, time.perf_counter()))


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Sleeps.apply(x * self.weight)  # type: ignore[no-any-return]


def bare_sleeps() -> float:
    """What torch alone, without an engine, adds to its own sleeps in one process: a fraction of them."""
    module, gradient, ratios = Sleeper(), torch.ones(1, 4, WIDTH), []
    for _ in range(12):
        Sleeps.measured.clear()
        start = time.perf_counter()
        for _ in range(16):
            torch.autograd.backward(module(gradient.detach().requires_grad_()), gradient)
        ratios.append((time.perf_counter() - start) / sum(end - begin for begin, end in Sleeps.measured) - 1)
    return statistics.median(ratios)


def only_sleep(engine: seq1f1b.PipelineEngine) -> None:
    """Leaves nothing of torch in the units: the walk and the transport alone, handing over one tensor."""
    outputs = (torch.zeros(1, 4, WIDTH),)

    def unit(which: int, hands_over: bool) -> Any:
        Sleeps.sleep(which)
        return outputs if hands_over else None

    for runtime in engine._runtimes.values():
        runtime.forward = lambda *_, r=runtime: unit(0, not r.is_last)  # type: ignore[method-assign, misc]
        runtime.backward = lambda *_, r=runtime: unit(1, not r.is_first)  # type: ignore[method-assign, misc]


def sleep(rank: int, world: int) -> None:
    """First sleep to last, against a simulation in which each unit takes as long as its own sleep."""
    k = 4
    dist.barrier()
    if rank == 0:
        print(f"torch alone, one process, no engine: {100 * bare_sleeps():.2f} % over its own sleeps", flush=True)
    dist.barrier()
    device = torch.device("cpu")
    batch, flat = torch.randn(M, 4 * k, WIDTH), torch.randn(M * k, 4, WIDTH)
    first, last = rank == 0, rank == world - 1
    order = seq1f1b.build_schedule("seq1f1b", num_ranks=world, num_microbatches=M, num_segments=k)
    engine = seq1f1b.PipelineEngine(
        Sleeper(), schedule=order, num_microbatches=M, num_segments=k, loss_fn=sum_loss, loss_reduction="sum"
    )
    runtime = torch_runtime(PipelineStage(Sleeper(), rank, world, device), order, sum_loss)
    ideal = sum(Sleeps.seconds) * k * (M + (world - 1) / k)

    walk = seq1f1b.PipelineEngine(
        Sleeper(), schedule=order, num_microbatches=M, num_segments=k, loss_fn=sum_loss, loss_reduction="sum"
    )
    only_sleep(walk)

    def ours(engine: seq1f1b.PipelineEngine) -> None:
        engine.step(batch if first else None, target=batch if last else None)

    def theirs() -> None:
        runtime.step(*([flat] if first else []), target=flat if last else None, losses=[] if last else None)

    arms: dict[str, Callable[[], None]] = {
        "seq1f1b": lambda: ours(engine),
        "seq1f1b's walk and transport, units without torch": lambda: ours(walk),
        "torch runtime, same order": theirs,
    }
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    over_units: list[float] = []
    for turn in range(21):
        for name, step in arms.items():
            dist.barrier()
            Sleeps.measured.clear()
            step()
            gathered: list[Any] = [None] * world
            dist.all_gather_object(gathered, list(Sleeps.measured))
            if turn == 0:  # warm-up; torch's runtime also runs the module once more, for shapes
                continue
            # perf_counter is the machine's monotonic clock: one for all processes
            makespan = max(track[-1][1] for track in gathered) - min(track[0][0] for track in gathered)
            durations = [[end - start for start, end in track] for track in gathered]
            simulated = order.simulate(durations=durations).makespan
            results[name].append((makespan, simulated))
            if name == "seq1f1b":
                measured = engine.report(gather=True)
                over_units.append(measured.makespan / measured.planned.makespan - 1)
    if not first:
        return
    print(f"ideal: {ideal * 1e3:.1f} ms ({world} ranks, M {M}, k {k}, 5 ms forward and 10 ms backward per micro-batch)")
    over_units.sort()
    print(
        f"seq1f1b: {100 * statistics.median(over_units):.2f} % over the simulation of its whole units, sleeps and what "
        f"Python and autograd add [{100 * over_units[2]:.2f}, {100 * over_units[-3]:.2f}]: transfers and wake-ups"
    )
    for name, values in results.items():
        over_ideal = sorted(makespan / ideal - 1 for makespan, _ in values)
        over_simulated = sorted(makespan / simulated - 1 for makespan, simulated in values)
        print(
            f"{name}: {100 * statistics.median(over_ideal):.1f} % over the ideal "
            f"[{100 * over_ideal[2]:.1f}, {100 * over_ideal[-3]:.1f}], "
            f"{100 * statistics.median(over_simulated):.2f} % over the simulation of its own sleeps "
            f"[{100 * over_simulated[2]:.2f}, {100 * over_simulated[-3]:.2f}], {len(values)} steps"
        )


def worker(rank: int, store: str, world: int, fn: Callable[[int, int], None]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    fn(rank, world)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    modes = sys.argv[1:] or ["pair", "two", "sleep"]
    print(header("Cost of the engine"))
    for mode in modes:
        if mode == "pair":
            pair()
            continue
        world, fn = {"two": (2, two), "sleep": (8, sleep)}[mode]
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (f"{folder}/store", world, fn), nprocs=world)


if __name__ == "__main__":
    main()
