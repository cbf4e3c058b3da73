"""Steps of training under Seq1F1B against torch's Schedule1F1B with torch's own attention, in one interleaved run.

Two processes of one thread each, fp32, hidden 256, 4 blocks, heads of 64, vocabulary 1024, micro-batch 1. Each pair of
steps runs A B, the next B A; a pair counts only while other processes use less than 8 % of a core.

    python benchmarks/train.py                 # the speed cases
    python benchmarks/train.py --attention     # torch's attention against ours, both in our engine; what takes the time
    python benchmarks/train.py --memory        # peak growth per step, in a run of its own
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch_attention
from common import FOREIGN_LIMIT, ForeignLoad, Pairs, header, in_turn
from model import HeadLoss, Stage, cross_entropy
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b
from seq1f1b import _core

HIDDEN, BLOCKS, VOCAB = 256, 4, 1024
SHAPE = seq1f1b.ModelShape(hidden=HIDDEN, layers=BLOCKS, heads=4, kv_heads=4, ffn=4 * HIDDEN * 2 // 3, vocab=VOCAB)
# name, sequence, M, arm A, arm B, wanted ratio A / B. An arm is "torch" or (k, split): "even", "flops" or "profiled".
SPEED = [
    ("S4096 M2 k8 against 1F1B", 4096, 2, "torch", (8, "profiled"), 1.80),
    ("S2048 M4 k8 against 1F1B", 2048, 4, "torch", (8, "profiled"), 1.16),
    ("S2048 M4 k2 profiled against even", 2048, 4, (2, "even"), (2, "profiled"), 1.05),
    ("S2048 M4 k4 profiled against even", 2048, 4, (4, "even"), (4, "profiled"), 0.99),
    ("S2048 M4 k8 profiled against even", 2048, 4, (8, "even"), (8, "profiled"), 0.99),
    ("S2048 M4 k2 by FLOPs against even", 2048, 4, (2, "even"), (2, "flops"), 1.05),
    ("S2048 M4 k8 by FLOPs against even", 2048, 4, (8, "even"), (8, "flops"), 0.99),
]
PIECES = 8  # equal pieces of the sequence whose cost is measured for the profiled split

Arm = Callable[[], float]  # a training step: its loss on the last stage's rank, 0 elsewhere


def make_batch(rank: int, length: int, M: int) -> tuple[Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (M, length), generator=generator)
    return (tokens, None) if rank == 0 else (None, seq1f1b.shift_labels(tokens))


def make_arm(arm: object, rank: int, length: int, M: int, *, head_in_loss: bool = False) -> Arm:
    """One training step of this rank, optimizer excluded; gradients are dropped after it."""
    if arm == "torch":
        inputs, targets = make_batch(rank, length, M)
        module = Stage(rank, 2, hidden=HIDDEN, blocks=BLOCKS, vocab=VOCAB, attention="whole sequences")
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, M, cross_entropy)

        def torch_step() -> float:
            losses: list[Tensor] = []
            schedule.step(*([] if inputs is None else [inputs]), target=targets, losses=losses if rank else None)
            module.zero_grad()
            return mean(losses)

        return torch_step
    k, split = arm  # type: ignore[misc]
    sizes = {"even": None, "flops": "balanced"}.get(split) if split != "profiled" else profiled(rank, length, k)
    return our_arm(rank, length, M, k, sizes, head_in_loss=head_in_loss)[0]


def our_arm(
    rank: int,
    length: int,
    M: int,
    k: int,
    sizes: object,
    *,
    head_in_loss: bool = False,
    attention: str = "ours",
    dtype: torch.dtype = torch.float32,
) -> tuple[Arm, seq1f1b.PipelineEngine]:
    inputs, targets = make_batch(rank, length, M)
    module = Stage(rank, 2, hidden=HIDDEN, blocks=BLOCKS, vocab=VOCAB, attention=attention, head=not head_in_loss)
    loss_fn = HeadLoss(HIDDEN, VOCAB) if head_in_loss and rank else cross_entropy
    engine = seq1f1b.PipelineEngine(
        module, num_microbatches=M, num_segments=k, segment_sizes=sizes, model_shape=SHAPE, loss_fn=loss_fn
    )

    def our_step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = engine.step(inputs, target=targets)
        for parameter in engine.parameters():
            parameter.grad = None
        return mean(losses)

    return our_step, engine


def mean(losses: list[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / max(1, len(losses))


_costs: dict[int, list[float]] = {}  # by sequence length


def profiled(rank: int, length: int, k: int) -> list[int]:
    """Sizes for equal cost, from the measured time of each eighth of the sequence: F and B, mean over stages."""
    if length not in _costs:
        step, engine = our_arm(rank, length, 2, PIECES, None)
        tracks = []
        for _ in range(5):
            step()
            tracks.append(engine.report(gather=True).segment_seconds)
        _costs[length] = [statistics.median(seconds) for seconds in zip(*tracks[1:], strict=True)]
    return seq1f1b.partition_sequence(length, k, strategy="profiled", costs=_costs[length], multiple_of=16)


def timed(step: Arm) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def compare(rank: int, pairs: int, a: Arm, b: Arm) -> Pairs:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    for step in (a, b, a, b):
        timed(step)
    result, load = Pairs(), ForeignLoad(pids)
    while len(result.a) < pairs and result.discarded < 2 * pairs:
        load.start()
        times = in_turn(partial(timed, a), partial(timed, b), flip=len(result.a) % 2 == 1)
        counted = [load.cores() < FOREIGN_LIMIT]
        dist.broadcast_object_list(counted, src=0)
        result.add(*times, counted[0])
    return result


def measure_speed(rank: int, pairs: int, only: str) -> None:
    for name, length, M, arm_a, arm_b, wanted in SPEED:
        if only not in name:
            continue
        result = compare(rank, pairs, make_arm(arm_a, rank, length, M), make_arm(arm_b, rank, length, M))
        if rank == 0:
            rate = M * length / statistics.median(result.b) if result.b else 0.0
            verdict = "unmeasured" if not result.measured else "passed" if result.ratio()[0] >= wanted else "FAILED"
            print(f"{result.describe(name)}; {rate:.0f} tokens/s; wanted {wanted}: {verdict}", flush=True)


def measure_attention(rank: int, pairs: int, only: str) -> None:
    """The same engine and order under torch's attention, in the form that is fastest here, and under ours."""
    length, M, k = 8192, 2, 8
    for dtype in (torch.float32, torch.bfloat16):
        name = f"S{length} M{M} k{k} {str(dtype).removeprefix('torch.')}"
        if only not in name:
            continue
        names = ("ours", "two calls", *torch_attention.WHOLE)
        arms = {a: our_arm(rank, length, M, k, None, attention=a, dtype=dtype) for a in names}
        losses = {a: step() for a, (step, _) in arms.items()}
        for a, loss in losses.items():
            if not abs(loss - losses["ours"]) <= 1e-3 * abs(loss):
                raise RuntimeError(f"{name}: loss {loss} with attention by {a}, {losses['ours']} with ours")
        seconds = {a: timed(step) for a, (step, _) in arms.items()}
        fastest = [min(names[1:], key=lambda a: seconds[a])]
        dist.broadcast_object_list(fastest, src=0)
        if rank == 0:
            print(f"{name}, seconds of a step: {', '.join(f'{a} {seconds[a]:.2f}' for a in names)}", flush=True)
        step, engine = arms["ours"]
        result = compare(rank, pairs, arms[fastest[0]][0], step)
        if rank == 0:
            theirs, ours = (M * length / statistics.median(x) if x else math.nan for x in (result.a, result.b))
            print(f"{result.describe(f'{name}, {fastest[0]} against ours')}; {theirs:.0f} against {ours:.0f} tokens/s")
        texts = ["", ""]
        dist.all_gather_object(texts, shares(step, engine, M * length, dtype))
        if rank == 0:
            print("\n".join(f"{name}, rank {r}: {text}" for r, text in enumerate(texts)), flush=True)


