"""Do the families give the orders they promise, and is every rule of an order enforced?"""

import itertools
from collections.abc import Iterable

import pytest
from orders import small_schedule

from seq1f1b import Schedule, ScheduleError, Unit, build_schedule, schedules

# -- families ----------------------------------------------------------------------------------------------------------


def test_order_for_two_of_each() -> None:
    schedule = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
    text = "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0\nF0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0\n"
    assert schedule.to_text() == text
    assert "\n".join(" ".join(map(str, order)) for order in schedule.ranks) + "\n" == text


@pytest.mark.parametrize("count", ["num_ranks", "num_microbatches", "num_segments", "stages_per_rank"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_below_one(count: str, value: int) -> None:
    counts = {"num_ranks": 2, "num_microbatches": 2, "num_segments": 2, "stages_per_rank": 1, count: value}
    for name in schedules():
        with pytest.raises(ValueError, match=f"{count} is {value}, must be at least 1"):
            build_schedule(name, **counts)


def test_counts_are_refused_before_lists_as_long_as_they_say() -> None:
    for num_ranks, num_segments in ((1, 2**62), (2**62, 1), (-1, 2**31)):
        with pytest.raises(ValueError, match=r"num_(ranks|segments) is -?\d+, must be"):
            build_schedule(
                "auto", num_ranks=num_ranks, num_microbatches=1, num_segments=num_segments, options={"costs": [1, 1, 1]}
            )


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="no schedule named 'zigzag'; there are seq1f1b, 1f1b, gpipe, "):
        build_schedule("zigzag", num_ranks=2, num_microbatches=2)


def test_more_units_than_can_be_counted() -> None:
    with pytest.raises(ValueError, match="are more than 2147483647 units"):
        build_schedule("gpipe", num_ranks=2**11, num_microbatches=2**11, num_segments=2**11)


# -- rules, each seen to fire with its sentence and its units ----------------------------------------------------------

TREE = "parents -1,0,0\n"
SPREAD = "F0.0 S0.0 T0.0 B0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 F0.0 B0.0", "each unit runs once: F0.0 stands twice in the order of rank 0, at positions 0 and 1"),
        ("F0.0 B0.0 B1.0", "each unit runs once: F1.0 is missing in the order of rank 0"),
        ("F1.0 F1.1", "each unit runs once: F0.0 is missing in the order of rank 0"),
        ("F0.0 B0.0 F1.0", "each unit runs once: B1.0 is missing in the order of rank 0"),
        ("F0.0 W0.0", "each unit runs once: I0.0 is missing in the order of rank 0"),
        ("F0.0 I0.0", "each unit runs once: W0.0 is missing in the order of rank 0"),
        ("F0.0 B0.0 W0.0", "each unit runs once: rank 0 runs both B0.0, the whole backward, and W0.0, a part of it"),
        ("F0.1 F0.0 B0.1 B0.0", "a segment goes forward after the one before it: on rank 0 F0.1 comes before F0.0"),
        ("[1]F0.0 [0]F0.0 [1]B0.0 [0]B0.0", "a stage goes forward after the stage before it: on rank 0 [1]F0.0 comes"),
        ("B0.0 F0.0", "a segment goes back after its own forward: on rank 0 B0.0 comes before F0.0"),
        ("B0.0 F0.0 F0.1 B0.1", "a segment goes back after its own forward: on rank 0 B0.0 comes before F0.0"),
        ("F0.0 B0.1 F0.1 B0.0", "a segment goes back after its own forward: on rank 0 B0.1 comes before F0.1"),
        ("F0.0 F0.1 B0.0 B0.1", "a segment goes back after the one behind it: on rank 0 B0.0 comes before B0.1"),
        ("[0]F0.0 [1]F0.0 [0]B0.0 [1]B0.0", "a stage goes back after the stage behind it: on rank 0 [0]B0.0 comes"),
        (
            "[0]F0.0 [1]F0.0 [0]I0.0 [1]I0.0 [0]W0.0 [1]W0.0",
            "a stage goes back after the stage behind it: on rank 0 [0]I0.0 comes before [1]I0.0",
        ),
        ("F0.0 W0.0 I0.0", "a weight gradient comes after its input gradient: on rank 0 W0.0 comes before I0.0"),
        (
            "F0.0 B0.0 F1.0 B1.0\nF0.0 F1.0 B0.0 B1.0",
            "program order and transfers have no cycle: rank 0 stands before B0.0 and waits for B0.0 of rank 1; "
            "rank 1 stands before F1.0 and waits for F1.0 of rank 0",
        ),
        # recomputation, and moves to the tier
        ("F0.0 R0.0 R0.0 B0.0", "each unit runs once: R0.0 stands twice in the order of rank 0, at positions 1 and 2"),
        ("R0.0 F0.0 B0.0", "a unit is recomputed after its own forward: on rank 0 R0.0 comes before F0.0"),
        ("F0.0 B0.0 R0.0", "a unit goes back after its recomputation: on rank 0 B0.0 comes before R0.0"),
        ("F0.0 I0.0 R0.0 W0.0", "a unit goes back after its recomputation: on rank 0 I0.0 comes before R0.0"),
        ("F0.0 R0.0", "each unit runs once: B0.0 is missing in the order of rank 0"),
        ("F0.0 R1.0 F1.0 B0.0 B1.0", "a unit is recomputed after its own forward: on rank 0 R1.0 comes before F1.0"),
        ("R0.0 F1.0 B0.0 B1.0", "each unit runs once: F0.0 is missing"),
        ("F0.0 O0.0 O0.0 A0.0 L0.0 B0.0", "each unit runs once: O0.0 stands twice in the order of rank 0"),
        ("F0.0 O0.0 A0.0 B0.0", "each unit runs once: L0.0 is missing in the order of rank 0"),
        ("F0.0 L0.0 B0.0", "each unit runs once: O0.0 is missing in the order of rank 0"),
        ("F0.0 O0.0 L0.0 B0.0", "each unit runs once: A0.0 is missing in the order of rank 0"),
        ("F0.0 O0.0 A0.0 L0.0", "each unit runs once: B0.0 is missing in the order of rank 0"),
        ("O0.0 F0.0 A0.0 L0.0 B0.0", "what a unit saves leaves after its forward: on rank 0 O0.0 comes before F0.0"),
        ("F0.0 A0.0 O0.0 L0.0 B0.0", "what a unit saved is gone after it left: on rank 0 A0.0 comes before O0.0"),
        ("F0.0 O0.0 L0.0 A0.0 B0.0", "what a unit saved comes back after it is gone: on rank 0 L0.0 comes before A0.0"),
        ("F0.0 O0.0 A0.0 B0.0 L0.0", "what was moved away comes back before it is read: on rank 0 B0.0 comes"),
        ("F0.0 O0.0 A0.0 I0.0 L0.0 W0.0", "what was moved away comes back before it is read: on rank 0 I0.0"),
        ("F0.0 O0.0 A0.0 L0.0 R0.0 B0.0", "a unit is recomputed or moved away: rank 0 runs both R0.0 and O0.0"),
        (
            "F0.0 O0.0 F1.0 O1.0 A0.0 A1.0 L0.0 B0.0 L1.0 B1.0",
            "at most 1 of a rank's units are on their way out: rank 0 has 2 at O1.0",
        ),
        (
            "F0.0 O0.0 A0.0 F1.0 O1.0 A1.0 F2.0 O2.0 A2.0 L0.0 L1.0 L2.0 B0.0 B1.0 B2.0",
            "at most 2 of a rank's units are on their way back: rank 0 has 3 at L2.0",
        ),
        # a vocabulary that lies on all ranks
        (f"{SPREAD}\nF0.0 S0.0 B0.0 T0.0", "the last stage goes back after the loss: on rank 1 B0.0 comes before T0.0"),
        (f"{SPREAD}\nS0.0 F0.0 T0.0 B0.0", "a shard of the vocabulary comes after the last stage: on rank 1 S0.0"),
        (f"{SPREAD}\nF0.0 T0.0 S0.0 B0.0", "the loss comes after every shard of the vocabulary: on rank 1 T0.0"),
        (f"{SPREAD}\nF0.0 S0.0 B0.0", "each unit runs once: T0.0 is missing in the order of rank 1"),
        ("F0.0 B0.0\nF0.0 S0.0 T0.0 B0.0", "each unit runs once: S0.0 is missing in the order of rank 0"),
        (f"F0.0 S0.0 T0.0 S0.0 B0.0\n{SPREAD}", "each unit runs once: S0.0 stands twice in the order of rank 0"),
        ("F0.0 E0.0 B0.0 G0.0", "the first stage goes forward after every shard of the embedding: on rank 0 F0.0"),
        ("E0.0 F0.0 G0.0 B0.0", "gradients of the embedding come after the first stage has gone back: on rank 0 G0.0"),
        ("E0.0 F0.0 B0.0", "each unit runs once: G0.0 is missing in the order of rank 0"),
        ("E0.0 F0.0 B0.0 G0.0\nF0.0 B0.0 G0.0", "each unit runs once: E0.0 is missing in the order of rank 1"),
        (
            f"F0.0 B0.0 S0.0 T0.0\n{SPREAD}",
            "rank 0 stands before B0.0 and waits for B0.0 of rank 1; rank 1 stands",
        ),
        (
            "[1]F0.0 [1]S0.0 [1]T0.0 [1]B0.0\n[0]F0.0 [0]S0.0 [0]T0.0 [0]B0.0",
            "a vocabulary is spread over stages that lie on the ranks of their numbers: stage 0 lies on rank 1",
        ),
        (
            "[0]F0.0 [1]F0.0 [1]S0.0 [1]T0.0 [1]B0.0 [0]B0.0",
            "a rank holds one shard of the vocabulary, that of the stage of its number: rank 0 runs [1]S0.0",
        ),
        # trees
        (TREE + "F0.1 F0.0 F0.2 B0.2 B0.1 B0.0", "a segment goes forward after the one before it: on rank 0 F0.1"),
        (TREE + "F0.0 F0.1 B0.2 F0.2 B0.1 B0.0", "a segment goes back after its own forward: on rank 0 B0.2 comes"),
        (TREE + "F0.0 F0.1 F0.2 B0.2 B0.0 B0.1", "a segment goes back after the one behind it: on rank 0 B0.0 comes"),
        (TREE + "F0.0 F0.1 B0.1 B0.0 F0.2 B0.2", "a segment goes back after the one behind it: on rank 0 B0.0 comes"),
        (TREE + "F0.0 F0.2 F0.1 I0.1 I0.0 I0.2 W0.2 W0.1 W0.0", "the one behind it: on rank 0 I0.0 comes before I0.2"),
        (TREE + "F0.0 F0.1 F0.2 B0.2 B0.1", "each unit runs once: B0.0 is missing in the order of rank 0"),
    ],
)
def test_rule_fires(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        Schedule.from_text(text).check()
    assert message in str(error.value)


def test_cap_names_the_units() -> None:
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=3)
    schedule.check(max_live_units=3)
    with pytest.raises(ScheduleError) as error:
        schedule.check(max_live_units=2)
    assert str(error.value) == "a rank holds at most 2 live units: rank 0 holds 3 from F0.0 to F2.0"
    with pytest.raises(ValueError, match="max_live_units is 0, must be at least 1"):
        schedule.check(max_live_units=0)


