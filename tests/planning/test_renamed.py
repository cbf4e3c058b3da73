"""Does an old module or option of the planner say what there is now, and is a plan of 1.0.0rc1 read?"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from seq1f1b import ModelShape
from seq1f1b.__main__ import main
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.search import search_plans

SHAPE = ModelShape(hidden=64, layers=4, heads=4, kv_heads=2, ffn=96, vocab=50)
COUNTS: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 2, "seq_len": 64, "names": ["seq1f1b"], "segments": [2]}


def test_a_module_that_has_gone_names_what_there_is() -> None:
    with pytest.raises(ImportError, match=r"seq1f1b.planning.row_costs of 1.0.0rc1 is CostModel.price_rows"):
        importlib.import_module("seq1f1b.planning.row_costs")


def test_old_options_of_commands_name_the_new_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for line, now in (
        ("plan --model gpt-2.7b --seq 4096 --ranks 2 --microbatches 2 --recompute none", "--inside"),
        ("compare --recompute full", "--inside"),
        ("draw 1f1b --recompute units", "--recompute all"),
        ("simulate 1f1b --recompute ffn", "--inside ffn"),
    ):
        with pytest.raises(SystemExit):
            main(line.split())
        assert f"{now}" in capsys.readouterr().err


def test_a_plan_of_rc1_is_read() -> None:
    plan = search_plans(SHAPE, load_hardware("h100"), inside=["full"], **COUNTS).plans[0]
    told = json.loads(plan.to_json())
    told["layout"]["recompute"] = told["layout"].pop("inside")
    assert Plan.from_json(json.dumps(told)) == Plan.from_json(plan.to_json())
    told["layout"]["inside"] = "full"
    with pytest.raises(ValueError, match=r"unknown fields \['recompute'\]"):
        Plan.from_json(json.dumps(told))


def test_a_vocabulary_over_the_ranks_can_be_asked_for() -> None:
    machine = load_hardware("h100")
    for wanted in ("ends", "ranks"):
        plans = search_plans(SHAPE, machine, vocabulary=wanted, **COUNTS).plans
        assert {plan.layout.vocabulary for plan in plans} == {wanted}
    with pytest.raises(ValueError, match="needs a vocabulary, and has its loss in its shards"):
        search_plans(SHAPE, machine, vocabulary="ranks", layout=Layout(head_in_loss=False), **COUNTS)
    with pytest.raises(ValueError, match="vocabulary is 'whole', must be one of any, ends, ranks"):
        search_plans(SHAPE, machine, vocabulary="whole", **COUNTS)
