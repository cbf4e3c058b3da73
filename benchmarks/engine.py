"""What the engine itself costs: per forward-backward pair, and on the way from one rank to the next.

    python benchmarks/engine.py pair     # one process: a step less the bare loop over the same pairs
    python benchmarks/engine.py two      # two processes over shared memory, beside torch over gloo

The bare loop is ``x = b.detach().requires_grad_(); y = f(x); autograd.backward(y, g)``; losses are left out of both.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import ForeignLoad, agreed, gathered, header, parser_of, spawn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b

M, K, LENGTH, WIDTH = 8, 8, 64, 4
PAIRS = M * K
OURS = "seq1f1b"
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


def measure(rank: int, world: int, rounds: int, steps: int, limit: float) -> None:
    batch = torch.randn(M, LENGTH, WIDTH)
    flat = batch.unflatten(1, (K, -1)).flatten(0, 1)
    first, last = rank == 0, rank == world - 1
    modules = [Scale(), Scale()]
    engine = seq1f1b.PipelineEngine(
        modules[0],
        num_microbatches=M,
        num_segments=K,
        loss_fn=sum_loss,
        loss=seq1f1b.Loss(reduction="sum"),
        transport="shm",
    )
    if not {edge.transport for edge in engine.edges} <= {"shm"}:
        raise RuntimeError(f"messages are to go by shared memory: {engine.edges}")
    one = Schedule1F1B(PipelineStage(modules[1], rank, world, torch.device("cpu")), PAIRS, sum_loss, scale_grads=False)

    def torchs() -> None:
        one.step(*([flat] if first else []), target=flat if last else None, losses=[] if last else None)

    arms: dict[str, Callable[[], None]] = {
        OURS: lambda: engine.step(batch if first else None, target=batch if last else None),
        "torch Schedule1F1B over gloo": torchs,
    }
    check_gradients(dict(zip(arms, modules, strict=True)), arms)
    bare = bare_loop(Scale(), batch, with_loss=last)
    costs: dict[str, list[float]] = {name: [] for name in arms}
    discarded, load = 0, ForeignLoad(gathered(os.getpid()))
    for turn in range(3 * rounds):
        load.start()
        dist.barrier()
        own = repeat(bare, steps)
        taken = {}
        for name, step in arms.items():
            dist.barrier()
            taken[name] = repeat(step, steps)
        is_counted = agreed(turn > 0 and load.cores() < limit)
        for name, seconds in taken.items():
            if is_counted:
                costs[name].append((seconds - own) / PAIRS)
        discarded += turn > 0 and not is_counted
        if len(costs[OURS]) == rounds:
            break
    if first:
        for name, values in costs.items():
            report(f"{world} process{'es'[: 2 * world - 2]}, {name}", values, discarded, steps)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("modes", nargs="*", metavar="{pair,two}", help="default: both")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted ones (%(default)s)")
    parser.add_argument("--round-steps", type=int, default=STEPS_PER_ROUND, help="of each of them (%(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    modes = options.modes or ["pair", "two"]
    print(header("Cost of the engine"))
    for mode, world, most in (("pair", 1, STEPS_PER_ROUND), ("two", 2, 20)):
        if mode in modes:
            spawn(world, measure, world, options.rounds, min(most, options.round_steps), options.foreign)


if __name__ == "__main__":
    main()
