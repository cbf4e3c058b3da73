"""Are rows that begin alike one tree, is every target of a row one of it, and do results come back to the rows?"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from slices import whole
from torch import Tensor

from seq1f1b.data import PrefixTrees, TreeShape

Row = list[int]


def random_rows(rng: random.Random, most: int = 14) -> list[Row]:
    """Rows that share much: continued, cut short, equal, of one token."""
    rows: list[Row] = [[rng.randrange(3) for _ in range(rng.randint(2, 6))]]
    for _ in range(rng.randrange(most)):
        old = rng.choice(rows)
        more = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        rows.append((old[: rng.randint(0, len(old))] + more) or [rng.randrange(3)])
    rng.shuffle(rows)
    return rows


def tensors(rows: list[Any], dtype: torch.dtype = torch.int64) -> list[Tensor]:
    return [torch.tensor(row, dtype=dtype) for row in rows]


class Padded:
    """Makes padded tensors of what rows have, each row at its own place; padding holds 7."""

    def __init__(self, rows: list[Row], places: str, rng: random.Random) -> None:
        self.length = max(map(len, rows)) + 2
        free = [self.length - len(row) for row in rows]
        self.places = {"right": [0] * len(rows), "left": free, "both": [rng.randint(0, n) for n in free]}[places]
        self.mask = torch.zeros(len(rows), self.length, dtype=torch.int64)
        for i, row in enumerate(rows):
            self.mask[i, self.places[i] : self.places[i] + len(row)] = 1

    def __call__(self, rows: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        values = tensors(rows, dtype)
        out = torch.full((len(rows), self.length, *values[0].shape[1:]), 7, dtype=dtype)
        for i, value in enumerate(values):
            out[i, self.places[i] : self.places[i] + len(value)] = value
        return out


def prefixes_of(trees: PrefixTrees) -> list[list[tuple[int, ...]]]:
    """For each tree and token all tokens up to its target, read off the nodes, their parents and the labels alone."""
    found = []
    for shape, tokens, target in zip(trees.shapes, trees.tokens, trees.targets, strict=True):
        ends: list[tuple[int, ...]] = []  # inputs up to the end of each node
        own: list[tuple[int, ...]] = []
        offset = 0
        for size, parent in zip(shape.sizes, shape.parents, strict=True):
            path = ends[parent] if parent >= 0 else ()
            for i in range(offset, offset + size):
                path += (int(tokens[i]),)
                own.append((*path, int(target["labels"][i])))
            ends.append(path)
            offset += size
        found.append(own)
    return found


def check_shapes(trees: PrefixTrees, min_shared: int) -> None:
    for shape in trees.shapes:
        children = [shape.parents.count(node) for node in range(len(shape.sizes))]
        assert shape.parents[0] == -1 and all(0 <= parent < i for i, parent in enumerate(shape.parents) if i)
        assert all(size >= (min_shared if count else 1) for size, count in zip(shape.sizes, children, strict=True))
        assert 1 not in children, "a node with one child is one node with it"


SEEDS = [0, *whole(range(1, 20))]
CASES = [seed if not seed else pytest.param(seed, marks=pytest.mark.full) for seed in SEEDS]


@pytest.mark.parametrize("seed", CASES)
def test_each_prefix_is_in_the_trees_once(seed: int) -> None:
    """The truth is the set of all prefixes: a trie has one place for each."""
    rng = random.Random(seed)
    for _ in range(100):
        rows = random_rows(rng)
        groups = [(rng.randrange(2), rng.choice("ab")) for _ in rows] if rng.random() < 0.5 else None
        if max(map(len, rows)) < 2:
            continue
        trees = PrefixTrees(tensors(rows), groups=groups, min_shared=1)
        check_shapes(trees, 1)
        label: list[Any] = groups or [None] * len(rows)
        want: dict[Any, int] = {}
        for i, row in enumerate(rows):
            for end in range(2, len(row) + 1):
                key = (label[i], tuple(row[:end]))
                want[key] = want.get(key, 0) + 1
        found: dict[Any, int] = {}
        for tree, (prefixes, target) in enumerate(zip(prefixes_of(trees), trees.targets, strict=True)):
            own = {label[i] for i, at in enumerate(trees.tree_of_row) if at == tree}
            assert len(own) == 1, "rows of different groups are in one tree"
            for prefix, weight in zip(prefixes, target["weights"].tolist(), strict=True):
                assert (*own, prefix) not in found
                found[(*own, prefix)] = weight
        assert found == want
        assert trees.tree_token_ratio == sum(want.values()) / len(want)


def number_of(prefix: tuple[int, ...]) -> float:
    """A number that tells prefixes apart."""
    return float(hash(prefix) % 1_000_003)


def sums_over(rows: list[Row], masks: list[list[float]], values: list[list[float]]) -> list[float]:
    """Sums over the supervised targets of all rows: weight times a number of prefix and target; times value."""
    sums = [0.0, 0.0]
    for row, mask, value in zip(rows, masks, values, strict=True):
        for i in range(1, len(row)):
            each = mask[i] * number_of(tuple(row[:i])) * (1 + row[i])
            sums[0] += each
            sums[1] += each * value[i] if mask[i] else 0.0
    return sums


@pytest.mark.parametrize("seed", CASES)
def test_rows_get_what_their_own_prefix_gives(seed: int) -> None:
    """A number made of a whole prefix, taken on the trees and given back, is the one of the rows; so are sums of it
    times weight and value, over random masks, values, groups, least nodes and forms of padding."""
    rng, parted = random.Random(seed), 0
    for case in range(60):
        rows = [row * 2 for row in random_rows(rng)]
        masks = [[rng.choice((0.0, 0.0, 1.0, 0.5, -1.0)) for _ in row] for row in rows]
        values = [[rng.choice((1.0, 1.0, 1.0, 2.0)) if m else float("nan") for m in mask] for mask in masks]
        padded = Padded(rows, ("left", "right", "both")[case % 3], rng)
        make, least = tensors if case % 4 == 0 else padded, rng.randint(1, 3)
        trees = PrefixTrees(
            make(rows),
            make(masks, torch.float64),
            groups=[rng.randrange(2) for _ in rows],
            min_shared=least,
            attention_mask=None if make is tensors else padded.mask,
            advantages=make(values, torch.float32),
            pairs=make([[[v, i] for i, v in enumerate(value)] for value in values], torch.float32),
        )
        check_shapes(trees, least)
        parted += bool(trees.told_apart)
        on_trees = [
            torch.tensor([number_of(prefix[:-1]) for prefix in tree], dtype=torch.float64)
            for tree in prefixes_of(trees)
        ]
        back = trees.rows(on_trees, fill=-1.0)
        if isinstance(back, Tensor):
            assert (back[padded.mask == 0] == -1.0).all()
            back = [row[mask == 1] for row, mask in zip(back, padded.mask, strict=True)]
        want = [[-1.0, *(number_of(tuple(row[:end])) for end in range(1, len(row)))] for row in rows]
        assert [row.tolist() for row in back] == want
        got = [0.0, 0.0]
        for f, target in zip(on_trees, trees.targets, strict=True):
            each = target["weights"] * f * (1 + target["labels"])
            got[0] += float(each.sum())
            got[1] += float((each * target["advantages"]).sum())
            assert torch.equal(target["pairs"][:, 0], target["advantages"])
        assert got == pytest.approx(sums_over(rows, masks, values), rel=1e-12, abs=1e-9)
    assert parted > 5, "values that differ ended sharing in some cases"


def least_tokens(rows: list[Row], begin: int, least: int) -> int:
    """Tokens of the best tree by hand: follows rows while they agree, and makes a node of that where it is enough."""
    rows = [row for row in rows if len(row) > begin + 1]
    if not rows:
        return 0
    longest, end = max(map(len, rows)), begin
    while end + 1 < longest and len({row[end + 1] for row in rows if len(row) > end + 1}) == 1:
        end += 1
    if end + 1 == longest:
        return end - begin
    branches = [[row for row in rows if len(row) > end + 1 and row[end + 1] == token] for token in range(3)]
    start = end if end - begin >= least else begin
    return start - begin + sum(least_tokens(branch, start, least) for branch in branches if branch)


def test_nodes_of_fewer_tokens_are_repeated() -> None:
    rng = random.Random(2)
    for _ in range(60):
        rows, least = random_rows(rng), rng.randint(1, 6)
        if max(map(len, rows)) < 2:
            continue
        trees = PrefixTrees(tensors(rows), min_shared=least)
        check_shapes(trees, least)
        assert trees.tree_tokens == sum(
            least_tokens([row for row in rows if row[0] == token], 0, least) for token in range(3)
        )
    apart = PrefixTrees(tensors(rows), min_shared=10**12)
    assert [shape.parents for shape in apart.shapes] == [(-1,)] * len(apart)


def test_a_prompt_and_its_answers() -> None:
    """By hand: the last shared token opens each answer; prompts that are masked may have other advantages."""
    ids = torch.tensor([[5, 6, 7, 1, 2], [5, 6, 7, 1, 3], [5, 6, 7, 4, 0]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, 0]])
    advantages = torch.tensor([1.0, 1.0, -2.0])[:, None].expand_as(ids)
    attention = ids.ne(0).long()
    trees = PrefixTrees(ids, mask, min_shared=1, attention_mask=attention, advantages=advantages)
    assert trees.shapes == (TreeShape((2, 1, 1, 1, 1), (-1, 0, 1, 1, 0)),)
    assert trees.tokens[0].tolist() == [5, 6, 7, 1, 1, 7]
    (target,) = trees.targets
    assert target["labels"].tolist() == [-100, -100, 1, 2, 3, 4]
    assert target["weights"].tolist() == [0, 0, 2, 1, 1, 1]
    assert target["advantages"].tolist() == [0, 0, 1, 1, 1, -2]
    assert trees.rows([torch.arange(6)], fill=-1).tolist() == [[-1, 0, 1, 2, 3], [-1, 0, 1, 2, 4], [-1, 0, 1, 5, -1]]
    assert not trees.told_apart and trees.tree_token_ratio == 11 / 6
    row = [5, 6, 7, 1, 2, 3]  # two rows of it, behind a branch: the first value that differs ends what they share
    twice = torch.tensor([row, row, [5, 6, 8, 8, 8, 8]])
    first, later = (torch.tensor([[0.0] * 6, [0.0] * at + [1.0] * (6 - at), [0.0] * 6]) for at in (4, 5))
    for values in ({"a": first, "b": later}, {"a": later, "b": first}):
        assert PrefixTrees(twice, min_shared=1, **values).shapes == (TreeShape((1, 2, 2, 2, 4), (-1, 0, 1, 1, 0)),)
    unmasked = PrefixTrees(ids, min_shared=1, attention_mask=attention, advantages=advantages)
    assert [shape.parents for shape in unmasked.shapes] == [(-1, 0, 0), (-1,)]
    assert re.search("1 branches begin where .* advantages differs, the first at token 1 of rows", unmasked.told_apart)


def test_some_of_the_trees() -> None:
    """A replica takes its share; rows of the others get the fill."""
    rows = [[0, 1, 2, 3], [1, 1], [2, 2, 2], [0, 1, 2, 4], [9]]
    trees = PrefixTrees(tensors(rows), min_shared=1)
    assert trees.tree_of_row == [0, 1, 2, 0, -1]
    some = trees.take([2, 0])
    assert some.tree_of_row == [1, -1, 0, 1, -1] and (some.row_tokens, some.tree_tokens) == (8, 6)
    assert [t.tolist() for t in some.tokens] == [[2, 2], [0, 1, 2, 2]]
    back = some.rows([torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6])], fill=0)
    assert [row.tolist() for row in back] == [[0, 3, 4, 5], [0, 0], [0, 1, 2], [0, 3, 4, 6], [0]]
    for wrong in ([0, 0], [3], [-1]):
        with pytest.raises(ValueError, match=r"must be numbers of 0\.\.2, each at most once"):
            trees.take(wrong)


IDS = torch.arange(6).view(2, 3)
ROWS = tensors([[1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "no row has a target"),
        ({"input_ids": tensors([[1], [2]])}, "no row has a target: each has fewer than 2 tokens"),
        ({"input_ids": tensors([[1, 2], []])}, "row 1 is empty: leave it out"),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "row 0 is empty"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 1]])}, "row 1 has padding between tokens"),
        ({"attention_mask": torch.ones(2, 4)}, r"is \(2, 4\), input_ids is \(2, 3\): must be alike"),
        ({"input_ids": ROWS, "attention_mask": torch.ones(2, 3)}, "rows have no padding"),
        ({"input_ids": torch.arange(3)}, r"has shape \(3,\), must be \(rows, tokens\), or a list"),
        ({"input_ids": torch.rand(2, 3)}, "must be whole numbers"),
        ({"input_ids": [[1, 2]]}, "row 0 must be a one-dimensional tensor"),
        ({"advantages": torch.rand(2)}, "must have a value for each token; one for each row becomes"),
        ({"input_ids": ROWS, "old": [torch.rand(2)] * 2}, "old of row 1 has 2 values, must have one for each of 3"),
        ({"input_ids": ROWS, "loss_mask": [torch.ones(2)]}, "has 1 rows"),
        ({"loss_mask": torch.tensor([[1, 1, 1], [1, 1, float("inf")]])}, "row 1 holds inf"),
        ({"groups": [1, 2, 3]}, "groups has 3 values, must have one for each of 2 rows"),
        ({"groups": [{}, {}]}, "unhashable type: 'dict'"),
        ({"min_shared": 0}, "min_shared is 0, must be at least 1"),
        ({"min_shared": 1.5}, "min_shared must be an int, got float"),
        ({"labels": torch.rand(2, 3)}, "may not be named 'labels'"),
    ],
)
def test_bad_rows(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        PrefixTrees(**({"input_ids": IDS} | change))


def test_values_of_other_trees() -> None:
    with pytest.raises(ValueError, match="values are not as many or not as long as the trees"):
        PrefixTrees(IDS).rows([torch.rand(2)])
