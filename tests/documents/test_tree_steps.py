"""Does a step of trees train as the whole model does on every path alone, whatever else the engine does meanwhile?

Steps of rows and of trees of every kind are drawn by tests/engine/test_random_steps.py.
"""

from __future__ import annotations

import os
import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_model import cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from tree_runs import (
    CONFIG,
    Trees,
    cut,
    data_of,
    random_tree,
    random_trees,
    run_paths,
    tokens_of,
    train,
)

import seq1f1b
from seq1f1b import LoopbackGroup, Loss, PipelineEngine
from seq1f1b.report.report import PipelineReport
from seq1f1b.testing import run_ranks

TOLERANCE = 1e-12


def documents_of(rng: random.Random, trees: Trees, size: int = 2) -> list[dict[str, Tensor]]:
    """First tokens of packed documents along the paths; in a tree with siblings in one unit it is all one."""
    found = []
    for m, sizes in enumerate(trees.sizes):
        ends: dict[int, tuple[int, int]] = {-1: (0, 0)}  # of each segment: its last token's position, and document
        parts, is_packed = [], all(isinstance(segment, int) for segment in sizes)
        for s, segment in enumerate(sizes):
            begin, document = ends[trees.chain(m)[s]]
            starts = []
            for i in range(tokens_of(segment)):
                document = begin + i if is_packed and rng.random() < 0.2 else document
                starts.append(document)
            ends[s] = begin + len(starts), document
            parts += starts
        found.append({"doc_ids": torch.tensor(parts, dtype=torch.int32).expand(size, -1).contiguous()})
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_packed_documents_on_the_paths(seed: int) -> None:
    """And a micro-batch that is no tree, with documents of its own, in the same step."""
    rng = random.Random(seed)
    packed, whole = random_tree(rng, 6, siblings=False), random_tree(rng, 6)
    trees = Trees([packed[0], whole[0], [5, 4]], [packed[1], whole[1], None])
    (tokens, targets), kwargs = data_of(trees, seed), documents_of(rng, trees)
    losses, truth, _ = run_paths(whole_model(CONFIG), trees, tokens, targets, kwargs)
    options = {"kwargs": kwargs, "arg_rules": {"doc_ids": "slice"}}
    returned, gradients, _ = train(2, [(trees, tokens, targets)], **options)
    for found in returned:
        torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=0, atol=TOLERANCE)
    assert gradient_error(gradients, truth) <= TOLERANCE


def test_other_steps_before_and_after() -> None:
    """Trees of other shapes, rows and plain steps by turns, with evaluations between them; the plan holds in all."""
    model, plain = whole_model(CONFIG), Trees([[3, 2, 2, 2]] * 2, [None] * 2)
    shapes = [random_trees(random.Random(seed), 2, 6) for seed in (1, 2)]
    siblings = Trees([[4, 3, [2, 1]], [2, [1, 2]]], [None, [-1, 0]])  # in the order of chains
    steps = [plain, shapes[0], plain, Trees([[4, 3], [2]], [None] * 2), shapes[1], siblings, shapes[0]]
    data = [data_of(trees, seed) for seed, trees in enumerate(steps)]

    def run(group: Any) -> Any:
        stage = stage_of(model, CONFIG, group.rank, 2)
        options = {"num_microbatches": 2, "num_segments": 4, "segment_sizes": [3, 2, 2, 2], "loss_fn": cross_entropy}
        engine, losses = PipelineEngine(stage, group=group, loss=Loss(weight="targets"), **options), []
        for trees, (tokens, targets) in zip(steps, data, strict=True):
            given: dict[str, Any] = {"segment_sizes": trees.sizes}
            if trees is plain:
                given, tokens, targets = {}, torch.cat(tokens), torch.cat(targets)
            elif any(trees.parents):
                given["parents"] = trees.parents
            losses += [engine.eval(tokens, target=targets, **given), engine.step(tokens, target=targets, **given)]
            for own in engine.report().stages:
                assert own.peak_live_units == own.planned_live_units
                assert own.peak_live_tokens == own.planned_live_tokens
        return losses, {name: p.grad for name, p in engine.named_parameters()}

    (_, first), (found, last) = run_ranks(2, run)
    truth: dict[str, Tensor] = {}
    for i, (trees, (tokens, targets)) in enumerate(zip(steps, data, strict=True)):
        losses, gradients, _ = run_paths(model, trees, tokens, targets)
        truth = {name: gradient + truth.get(name, 0.0) for name, gradient in gradients.items()}
        for own in found[2 * i : 2 * i + 2]:
            torch.testing.assert_close(torch.stack(own), torch.stack(losses), rtol=0, atol=TOLERANCE)
    assert gradient_error(first | last, truth) <= TOLERANCE


