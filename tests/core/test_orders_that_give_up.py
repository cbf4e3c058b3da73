"""Do orders hold recomputations and moves to the tier by the rules, and do they survive being built and deferred?"""

from __future__ import annotations

import itertools
import random

import pytest
from orders import random_order, small_schedules, with_moves, with_recomputation

from seq1f1b import Schedule, ScheduleError, Unit, build_schedule, schedules


def test_a_recomputed_unit_is_live_from_its_r_on() -> None:
    order = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2, recompute="all")
    order.check(max_live_units=1)
    plain = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2)
    assert order.forward_only() == plain.forward_only()
    order = Schedule.from_text("F0.0 F1.0 R0.0 R1.0 B0.0 B1.0")
    order.check(max_live_units=2)
    with pytest.raises(ScheduleError, match=r"at most 1 live units: rank 0 holds 2 from R0.0 to R1.0"):
        order.check(max_live_units=1)


@pytest.mark.parametrize("name", schedules())
def test_every_family_recomputes(name: str) -> None:
    """R stands just before B, or I, and all else stays where it was."""
    for plain in small_schedules(name, (1, 2, 4), (2, 4), (1, 2)):
        chosen = {unit for order in plain.ranks for unit in order if unit.kind == "F" and unit.microbatch != 1}
        for units, wanted in (("all", None), (chosen.__contains__, chosen), ("none", set())):
            order = plain.recompute(units)
            order.check()
            for before, after in zip(plain.ranks, order.ranks, strict=True):
                expected = []
                for unit in before:
                    if unit.kind in "BI" and (wanted is None or unit._replace(kind="F") in wanted):
                        expected.append(unit._replace(kind="R"))
                    expected.append(unit)
                assert list(after) == expected
        assert plain.recompute().recompute() == plain.recompute(), "a unit that has an R keeps it"
        assert plain.forward_only().recompute() == plain.forward_only()


def test_a_moved_unit_is_live_but_while_it_is_away() -> None:
    order = Schedule.from_text("F0.0 O0.0 A0.0 F1.0 B1.0 L0.0 B0.0")
    order.check(max_live_units=1)
    order = Schedule.from_text("F0.0 O0.0 F1.0 A0.0 F2.0 B1.0 B2.0 L0.0 B0.0")
    order.check(max_live_units=2)
    with pytest.raises(ScheduleError, match=r"at most 1 live units: rank 0 holds 2 from F0.0 to F1.0"):
        order.check(max_live_units=1)
    order = Schedule.from_text("F0.0 O0.0 A0.0 F1.0 L0.0 B0.0 B1.0")
    with pytest.raises(ScheduleError, match=r"at most 1 live units: rank 0 holds 2 from F1.0 to L0.0"):
        order.check(max_live_units=1)


@pytest.mark.parametrize("name", schedules())
def test_every_family_moves(name: str) -> None:
    """All else stays where it was; whoever is moved is away while another unit runs, with one beside each way."""
    for plain in small_schedules(name, (1, 2, 4), (2, 4), (1, 2, 4)):
        cells = [unit for order in plain.ranks for unit in order if unit.kind == "F"]
        chosen = {unit for unit in cells if unit.microbatch != 1}
        for units, wanted in (("all", set(cells)), (chosen.__contains__, chosen), ("none", set())):
            order = plain.offload(units)
            order.check()
            for before, after in zip(plain.ranks, order.ranks, strict=True):
                assert tuple(unit for unit in after if unit.kind not in "OAL") == before
                for forward in [unit for unit in before if unit.kind == "F"]:
                    back = next(u for u in before if u.kind in "BI" and u[1:] == forward[1:])
                    i, j = before.index(forward), before.index(back)
                    moves = [forward._replace(kind=kind) for kind in "OAL"]
                    assert (moves[0] in after) == (forward in wanted and j - i >= 4)
                    if moves[0] in after:
                        out, gone, load = map(after.index, moves)
                        assert after.index(forward) < out < after.index(before[i + 1]) < gone < load
                        assert gone < after.index(before[i + 2]) and load < after.index(before[j - 1])
        assert plain.forward_only().offload() == plain.forward_only()
        assert plain.offload().forward_only() == plain.forward_only()


def test_with_recomputation() -> None:
    """A recomputed unit saves nothing that could be moved; the others are moved beside it."""
    order = build_schedule(
        "gpipe", num_ranks=1, num_microbatches=6, recompute=lambda unit: unit.microbatch < 2, offload_units="all"
    )
    assert order.to_text() == (
        "F0.0 F1.0 F2.0 O2.0 F3.0 A2.0 O3.0 F4.0 A3.0 O4.0 F5.0 A4.0 O5.0 "
        "R0.0 A5.0 B0.0 R1.0 L2.0 B1.0 L3.0 B2.0 L4.0 B3.0 L5.0 B4.0 B5.0\n"
    )


def test_choices_that_are_none() -> None:
    order = build_schedule("gpipe", num_ranks=1, num_microbatches=6, offload_units="all")
    with pytest.raises(ValueError, match="the order moves units already"):
        order.offload()
    for bad, name in itertools.product(("half", 3, None), ("offload_units", "recompute")):
        with pytest.raises(ValueError, match=r"units is .*, must be 'none', 'all' or a callable of a unit"):
            build_schedule("gpipe", num_ranks=1, num_microbatches=6, **{name: bad})
    with pytest.raises(ScheduleError, match=r"B0\.0 is missing"):
        Schedule.from_text("F0.0 F1.0 B1.0").recompute()


def test_late_weights_hold_no_more_than_the_order() -> None:
    """W of a unit that is recomputed holds from R on: so it waits while others need not be recomputed."""
    rng = random.Random(19)
    changes = {"F": 1, "A": -1, "L": 1, "R": 1, "B": -1, "W": -1}
    orders = [
        build_schedule("seq1f1b", num_ranks=2, num_microbatches=3, num_segments=2, recompute="all"),
        build_schedule("seq1f1b", num_ranks=2, num_microbatches=4, num_segments=4, offload_units="all"),
    ]
    while len(orders) < 60:
        order = with_moves(with_recomputation(random_order(rng), rng, rng.choice((0.3, 0.6))), rng)
        if any(unit.kind in "BI" for units in order.ranks for unit in units):
            orders.append(order)
    for order in orders:

        def most(units: tuple[Unit, ...]) -> int:
            again = {unit[1:] for unit in units if unit.kind == "R"}
            steps = [changes.get(u.kind, 0) for u in units if not (u.kind == "F" and u[1:] in again)]
            return max(itertools.accumulate(steps), default=0)

        late = order.defer_weights()
        cap = max(map(most, order.ranks))
        late.check(max_live_units=cap)
        for before, after in zip(order.ranks, late.ranks, strict=True):
            assert most(after) <= cap
            assert [u for u in after if u.kind in "FROAL"] == [u for u in before if u.kind in "FROAL"]
    assert orders[0].defer_weights().to_text().splitlines()[1].startswith("F0.0 F0.1 R0.1 I0.1 F1.0 W0.1 R0.0 I0.0")
