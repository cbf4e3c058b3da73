"""Does ``auto`` keep the rules and its cap, and is it never longer than a named family?

Times are ``Schedule.simulate``'s, with a place for every message. How far it is from the shortest order there is:
``test_exact.py``.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from exact_cases import makespan

from seq1f1b import Costs, Schedule, ScheduleError, build_schedule
from seq1f1b.schedule import StepMemory, families

AUTO = next(family for family in families() if family.name == "auto")


def named_orders(counts: dict[str, int], options: dict[str, Any]) -> Iterator[tuple[str, Schedule]]:
    """Orders of every other family, with the options that it takes: all of them, or none."""
    for family in families():
        if family.name == "auto":
            continue
        taken = {name: options[name] for name in family.options if name in options}
        for given in ({}, taken) if taken else ({},):
            if family.broken_rule(**counts, options=given) is None:
                yield family.name, build_schedule(family.name, **counts, options=given)


def random_problem(rng: random.Random) -> tuple[dict[str, int], dict[str, Any]]:
    P, M, k, v = rng.randint(1, 5), rng.randint(1, 8), rng.randint(1, 3), rng.randint(1, 3)
    base = rng.choice([(1, 1, 1), (10, 21, 3), (1, 0.9, 0), (2, 3, 4)])
    costs = [[[rng.uniform(0.5, 1.5) * c for _ in range(k)] for _ in range(P * v)] for c in base]
    options: dict[str, Any] = {"costs": costs, "transfer": rng.choice([0, 0.25, 2]) * base[0]}
    if rng.random() < 0.7:
        options["cap"] = v * k + rng.randint(0, v * k * (M - 1))
    if rng.random() < 0.7:
        options["placement"] = rng.choice(["loop", "v"])
    return {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}, options


def is_whole(schedule: Schedule) -> bool:
    return all(unit.kind in "FB" for rank in schedule.ranks for unit in rank)


@pytest.mark.parametrize("changes", [{}, {"backward": "whole"}], ids=str)
def test_random_problems(changes: dict[str, str]) -> None:
    """Rules, cap, placement and a rank's own work. No named order under the same cap is shorter, among those that keep
    B whole where auto has to."""
    rng = random.Random(5)
    named = 0
    for _ in range(60):
        counts, options = random_problem(rng)
        schedule = build_schedule("auto", **counts, options=options | changes)
        schedule.check(max_live_units=options.get("cap"))
        assert not changes or is_whole(schedule)
        P, S = counts["num_ranks"], counts["num_ranks"] * counts["stages_per_rank"]
        loop, wave = ([s % P for s in range(S)], [min(s % (2 * P), 2 * P - 1 - s % (2 * P)) for s in range(S)])
        expected = {"loop": [loop], "v": [wave]}.get(options.get("placement", ""), [loop, wave])
        assert list(schedule.rank_of_stage) in expected
        taken, work = makespan(schedule, options), [0.0] * P
        for stage, rank in enumerate(schedule.rank_of_stage):
            work[rank] += counts["num_microbatches"] * sum(sum(costs[stage]) for costs in options["costs"])
        assert taken >= max(work) * (1 - 1e-9)
        for name, other in named_orders(counts, options):
            if (
                (not changes or is_whole(other))
                and list(other.rank_of_stage) in expected
                and max(other.simulate().peak) <= options.get("cap", 10**9)
            ):
                assert taken <= makespan(other, options) * (1 + 1e-9), (counts, options, name)
                named += 1
    assert named > 60


def test_a_whole_backward_in_a_v_leaves_the_slowest_rank_no_bubble() -> None:
    """Two ranks of two stages, the head's time on the last one: in a V its rank begins and ends the step."""
    forward = [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0], [2.8, 2.8]]
    costs = (forward, [[2 * f for f in row] for row in forward], 0.0)
    options = {"costs": costs, "backward": "whole", "cap": 8}
    schedule = build_schedule(
        "auto", num_ranks=2, num_microbatches=4, num_segments=2, stages_per_rank=2, options=options
    )
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    simulation = schedule.replace(prefetch=8).simulate(Costs(forward, costs[1]))
    assert simulation.makespan == pytest.approx(4 * 2 * 3 * (2.0 + 2.8))
    assert max(simulation.peak) <= 8  # what 1F1B holds


