"""Does a plan of trees hold every node along its path, count their cost there, fit, and train as each row alone?"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_planned_training import random_lengths
from tiny_model import Config, stage_of, whole_model
from torch import Tensor

from seq1f1b import Loss, ModelShape, PipelineEngine, build_schedule
from seq1f1b.data import PrefixTrees, TreeShape
from seq1f1b.planning.cost import CostModel, PackedRow
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step
from seq1f1b.seconds import spans_of
from seq1f1b.testing import run_ranks

MODEL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=1000)
LLAMA = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=0)


def cost_of(num_ranks: int, model: ModelShape = MODEL, machine: str = "cpu-zen5") -> CostModel:
    return CostModel(model, load_hardware(machine), num_ranks=num_ranks, seq_len=64)


def random_tree(rng: random.Random, nodes: int = 20, most: int = 300) -> TreeShape:
    sizes = tuple(rng.choice((1, rng.randint(1, most))) for _ in range(nodes))
    return TreeShape(sizes, (-1, *(rng.choice((i, rng.randint(0, i))) for i in range(nodes - 1))))


def nodes_of(tree: TreeShape) -> list[tuple[int, int]]:
    """For each token of a tree's data its node, and its place in it."""
    return [(node, i) for node, size in enumerate(tree.sizes) for i in range(size)]


def pairs_of_tokens(tree: TreeShape) -> list[int]:
    """For each token of a tree's data how many tokens of its path it sees, counted one by one."""
    begins: list[int] = []
    for parent in tree.parents:
        begins.append(0 if parent < 0 else begins[parent] + tree.sizes[parent])
    return [begins[node] + i + 1 for node, i in nodes_of(tree)]


def check_row(tree: TreeShape, row: PackedRow, tokens: list[int], packs: bool) -> None:
    """A row's segments hold these tokens of the tree's data: each unit follows what its nodes follow."""
    where, sees = nodes_of(tree), pairs_of_tokens(tree)
    assert sorted(tokens) == list(range(tree.tokens))
    assert row.parents is not None and row.parts is not None
    assert tuple(map(sum, row.parts)) == row.sizes and row.parents[0] == -1
    ends: list[list[int]] = []  # the path up to each segment's end
    at = 0
    spans = spans_of(row.sizes, row.documents, (), row.parents, row.parts)
    for part, parent, spanned, pairs in zip(row.parts, row.parents, spans.tokens, spans.pairs, strict=True):
        assert len(part) == 1 or packs
        path = ends[parent] if parent >= 0 else []
        for size in part:
            own = tokens[at : at + size]
            (node,) = {where[t][0] for t in own}
            before = own[0] - where[own[0]][1]  # the node's first token
            if where[own[0]][1]:
                assert path[-1] == own[0] - 1, "goes on with its node"
            elif tree.parents[node] >= 0:
                assert where[path[-1]] == (tree.parents[node], tree.sizes[tree.parents[node]] - 1)
            assert own == list(range(own[0], own[0] + size)) and before >= 0
            at += size
        assert spanned == sum(part) and pairs == sum(sees[t] for t in tokens[at - sum(part) : at])
        ends.append(path + tokens[at - sum(part) : at])
        assert len(part) == 1 or len(ends) - 1 not in row.parents, "nothing follows several leaves"


@pytest.mark.parametrize("packs", [True, False])
def test_every_token_is_in_one_segment_and_units_follow_their_nodes(packs: bool) -> None:
    """Documents, trees, and both."""
    rng, shared = random.Random(0), 0
    for case in range(100):
        trees = [random_tree(rng, rng.randint(1, 25)) for _ in range(rng.randint(0, 4))] if case % 4 == 0 else []
        documents = random_lengths(rng)
        most = rng.choice((None, 64, 512))
        plan = plan_step([*documents, *trees], cost_of(rng.randint(1, 4)), siblings=packs, unit_tokens=most)
        assert sorted(itertools.chain(*plan.rows)) == list(range(len(documents) + len(trees)))
        counts = [len(sizes) for sizes in plan.segment_sizes]
        assert counts == sorted(counts, reverse=True) and plan.schedule.segments_of == tuple(counts)
        numbers = [torch.arange(length) for length in plan.lengths]
        joined = plan.join(numbers)
        for row, priced, tokens in zip(plan.rows, plan.costs.rows, joined, strict=True):
            assert min(priced.sizes) >= 1
            tree = trees[row[0] - len(documents)] if row[0] >= len(documents) else None
            if tree is None or tree.is_chain:
                assert priced.parents is None and sum(priced.sizes) == tokens.shape[1]
                assert tokens[0].tolist() == list(itertools.chain(*(range(plan.lengths[i]) for i in row)))
            else:
                assert len(row) == 1
                check_row(tree, priced, tokens[0].tolist(), packs)
                shared += any(len(part) > 1 for part in priced.parts or ())
        assert all(torch.equal(a, b) for a, b in zip(plan.split(joined), numbers, strict=True))
        assert [sum(map(sum, map(_as_tuple, sizes))) for sizes in plan.segment_sizes] == [t.shape[1] for t in joined]
        plan.schedule.check()
    assert (shared > 2) == packs


