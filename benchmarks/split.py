"""What a split backward costs: I and W beside the whole B and beside torch's own split.

    python benchmarks/split.py [--rounds 15] [--quick]
    python benchmarks/split.py --replay

One process, one thread: two blocks of the other benchmarks over one segment. Their backward comes whole, as I and W of
this engine, and as torch's ``stage_backward_input`` and ``stage_backward_weight``; each split in turn with the whole
one, in a heap that keeps its pages. Times are of the engine's units (torch's: of the two calls).

``--replay``: units of one and of two blocks are measured, whole and split, and orders of 4 and 8 ranks simulated with
their seconds and bytes: speed and peak memory beside 1f1b's, with W where the order has it and with W in waits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from common import header, keep_heap
from decoder import Block
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from seq1f1b import Costs, Links, PipelineEngine, Schedule, ScheduleError, build_schedule
from seq1f1b.planning.profiler import StageTimes, measure_stage
from seq1f1b.schedule import StepMemory

ORDERS = {"whole": "F0.0 B0.0", "split": "F0.0 I0.0 W0.0"}
WARM_UP = 3


def make_blocks(hidden: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden, i, "ours") for i in range(2))).to(dtype)


class Engine:
    """One rank's backward as the engine runs it, whole or split."""

    def __init__(self, order: str, module: nn.Module, x: Tensor, seed: Tensor) -> None:
        self.x, self.seed = x, seed
        self.engine = PipelineEngine(
            module,
            schedule=Schedule.from_text(ORDERS[order]),
            num_microbatches=1,
            loss_fn=lambda output, target: (output * target).sum(),
            grad_dtype=None,
        )

    def seconds(self) -> tuple[float, float]:
        """B, or I and W."""
        self.engine.step(self.x, target=self.seed)
        report = self.engine.report()
        times = {unit.kind: end - start for unit, start, end in report.timeline}
        return times.get("B", times.get("I", 0.0)), times.get("W", 0.0)


class Torch:
    """The two functions by which torch's zero-bubble schedules go back."""

    def __init__(self, module: nn.Module, x: Tensor, seed: Tensor) -> None:
        self.module, self.x, self.seed = module, x, seed

    def seconds(self) -> tuple[float, float]:
        x = self.x.detach().requires_grad_()
        loss = (self.module(x) * self.seed).sum()
        begin = time.perf_counter()
        _, groups = stage_backward_input([loss], None, [x], self.module.parameters())
        between = time.perf_counter()
        again = time.perf_counter()
        stage_backward_weight(self.module.parameters(), groups)
        return between - begin, time.perf_counter() - again