class Carrying(torch.nn.Module):
    """Linear attention and a causal convolution: two states, of which each goes to every branch."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.mix, self.keep, self.layer = torch.nn.Linear(4, 12), torch.nn.Linear(4, 4), layer

    def forward(self, x: Tensor) -> Tensor:
        before = seq1f1b.carry_in(2 * self.layer, x.new_zeros(len(x), 2, 4))
        window = torch.cat([before, x], 1)
        seq1f1b.carry_out(2 * self.layer, window[:, -2:])
        q, k, v = (
            self.keep(window[:, :-2]) + self.mix(x)[..., :4] + self.mix(x)[..., 4 * i : 4 * i + 4] for i in range(3)
        )
        state = seq1f1b.carry_in(2 * self.layer + 1, x.new_zeros(len(x), 4, 4))
        sums = state[:, None] + (k[..., None] * v[..., None, :]).cumsum(1)
        seq1f1b.carry_out(2 * self.layer + 1, sums[:, -1])
        return x + torch.einsum("bsd,bsde->bse", q, sums) / 16


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Centred(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Adding(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        seq1f1b.add_loss(x.square().mean())
        return x


@pytest.mark.full
def test_a_compiled_stage_is_not_traced_again_for_a_tree() -> None:
    """After a step of rows nothing of a tree is new to it: neither its offsets nor siblings."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    config = replace(CONFIG, layers=1)
    stage = stage_of(whole_model(config), config, 0, 1)
    for block in stage.blocks.values():
        block.compile(fullgraph=True, backend=counter)
    engine = PipelineEngine(stage, num_microbatches=1, loss_fn=cross_entropy, group=LoopbackGroup(1)[0])
    rows, trees = Trees([[9, 4, 6]], [None]), Trees([[5, 7, 2, [3, 2, 4]]], [[-1, 0, 0, 1]])
    tokens, targets = data_of(rows)
    engine.step(tokens, target=targets, segment_sizes=rows.sizes)
    known = counter.frame_count
    assert known > 0
    stage.zero_grad()
    tokens, targets = data_of(trees)
    engine.step(tokens, target=targets, segment_sizes=trees.sizes, parents=trees.parents)
    assert counter.frame_count == known
    truth = run_paths(whole_model(config), trees, tokens, targets)[1]
    found = {name.replace("_orig_mod.", ""): p.grad for name, p in engine.named_parameters()}
    assert gradient_error(found, truth) <= TOLERANCE


class Placed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        return self.weight * x + place


