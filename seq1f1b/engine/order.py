"""Builds orders of units for an engine's counts and options, and the form of an order for one rank."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from seq1f1b import _C
from seq1f1b.documents.rows import PlannedRows
from seq1f1b.engine.options import Builder, Options
from seq1f1b.schedule import Schedule
from seq1f1b.transport.group import OfOneProcess

__all__: list[str] = []


def build(source: Schedule | Builder, *counts: Any, parents: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Returns the given order, or builds one for numbers of ranks, micro-batches, segments, and stages per rank."""
    if isinstance(source, Schedule):
        return source
    names = ("num_ranks", "num_microbatches", "num_segments", "stages_per_rank")
    more = {} if parents is None else {"parents": parents}  # a user's callable may know no parents
    schedule = source(**dict(zip(names, counts, strict=True)), **more)
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule= is a callable that returned a {type(schedule).__name__}, must be a seq1f1b.Schedule"
        )
    return schedule


def with_options(schedule: Schedule, options: Options, device: torch.device) -> Schedule:
    """Returns the order with the units that an engine's options add, as the device of the stages runs it.

    A GPU works behind the host, so a wait of the host says nothing about the GPU. Therefore W does not fill waits on
    GPUs.
    """
    schedule = schedule.recompute(options.memory.recompute)
    if schedule.fills and device.type != "cpu":
        schedule = schedule.replace(weights="planned")
    if schedule.fills and "W" not in schedule.kinds:
        schedule = schedule.defer_weights()
    spreads = {"S": options.head is not None, "E": options.embedding is not None}
    for kind, name in (("S", "loss_fn=VocabularyParallelHead"), ("E", "embedding=VocabularyParallelEmbedding")):
        if kind in schedule.kinds and not spreads[kind]:
            raise ValueError(f"the order spreads the vocabulary over the ranks: give {name}(...)")
    missing = {kind: spreads[kind] and kind not in schedule.kinds for kind in spreads}
    if any(missing.values()):
        schedule = schedule.spread_vocabulary(head=missing["S"], embedding=missing["E"])
    moves, memory = "O" in schedule.kinds, options.memory
    if memory.offload is not None:
        return schedule.offload(memory.units or ("none" if moves else "all"))
    if moves:
        raise ValueError(
            "the schedule moves units (O, A, L): say by Memory(offload=...) in which directory, or seq1f1b.HOST"
        )
    return schedule


def plain_schedule(
    source: Schedule | Builder, num_ranks: int, stages_per_rank: int, options: Options, device: torch.device
) -> Schedule:
    """Returns the order of plain steps, checked, with the units that the options add."""
    counts = (num_ranks, options.num_microbatches, options.num_segments)
    schedule = build(source, *counts, stages_per_rank)
    if schedule.rows is not None:
        raise ValueError("the schedule is for rows of unequal segments: give its name, and segment_sizes to every step")
    found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_segments)
    if found != counts:
        raise ValueError(
            f"the schedule is for (ranks, micro-batches, segments) = {found}, the engine has {counts}: "
            "the group's size and num_microbatches, num_segments must agree with it"
        )
    schedule.check()
    if schedule.fills and device.type != "cpu":
        warnings.warn(
            f'weights="fill" runs W while the host waits for a message, but stages on {device} work behind it: the '
            'order runs as it is planned (weights="planned")',
            stacklevel=5,  # where the engine is made
        )
    return with_options(schedule, options, device)


def schedule_of_rows(
    counts: tuple[int, ...],
    parents: tuple[tuple[int, ...], ...] | None,
    plan: PlannedRows | None,
    source: Builder | None,
    pipeline: Any,
    options: Options,
) -> Schedule:
    """Returns the order of a step of rows, with the units that the options add. The order runs over the open edges.

    Args:
        counts: segments of every micro-batch.
        parents: the segment that each segment follows; None: chains.
        plan: a plan with the order; None: ``source`` builds the order.
        source: builds the order without a plan; None: the engine was given neither a callable nor a name.
    """
    if plan is not None:
        schedule: Schedule = plan.schedule
        if schedule.segments_of != counts:
            raise ValueError(f"the plan's rows have {counts} segments, its schedule is for {schedule.segments_of}")
        if schedule.parents != parents:
            raise ValueError(f"the plan's segments follow {parents}, its schedule is for {schedule.parents}")
        schedule.check()
    elif source is None:
        raise ValueError("a step of rows builds its own order: give the engine the name of a schedule, or a callable")
    else:
        schedule = build(source, pipeline.num_ranks, len(counts), counts, len(pipeline.modules), parents=parents)
        if schedule.parents != parents:
            raise ValueError(
                f"the engine's schedule is a callable that built an order with parents {schedule.parents}, and the "
                f"step's are {parents}: let it hand parents= to build_schedule"
            )
    found = (schedule.num_ranks, schedule.rank_of_stage)
    expected = (pipeline.num_ranks, pipeline.rank_of_stage)
    if found != expected:
        raise ValueError(f"the plan is for (ranks, ranks of the stages) = {found}, the engine has {expected}")
    return with_options(schedule, options, pipeline.device)


