"""Rows and segments of a step: documents and trees, cut into units of about equal time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from seq1f1b.attention.packing import best_fit
from seq1f1b.documents.rows import positions_of
from seq1f1b.partition import MOST_TOKENS
from seq1f1b.planning.cost import CostModel, PackedRow
from seq1f1b.seconds import Span, arrays_of, pairs_of

__all__: list[str] = []

_STRETCH = 0.05  # share by which a unit may be longer than wanted, to leave no small rest
_PARTS = 1 << 20  # parts of a unit's time, the whole numbers by which packing counts
_WAITS = 0.7  # a rank waits for this share of the longest unit's excess over the mean; from simulated steps of trees


class Rates(NamedTuple):
    """Seconds of F and B together on the mean stage: per token, per pair of tokens that attend, per unit."""

    token: float
    pair: float
    unit: float

    @classmethod
    def from_cost(cls, cost: CostModel) -> Rates:
        """Computes the rates from units that are too large for floors to count."""
        tokens, pairs, windows = 1 << 20, 1 << 30, cost.parts.windows
        none, near = (0.0,) * len(windows), tuple(min(pairs, pairs_of((tokens,), 0, tokens, w)) for w in windows)
        spans = [Span(tokens, 0, tokens, none), Span(2 * tokens, 0, tokens, none), Span(tokens, pairs, tokens, near)]
        found, _ = cost.source.seconds(arrays_of(spans))
        once, twice, attending = (found.total.sum(0) / cost.num_stages).tolist()
        return cls((twice - once) / tokens, (attending - once) / pairs, max(2 * once - twice, 1e-9))

    def of(self, tokens: int) -> float:
        """Returns the seconds of a whole document, without the seconds per unit."""
        return self.token * tokens + self.pair * tokens * (tokens + 1) / 2

    def of_node(self, begin: int, tokens: int) -> float:
        """Returns the seconds of a node. begin: tokens before the node on the path."""
        return self.of(begin + tokens) - self.of(begin)

    def position(self, seconds: float) -> float:
        """Returns the number of a document's first tokens that take the given seconds."""
        b = self.token + self.pair / 2
        return 2 * seconds / (b + math.sqrt(b * b + 2 * self.pair * seconds))

    def best_unit(self, work: float, num_ranks: int) -> float:
        """Returns the seconds of a unit for the shortest step, if rows could be cut anywhere.

        Units of u seconds make a step of work + work / u * unit + (num_ranks - 1) (u + unit), least at the root.
        """
        return math.sqrt(work * self.unit / max(1, num_ranks - 1))


