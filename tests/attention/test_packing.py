"""Do packed documents train as each does alone: losses, gradients, positions, carried state, targets?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from slices import pairs_of
from tiny_model import Config, Stage, cross_entropy, gradient_error
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import seq1f1b
from seq1f1b import Memory, PipelineEngine
from seq1f1b.attention.packing import document_lengths, document_starts, pack_documents
from seq1f1b.testing import run_ranks

HIDDEN, VOCAB, LENGTH, M = 16, 23, 23, 2
SIZES = [9, 2, 5, 7]  # borders at 9, 11 and 16
ROWS = [  # two micro-batches of two rows, each packed in another way
    [9, 2, 5, 7],  # every document ends with a segment
    [23],  # one document over all borders
    [1, 1, 6, 1, 1, 1, 12],  # of one token: at the start, before a border and behind it
    [4, 10, 9],  # over one border, over two
]


def packed_ids(rows: list[list[int]]) -> Tensor:
    """Arbitrary ids, as a data loader may have them."""
    return torch.stack([torch.repeat_interleave(10 + torch.arange(len(row)), torch.tensor(row)) for row in rows])


def each_document(doc_ids: Tensor) -> Iterator[tuple[int, slice]]:
    for row, ids in enumerate(doc_ids):
        begin = 0
        for length in torch.unique_consecutive(ids, return_counts=True)[1].tolist():
            yield row, slice(begin, begin + length)
            begin += length


def make_stages(num_stages: int = 2, **options: Any) -> list[Stage]:
    torch.manual_seed(0)
    config = Config(HIDDEN, heads=2, kv_heads=2, ffn=16, vocab=VOCAB, layers=2, options=options)
    firsts = [2 * i // num_stages for i in range(num_stages + 1)]
    return [Stage(config, *ends).double() for ends in itertools.pairwise(firsts)]


def make_batch(rows: list[list[int]] = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and the documents' ids, (rows, LENGTH)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (len(rows), LENGTH), generator=generator)
    ids = packed_ids(rows)
    return tokens, seq1f1b.shift_labels(tokens, doc_ids=ids), document_starts(ids)


def run_alone(stages: list[Stage], tokens: Tensor, doc_ids: Tensor, m: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the micro-batches and gradients of their mean, by the plain model and one document at a time."""
    losses = []
    for rows, ids in zip(tokens.chunk(m), doc_ids.chunk(m), strict=True):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, where in each_document(ids):
            x = document = rows[row : row + 1, where]
            for stage in stages:
                x = stage(x)
            if document.numel() > 1:  # one token has nothing to predict
                total = total + F.cross_entropy(x[0, :-1], document[0, 1:], reduction="sum")
                count += document.numel() - 1
        losses.append(total / count)
    torch.stack(losses).mean().backward()
    gradients = {f"{i}.{n}": p.grad.clone() for i, s in enumerate(stages) for n, p in s.named_parameters()}
    for stage in stages:
        stage.zero_grad()
    return [loss.detach() for loss in losses], gradients


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    return {f"{i}.{n}": p.grad for i, stage in enumerate(stages) for n, p in stage.named_parameters()}


def check(found: list[Tensor], stages: list[Stage], want: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    torch.testing.assert_close(torch.stack(found), torch.stack(want[0]), rtol=1e-12, atol=0)
    assert gradient_error(gradients_of(stages), want[1]) <= 1e-10


def engine_of(stage: Any, sizes: Any = SIZES, k: int = 4, **options: Any) -> PipelineEngine:
    return PipelineEngine(
        stage, num_microbatches=M, num_segments=k, segment_sizes=sizes, arg_rules={"doc_ids": "slice"},
        loss_fn=cross_entropy, **options,
    )  # fmt: skip


def check_against_documents_alone(stages: list[Any], sizes: list[int], again: str = "none") -> None:
    """A step over segments of these sizes, beside each document run alone through the stages.

    Args:
        again: "checkpoint" or "recompute": units run twice.
    """
    tokens, target, doc_ids = make_batch()
    want = run_alone(stages, tokens, doc_ids, M)

    def run(group: Any) -> list[Tensor]:
        stage = Checkpointed(stages[group.rank]) if again == "checkpoint" else stages[group.rank]
        memory = Memory(recompute="all" if again == "recompute" else "none")
        engine = engine_of(stage, sizes, len(sizes), group=group, memory=memory)
        return engine.step(tokens, target=target, kwargs={"doc_ids": doc_ids})

    check(run_ranks(2, run)[-1], stages, want)


def test_compiled_stages_need_no_graph_per_segment_or_packing():
    torch._dynamo.reset()
    stages = make_stages(1)
    counter = CompileCounterWithBackend("aot_eager")
    engine = engine_of(torch.compile(stages[0], fullgraph=True, backend=counter))
    for rows in (ROWS, ROWS[::-1], [[23]] * 4):
        tokens, target, doc_ids = make_batch(rows)
        graphs = counter.frame_count
        found = engine.step(tokens, target=target, kwargs={"doc_ids": doc_ids})
        assert counter.frame_count <= 2 if rows is ROWS else counter.frame_count == graphs
        found_gradients = {name: gradient.clone() for name, gradient in gradients_of(stages).items()}
        stages[0].zero_grad()
        losses, want = run_alone(make_stages(1), tokens, doc_ids, M)
        torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-12, atol=0)
        assert gradient_error(found_gradients, want) <= 1e-10
    torch._dynamo.reset()


