"""Do orders hold micro-batches whose segments are trees by the rules, and survive being written, read and changed?"""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterable

import pytest
from slices import full_only
from trees import makers_of, random_parents, random_tree_order, text_of

from seq1f1b import _C, Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.unit import inputs_of

TREE = "parents -1,0,0\n"

# -- what a unit waits for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True])
def test_inputs_are_those_of_the_tree(split: bool) -> None:
    rng = random.Random(split)
    for _ in range(20):
        trees = [random_parents(rng) for _ in range(2)]
        kinds = "FIW" if split else "FB"
        units = [
            Unit(kind, stage, m, s)
            for kind in kinds
            for stage in range(2)
            for m in (0, 1)
            for s in range(len(trees[m]))
        ]
        after = inputs_of(units, [tuple(own) for own in trees])
        for unit in units:
            assert set(after[unit]) == makers_of(unit, trees, 2, kinds)
            assert len(after[unit]) == len(set(after[unit]))


def breaks(order: Schedule, trees: list[list[int]], ranks: list[list[Unit]]) -> bool:
    """Whether units of an order that keeps the rules, moved, are no longer all there, or would stand still for good."""
    if sorted(itertools.chain(*ranks)) != sorted(itertools.chain(*order.ranks)):
        return True
    done: set[Unit] = set()
    left = [list(units) for units in ranks]
    while True:
        moved = False
        for units in left:
            while units and makers_of(units[0], trees, order.num_stages, order.kinds) <= done:
                done.add(units.pop(0))
                moved = True
        if not moved:
            return any(left)


def mutated(ranks: Iterable[Iterable[Unit]], rng: random.Random) -> list[list[Unit]]:
    """Units of one rank in other places, or one of them missing or there twice."""
    found = [list(units) for units in ranks]
    order = rng.choice(found)
    i, j = rng.randrange(len(order)), rng.randrange(len(order))
    match rng.choice(["swap", "move", "move", "drop", "repeat"]):
        case "swap":
            order[i], order[j] = order[j], order[i]
        case "move":
            order.insert(j, order.pop(i))
        case "drop":
            del order[i]
        case "repeat":
            order.insert(j, order[i])
    return found


@pytest.mark.parametrize("count", [100, *full_only((600,))])
def test_check_agrees_with_the_rules_wherever_a_unit_stands(count: int) -> None:
    """Random orders of chains and trees with a unit moved, missing or there twice are refused just where ranks would
    stand still, or a unit runs never or twice."""
    rng = random.Random(11 * count)
    kept = broken = 0
    for _ in range(count):
        order, trees = random_tree_order(rng)
        order.check()
        assert order.parents is None or order.parents == tuple(map(tuple, trees))
        for _ in range(6):
            ranks = mutated(order.ranks, rng)
            if breaks(order, trees, ranks):
                broken += 1
                with pytest.raises(ValueError):  # where a text lacks a rank's last unit, it has no such rank
                    Schedule.from_text(text_of(trees, ranks)).check()
            else:
                kept += 1
                Schedule.from_text(text_of(trees, ranks)).check()
    assert kept > 40 and broken > 40


def test_branches_go_in_any_order() -> None:
    for middle in ("F0.1 F0.2 B0.2 B0.1", "F0.1 F0.2 B0.1 B0.2", "F0.2 B0.2 F0.1 B0.1", "F0.2 F0.1 B0.2 B0.1"):
        Schedule.from_text(f"{TREE}F0.0 {middle} B0.0").check()
    with pytest.raises(ScheduleError, match="a segment goes back after its own forward"):
        Schedule.from_text("F0.0 F0.1 B0.2 F0.2 B0.1 B0.0").check()  # as ever where segments are a chain


# -- text, and equality ------------------------------------------------------------------------------------------------


def test_text_names_a_chain_by_a_dash() -> None:
    text = "parents - -1,0,0\nF0.0 F0.1 F0.2 F1.0 F1.1 F1.2\n"
    order = Schedule.from_text(f"# a comment\n\n{text}")
    assert order.to_text() == text and order.parents == ((-1, 0, 1), (-1, 0, 0))
    order.check()