def test_weight_gradients_keep_units_alive() -> None:
    late = Schedule.from_text("F0.0 I0.0 F1.0 I1.0 W0.0 W1.0")
    late.check(max_live_units=2)
    with pytest.raises(ScheduleError, match=r"rank 0 holds 2 from F0\.0 to F1\.0"):
        late.check(max_live_units=1)
    Schedule.from_text("F0.0 I0.0 W0.0 F1.0 I1.0 W1.0").check(max_live_units=1)


def test_an_order_of_forwards_needs_no_backward() -> None:
    schedule = build_schedule("seq1f1b", num_ranks=3, num_microbatches=2, num_segments=3).forward_only()
    assert schedule.to_text() == "F0.0 F0.1 F0.2 F1.0 F1.1 F1.2\n" * 3
    schedule.check(max_live_units=1)


# -- late weight gradients ---------------------------------------------------------------------------------------------


def live_units(order: Iterable[Unit]) -> list[int]:
    """Units between F and the end of their backward, after each unit of one rank."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return list(itertools.accumulate(change[unit.kind] for unit in order))


@pytest.mark.parametrize("name", ["seq1f1b", "1f1b", "gpipe", "zbv", "seq-zb-h1", "dualpipev", "seq1f1b-interleaved"])
@pytest.mark.parametrize("extra", [None, 0, 2])
def test_weights_come_as_late_as_memory_allows(name: str, extra: int | None) -> None:
    order = small_schedule(name, 4, 8, 1 if name in ("1f1b", "zbv", "dualpipev") else 2)
    assert order is not None
    most = max(max(live_units(rank)) for rank in order.ranks)
    late = order.defer_weights(None if extra is None else most + extra)
    late.check(max_live_units=most + (extra or 0))
    for before, after in zip(order.ranks, late.ranks, strict=True):
        whole = [unit._replace(kind="I") if unit.kind == "B" else unit for unit in before if unit.kind != "W"]
        assert [unit for unit in after if unit.kind != "W"] == whole, "F and I stay where they are"
        assert [u[1:] for u in after if u.kind == "W"] == [u[1:] for u in after if u.kind == "I"], "in the order of Is"
        for i, unit in enumerate(after):  # a W stands before an F that would exceed the cap, or at the end
            if unit.kind == "W":
                following = [u for u in after[i:] if u.kind != "W"]
                assert not following or (following[0].kind == "F" and live_units(after[:i])[-1] == most + (extra or 0))


def test_late_weights_of_bad_input() -> None:
    order = Schedule.from_text("F0.0 F1.0 B0.0 B1.0")
    assert order.defer_weights().to_text() == "F0.0 F1.0 I0.0 I1.0 W0.0 W1.0\n"
    with pytest.raises(ValueError, match="max_live_units is 0, must be at least 1"):
        order.defer_weights(0)
    with pytest.raises(
        ValueError, match=r"max_live_units is 1, but rank 0 must hold more at \[0\]F1.0, whenever W runs"
    ):
        order.defer_weights(1)
    with pytest.raises(ScheduleError, match=r"B1.0 is missing"):
        Schedule.from_text("F0.0 F1.0 B0.0").defer_weights()
    assert order.forward_only().defer_weights().to_text() == order.forward_only().to_text()
