"""Do orders hold recomputations by the rules, and does every family build them?"""

from __future__ import annotations

import itertools
import random

import pytest
from orders import random_order, small_schedule, with_recomputation

from seq1f1b import Schedule, ScheduleError, build_schedule, schedules

# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 R0.0 R0.0 B0.0", "each unit runs once: R0.0 stands twice in the order of rank 0, at positions 1 and 2"),
        ("R0.0 F0.0 B0.0", "a unit is recomputed after its own forward: on rank 0 R0.0 comes before F0.0"),
        ("F0.0 B0.0 R0.0", "a unit goes back after its recomputation: on rank 0 B0.0 comes before R0.0"),
        ("F0.0 I0.0 R0.0 W0.0", "a unit goes back after its recomputation: on rank 0 I0.0 comes before R0.0"),
        ("F0.0 R0.0", "each unit runs once: B0.0 is missing in the order of rank 0"),
        ("F0.0 R1.0 F1.0 B0.0 B1.0", "a unit is recomputed after its own forward: on rank 0 R1.0 comes before F1.0"),
        ("R0.0 F1.0 B0.0 B1.0", "each unit runs once: F0.0 is missing"),
    ],
)
def test_rules(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_text(text).check()
    assert message in str(error.value)


def test_r_anywhere_between_forward_and_backward() -> None:
    """Every other place on the rank breaks a rule that names the unit."""
    rng = random.Random(7)
    kept = broken = 0
    for _ in range(60):
        order = with_recomputation(random_order(rng), rng)
        order.check()
        for rank, units in enumerate(order.ranks):
            for again in [unit for unit in units if unit.kind == "R"]:
                others = [unit for unit in units if unit != again]
                i = rng.randrange(len(others) + 1)
                ranks = [list(each) for each in order.ranks]
                ranks[rank] = [*others[:i], again, *others[i:]]
                back = next(u for u in others if u.kind in "BI" and u[1:] == again[1:])
                if others.index(again._replace(kind="F")) < i <= others.index(back):
                    kept += 1
                    Schedule(ranks).check()
                else:
                    broken += 1
                    with pytest.raises(ScheduleError, match=f"{again}"):
                        Schedule(ranks).check()
    assert kept > 20 and broken > 20


def test_a_recomputed_unit_is_live_from_its_r_on() -> None:
    order = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2, recompute="all")
    order.check(max_live_units=1)
    plain = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2)
    assert order.forward_only() == plain.forward_only()
    order = Schedule.from_text("F0.0 F1.0 R0.0 R1.0 B0.0 B1.0")
    order.check(max_live_units=2)
    with pytest.raises(ScheduleError, match=r"at most 1 live units: rank 0 holds 2 from R0.0 to R1.0"):
        order.check(max_live_units=1)


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_every_family_recomputes(name: str) -> None:
    """R stands just before B, or I, and all else stays where it was."""
    for P, M, k in itertools.product((1, 2, 4), (2, 4), (1, 2)):
        plain = small_schedule(name, P, M, k)
        if plain is None:
            continue
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


def test_choices_that_are_none() -> None:
    counts = {"num_ranks": 1, "num_microbatches": 1}
    for bad in ("full", 3, None):
        with pytest.raises(ValueError, match=r"units is .*, must be 'none', 'all' or a callable of a unit"):
            build_schedule("1f1b", **counts, recompute=bad)
    with pytest.raises(ScheduleError, match=r"B0\.0 is missing"):
        Schedule.from_text("F0.0 F1.0 B1.0").recompute()
