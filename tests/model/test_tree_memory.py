"""Do bytes and rows of micro-batches that are trees follow the order, against a ledger in plain Python?"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from slices import full_only
from trees import Trees, path_of, random_tree_order

from seq1f1b import _C, Costs, Schedule, Unit, build_schedule
from seq1f1b.schedule import PeakMemory, StepMemory

# -- bytes -------------------------------------------------------------------------------------------------------------


def below(parents: list[int], segment: int) -> set[int]:
    return {s for s in range(len(parents)) if segment in path_of(parents, s)}


class Ledger:
    """What one rank holds by kind, from its units in turn: all that lives is a key in a dictionary, with its bytes."""

    def __init__(self, order: Schedule, trees: Trees, memory: StepMemory) -> None:
        self.trees, self.memory = trees, memory
        self.goes_back = order.kinds != {"F"}
        self.recomputed = {unit[1:] for rank in order.ranks for unit in rank if unit.kind == "R"}
        self.moved = {unit[1:] for rank in order.ranks for unit in rank if unit.kind == "L"}
        self.live: dict[tuple[object, ...], int] = {}
        self.peaks: dict[str, int] = defaultdict(int)

    def take(self, kind: str, unit: tuple[int, ...], amount: int) -> None:
        key = (kind, *unit)
        assert key not in self.live, "nothing is taken twice"
        self.live[key] = amount

    def peak(self) -> None:
        held: dict[str, int] = defaultdict(int)
        counts_with = {"rows": "kv", "gradient_rows": "kv_gradients", "kv": "kv", "kv_gradients": "kv_gradients"}
        for (kind, *_), amount in self.live.items():
            held[counts_with.get(str(kind), str(kind))] += amount
            held["total"] += amount
        for kind, amount in held.items():
            self.peaks[kind] = max(self.peaks[kind], amount)

    def run(self, units: tuple[Unit, ...]) -> dict[str, int]:
        for at, unit in enumerate(units):
            freed = self.begin(unit, units[:at], units[at + 1 :])
            self.peak()
            for key in freed:
                del self.live[key]
        assert not self.live, "all is given back"
        return self.peaks

    def begin(self, unit: Unit, before: tuple[Unit, ...], behind: tuple[Unit, ...]) -> list[tuple[object, ...]]:
        """Takes what the unit takes; returns the keys of what is free at its end."""
        kind, stage, m, s = unit
        cell, whole = (stage, m, s), (stage, m)
        memory, saved = self.memory, ("activations", *cell)

        def of_unit(table: Any) -> int:
            return int(table[stage][m][s])

        freed: list[tuple[object, ...]] = []
        if kind == "F":
            if not any(u.kind == "F" and (u.stage, u.microbatch) == whole for u in before):
                self.take("kv", whole, memory.kv[stage])
            self.take("rows", cell, of_unit(memory.kv_rows))
            if cell in self.recomputed:
                self.take("inputs", cell, of_unit(memory.inputs))
            else:
                self.take("activations", cell, of_unit(memory.activations))
            if not self.goes_back:
                freed += [saved, ("rows", *cell)]
                if not any((u.stage, u.microbatch) == whole for u in behind):
                    freed.append(("kv", *whole))
        if kind in "RL":
            self.take("activations", cell, of_unit(memory.activations))
        if kind == "A":
            freed.append(saved)
        if kind in "BI":
            if not any(u.kind in "BI" and (u.stage, u.microbatch) == whole for u in before):
                self.take("kv_gradients", whole, memory.kv_gradients[stage])
            for node in path_of(self.trees[m], s):  # what its backward adds to, unless another one of the branch has
                if ("gradient_rows", stage, m, node) not in self.live:
                    self.take("gradient_rows", (stage, m, node), memory.kv_gradient_rows[stage][m][node])
            freed += [("gradient_rows", *cell), ("rows", *cell)]
            freed += [("inputs", *cell)] if cell in self.recomputed else []
            if s == 0:
                freed += [("kv", *whole), ("kv_gradients", *whole)]
        if kind in "BW":
            freed.append(saved)
        return freed


def random_memory(rng: random.Random, order: Schedule, trees: Trees) -> StepMemory:
    def table() -> list[list[list[int]]]:
        return [[[rng.randint(0, 99) for _ in own] for own in trees] for _ in range(order.num_stages)]

    def row() -> list[int]:
        return [rng.randint(0, 99) for _ in range(order.num_stages)]

    return StepMemory(
        activations=table(),
        kv=row(),
        kv_rows=table(),
        kv_gradients=row(),
        kv_gradient_rows=table(),
        inputs=table(),
    )


def of_rank(peaks: PeakMemory, rank: int) -> dict[str, int]:
    return {name: getattr(peaks, name)[rank] for name in ("activations", "kv", "kv_gradients", "inputs", "total")}


@pytest.mark.parametrize("count", [100, *full_only((600,))])
def test_peaks_are_those_of_a_ledger(count: int) -> None:
    rng = random.Random(17 * count)
    num_trees = 0
    for _ in range(count):
        order, trees = random_tree_order(rng, 12)
        num_trees += order.parents is not None
        if order.kinds != {"F"}:
            chosen = {(m, s) for m, own in enumerate(trees) for s in range(len(own)) if rng.random() < 0.4}
            order = order.recompute(lambda unit, chosen=chosen: unit[2:] in chosen)
            order = order.offload() if rng.random() < 0.4 else order
        memory = random_memory(rng, order, trees)
        if order.rows is None:  # micro-batches of equal length have one column for each segment
            order = Schedule.from_text("parents " + " ".join("-" * len(trees)) + "\n" + order.to_text())
        peaks = order.peak_memory(memory)
        for rank, units in enumerate(order.ranks):
            expected = Ledger(order, trees, memory).run(units)
            assert of_rank(peaks, rank) == {name: expected[name] for name in of_rank(peaks, rank)}
    assert num_trees > 50


@pytest.mark.parametrize(
    ("middle", "most"), [("B0.3 B0.2 B0.1", 1110), ("B0.2 B0.3 B0.1", 1100), ("B0.3 B0.1 B0.2", 1100)]
)
def test_the_first_branch_that_goes_back_takes_the_trunk(middle: str, most: int) -> None:
    """Counted by hand: 1 and 2 follow 0, 3 follows 1."""
    order = Schedule.from_text(f"parents -1,0,0,1\nF0.0 F0.1 F0.2 F0.3 {middle} B0.0")
    assert order.peak_memory(StepMemory(kv_gradient_rows=[[[1000, 10, 100, 1]]])).kv_gradients == (most,)


@pytest.mark.parametrize("count", [25, *full_only((200,))])
def test_fit_holds_its_room(count: int) -> None:
    rng = random.Random(23 * count)
    num_fitted = 0
    for _ in range(count):
        order, trees = random_tree_order(rng, 10)
        if order.kinds == {"F"} or order.rows is None:
            continue
        memory = random_memory(rng, order, trees)
        most = order.peak_memory(memory).total
        least = order.recompute().peak_memory(memory).total
        room = [(a + max(a, b)) // 2 for a, b in zip(least, most, strict=True)]
        for by in (("recompute",), ("recompute", "offload")):
            fitted = order.fit(memory, room, by, Costs(tier=0.5))
            fitted.check()
            assert fitted.parents == order.parents
            if by == ("recompute",):
                assert all(a <= b for a, b in zip(fitted.peak_memory(memory).total, room, strict=True))
            num_fitted += "R" in fitted.kinds or "L" in fitted.kinds
    assert num_fitted > 5


# -- rows --------------------------------------------------------------------------------------------------------------


def live_rows(order: Schedule, trees: Trees, rank: int) -> list[set[tuple[int, int, int]]]:
    """While each unit runs, the cells of the rank whose keys somebody still reads."""
    goes_back = order.kinds != {"F"}
    units = order.ranks[rank]
    live: set[tuple[int, int, int]] = set()
    found = []
    for at, (kind, stage, m, s) in enumerate(units):
        live |= {(stage, m, s)} if kind == "F" else set()
        found.append(set(live))
        if goes_back:
            live -= {(stage, m, s)} if kind in "BI" else set()
        else:  # the last F of all that follow it, itself among them
            behind = {unit[1:] for unit in units[at + 1 :]}
            live = {(i, j, n) for i, j, n in live if any((i, j, other) in behind for other in below(trees[j], n))}
    return found


@pytest.mark.parametrize("count", [60, *full_only((800,))])
def test_live_segments_have_rows_of_their_own(count: int) -> None:
    rng = random.Random(29 * count)
    num_reused = 0
    for _ in range(count):
        order, trees = random_tree_order(rng, 12)
        columns = [[rng.randint(1, 50) for _ in own] for own in trees]
        sizes = [size for own in columns for size in own]
        if order.rows is None and order.parents is None:
            continue  # equal chains: see below
        first = [sum(map(len, trees[:m])) for m in range(len(trees))]
        for rank in range(order.num_ranks):
            rows, most = _C.schedule_assign_rows(order.handle, rank, array("q", sizes))
            end = 0
            for live in live_rows(order, trees, rank):
                taken: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
                for stage, m, s in live:
                    begin = rows[stage * len(sizes) + first[m] + s]
                    taken[stage, m].append((begin, begin + columns[m][s]))
                for ranges in taken.values():
                    ranges.sort()
                    assert ranges[0][0] >= 0
                    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "rows overlap"
                    end = max(end, ranges[-1][1])
            assert most == end, "a slot has the rows that are in use, and no more"
            num_reused += most < max(sum(own) for own in columns)
    assert num_reused > 10


@pytest.mark.parametrize("has_backward", [True, False])
def test_rows_of_a_chain_are_its_positions(has_backward: bool) -> None:
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=[3, 2])
    order = order if has_backward else order.forward_only()
    rows, most = _C.schedule_assign_rows(order.handle, 1, array("q", [5, 7, 9, 4, 30]))
    assert rows == [0] * 5 + [0, 5, 12, 0, 4] and most == 34  # those of stage 0 are another rank's
    plain = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=3)
    assert _C.schedule_assign_rows(plain.handle, 0, array("q", [5, 7, 9])) == ([0, 5, 12] * 2 + [0] * 6, 21)


def test_leaves_one_by_one_use_the_same_rows() -> None:
    order = Schedule.from_text("parents -1,0,0,0\nF0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 B0.0")
    assert _C.schedule_assign_rows(order.handle, 0, array("q", [10, 3, 4, 2])) == ([0, 10, 10, 10], 14)
    forward = order.forward_only()
    assert _C.schedule_assign_rows(forward.handle, 0, array("q", [10, 3, 4, 2])) == ([0, 10, 10, 10], 14)
    wide = Schedule.from_text("parents -1,0,0,0\nF0.0 F0.1 F0.2 B0.1 F0.3 B0.2 B0.3 B0.0")
    assert _C.schedule_assign_rows(wide.handle, 0, array("q", [10, 3, 4, 2])) == ([0, 10, 13, 10], 17)  # the first gap


def test_bad_sizes() -> None:
    order = Schedule.from_text("parents -1,0,0\nF0.0 F0.1 F0.2 B0.1 B0.2 B0.0")
    with pytest.raises(ValueError, match="sizes holds 2 values, must hold 3"):
        _C.schedule_assign_rows(order.handle, 0, array("q", [1, 2]))
    with pytest.raises(ValueError, match="rank"):
        _C.schedule_assign_rows(order.handle, 1, array("q", [1, 2, 3]))
    with pytest.raises(_C.ScheduleError, match="after the one behind it"):
        _C.schedule_assign_rows(
            Schedule.from_text("parents -1,0,0\nF0.0 F0.1 F0.2 B0.0 B0.1 B0.2").handle, 0, array("q", [1, 2, 3])
        )
