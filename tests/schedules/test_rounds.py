"""Are rounds of segments as fast as rounds of micro-batches, in fewer receive places?"""

from __future__ import annotations

import itertools

import pytest

from seq1f1b import ScheduleError, build_schedule


@pytest.mark.parametrize(("P", "k", "v"), [(2, 4, 2), (4, 12, 3), (3, 8, 2), (4, 7, 2), (4, 4, 4)])
def test_rounds_of_segments_need_few_places(P: int, k: int, v: int) -> None:
    """As many units are held, and fewer messages wait. One place is enough if P divides k."""
    counts = {"num_ranks": P, "num_microbatches": 3, "num_segments": k, "stages_per_rank": v}
    plain = build_schedule("seq1f1b-interleaved", **counts)
    rounds = build_schedule("seq1f1b-interleaved", **counts, options={"rounds": "segments"})
    assert build_schedule("seq1f1b-interleaved", **counts, options={"rounds": "microbatches"}) == plain
    rounds.check()
    assert (rounds == plain) == (k < 2 * P)
    assert rounds.simulate().peak == plain.simulate().peak
    assert sum(rounds.places) <= sum(plain.places) and (sum(rounds.places) < sum(plain.places) or k < 2 * P)
    if k % P == 0:
        assert rounds.replace(prefetch=1).simulate().makespan == 3 * (3 * v * k + P - 1)
    forwards = [unit for unit in rounds.ranks[0] if unit.kind == "F" and unit.microbatch == 0]
    sizes = [len(list(each)) for _, each in itertools.groupby(forwards, key=lambda unit: unit.stage)]
    assert len(sizes) == v * (k // P) and min(sizes) >= P and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("counts", "options", "error", "text"),
    [
        ((4, 2, 3, 2), {"rounds": "segments"}, ScheduleError, "needs k >= P"),
        ((2, 2, 4, 2), {"rounds": "segments", "round": 1}, ScheduleError, "needs no round where rounds is 'segments'"),
        ((2, 2, 4, 1), {"rounds": "segments"}, ScheduleError, "needs v >= 2"),
        ((2, 2, 4, 2), {"rounds": "units"}, ValueError, "rounds is 'units', must be 'microbatches' or 'segments'"),
        ((2, 2, 4, 2), {"rounds": 2}, TypeError, "rounds is 2, must be 'microbatches' or 'segments'"),
    ],
)
def test_rounds_that_are_refused(
    counts: tuple[int, int, int, int], options: dict[str, object], error: type[Exception], text: str
) -> None:
    P, M, k, v = counts
    with pytest.raises(error, match=text):
        build_schedule(
            "seq1f1b-interleaved",
            num_ranks=P,
            num_microbatches=M,
            num_segments=k,
            stages_per_rank=v,
            options=options,
        )


@pytest.mark.parametrize("P", [2, 3, 8, 16])
def test_rounds_of_segments_hold_the_formula(P: int) -> None:
    """1 + (P - 1) / (v k M) of the ideal; F takes 1 and B takes 2 for each of a rank's v k M cells."""
    for k, M, v in itertools.product((2 * P, 2 * P + 1, 3 * P - 1), (1, 2, 5), (2, 3)):
        counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
        order = build_schedule("seq1f1b-interleaved", **counts, options={"rounds": "segments"})
        assert order.simulate().makespan == 3 * (v * k * M + P - 1)
