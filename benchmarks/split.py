"""What a split backward costs: I and W beside the whole B and beside torch's own split, and what lies between I and W.

    python benchmarks/split.py [--rounds 15] [--quick]
    python benchmarks/split.py --sleep [--ranks 8 --microbatches 8 --segments 4]
    python benchmarks/split.py --replay

One process, one thread: two Llama-like blocks over one segment. Their backward comes whole, as I and W of this engine,
and as torch's ``stage_backward_input`` and ``stage_backward_weight``; each split in turn with the whole one, in a heap
that keeps its pages. Times are of the engine's units (torch's: of the two calls), bytes in shares of what the graph of
torch's F saved. Then W of short segments: adding a product to a gradient in place, beside one product and one addition,
which is what autograd does.

``--sleep``: ranks as threads whose units sleep, each as long as a seed says (jitter of 20 %), so that there may be more
ranks than cores. It prints what an order loses with W where the order has it and with W in waits, beside the simulation
of the same seconds. Lost is what a step takes longer than the ranks' mean work.

``--replay``: units of one and of two blocks are measured, whole and split, and orders of 4 and 8 ranks simulated with
their seconds and bytes: speed and peak memory beside 1f1b's, with W where the order has it and with W in waits.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from common import KEPT_HEAP, header
from decoder import Block as ModelBlock
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import seq1f1b
from seq1f1b import Costs, Links, PipelineEngine, Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.ops.context import current
from seq1f1b.planning.profiler import StageTimes, measure_stage
from seq1f1b.runtime import deferred, products
from seq1f1b.runtime import stage as stage_room
from seq1f1b.runtime.measure import SavedBytes
from seq1f1b.schedule import StepMemory
from seq1f1b.testing import run_ranks

HEAD_DIM = 64
ORDERS = {"whole": "F0.0 B0.0", "split": "F0.0 I0.0 W0.0"}
WARM_UP = 3


class Norm(nn.Module):
    """As in Llama: the norm of torch itself saves less."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, hidden: int, index: int) -> None:
        super().__init__()
        self.heads, self.layer = hidden // HEAD_DIM, seq1f1b.layer_handle(index)
        inner = (8 * hidden // 3 + 63) // 64 * 64
        self.norm_1, self.norm_2 = Norm(hidden), Norm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def make_blocks(hidden: int, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(hidden, 0), Block(hidden, 1)).to(dtype)


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
        self.saved = self.held = 0

    def seconds(self) -> tuple[float, float]:
        x = self.x.detach().requires_grad_()
        saved = SavedBytes([self.module], [x])
        with saved:
            loss = (self.module(x) * self.seed).sum()
        begin = time.perf_counter()
        _, groups = stage_backward_input([loss], None, [x], self.module.parameters())
        between = time.perf_counter()
        gradients = {
            g.untyped_storage().data_ptr(): g.untyped_storage().nbytes()
            for group in groups
            for grads in group.get("grads", ())
            for g in (grads if isinstance(grads, (tuple, list)) else (grads,))
            if isinstance(g, Tensor)
        }
        self.saved, self.held = saved.bytes, saved.bytes + sum(gradients.values())  # the graph is kept
        again = time.perf_counter()
        stage_backward_weight(self.module.parameters(), groups)
        return between - begin, time.perf_counter() - again


def compare(hidden: int, tokens: int, dtype: torch.dtype, rounds: int) -> tuple[float, float, float, float]:
    """Prints a row; returns I + W over B of this engine and of torch, and what both hold between I and W."""
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
    kept = split.engine._runner.last_step.activations[0]
    held = (kept.kept + kept.gradients) * tokens / theirs.saved  # keys and values, in our cache, are gone with I
    print(
        f"{str(dtype).removeprefix('torch.'):9} {hidden:6} {tokens:6}  {parts['whole'][0]:8.1f}  "
        f"{parts['ours'][0]:8.1f} + {parts['ours'][1]:6.1f} {ratios['ours']:6.3f}  "
        f"{parts['torch'][0]:8.1f} + {parts['torch'][1]:6.1f} {ratios['torch']:6.3f}  "
        f"{held:5.2f} {theirs.held / theirs.saved:5.2f}",
        flush=True,
    )
    return ratios["ours"], ratios["torch"], held, theirs.held / theirs.saved


def short_segments(rounds: int) -> None:
    """W of 64 tokens: one product added in place, beside a product and an addition."""
    print("\nW of segments of 64 tokens, us: in place, product + addition, ratio")
    for dtype, outputs, inputs in (
        (torch.float32, 768, 256), (torch.float32, 1536, 512), (torch.bfloat16, 768, 256), (torch.bfloat16, 2048, 512)
    ):  # fmt: skip
        weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=dtype))
        weight.grad = torch.zeros_like(weight)
        other = torch.zeros_like(weight).detach()
        x, dy = torch.randn(64, inputs).to(dtype), torch.randn(64, outputs).to(dtype)
        times: tuple[list[float], list[float]] = ([], [])

        def in_place(weight=weight, x=x, dy=dy) -> None:
            products.accumulate(weight, x, dy, False)

        def apart(other=other, x=x, dy=dy) -> None:
            with torch.no_grad():
                other.add_(dy.t() @ x)

        for turn in range(-2, 4 * rounds):
            for run, found in zip((in_place, apart), times, strict=True):
                begin = time.perf_counter()
                for _ in range(20):
                    run()
                if turn >= 0:
                    found.append((time.perf_counter() - begin) / 20)
        ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
        mine, plain = (statistics.median(t) * 1e6 for t in times)
        print(f"{str(dtype).removeprefix('torch.'):9} ({outputs}, {inputs}): {mine:8.1f} {plain:8.1f} {ratio:6.2f}")


