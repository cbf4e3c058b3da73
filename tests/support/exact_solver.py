"""The shortest order there is, with a proof, for small cases: every order that the rules allow as a constraint program.

Needs OR-tools (CP-SAT): ``pip install "seq1f1b[exact]"``. For large cases use ``build_schedule("auto", ...)``, which
takes the same options and is measured against this.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seq1f1b import _C, Costs, Links
from seq1f1b.schedule import Schedule, Simulation, Unit
from seq1f1b.unit import unit_of

__all__ = ["Optimum", "shortest_schedule"]

_PASSES = sum(1 << _C.PASSES.index(kind) for kind in "FIW")


@dataclass(frozen=True)
class Optimum:
    """What the solver found.

    Attributes:
        schedule: the shortest order found; backward is split into I and W.
        makespan: its time, in the unit of the costs.
        bound: no order takes less.
        proved: ``makespan == bound``.
        seconds: that the solver took.
    """

    schedule: Schedule
    makespan: int
    bound: int
    proved: bool
    seconds: float


@dataclass(frozen=True)
class _Problem:
    num_ranks: int
    num_microbatches: int
    num_segments: int
    rank_of_stage: tuple[int, ...]
    costs: dict[str, list[int]]  # of F, I and W, flat [stage][segment]
    transfer: int
    unit_bytes: list[int]
    cap_bytes: list[int] | None  # [rank]

    def units(self) -> list[Unit]:
        stages, microbatches = range(len(self.rank_of_stage)), range(self.num_microbatches)
        return [Unit(*unit) for unit in itertools.product("FIW", stages, microbatches, range(self.num_segments))]

    def cell(self, unit: Unit) -> int:
        return unit.stage * self.num_segments + unit.segment

    def cost(self, unit: Unit) -> int:
        return self.costs[unit.kind][self.cell(unit)]

    def lag(self, source: Unit, unit: Unit) -> int:
        is_same = self.rank_of_stage[source.stage] == self.rank_of_stage[unit.stage]
        return 0 if is_same else self.transfer

    def waits_for(self, unit: Unit) -> list[Unit]:
        """The units that must end before it starts, as the core has them; I stands for B."""
        counts = (len(self.rank_of_stage), self.num_microbatches, self.num_segments)
        numbers = array("i", [_C.PASSES.index(unit.kind), *unit[1:]])
        return [unit_of(source) for source in _C.unit_inputs(*counts, 1, _PASSES, numbers, None)]

    def least_life(self, forward: Unit) -> int:
        """Time from the start of an F to the end of its W, if no rank ever were busy: the longest path between them."""
        after = {forward: self.cost(forward)}
        stages, segments = range(len(self.rank_of_stage)), range(self.num_segments)
        forwards = [forward._replace(stage=i, segment=s) for i in stages for s in segments]
        inputs = [unit._replace(kind="I") for unit in reversed(forwards)]
        for unit in forwards + inputs:
            ends = [after[source] + self.lag(source, unit) for source in self.waits_for(unit) if source in after]
            if ends:
                after[unit] = max(ends) + self.cost(unit)
        return after[forward._replace(kind="I")] + self.cost(forward._replace(kind="W"))


def shortest_schedule(
    *,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int = 1,
    stages_per_rank: int = 1,
    options: Mapping[str, Any] | None = None,
    start: Schedule | None = None,
    seconds: float = 10.0,
    workers: int = 1,
) -> Optimum:
    """Looks for the order of least makespan, and for the proof that it is.

    Times are those of :meth:`seq1f1b.Schedule.simulate` with a place for every message. Micro-batches are alike, so
    that some shortest order runs each (pass, stage, segment) in their order; only such orders are looked at.

    Args:
        num_ranks, num_microbatches, num_segments, stages_per_rank: P, M, k, v.
        options: as those of the schedule ``"auto"``: ``costs``, ``transfer``, ``placement`` (the loop unless given),
            ``cap`` or ``unit_bytes`` with ``cap_bytes``; costs and ``transfer`` are whole numbers, costs above 0.
        start: an order with these counts, placement and cap, to start from.
        seconds: time limit.
        workers: threads.
    Raises:
        TimeoutError: no order was found in time; without ``start`` only.
    """
    from ortools.sat.python import cp_model

    problem = _read(num_ranks, num_microbatches, num_segments, stages_per_rank, dict(options or {}))
    started = _starts(problem, start)
    units = problem.units()
    model = cp_model.CpModel()
    messages = len(units) * problem.transfer
    horizon = sum(map(problem.cost, units)) + messages if started is None else started[1]
    begin = {unit: model.new_int_var(0, horizon, str(unit)) for unit in units}
    makespan = model.new_int_var(0, horizon, "makespan")
    for unit in units:
        model.add(begin[unit] + problem.cost(unit) <= makespan)
        for source in problem.waits_for(unit):
            model.add(begin[source] + problem.cost(source) + problem.lag(source, unit) <= begin[unit])
        if unit.microbatch > 0:
            before = unit._replace(microbatch=unit.microbatch - 1)
            model.add(begin[before] + problem.cost(before) <= begin[unit])
    for rank in range(num_ranks):
        own = [unit for unit in units if problem.rank_of_stage[unit.stage] == rank]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(begin[unit], problem.cost(unit), str(unit)) for unit in own]
        )
        if problem.cap_bytes is not None:
            _cap_memory(model, problem, own, begin, makespan, horizon, problem.cap_bytes[rank])
    model.minimize(makespan)
    if started is not None:
        for unit, time in started[0].items():
            model.add_hint(begin[unit], time)
        model.add_hint(makespan, started[1])

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    bound = round(solver.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if start is None or started is None:
            raise TimeoutError(f"no order was found in {seconds} s; give more, or a start")
        return Optimum(start, started[1], bound, False, solver.wall_time)
    orders: list[list[Unit]] = [[] for _ in range(num_ranks)]
    for unit in sorted(units, key=lambda unit: solver.value(begin[unit])):
        orders[problem.rank_of_stage[unit.stage]].append(unit)
    schedule = Schedule(orders)
    found = _makespan(problem, schedule)
    assert found <= solver.value(makespan), "the simulator and the solver disagree"
    return Optimum(schedule, found, bound, status == cp_model.OPTIMAL, solver.wall_time)


def _cap_memory(
    model: Any, problem: Any, own: list[Unit], begin: Mapping[Unit, Any], makespan: Any, horizon: int, cap: int
) -> None:
    """No more than ``cap`` bytes of a rank's units from the begin of their F to the end of their W."""
    held = [unit for unit in own if unit.kind == "F"]
    demands = [problem.unit_bytes[problem.cell(unit)] for unit in held]
    if sum(demands) <= cap:
        return
    lives, sizes = [], []
    for unit in held:
        weight = unit._replace(kind="W")
        size = model.new_int_var(problem.least_life(unit), horizon, "")
        sizes.append(size)
        lives.append(model.new_interval_var(begin[unit], size, begin[weight] + problem.cost(weight), ""))
    model.add_cumulative(lives, demands, cap)
    if cap > 0:  # implied: bytes times seconds
        model.add(sum(d * size for d, size in zip(demands, sizes, strict=True)) <= cap * makespan)


