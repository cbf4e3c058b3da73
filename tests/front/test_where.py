"""Does the table of what runs where say what the engine does, and does the planner offer nothing else?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seq1f1b import HOST, LoopbackGroup, Memory, ModelShape, PipelineEngine, where
from seq1f1b.planning.hardware import load_hardware, presets
from seq1f1b.planning.search import search_plans
from seq1f1b.where import State

# What asks for a feature. Stages on the meta device stand for those on a GPU in what an engine refuses at once.
ASKS = {
    "steps": {},
    "recompute": {"memory": Memory("all")},
    "folder": {"memory": Memory(offload=".")},
    "host": {"memory": Memory(offload=HOST)},
    "times": {"schedule": "tuned"},
    "auto": {"transport": "auto"},
    "through host": {"transport": "shm"},
    "between gpus": {"transport": "copy"},
}


def engine(**options: Any) -> PipelineEngine:
    return PipelineEngine(nn.Linear(2, 2), num_microbatches=2, group=LoopbackGroup(1)[0], **options)


def test_the_table_is_walked_whole() -> None:
    assert set(ASKS) == set(where.ROWS)


@pytest.mark.parametrize("feature", where.ROWS)
def test_the_engine_refuses_on_the_cpu_what_the_table_does(feature: str) -> None:
    row = where.ROWS[feature]
    if row.cpu is State.REFUSED:
        with pytest.raises(ValueError, match="cpu"):
            engine(**ASKS[feature])
    else:
        made = engine(loss_fn=nn.functional.mse_loss, **ASKS[feature])
        made.step(torch.ones(2, 4, 2), target=torch.zeros(2, 4, 2))
        made.close()


@pytest.mark.parametrize("feature", [f for f in where.ROWS if where.ROWS[f].one_gpu is State.REFUSED])
def test_the_engine_refuses_on_a_gpu_what_the_table_does(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seq1f1b.engine.set_up.common_device", lambda modules: torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"this one is on cuda:0: give Memory\(offload=seq1f1b\.HOST\)"):
        engine(**ASKS[feature])


@pytest.mark.parametrize("feature", where.ROWS)
def test_states_agree_with_each_other(feature: str) -> None:
    """Nothing is verified on several GPUs, which nobody has had; what is refused anywhere says what to do."""
    row = where.ROWS[feature]
    assert row.several_gpus is not State.VERIFIED
    refused = State.REFUSED in (row.cpu, row.one_gpu, row.several_gpus)
    assert refused == bool(row.refusal) and (row.one_gpu is State.REFUSED) == (row.several_gpus is State.REFUSED)
    if refused:
        device = "cpu" if row.cpu is State.REFUSED else "cuda:0"
        with pytest.raises(ValueError, match=f"Option: .*on {device}: .*(give|use)"):
            where.check(feature, "Option", device)


def test_the_table_stands_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/limits.md").read_text()
    for cells in where.rows():
        assert f"| {' | '.join(cells)} |" in text


SHAPE = ModelShape(hidden=1024, layers=8, heads=8, kv_heads=8, ffn=4096, vocab=1000)
COUNTS = {"seq_len": 16384, "num_ranks": 4, "num_microbatches": 8, "segments": [4], "stages_per_rank": [1]}


def plan(machine: Any, cap: int, *remedies: str) -> Any:
    some = {"names": ["seq1f1b"], "inside": ["none"], "vocabulary": "ends", "best": 1}
    return search_plans(SHAPE, machine, **COUNTS, **some, memory=cap, remedies=remedies)


@pytest.mark.parametrize("name", presets("hardware"))
def test_plans_move_units_to_where_the_engine_takes_them(name: str) -> None:
    """And to host memory only as far as a node has it."""
    machine = load_hardware(name)
    cap = int(0.9 * max(plan(machine, 1 << 50).plans[0].peak))
    found = plan(machine, cap, "offload")
    assert any("L" in row for row in found.plans[0].units)
    assert found.tier is not None
    assert where.ROWS[found.tier].state(machine.device_type, is_several=True) is not State.REFUSED
    asked = "seq1f1b.HOST" if machine.device_type == "cuda" else "offload=FOLDER"
    assert asked in found.to_text("model")
    if machine.device_type == "cuda":
        small = replace(machine, host_memory=8.0)
        with pytest.raises(ValueError, match="nothing fits in"):
            plan(small, cap, "offload")
        again = plan(small, cap, "offload", "recompute").plans[0]
        assert any("R" in row for row in again.units) and not any("L" in row for row in again.units)
