"""A tuned engine beside the order that it began with, one process of two threads, DDP, and torch's schedules.

Two processes of one thread each, fp32, the model of the other benchmarks. The engine is tuned first, over as many steps
as it takes. Then rounds of one step of every arm, in turn and back; a step counts while other processes use less than
8 % of a core. "One process" runs the whole model with the same attention and two threads, while the other rank sleeps.
"DDP" runs it on both ranks, each on half of the micro-batches; gradients are reduced in the last backward.

    python benchmarks/tuning.py
    python benchmarks/tuning.py --case 8192 2 --rounds 12
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from arms import Arm, Case, EngineArm, Spec, check_arm, make_arm, take_rounds, whole_model
from common import KEPT_HEAP, Records, header, parser_of, spawn
from decoder import cross_entropy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import seq1f1b

CASES = ((2048, 4), (4096, 4), (8192, 2))  # tokens, micro-batches
WHOLE, DDP, TUNED, FIRST = "one process, two threads", "DDP, two processes", "tuned", "as it began"
MOST_STEPS = 100


class Whole(Arm):
    """The whole model on rank 0, with two threads."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._is_here = case, rank == 0
        self.modules = [case.stage(0, 1, "ours")] if self._is_here else []

    def step(self) -> float | None:
        if not self._is_here:
            return None
        torch.set_num_threads(2)
        losses = []
        for x, y in zip(*(each.split(1) for each in self._case.batch()), strict=True):
            loss = cross_entropy(self.modules[0](x), y)
            (loss / self._case.microbatches).backward()
            losses.append(float(loss.detach()))
        torch.set_num_threads(1)
        return statistics.mean(losses)


class Replica(Arm):
    """The whole model under DDP; micro-batches in turn are one replica's and the other's."""

    def __init__(self, case: Case, rank: int) -> None:
        self.modules = [case.stage(0, 1, "ours")]
        self._ddp, self._is_first = DistributedDataParallel(self.modules[0]), rank == 0
        self._own = list(zip(*(each.split(1)[rank :: case.ranks] for each in case.batch()), strict=True))

    def step(self) -> float | None:
        losses = []
        for number, (x, y) in enumerate(self._own, 1):
            with nullcontext() if number == len(self._own) else self._ddp.no_sync():
                loss = cross_entropy(self._ddp(x), y)
                (loss / len(self._own)).backward()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean() / dist.get_world_size()
        dist.all_reduce(mean)  # one number, in a step of seconds
        return float(mean)

    def gradients(self) -> dict[str, Tensor]:
        return super().gradients() if self._is_first else {}


def engine_arm(case: Case, rank: int, schedule: str) -> EngineArm:
    stage = case.stage(rank, case.ranks, "ours")
    engine = seq1f1b.PipelineEngine(
        stage, schedule=schedule, num_microbatches=case.microbatches, num_segments=4, loss_fn=cross_entropy
    )
    return EngineArm([stage], engine, case.batch())


def tune(arm: EngineArm) -> str:
    """Steps until an order is found. Returns what was."""
    for _ in range(MOST_STEPS):
        arm.step()
        arm.zero_grad()
        report = arm.engine.report(gather=True)
        if report.is_tuned:
            return str(report.tuning)
    raise RuntimeError(f"no order was found in {MOST_STEPS} steps")


def measure(rank: int, length: int, microbatches: int, rounds: int, limit: float, path: str) -> None:
    case = Case(length, microbatches)
    tuned = engine_arm(case, rank, "tuned")
    arms: dict[str, Arm] = {
        WHOLE: Whole(case, rank),
        DDP: Replica(case, rank),
        FIRST: engine_arm(case, rank, "seq1f1b"),
        TUNED: tuned,
        "torch 1F1B": make_arm(case, Spec("1F1B", "torch"), rank),
        "torch ZBV": make_arm(case, Spec("ZBVZeroBubble", "torch"), rank),
    }
    truth = whole_model(case) if rank == 0 else None
    text = tune(tuned)
    found = {name: check_arm(arm, name, truth).get("gradient_error") for name, arm in arms.items()}
    results = Records(path, limit)
    take_rounds(arms, results, rounds)
    report = tuned.engine.report(gather=True)
    if not report.is_tuned:
        raise RuntimeError(f"the tuned engine has begun to search again: {report.tuning}")
    if rank == 0:
        print(f"\n{case}: {text}")
        print(f"errors of gradients: {', '.join(f'{name} {error:.1e}' for name, error in found.items())}")
        for name in arms:
            seconds = [step[0] for step in results.counted(name)[0]]
            line = f"  {name:26} {statistics.median(seconds or [math.nan]):.4f} s, {len(seconds)} steps"
            for other in (WHOLE, "torch 1F1B", "torch ZBV"):
                ratio = results.pairs(other, name).ratio()[0]
                line += f"  {ratio:.3f} of {other}'s speed" * (name != other)
            print(line)
        print(report, flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--case", type=int, nargs=2, action="append", metavar=("TOKENS", "M"))
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("A tuned engine beside one process, DDP and torch's schedules"))
    os.environ |= KEPT_HEAP
    for length, microbatches in options.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            spawn(2, measure, length, microbatches, options.rounds, options.foreign, f"{folder}/results")


if __name__ == "__main__":
    main()