def _as_tuple(size: Any) -> tuple[int, ...]:
    return size if isinstance(size, tuple) else (size,)


def test_rows_stay_where_sharing_does_not_pay() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(32000, (20,), generator=generator)
    long = torch.randint(32000, (2000,), generator=generator)
    answers = [torch.randint(32000, (600,), generator=generator) for _ in range(6)]
    rows = [torch.cat([prompt, answer]) for answer in answers[:4]] + [torch.cat([long, answer]) for answer in answers]
    trees = PrefixTrees(rows, cost=cost_of(4, LLAMA, "h100"))
    assert trees.unshared == (0, 1, 2, 3) and trees.tree_of_row == [0, 1, 2, 3, *[4] * 6]
    assert [shape.parents for shape in trees.shapes] == [(-1,)] * 4 + [(-1, *[0] * 6)]
    assert not PrefixTrees(rows).unshared and len(PrefixTrees(rows)) == 2


def test_memory_is_that_of_a_path() -> None:
    """An order of one branch after another holds less than one by numbers; under a budget units give way."""
    tree = TreeShape((2000, *[500] * 8), (-1, *[0] * 8))
    cost = cost_of(2)
    plan = plan_step([tree] * 4, cost, siblings=False, unit_tokens=500, schedule="seq1f1b")
    counts = {"num_ranks": 2, "num_microbatches": 4, "num_segments": [len(sizes) for sizes in plan.segment_sizes]}
    numbers = build_schedule("seq1f1b", **counts, parents=plan.parents, options={"trees": "numbers"})
    most = max(rank.total for rank in plan.ranks)
    by_numbers = plan.costs.rank_bytes(numbers)
    for rank, other in zip(plan.ranks, by_numbers, strict=True):
        assert rank.kv < 0.75 * other.kv and rank.activations < other.activations
    with pytest.raises(ValueError, match="the smallest budget that does is") as refused:
        plan_step([tree] * 4, cost, schedule="seq1f1b", memory=1)
    least = int(re.findall(r"is ([0-9,]+) bytes", str(refused.value))[0].replace(",", ""))
    tight = plan_step([tree] * 4, cost, schedule="seq1f1b", memory=(least + most) // 2)
    assert tight.remedied and max(rank.total for rank in tight.ranks) <= (least + most) // 2 and tight.parents


def make_rows() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Two prompts with answers, one of which goes on in two ways, and rows that share nothing; masks; advantages."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> Tensor:
        return torch.randint(29, (count,), generator=generator)

    first, second, middle = tokens(40), tokens(17), tokens(9)
    rows = [torch.cat([first, tokens(n)]) for n in (7, 3, 12, 5)]
    rows += [torch.cat([first, middle, tokens(n)]) for n in (4, 8)]
    rows += [torch.cat([second, tokens(n)]) for n in (2, 2, 30)]
    rows += [tokens(n) for n in (25, 3, 2)]
    masks = [torch.rand(len(row), generator=generator).gt(0.2).double() for row in rows]
    for row, prompt in itertools.chain(((i, 40) for i in range(6)), ((i, 17) for i in range(6, 9))):
        masks[row][:prompt] = 0
    return rows, masks, [torch.randn(len(row), generator=generator, dtype=torch.float64) for row in rows]


@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "seq1f1b"), (2, "seq-zb-h1"), (1, "seq1f1b")])
def test_a_planned_step_of_trees_trains_as_each_row_alone(num_ranks: int, schedule: str) -> None:
    """fp64: the sum of weighted losses, all gradients, and what each target of each row was worth."""
    rows, masks, advantages = make_rows()
    trees = PrefixTrees(rows, masks, min_shared=4, advantages=advantages)
    assert max(len(shape.sizes) for shape in trees.shapes) > 5 and trees.tree_token_ratio > 1.5
    plan = plan_step(trees, cost_of(num_ranks), unit_tokens=16, schedule=schedule)
    assert any(isinstance(size, tuple) for sizes in plan.segment_sizes for size in sizes)
    assert any(len(row) > 1 for row in plan.rows), "documents beside trees"
    config = Config(layers=2)
    model = whole_model(config)

    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(output.flatten(0, 1), target["labels"].flatten(), reduction="none")
        return (each * (target["weights"] * target["advantages"]).flatten()).sum()

    def run(group: Any) -> tuple[dict[str, Tensor], Any, list[Tensor]]:
        engine = PipelineEngine(
            stage_of(model, config, group.rank, num_ranks),
            schedule=schedule,
            num_microbatches=4,
            num_segments=2,
            loss_fn=loss_fn,
            loss=Loss(reduction="sum", scale_grads=False),
            arg_rules={"doc_ids": "slice"},
            group=group,
        )
        arguments = {"target": plan.join(trees.targets), "kwargs": [{"doc_ids": ids} for ids in plan.doc_ids]}
        losses = engine.step(plan.join(trees.tokens), plan=plan, **arguments)
        _, logits = engine.eval(plan.join(trees.tokens), plan=plan, return_outputs=True, **arguments)
        return {name: p.grad for name, p in engine.named_parameters()}, logits, losses

    ranks = run_ranks(num_ranks, run)
    gradients = {name: grad for found, _, _ in ranks for name, grad in found.items()}
    assert num_ranks == 1 or ranks[0][1] is None  # the last rank alone has outputs
    logits = plan.split(ranks[-1][1])
    found = trees.rows([own.log_softmax(-1) for own in logits])
    total = torch.zeros((), dtype=torch.float64)
    for row, mask, values, own in zip(rows, masks, advantages, found, strict=True):
        output = model(row[None, :-1])[0]
        assert float((own[1:] - output.detach().log_softmax(-1)).abs().max()) < 1e-12
        each = F.cross_entropy(output, row[1:], reduction="none")
        total = total + (each * mask[1:] * values[1:]).sum()
    total.backward()
    assert float(sum(ranks[-1][2])) == pytest.approx(float(total.detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((gradients[name] - parameter.grad).norm()) <= 1e-12 * max(1.0, float(parameter.grad.norm())), name


@pytest.mark.parametrize(
    ("sizes", "parents", "message"),
    [
        ((1, 1, 1), (-1, 2, 0), "tree 0: node 1 follows 2, must follow one of 0..0"),
        ((1, 1), (-1, 1), "node 1 follows 1, must follow one of 0..0: a parent comes before its"),
        ((1, 1), (-1, -1), "node 1 follows -1, .* only node 0 is a root"),
        ((1, 1), (0, 0), r"node 0 follows 0, must follow nothing \(-1\): it is the root"),
        ((1, 0), (-1, 0), "node 1 has 0 tokens, must have at least 1"),
        ((1, 2), (-1,), "has 2 nodes and 1 parents: each node has one"),
        ((), (), "has 0 nodes and 0 parents"),
    ],
)
def test_bad_trees(sizes: tuple[int, ...], parents: tuple[int, ...], message: str) -> None:
    tree = TreeShape(sizes, parents)
    with pytest.raises(ValueError, match=message):
        plan_step([tree], cost_of(2))


def test_data_of_other_trees() -> None:
    plan: StepPlan = plan_step([TreeShape((3, 2, 2), (-1, 0, 0)), 4], cost_of(1))
    with pytest.raises(ValueError, match="not as many or not as long as those that were planned"):
        plan.join([{"labels": torch.zeros(7), "weights": torch.zeros(6)}, {"labels": torch.zeros(4)}])
    with pytest.raises(ValueError, match=r"rows are not as many or not as long .* give \(1, tokens, \.\.\.\) each"):
        plan.split([torch.zeros(7)])
    with pytest.raises(ValueError, match="only the rank of the last stage has values, others get none"):
        plan.split([])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_nested_order_holds_is_enough(num_ranks: int) -> None:
    """No bound is above it; with ``auto``, whose orders hold whole trees, no unit runs twice where it fits."""
    trees, cost = [TreeShape.of_prompt(512, [128] * 16)] * 2, cost_of(num_ranks)
    nested = plan_step(trees, cost, unit_tokens=300)
    peak = max(rank.total for rank in nested.ranks)
    assert nested.costs.least_bytes <= sum(rank.total for rank in nested.ranks) / num_ranks
    found = plan_step(trees, cost, unit_tokens=300, schedule="auto", memory=peak)
    assert found.remedied == 0 and max(rank.total for rank in found.ranks) <= peak
    whole = plan_step(trees, cost, unit_tokens=300, schedule="gpipe")
    assert whole.costs.least_bytes == nested.costs.least_bytes
    assert max(rank.total for rank in whole.ranks) > 1.2 * peak, "else trees as a whole would have fitted, too"