def test_positions_and_offsets_go_along_the_path() -> None:
    """Also for a callable of the unit, which makes an argument of a stage."""
    seen: list[tuple[int, int, int, int]] = []

    def place(unit: Any) -> Tensor:
        seen.append((unit.microbatch, unit.segment, unit.offset, unit.length))
        return torch.full((), float(10 * unit.microbatch + unit.offset))

    engine = PipelineEngine(
        Placed(), num_microbatches=1, group=LoopbackGroup(1)[0], arg_rules={"place": place}, attention="unchecked"
    )
    x = torch.rand(1, 13, dtype=torch.float64)
    sizes, parents = [[4, 3, [2, 2], 1, 1], [1, 2]], [[-1, 0, 0, 1, 1], None]
    _, outputs = engine.eval([x, x[:, :3]], return_outputs=True, segment_sizes=sizes, parents=parents)
    of_tree = [(0, 0, 0, 4), (0, 1, 4, 3), (0, 2, 4, 4), (0, 3, 7, 1), (0, 4, 7, 1)]
    assert sorted(set(seen)) == [*of_tree, (1, 0, 0, 1), (1, 1, 1, 2)]
    for output, places in zip(outputs, ([0.0] * 4 + [4.0] * 7 + [7.0] * 2, [10.0, 11.0, 11.0]), strict=True):
        torch.testing.assert_close(output - x[:, : len(places)], torch.tensor([places], dtype=torch.float64))


def test_verify_runs_each_path_alone() -> None:
    """States along the sequence, too; and it sees what a segment makes of its tokens without its path."""
    sizes, parents = [[5, 3, 2, 4], [2, 3]], [[-1, 0, 0, 1], None]
    x = [torch.randn(2, sum(row), 4).double() for row in sizes]

    def run(group: Any, change: Any) -> Any:
        stage = torch.nn.Sequential(Carrying(group.rank), change).double()
        engine = PipelineEngine(stage, num_microbatches=1, loss_fn=squared, group=group, attention="unchecked")
        return engine.verify(x, target=x, segment_sizes=sizes, parents=parents, show=False)

    assert all(found.ok for found in run_ranks(2, lambda group: run(group, torch.nn.Identity())))
    assert not any(found.ok for found in run_ranks(2, lambda group: run(group, Centred())))
    with pytest.raises(ValueError, match="verify over trees cannot compare losses of add_loss"):
        run(LoopbackGroup(1)[0], Adding())


def spread(output: Tensor, target: Tensor) -> Tensor:
    """By token, from the mean over all counted tokens of each row: an answer's own, if it is alone."""
    counted = (target[..., :1] != 0).to(output.dtype)
    mean = (output * counted).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return ((output - mean).square() * counted).sum(-1)


FORMS: dict[str, Any] = {
    "by token": spread,
    "a sum": lambda y, t: spread(y, t).sum(),
    "a sum and its divisor": lambda y, t: (spread(y, t).sum(), (t[..., 0] != 0).sum()),
    "a mean": lambda y, t: spread(y, t).sum() / (t[..., 0] != 0).sum(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "parents", "is_right"),
    [
        ([[5, 3, 2, 4], [2, 3]], [[-1, 0, 0, 0], None], True),
        ([[5, [3, 2], 4], [2, 3]], [[-1, 0, 0], None], False),
        ([[5, 1, 2, 2, 4], [2, 3]], [[-1, 0, 1, 0, 0], None], False),
    ],
)
def test_a_loss_of_several_tokens_is_right_where_each_answer_is_alone(form, sizes, parents, is_right) -> None:
    """By the first step, and by verify, whose reference calls it for every path alone. Prompts do not count."""
    x = [torch.randn(2, sum(map(tokens_of, row)), 4).double() for row in sizes]
    y = [row.abs() + 1.0 for row in x]
    for row, own in zip(y, sizes, strict=True):
        row[:, : own[0]] = 0.0
    loss = Loss(reduction="sum", scale_grads=False) if form in ("by token", "a sum") else Loss()
    loss = Loss(weight=lambda t: float((t[..., 0] != 0).sum())) if form == "a mean" else loss
    engine = PipelineEngine(
        torch.nn.Linear(4, 4).double(), num_microbatches=1, loss_fn=FORMS[form], loss=loss,
        group=LoopbackGroup(1)[0],
    )  # fmt: skip
    given = {"target": y, "segment_sizes": sizes, "parents": parents}
    with warnings.catch_warnings(record=True, action="always") as caught:
        engine.step(x, **given)
    assert any(", the loss" in str(warning.message) for warning in caught) != is_right
    assert engine.verify(x, show=False, **given).ok == is_right