# -- units that sleep --------------------------------------------------------------------------------------------------

UNIT, PRODUCTS, JITTER, SEEDS = 0.015, 4, 0.2, 10  # seconds of each of F, I and W; products of a W


class _SleepsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Sleeper(nn.Module):
    def __init__(self, stage: int, seconds: dict[Unit, float]) -> None:
        super().__init__()
        self.stage, self.seconds = stage, seconds
        self.layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(PRODUCTS)))

    def forward(self, x: Tensor) -> Tensor:
        unit = current()
        assert unit is not None
        f, i, w = (self.seconds[Unit(kind, self.stage, unit.microbatch, unit.segment)] for kind in "FIW")
        time.sleep(f)
        unit.tape.seconds = w / PRODUCTS
        return _SleepsInBackward.apply(self.layers(x), i)  # type: ignore[no-any-return, no-untyped-call]


class SleepingTape(deferred.Tape):
    def run_next(self) -> bool:
        if self.products:
            time.sleep(self.seconds)
        return super().run_next()


def sleeping_step(order: Schedule, weights: str, seconds: dict[Unit, float]) -> float:
    """Share of the ranks' mean work by which the second step took longer."""

    def run(group: Any) -> Any:
        own = [stage for stage, rank in enumerate(order.rank_of_stage) if rank == group.rank]
        engine = PipelineEngine(
            [Sleeper(stage, seconds) for stage in own],
            schedule=order.replace(weights=weights),
            num_microbatches=order.num_microbatches,
            num_segments=order.num_segments,
            loss_fn=lambda output, target: output.sum(),
            group=group,
        )
        x = torch.randn(order.num_microbatches, 4 * order.num_segments, 4, requires_grad=True)
        for _ in range(2):
            engine.step(x, target=torch.zeros(order.num_microbatches, 4 * order.num_segments))
        return engine.report()

    reports = run_ranks(order.num_ranks, run)
    spans = [(a, b) for r in reports for _, a, b in (*r.timeline, *r.fills)]
    makespan = max(b for _, b in spans) - min(a for a, _ in spans)
    return makespan / (sum(seconds.values()) / order.num_ranks) - 1


def sleep(options: argparse.Namespace) -> None:
    counts = {"num_ranks": options.ranks, "num_microbatches": options.microbatches, "num_segments": options.segments}
    split = build_schedule("seq-zb-h1", **counts)
    arms = {
        "seq-zb-h1, W as planned": (split, "planned"),
        "seq-zb-h1, W in waits": (split, "fill"),
        "seq1f1b, W in waits": (build_schedule("seq1f1b", **counts).defer_weights(), "fill"),
    }
    lost: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for seed in range(SEEDS):
        draw = random.Random(seed)
        units = sorted({unit for order in split.ranks for unit in order})
        seconds = {unit: UNIT * draw.uniform(1 - JITTER, 1 + JITTER) for unit in units}
        for name, (order, weights) in arms.items():
            durations = [[seconds[unit] for unit in rank] for rank in order.ranks]
            simulated = order.replace(weights=weights).simulate(durations=durations).makespan
            work = sum(seconds.values()) / order.num_ranks
            lost[name].append((sleeping_step(order, weights, seconds), simulated / work - 1))
    print(f"units of {UNIT * 1e3:g} ms, {SEEDS} seeds: lost over the ranks' mean work")
    for name, found in lost.items():
        measured, simulated = zip(*found, strict=True)
        print(
            f"{name:26} {statistics.mean(measured):6.1%} [{min(measured):.1%}, {max(measured):.1%}], "
            f"simulated {statistics.mean(simulated):6.1%}"
        )
    planned, filled = (list(lost.values())[i] for i in (0, 1))
    fewer = sum(f < p for (p, _), (f, _) in zip(planned, filled, strict=True))
    print(f"W in waits loses less than planned W in {fewer} of {SEEDS} seeds")


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
    stage = nn.Sequential(*(ModelBlock(HIDDEN, i, "ours") for i in range(blocks)))
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
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--replay", action="store_true")
    for name, least in (("--ranks", 8), ("--microbatches", 8), ("--segments", 4)):
        parser.add_argument(name, type=int, default=least, help="of --sleep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if os.environ != os.environ | KEPT_HEAP:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT_HEAP)
    if options.sleep:
        # In the modules' own names, which a type checker takes for fixed.
        deferred.Tape = stage_room.Tape = SleepingTape  # type: ignore[misc, attr-defined]
        print(header("Split backward: units that sleep, W as planned and in waits"))
        sleep(options)
        return
    if options.replay:
        print(header("Split backward: orders of 4 and 8 ranks, simulated with measured units"))
        replay()
        return
    rounds = 3 if options.quick else options.rounds
    print(header("Split backward: I and W beside B, two Llama-like blocks over one segment"))
    print("dtype     hidden tokens      B ms     I ms +   W ms  / B        torch's I + W ms  / B   held: ours torch's")
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
    print(f"held between I and W, share of torch's: at most {max(c[2] / c[3] for c in cells):.2f}")
    short_segments(rounds)


if __name__ == "__main__":
    main()