class TreeShape(NamedTuple):
    """A tree of nodes. A node is a run of tokens; the data of a tree lie node after node.

    Attributes:
        sizes: tokens of each node.
        parents: parent of each node, a node of a smaller number; -1 for node 0, the root.
    """

    sizes: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of_prompt(cls, prompt: int, responses: Sequence[int]) -> TreeShape:
        """Makes a tree from the tokens of a prompt, and of each response."""
        return cls((prompt, *responses), (-1, *[0] * len(responses)))

    @property
    def tokens(self) -> int:
        """Total tokens over all nodes."""
        return sum(self.sizes)

    @property
    def begins(self) -> list[int]:
        """Position of each node's first token along the path from the root."""
        return positions_of(self.parents, self.sizes)

    @property
    def paths(self) -> list[int]:
        """Tokens of each path from the root to a leaf, which are the lengths of the rows behind the tree."""
        inner, ends = set(self.parents), map(sum, zip(self.begins, self.sizes, strict=True))
        return [end for node, end in enumerate(ends) if node not in inner]

    @property
    def is_chain(self) -> bool:
        """Whether every node's parent is the node before."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def check(self, name: str) -> None:
        """Raises ``ValueError``, beginning with ``name``, unless sizes and parents describe a tree."""
        if not self.sizes or len(self.sizes) != len(self.parents):
            raise ValueError(f"{name} has {len(self.sizes)} nodes and {len(self.parents)} parents: each node has one")
        for node, (size, parent) in enumerate(zip(self.sizes, self.parents, strict=True)):
            if size < 1:
                raise ValueError(f"{name}: node {node} has {size} tokens, must have at least 1")
            if not (0 <= parent < node or node == 0 == parent + 1):
                rule = f"one of 0..{node - 1}: a parent comes before its children, and only node 0 is a root"
                rule = rule if node else "nothing (-1): it is the root"
                raise ValueError(f"{name}: node {node} follows {parent}, must follow {rule}")


def tokens_of(documents: Sequence[int | TreeShape]) -> list[int]:
    """Returns the tokens of each document, or of all nodes of a tree.

    Raises:
        TypeError, ValueError: no documents, an empty document, or a document that is too long.
    """
    if not documents:
        raise ValueError("there are no documents")
    found = []
    for index, document in enumerate(documents):
        if isinstance(document, TreeShape):
            document.check(f"tree {index}")
        elif not isinstance(document, int):
            raise TypeError(f"document {index} has {document!r} tokens, must be a whole number")
        found.append(document.tokens if isinstance(document, TreeShape) else document)
        if not 1 <= found[-1] <= MOST_TOKENS:
            raise ValueError(f"document {index} has {found[-1]} tokens, must have 1 to {MOST_TOKENS}")
    return found


class Tree:
    """A tree with the seconds of each node."""

    def __init__(self, shape: TreeShape, rates: Rates) -> None:
        self.shape, self.begins = shape, shape.begins
        self.offsets = [0, *accumulate(shape.sizes)]  # position of each node in the tree's data
        self.seconds = list(map(rates.of_node, self.begins, shape.sizes))
        self.children: list[list[int]] = [[] for _ in shape.sizes]
        for node, parent in enumerate(shape.parents[1:], 1):
            self.children[parent].append(node)
        self.leaves = [[child for child in own if not self.children[child]] for own in self.children]  # of each parent


def best_unit(documents: Sequence[int | Tree], seconds: Sequence[float], rates: Rates, num_ranks: int) -> float:
    """Returns the seconds of a unit for about the shortest step.

    Documents can be cut and packed into units of any time. Nodes of a tree can be cut, and leaves of one parent packed;
    the short nodes left make short units, and a pipeline waits for long units beside short units.

    Args:
        seconds: seconds of each document, or of all nodes of a tree, without the seconds per unit.
    """
    trees = [item for item in documents if isinstance(item, Tree)]
    work = sum(seconds)
    smooth = rates.best_unit(work, num_ranks)
    if not trees:
        return smooth
    alone: list[float] = []  # seconds of nodes that share no unit
    together: list[float] = []  # seconds of the leaves of one parent, as one entry
    for tree in trees:
        for node, leaves in enumerate(tree.leaves):
            together += [sum(tree.seconds[leaf] for leaf in leaves)] if leaves else []
            alone += [tree.seconds[node]] if tree.children[node] else []
    nodes, rest = np.array(alone + together), work - sum(alone) - sum(together)
    most = float(nodes.max())

    def step(unit: float) -> float:
        """Returns the estimated seconds of a step."""
        units = float(np.ceil(nodes / unit - _STRETCH).clip(1).sum()) + rest / unit
        whole = work + units * rates.unit
        longer = max(0.0, (min(unit, most) + rates.unit) * units / whole - 1)
        return whole * (1 + _WAITS * longer) + (num_ranks - 1) * (unit + rates.unit)

    return min((smooth * math.pow(2.0, -power / 4) for power in range(-4, 28)), key=step)


def rows_of(
    documents: Sequence[int | Tree], work: Sequence[float], unit: float, rates: Rates, packs: bool
) -> tuple[PackedRow, ...]:
    """Returns rows, the rows with the most segments first.

    A long document begins a row and is cut into segments; short documents fill the last segment, or share a row of one
    segment. A tree has a row to itself.

    Args:
        work: seconds of each document. unit: about the seconds of a unit.
        packs: leaves of one parent may share a unit.
    """
    rows, tokens = list[PackedRow](), {i: item for i, item in enumerate(documents) if not isinstance(item, Tree)}
    long, short = ([i for i in tokens if (work[i] > unit) == is_long] for is_long in (True, False))
    counts = [_count(work[i], unit) for i in long]
    taken = [min(_PARTS, math.ceil((work[i] / unit - n + 1) * _PARTS)) for i, n in zip(long, counts, strict=True)]
    for place, bin_ in enumerate(best_fit([math.ceil(work[i] / unit * _PARTS) for i in short], _PARTS, taken)):
        chosen, count = tuple([short[i] for i in bin_]), 1
        if place < len(long):
            chosen, count = (long[place], *chosen), counts[place]
        lengths = tuple([tokens[i] for i in chosen])
        rows.append(PackedRow(lengths, _cut(lengths, count, rates), indices=chosen))
    for i, item in enumerate(documents):
        if isinstance(item, Tree):
            rows.append(lay_out(item, unit, rates, packs)._replace(indices=(i,)))
    totals = {row.indices: sum(work[i] for i in row.indices) for row in rows}
    return tuple(sorted(rows, key=lambda row: (-len(row.sizes), -totals[row.indices])))


def _count(seconds: float, unit: float) -> int:
    """Returns the number of units of a run of tokens."""
    return max(1, math.ceil(seconds / unit - _STRETCH))


def _cut(documents: Sequence[int], count: int, rates: Rates, begin: int = 0) -> tuple[int, ...]:
    """Returns the tokens of a row's segments, of equal time. The first document may be long; begin: tokens before the
    document, for a node of a tree."""
    tokens = sum(documents)
    if count == 1:
        return (tokens,)
    before = rates.of(begin)
    share = (rates.of_node(begin, documents[0]) + sum(map(rates.of, documents[1:]))) / count
    ends = [min(documents[0], round(rates.position(before + share * i)) - begin) for i in range(1, count)]
    sizes = [end - first for first, end in zip([0, *ends], [*ends, tokens], strict=True)]
    if min(sizes) < 1:
        return _cut(documents, count + 1, rates, begin) if count < tokens else (1,) * tokens
    return tuple(sizes)


def lay_out(tree: Tree, unit: float, rates: Rates, packs: bool) -> PackedRow:
    """Lays a tree out in units: a long node becomes a chain of units, and short leaves of one parent share a unit.

    Segments are in preorder; a shared unit stands at the place of the first leaf.
    """
    sizes, offsets, seconds = tree.shape.sizes, tree.offsets, tree.seconds
    parts: list[tuple[int, ...]] = []
    parents: list[int] = []
    pieces: list[tuple[int, int]] = []
    stack: list[tuple[list[int], int]] = [([0], -1)]  # nodes of one unit, or one node, and the parent segment
    while stack:
        nodes, parent = stack.pop()
        pieces += [(offsets[node], sizes[node]) for node in nodes]
        if len(nodes) > 1:
            parts.append(tuple(sizes[node] for node in nodes))
            parents.append(parent)
            continue
        (node,) = nodes
        for size in _cut([sizes[node]], _count(seconds[node], unit), rates, tree.begins[node]):
            parts.append((size,))
            parents.append(parent)
            parent = len(parts) - 1
        if not (children := tree.children[node]):
            continue
        short = [leaf for leaf in tree.leaves[node] if packs and seconds[leaf] <= unit]
        groups = [[child] for child in children]
        if len(short) > 1:
            shares = [math.ceil(seconds[leaf] / unit * _PARTS) for leaf in short]
            groups = [sorted(short[i] for i in bin_) for bin_ in best_fit(shares, _PARTS)]
            groups += [[child] for child in set(children).difference(short)]
        stack += [(group, parent) for group in sorted(groups, reverse=True)]
    of_segments = tuple(map(sum, parts)), tuple(parents), tuple(parts)
    return PackedRow((tree.shape.tokens,), *of_segments, pieces=tuple(pieces))
