"""Does a plan of a step hold every token once, keep its segments equal and small, and train as each document alone?"""

from __future__ import annotations

import copy
import itertools
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seq1f1b
from seq1f1b import ModelShape, PipelineEngine, ScheduleError
from seq1f1b.planning.step_plan import plan_step
from seq1f1b.testing import run_ranks

MODEL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=1000)


def random_lengths(rng: random.Random) -> list[int]:
    match rng.randrange(5):
        case 0:
            return [1] * rng.randint(1, 20)
        case 1:
            return [3000, *(rng.randint(1, 30) for _ in range(rng.randint(1, 40)))]
        case 2:
            return [rng.randint(1, 64) for _ in range(rng.randint(1, 60))]  # all short
        case 3:
            return [64] * rng.randint(1, 9)  # each a whole row
        case _:
            return [max(1, min(4000, int(rng.lognormvariate(4.0, 1.3)))) for _ in range(rng.randint(1, 100))]


def test_every_token_is_in_one_segment() -> None:
    rng = random.Random(0)
    for _ in range(300):
        lengths, most = random_lengths(rng), 64
        plan = plan_step(lengths, num_ranks=rng.randint(1, 4), segment_tokens=most, model=MODEL)
        assert sorted(itertools.chain.from_iterable(plan.rows)) == list(range(len(lengths)))
        cost_of_full = MODEL.flops(0, most)
        for documents, sizes, costs in zip(plan.rows, plan.segment_sizes, plan.costs, strict=True):
            assert sum(sizes) == sum(lengths[i] for i in documents)
            assert max(sizes) <= most and len(sizes) == len(costs)
            assert len(sizes) == 1 or len(documents) == 1
            assert sum(costs) == pytest.approx(sum(MODEL.flops(0, lengths[i]) for i in documents))
            assert max(costs) <= cost_of_full * 1.1  # tokens are whole: a piece may be one token more costly
        counts = [len(sizes) for sizes in plan.segment_sizes]
        assert counts == sorted(counts, reverse=True) and plan.schedule.segments_of == tuple(counts)
        plan.schedule.check()
        stages = plan.schedule.num_stages
        for busy in plan.simulation.busy:
            assert busy == pytest.approx(3 * sum(map(sum, plan.costs)) / stages)


def test_few_rows_and_a_small_bubble() -> None:
    """Documents with a long tail, on 8 ranks: rows are full, and the bubble is a few percent."""
    rng = random.Random(1)
    lengths = [max(1, min(65536, int(rng.lognormvariate(6.5, 1.4)))) for _ in range(4096)]
    begin = time.perf_counter()
    plan = plan_step(lengths, num_ranks=8, segment_tokens=4096, model=MODEL)
    bubble = plan.simulation.bubble_ratio
    assert time.perf_counter() - begin < 2.0  # 40 ms on a free core
    short = [row for row, sizes in zip(plan.rows, plan.segment_sizes, strict=True) if len(sizes) == 1]
    filled = sum(lengths[i] for row in short for i in row) / (len(short) * 4096)
    assert filled > 0.9 and bubble < 0.05
    again = plan_step(lengths, num_ranks=8, segment_tokens=4096, model=MODEL)
    assert again == plan and again.schedule.to_text() == plan.schedule.to_text()


class Stage(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layer = seq1f1b.layer_handle(index)
        self.embedding = torch.nn.Embedding(11, 8) if index == 0 else None
        self.position = torch.nn.Embedding(64, 8)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11) if index == 1 else None

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x + self.position(seq1f1b.positions(x, doc_ids=doc_ids))
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer, doc_ids=doc_ids)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x if self.head is None else self.head(x)


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
def test_a_planned_step_trains_as_each_document_alone(schedule: str) -> None:
    lengths = [40, 3, 7, 23, 12, 1, 9, 30, 5, 16]
    plan = plan_step(lengths, num_ranks=2, segment_tokens=16, model=MODEL, schedule=schedule)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(11, (length,), generator=generator) for length in lengths]
    targets = [seq1f1b.shift_labels(document[None])[0] for document in documents]
    stages = [Stage(0).double(), Stage(1).double()]

    def run(group: Any) -> dict[str, Tensor]:
        engine = PipelineEngine(
            copy.deepcopy(stages[group.rank]),
            schedule=schedule,
            num_microbatches=8,
            num_segments=2,
            loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
            arg_rules={"doc_ids": "slice"},
            group=group,
        )
        kwargs = [{"doc_ids": ids} for ids in plan.doc_ids]
        engine.step(plan.join(documents), target=plan.join(targets), kwargs=kwargs, segment_sizes=plan.segment_sizes)
        assert engine.report(gather=True).simulated.schedule == plan.schedule
        return {f"{group.rank}.{name}": p.grad for name, p in engine.named_parameters()}

    first, last = run_ranks(2, run)
    counted = sum(int((target != -100).sum()) for target in targets)
    for document, target in zip(documents, targets, strict=True):
        output = stages[1](stages[0](document[None]))[0]
        (F.cross_entropy(output, target, reduction="sum") / counted).backward()
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            found = (first | last)[f"{index}.{name}"]
            assert float((found - parameter.grad).norm()) <= 1e-10 * max(1.0, float(parameter.grad.norm()))


@pytest.mark.parametrize(
    ("lengths", "change", "error", "message"),
    [
        ([], {}, ValueError, "there are no documents to plan a step of"),
        ([5, 0, 3], {}, ValueError, "document 1 has 0 tokens, must have at least 1"),
        ([5, -4], {}, ValueError, "document 1 has -4 tokens"),
        ([5], {"segment_tokens": 0}, ValueError, "segment_tokens is 0, must be at least 1"),
        ([5, 200], {"schedule": "breadth-first"}, ScheduleError, "needs the same k for all micro-batches"),
        ([5], {"schedule": "none"}, ValueError, "there is no schedule named 'none'"),
        ([2**45], {}, ValueError, "tokens"),
    ],
)
def test_bad_plans(lengths: list[int], change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_step(lengths, **({"num_ranks": 2, "segment_tokens": 64, "model": MODEL} | change))


def test_documents_that_were_not_planned() -> None:
    plan = plan_step([3, 2], num_ranks=1, segment_tokens=8, model=MODEL)
    with pytest.raises(ValueError, match="not as many or not as long as those that were planned"):
        plan.join([torch.zeros(3), torch.zeros(3)])
