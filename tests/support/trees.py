"""Micro-batches that are trees: random ones, what a unit of them waits for, and random orders that keep the rules.

Written from the rules as sentences, and not from ``csrc/core``: a truth to hold it to.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from seq1f1b import Schedule, Unit

Trees = list[list[int]]  # [micro-batch][segment]: the segment that it follows, -1


def random_parents(rng: random.Random, most_nodes: int = 40, most_depth: int = 5) -> list[int]:
    """A tree, which may be a chain or one node; numbers of segments are of no particular walk through it."""
    parents, depth = [-1], [1]
    deepest = rng.randint(2, most_depth)
    for segment in range(1, rng.randint(1, most_nodes)):
        parents.append(rng.choice([s for s in range(segment) if depth[s] < deepest]))
        depth.append(depth[parents[-1]] + 1)
    return parents


def wide_parents(rng: random.Random) -> list[int]:
    """A prompt of a few segments and many responses, some of several segments and some that branch again."""
    parents = list(range(-1, rng.randint(1, 4) - 1))
    for _ in range(rng.randint(6, 16)):
        before = rng.randrange(len(parents)) if rng.random() < 0.2 else rng.choice([0, len(parents) // 4])
        for _ in range(rng.choice((1, 1, 1, 2))):
            parents.append(before)
            before = len(parents) - 1
    return parents


def path_of(parents: Sequence[int], segment: int) -> list[int]:
    """From the root to the segment itself."""
    path = [segment]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def children_of(parents: Sequence[int], segment: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == segment]


def makers_of(unit: Unit, trees: Trees, num_stages: int, kinds: Iterable[str], num_shards: int = 0) -> set[Unit]:
    """Units that must end before a unit starts, in an order of these passes: B and I, where both are among them.

    Args:
        num_shards: of a vocabulary that lies on the ranks.
    """
    kind, stage, m, s = unit
    parents, last, shards = trees[m], num_stages - 1, range(num_shards)
    if kind == "F":
        found = {("F", stage - 1, s), ("F", stage, parents[s])} | {("E", r, s) for r in shards if stage == 0}
    elif kind == "W":
        found = {("I", stage, s)}
    elif kind == "S":
        found = {("F", last, s)}
    elif kind == "T":
        found = {("S", r, s) for r in shards}
    elif kind == "G":
        found = {(back, 0, s) for back in "BI"}
    elif kind == "E":
        found = set()
    else:
        found = {("F", stage, s)} | {("T", r, s) for r in shards if stage == last}
        found |= {(back, stage + 1, s) for back in "BI"}
        found |= {(back, stage, child) for back in "BI" for child in children_of(parents, s)}
    return {Unit(k, at, m, i) for k, at, i in found if k in kinds and 0 <= at <= last and i >= 0}


def text_of(trees: Trees, ranks: Sequence[Sequence[Unit]]) -> str:
    parents = " ".join(",".join(map(str, own)) for own in trees)
    lines = (" ".join(f"[{unit.stage}]{unit}" for unit in units) for units in ranks)
    return "\n".join([f"parents {parents}", *lines])


def random_tree_order(rng: random.Random, most_nodes: int = 8) -> tuple[Schedule, Trees]:
    """An order that keeps every rule, loop or V, split or whole or without a backward: no family's."""
    P, v = rng.randint(1, 3), rng.randint(1, 2)
    trees = [random_parents(rng, most_nodes) for _ in range(rng.randint(1, 3))]
    S, split, has_backward = P * v, rng.random() < 0.4, rng.random() < 0.85
    placement = rng.choice([[s % P for s in range(S)], [min(s % (2 * P), 2 * P - 1 - s % (2 * P)) for s in range(S)]])
    back = "I" if split else "B"
    kinds = "F" + (back + "W" * split if has_backward else "")
    left = [
        Unit(kind, stage, m, s)
        for kind, stage in itertools.product(kinds, range(S))
        for m, own in enumerate(trees)
        for s in range(len(own))
    ]
    waits = {unit: makers_of(unit, trees, S, kinds) for unit in sorted(left)}
    takers: dict[Unit, list[Unit]] = {}
    for unit, makers in waits.items():
        for maker in makers:
            takers.setdefault(maker, []).append(unit)
    ready = [unit for unit, makers in waits.items() if not makers]
    ranks: list[list[Unit]] = [[] for _ in range(P)]
    lean = rng.choice(("", "F", back))  # some orders go far ahead, some go back at once
    while ready:
        unit = rng.choice([unit for unit in ready if unit.kind == lean] or ready)
        ready.remove(unit)
        ranks[placement[unit.stage]].append(unit)
        for taker in takers.get(unit, ()):
            waits[taker].remove(unit)
            if not waits[taker]:
                ready.append(taker)
    return Schedule.from_text(text_of(trees, ranks)), trees
