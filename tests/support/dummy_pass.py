"""Puts an order with a pass X through everything. Run by tests/core/test_dummy_pass.py, with a core that knows X.

X runs on every stage between F and B of the last stage, as parts of an output layer do: X of each stage waits for F of
the last stage, and B of the last stage for X of all stages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.schedule import Schedule, Unit, build_schedule
from seq1f1b.testing import run_ranks
from seq1f1b.transport.group import RankGroup, map_fd, memory_fd
from seq1f1b.view.draw import timeline_png
from seq1f1b.view.page import predecessors, timeline_html

LENGTH = 12  # tokens of a micro-batch


def with_x(order: tuple[Unit, ...]) -> list[Unit]:
    """X of all stages of the rank before the first backward of a segment."""
    stages, found, done = sorted({unit.stage for unit in order}), [], set()
    for unit in order:
        cell = unit.microbatch, unit.segment
        if unit.kind == "B" and cell not in done:
            done.add(cell)
            found += [Unit("X", stage, *cell) for stage in stages]
        found.append(unit)
    return found


def inputs_of(unit: Unit, shape: Schedule) -> set[Unit]:
    """What a unit waits for, written down once more."""
    kind, stage, m, s = unit
    last, k = shape.num_stages - 1, shape.num_segments
    found = set()
    if kind == "F":
        found = {Unit("F", stage - 1, m, s), Unit("F", stage, m, s - 1)}
    elif kind == "X":
        found = {Unit("F", last, m, s)}
    else:
        found = {Unit("F", stage, m, s), Unit("B", stage + 1, m, s), Unit("B", stage, m, s + 1)}
        if stage == last:
            found |= {Unit("X", each, m, s) for each in range(last + 1)}
    return {unit for unit in found if 0 <= unit.stage <= last and 0 <= unit.segment < k}


def seconds_of(unit: Unit) -> float:
    return {"F": 1.0, "X": 0.25, "B": 2.0}[unit.kind] + 0.125 * unit.segment


def check_is_checked(schedule: Schedule) -> None:
    schedule.check()
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert not any(unit.kind == "X" for order in schedule.forward_only().ranks for unit in order)
    last = schedule.num_stages - 1
    broken = [list(order) for order in schedule.ranks]
    missing = Unit("X", 0, 0, 0)
    broken[schedule.rank_of_stage[0]].remove(missing)
    expect_error(broken, "X0.0")
    broken = [list(order) for order in schedule.ranks]
    own = broken[schedule.rank_of_stage[last]]
    i, j = own.index(Unit("X", last, 0, 0)), own.index(Unit("B", last, 0, 0))
    own[i], own[j] = own[j], own[i]
    expect_error(broken, "the last stage goes back after every share of its output")


def expect_error(orders: list[list[Unit]], text: str) -> None:
    try:
        Schedule(orders).check()
    except _C.ScheduleError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"accepted an order that breaks: {text}")


def check_simulates(schedule: Schedule) -> None:
    """Against times found by going over all units until none can start earlier."""
    transfer = 0.5
    ends: dict[Unit, float] = {}
    while len(ends) < sum(map(len, schedule.ranks)):
        before = len(ends)
        for order in schedule.ranks:
            now = 0.0
            for unit in order:
                if unit not in ends:
                    makers = inputs_of(unit, schedule)
                    if not makers <= ends.keys():
                        break
                    rank = schedule.rank_of_stage
                    come = [ends[m] + transfer * (rank[m.stage] != rank[unit.stage]) for m in makers]
                    ends[unit] = max([now, *come]) + seconds_of(unit)
                now = ends[unit]
        assert len(ends) > before, "the order ends in a circle"

    durations = [[seconds_of(unit) for unit in order] for order in schedule.ranks]
    ample = schedule.num_microbatches * schedule.num_segments  # places, so that no sender waits for one
    run = schedule.simulate(durations=durations, transfer=transfer, prefetch=ample)
    drawn = predecessors(run.timeline)
    for order, times in zip(schedule.ranks, run.end, strict=True):
        assert list(times) == [ends[unit] for unit in order]
    for order in schedule.ranks:
        for before, unit in zip((None, *order), order, strict=False):
            told, known = set(drawn[unit]), inputs_of(unit, schedule)
            assert told <= known | {before}, unit  # what follows from other inputs is not drawn
            assert {i for i in known if "X" in (i.kind, unit.kind)} <= told, unit
    try:
        schedule.simulate()
    except ValueError as error:
        assert "units of pass X, and no seconds" in str(error)
    else:
        raise AssertionError("simulated X without its seconds")


def check_draws(schedule: Schedule, folder: Path) -> None:
    durations = [[seconds_of(unit) for unit in order] for order in schedule.ranks]
    run = schedule.simulate(durations=durations)
    text = run.to_text(160)
    assert "** pass X" in text and text.splitlines()[0].count("*") > 0, text
    timeline_png(folder / "x.png", run.timeline)
    timeline_html(folder / "x.html", run)
    assert "pass X" in (folder / "x.html").read_text()
    assert (folder / "x.png").stat().st_size > 0


# -- running -----------------------------------------------------------------------------------------------------------


class Stages:
    """Stages of one rank that compute with one number each, and hand on within the rank what the executor does not."""

    def __init__(self, schedule: Schedule, rank: int, made: dict[Unit, float]) -> None:
        self.schedule, self.rank, self.made = schedule, rank, made

    def is_here(self, stage: int) -> bool:
        return self.schedule.rank_of_stage[stage] == self.rank

    def run(self, number: int, stage: int, m: int, s: int, received: Any) -> tuple[Tensor, ...]:
        unit = Unit(_C.PASSES[number], stage, m, s)
        makers = [i for i in inputs_of(unit, self.schedule) if i.stage != stage]
        messages = sorted(tuple(map(float, tensors[0])) for tensors, _ in received or ())
        assert [i.stage for i in sorted(makers, key=lambda i: i.stage) if not self.is_here(i.stage)] == [
            int(stage) for stage, _ in messages
        ], f"{unit} received {messages}"
        came = dict(messages) | {i.stage: self.made[i] for i in makers if self.is_here(i.stage)}
        self.made[unit] = value = self.value(unit, came)
        return (torch.tensor([float(stage), value], dtype=torch.float64),)

    def value(self, unit: Unit, came: dict[float, float]) -> float:
        kind, stage, m, s = unit
        last = self.schedule.num_stages - 1
        if kind == "F":
            return 3.0 * came[stage - 1] + stage if stage else 7.0 * m + s
        if kind == "X":
            return (stage + 2.0) * (self.made[Unit("F", last, m, s)] if stage == last else came[last])
        if stage < last:
            return 2.0 * came[stage + 1] - stage
        shares = came | {last: self.made[Unit("X", last, m, s)]}
        assert len(shares) == last + 1, shares
        return sum((share_stage + 1.0) * share for share_stage, share in shares.items())


def expected(schedule: Schedule) -> dict[Unit, float]:
    """The same in closed form: what every unit makes."""
    S, found = schedule.num_stages, {}
    for m in range(schedule.num_microbatches):
        for s in range(schedule.num_segments):
            y = [7.0 * m + s]
            for stage in range(1, S):
                y.append(3.0 * y[-1] + stage)
            back = sum((stage + 1.0) * (stage + 2.0) * y[-1] for stage in range(S))
            for stage in reversed(range(S)):
                found[Unit("F", stage, m, s)] = y[stage]
                found[Unit("X", stage, m, s)] = (stage + 2.0) * y[-1]
                found[Unit("B", stage, m, s)] = back
                back = 2.0 * back - (stage - 1)
    return found


def check_runs(schedule: Schedule) -> None:
    program = _C.program_lower(schedule.handle, 1)
    edges = _C.program_edges(program)
    assert {edge[4] for edge in edges} == {0, 1, 2, 3}, "a channel each for activations, gradients, outputs and shares"
    sizes = [LENGTH // schedule.num_segments] * schedule.num_segments
    arenas = [map_fd(memory_fd(_C.ARENA_BYTES), _C.ARENA_BYTES) for _ in edges]
    dtypes = {torch.float64: _C.DTYPES.index("float64")}

    def run(group: RankGroup) -> dict[Unit, float]:
        ends = []
        for (source, destination, source_rank, destination_rank, *_), arena in zip(edges, arenas, strict=True):
            is_receiver = group.rank == destination_rank
            peer = source_rank if is_receiver else destination_rank
            text = f"stage {source} to stage {destination}"
            ends.append(_C.arena_end(group.group, arena, -1, peer, is_receiver, text))
        cache = _C.kv_cache_create()
        executor = _C.executor_create(program, group.rank, group.group, cache, ends, True, dtypes, False)
        for _ in range(2):
            made: dict[Unit, float] = {}
            stages = Stages(schedule, group.rank, made)
            _C.executor_step(
                executor, group.begin_step(), True, LENGTH, sizes, stages.run, None, lambda _: sizes, group.place_views
            )
            group.end_step(failed=False)
        order = [unit for opcode, unit, _, _ in _C.executor_timeline(executor, group.rank) if opcode == 2]
        assert [(_C.PASSES[number], *rest) for number, *rest in order] == list(schedule.ranks[group.rank])
        for stage, rank in enumerate(schedule.rank_of_stage):
            if rank == group.rank:
                peak = _C.program_stage_peak(program, stage)[0]
                assert _C.executor_stage_measure(executor, stage)[0] == peak
        return made

    found: dict[Unit, float] = {}
    for made in run_ranks(schedule.num_ranks, run):
        found |= made
    assert found == expected(schedule)


def main(folder: Path) -> None:
    assert "X" in _C.PASSES
    for name, stages_per_rank, M, k in (("seq1f1b", 1, 3, 2), ("1f1b", 1, 4, 1), ("seq1f1b-interleaved", 2, 4, 2)):
        plain = build_schedule(name, num_ranks=2, num_microbatches=M, num_segments=k, stages_per_rank=stages_per_rank)
        schedule = Schedule(map(with_x, plain.ranks))
        check_is_checked(schedule)
        check_simulates(schedule)
        check_runs(schedule)
    check_draws(schedule, folder)
    print("a pass X was checked, lowered, simulated, drawn and run")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