def test_balanced_segments_are_those_of_the_documents_on_every_rank():
    shape = seq1f1b.ModelShape(hidden=2, layers=2, heads=1, kv_heads=1, ffn=0, vocab=0)  # mostly attention
    stages = make_stages()
    steps = []
    for rows in (ROWS, [[1] * 15 + [8]] * 4, [[23]] * 4):
        tokens, target, doc_ids = make_batch(rows)
        lengths = [length for row in rows for length in row]
        assert document_lengths(doc_ids) == lengths
        sizes = seq1f1b.partition_sequence(LENGTH, 4, model=shape, documents=lengths)
        steps.append((tokens, target, doc_ids, sizes, run_alone(stages, tokens, doc_ids, M)))
    assert len({tuple(sizes) for *_, sizes, _ in steps}) == 3

    def run(group: Any) -> list[tuple[list[Tensor], list[int]]]:
        engine = engine_of(stages[group.rank], shape, group=group)
        found = []
        for tokens, target, doc_ids, *_ in steps:  # a list of micro-batches counts like the whole batch
            losses = engine.step(tokens, target=target, kwargs=[{"doc_ids": ids} for ids in doc_ids.chunk(M)])
            found.append((losses, engine._runner.last_step.sizes))
        return found

    found = run_ranks(2, run)
    summed: dict[str, Tensor] = {}
    for i, (*_, sizes, (losses, gradients)) in enumerate(steps):
        assert [rank[i][1] for rank in found] == [sizes, sizes]
        torch.testing.assert_close(torch.stack(found[-1][i][0]), torch.stack(losses), rtol=1e-12, atol=0)
        summed = {name: summed.get(name, 0) + gradient for name, gradient in gradients.items()}
    assert gradient_error(gradients_of(stages), summed) <= 1e-10


# -- state that is carried ---------------------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """A GRU cell, whose state is empty where a document begins."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        state = seq1f1b.carry_in(1, x.new_zeros(len(x), HIDDEN))
        goes_on = (seq1f1b.positions(x, doc_ids=doc_ids) > 0).expand(x.shape[:2]).unsqueeze(-1)
        states = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state * goes_on[:, t])
            states.append(state)
        seq1f1b.carry_out(1, state)
        return x + torch.stack(states, 1)


class Mixer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if index == 0 else None
        self.mix = Recurrence()
        self.head = nn.Linear(HIDDEN, VOCAB) if index == 1 else None

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = self.mix(x if self.embedding is None else self.embedding(x), doc_ids=doc_ids)
        return x if self.head is None else self.head(x)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x, **documents)
        return checkpoint(self.inner, x, use_reentrant=False, **documents)


@pytest.mark.parametrize(
    ("sizes", "again"), pairs_of([[23], SIZES, [1, 1, 1, 20]], ["none", "checkpoint", "recompute"])
)
def test_carried_state_is_reset_where_a_document_begins(sizes, again):
    """And goes from segment to segment within one."""
    torch.manual_seed(0)
    check_against_documents_alone([Mixer(i).double() for i in range(2)], sizes, again)


# -- ids, positions, targets, rows ------------------------------------------------------------------------------------


