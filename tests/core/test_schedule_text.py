"""Do orders survive being written and read, and do errors in them say where?"""

import copy
import pickle
import random

import pytest
from orders import random_order, with_moves, with_recomputation

from seq1f1b import Costs, Schedule, Unit, build_schedule

# -- round trips -------------------------------------------------------------------------------------------------------


def test_round_trips_of_random_orders() -> None:
    rng = random.Random(5)
    for number in range(200):
        schedule = random_order(rng)
        if number >= 100:
            schedule = (with_recomputation, with_moves)[number % 2](schedule, rng)
        copies = [Schedule(schedule.ranks), Schedule.from_text(schedule.to_text())]
        if number < 100:
            copies.append(Schedule.from_csv(schedule.to_csv(), num_segments=schedule.num_segments))
        for again in copies:
            assert again == schedule
            assert again.ranks == schedule.ranks
            assert again.rank_of_stage == schedule.rank_of_stage
            assert again.num_microbatches == schedule.num_microbatches
            assert again.num_segments == schedule.num_segments
            assert again.to_text() == schedule.to_text()


def test_stages_are_named_unless_rank_r_holds_stage_r() -> None:
    assert Schedule.from_text("[0]F0.0\n[1]F0.0").to_text() == "F0.0\nF0.0\n"
    assert Schedule.from_text("[1]F0.0\n[0]F0.0").to_text() == "[1]F0.0\n[0]F0.0\n"
    assert Schedule.from_text("[0]F0.0 [1]F0.0").to_text() == "[0]F0.0 [1]F0.0\n"


def test_blanks_comments_and_empty_lines() -> None:
    text = "# two ranks\n\n  F0.0\tF1.0  # the first\r\n\n   \nF0.0 F1.0"
    assert Schedule.from_text(text).to_text() == "F0.0 F1.0\nF0.0 F1.0\n"


def test_csv_of_torch() -> None:
    """Bubbles are empty cells, rows end with carriage return and line feed; 3 is micro-batch 1, segment 1."""
    schedule = Schedule.from_csv(
        "0F0,0F1,0F2,,0B1,0F3,0B0,,0B3,0B2\r\n,1F0,1F1,1B1,1F2,1B0,1F3,1B3,1B2,\r\n", num_segments=2
    )
    assert schedule == build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)


def test_cells_of_two_units_are_read_one_after_the_other() -> None:
    """Torch's DualPipeV writes them; ours are plain cells."""
    csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    schedule = Schedule.from_csv(csv, num_segments=1)
    assert schedule.ranks[0][2:4] == (Unit("F", 0, 2, 0), Unit("B", 0, 0, 0))
    assert schedule.to_csv() == csv.replace("(", "").replace(";", ",").replace(")OVERLAP_F_B", "")
    assert Schedule.from_csv(schedule.to_csv(), num_segments=1) == schedule
    schedule.check()


