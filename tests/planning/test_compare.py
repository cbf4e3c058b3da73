"""Does the comparison show the figures of the formulas, count messages and bytes, and say why a family is out?"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from core_extension import instructions_of

from seq1f1b import _C, build_schedule, schedules
from seq1f1b.families import families_named
from seq1f1b.plan import Layout
from seq1f1b.planning.compare import FamilyRow, compare
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.planning.search import search_plans
from seq1f1b.schedule import families

GPT = {"model": load_model("gpt-7b"), "hardware": load_hardware("a100"), "seq_len": 8}
COUNTS = {"num_ranks": 4, "num_microbatches": 8}


def row(name: str, **counts: Any) -> FamilyRow:
    (found,) = compare([name], **(COUNTS | counts)).rows
    return found


def test_known_figures() -> None:
    """P 4, M 8, F 1, B 2: 3 M + 3 (P - 1) / (v k) where the backward is whole, in (P - 1 + k) / k micro-batches."""
    plain, segmented = row("1f1b"), row("seq1f1b", num_segments=4)
    assert (plain.makespan, plain.span, plain.peak_units, plain.peak_microbatches) == (33, 33, 4, 4)
    assert (segmented.makespan, segmented.peak_units, segmented.peak_microbatches) == (26.25, 7, 1.75)
    assert (plain.messages, segmented.messages) == (3 * 8 * 2, 3 * 32 * 2)
    assert plain.bubble_ratio == 9 / 33
    assert (plain.period, row("zb-h2").period) == (plain.span, row("zb-h2").span)


def test_families_have_the_segments_and_stages_they_can() -> None:
    """zb-h1 cuts no segments and is no worse for it; zbv needs two stages; interleaving takes four where asked."""
    assert (row("zb-h1", num_segments=4).num_segments, row("zbv").stages_per_rank) == (1, 2)
    assert row("zb-h1", num_segments=4) == row("zb-h1")
    wide = row("seq1f1b-interleaved", num_segments=2, stages_per_rank=4)
    assert (wide.stages_per_rank, wide.num_segments, row("1f1b", stages_per_rank=4).stages_per_rank) == (4, 2, 1)


def test_all_families_are_there_once_fastest_first() -> None:
    table = compare(**COUNTS, num_segments=4)
    assert sorted([row.family for row in table.rows] + list(table.refused)) == sorted(schedules())
    assert [row.makespan for row in table.rows] == sorted(row.makespan for row in table.rows)


def test_messages_are_those_of_the_lowered_program() -> None:
    """Counted by walking the program, with the bytes of a model's messages."""
    model, sizes = {"model": load_model("gpt-7b"), "hardware": load_hardware("a100"), "seq_len": 16}, [10, 6]
    names = ["1f1b", "seq1f1b", "gpipe", "seq-zb-h1", "seq-zbv"]
    for found in compare(names, **COUNTS, num_segments=2, segment_sizes=sizes, **model).rows:
        counts = COUNTS | {"num_segments": found.num_segments, "stages_per_rank": found.stages_per_rank}
        order = build_schedule(found.family, **counts)
        program = _C.program_lower(order.handle, 1)
        assert found.messages == sum(num_messages for *_, num_messages in _C.program_edges(program)), found.family
        own = sizes if found.num_segments == 2 else [16]
        sent = sum(
            own[unit.segment]
            for rank in range(4)
            for opcode, _, unit, *_ in instructions_of(program, rank)
            if opcode == "SEND"
        )
        assert found.sent_bytes == 2 * 4096 * sent, found.family
        if "costs" not in families_named([found.family])[0].options:  # else the order depends on them
            assert found.peak_tokens == max(order.peak_tokens(own)), found.family


def test_what_is_left_out_says_why() -> None:
    table = compare(num_ranks=4, num_microbatches=2, cap_microbatches=2)
    assert table.refused["interleaved-1f1b"] == "needs M >= P"
    assert "gpipe" not in table.refused and all(row.peak_microbatches <= 2 for row in table.rows)
    capped = compare(["gpipe", "1f1b", "seq1f1b"], **COUNTS, num_segments=4, cap_microbatches=3)
    assert [row.family for row in capped.rows] == ["seq1f1b"]
    assert capped.refused["gpipe"] == "holds 8.00 micro-batches, the cap is 3"
    found = json.loads(capped.to_json())
    assert [FamilyRow(**each) for each in found["rows"]] == list(capped.rows) and found["refused"] == capped.refused
    rule = next(f for f in families() if f.name == "slimpipe").broken_rule(**COUNTS, num_segments=2)
    assert compare(**COUNTS, num_segments=2).refused["slimpipe"] == f"needs {rule}"


def test_auto_is_made_for_the_costs_and_the_cap() -> None:
    """It is no slower than any other family with as many stages that fits, under costs of long sequences."""
    costs = {"forward": 10.0, "backward": 24.0, "weight": 3.0, "transfer": 1.0}
    rows = {row.family: row for row in compare(**COUNTS, num_segments=2, cap_microbatches=4, **costs).rows}
    assert rows["auto"].peak_microbatches <= 4
    one_stage = [row for row in rows.values() if row.stages_per_rank == 1]
    assert rows["auto"].makespan <= min(row.makespan for row in one_stage) * (1 + 1e-9)


