"""Are files that 1.0.0rc1 wrote still read, and do they say what they said?

tests/front/rc1 holds one or more of each kind, written by that version, and in expected.json what that version read in
them: digests of orders, receive places, the splits of sequences, times, and losses of the steps after a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from seq1f1b import PipelineEngine, PipelineState, Schedule
from seq1f1b.plan import TunedOrder, load_plan
from seq1f1b.planning.profile import Profile
from seq1f1b.runtime.report import PipelineReport
from seq1f1b.testing import run_ranks

FILES = Path(__file__).with_name("rc1")
EXPECTED = json.loads((FILES / "expected.json").read_text())


def test_every_file_is_read_by_a_test_here() -> None:
    assert {path.stem for path in FILES.iterdir()} - {"expected"} == {name.partition(".")[0] for name in EXPECTED}


@pytest.mark.parametrize("name", ["plan-units", "plan-mix", "plan-vocabulary"])
def test_plans(name: str) -> None:
    digest, places, microbatches, segments, sizes = EXPECTED[name]
    given = load_plan(FILES / f"{name}.json").engine_arguments()
    assert (given["schedule"].digest, list(given["schedule"].places)) == (digest, places)
    assert (given["num_microbatches"], given["num_segments"]) == (microbatches, segments)
    found = given["segment_sizes"]
    assert ([[length, of] for length, of in found.items()] if isinstance(found, dict) else found) == sizes


def test_a_plan_that_recomputes_inside_of_blocks() -> None:
    plan = load_plan(FILES / "plan-ffn.json")
    order = plan.build()
    assert [order.digest, list(order.places)] == EXPECTED["plan-ffn"]
    with pytest.raises(ValueError, match="'ffn'"):
        plan.engine_arguments()


def test_a_tuned_order() -> None:
    found = load_plan(FILES / "tuned.json")
    assert isinstance(found, TunedOrder)
    assert [found.build().digest, found.engine_arguments()["segment_sizes"]] == EXPECTED["tuned"]


def test_orders_as_text_and_csv() -> None:
    assert Schedule.from_text((FILES / "order.txt").read_text()).digest == EXPECTED["order.txt"]
    csv = (FILES / "order.csv").read_text()
    assert Schedule.from_csv(csv, num_segments=2).digest == EXPECTED["order.csv"]


def test_a_profile() -> None:
    profile = Profile.load(FILES / "profile.json")
    costs, spread = EXPECTED["profile"]
    assert profile.piece_costs(128, 4) == pytest.approx(costs, rel=1e-12)
    assert profile.spread("forward") == spread


def test_a_report() -> None:
    report = PipelineReport.load(FILES / "report.jsonl")
    scalars, digest, makespan = EXPECTED["report"]
    assert report.scalars() == pytest.approx(scalars, rel=1e-12)
    assert report.simulated.schedule.digest == digest
    assert report.simulated.makespan == pytest.approx(makespan, rel=1e-12)


class Stage(nn.Module):
    """One layer of the model that was saved, under the name that it has there."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Linear(3, 3, bias=False, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule(self.name)(x)
        return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_goes_on() -> None:
    """One rank with both layers saved it; two ranks go on."""
    numbers = torch.Generator().manual_seed(1)
    inputs, target = (torch.randn(4, 8, 3, dtype=torch.float64, generator=numbers) for _ in range(2))

    def go_on(group: Any) -> list[list[float]]:
        engine = PipelineEngine(
            Stage(("first", "second")[group.rank]),
            num_microbatches=2,
            num_segments=2,
            loss_fn=nn.functional.mse_loss,
            group=group,
        )
        optimizer = torch.optim.AdamW(engine.named_parameters(), lr=0.5, weight_decay=0.0)  # the file has others
        state = PipelineState(engine, optimizer)
        dcp.load({"train": state}, checkpoint_id=FILES / "checkpoint", no_dist=True)
        losses = []
        for _ in range(2):
            losses.append([float(loss) for loss in engine.step(inputs, target=target)])
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
        return losses

    assert run_ranks(2, go_on)[1] == [pytest.approx(each, rel=1e-12) for each in EXPECTED["checkpoint"]]
