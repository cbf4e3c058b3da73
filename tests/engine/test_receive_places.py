"""Does an engine have the places that its order counts, and does a saved report keep how many there were?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import seq1f1b
from seq1f1b import Costs, Links, build_schedule
from seq1f1b.report.report import PipelineReport
from seq1f1b.schedule import StepMemory
from seq1f1b.testing import run_ranks


def test_an_interleaved_engine_has_the_places_with_which_no_rank_waits(tmp_path: Path) -> None:
    """P 4, M 4, k 8, v 2: one place beyond those that are needed at once would make the step 1.1 times as long."""
    counts = {"num_microbatches": 4, "num_segments": 8}

    def run(group: Any) -> Any:
        engine = seq1f1b.PipelineEngine(
            [nn.Linear(2, 2) for _ in range(2)],
            schedule="seq1f1b-interleaved",
            loss_fn=nn.functional.mse_loss,
            group=group,
            **counts,
        )
        x = torch.ones(4, 8, 2)
        engine.step(x, target=x)
        return engine.report(gather=True)

    report = run_ranks(4, run)[0]
    order = report.simulated.schedule
    held = order.peak_memory(StepMemory(), Costs(links=Links(message_bytes=1))).receive
    assert tuple(rank.receive_places for rank in report.ranks) == held and sum(held) == sum(order.places)
    few = build_schedule("seq1f1b-interleaved", num_ranks=4, stages_per_rank=2, **counts)
    assert few.replace(prefetch=1).simulate().makespan > 1.1 * few.simulate().makespan
    assert few.simulate().makespan <= 1.05 * few.replace(prefetch=32).simulate().makespan
    durations = [[end - start for _, start, end in rank.timeline] for rank in report.ranks]
    slow = replace(report, simulated=order.replace(prefetch=1).simulate(durations=durations))
    for each in (slow, report):
        each.save(tmp_path / "steps.jsonl")
        loaded = PipelineReport.load(tmp_path / "steps.jsonl").simulated
        assert (loaded.schedule, loaded.makespan) == (each.simulated.schedule, each.simulated.makespan)