# -- memory ------------------------------------------------------------------------------------------------------------


def test_many_steps_of_rows_leave_nothing_behind() -> None:
    """60 steps, no two alike: no descriptor more, at most 16 orders, slabs as large as the longest row needs."""
    rng = random.Random(3)
    longest = [[10, 10, 10, 10], [20, 20], [40], *[[1]] * 6]
    model = whole_model(CONFIG)
    steps: list[Any] = [longest]
    for _ in range(60):
        lengths = [rng.randint(1, 30) for _ in range(rng.randint(1, 7))]
        steps.append([cut(rng, length, rng.randint(1, min(4, length))) for length in lengths])

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2), num_microbatches=1, loss_fn=cross_entropy, group=group
        )
        seen = []
        for rows in steps:
            tokens, targets = data_of(Trees(rows, [None] * len(rows)), size=1)
            engine.step(tokens, target=targets, segment_sizes=rows)
            seen.append((engine.report().kv_bytes, len(os.listdir("/proc/self/fd"))))
        assert len(engine._runner.orders) == 16
        return seen

    for seen in run_ranks(2, run):
        kv_bytes, descriptors = zip(*seen, strict=True)
        assert kv_bytes[-1] <= 7 / 3 * kv_bytes[0]  # a step of more short rows may hold more slots
        assert max(descriptors[20:]) <= descriptors[20] + 4


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_nested_order_holds_a_path_and_a_leaf_for_each_rank(num_ranks: int) -> None:
    """A prompt and 16 answers of an eighth of it: units, keys, values and gradients as planned, at most 1.1 x that."""
    trees = Trees([[64] + [8] * 16], [[-1] + [0] * 16])
    tokens, targets = data_of(trees, size=1)
    bound = 1.1 * (64 + num_ranks * 8)
    (report, *_) = train(num_ranks, [(trees, tokens, targets)])[2]
    numbers = {"options": {"trees": "numbers"}}
    (by_number, *_) = train(num_ranks, [(trees, tokens, targets)], order=numbers)[2]
    for rank, wide in zip(report.ranks, by_number.ranks, strict=True):
        (stage,), per_token = rank.stages, wide.kv_bytes / 192  # the whole tree lies there
        assert stage.peak_live_tokens == stage.planned_live_tokens <= bound
        assert wide.stages[0].peak_live_tokens == 192
        assert rank.kv_bytes == rank.planned_kv_bytes <= bound * per_token
        assert rank.grad_bytes == rank.planned_grad_bytes <= bound * per_token
        if num_ranks == 2:
            assert stage.activation_bytes == pytest.approx(stage.planned_activation_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "parents", "spans"),
    [
        ([8, 4, 4], [-1, 0, 0], [(0, 8), (8, 12), (8, 12)]),
        ([8, 2, [4, 1], 3], [-1, 0, 0, 1], [(0, 8), (8, 10), (8, 12), (8, 9), (10, 13)]),
        ([8, 2, [4, 1]], [-1, 0, 1], [(0, 10), (10, 14), (10, 11)]),  # in the order of a chain
    ],
)
def test_attention_of_a_tree_counts_along_its_paths(sizes: Any, parents: Any, spans: Any, tmp_path: Any) -> None:
    """In the share of a device's FLOP per second: as so many tokens, each behind its own path alone."""
    trees = Trees([sizes], [parents])
    (report,) = train(1, [(trees, *data_of(trees, size=1))])[2]
    shape = seq1f1b.ModelShape(hidden=16, layers=4, heads=2, kv_heads=1, ffn=16, vocab=13)
    flops = 3 * sum(shape.flops(first, end) for first, end in spans)
    report.save(tmp_path / "report.jsonl")
    for own in (report, PipelineReport.load(tmp_path / "report.jsonl")):
        assert own.flops_utilization(shape, peak=1e9) == pytest.approx(flops / report.makespan / 1e9)
