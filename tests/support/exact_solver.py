"""The shortest order there is, with a proof, for small cases: every order that the rules allow as a constraint program.

Needs OR-tools (CP-SAT): ``pip install "seq1f1b[exact]"``. For large cases use ``build_schedule("auto", ...)``, which
takes the same options and is measured against this.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from seq1f1b import _C
from seq1f1b.schedule import Schedule, Unit
from seq1f1b.unit import unit_of

_PASSES = sum(1 << _C.PASSES.index(kind) for kind in "FIW")


class Optimum(NamedTuple):
    """The shortest order that was found, its backward split into I and W, or None if there is no shorter one than
    ``most``; its makespan in the unit of the costs; and a bound below which no order is."""

    schedule: Schedule | None
    makespan: int
    bound: int

    @property
    def proved(self) -> bool:
        return self.makespan == self.bound


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
        numbers = array("i", [_C.PASSES.index(unit.kind), *unit[1:]])
        parents = array("i", range(-1, self.num_segments - 1))
        return [unit_of(source) for source in _C.unit_inputs(len(self.rank_of_stage), 1, _PASSES, numbers, parents)]

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
    most: int | None = None,
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
        most: the makespan of an order with these counts, placement and cap; longer ones are not looked at.
        seconds: time limit.
        workers: threads.
    Raises:
        TimeoutError: no order was found in time; without ``most`` only.
    """
    from ortools.sat.python import cp_model

    problem = _read(num_ranks, num_microbatches, num_segments, stages_per_rank, dict(options or {}))
    units = problem.units()
    model = cp_model.CpModel()
    messages = len(units) * problem.transfer
    horizon = sum(map(problem.cost, units)) + messages if most is None else most
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
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    bound = round(solver.best_objective_bound)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        if most is None:
            raise TimeoutError(f"no order was found in {seconds} s; give more, or the makespan of one")
        return Optimum(None, most, bound)
    orders: list[list[Unit]] = [[] for _ in range(num_ranks)]
    for unit in sorted(units, key=lambda unit: solver.value(begin[unit])):
        orders[problem.rank_of_stage[unit.stage]].append(unit)
    return Optimum(Schedule(orders), solver.value(makespan), bound)


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
