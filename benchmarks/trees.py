"""What trees of segments gain: the simulated step of rows, of a packed tree and of nested units, for three shapes.

    python benchmarks/trees.py simulate

Shapes: one prompt with its responses; trajectories of an agent, a trunk from which others branch at several depths; one
document with many questions. Each is run three ways, over P ranks and two trees a step:

rows    every path alone from its first token, a micro-batch each, Seq1F1B over equal FLOPs
packed  every token of a tree once, in one row of T with a dense mask: linear layers as in a tree, and attention to all
        that lies before a segment and in it, for a mask saves no blocks (T^2 / 2); Seq1F1B over equal FLOPs
nested  units of a tree, branch by branch, each with the attention of its own path

A unit's forward takes its tokens, their pairs of keys at the rate of attention, and a fixed cost of launches, which the
short units of a tree pay most often; leaves of one parent share a unit while they fit into its seconds. The backward
takes twice the forward. Each way has the best of a few lengths of its units, as the planner chooses them. Messages take
no time.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import header

from seq1f1b import Costs, build_schedule
from seq1f1b.schedule import StepMemory

FIXED = 128  # tokens of linear layers that take as long as what a unit costs whatever it holds
HALF = 16384  # keys at which a token's attention takes as long as its linear layers
LIMITS = (
    200,
    250,
    300,
    400,
    500,
    600,
    800,
    1000,
    1200,
    1600,
    2000,
    3000,
    4000,
)  # seconds of a unit, in those of a token's linear layers
TREES = 4  # a step


@dataclass(frozen=True)
class Tree:
    """Tokens of nodes, and the node that each follows; nodes are as the data has them, not cut into units."""

    sizes: tuple[int, ...]
    parents: tuple[int, ...]

    def path(self, node: int) -> list[int]:
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def begin(self, node: int) -> int:
        """The position of its first token along its path."""
        return sum(self.sizes[above] for above in self.path(node)[:-1])

    @property
    def leaves(self) -> list[int]:
        return [node for node in range(len(self.sizes)) if node not in self.parents]


def star(trunk: int, leaf: int, count: int) -> Tree:
    return Tree((trunk, *[leaf] * count), (-1, *[0] * count))


def trajectories(trunk: int, turn: int, depth: int, branches: int) -> Tree:
    """A trunk of turns; from the end of each one other turns branch off, and each of these goes on for one more."""
    sizes, parents, last = [trunk], [-1], 0
    for _ in range(depth):
        for _ in range(branches):
            sizes += [turn, turn]
            parents += [last, len(parents)]
        sizes.append(turn)
        parents.append(last)
        last = len(parents) - 1
    return Tree(tuple(sizes), tuple(parents))


SHAPES = {
    "1 prompt x 8 responses": star(2048, 256, 8),
    "1 prompt x 16 responses": star(1024, 1024, 16),
    "agent trajectories": trajectories(2048, 512, 5, 2),
    "1 document x 32 questions": star(16384, 128, 32),
}


def seconds(tokens: int, pairs: float) -> float:
    """Forward of a unit, in those of a token's linear layers."""
    return FIXED + tokens + pairs / HALF


def pairs(begin: int, tokens: int) -> float:
    """Keys that tokens behind `begin` others attend to."""
    return tokens * begin + tokens * (tokens + 1) / 2


def cut(tokens: int, begin: int, limit: float) -> list[int]:
    """Parts of equal time, none above the limit but for what a unit costs anyway: how a long node becomes units."""

    def work(size: int) -> float:
        return size + pairs(begin, size) / HALF

    count = min(tokens, math.ceil(work(tokens) / limit))
    ends = [bisect.bisect_left(range(tokens), work(tokens) * i / count, key=work) for i in range(1, count)]
    return [b - a for a, b in itertools.pairwise([0, *ends, tokens])]


# -- three ways --------------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """Micro-batches of a tree: for each the forward seconds and tokens of its units, and what these follow."""

    forward: list[list[float]]
    tokens: list[list[int]]
    parents: list[list[int]]


def rows(tree: Tree, limit: float) -> Way:
    way = Way([], [], [])
    for leaf in tree.leaves:
        begin, own = 0, Way([[]], [[]], [])
        for size in cut(sum(tree.sizes[node] for node in tree.path(leaf)), 0, limit):
            own.forward[0].append(seconds(size, pairs(begin, size)))
            own.tokens[0].append(size)
            begin += size
        way.forward += own.forward
        way.tokens += own.tokens
        way.parents.append(list(range(-1, len(own.tokens[0]) - 1)))
    return way