def compare(hidden: int, tokens: int, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Prints a row; returns I + W over B of this engine and of torch."""
    torch.manual_seed(1)
    x, seed = torch.randn(1, tokens, hidden).to(dtype), torch.randn(1, tokens, hidden).to(dtype)
    whole, split = (Engine(order, make_blocks(hidden, dtype), x.clone().requires_grad_(), seed) for order in ORDERS)
    theirs = Torch(make_blocks(hidden, dtype), x, seed)
    seconds: dict[str, list[tuple[float, float]]] = {"whole": [], "ours": [], "torch": []}
    ratios = {}
    for name, arm in (("ours", split.seconds), ("torch", theirs.seconds)):
        pairs = [(whole.seconds(), arm()) for _ in range(WARM_UP + rounds)][WARM_UP:]
        ratios[name] = statistics.median(sum(found) / base for (base, _), found in pairs)
        seconds["whole"] += (base for base, _ in pairs)
        seconds[name] += (found for _, found in pairs)
    parts = {
        name: [statistics.median(part) * 1e3 for part in zip(*found, strict=True)] for name, found in seconds.items()
    }
    print(
        f"{str(dtype).removeprefix('torch.'):9} {hidden:6} {tokens:6}  {parts['whole'][0]:8.1f}  "
        f"{parts['ours'][0]:8.1f} + {parts['ours'][1]:6.1f} {ratios['ours']:6.3f}  "
        f"{parts['torch'][0]:8.1f} + {parts['torch'][1]:6.1f} {ratios['torch']:6.3f}",
        flush=True,
    )
    return ratios["ours"], ratios["torch"]


# -- measured units in orders of more ranks than cores -----------------------------------------------------------------

LENGTH, HIDDEN = 2048, 256  # of a sequence in tokens, and of a model with two blocks on each rank
LATENCY, BANDWIDTH = 50e-6, 20e9  # of a message, in seconds and bytes per second
ORDERS_REPLAYED = [  # family, segments, stages per rank
    ("1f1b", 1, 1), ("zb-h1", 1, 1), ("interleaved-1f1b", 1, 2), ("zbv", 1, 2),
    ("seq1f1b", 4, 1), ("seq-zb-h1", 4, 1), ("seq1f1b-interleaved", 4, 2), ("seq-zbv", 2, 2), ("seq-zbv", 4, 2),
    ("seq-v-half", 4, 2),
]  # fmt: skip


def measure_units(blocks: int) -> StageTimes:
    torch.manual_seed(0)
    stage = nn.Sequential(*(Block(HIDDEN, i, "ours") for i in range(blocks)))
    return measure_stage(stage, lambda tokens: torch.randn(1, tokens, HIDDEN), seq_len=LENGTH, segments=(1, 2, 4))


def simulate_units(order: Schedule, measured: StageTimes, fill: bool) -> tuple[float, int]:
    """Seconds of a step whose stages are all as the measured one, and bytes of the rank that holds most."""
    tokens = LENGTH // order.num_segments
    units = [measured.units[s * tokens, tokens] for s in range(order.num_segments)]
    seconds = {kind: [[statistics.median(unit[kind]) for unit in units]] * order.num_stages for kind in "FBIW"}
    saved = next(size for _, k, size in measured.saved if k == order.num_segments) // order.num_segments
    kept, gradients = (round(statistics.fmean(sizes) * tokens) for sizes in zip(*measured.left, strict=True))
    everywhere = [[1] * order.num_segments] * order.num_stages
    memory = StepMemory(
        activations=[[saved * one for one in row] for row in everywhere],
        kept_activations=[[kept * one for one in row] for row in everywhere],
        output_gradients=[[gradients * one for one in row] for row in everywhere],
        kv=round(measured.kv * LENGTH),
        kv_gradients=round(measured.kv_gradients * LENGTH),
    )
    links = Links(LATENCY, BANDWIDTH, message_bytes=tokens * HIDDEN * 4)
    costs = Costs(seconds["F"], seconds["B"], seconds["W"], input=seconds["I"], links=links)
    run = order.replace(weights="fill" if fill else "planned").simulate(costs, memory=memory)
    assert run.memory is not None
    return run.makespan, max(run.memory.total)


def replay() -> None:
    measured = {2: measure_units(1), 1: measure_units(2)}  # by stages per rank
    for per_rank, units in measured.items():
        whole = {kind: statistics.median(units.units[0, LENGTH][kind]) * 1e3 for kind in "FBIW"}
        text = ", ".join(f"{kind} {ms:.1f}" for kind, ms in whole.items())
        print(f"a stage of blocks: {2 // per_rank}, in ms: {text}")
    for num_ranks in (4, 8):
        print(f"\nP {num_ranks}, M 8: speed and memory beside 1f1b's; then with W in waits")
        base = None
        for family, k, per_rank in ORDERS_REPLAYED:
            shape = {"num_ranks": num_ranks, "num_microbatches": 8, "num_segments": k, "stages_per_rank": per_rank}
            try:
                order = build_schedule(family, **shape)
            except ScheduleError as error:
                print(f"{family:20} v {per_rank} k {k}: {error}")
                continue
            splits = "I" in order.kinds
            found = simulate_units(order, measured[per_rank], False)
            filled = simulate_units(order if splits else order.defer_weights(), measured[per_rank], True)
            base = base or found
            print(
                f"{family:20} v {per_rank} k {k}: "
                + "   ".join(f"{base[0] / t:5.2f} {size / base[1]:5.2f}" for t, size in (found, filled))
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two cells and few rounds: whether it runs")
    parser.add_argument("--replay", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    if options.replay:
        print(header("Split backward: orders of 4 and 8 ranks, simulated with measured units"))
        replay()
        return
    rounds = 3 if options.quick else options.rounds
    print(header("Split backward: I and W beside B, two blocks over one segment"))
    print("dtype     hidden tokens      B ms     I ms +   W ms  / B        torch's I + W ms  / B")
    cells = [
        compare(hidden, tokens, dtype, rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for hidden in ((256,) if options.quick else (256, 512))
        for tokens in ((256,) if options.quick else (256, 512, 1024, 2048))
    ]
    mine, theirs = [c[0] for c in cells], [c[1] for c in cells]
    print(
        f"I + W over B, geometric mean and worst: ours {math.prod(mine) ** (1 / len(mine)):.3f}, {max(mine):.3f}; "
        f"torch's {math.prod(theirs) ** (1 / len(theirs)):.3f}, {max(theirs):.3f}"
    )


if __name__ == "__main__":
    main()
