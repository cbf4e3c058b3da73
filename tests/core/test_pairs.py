"""An F and a B that start together: their text, their rules, their time; and DualPipeV, which is made of them."""

from __future__ import annotations

import itertools
import random

import pytest

from seq1f1b import Schedule, ScheduleError, Unit, build_schedule

# P = 2, M = 3: one pair on rank 0, in what is 1F1B otherwise
ORDER = "F0.0 F1.0 (F2.0;B0.0) B1.0 B2.0\nF0.0 B0.0 F1.0 B1.0 F2.0 B2.0\n"


def test_round_trips() -> None:
    schedule = Schedule.from_text(ORDER)
    assert schedule.pairs == ((2,), ())
    assert schedule.ranks[0][2:4] == (Unit("F", 0, 2, 0), Unit("B", 0, 0, 0))
    assert schedule.to_text() == ORDER
    csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert schedule.to_csv() == csv
    assert Schedule.from_csv(csv, num_segments=1) == schedule
    alone = Schedule.from_text(ORDER.replace("(", "").replace(";", " ").replace(")", ""))
    assert alone.ranks == schedule.ranks and alone != schedule
    assert schedule.forward_only().pairs == ((), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(F0.0;F1.0)", r"line 1, unit 1, 'F1.0': a pair is a forward and then a backward"),
        ("(B0.0;F1.0)", r"line 1, unit 1, 'F1.0': a pair is a forward and then a backward"),
        ("(F0.0;B0.0", r"'\(F0.0;B0.0': a unit is written F1.0"),
        ("(F0.0)", r"'\(F0.0\)': a unit is written F1.0"),
        ("(F0.0;)", r"'': a unit is written F1.0"),
        ("(F0.0;B1.0;B2.0)", r"'B1.0;B2.0': a unit is written F1.0"),
        ("(F0.0;B1.0)OVERLAP_F_B", r"a unit is written F1.0"),
    ],
)
def test_errors_of_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.from_text(text)


@pytest.mark.parametrize("cell", ["(0F0;0B1)", "(0F0;0B1)OVERLAP", "(0F0;0B1)OVERLAP_F_BB", "(;)OVERLAP_F_B"])
def test_errors_of_csv(cell: str) -> None:
    with pytest.raises(ValueError, match="a cell is written"):
        Schedule.from_csv(f"{cell},0B0,0F1", num_segments=1)


def test_a_pair_is_of_two_microbatches() -> None:
    message = r"a pair is of two micro-batches: on rank 0 F0.0 and B0.0 cannot start together"
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text("(F0.0;B0.0)").check()


def test_a_pair_can_close_a_cycle() -> None:
    """Rank 1 gives B1 only after F2, which is to start on rank 0 together with B1's successor there."""
    alone = "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0\nF0.0 B0.0 F1.0 F2.0 B1.0 B2.0"
    Schedule.from_text(alone).check()
    message = (
        "program order and transfers have no cycle: rank 0 stands before B1.0 and waits for B1.0 of rank 1; "
        "rank 1 stands before F2.0 and waits for F2.0 of rank 0"
    )
    with pytest.raises(ScheduleError) as error:
        Schedule.from_text(alone.replace("F2.0 B1.0", "(F2.0;B1.0)", 1)).check()
    assert str(error.value) == message


def test_both_inputs_and_both_results() -> None:
    """F 1, B 2, transfers 0.5: the pair waits for B0 from rank 1, and F2 leaves when the pair ends."""
    simulation = Schedule.from_text(ORDER).simulate(1.0, 2.0, transfer=0.5)
    rank_0 = [(str(unit), start, end) for unit, start, end in simulation.timeline[0]]
    assert rank_0 == [
        ("F0.0", 0, 1),
        ("F1.0", 1, 2),
        ("F2.0", 5, 8),  # B0 ends at 4.5 on rank 1
        ("B0.0", 5, 8),
        ("B1.0", 8, 10),
        ("B2.0", 12, 14),
    ]
    assert [start for _, start, _ in simulation.timeline[1]] == [1.5, 2.5, 4.5, 5.5, 8.5, 9.5]
    assert simulation.busy == (9.0, 9.0)
    assert simulation.peak == (3, 1)