def shares(step: Arm, engine: seq1f1b.PipelineEngine, tokens: int, dtype: torch.dtype) -> str:
    """What takes the time of the units in a step, and how fast the linear layers are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    busy = engine.report().busy
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}
    linear = sum(seconds.get(f"aten::{op}", 0.0) for op in ("mm", "addmm"))
    attention = sum(s for op, s in seconds.items() if op.startswith("seq1f1b::segment_attention"))
    layers = [m for module in engine.modules() for m in module.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(m.weight.numel() for m in layers)
    rate, fma_bf16 = 6 * weights * tokens / linear, _core.attention_rates(0.1)  # 2 FLOPs in each of 3 products
    peak = fma_bf16[0] if dtype == torch.float32 else max(fma_bf16)
    return (
        f"units {busy:.2f} s: linear layers {linear / busy:.0%} ({rate / 1e9:.0f} GF/s, {rate / peak:.2f} of peak), "
        f"attention {attention / busy:.0%}, the rest {1 - (linear + attention) / busy:.0%}"
    )


def reset_peak() -> int:
    """Forgets the peak of resident memory; returns what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def measure_memory(rank: int, case: str) -> None:
    """Peak growth of one step over what is resident before it; each arm in processes of its own."""
    length, M = 8192, 2
    arm: object = "torch" if case == "torch" else (8, "even")
    step = make_arm(arm, rank, length, M, head_in_loss=case == "head")
    growth = []
    for _ in range(4):
        dist.barrier()
        before = reset_peak()
        step()
        growth.append((status_bytes("VmHWM") - before) / 2**20)
    first, growth = growth[0], growth[1:]
    gathered: list[list[float]] = [[], []]
    firsts: list[float] = [0.0, 0.0]
    dist.all_gather_object(gathered, growth)
    dist.all_gather_object(firsts, first)
    if rank == 0:
        # The first step also loads code and makes what stays; the largest of the later ones counts.
        text = ", ".join(f"rank {r}: {max(g):.0f} MB" for r, g in enumerate(gathered))
        print(f"{case}: {text}; in the first step {', '.join(f'{x:.0f}' for x in firsts)}")
        with open(os.environ["SEQ1F1B_MEMORY_RESULT"], "w") as file:
            file.write(str(max(max(g) for g in gathered)))


def worker(rank: int, store: str, fn: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    fn(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def spawn(fn: Callable[..., None], *arguments: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (f"{folder}/store", fn, arguments), nprocs=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--attention", action="store_true", help="torch's attention against ours, in our engine")
    parser.add_argument("--memory", action="store_true", help="peak growth of a step")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("Training steps, two processes of one thread"))
    if options.attention:  # freed memory stays: else eager attention spends its time in page faults
        os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
        spawn(measure_attention, options.pairs, options.only)
        return
    if not options.memory:
        spawn(measure_speed, options.pairs, options.only)
        return
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
    peaks = {}
    with tempfile.NamedTemporaryFile("r") as result:
        os.environ["SEQ1F1B_MEMORY_RESULT"] = result.name
        for case in ("torch", "ours", "head"):
            spawn(measure_memory, case)
            with open(result.name) as file:
                peaks[case] = float(file.read())
    for case, wanted in (("ours", 0.65), ("head", 0.60)):
        ratio = peaks[case] / peaks["torch"]
        print(
            f"{case}: {ratio:.3f} of 1F1B's peak growth; wanted {wanted}: {'passed' if ratio <= wanted else 'FAILED'}"
        )


if __name__ == "__main__":
    main()
