"""A tuned engine beside the order that it began with, one process of two threads, DDP, and torch's schedules.

Two processes of one thread each, fp32, the model of the other benchmarks. The engine is tuned first, over as many steps
as it takes. Then rounds of one step of every arm, in turn and back; a round counts while other processes use less than
8 % of a core. "One process" runs the whole model with the same attention and two threads, while the other rank sleeps.
"DDP" runs it on both ranks, each on half of the micro-batches; gradients are reduced in the last backward.

    python benchmarks/tuning.py
    python benchmarks/tuning.py --case 8192 2 --rounds 12
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from arms import Arm, Case, Spec, errors, make_arm, timed, whole_model
from common import FOREIGN_LIMIT, KEPT_HEAP, ForeignLoad, header, spawn
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
            losses.append(float(loss.detach()))
        return statistics.mean(losses)

    def gradients(self) -> dict[str, Tensor]:
        return super().gradients() if self._is_first else {}


class Engine(Arm):
    """Ours, whose order is found while it trains, or stays as it began."""

    def __init__(self, case: Case, rank: int, *, tuned: bool) -> None:
        self.modules = [case.stage(rank, case.ranks, "ours")]
        self.engine = seq1f1b.PipelineEngine(
            self.modules[0], schedule="tuned" if tuned else "seq1f1b", num_microbatches=case.microbatches,
            num_segments=4, loss_fn=cross_entropy,
        )  # fmt: skip
        self._tokens, self._targets = case.batch()

    def step(self) -> float | None:
        losses = self.engine.step(self._tokens, target=self._targets)
        return float(torch.stack(losses).mean()) if losses else None

    def tune(self) -> str:
        """Steps until an order is found. Returns what was."""
        for _ in range(MOST_STEPS):
            self.step()
            self.zero_grad()
            report = self.engine.report(gather=True)
            if report.is_tuned:
                return str(report.tuning)
        raise RuntimeError(f"no order was found in {MOST_STEPS} steps")


def measure(rank: int, length: int, microbatches: int, rounds: int, limit: float) -> None:
    case = Case(length, microbatches)
    arms: dict[str, Arm] = {
        WHOLE: Whole(case, rank),
        DDP: Replica(case, rank),
        FIRST: Engine(case, rank, tuned=False),
        TUNED: Engine(case, rank, tuned=True),
        "torch 1F1B": make_arm(case, Spec("1F1B", "torch"), rank),
        "torch ZBV": make_arm(case, Spec("ZBVZeroBubble", "torch"), rank),
    }
    truth = whole_model(case) if rank == 0 else None
    found = {name: [errors(arm, rank, truth)[2]] for name, arm in arms.items()}
    tuned = arms[TUNED]
    assert isinstance(tuned, Engine)
    text = tuned.tune()
    found[TUNED].append(errors(tuned, rank, truth)[2])
    pids: list[Any] = [None] * case.ranks
    dist.all_gather_object(pids, os.getpid())
    load, counted, discarded = ForeignLoad(pids), [], 0
    for turn in range(3 * rounds):
        load.start()
        steps = {name: timed(arm) for name, arm in list(arms.items())[:: -1 if turn % 2 else 1]}
        quiet = [load.cores() < limit]
        dist.broadcast_object_list(quiet)
        if quiet[0] and turn > 0:
            counted.append(steps)
        discarded += not quiet[0]
        if len(counted) == rounds:
            break
    report = tuned.engine.report(gather=True)
    if not report.is_tuned:
        raise RuntimeError(f"the tuned engine has begun to search again: {report.tuning}")
    if rank == 0 and not counted:
        print(f"\n{case}: UNMEASURED: others used the cores in {discarded} rounds\n{text}", flush=True)
    elif rank == 0:
        print(f"\n{case}: {len(counted)} rounds, {discarded} discarded\n{text}")
        print(f"errors of gradients: {', '.join(f'{n} {max(e):.1e}' for n, e in found.items())}")
        for name in arms:
            seconds = sorted(steps[name] for steps in counted)
            low, high = seconds[len(seconds) // 4], seconds[-1 - len(seconds) // 4]
            line = f"  {name:26} {statistics.median(seconds):.4f} s [{low:.4f}, {high:.4f}]"
            for other in (WHOLE, "torch 1F1B", "torch ZBV"):
                ratio = statistics.median(steps[other] / steps[name] for steps in counted)
                line += f"  {ratio:.3f} of {other}'s speed" * (name != other)
            print(line)
        print(report, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, nargs=2, action="append", metavar=("TOKENS", "M"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("A tuned engine beside one process, DDP and torch's schedules"))
    os.environ |= KEPT_HEAP
    for length, microbatches in options.case or CASES:
        spawn(2, measure, length, microbatches, options.rounds, options.foreign)


if __name__ == "__main__":
    main()