def test_overlap() -> None:
    """What a pair hides of its shorter unit."""
    schedule = Schedule.from_text(ORDER)
    for overlap in (0.0, 0.25, 1.0):
        assert schedule.simulate(1.0, 2.0, overlap=overlap).busy == (9.0 - overlap, 9.0)
        replayed = schedule.simulate(durations=[[1, 1, 2, 1, 2, 2], [1, 2, 1, 2, 1, 2]], overlap=overlap)
        assert replayed.busy == (9.0 - overlap, 9.0)
    for overlap in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"overlap is .*, must be in 0\.\.1"):
            schedule.simulate(overlap=overlap)


def start_times(
    schedule: Schedule, forward: float, backward: float, weight: float, overlap: float
) -> dict[Unit, float]:
    """Ends of all units, from the rules alone: no transfers, a place for every message."""
    ends: dict[Unit, float] = {}
    free = [0.0] * schedule.num_ranks
    at = [0] * schedule.num_ranks
    seconds = {"F": forward, "B": backward, "I": backward - weight, "W": weight}

    def ready(unit: Unit) -> float | None:
        if unit.kind == "W":
            return 0.0
        if unit.kind == "F":
            needed = [] if unit.stage == 0 else [[unit._replace(stage=unit.stage - 1)]]
        else:
            needed = [] if unit.stage == schedule.num_stages - 1 else [
                [unit._replace(stage=unit.stage + 1, kind=kind) for kind in "BI"]
            ]  # fmt: skip
        found = [max((ends[u] for u in either if u in ends), default=None) for either in needed]
        return None if None in found else max(found, default=0.0)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.ranks):
            while at[rank] < len(order):
                units = order[at[rank] : at[rank] + 1 + (at[rank] in schedule.pairs[rank])]
                times = [ready(unit) for unit in units]
                if None in times:
                    break
                costs = [seconds[unit.kind] for unit in units]
                taken = sum(costs) - (overlap * min(costs) if len(units) == 2 else 0.0)
                free[rank] = max(free[rank], *times) + taken
                ends.update(dict.fromkeys(units, free[rank]))
                at[rank] += len(units)
                moved = True
    return ends


def test_dualpipev_against_plain_python() -> None:
    rng = random.Random(7)
    for P in (1, 2, 3, 5, 8):
        schedule = build_schedule("dualpipev", num_ranks=P, num_microbatches=2 * P + 3, stages_per_rank=2)
        forward, inputs, weight, overlap = (rng.uniform(0.1, 1) for _ in range(4))
        result = schedule.simulate(forward, inputs + weight, weight, prefetch=2 * P + 3, overlap=overlap)
        expected = start_times(schedule, forward, inputs + weight, weight, overlap)
        assert {unit: end for track in result.timeline for unit, _, end in track} == pytest.approx(expected)


def test_dualpipev_is_what_torch_builds() -> None:
    """Torch has the order from DeepSeek's code, too."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    for P in range(1, 7):
        for M in (2 * P, 2 * P + 1, 4 * P):
            theirs = pipelining.ScheduleDualPipeV.__new__(pipelining.ScheduleDualPipeV)
            theirs.pp_group_size, theirs._n_microbatches = P, M
            lines = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(P)]
            ours = build_schedule("dualpipev", num_ranks=P, num_microbatches=M, stages_per_rank=2)
            assert ours.to_csv().splitlines() == lines, (P, M)


def test_pairs_pay_where_they_hide_something() -> None:
    """F&B, the time of a pair: the bubble is (P - 1) (F&B + B - 3 W)."""
    for P, overlap in itertools.product((2, 4, 8), (0.0, 0.5, 1.0)):
        schedule = build_schedule("dualpipev", num_ranks=P, num_microbatches=3 * P, stages_per_rank=2)
        result = schedule.simulate(0.5, 1.0, prefetch=3 * P, overlap=overlap)
        together = 0.5 + 1.0 - overlap * 0.5
        bubble = [result.makespan - busy for busy in result.busy]
        assert max(bubble) == pytest.approx((P - 1) * (together + 1.0 - 3 * 0.5)), (P, overlap)


def test_dualpipev_with_pairs_taken_apart() -> None:
    """Where F and B need not start together the bubble is half as long."""
    for P in (1, 2, 4, 7, 8):
        schedule = build_schedule("dualpipev", num_ranks=P, num_microbatches=3 * P, stages_per_rank=2)
        loose = Schedule.from_text(schedule.to_text().replace("(", "").replace(";", " ").replace(")", ""))
        assert loose.simulate(0.5, 1.0, prefetch=3 * P).makespan == pytest.approx(9 * P + (P - 1) / 2)
