"""Does the table of what runs where, in the docs, say what the engine does, and does the planner offer nothing else?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seq1f1b import HOST, LoopbackGroup, Memory, ModelShape, PipelineEngine, where
from seq1f1b.planning.hardware import load_hardware, presets
from seq1f1b.planning.search import search_plans

# What asks for a feature, by the beginning of its row in the docs.
ASKS = {
    "training and evaluation": {},
    "`Memory(recompute=)`": {"memory": Memory("all")},
    "`Memory(offload=FOLDER)`": {"memory": Memory(offload=".")},
    "`Memory(offload=seq1f1b.HOST)`": {"memory": Memory(offload=HOST)},
    '`engine.report()`, `schedule="tuned"`': {"schedule": "tuned"},
    "messages by what is there": {"transport": "auto"},
    "messages through host memory": {"transport": "shm"},
    "messages that stay on GPUs": {"transport": "copy"},
}
ROWS = re.findall(
    r"^\| (.*) \| (verified|rehearsed|refused) \| (\w+) \| (\w+) \|$",
    (Path(__file__).parents[2] / "docs/limits.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def engine(**options: Any) -> PipelineEngine:
    return PipelineEngine(nn.Linear(2, 2), num_microbatches=2, group=LoopbackGroup(1)[0], **options)


def test_the_table_is_walked_whole() -> None:
    assert [[asked for asked in ASKS if row[0].startswith(asked)] for row in ROWS] == [[asked] for asked in ASKS]


@pytest.mark.parametrize(("row", "asked"), list(zip(ROWS, ASKS.values(), strict=True)), ids=list(ASKS))
def test_the_engine_refuses_what_the_table_does(row: tuple[str, ...], asked: Any, monkeypatch: Any) -> None:
    """Nothing is verified on several GPUs, which nobody has had."""
    _, cpu, one_gpu, several = row
    assert several != "verified" and (one_gpu == "refused") == (several == "refused")
    if cpu == "refused":
        with pytest.raises(ValueError, match="cpu"):
            engine(**asked)
    else:
        made = engine(loss_fn=nn.functional.mse_loss, **asked)
        made.step(torch.ones(2, 4, 2), target=torch.zeros(2, 4, 2))
        made.close()
    if one_gpu == "refused":
        monkeypatch.setattr("seq1f1b.engine.set_up.common_device", lambda modules: torch.device("cuda", 0))
        with pytest.raises(ValueError, match=r"this one is on cuda:0: give Memory\(offload=seq1f1b\.HOST\)"):
            engine(**asked)


def test_a_tier_refuses_other_devices() -> None:
    for tier, device in (("folder", "cuda:0"), ("host", "cpu")):
        with pytest.raises(ValueError, match=f"^Option: .*on {device}: give Memory"):
            where.check(tier, "Option", device)


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
    where.check("host" if machine.host_memory else "folder", "offload", machine.device_type)
    asked = "seq1f1b.HOST" if machine.device_type == "cuda" else 'offload="FOLDER"'
    assert asked in found.to_text("model")
    if machine.device_type == "cuda":
        small = replace(machine, host_memory=8.0)
        with pytest.raises(ValueError, match="nothing fits in"):
            plan(small, cap, "offload")
        again = plan(small, cap, "offload", "recompute").plans[0]
        assert any("R" in row for row in again.units) and not any("L" in row for row in again.units)
