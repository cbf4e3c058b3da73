"""Units by name, for Python; ``csrc/core/unit.c`` holds their rules."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from seq1f1b import _C

__all__ = ["ProgramEdge", "Timeline", "Unit", "edges_of", "inputs_of", "unit_of"]


class Unit(NamedTuple):
    """One pass of one stage over one segment of one micro-batch; ``str(unit)`` is its text, ``F1.0``.

    ``kind`` is ``"F"`` (forward), ``"B"`` (backward), or, if an order splits the backward, ``"I"`` and ``"W"``
    (gradients of the input and of the weights). ``"R"`` recomputes: F kept only the stage's input, and R runs the stage
    again for the backward. If the vocabulary is spread over the ranks, each rank has ``"S"`` (logits of the rank's
    shard) and ``"T"`` (the loss, from the statistics of all shards, and the shard's gradients), and ``"E"`` (the
    shard's rows of the input embedding) and ``"G"`` (gradients of these rows); the stage is the rank. Tensors saved by
    F may move to a tier, such as a file: the move out begins at ``"O"``, the memory is free from ``"A"`` on, and the
    move back begins at ``"L"``.
    """

    kind: str
    stage: int
    microbatch: int
    segment: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.segment}"


def unit_of(unit: tuple[int, int, int, int]) -> Unit:
    """Returns the unit for the C core's four numbers: pass, stage, micro-batch, segment."""
    number, stage, microbatch, segment = unit
    return Unit(_C.PASSES[number], stage, microbatch, segment)


def inputs_of(units: Iterable[Unit], parents: Sequence[tuple[int, ...]] | None = None) -> dict[Unit, list[Unit]]:
    """Returns the inputs of each unit, the units whose results the unit takes, by the core's rules.

    Args:
        parents: parent of each segment, [micro-batch][segment]; None: the segment before.
    """
    units = set(units)
    num_stages = 1 + max(unit.stage for unit in units)
    segments_of: dict[int, int] = {}
    for unit in units:
        segments_of[unit.microbatch] = max(segments_of.get(unit.microbatch, 0), unit.segment + 1)
    passes = sum(1 << _C.PASSES.index(kind) for kind in {unit.kind for unit in units})
    num_shards = 1 + max((unit.stage for unit in units if unit.kind in "SE"), default=0)
    after = {}
    for unit in units:
        numbers = array("i", [_C.PASSES.index(unit.kind), *unit[1:]])
        own = range(-1, segments_of[unit.microbatch] - 1) if parents is None else parents[unit.microbatch]
        inputs = _C.unit_inputs(num_stages, num_shards, passes, numbers, array("i", own))
        after[unit] = [other for other in map(unit_of, inputs) if other in units]
    return after


class ProgramEdge(NamedTuple):
    """An edge of a lowered program, between two stages on two ranks; ``channel`` as in ``csrc/core/unit.h``."""

    source_stage: int
    destination_stage: int
    source_rank: int
    destination_rank: int
    channel: int
    num_places: int
    num_messages: int


def edges_of(program: Any) -> list[ProgramEdge]:
    """Returns the edges of a lowered program, in the core's order."""
    return [ProgramEdge(*edge) for edge in _C.program_edges(program)]


Timeline = Sequence[Sequence[tuple[Unit, float, float]]]
"""Per rank, its units in run order with start and end in seconds: simulated or measured."""
