"""Do bytes and rows of micro-batches that are trees follow the order, against a ledger in plain Python?"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
from orders import random_order, with_moves, with_recomputation
from slices import full_only
from trees import Trees, path_of, random_tree_order

from seq1f1b import _C, Costs, Schedule, Unit, build_schedule
from seq1f1b.schedule import StepMemory
from seq1f1b.view.page import memory_changes

# -- bytes -------------------------------------------------------------------------------------------------------------


def below(parents: list[int], segment: int) -> set[int]:
    return {s for s in range(len(parents)) if segment in path_of(parents, s)}


COUNTS_WITH = {
    "kept_activations": "activations",
    "kv_rows": "kv",
    "kv_gradient_rows": "kv_gradients",
    "staying": "inputs",
}


class Ledger:
    """What one rank holds by kind, from its units in turn: all that lives is a key in a dictionary, with its bytes."""

    def __init__(self, order: Schedule, trees: Trees, memory: StepMemory) -> None:
        self.trees, self.memory = trees, memory
        self.goes_back = order.kinds != {"F"}
        self.recomputed = {unit[1:] for rank in order.ranks for unit in rank if unit.kind == "R"}
        self.live: dict[tuple[object, ...], int] = {}
        self.peaks: dict[str, int] = defaultdict(int)

    def take(self, kind: str, unit: tuple[int, ...], amount: int) -> None:
        key = (kind, *unit)
        assert key not in self.live, "nothing is taken twice"
        self.live[key] = amount

    def peak(self) -> None:
        held: dict[str, int] = defaultdict(int)
        for (kind, *_), amount in self.live.items():
            held[COUNTS_WITH.get(str(kind), str(kind))] += amount
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
        memory, saved = self.memory, [("activations", *cell), ("kept_activations", *cell)]

        def take(*names: str) -> None:
            for name in names:
                self.take(name, cell, int(getattr(memory, name)[stage][m][s]))

        def take_saved() -> None:
            take("activations", "kept_activations")
            self.live[saved[0]] -= self.live[saved[1]]

        freed: list[tuple[object, ...]] = []
        if kind == "F":
            if not any(u.kind == "F" and (u.stage, u.microbatch) == whole for u in before):
                self.take("kv", whole, memory.kv[stage])
            take("kv_rows", "staying")
            if cell in self.recomputed:
                take("inputs")
            else:
                take_saved()
            if not self.goes_back:
                freed += [*saved, ("kv_rows", *cell), ("staying", *cell)]
                if not any((u.stage, u.microbatch) == whole for u in behind):
                    freed.append(("kv", *whole))
        if kind in "RL":
            take_saved()
        if kind == "A":
            freed += saved
        if kind in "BI":
            if not any(u.kind in "BI" and (u.stage, u.microbatch) == whole for u in before):
                self.take("kv_gradients", whole, memory.kv_gradients[stage])
            for node in path_of(self.trees[m], s):  # what its backward adds to, unless another one of the branch has
                if ("kv_gradient_rows", stage, m, node) not in self.live:
                    self.take("kv_gradient_rows", (stage, m, node), memory.kv_gradient_rows[stage][m][node])
            freed += [(name, *cell) for name in ("kv_gradient_rows", "kv_rows", "staying", "activations")]
            freed += [("inputs", *cell)] if cell in self.recomputed else []
            if s == 0:
                freed += [("kv", *whole), ("kv_gradients", *whole)]
        if kind == "I":
            take("output_gradients")
        if kind in "BW":
            freed.append(saved[1])
        if kind == "W":
            freed.append(("output_gradients", *cell))
        return freed


def random_memory(rng: random.Random, order: Schedule, trees: Trees) -> StepMemory:
    def table() -> list[list[list[int]]]:
        return [[[rng.randint(0, 99) for _ in own] for own in trees] for _ in range(order.num_stages)]

    tables = ("activations", "kv_rows", "kv_gradient_rows", "inputs", "staying", "output_gradients")
    given: dict[str, Any] = {name: table() for name in tables}
    given["kept_activations"] = [[[rng.randint(0, n) for n in own] for own in stage] for stage in given["activations"]]
    constant = {name: [rng.randint(0, 99) for _ in range(order.num_stages)] for name in CONSTANT}
    return StepMemory(**given, **constant, logits=rng.randint(0, 99))


CONSTANT = ("kv", "kv_gradients", "weights", "optimizer")
KINDS = ("activations", "output_gradients", "kv", "kv_gradients", "inputs")


def check_peaks(order: Schedule, trees: Trees, rng: random.Random) -> None:
    memory = random_memory(rng, order, trees)
    if order.rows is None:  # micro-batches of equal length have one column for each segment
        order = Schedule.from_text("parents " + " ".join("-" * len(trees)) + "\n" + order.to_text())
    run = order.simulate(Costs(1.0, 2.0, 0.75), memory=memory)
    peaks = run.memory
    for rank, (units, changes) in enumerate(zip(order.ranks, memory_changes(run), strict=True)):
        expected = Ledger(order, trees, memory).run(units)
        assert sum(by for _, by, _ in changes) == 0
        if "O" not in order.kinds:  # moves take no time: the curve of a page, by time, may lack a peak between two
            for kind in {kind for _, _, kind in changes}:
                assert max(accumulate(by for _, by, other in changes if other == kind)) == getattr(peaks, kind)[rank]
            assert max(accumulate(by for _, by, _ in changes)) == expected["total"]
        assert {kind: getattr(peaks, kind)[rank] for kind in KINDS} == {kind: expected[kind] for kind in KINDS}
        own = [stage for stage, holder in enumerate(order.rank_of_stage) if holder == rank]
        constant = [sum(of[stage] for stage in own) for of in (memory.weights, memory.optimizer)]
        constant.append(memory.logits * (order.num_stages - 1 in own))
        assert [peaks.weights[rank], peaks.optimizer[rank], peaks.logits[rank]] == constant
        assert peaks.total[rank] == expected["total"] + sum(constant)


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
        check_peaks(order, trees, rng)
    assert num_trees > 50


def test_peaks_of_chains_are_those_of_a_ledger() -> None:
    """Recomputed and moved anywhere between F and the backward."""
    rng = random.Random(8)
    for number in range(200):
        order = random_order(rng)
        order = with_recomputation(order, rng, 0.6 if number < 100 else 0.2) if number >= 50 else order
        order = with_moves(order, rng) if number >= 100 else order
        check_peaks(order, [list(range(-1, order.num_segments - 1))] * order.num_microbatches, rng)


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
        memory = replace(random_memory(rng, order, trees), weights=0, optimizer=0, logits=0)  # beside the room
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