def test_positions_begin_anew_with_each_document():
    _, _, doc_ids = make_batch()
    x = torch.zeros(4, LENGTH)
    want = torch.tensor([[t for length in row for t in range(length)] for row in ROWS])
    assert torch.equal(seq1f1b.positions(x, doc_ids=doc_ids), want)
    assert torch.equal(doc_ids, document_starts(doc_ids))
    shards = [
        seq1f1b.positions(x[:, :9], doc_ids=doc_ids[:, :9], sequence_parallel=(0, 2)),
        seq1f1b.positions(x[:, 9:18], doc_ids=doc_ids[:, 9:18], sequence_parallel=(1, 2)),
    ]
    assert torch.equal(torch.cat(shards, 1), want[:, :18])
    for ids, text in [
        (packed_ids(ROWS), "row 0, token 0 is 10, must be the position of its document's first token"),
        (document_starts(packed_ids(ROWS)).roll(1, 0) + 1, "doc_ids of row"),
        (doc_ids[:, :5], r"doc_ids is \(4, 5\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            seq1f1b.positions(x, doc_ids=ids)


def test_plain_ids_in_a_step_are_an_error_that_names_the_remedy():
    """Ids that count documents would make positions of nothing: no loss would tell."""
    tokens, target, _ = make_batch()
    ids = packed_ids(ROWS) - 10
    engine = engine_of(make_stages(1)[0])
    with pytest.raises(ValueError, match=r"row 0, token 8 is 3, must be .* seq1f1b\.document_starts"):
        engine.step(tokens, target=target, kwargs={"doc_ids": ids})


def test_no_target_is_another_documents_token():
    tokens, target, doc_ids = make_batch()
    for row, where in each_document(doc_ids):
        assert torch.equal(target[row, where], torch.cat([tokens[row, where][1:], torch.tensor([-100])]))
    with pytest.raises(ValueError, match=r"doc_ids is \(4, 22\), must be of tokens' shape \(4, 23\)"):
        seq1f1b.shift_labels(tokens, doc_ids=doc_ids[:, 1:])


def test_ids_that_come_back_or_are_none():
    ids = torch.tensor([[5, 5, 7, 7], [5, 7, 7, 5]])
    with pytest.raises(ValueError, match="document 5 of row 1 comes back at token 3"):
        document_starts(ids)
    for bad in (torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(0, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"doc_ids is .* must be \(batch, row\) of integers"):
            document_starts(bad)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), multiple_of=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_document_once(lengths: list[int], multiple_of: int) -> None:
    packing = pack_documents(lengths, 20, multiple_of=multiple_of)
    assert len(packing.rows) % multiple_of == 0
    assert sorted(index for row in packing.rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 20 for row in packing.rows)
    assert packing.waste == pytest.approx(1 - sum(lengths) / (20 * len(packing.rows)))
    half_full = [row for row in packing.rows if 0 < 2 * sum(lengths[index] for index in row) <= 20]
    assert len(half_full) <= 1  # two of them would have gone together
    assert sum(not row for row in packing.rows) < multiple_of
    documents = [torch.full((length,), index) for index, length in enumerate(lengths)]
    joined = packing.join(documents, fill=-1)
    want = [[index for index in row for _ in range(lengths[index])] for row in packing.rows]
    assert joined.tolist() == [row + [-1] * (20 - len(row)) for row in want]
    assert torch.equal(packing.doc_ids, document_starts(joined))


def test_rows_are_filled_by_the_best_fit_and_refuse_what_does_not_fit():
    packing = pack_documents([6, 3, 7, 4, 5, 5], 10)
    assert packing.rows == ((2, 1), (0, 3), (4, 5)) and packing.waste == 0.0
    for lengths, text in [
        ([], "no documents"),
        ([4, 11], "document 1 has 11 tokens"),
        ([0], "document 0 has 0 tokens"),
    ]:
        with pytest.raises(ValueError, match=text):
            pack_documents(lengths, 10)
    with pytest.raises(ValueError, match=r"documents have lengths \[3\], but documents of lengths \[2, 1\] were"):
        pack_documents([2, 1], 4).join([torch.zeros(3)], fill=0)


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="add_loss needs a tensor of one element, got NoneType"):
        seq1f1b.add_loss(None)
    with pytest.raises(TypeError, match="x is None, must be a tensor"):
        seq1f1b.positions(None)
    with pytest.raises(TypeError, match="doc_ids is 3, must be a tensor or None"):
        seq1f1b.positions(torch.zeros(1, 2), doc_ids=3)
    with pytest.raises(TypeError, match=r"model is 3, must be a seq1f1b\.ModelShape"):
        seq1f1b.partition_sequence(8, 2, model=3)