def packed(tree: Tree, limit: float) -> Way:
    way = rows(Tree((sum(tree.sizes),), (-1,)), limit)
    way.forward[0] = [
        own + size * (size - 1) / 2 / HALF for own, size in zip(way.forward[0], way.tokens[0], strict=True)
    ]
    return way


def grouped(tree: Tree, limit: float) -> dict[int, int]:
    """For each leaf that shares a unit, the first leaf in it: units of one parent's leaves take about equal time."""
    first: dict[int, int] = {}
    for parent in range(len(tree.sizes)):
        leaves = [node for node in tree.leaves if tree.parents[node] == parent]
        work = {node: tree.sizes[node] + pairs(tree.begin(node), tree.sizes[node]) / HALF for node in leaves}
        of_unit = sum(work.values()) / max(1, math.ceil(sum(work.values()) / limit))
        done, opened = 0.0, -1.0
        for node in leaves:
            number = (done + work[node] / 2) // of_unit  # by its middle
            if number > opened:
                head, opened = node, number
            first[node], done = head, done + work[node]
    return first


def nested(tree: Tree, limit: float) -> Way:
    """Nodes cut into units; leaves of one parent that fit together are one unit, a document each."""
    way, first = Way([[]], [[]], [[]]), grouped(tree, limit)
    forward, tokens, parents = way.forward[0], way.tokens[0], way.parents[0]
    last = {-1: -1}  # of a node, the number of its last unit
    for node, (size, parent) in enumerate(zip(tree.sizes, tree.parents, strict=True)):
        begin, head = tree.begin(node), first.get(node, node)
        if head != node:
            forward[last[head]] += size + pairs(begin, size) / HALF
            tokens[last[head]] += size
            continue
        before = last[parent]
        for part in cut(size, begin, limit):
            forward.append(seconds(part, pairs(begin, part)))
            tokens.append(part)
            parents.append(before)
            before, begin = len(parents) - 1, begin + part
        last[node] = before
    return way


def run(way: Way, num_ranks: int) -> tuple[float, int]:
    """Makespan of a step, and the most tokens that a rank holds."""
    forward, tokens = way.forward * TREES, way.tokens * TREES
    order = build_schedule(
        "seq1f1b",
        num_ranks=num_ranks,
        num_microbatches=len(tokens),
        num_segments=[len(own) for own in tokens],
        parents=way.parents * TREES,
    )
    backward = [[2 * one for one in own] for own in forward]
    costs = Costs([forward] * num_ranks, [backward] * num_ranks)
    memory = StepMemory(activations=[tokens] * num_ranks)
    found = order.simulate(costs, memory=memory)
    assert found.memory is not None
    return found.makespan, max(found.memory.activations)


def best(way: Callable[[Tree, float], Way], tree: Tree, num_ranks: int) -> tuple[float, int]:
    return min(run(way(tree, limit), num_ranks) for limit in LIMITS)


def table(ranks: Sequence[int]) -> list[tuple[str, int, list[float], list[int], float]]:
    """Shape, P, makespans and peaks of the three ways, and how many times the tree's tokens its paths have."""
    found = []
    for name, tree in SHAPES.items():
        shared = sum(sum(tree.sizes[node] for node in tree.path(leaf)) for leaf in tree.leaves) / sum(tree.sizes)
        for num_ranks in ranks:
            times, peaks = zip(*(best(way, tree, num_ranks) for way in (rows, packed, nested)), strict=True)
            found.append((name, num_ranks, list(times), list(peaks), shared))
    return found


def simulate() -> None:
    print(
        header("Trees of segments, simulated: how many times as fast as rows, and tokens that the largest rank holds")
    )
    print(f"# a unit costs {FIXED} tokens beside its own; attention to {HALF} keys takes as long as linear layers;")
    print(f"# {TREES} trees a step; each way with its best units; `shared`: tokens of all paths over those of the tree")
    head = f"{'shape':<28}{'P':>2}{'shared':>9}{'packed':>9}{'nested':>9}{'nested / packed':>17}"
    print(f"\n{head}   held by rows, packed, nested")
    is_right = True
    for name, num_ranks, (of_rows, of_packed, of_nested), peaks, shared in table((2, 4, 8)):
        gains = (of_rows / of_packed, of_rows / of_nested, of_packed / of_nested)
        is_right &= of_rows > of_packed > of_nested
        print(
            f"{name:<28}{num_ranks:>2}{shared:>9.2f}{gains[0]:>9.2f}{gains[1]:>9.2f}{gains[2]:>17.2f}   "
            + ", ".join(map(str, peaks))
        )
    print(f"\nrows > packed > nested in every case: {'passed' if is_right else 'FAILED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("simulate",))
    parser.parse_args()
    simulate()


if __name__ == "__main__":
    main()
