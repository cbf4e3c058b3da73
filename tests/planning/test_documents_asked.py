"""Is a planned step refused, or told, where a stage does not know the documents of its rows?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_model import Config, Stage, cross_entropy
from torch import Tensor, nn

import seq1f1b
from seq1f1b import Memory, PipelineEngine, SegmentWarning
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step
from seq1f1b.testing import run_ranks

LENGTHS = [23, 9, 8, 7, 6]
CONFIG = Config(hidden=16, heads=2, kv_heads=2, ffn=16, vocab=16, layers=2)
SHAPE = seq1f1b.ModelShape(hidden=16, layers=2, heads=2, kv_heads=2, ffn=16, vocab=16)


def attends(does: str) -> Callable[..., Tensor]:
    """What it does with documents: "tells", "keeps them from attention", or lets all see each other by "zeros"."""

    def attend(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None = None, **given: Any) -> Tensor:
        if does == "zeros":
            doc_ids = torch.zeros(len(q), q.shape[2], dtype=torch.int64)
        told = None if does == "keeps them from attention" else doc_ids
        return seq1f1b.causal_attention(q, k, v, doc_ids=told, **given)

    return attend


def make_stage(does: str = "tells", first: int = 0, last: int = 2) -> Stage:
    torch.manual_seed(0)
    stage = Stage(CONFIG, first, last).double()
    for block in stage.blocks.values():
        block.attention = attends(does)
    return stage


def make_plan(lengths: list[int], num_ranks: int = 1, **options: Any) -> StepPlan:
    cost = CostModel(SHAPE, load_hardware("cpu-zen5"), num_ranks=num_ranks, seq_len=max(lengths))
    return plan_step(lengths, cost, **options)


def make_documents(lengths: list[int]) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(16, (length + 1,), generator=made) for length in lengths]


def train(engine: PipelineEngine, plan: StepPlan, documents: list[Tensor], *, tells: bool) -> None:
    kwargs: Any = [{"doc_ids": ids} for ids in plan.doc_ids] if tells else None
    engine.step(
        plan.join([d[:-1] for d in documents]),
        target=plan.join([d[1:] for d in documents]),
        kwargs=kwargs,
        loss_weight=sum(plan.lengths),
        plan=plan,
    )


def make_engine(stage: nn.Module, **options: Any) -> PipelineEngine:
    options = {"num_microbatches": 1, "loss_fn": cross_entropy, "arg_rules": {"doc_ids": "slice"}} | options
    return PipelineEngine(stage, **options)


def check(model: nn.Module, whole: nn.Module, rows: list[tuple[Tensor, Tensor]]) -> None:
    """The gradients of the model are those of the mean over all tokens of these rows, each run alone."""
    total = sum(cross_entropy(whole(tokens[None]), target[None]) * len(target) for tokens, target in rows)
    assert isinstance(total, Tensor)
    (total / sum(len(target) for _, target in rows)).backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"memory": Memory(recompute="all")}])
@pytest.mark.parametrize("does", ["tells", "keeps them from attention"])
def test_attention_without_documents_is_refused(does: str, options: dict[str, Any]) -> None:
    """Whether the step or the model leaves them out; gradients stay as before, and a step that tells them is right."""
    model, documents, plan = make_stage(does), make_documents(LENGTHS), make_plan(LENGTHS, unit_tokens=30)
    assert max(map(len, plan.rows)) > 1 and max(map(len, plan.segment_sizes)) == 1
    whole, engine = copy.deepcopy(model), make_engine(model, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"was given no doc_ids, and this row of the plan holds \d documents"):
            train(engine, plan, documents, tells=does != "tells")
    assert all(parameter.grad is None for parameter in model.parameters())
    for block in model.blocks.values():
        block.attention = attends("tells")
    train(engine, plan, documents, tells=True)
    check(model, whole, [(d[:-1], d[1:]) for d in documents])


@pytest.mark.parametrize(("unit_tokens", "compiles"), [(8, False), (30, True)])
def test_rows_of_several_segments_and_compiled_attention_are_refused(unit_tokens: int, compiles: bool) -> None:
    documents, plan = make_documents(LENGTHS), make_plan(LENGTHS, unit_tokens=unit_tokens)
    rows = zip(plan.rows, plan.segment_sizes, strict=True)
    assert any(len(row) > 1 and len(sizes) > 1 for row, sizes in rows) != compiles
    stage: Any = torch.compile(make_stage(), backend="aot_eager") if compiles else make_stage()
    with pytest.raises(ValueError, match="was given no doc_ids"):
        train(make_engine(stage), plan, documents, tells=False)


def test_every_rank_hears_which_stage_leaves_them_out() -> None:
    documents, plan = make_documents(LENGTHS), make_plan(LENGTHS, 2, unit_tokens=30)
    stages = [make_stage(last=1), make_stage("keeps them from attention", first=1)]

    def work(group: Any) -> str:
        engine = make_engine(stages[group.rank], group=group)
        with pytest.raises((ValueError, seq1f1b.PipelineError)) as error:
            train(engine, plan, documents, tells=True)
        return str(error.value)

    for text in run_ranks(2, work):
        assert "[1]F" in text and "was given no doc_ids" in text


@pytest.mark.parametrize(
    ("does", "lengths", "options"), [("zeros", LENGTHS, {}), ("tells", [20, 20, 20], {"unit_tokens": 10})]
)
def test_rows_need_no_documents(does: str, lengths: list[int], options: dict[str, Any]) -> None:
    """All tokens of a row may see each other by zeros, or a row holds one document."""
    model, documents, plan = make_stage(does), make_documents(lengths), make_plan(lengths, **options)
    whole = copy.deepcopy(model)
    train(make_engine(model), plan, documents, tells=False)
    rows = [[documents[i] for i in row] for row in plan.rows]
    assert (max(map(len, rows)) > 1) == (does == "zeros")
    check(model, whole, [(torch.cat([d[:-1] for d in row]), torch.cat([d[1:] for d in row])) for row in rows])


class Carried(nn.Module):
    """A sum of all tokens so far."""

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        before = seq1f1b.carry_in(0, x.new_zeros(len(x), 1, 16))
        sums = before + x.cumsum(1)
        seq1f1b.carry_out(0, sums[:, -1:])
        return sums


@pytest.mark.parametrize("tells", [False, True])
def test_state_that_cannot_know_the_documents_is_told_once(tells: bool) -> None:
    documents, plan = make_documents(LENGTHS), make_plan(LENGTHS, unit_tokens=30)
    assert max(map(len, plan.rows)) > 1
    stage = make_stage()
    stage.blocks = nn.ModuleDict({"0": Carried()})
    engine = make_engine(stage)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            train(engine, plan, documents, tells=tells)
    found = [str(w.message) for w in told if issubclass(w.category, SegmentWarning) and "doc_ids" in str(w.message)]
    assert len(found) == (not tells) and all("stage 0 carries state along packed documents" in text for text in found)
