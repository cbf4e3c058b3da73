"""Builds orders of units for an engine's counts and options, and the form of an order for one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from seq1f1b import _C
from seq1f1b.documents.rows import PlannedRows
from seq1f1b.engine.options import Builder, Options
from seq1f1b.schedule import Schedule
from seq1f1b.transport.group import OfOneProcess

__all__: list[str] = []


def build(
    source: Schedule | Builder,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int | Sequence[int],
    stages_per_rank: int,
    parents: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """Returns the given order, or builds one for these counts."""
    if isinstance(source, Schedule):
        return source
    schedule = source(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_segments=num_segments,
        stages_per_rank=stages_per_rank,
        **({} if parents is None else {"parents": parents}),  # a user's callable may know no parents
    )
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
        default = "none" if moves else "all"
        return schedule.offload(default if memory.units is None else memory.units)
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
        schedule = build(source, pipeline.num_ranks, len(counts), counts, len(pipeline.modules), parents)
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
        units: Iterable[tuple[str, int]],
        places: list[tuple[int, int, bool]],
        parents: Sequence[int],
        num_children: list[int] | None,
    ) -> None:
        self.places, self.units = places, tuple(units)
        self.parents, self.num_children = parents, num_children
        of = {letter: [cell for own, cell in self.units if own == letter] for letter in "FWRO"}
        self.forwards = of["F"]
        self.kinds = frozenset(letter for letter, _ in self.units)
        self.split, self.recomputed, self.moved = (frozenset(of[letter]) for letter in "WRO")
        # The pass, B or W, and the cell after which all gradients of weights are complete.
        self.last_gradients = next((unit for unit in reversed(self.units) if unit[0] in "BW"), ("", -1))


class RankOrder(OfOneProcess):
    """An order on one rank: the lowered program, the executor that runs the program, and the rank's cells."""

    def __init__(self, schedule: Schedule, rank: int, program: Any, executor: Any) -> None:
        self.schedule, self.program, self.executor, self._rank = schedule, program, executor, rank
        segments, first = schedule.segments_of, schedule._first_cells
        self.recomputes = "R" in schedule.kinds  # on any rank
        places = [(m, s, s + 1 == count) for m, count in enumerate(segments) for s in range(count)]
        parents = [cell - 1 if s else -1 for cell, (_, s, _) in enumerate(places)]
        num_children: list[int] | None = None
        if schedule.parents is not None:
            parents = [a + p if p >= 0 else -1 for a, own in zip(first, schedule.parents, strict=False) for p in own]
            num_children = [0] * len(parents)
            for parent in filter(lambda parent: parent >= 0, parents):
                num_children[parent] += 1
            places = [(m, s, not num_children[cell]) for cell, (m, s, _) in enumerate(places)]
        own: dict[int, list[tuple[str, int]]] = {}
        self.last_cells: dict[str, int] = {}  # by pass, the cell of the rank's last unit
        for letter, stage, microbatch, segment in schedule.units_of(rank):
            cell = first[microbatch] + segment
            own.setdefault(stage, []).append((letter, cell))
            self.last_cells[letter] = cell
        self.stages = {stage: StageOrder(units, places, parents, num_children) for stage, units in own.items()}

    @cached_property
    def most_away(self) -> int:
        """Returns the largest number of the rank's units at once between O and the backward."""
        away, most = 0, 0
        moved = {(index, cell) for index, stage in self.stages.items() for cell in stage.moved}
        for letter, stage, microbatch, segment in self.schedule.units_of(self._rank):
            if (stage, self.schedule._first_cells[microbatch] + segment) in moved:
                away += (letter == "O") - (letter in "BI")
                most = max(most, away)
        return most

    @cached_property
    def texts(self) -> dict[tuple[int, int, int], str]:
        """The rank's units as texts, with the stage, by number of the pass, stage and cell."""
        return {
            (_C.PASSES.index(letter), index, cell): f"[{index}]{letter}{stage.places[cell][0]}.{stage.places[cell][1]}"
            for index, stage in self.stages.items()
            for letter, cell in stage.units
        }

    @cached_property
    def digest(self) -> str:
        """The text for comparing an order between ranks: units, receive places, and whether W fills waits."""
        schedule = self.schedule
        return f"{schedule.digest}, prefetch {schedule._places_text}" + ", W in waits" * schedule.fills