def _read(
    num_ranks: int, num_microbatches: int, num_segments: int, stages_per_rank: int, options: dict[str, Any]
) -> _Problem:
    num_stages = num_ranks * stages_per_rank

    def per_unit(values: Any) -> list[int]:
        if not hasattr(values, "__len__"):
            return [values] * (num_stages * num_segments)
        return [value for row in values for value in row]

    is_wave = options.get("placement") == "v"
    turns = [divmod(stage, num_ranks) for stage in range(num_stages)]
    cap_bytes = options.get("cap_bytes", options.get("cap"))
    return _Problem(
        num_ranks,
        num_microbatches,
        num_segments,
        tuple(num_ranks - 1 - place if is_wave and turn % 2 else place for turn, place in turns),
        {kind: per_unit(cost) for kind, cost in zip("FIW", options.get("costs", (1, 1, 1)), strict=True)},
        options.get("transfer", 0),
        per_unit(options.get("unit_bytes", 1)),
        [cap_bytes] * num_ranks if isinstance(cap_bytes, int) else cap_bytes,
    )


def _simulate(problem: _Problem, schedule: Schedule) -> Simulation:
    """Exact: sums of whole numbers."""
    costs = problem.costs | {"B": [i + w for i, w in zip(problem.costs["I"], problem.costs["W"], strict=True)]}

    def durations(units: Sequence[Unit]) -> list[int]:
        return [costs[unit.kind][problem.cell(unit)] for unit in units]

    places = problem.num_microbatches * problem.num_segments
    return schedule.replace(prefetch=places).simulate(
        Costs(links=Links(latency=problem.transfer)), durations=[durations(units) for units in schedule.ranks]
    )


def _makespan(problem: _Problem, schedule: Schedule) -> int:
    return round(_simulate(problem, schedule).makespan)


def _starts(problem: _Problem, start: Schedule | None) -> tuple[dict[Unit, int], int] | None:
    """When each unit of a given order starts, and its makespan; a B is an I, then a W."""
    if start is None:
        return None
    simulation = _simulate(problem, start)
    times: dict[Unit, int] = {}
    for unit, begin, _ in itertools.chain.from_iterable(simulation.timeline):
        if unit.kind == "B":
            first = unit._replace(kind="I")
            times[first] = round(begin)
            times[unit._replace(kind="W")] = round(begin) + problem.cost(first)
        else:
            times[unit] = round(begin)
    return times, round(simulation.makespan)
