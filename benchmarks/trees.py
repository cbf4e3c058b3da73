"""What trees of segments gain: the simulated step of rows, of a packed tree and of nested units, for three shapes.

    python benchmarks/trees.py simulate

Shapes: one prompt with its responses; trajectories of an agent, a trunk from which others branch at several depths; one
document with many questions. Each is run three ways, over P ranks and two trees a step:

rows    every path alone from its first token, a micro-batch each, Seq1F1B over equal FLOPs
packed  every token of a tree once, in one row of T with a dense mask: linear layers as in a tree, and attention to all
        that lies before a segment and in it, for a mask saves no blocks (T^2 / 2); Seq1F1B over equal FLOPs
nested  units of a tree, branch by branch, each with the attention of its own path

A unit's forward takes its tokens, their pairs of keys at the rate of attention, and a fixed cost of launches, which the
short units of a tree pay most often. The planner cuts nodes into units, and packs leaves of one parent into them. The
backward takes twice the forward. Each way has the best of a few lengths of its units. Messages take no time.
``seq1f1b plan --prompt 2048 --responses 8x256`` does the same for a model on a machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import header

from seq1f1b import Costs, build_schedule
from seq1f1b.planning.step_rows import MOST_TOKENS, Rates, Tree, lay_out
from seq1f1b.planning.tree_shape import TreeShape
from seq1f1b.schedule import StepMemory
from seq1f1b.seconds import spans_of_tree

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
RATES = Rates(token=1.0, pair=1 / HALF, unit=FIXED)


def trajectories(trunk: int, turn: int, depth: int, branches: int) -> TreeShape:
    """A trunk of turns; from the end of each one other turns branch off, and each of these goes on for one more."""
    sizes, parents, last = [trunk], [-1], 0
    for _ in range(depth):
        for _ in range(branches):
            sizes += [turn, turn]
            parents += [last, len(parents)]
        sizes.append(turn)
        parents.append(last)
        last = len(parents) - 1
    return TreeShape(tuple(sizes), tuple(parents))


SHAPES = {
    "1 prompt x 8 responses": TreeShape.of_prompt(2048, [256] * 8),
    "1 prompt x 16 responses": TreeShape.of_prompt(1024, [1024] * 16),
    "agent trajectories": trajectories(2048, 512, 5, 2),
    "1 document x 32 questions": TreeShape.of_prompt(16384, [128] * 32),
}


@dataclass
class Way:
    """Micro-batches of a tree: for each the forward seconds and tokens of its units, and what these follow."""

    forward: list[list[float]]
    tokens: list[list[int]]
    parents: list[list[int]]

    @classmethod
    def of(cls, shapes: Sequence[TreeShape], limit: float) -> Way:
        """Trees in units of so many seconds, as the planner lays them out."""
        way = cls([], [], [])
        for shape in shapes:
            row = lay_out(Tree(shape, RATES), limit, MOST_TOKENS, RATES, packs=True)
            assert row.parents is not None
            spans = spans_of_tree(row.parts, row.parents)
            way.forward.append([FIXED + span.tokens + span.pairs / HALF for span in spans])
            way.tokens.append([span.tokens for span in spans])
            way.parents.append(list(row.parents))
        return way


# -- three ways --------------------------------------------------------------------------------------------------------


def rows(tree: TreeShape, limit: float) -> Way:
    return Way.of([TreeShape.of_prompt(tokens, []) for tokens in tree.paths], limit)


def packed(tree: TreeShape, limit: float) -> Way:
    way = Way.of([TreeShape.of_prompt(tree.tokens, [])], limit)
    way.forward[0] = [
        own + size * (size - 1) / 2 / HALF for own, size in zip(way.forward[0], way.tokens[0], strict=True)
    ]
    return way


def nested(tree: TreeShape, limit: float) -> Way:
    return Way.of([tree], limit)


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


def best(way: Callable[[TreeShape, float], Way], tree: TreeShape, num_ranks: int) -> tuple[float, int]:
    return min(run(way(tree, limit), num_ranks) for limit in LIMITS)


def table(ranks: Sequence[int]) -> list[tuple[str, int, list[float], list[int], float]]:
    """Shape, P, makespans and peaks of the three ways, and how many times the tree's tokens its paths have."""
    found = []
    for name, tree in SHAPES.items():
        shared = sum(tree.paths) / tree.tokens
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
