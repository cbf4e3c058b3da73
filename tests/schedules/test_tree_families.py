"""Does every family build orders over trees, and does the nested one hold little and take no longer?"""

from __future__ import annotations

import pickle
import random
from array import array

import pytest
from slices import full_only
from trees import Trees, path_of, random_parents, wide_parents

from seq1f1b import _C, Costs, Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.schedule import Family, StepMemory, families

NESTED, BY_NUMBER = {"trees": "nested"}, {"trees": "numbers"}


def nested(num_ranks: int, trees: Trees, **options: object) -> Schedule:
    return tree_order(num_ranks, trees, options=NESTED | options)


def tree_order(num_ranks: int, trees: Trees, name: str = "seq1f1b", **given: object) -> Schedule:
    rows = [len(own) for own in trees]
    counts = {"num_ranks": num_ranks, "num_microbatches": len(trees), "num_segments": rows}
    return build_schedule(name, **counts, parents=trees, **given)


# -- families ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, *full_only((400,))])
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_every_family_builds_over_trees(family: Family, count: int) -> None:
    """Wherever it builds over chains of these lengths; the order is that one, by the numbers of the segments."""
    rng = random.Random(f"{family.name} {count}")
    num_built = 0
    for n in range(count):
        P = rng.randint(1, 4)
        trees = [random_parents(rng, 10) for _ in range(rng.randint(1, 8))]
        if n % 2:  # some families take micro-batches of equal length alone
            k, M = rng.choice((1, 1, 2, 4, 8)), rng.choice((P, 2 * P, 4 * P))
            trees = [[-1, *(rng.randrange(s) for s in range(1, k))] for _ in range(M)]
        given = {"stages_per_rank": family.stages_per_rank}
        try:
            order = tree_order(P, trees, family.name, **given)
        except ScheduleError as error:
            assert f"{family.name} needs" in str(error)
            continue
        num_built += 1
        order.check()
        _C.program_lower(order.handle, 1, True)
        chains = [list(range(-1, len(own) - 1)) for own in trees]
        if family.name == "seq1f1b":
            order = tree_order(P, trees, options=BY_NUMBER)
        if family.name != "auto" and not family.name.startswith("seq-"):  # these ask the rules for what can run
            assert order.ranks == tree_order(P, chains, family.name, **given).ranks
        expected = {(u.stage, u.microbatch, u.segment) for rank in order.ranks for u in rank if u.kind == "F"}
        assert len(expected) == order.num_stages * sum(map(len, trees))
    assert num_built > 0


# -- nested ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [40, *full_only((300,))])
def test_nested_goes_through_a_tree_branch_by_branch(count: int) -> None:
    """F in preorder; B after all below it, so that a path and what the pipeline needs are live."""
    rng = random.Random(41 * count)
    for _ in range(count):
        P = rng.randint(1, 4)
        trees = [random_parents(rng, 20) for _ in range(rng.randint(1, 4))]
        order = nested(P, trees)
        longest = max(len(path_of(own, s)) for own in trees for s in range(len(own)))
        order.check(max_live_units=longest + P - 1)
        _C.program_lower(order.handle, 0, True)
        assert Schedule.from_text(order.to_text()) == pickle.loads(pickle.dumps(order)) == order
        preorder = [
            (m, s) for m, own in enumerate(trees) for s in sorted(range(len(own)), key=lambda s: path_of(own, s))
        ]
        for units in order.ranks:
            assert [unit[2:] for unit in units if unit.kind == "F"] == preorder
        for made in (order.recompute(), order.defer_weights(), order.offload(), order.forward_only()):
            made.check()


def test_nested_chains_are_seq1f1b() -> None:
    for P in (1, 2, 3, 4):
        for chains in ([[-1, 0, 1, 2]] * 3, [[-1]] * 4, [[-1, 0], [-1, 0, 1], [-1]]):
            assert nested(P, chains) == build_schedule(
                "seq1f1b", num_ranks=P, num_microbatches=len(chains), num_segments=[len(own) for own in chains]
            )
    mixed = [[-1, 0, 1], [-1, 0, 0]]
    nested(2, mixed, extra_warmup=1).check()
    assert nested(2, mixed) == tree_order(2, mixed) != tree_order(2, mixed, options=BY_NUMBER)


def test_words_of_the_option() -> None:
    with pytest.raises(ValueError, match="deep"):
        tree_order(2, [[-1, 0, 0]], options={"trees": "deep"})
    with pytest.raises(ValueError, match="gpipe takes no option 'trees'"):
        tree_order(2, [[-1, 0, 0]], "gpipe", options=NESTED)
    plain = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=3, options=NESTED)
    assert plain == build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=3)


def both(num_ranks: int, trees: Trees) -> list[Schedule]:
    return [tree_order(num_ranks, trees, options=options) for options in (NESTED, BY_NUMBER)]


def test_nested_takes_as_long_as_the_order_of_numbers() -> None:
    """On 50 random wide trees of equal units: the work, and the P - 1 units of any 1F1B."""
    rng = random.Random(43)
    for _ in range(50):
        trees, P = [wide_parents(rng) for _ in range(rng.randint(1, 3))], rng.choice((2, 4, 8))
        times = [order.simulate(Costs(1.0, 2.0)).makespan for order in both(P, trees)]
        assert times == [3 * sum(map(len, trees)) + 3 * (P - 1)] * 2


def held_tokens(order: Schedule, sizes: list[list[int]]) -> tuple[int, ...]:
    return order.peak_memory(StepMemory(activations=[sizes] * order.num_stages)).activations


@pytest.mark.parametrize("num_trees", [1, 3])
def test_nested_holds_a_prompt_and_few_leaves(num_trees: int) -> None:
    """At most a prompt and P leaves, and a tenth of that; by numbers it holds the tree.

    Between two trees a rank holds prompt and P - 1 segments of the next prompt, so these are no longer than leaves.
    """
    for P in (2, 4, 8):
        for prompt, leaf, n in ((2048, 256, 8), (2048, 256, 64), (512, 512, 16), (1024, 1024, 24)):
            parts = prompt // leaf if num_trees > 1 else 1
            trees = [[*range(-1, parts - 1), *[parts - 1] * n]] * num_trees
            sizes = [[prompt // parts] * parts + [leaf] * n] * num_trees
            order, by_number = both(P, trees)
            most, whole = max(held_tokens(order, sizes)), max(held_tokens(by_number, sizes))
            assert most <= 1.1 * (prompt + P * leaf)
            assert whole >= prompt + n * leaf
            of_cells = [size for own in sizes for size in own]
            rows = max(_C.schedule_assign_rows(order.handle, rank, array("q", of_cells))[1] for rank in range(P))
            assert rows <= prompt + P * leaf


def test_nested_goes_through_deep_trees() -> None:
    """Without a recursion: a chain of 20,000 segments with a leaf at its root."""
    deep = [*range(-1, 19_999), 0]
    order = nested(1, [deep])
    order.check()
    assert order.units_of(0)[-2:] == (Unit("B", 0, 0, 20_000), Unit("B", 0, 0, 0))