def test_units_and_schedules_as_values() -> None:
    unit = Unit("F", 2, 1, 0)
    assert str(unit) == "F1.0"
    assert unit == ("F", 2, 1, 0)
    one, same = (build_schedule("gpipe", num_ranks=2, num_microbatches=2) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    for order in (one, one.replace(prefetch=3), one.replace(costs=Costs(2.0), weights="fill")):
        like = pickle.loads(pickle.dumps(order))
        assert like == copy.deepcopy(order) == order and (like.places, like.fills) == (order.places, order.fills)
    assert repr(one) == "<Schedule: 2 ranks, 2 stages, 2 micro-batches, 1 segments>"


def test_a_digest_is_that_of_units_and_their_places() -> None:
    texts = [
        *("[0]F0.0 [1]F0.0", "[0]F0.0\n[1]F0.0", "[1]F0.0\n[0]F0.0", "[1]F0.0 [0]F0.0"),
        *("F0.0 B0.0", "F0.0 I0.0 W0.0", "F0.0", "F0.0 F1.0", "F0.0 F0.1", "F1.0 F0.0", "F0.1 F0.0", "F0.0 F0.0"),
    ]
    orders = [Schedule.from_text(text) for text in texts]
    assert len({order.digest for order in orders}) == len(set(orders)) == len(texts)
    for order, text in zip(orders, texts, strict=True):
        again = Schedule.from_text(text)
        assert again == order and again.digest == order.digest and hash(again) == hash(order)
    assert orders[0].digest == "7439d8ec89c008c4"  # on every machine


def test_units_of_one_rank() -> None:
    order = build_schedule("seq-zb-h1", num_ranks=3, num_microbatches=4, num_segments=2)
    assert order.kinds == {"F", "I", "W", "B"} & {unit.kind for units in order.ranks for unit in units}
    assert order.recompute().kinds == order.kinds | {"R"} and order.forward_only().kinds == {"F"}
    assert order.ranks == tuple(order.units_of(rank) for rank in range(3)) and order.units_of(1) is order.units_of(1)
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank is {rank}, must be in 0..2"):
            order.units_of(rank)


# -- errors say where --------------------------------------------------------------------------------------------------

HOW = "a unit is written F1.0 or [2]F1.0: a pass (F, B, I, W, R, S, T, E, G, O, A, L), micro-batch, segment"
HOW_CSV = "a cell is written 2F3: stage, a pass (F, B, I, W), flat index; transfers are not read"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the order holds no unit"),
        ("# nothing\n\n", "the order holds no unit"),
        ("F0.0\nF0.0 F0,1", f"line 2, unit 2, 'F0,1': {HOW}"),
        ("F0", f"line 1, unit 1, 'F0': {HOW}"),
        ("F0.", f"line 1, unit 1, 'F0.': {HOW}"),
        ("F.0", f"line 1, unit 1, 'F.0': {HOW}"),
        ("X0.0", f"line 1, unit 1, 'X0.0': {HOW}"),
        ("F-1.0", f"line 1, unit 1, 'F-1.0': {HOW}"),
        ("F0.0.0", f"line 1, unit 1, 'F0.0.0': {HOW}"),
        ("[F0.0", f"line 1, unit 1, '[F0.0': {HOW}"),
        ("[0F0.0", f"line 1, unit 1, '[0F0.0': {HOW}"),
        ("F1.0 (F0.0;B0.0)", f"line 1, unit 2, '(F0.0;B0.0)': {HOW}"),
        ("F2147483648.0", f"line 1, unit 1, 'F2147483648.0': {HOW}"),
        ("F" + 60 * "9", f"line 1, unit 1, 'F{38 * '9'}': {HOW}"),
        ("F0.0\n\n[1]F0.0", "line 3, unit 1, '[1]F0.0': either every unit names its stage or none does"),
        ("[0]F0.0 [1]F0.0\n[1]B0.0", "line 2, unit 1, '[1]B0.0': another line holds this stage already"),
        ("[0]F0.0\n[2]F0.0 [2]F1.0", "no line holds stage 1, the text names stages up to 2"),
        ("F7.0 B0.0", "line 1, unit 1, 'F7.0': an index is larger than the number of units in the text"),
    ],
)
def test_errors_of_text(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Schedule.from_text(text)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "num_segments", "message"),
    [
        (",,\n", 1, "the text holds no unit"),
        ("0F0,0R0,0B0", 1, f"line 1, unit 2, '0R0': {HOW_CSV}"),
        ("0F0,0SEND_F0", 1, f"line 1, unit 2, '0SEND_F0': {HOW_CSV}"),
        ("0F0,0UNSHARD", 1, f"line 1, unit 2, '0UNSHARD': {HOW_CSV}"),
        ("F0", 1, f"line 1, unit 1, 'F0': {HOW_CSV}"),
        ("0F0.1", 1, f"line 1, unit 1, '0F0.1': {HOW_CSV}"),
        ("(0F0;0B1)", 1, f"line 1, unit 1, '(0F0;0B1)': {HOW_CSV}"),
        ("(0F0;0B1)OVERLAP", 1, f"line 1, unit 1, '(0F0;0B1)OVERLAP': {HOW_CSV}"),
        ("(0F0;0B1)OVERLAP_F_BB", 1, f"line 1, unit 1, '(0F0;0B1)OVERLAP_F_BB': {HOW_CSV}"),
        ("(;)OVERLAP_F_B", 1, f"line 1, unit 1, '': {HOW_CSV}"),
        ("0F1,(0F0;0B1;0B0)OVERLAP_F_B", 1, f"line 1, unit 2, '0B1;0B0': {HOW_CSV}"),
        ("0F0", 0, "num_segments is 0, must be at least 1"),
        ("0F0\n0B0", 1, "line 2, unit 1, '[0]B0.0': another line holds this stage already"),
    ],
)
def test_errors_of_csv(text: str, num_segments: int, message: str) -> None:
    with pytest.raises(ValueError) as error:
        Schedule.from_csv(text, num_segments=num_segments)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("F0.0 R0.0 B0.0\nF0.0 B0.0", r"\[0\]R0.0"),
        ("F0.0 O0.0 A0.0 L0.0 B0.0", r"\[0\]O0.0"),
        ("F0.0 S0.0 T0.0 B0.0", r"\[0\]S0.0"),
    ],
)
def test_units_for_which_csv_has_no_cell(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"torch's CSV has no cell for {unit} of rank 0: write the order as text"):
        Schedule.from_text(text).to_csv()


def test_units_that_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="rank 1 has no units"):
        Schedule([[Unit("F", 0, 0, 0)], []])
    with pytest.raises(ValueError, match="another line holds this stage already"):
        Schedule([[Unit("F", 0, 0, 0)], [Unit("B", 0, 0, 0)]])
    for unit in (Unit("X", 0, 0, 0), Unit("\u0416", 0, 0, 0), Unit("F", -1, 0, 0), Unit("F", 0, 2**31, 0)):
        with pytest.raises(ValueError, match=r"line 1, unit 2, .*: a unit is written"):
            Schedule([[Unit("F", 0, 0, 0), unit]])
    with pytest.raises(ValueError, match=r"line 1, unit 1, '\[0\]F7\.0': an index is larger"):
        Schedule([[Unit("F", 0, 7, 0)]])
    with pytest.raises(ValueError, match="no line holds stage 1"):
        Schedule([[Unit("F", 0, 0, 0)], [Unit("F", 2, 0, 0), Unit("F", 2, 1, 0)]])
    with pytest.raises(ValueError, match="the order holds no unit"):
        Schedule([])
    for wrong in (("F", 0.5, 0, 0), ("F", 0, 0), (0, 0, 0, 0), None):
        with pytest.raises((TypeError, ValueError)):
            Schedule([[wrong]])
    with pytest.raises(ValueError, match="null character"):
        Schedule.from_text("F0.0\0")


def test_an_error_may_quote_a_part_that_ends_within_a_character() -> None:
    with pytest.raises(ValueError, match="line 1, unit 1, '0000"):
        Schedule.from_text("0" * 10 + "\U00010000" * 8)
