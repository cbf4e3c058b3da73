"""Is DualPipeV's order the one that torch builds, and how long does it take?"""

from __future__ import annotations

import random

import pytest

from seq1f1b import Costs, Schedule, Unit, build_schedule


def test_dualpipev_is_what_torch_builds() -> None:
    """Torch has the order from DeepSeek's code, too, and writes an F with its B in one cell."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    for P in range(1, 7):
        for M in (2 * P, 2 * P + 1, 4 * P):
            theirs = pipelining.ScheduleDualPipeV.__new__(pipelining.ScheduleDualPipeV)
            theirs.pp_group_size, theirs._n_microbatches = P, M
            lines = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(P)]
            ours = build_schedule("dualpipev", num_ranks=P, num_microbatches=M, stages_per_rank=2)
            assert Schedule.from_csv("\n".join(lines), num_segments=1) == ours, (P, M)


def end_times(schedule: Schedule, seconds: dict[str, float]) -> dict[Unit, float]:
    """Ends of all units, from the rules alone: no transfers, a place for every message."""
    ends: dict[Unit, float] = {}
    free = [0.0] * schedule.num_ranks
    at = [0] * schedule.num_ranks

    def ready(unit: Unit) -> float | None:
        if unit.kind == "W" or unit.stage == (0 if unit.kind == "F" else schedule.num_stages - 1):
            return 0.0
        step, kinds = (-1, "F") if unit.kind == "F" else (1, "BI")
        inputs = (unit._replace(stage=unit.stage + step, kind=kind) for kind in kinds)
        return max((ends[other] for other in inputs if other in ends), default=None)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(schedule.ranks):
            while at[rank] < len(order) and (time := ready(order[at[rank]])) is not None:
                unit = order[at[rank]]
                free[rank] = ends[unit] = max(free[rank], time) + seconds[unit.kind]
                at[rank] += 1
                moved = True
    return ends


def test_dualpipev_against_plain_python() -> None:
    rng = random.Random(7)
    for P in (1, 2, 3, 5, 8):
        schedule = build_schedule("dualpipev", num_ranks=P, num_microbatches=2 * P + 3, stages_per_rank=2)
        forward, inputs, weight = (rng.uniform(0.1, 1) for _ in range(3))
        result = schedule.replace(prefetch=2 * P + 3).simulate(Costs(forward, inputs + weight, weight))
        expected = end_times(schedule, {"F": forward, "B": inputs + weight, "I": inputs, "W": weight})
        assert {unit: end for track in result.timeline for unit, _, end in track} == pytest.approx(expected)
