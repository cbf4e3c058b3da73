"""Do torch's own checker, lowering and dry run accept our orders?

An order goes to torch with the flat index m k + s in place of the micro-batch. Torch knows no segments: that they go
forward ascending and back descending is for our check alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orders import random_order
from slices import full_only

from seq1f1b import Schedule, build_schedule, schedules
from seq1f1b.schedule import families

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
FAMILIES = {family.name: family for family in families()}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "group": [{"group": 1}, {"group": 3}],
    "round": [{"round": 3}],
    "extra_warmup": [{"extra_warmup": 1}],
    "cap": [{"cap": 20}],
    "costs": [{"costs": (10, 21, 3)}],
}


def small_counts(name: str) -> Iterator[dict[str, Any]]:
    """Counts of every order of the family for few ranks, with its stages per rank, segments and options."""
    family = FAMILIES[name]
    options = [{}, *(given for option in family.options for given in OPTIONS.get(option, []))]
    for P, M, k, v, given in itertools.product((1, 2, 3, 4), (1, 2, 3, 5, 8), (1, 2, 4), (1, 2, 3), options):
        counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v, "options": given}
        if family.broken_rule(**counts) is None:
            yield counts


def torch_actions(schedule: Schedule) -> dict[int, list[Any]]:
    """As torch reads our CSV."""
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(schedule.to_csv().splitlines())
    }


def torch_lowers(schedule: Schedule) -> dict[int, list[Any]]:
    """Torch's checker and lowering; AssertionError where it refuses the order."""
    S, num_units = schedule.num_stages, schedule.num_microbatches * schedule.num_segments
    actions = torch_actions(schedule)
    placement = torch_schedules._validate_schedule(actions, schedule.num_ranks, S, num_units)
    assert tuple(placement[stage] for stage in range(S)) == schedule.rank_of_stage
    return torch_schedules._add_send_recv(actions, schedule.rank_of_stage.__getitem__, S)


def check(schedule: Schedule) -> None:
    """Torch's dry run, which knows no cells of two units, ends with every action in it."""
    lowered = torch_lowers(schedule)
    lowered = {
        rank: [part for action in actions for part in action.sub_actions or [action]]
        for rank, actions in lowered.items()
    }
    steps = torch_schedules._simulate_comms_compute(lowered, schedule.rank_of_stage.__getitem__, schedule.num_stages)
    for rank, actions in lowered.items():
        assert [action for action in steps[rank] if action is not None] == actions


@pytest.mark.parametrize("most", [20, *full_only((10**6,))])
@pytest.mark.parametrize("name", schedules())
def test_grid(name: str, most: int) -> None:
    """So many orders of each family, evenly from the grid."""
    cases = list(small_counts(name))
    assert cases
    for counts in cases[:: len(cases) // most + 1]:
        check(build_schedule(name, **counts))


def test_random_orders_in_both_placements() -> None:
    """With whole and split backward; torch has no forward-only orders."""
    rng = random.Random(11)
    placements = set()
    for _ in range(300):
        schedule = random_order(rng)
        if all(unit.kind == "F" for unit in schedule.ranks[0]):
            continue
        check(schedule)
        placements.add((schedule.rank_of_stage, schedule.ranks[0][-1].kind))
    assert {((0, 1, 1, 0), "W"), ((0, 1, 0, 1), "W"), ((0, 1, 1, 0), "B"), ((0, 1, 0, 1), "B")} <= placements


@pytest.mark.parametrize("name", ["seq1f1b", "seq1f1b-interleaved", "seq-zbv"])
def test_csv_files_of_torch(name: str, tmp_path: Path) -> None:
    """Torch's _load_csv reads what we write, and we read what its _dump_csv writes."""
    base = torch_schedules.PipelineScheduleMulti
    v = FAMILIES[name].stages_per_rank
    schedule = build_schedule(name, num_ranks=2, num_microbatches=4, num_segments=2, stages_per_rank=v)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(schedule.to_csv())
    runtime = SimpleNamespace(pipeline_order={}, _validate_and_set_stage_mapping=lambda order: None)
    base._load_csv(runtime, ours)
    assert runtime.pipeline_order == torch_actions(schedule)
    base._dump_csv(runtime, theirs)
    assert Schedule.from_csv(theirs.read_text(), num_segments=2) == schedule


def test_dualpipev_is_what_torch_builds() -> None:
    """Torch has the order from DeepSeek's code, too, and writes an F with its B in one cell."""
    for P, (twice, more) in itertools.product(range(1, 7), ((2, 0), (2, 1), (4, 0))):
        M = twice * P + more
        theirs = torch_schedules.ScheduleDualPipeV.__new__(torch_schedules.ScheduleDualPipeV)
        theirs.pp_group_size, theirs._n_microbatches = P, M
        lines = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(P)]
        ours = build_schedule("dualpipev", num_ranks=P, num_microbatches=M, stages_per_rank=2)
        assert Schedule.from_csv("\n".join(lines), num_segments=1) == ours, (P, M)