def test_trees_are_equal_by_their_parents_too() -> None:
    units = "F0.0 F0.1 F0.2 F0.3 B0.3 B0.2 B0.1 B0.0"
    parents = ["-1,0,1,2", "-1,0,0,0", "-1,0,0,1", "-1,0,1,0", "-1,0,1,1"]
    orders = [Schedule.from_text(f"parents {own}\n{units}") for own in parents]
    for order in orders:
        order.check()
    assert len({order.digest for order in orders}) == len(orders)
    assert all((a == b) == (a is b) for a in orders for b in orders)
    chain = Schedule.from_text(units)  # a chain is what it was without parents
    assert orders[0] == chain and orders[0].digest == chain.digest and orders[0].parents is None
    assert orders[0].to_text() == chain.to_text()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ("", "parents are given for 0 micro-batches, the order has 1"),
        ("-1,0,0 -", "parents are given for 2 micro-batches, the order has 1"),
        ("-1,0", "micro-batch 0 has parents for 2 segments, and its units name 3"),
        ("-1,0,0,", "line 1, unit 2, '-1,0,0,': parents are written -1,0,0"),
        ("-1,0,0x", "line 1, unit 2, '-1,0,0x': parents are written -1,0,0"),
        ("-1,0,-2", "line 1, unit 2, '-1,0,-2': parents are written"),
        ("-1,0,2147483648", "parents are written"),
        ("-1,0,2", "parents of micro-batch 0: segment 2 follows segment 2, must follow one of 0..1: a parent comes"),
        ("-1,0,-1", "parents of micro-batch 0: segment 2 follows none, so the tree has two roots; make it a micro-b"),
        ("1,0,0", "parents of micro-batch 0: segment 0 is the root and follows none, its parent is -1, not 1"),
        ("-\nparents -", "line 2, unit 1, 'parents': a unit is written F1.0"),
    ],
)
def test_bad_parents_in_text(parents: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Schedule.from_text(f"parents {parents}\nF0.0 F0.1 F0.2 B0.2 B0.1 B0.0")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("segments", "parents", "error", "message"),
    [
        ([3, 2], [[-1, 0, 0]], ValueError, "parents hold 1 lists, must hold one for each of 2 micro-batches"),
        ([3, 2], [[-1, 0, 0], [-1]], ValueError, "parents of micro-batch 1 are 1, must be one for each of its 2"),
        ([3, 2], [[-1, 0, 0], [-1, 2**40]], ValueError, "parents holds a number that is too large: 1099511627776"),
        ([3, 2], [[-1, 0, 0.5], None], TypeError, "parents holds 0.5, must be whole numbers"),
        ([3, 2], [3, None], TypeError, "parents must hold a list for each micro-batch, or None for a chain, got"),
        ([3, 2], 3, TypeError, "parents must hold a list for each micro-batch, or None for a chain, got 3"),
    ],
)
def test_bad_parents(segments: object, parents: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=segments, parents=parents)


# -- what is made of an order ------------------------------------------------------------------------------------------


def test_what_is_made_of_an_order_has_its_parents() -> None:
    """Split, recomputed, moved, forward only, spread; lowered with receives, simulated, written, read and copied."""
    rng = random.Random(5)
    num_trees = 0
    for _ in range(40):
        order, trees = random_tree_order(rng)
        parents = order.parents
        num_trees += parents is not None
        chosen = {(m, s) for m, own in enumerate(trees) for s in range(len(own)) if rng.random() < 0.5}

        def is_chosen(unit: Unit, chosen: set[tuple[int, int]] = chosen) -> bool:
            return unit[2:] in chosen

        made = [order.forward_only(), order.replace(prefetch=2)]
        if order.kinds != {"F"}:
            made += [order.defer_weights(), order.recompute(), order.offload(), order.recompute(is_chosen)]
            assert {unit[2:] for units in made[-1].ranks for unit in units if unit.kind == "R"} == chosen
            made.append(made[-1].offload())
            made.append(order.with_cell_kinds(made[-1].cell_kinds()))
        if list(order.rank_of_stage) == list(range(order.num_ranks)):
            made += [order.spread_vocabulary(), order.spread_vocabulary(head=False, embedding=True)]
        for other in [order, *made]:
            other.check()
            assert other.parents == parents
            assert Schedule.from_text(other.to_text()) == other.replace(prefetch=None)
            for like in (pickle.loads(pickle.dumps(other)), copy.deepcopy(other)):
                assert like == other and like.parents == parents and like.segments_of == tuple(map(len, trees))
                assert (like.digest, like.places) == (other.digest, other.places)
            _C.program_lower(other.handle, 1, True)
            other.simulate(critical="O" not in other.kinds)
    assert num_trees > 20


def test_csv_has_no_parents() -> None:
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=3, parents=[[-1, 0, 0]] * 2)
    with pytest.raises(ValueError, match="torch's CSV has no parents, and segments of micro-batch 0 are a tree: write"):
        order.to_csv()
    chain = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=3, parents=[[-1, 0, 1], None])
    assert Schedule.from_csv(chain.to_csv(), num_segments=3) == chain
