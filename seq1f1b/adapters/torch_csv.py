"""Torch's action CSV: one line per rank, a cell ``2F3`` is stage 2, forward, flat index 3.

The flat index is microbatch * num_segments + segment. An empty cell is a bubble and says nothing about the order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from seq1f1b.unit import Unit

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule

__all__: list[str] = []

_PASSES = "FBIW"  # that torch has, too
_MOST = 2**31 - 1  # of an index
_QUOTED = 39  # letters of a cell that an error shows
_CELL = re.compile(rf"0*([0-9]{{1,10}})([{_PASSES}])0*([0-9]{{1,10}})", re.ASCII)
_TOKEN = re.compile(r'[^ \t\r\n,"#]+')
_OVERLAPPED = re.compile(r"\(([^;]*);(.*)\)OVERLAP_F_B")
_HOW = "a cell is written 2F3: stage, a pass (F, B, I, W), flat index; transfers are not read"


class _Cell(NamedTuple):
    text: str
    line: int  # both from 1
    number: int
    unit: Unit

    def error(self, why: str) -> ValueError:
        return _error(self.text, self.line, self.number, why)


def _error(text: str, line: int, number: int, why: str) -> ValueError:
    return ValueError(f"line {line}, unit {number}, '{text[:_QUOTED]}': {why}")


def to_csv(order: Schedule) -> str:
    """Writes the text of :meth:`seq1f1b.Schedule.to_csv`."""
    for m, parents in enumerate(order.parents or ()):
        if parents != tuple(range(-1, len(parents) - 1)):
            raise ValueError(
                f"torch's CSV has no parents, and segments of micro-batch {m} are a tree: write the order as text"
            )
    for m, count in enumerate(order.segments_of):
        if count != order.num_segments:
            raise ValueError(
                f"torch's CSV numbers the segments of all micro-batches alike, and micro-batch {m} has {count} of "
                f"{order.num_segments}: write the order as text"
            )
    if not order.kinds <= set(_PASSES):
        ranks = enumerate(order.ranks)
        rank, unit = next((rank, unit) for rank, units in ranks for unit in units if unit.kind not in _PASSES)
        raise ValueError(f"torch's CSV has no cell for [{unit.stage}]{unit} of rank {rank}: write the order as text")
    k = order.num_segments
    rows = (",".join(f"{u.stage}{u.kind}{u.microbatch * k + u.segment}" for u in units) for units in order.ranks)
    return "".join(f"{row}\n" for row in rows)


def from_csv(text: str, num_segments: int) -> list[list[Unit]]:
    """Units of every rank in run order, for :meth:`seq1f1b.Schedule.from_csv`."""
    if "\0" in text:
        raise ValueError("embedded null character")
    if num_segments < 1:
        raise ValueError(f"num_segments is {num_segments}, must be at least 1")
    if num_segments > _MOST:
        raise ValueError(f"num_segments is {num_segments}, must be in 1..{_MOST}")
    lines = [list(_cells(line, number, num_segments)) for number, line in enumerate(text.split("\n"), 1)]
    ranks = [cells for cells in lines if cells]
    if not ranks:
        raise ValueError("the text holds no unit")
    _check_places(ranks)
    return [[cell.unit for cell in cells] for cells in ranks]


def _cells(line: str, number: int, num_segments: int) -> Iterable[_Cell]:
    """The units of a line. Torch writes an F and a B that share their time as one cell, (0F1;0B0)OVERLAP_F_B."""
    for i, token in enumerate(_TOKEN.findall(line.partition("#")[0]), 1):
        pair = _OVERLAPPED.fullmatch(token)
        for part in pair.groups() if pair else (token,):
            found = _CELL.fullmatch(part)
            if found is None or max(int(found[1]), int(found[3])) > _MOST:
                raise _error(part, number, i, _HOW)
            microbatch, segment = divmod(int(found[3]), num_segments)
            yield _Cell(part, number, i, Unit(found[2], int(found[1]), microbatch, segment))


def _check_places(ranks: list[list[_Cell]]) -> None:
    """Each stage lies on one rank, and no index is larger than a complete order can have."""
    count = sum(map(len, ranks))
    for cell in (cell for cells in ranks for cell in cells):
        if max(cell.unit.stage, cell.unit.microbatch) >= count:
            raise cell.error("an index is larger than the number of units in the text")
    rank_of: dict[int, int] = {}
    for rank, cells in enumerate(ranks):
        for cell in cells:
            if rank_of.setdefault(cell.unit.stage, rank) != rank:
                raise cell.error("another line holds this stage already")
