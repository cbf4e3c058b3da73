"""The rows of a timeline, simulated or measured, and the timeline as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seq1f1b import _C
from seq1f1b.unit import Timeline, Unit

__all__ = ["Bar", "bars_of", "column_seconds", "timeline_text"]

PASSES = dict(zip(_C.PASSES, _C.PASS_TEXTS, strict=True))
_IN_WAITS = ":"  # fill character for the parts of W that ran in waits
_FILL = {letter: dict(zip("FBIWRSTEGOAL", "-=~+^.%'\">|<", strict=True)).get(letter, "*") for letter in PASSES}


class Bar(NamedTuple):
    """A unit as every picture draws it.

    Attributes:
        start, end: seconds from the first start of all ranks.
        in_wait: whether this is a part of W run in a wait: an entry of an equal unit comes later.
    """

    unit: Unit
    start: float
    end: float
    in_wait: bool


def bars_of(timeline: Timeline) -> list[list[Bar]]:
    """Returns the bars of each rank, in run order. Raises ``ValueError`` for a timeline without units."""
    begin = min((start for track in timeline for _, start, _ in track), default=None)
    if begin is None:
        raise ValueError("the timeline holds no unit")
    rows = []
    for track in timeline:
        last = {unit: i for i, (unit, _, _) in enumerate(track)}
        rows.append([Bar(u, start - begin, end - begin, last[u] > i) for i, (u, start, end) in enumerate(track)])
    return rows


def timeline_text(timeline: Timeline, *, width: int = 100, column: float | None = None) -> str:
    """Returns one line per rank; a unit is a label of micro-batch and segment, filled up with the pass's character.

    The labels are as long as ``width`` allows: ``0.1``, ``0b`` (b: segment 1), ``0``, or no label. Blanks are bubbles;
    stages of one rank look alike. If units are narrower than a column, passes and blanks appear in proportion to their
    time. The last lines are a legend.

    Args:
        width: columns of a line.
        column: seconds of a column, for several timelines on one scale; None: as few as ``width`` allows.
    """
    rows = bars_of(timeline)
    shortest = shortest_of(rows)
    column = column_seconds(timeline, width=width) if column is None else column
    scale = 1 / column if column > 0 else 0.0
    is_narrow = scale * min(shortest.values(), default=0.0) < 1
    units = [bar.unit for row in rows for bar in row]
    label = _label(units, sorted(int(scale * length + 1e-9) for length in shortest.values()))
    margin = len(_margin(rows))
    lines = []
    for rank, row in enumerate(rows):
        line = _shares(row, scale, max(width - margin, 1)) if is_narrow else ""
        for bar in () if is_narrow else row:
            left, right = round(bar.start * scale), round(bar.end * scale)
            name, fill = ("", _IN_WAITS) if bar.in_wait else (label(bar.unit), _FILL[bar.unit.kind])
            line = line[:left].ljust(left) + name[: right - left].ljust(right - left, fill)
        lines.append(f"rank {rank}".ljust(margin) + line)
    example = next((unit for unit in units if unit.segment > 0), units[0])
    there = {unit.kind for unit in units}
    seen = shortest.keys() or there
    legend = ", ".join(f"{label(example)}{_FILL[kind] * 2} {PASSES[kind]}" for kind in _FILL if kind in seen)
    if any(bar.in_wait for row in rows for bar in row):
        legend += f", {_IN_WAITS * 2} weight gradient in a wait"
    if label(example):
        legend += f" of micro-batch {example.microbatch}" + (f", segment {example.segment}" * (example.segment > 0))
    if unseen := [PASSES[kind] for kind in _FILL if kind in there - seen]:
        legend += f"; not drawn, as no time of a rank: {', '.join(unseen)}"
    if scale > 0:
        size, name = time_unit(column)
        legend += f"; one column is {column / size:.3g} {name}" + ", units are shorter" * is_narrow
    return "\n".join([*lines, *textwrap.wrap(legend, max(width, 40))]) + "\n"


def column_seconds(timeline: Timeline, *, width: int) -> float:
    """Returns the seconds of a column if the timeline fills ``width``; equal units get equal columns if possible."""
    rows = bars_of(timeline)
    narrowest = min(shortest_of(rows).values(), default=0.0)
    column = max(bar.end for row in rows for bar in row) / max(width - len(_margin(rows)), 1)
    return narrowest / int(narrowest / column + 1e-9) if 0 < column <= narrowest else column


def _margin(rows: Sequence[object]) -> str:
    return f"rank {len(rows) - 1}  "


def shortest_of(rows: Sequence[Sequence[Bar]]) -> dict[str, float]:
    """Returns the seconds of the shortest unit of each pass; without passes of no length, such as moves."""
    shortest: dict[str, float] = {}
    for unit, start, end, _ in (bar for row in rows for bar in row):
        if end > start:
            shortest[unit.kind] = min(shortest.get(unit.kind, end - start), end - start)
    return shortest


def _shares(row: Sequence[Bar], scale: float, columns: int) -> str:
    """Returns a pass or a blank per column, always the pass furthest behind its share of the time so far."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for bar in row:
        left, right, fill = bar.start * scale, bar.end * scale, _IN_WAITS if bar.in_wait else _FILL[bar.unit.kind]
        for column in range(int(left), min(math.ceil(right), columns)):
            share = min(right, column + 1) - max(left, column)
            shares[column][fill] = shares[column].get(fill, 0.0) + share
    line, due = "", dict.fromkeys((" ", *_FILL.values(), _IN_WAITS), 0.0)
    for passes in shares:
        for fill, share in {**passes, " ": 1 - sum(passes.values())}.items():
            due[fill] += share
        fill = max(due, key=lambda fill: due[fill])
        due[fill] -= 1
        line += fill
    return line.rstrip()


def _label(units: list[Unit], widths: Sequence[int]) -> Callable[[Unit], str]:
    """Returns the function for the longest label that fits. ``widths``: columns of each pass's shortest unit, sorted.

    The characters behind the label show the pass, so in at most one pass a label may fill a unit.
    """
    num_segments = max(unit.segment for unit in units) + 1
    forms: list[tuple[Callable[[Unit], str], int]] = [  # a label, and the columns to leave behind it; the longest first
        (lambda unit: f"{unit.microbatch}.{unit.segment}", 1),
        (lambda unit: f"{unit.microbatch}{chr(ord('a') + unit.segment)}", 0),
        (lambda unit: f"{unit.microbatch}", 0),
    ]
    for form, room in forms[2:] if num_segments == 1 else forms[::2] if num_segments > 26 else forms:
        longest = max(len(form(unit)) for unit in units)
        if widths and longest + room <= widths[0] and all(longest < width for width in widths[1:]):
            return form
    return lambda unit: ""


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the size in seconds and the name of the unit in which ``seconds`` read well: s, ms or us."""
    return next(((size, name) for size, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))