def test_caps_in_bytes() -> None:
    """Segments of unequal bytes on ranks of unequal memory."""
    sizes, cap = [[7, 4, 2]] * 4, [20, 13, 27, 16]
    counts = {"num_ranks": 4, "num_microbatches": 5, "num_segments": 3}
    options = {"unit_bytes": sizes, "cap_bytes": cap}
    peaks = build_schedule("auto", **counts, options=options).peak_memory(StepMemory(activations=sizes)).activations
    assert all(peak <= most for peak, most in zip(peaks, cap, strict=True))
    assert peaks[1] == 13  # no rank can do with less than one micro-batch
    ones = {"unit_bytes": 1, "cap_bytes": 5}
    assert build_schedule("auto", **counts, options=ones) == build_schedule("auto", **counts, options={"cap": 5})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cap": 3}, ScheduleError, "auto needs cap >= v k: here P = 2 ranks"),
        ({"unit_bytes": [[3, 2]] * 4, "cap_bytes": [10, 9]}, ScheduleError, "auto needs cap_bytes >= 10 on rank 1"),
        ({"unit_bytes": 3}, ValueError, "unit_bytes and cap_bytes go together: give both"),
        ({"unit_bytes": 3, "cap_bytes": 50, "cap": 9}, ValueError, "are two forms of one cap: give one"),
        ({"unit_bytes": -3, "cap_bytes": 50}, ValueError, "unit_bytes holds -3 bytes, must be in 0.."),
        ({"unit_bytes": 2**62, "cap_bytes": 50}, ValueError, "unit_bytes holds 4611686018427387904 bytes, must"),
        ({"unit_bytes": 3, "cap_bytes": -50}, ValueError, "cap_bytes holds -50 bytes, must be in 0.."),
        ({"unit_bytes": 3, "cap_bytes": [50]}, ValueError, "cap_bytes must be a number or hold 2 values, one of"),
        ({"unit_bytes": [[3, 2]], "cap_bytes": 50}, ValueError, "unit_bytes must be a number or hold 4 x 2 values"),
        ({"transfer": -1}, ValueError, "transfer is -1, must be finite and at least 0"),
        ({"transfer": float("nan")}, ValueError, "transfer is nan, must be finite and at least 0"),
        ({"placement": "w"}, ValueError, "placement is 'w', must be 'loop' or 'v'"),
        ({"backward": "w"}, ValueError, "backward is 'w', must be 'split' or 'whole'"),
        ({"group": 2}, ValueError, "auto takes no option 'group'; it takes cap, costs, transfer, placement"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    counts = {"num_ranks": 2, "num_microbatches": 3, "num_segments": 2, "stages_per_rank": 2}
    with pytest.raises(error, match=message.replace(".", r"\.")):
        build_schedule("auto", **counts, options=options)


def test_broken_rules() -> None:
    counts = {"num_ranks": 2, "num_microbatches": 3, "num_segments": 2, "stages_per_rank": 2}
    assert AUTO.broken_rule(**counts) is None
    assert AUTO.broken_rule(**counts, options={"cap": 3}) == "cap >= v k"
    # In a loop rank 0 holds stages 0 and 2, in a V 0 and 3.
    uneven = {"unit_bytes": [[3, 2], [3, 2], [1, 1], [3, 2]], "cap_bytes": [7, 10]}
    assert AUTO.broken_rule(**counts, options=uneven) is None
    assert AUTO.broken_rule(**counts, options=uneven | {"placement": "loop"}) is None
    assert AUTO.broken_rule(**counts, options=uneven | {"placement": "v"}) == "cap_bytes >= 10 on rank 0"
    schedule = build_schedule("auto", **counts, options=uneven)
    assert schedule.rank_of_stage == (0, 1, 0, 1)
    rows = {"num_ranks": 2, "num_microbatches": 2, "num_segments": [1, 2]}
    of_rows = {"unit_bytes": [[[5], [3, 1]], [[1], [2, 4]]], "cap_bytes": 5}
    assert AUTO.broken_rule(**rows, options=of_rows) == "cap_bytes >= 6 on rank 1"
    assert AUTO.broken_rule(num_ranks=2**10, num_microbatches=2**10, num_segments=2**10) == "3 P v M k <= 2^22"


def test_a_long_search_can_be_interrupted() -> None:
    """Ten seconds and more of C, which ask for signals between two lists."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            build_schedule("auto", num_ranks=200, num_microbatches=400, num_segments=4)
        assert time.monotonic() - began < 5.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