def test_a_model_costs_what_its_plan_says() -> None:
    """With the layers and segments of a plan: its seconds and its bytes."""
    model, hardware = load_model("qwen3-4b"), load_hardware("h100")
    for name in ("seq1f1b", "seq-zb-h1", "seq1f1b-interleaved"):
        (plan, *_) = search_plans(
            model, hardware, seq_len=8192, **COUNTS, names=[name], segments=[4], inside=["full"],
            optimizer_sync=False, vocabulary="ends",
        ).plans  # fmt: skip
        sizes = plan.segment_sizes
        found = row(
            name, num_segments=4, stages_per_rank=plan.stages_per_rank, model=model, hardware=hardware,
            layout=plan.layout, seq_len=8192, segment_sizes=sizes,
        )  # fmt: skip
        cost = CostModel(
            model, hardware, num_ranks=4, stages_per_rank=plan.stages_per_rank, seq_len=8192, layout=plan.layout
        )
        assert found.period == pytest.approx(plan.seconds, rel=1e-12)
        assert found.peak_bytes == max(plan.peak)
        assert found.period > found.makespan  # the optimizer
        per_message = sum(cost.price(sizes).message_bytes)
        assert found.sent_bytes == per_message * 8 * 2 * (4 * plan.stages_per_rank - 1)


def test_a_model_of_few_layers_and_a_cap() -> None:
    shape = load_model("qwen3-4b")._replace(layers=6)
    given = {"model": shape, "hardware": load_hardware("h100"), "seq_len": 4096}
    table = compare(["1f1b", "seq-zbv", "seq1f1b-interleaved", "seq-zb-h1"], **COUNTS, num_segments=2, **given)
    assert table.refused == dict.fromkeys(
        ("seq-zbv", "seq1f1b-interleaved"), "needs P v <= 6 layers: here P = 4, v = 2"
    )
    least = min(found.peak_bytes for found in table.rows)
    capped = compare(["1f1b", "seq-zb-h1"], **COUNTS, num_segments=2, **given, cap_bytes=least)
    assert [found.peak_bytes for found in capped.rows] == [least] and len(capped.refused) == 1
    gib = f"{math.ceil(least / 2**30 * 10) / 10:.1f} GiB"
    with pytest.raises(ValueError, match=rf"no family fits the cap of {gib}; the least possible is {gib}, of .*inside"):
        compare(["1f1b", "seq-zb-h1"], **COUNTS, num_segments=2, **given, cap_bytes=least - 1)


@pytest.mark.parametrize(("model", "ranks", "length"), [("qwen3-4b", 4, 65536), ("gpt-7b", 8, 32768)])
def test_the_least_is_one_for_all_caps_and_fits_as_a_cap(model: str, ranks: int, length: int) -> None:
    given: Any = {"model": load_model(model), "hardware": load_hardware("h100"), "seq_len": length}
    given |= {"num_ranks": ranks, "num_microbatches": 8, "num_segments": 4, "names": ["seq1f1b", "auto", "seq-v-min"]}
    told = set()
    for gib in (10, 14, 18):
        with pytest.raises(ValueError, match="the least possible is") as error:
            compare(**given, cap_bytes=gib * 2**30)
        told.add(re.findall(r"the least possible is ([\d.]+) GiB", str(error.value))[0])
    least = math.ceil(float(told.pop()) * 2**30)
    rows = compare(**given, cap_bytes=least).rows
    assert not told and least - 0.1 * 2**30 <= rows[0].peak_bytes <= least and len(rows) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ["seq1fb1"]}, r"no schedule named 'seq1fb1'; did you mean 'seq1f1b'\?"),
        ({"num_ranks": 0}, "num_ranks is 0, must be at least 1"),
        ({"num_ranks": 2**40}, "num_ranks is 1099511627776, must be in 1..2147483647"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0, must be at least 1"),
        ({"forward": float("nan")}, "is nan, must be finite and at least 0"),
        ({"weight": 3.0}, "weight is more than backward, of which it is a part"),
        ({"segment_sizes": [1]}, "segment_sizes and cap_bytes are of a model: give model, hardware and seq_len"),
        (GPT | {"segment_sizes": [4, 4]}, "segment_sizes holds 2 values, must hold 1"),
        (GPT | {"segment_sizes": [0]}, "segment 0 has 0 tokens, must have at least 1"),
        ({"model": load_model("gpt-7b")}, "a model's costs need hardware and seq_len"),
        (GPT | {"segment_sizes": [9]}, "segment sizes sum to 9, the sequence has 8 tokens"),
        (GPT | {"layout": Layout(vocabulary="ranks")}, "vocabulary is 'ranks', must be 'ends'"),
        (GPT | {"seq_len": 0}, "seq_len is 0, must be at least 1"),
        (GPT | {"num_ranks": 64, "num_microbatches": 64}, "no family can be built: .* P v <= 32 layers"),
        ({"cap_bytes": 8}, "segment_sizes and cap_bytes are of a model"),
        ({"cap_microbatches": float("nan")}, "cap_microbatches is nan, must be above 0"),
        ({"names": ["1f1b", "gpipe"], "cap_microbatches": 2}, "the least possible is 4.00 micro-batches, of 1f1b"),
        ({"names": ["zbv"], "num_microbatches": 2}, "no family can be built: zbv needs "),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(**(COUNTS | arguments))
