"""Does any text at all end in a schedule or in a ValueError, and any schedule in a check or in a ScheduleError?

Anything else, a crash, a hang, a demand for all memory, fails; so does a schedule that is not the one it is written as.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import random_order

from seq1f1b import Schedule, ScheduleError, build_schedule

EDGES = ["0", "1", "2", "00", "7", "2147483647", "2147483648", "4294967296", "99999999999999999999", "", "-1", "٣"]
numbers = st.one_of(st.integers(0, 3).map(str), st.sampled_from(EDGES))
passes = st.sampled_from(["F", "B", "I", "W", "f", "FB", "SEND_F", "", "X"])
units = st.builds(
    "{}{}{}.{}".format, st.sampled_from(["", "[0]", "[1]", "[2147483647]", "[", "[0"]), passes, numbers, numbers
)
cells = st.one_of(st.just(""), st.builds("{}{}{}".format, numbers, passes, numbers), st.just("(0F1;1B0)OVERLAP_F_B"))
blanks = st.sampled_from([" ", "\t", "  ", "\n", "\r\n", " # ", ","])
commas = st.sampled_from([",", ",,", "\n", "\r\n", ',"', " "])
any_text = st.text(max_size=80)


def near_text(tokens: st.SearchStrategy[str], between: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Tokens and what separates them, well-formed or nearly, now and then with anything in between."""
    pairs = st.lists(st.tuples(tokens, between), max_size=12)
    return st.builds(
        lambda parts, rest: "".join(a + b for a, b in parts) + rest, pairs, st.one_of(st.just(""), any_text)
    )


@st.composite
def mistyped(draw: st.DrawFn, as_csv: bool) -> tuple[str, int]:
    """A valid order with a few characters changed, dropped or doubled; and its segments."""
    if draw(st.booleans()):
        schedule = random_order(random.Random(draw(st.integers(0, 200))))
    else:  # with the backward split, in a V
        schedule = build_schedule("dualpipev", num_ranks=draw(st.integers(1, 2)), num_microbatches=4, stages_per_rank=2)
    text = schedule.to_csv() if as_csv else schedule.to_text()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text) - 1))
        text = (
            text[:at]
            + draw(st.sampled_from(["", text[at] * 2, "9", "\n", " ", ",", ";", ")", "(", "B", "\0", "é"]))
            + text[at + 1 :]
        )
    return text or " ", schedule.num_segments


def check_schedule(schedule: Schedule) -> None:
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule and again.rank_of_stage == schedule.rank_of_stage
    try:
        schedule.check()
    except ScheduleError as error:
        assert str(error)
    else:
        assert schedule.simulate().makespan > 0
        assert Schedule.from_csv(schedule.to_csv(), num_segments=schedule.num_segments) == schedule


def read_text(text: str) -> None:
    try:
        schedule = Schedule.from_text(text)
    except ValueError as error:
        assert str(error)
    else:
        check_schedule(schedule)


def read_csv(text: str, num_segments: int) -> None:
    try:
        schedule = Schedule.from_csv(text, num_segments=num_segments)
    except ValueError as error:
        assert str(error)
    else:
        assert schedule.num_segments == num_segments
        try:
            schedule.check()
        except ScheduleError:
            return  # a CSV may name fewer segments than it is said to have: its text would have fewer
        check_schedule(schedule)


@settings(deadline=None, max_examples=200)
@given(st.one_of(any_text, near_text(units, blanks)))
def test_any_text(text: str) -> None:
    read_text(text)


@settings(deadline=None, max_examples=300)
@given(mistyped(as_csv=False))
def test_mistyped_text(order: tuple[str, int]) -> None:
    read_text(order[0])


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(any_text, near_text(cells, commas)),
    st.one_of(st.integers(-1, 4), st.sampled_from([2**31 - 1, 2**31, -(2**31) - 1, 2**63, 2**200])),
)
def test_any_csv(text: str, num_segments: int) -> None:
    read_csv(text, num_segments)


@settings(deadline=None, max_examples=300)
@given(mistyped(as_csv=True), st.integers(-1, 1))
def test_mistyped_csv(order: tuple[str, int], off: int) -> None:
    read_csv(order[0], order[1] + off)


def test_an_error_may_quote_a_part_that_ends_within_a_character() -> None:
    with pytest.raises(ValueError, match="line 1, unit 1, '0000"):
        Schedule.from_text("0" * 10 + "\U00010000" * 8)
