"""Do units give up what they saved so that an order fits, and only as many as have to?"""

from __future__ import annotations

import itertools
import random

import pytest
from orders import random_order, small_schedule

from seq1f1b import Costs, Links, Schedule, Unit, build_schedule
from seq1f1b.schedule import StepMemory

EQUAL = StepMemory(activations=10, kept_activations=6, output_gradients=3, kv=4, kv_gradients=5)


def forwards(order: Schedule, rank: int) -> list[Unit]:
    return [unit for unit in order.ranks[rank] if unit.kind == "F"]


def given_up(order: Schedule, kind: str) -> list[set[tuple[int, int, int]]]:
    """Cells of each rank."""
    return [{unit[1:] for unit in units if unit.kind == kind} for units in order.ranks]


def fewest(order: Schedule, rank: int, memory: StepMemory, room: int, kind: str) -> int | None:
    """Fewest units of a rank that have to give up, by trying every choice; None: no choice fits."""
    change = order.recompute if kind == "R" else order.offload
    own = forwards(order, rank)
    for count in range(len(own) + 1):
        for chosen in itertools.combinations(own, count):
            if change(chosen.__contains__).peak_memory(memory).total[rank] <= room:
                return count
    return None


def test_no_choice_gives_up_fewer() -> None:
    """Compares with every other choice, in orders whose units are alike."""
    counted = 0
    for name, (P, M, k) in itertools.product(
        ("seq1f1b", "gpipe", "seq-zb-h1", "seq1f1b-interleaved"), [(2, 2, 2), (2, 3, 1)]
    ):
        order = small_schedule(name, P, M, k)
        if order is None or len(forwards(order, 0)) > 6:
            continue
        most = order.peak_memory(EQUAL).total
        least = order.recompute().peak_memory(EQUAL).total
        for room in range(min(least), max(most) + 1, 5):
            fitted = order.fit(EQUAL, room)
            fitted.check()
            assert [tuple(u for u in units if u.kind != "R") for units in fitted.ranks] == list(order.ranks)
            for rank, cells in enumerate(given_up(fitted, "R")):
                wanted = fewest(order, rank, EQUAL, room, "R")
                if wanted is not None:
                    assert fitted.peak_memory(EQUAL).total[rank] <= room
                    assert len(cells) == wanted, (name, P, M, k, room, rank)
                    counted += wanted > 0
    assert counted > 20


