"""Does an engine have the places that its order counts, and does no rank wait for one?"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import seq1f1b
from seq1f1b import Costs, Links, build_schedule
from seq1f1b.report.report import PipelineReport
from seq1f1b.schedule import StepMemory
from seq1f1b.testing import run_ranks


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(2 * ctx.seconds)
        return gradient * ctx.saved_tensors[0], None, None


class Sleeper(nn.Module):
    """A stage whose forward sleeps, and its backward twice as long: as many ranks as one likes share a core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(2)), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self.seconds)


def loss(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return y.sum(), y.numel()


def test_an_interleaved_step_is_as_fast_as_with_a_place_for_every_message(tmp_path: Path) -> None:
    """P 4, M 4, k 8, v 2: one place beyond those that are needed at once would make the step 1.12 times as long."""
    P, M, k, v = 4, 4, 8, 2

    def run(group: Any) -> list[Any]:
        engine = seq1f1b.PipelineEngine(
            [Sleeper(0.004) for _ in range(v)],
            schedule="seq1f1b-interleaved",
            num_microbatches=M,
            num_segments=k,
            loss_fn=loss,
            group=group,
        )
        x = torch.ones(M, k, 2)
        reports = []
        for _ in range(3):
            engine.step(x, target=x)
            reports.append(engine.report(gather=True))
        return reports

    shares = []
    for report in run_ranks(P, run)[0]:
        order = report.simulated.schedule
        durations = [[end - start for _, start, end in rank.timeline] for rank in report.ranks]
        held = order.peak_memory(StepMemory(), Costs(links=Links(message_bytes=1))).receive
        assert tuple(rank.receive_places for rank in report.ranks) == held and sum(held) == sum(order.places)
        shares.append(report.makespan / order.replace(prefetch=M * k).simulate(durations=durations).makespan)
        assert report.simulated.makespan <= report.makespan
    assert min(shares) <= 1.05
    slow = replace(report, simulated=order.replace(prefetch=1).simulate(durations=durations))
    for each in (slow, report):
        each.save(tmp_path / "steps.jsonl")
        loaded = PipelineReport.load(tmp_path / "steps.jsonl").simulated
        assert (loaded.schedule, loaded.makespan) == (each.simulated.schedule, each.simulated.makespan)
    assert slow.simulated.makespan > report.simulated.makespan
    few = build_schedule("seq1f1b-interleaved", num_ranks=P, num_microbatches=M, num_segments=k, stages_per_rank=v)
    assert few.replace(prefetch=1).simulate().makespan > 1.1 * few.simulate().makespan
