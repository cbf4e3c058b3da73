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

EDITS = ["9", "99999999999", "٣", "[", "\n", "\r", " # ", ",", ";", ")", "B", "\0", "é"]


@st.composite
def mistyped(draw: st.DrawFn) -> str:
    """A valid order with a few characters changed, dropped or doubled."""
    if draw(st.booleans()):
        schedule = random_order(random.Random(draw(st.integers(0, 200))))
    else:  # with the backward split, in a V
        schedule = build_schedule("dualpipev", num_ranks=draw(st.integers(1, 2)), num_microbatches=4, stages_per_rank=2)
    text = schedule.to_text()
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text) - 1))
        edit = draw(st.sampled_from(["", text[at] * 2, *EDITS]))
        text = text[:at] + edit + text[at + 1 :]
    return text or " "


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


@settings(deadline=None, max_examples=500)
@given(st.one_of(mistyped(), st.text(max_size=80)))
def test_any_text(text: str) -> None:
    read_text(text)


def test_an_error_may_quote_a_part_that_ends_within_a_character() -> None:
    with pytest.raises(ValueError, match="line 1, unit 1, '0000"):
        Schedule.from_text("0" * 10 + "\U00010000" * 8)