@pytest.mark.parametrize("kind", ["R", "L", "RL"])
def test_what_can_fit_fits(kind: str) -> None:
    """Random orders and bytes: if the order fits with every unit given up, it is made to fit."""
    rng = random.Random(31)
    tried = 0
    while tried < 60:
        order = random_order(rng)
        if not any(unit.kind in "BI" for unit in order.ranks[0]):
            continue
        rows = [[rng.randint(0, 50) for _ in range(order.num_segments)] for _ in range(order.num_stages)]
        memory = StepMemory(
            activations=rows,
            kept_activations=[[x // 2 for x in row] for row in rows],
            output_gradients=7,
            inputs=[[x // 5 for x in row] for row in rows],
            kv=rng.randint(0, 20),
        )
        costs = Costs(links=Links(message_bytes=3), tier=0.1)
        whole = order.peak_memory(memory, costs=costs).total
        change = order.recompute if "R" in kind else order.offload
        least = change().peak_memory(memory, costs=costs).total
        room = [rng.randint(min(a, b), max(a, b)) for a, b in zip(least, whole, strict=True)]
        by = [{"R": "recompute", "L": "offload"}[letter] for letter in kind]
        fitted = order.fit(memory, room, by, costs=costs)
        fitted.check()
        assert all(a <= b for a, b in zip(fitted.peak_memory(memory, costs=costs).total, room, strict=True))
        assert order.fit(memory, whole, by, costs=costs) == order
        tried += 1


def test_a_rank_without_room_gives_up_all_that_helps() -> None:
    order = build_schedule("seq1f1b", num_ranks=4, num_microbatches=4, num_segments=2)
    fitted = order.fit(EQUAL, 0)
    assert fitted.peak_memory(EQUAL).total == order.recompute().peak_memory(EQUAL).total


def test_units_move_where_that_hides() -> None:
    order = build_schedule("seq1f1b", num_ranks=4, num_microbatches=8, num_segments=8)
    room = [max(40, x // 2) for x in order.peak_memory(EQUAL).total]
    both = ("recompute", "offload")
    again = order.fit(EQUAL, room)
    for tier, wanted in ((0.0, "L"), (1.0, "RL"), (1e6, "R")):
        fitted = order.fit(EQUAL, room, both, costs=Costs(tier=tier))
        assert all(a <= b for a, b in zip(fitted.peak_memory(EQUAL).total, room, strict=True))
        assert "".join(kind for kind in "RL" if any(given_up(fitted, kind))) in wanted
        alone = order.fit(EQUAL, room, ("offload",)).simulate(Costs(tier=tier))
        seconds = fitted.simulate(Costs(tier=tier)).makespan
        assert seconds <= again.simulate().makespan and seconds <= alone.makespan
    assert order.fit(EQUAL, room, both, costs=Costs(tier=0.0)).simulate().makespan == order.simulate().makespan
    assert order.fit(EQUAL, room, both, costs=Costs(tier=1e6)) == again


def most_in_tier(order: Schedule, sizes: list[list[int]]) -> list[int]:
    """Most bytes of moved units that each rank has in its tier at once, from O to the backward."""
    most = []
    for units in order.ranks:
        moved, held, peak = {unit[1:] for unit in units if unit.kind == "O"}, 0, 0
        for unit in units:
            size = sizes[unit.stage][unit.segment] * (unit[1:] in moved)
            held += size * ((unit.kind == "O") - (unit.kind in "BI"))
            peak = max(peak, held)
        most.append(peak)
    return most


@pytest.mark.parametrize("by", [("offload",), ("recompute", "offload")])
def test_units_move_as_far_as_the_tier_takes_them(by: tuple[str, ...]) -> None:
    """More units move with more room of the tier, and the others are recomputed where they may be."""
    order = build_schedule("seq-zb-h1", num_ranks=4, num_microbatches=8, num_segments=8)
    sizes = [[10 + (7 * s + 3 * stage) % 11 for s in range(8)] for stage in range(4)]
    memory, costs = StepMemory(activations=sizes), Costs(tier=0.1)
    room = list(order.recompute().peak_memory(memory).total)
    whole = order.fit(memory, room, by, costs)
    most, counts = most_in_tier(whole, sizes), []
    for share in (0.0, 0.3, 0.6, 1.0):
        tier_room = [int(share * x) for x in most]
        fitted = order.fit(memory, room, by, costs, tier_room)
        fitted.check()
        assert all(a <= b for a, b in zip(most_in_tier(fitted, sizes), tier_room, strict=True))
        if "recompute" in by:
            assert all(a <= b for a, b in zip(fitted.peak_memory(memory).total, room, strict=True))
        counts.append(sum(map(len, given_up(fitted, "L"))))
    assert counts == sorted(set(counts)) and counts[0] == 0 and fitted == whole


def test_bad_input() -> None:
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
    with pytest.raises(ValueError, match="the order recomputes or moves units already: fit one that keeps all"):
        order.recompute().fit(EQUAL, 10)
    with pytest.raises(ValueError, match="room must be a number or hold 2 values, one of each rank: it holds 3"):
        order.fit(EQUAL, [1, 2, 3])
    with pytest.raises(ValueError, match="room"):
        order.fit(EQUAL, -1)
    with pytest.raises(ValueError, match="tier_room holds -1 bytes, must be at least 0"):
        order.fit(EQUAL, 10, ("offload",), tier_room=-1)
    with pytest.raises(ValueError, match=r"by is \('pray',\), must hold 'recompute', 'offload' or both"):
        order.fit(EQUAL, 10, ("pray",))
    with pytest.raises(ValueError, match="units must be 2 texts, one per stage, each of 2 words of 2 letters"):
        order.with_cell_kinds([".. .."])
    with pytest.raises(ValueError, match=r"units are \['\.', 'X'\], must be '\.', 'R' or 'L'"):
        order.with_cell_kinds([".. ..", ".. X."])