@dataclass(frozen=True, eq=False)
class Setting:
    """The order and the options of plain steps."""

    schedule: Schedule
    options: Options
    choice: Any = None  # the tuner's, see :mod:`seq1f1b.report.tuning`; None: the engine's own arguments


class StageOrder:
    """Passes of the cells of one stage. A cell is a segment, numbered within the stage over all micro-batches.

    Args:
        units: letter of the pass and cell, in run order.
        places: micro-batch and segment of each cell, and whether no cell follows: the last of a micro-batch, or a
            leaf of a tree.
        parents: the cell before each cell, -1 for the first cell of a micro-batch.
        num_children: number of cells behind each cell, in an order of trees; else None.
    """

    def __init__(
        self,
        units: Sequence[tuple[str, int]],
        places: list[tuple[int, int, bool]],
        parents: Sequence[int],
        num_children: list[int] | None,
    ) -> None:
        self.places, self.parents, self.num_children = places, parents, num_children
        of = {letter: [cell for own, cell in units if own == letter] for letter in "FWRO"}
        self.forwards = of["F"]
        self.kinds = frozenset(letter for letter, _ in units)
        self.split, self.recomputed, self.moved = (frozenset(of[letter]) for letter in "WRO")
        # The pass, B or W, and the cell after which all gradients of weights are complete.
        self.last_gradients = next((unit for unit in reversed(units) if unit[0] in "BW"), ("", -1))


class RankOrder(OfOneProcess):
    """An order on one rank: the lowered program, the executor that runs the program, and the rank's cells."""

    def __init__(self, schedule: Schedule, rank: int, program: Any, executor: Any) -> None:
        self.schedule, self.program, self.executor = schedule, program, executor
        segments, first = schedule.segments_of, schedule._first_cells
        of_segments = schedule.parents or [range(-1, count - 1) for count in segments]
        parents = [a + p if p >= 0 else -1 for a, own in zip(first, of_segments, strict=False) for p in own]
        children = Counter(parents)
        places = [(m, s, not children[first[m] + s]) for m, count in enumerate(segments) for s in range(count)]
        num_children = None if schedule.parents is None else [children[cell] for cell in range(len(parents))]
        self._cells = [(unit, first[unit.microbatch] + unit.segment) for unit in schedule.units_of(rank)]
        self.last_cells = {unit.kind: cell for unit, cell in self._cells}  # by pass, the cell of the rank's last unit
        units: dict[int, list[tuple[str, int]]] = {}
        for unit, cell in self._cells:
            units.setdefault(unit.stage, []).append((unit.kind, cell))
        self.stages = {stage: StageOrder(own, places, parents, num_children) for stage, own in units.items()}

    @cached_property
    def most_away(self) -> int:
        """Returns the largest number of the rank's units at once between O and the backward."""
        units = [unit for unit, cell in self._cells if cell in self.stages[unit.stage].moved]
        return max(accumulate((unit.kind == "O") - (unit.kind in "BI") for unit in units), default=0)

    @cached_property
    def texts(self) -> dict[tuple[int, int, int], str]:
        """The rank's units as texts, with the stage, by number of the pass, stage and cell."""
        return {(_C.PASSES.index(unit.kind), unit.stage, cell): f"[{unit.stage}]{unit}" for unit, cell in self._cells}

    @cached_property
    def digest(self) -> str:
        """The text for comparing an order between ranks: units, receive places, and whether W fills waits."""
        schedule = self.schedule
        return f"{schedule.digest}, prefetch {schedule._places_text}" + ", W in waits" * schedule.fills
