"""Torch's action CSV: one line per rank, a cell ``2F3`` is stage 2, forward, flat index 3.

The flat index is microbatch * num_segments + segment. An empty cell is a bubble and says nothing about the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from seq1f1b.flat import MOST, whole
from seq1f1b.unit import Unit

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule

__all__: list[str] = []

_PASSES = "FBIW"  # the passes of torch
_CELL = re.compile(rf"0*([0-9]{{1,10}})([{_PASSES}])0*([0-9]{{1,10}})", re.ASCII)
_TOKEN = re.compile(r'[^ \t\r\n,"#]+')
_OVERLAPPED = re.compile(r"\(([^;]*);(.*)\)OVERLAP_F_B")
_HOW = "a cell is written 2F3: stage, a pass (F, B, I, W), flat index; transfers are not read"


def to_csv(order: Schedule) -> str:
    """Writes the text of :meth:`seq1f1b.Schedule.to_csv`."""
    k, other = order.num_segments, ""
    for m, parents in enumerate(order.parents or ()):
        if not other and parents != tuple(range(-1, len(parents) - 1)):
            other = f"torch's CSV has no parents, and segments of micro-batch {m} are a tree"
    for m, count in enumerate(order.segments_of):
        if not other and count != k:
            other = f"torch's CSV numbers segments of all micro-batches alike, and micro-batch {m} has {count} of {k}"
    for rank, units in enumerate(order.ranks):
        for unit in units:
            if not other and unit.kind not in _PASSES:
                other = f"torch's CSV has no cell for [{unit.stage}]{unit} of rank {rank}"
    if other:
        raise ValueError(f"{other}: write the order as text")
    rows = (",".join(f"{u.stage}{u.kind}{u.microbatch * k + u.segment}" for u in units) for units in order.ranks)
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str, num_segments: int) -> list[list[Unit]]:
    """Returns the units of every rank in run order, for :meth:`seq1f1b.Schedule.from_csv`."""
    whole("num_segments", num_segments, 1, MOST)
    lines = [list(_units(line, number, num_segments)) for number, line in enumerate(text.split("\n"), 1)]
    if not any(lines):
        raise ValueError("the text holds no unit")
    return [units for units in lines if units]


def _units(line: str, number: int, num_segments: int) -> Iterator[Unit]:
    """Yields the units of a line. Torch writes an overlapping F and B as one cell, (0F1;0B0)OVERLAP_F_B."""
    for i, token in enumerate(_TOKEN.findall(line.partition("#")[0]), 1):
        pair = _OVERLAPPED.fullmatch(token)
        for part in pair.groups() if pair else (token,):
            found = _CELL.fullmatch(part)
            if found is None or max(int(found[1]), int(found[3])) > MOST:
                raise ValueError(f"line {number}, unit {i}, '{part[:39]}': {_HOW}")
            yield Unit(found[2], int(found[1]), *divmod(int(found[3]), num_segments))
