"""Is a planned step refused, or told, where a stage does not know the documents of its rows?"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Memory, PipelineEngine, SegmentWarning
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step
from seq1f1b.testing import run_ranks

LENGTHS = [23, 9, 8, 7, 6]
SHAPE = seq1f1b.ModelShape(hidden=16, layers=2, heads=2, kv_heads=2, ffn=16, vocab=16)


class Layer(nn.Module):
    """What it does with documents: "tells", "keeps them from attention", or lets all see each other by "zeros"."""

    def __init__(self, index: int, does: str = "tells") -> None:
        super().__init__()
        self.qkv, self.layer, self.does = nn.Linear(16, 48), seq1f1b.layer_handle(index), does

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.does == "zeros":
            doc_ids = torch.zeros(x.shape[:2], dtype=torch.int64)
        told = None if self.does == "keeps them from attention" else doc_ids
        return x + seq1f1b.causal_attention(q, k, v, layer=self.layer, doc_ids=told).transpose(1, 2).flatten(2)


class Stage(nn.Module):
    def __init__(self, layer: nn.Module, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16) if first else nn.Identity()
        self.layer, self.head = layer, nn.Linear(16, 16) if last else nn.Identity()

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.layer(self.embedding(x), doc_ids)
        found: Tensor = self.head(hidden)
        return found


def loss_of(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


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
    options = {"num_microbatches": 1, "loss_fn": loss_of, "arg_rules": {"doc_ids": "slice"}} | options
    return PipelineEngine(stage, **options)


def check(model: nn.Module, whole: nn.Module, rows: list[tuple[Tensor, Tensor]]) -> None:
    """The gradients of the model are those of the mean over all tokens of these rows, each run alone."""
    total = sum(loss_of(whole(tokens[None]), target[None]) * len(target) for tokens, target in rows)
    assert isinstance(total, Tensor)
    (total / sum(len(target) for _, target in rows)).backward()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"memory": Memory(recompute="all")}])
@pytest.mark.parametrize("does", ["tells", "keeps them from attention"])
def test_attention_without_documents_is_refused(does: str, options: dict[str, Any]) -> None:
    """Whether the step or the model leaves them out; gradients stay as before, and a step that tells them is right."""
    torch.manual_seed(0)
    model, documents, plan = Stage(Layer(0, does)).double(), make_documents(LENGTHS), make_plan(LENGTHS, unit_tokens=30)
    assert max(map(len, plan.rows)) > 1 and max(map(len, plan.segment_sizes)) == 1
    whole, engine = copy.deepcopy(model), make_engine(model, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"was given no doc_ids, and this row of the plan holds \d documents"):
            train(engine, plan, documents, tells=does != "tells")
    assert all(parameter.grad is None for parameter in model.parameters())
    model.layer.does = "tells"
    train(engine, plan, documents, tells=True)
    check(model, whole, [(d[:-1], d[1:]) for d in documents])


@pytest.mark.parametrize(("unit_tokens", "compiles"), [(8, False), (30, True)])
def test_rows_of_several_segments_and_compiled_attention_are_refused(unit_tokens: int, compiles: bool) -> None:
    documents, plan = make_documents(LENGTHS), make_plan(LENGTHS, unit_tokens=unit_tokens)
    rows = zip(plan.rows, plan.segment_sizes, strict=True)
    assert any(len(row) > 1 and len(sizes) > 1 for row, sizes in rows) != compiles
    stage: Any = Stage(Layer(0)).double()
    with pytest.raises(ValueError, match="was given no doc_ids"):
        train(
            make_engine(torch.compile(stage, backend="aot_eager") if compiles else stage), plan, documents, tells=False
        )


def test_every_rank_hears_which_stage_leaves_them_out() -> None:
    documents, plan = make_documents(LENGTHS), make_plan(LENGTHS, 2, unit_tokens=30)
    stages = [Stage(Layer(0), last=False), Stage(Layer(1, "keeps them from attention"), first=False)]

    def work(group: Any) -> str:
        engine = make_engine(stages[group.rank].double(), group=group)
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
    torch.manual_seed(0)
    model, documents, plan = Stage(Layer(0, does)).double(), make_documents(lengths), make_plan(lengths, **options)
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
    engine = make_engine(Stage(Carried()).double())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            train(engine, plan, documents, tells=tells)
    found = [str(w.message) for w in told if issubclass(w.category, SegmentWarning) and "doc_ids" in str(w.message)]
    assert len(found) == (not tells) and all("stage 0 carries state along packed documents" in text for text in found)
