"""Does a plan of a step hold every token once, and keep its segments equal and small?"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import Config, cross_entropy, stage_of, whole_model

from seq1f1b import ModelShape, PipelineEngine, ScheduleError, build_schedule
from seq1f1b.data import TreeShape
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel, PackedRow
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step, share_documents
from seq1f1b.seconds import spans_of
from seq1f1b.testing import run_ranks

MODEL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=1000)


def cost_of(num_ranks: int, *, stages_per_rank: int = 1, machine: str = "cpu-zen5") -> CostModel:
    counts = {"num_ranks": num_ranks, "stages_per_rank": stages_per_rank, "seq_len": 64}
    return CostModel(MODEL, load_hardware(machine), **counts)


def row_of(plan: StepPlan, index: int) -> PackedRow:
    return PackedRow(tuple(plan.lengths[i] for i in plan.rows[index]), plan.segment_sizes[index])


def test_units_take_the_same_time() -> None:
    """Documents of all lengths: no unit takes much more than the mean, and few take much less."""
    rng = random.Random(2)
    for _ in range(50):
        lengths = [max(1, min(16384, int(rng.lognormvariate(6.0, 1.5)))) for _ in range(300)]
        cost = cost_of(2)
        plan = plan_step(lengths, cost)
        units = []
        for index in range(len(plan.rows)):
            row = row_of(plan, index)
            seconds = cost.parts.layer(spans_of(row.sizes, row.documents))
            units += (seconds.forward + seconds.backward).tolist()
        mean = sum(units) / len(units)
        assert max(units) < 1.15 * mean
        assert sum(unit > 0.85 * mean for unit in units) > 0.8 * len(units)


def test_costs_of_rows_are_those_of_each_row_alone() -> None:
    rng = random.Random(3)
    for machine in ("cpu-zen5", "h100"):
        cost = cost_of(2, stages_per_rank=2, machine=machine)
        plan = plan_step([rng.randint(1, 900) for _ in range(40)], cost, unit_tokens=200, schedule="seq-zbv")
        found, messages = plan.costs.seconds, plan.costs.message_bytes
        memory = plan.costs.memory(plan.schedule.rank_of_stage)
        ends = np.cumsum([len(sizes) for sizes in plan.segment_sizes])
        for index in range(len(plan.rows)):
            row = row_of(plan, index)
            counts = {"num_ranks": 2, "stages_per_rank": 2, "seq_len": sum(row.documents)}
            alone = CostModel(MODEL, load_hardware(machine), **counts, layout=Layout(documents=row.documents))
            own = slice(ends[index] - len(row.sizes), ends[index])
            assert np.array_equal(np.array(found)[..., own], alone.price(row.sizes).seconds)
            assert np.array_equal(messages[own], alone.price(row.sizes).message_bytes)
            by_itself = alone.price(row.sizes).memory(plan.schedule.rank_of_stage)
            assert np.array_equal(memory.activations[:, own], by_itself.activations)
            assert np.array_equal(memory.staying[:, own], by_itself.staying)
            assert [any(units) for units in by_itself.staying] == [
                False,
                False,
                True,
                True,
            ]  # seq-zbv: ranks 0, 1, 1, 0
        longest = max(sum(sizes) for sizes in plan.segment_sizes)
        counts = {"num_ranks": 2, "stages_per_rank": 2, "seq_len": longest}
        zbv = build_schedule("zbv", num_ranks=2, num_microbatches=4, stages_per_rank=2)
        static = CostModel(MODEL, load_hardware(machine), **counts).price([longest]).rank_bytes(zbv)
        assert [rank.static for rank in plan.ranks] == [rank.static for rank in static]


def test_memory_decides_what_is_recomputed() -> None:
    """Less memory: more units recompute, never above the budget; below the least a budget is refused with the least."""
    rng = random.Random(4)
    lengths = [8000, *(max(1, min(8000, int(rng.lognormvariate(5.5, 1.3)))) for _ in range(200))]
    cost = cost_of(2)
    own = partial(plan_step, lengths, cost, schedule="seq1f1b")
    free = plan_step(lengths, cost)
    most = max(rank.total for rank in free.ranks)
    with pytest.raises(ValueError, match="the smallest budget that does is") as refused:
        own(memory=1)
    least = int(re.findall(r"is ([0-9,]+) bytes", str(refused.value))[0].replace(",", ""))
    assert least < most
    before, faster = 0.0, 0
    for share in (1.0, 0.6, 0.3, 0.0):
        budget = least + share * (most - least)
        plan, free_to_search = own(memory=budget), plan_step(lengths, cost, memory=budget)
        assert max(rank.total for rank in (*plan.ranks, *free_to_search.ranks)) <= budget
        assert free_to_search.seconds <= plan.seconds
        assert plan.seconds >= before * (1 - 1e-9)
        assert (plan.remedied > 0) == (share < 1.0)
        before = plan.seconds
        faster += free_to_search.seconds < 0.998 * plan.seconds
    assert faster >= 2, "another order gains where units gave way"
    moved = own(memory=least + 0.3 * (most - least), remedies=("recompute", "offload"))
    assert any("L" in row for row in moved.schedule.cell_kinds())


def test_replicas_get_equal_work() -> None:
    rng, cost = random.Random(5), cost_of(2)
    for replicas in (1, 2, 4, 7):
        lengths: list[Any] = [max(1, min(4000, int(rng.lognormvariate(5.5, 1.3)))) for _ in range(200)]
        trees = [TreeShape.of_prompt(rng.randint(1, 900), [rng.randint(1, 300) for _ in range(4)]) for _ in range(50)]
        shares = share_documents([*lengths, *trees], replicas, cost)
        assert sorted(itertools.chain.from_iterable(shares)) == list(range(250))
        alone = [MODEL.flops(0, length) for length in lengths]
        for tree in trees:
            nodes = zip(tree.begins, tree.sizes, strict=True)
            alone.append(sum(MODEL.flops(begin, begin + size) for begin, size in nodes))
        work = [sum(alone[i] for i in share) for share in shares]
        assert max(work) < 1.05 * min(work)
    with pytest.raises(ValueError, match="2 documents are too few for 3 replicas"):
        share_documents([4, 5], 3, cost)
    with pytest.raises(ValueError, match="num_replicas is 0, must be at least 1"):
        share_documents([4, 5], 0, cost)


def step_with(plans: list[Any]) -> None:
    """A step of two ranks, each with its own plan."""
    config = Config()

    def run(group: Any) -> None:
        stage = stage_of(whole_model(config), config, group.rank, 2)
        with contextlib.closing(
            PipelineEngine(stage, num_microbatches=2, loss_fn=cross_entropy, group=group)
        ) as engine:
            rows = [torch.zeros(1, sum(sizes), dtype=torch.int64) for sizes in plans[0].segment_sizes]
            engine.step(rows, target=rows, plan=plans[group.rank])

    run_ranks(2, run)


def test_ranks_with_different_plans_say_so() -> None:
    cost = cost_of(2)
    plans = [plan_step([9, 9, 9], cost, unit_tokens=9) for _ in range(2)]
    step_with(plans)
    swapped = dataclasses.replace(plans[1], rows=tuple(reversed(plans[1].rows)))
    with pytest.raises(ValueError, match=r"plan differs between the ranks of the pipeline: \w{16} on rank 0; \w{16}"):
        step_with([plans[0], swapped])


def test_a_plan_for_another_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the plan is for \(ranks, ranks of the stages\) = \(3, .* the engine has"):
        step_with([plan_step([9, 9], cost_of(3))] * 2)
    plan = plan_step([64, 64], cost_of(2))
    with pytest.raises(ValueError, match="the plan's rows have"):
        step_with([dataclasses.replace(plan, segment_sizes=((1,) * 128,))] * 2)
    with pytest.raises(ValueError, match=r"say by Memory\(offload=...\) in which directory"):
        step_with([dataclasses.replace(plan, schedule=plan.schedule.offload())] * 2)


@pytest.mark.parametrize(
    ("lengths", "change", "error", "message"),
    [
        ([], {}, ValueError, "there are no documents"),
        ([5, 0, 3], {}, ValueError, "document 1 has 0 tokens, must have 1 to"),
        ([5, -4], {}, ValueError, "document 1 has -4 tokens"),
        ([5, "6"], {}, TypeError, "document 1 has '6' tokens, must be a whole number"),
        ([5], {"unit_tokens": 0}, ValueError, "unit_tokens is 0, must be at least 1"),
        ([5], {"memory": 0}, ValueError, "memory is 0, must be at least 1 byte"),
        ([60, 60, 2000], {"schedule": "breadth-first", "unit_tokens": 64}, ScheduleError, "needs the same k for all"),
        ([5], {"schedule": "none"}, ValueError, "there is no schedule named 'none'"),
        ([2**45], {}, ValueError, "tokens"),
    ],
)
def test_bad_plans(lengths: list[int], change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_step(lengths, cost_of(2), **change)
