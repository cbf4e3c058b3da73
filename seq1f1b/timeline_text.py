"""A timeline, simulated or measured, as text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence

from seq1f1b import _C
from seq1f1b.unit import Timeline, Unit

__all__ = ["column_seconds", "timeline_text"]

PASSES = dict(zip(_C.PASSES, _C.PASS_TEXTS, strict=True))
_IN_WAITS = ":"  # fill character for the parts of W that ran in waits
_FILL = {letter: dict(zip("FBIWRSTEGOAL", "-=~+^.%'\">|<", strict=True)).get(letter, "*") for letter in PASSES}


def timeline_text(timeline: Timeline, *, width: int = 100, column: float | None = None) -> str:
    """Returns one line per rank; a unit is a label of micro-batch and segment, filled up with the pass's character.

    The labels are as long as ``width`` allows: ``0.1``, ``0b`` (b: segment 1), ``0``, or no label. Blanks are bubbles;
    stages of one rank look alike. If units are narrower than a column, passes and blanks appear in proportion to their
    time. The last lines are a legend.

    Args:
        width: columns of a line.
        column: seconds of a column, for several timelines on one scale; None: as few as ``width`` allows.
    """
    units = [unit for track in timeline for unit, _, _ in track]
    begin, end = extent(timeline)
    margin = _margin(timeline)
    columns = max(width - margin, 1)
    shortest = _shortest(timeline)
    narrowest = min(shortest.values(), default=0.0)
    column = column_seconds(timeline, width=width) if column is None else column
    scale = 1 / column if end > begin else 0.0
    label = _label(units, sorted(int(scale * length + 1e-9) for length in shortest.values()))
    lines = []
    for rank, track in enumerate(timeline):
        line = ""
        if scale * narrowest < 1:
            line = _shares(track, begin, scale, columns)
        else:
            for (unit, start, stop), in_wait in zip(track, in_waits(track), strict=True):
                left, right = round((start - begin) * scale), round((stop - begin) * scale)
                name, fill = ("", _IN_WAITS) if in_wait else (label(unit), _FILL[unit.kind])
                line = line[:left].ljust(left) + name[: right - left].ljust(right - left, fill)
        lines.append(f"rank {rank}".ljust(margin) + line)
    example = next((unit for unit in units if unit.segment > 0), units[0])
    kinds, unseen = kinds_of(timeline)
    legend = ", ".join(f"{label(example)}{_FILL[kind] * 2} {PASSES[kind]}" for kind in kinds)
    if any(map(any, map(in_waits, timeline))):
        legend += f", {_IN_WAITS * 2} weight gradient in a wait"
    if label(example):
        legend += f" of micro-batch {example.microbatch}" + (f", segment {example.segment}" * (example.segment > 0))
    if unseen:
        legend += f"; not drawn, as no time of a rank: {', '.join(PASSES[kind] for kind in unseen)}"
    if scale > 0:
        legend += f"; one column is {seconds_text(1 / scale)}" + ", units are shorter" * (scale * narrowest < 1)
    return "\n".join([*lines, *textwrap.wrap(legend, max(width, 40))]) + "\n"


def column_seconds(timeline: Timeline, *, width: int) -> float:
    """Returns the seconds of a column if the timeline fills ``width``; equal units get equal columns if possible."""
    begin, end = extent(timeline)
    narrowest = min(_shortest(timeline).values(), default=0.0)
    column = (end - begin) / max(width - _margin(timeline), 1)
    return narrowest / int(narrowest / column + 1e-9) if 0 < column <= narrowest else column


def _margin(timeline: Timeline) -> int:
    return len(f"rank {len(timeline) - 1}  ")


def _shortest(timeline: Timeline) -> dict[str, float]:
    shortest: dict[str, float] = {}
    for unit, start, stop in (entry for track in timeline for entry in track):
        if stop > start:
            shortest[unit.kind] = min(shortest.get(unit.kind, stop - start), stop - start)
    return shortest


def kinds_of(timeline: Timeline) -> tuple[list[str], list[str]]:
    """Returns the passes that take a rank's time, and the passes of no length, such as moves beside other units."""
    there = {unit.kind for track in timeline for unit, _, _ in track}
    seen = _shortest(timeline).keys() or there
    return [kind for kind in _FILL if kind in seen], [kind for kind in _FILL if kind in there - seen]


def _shares(track: Sequence[tuple[Unit, float, float]], begin: float, scale: float, columns: int) -> str:
    """Returns a pass or a blank per column, always the pass furthest behind its share of the time so far."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for (unit, start, stop), in_wait in zip(track, in_waits(track), strict=True):
        left, right = (start - begin) * scale, (stop - begin) * scale
        fill = _IN_WAITS if in_wait else _FILL[unit.kind]
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
    for form, room in _labels(units):
        longest = max(len(form(unit)) for unit in units)
        if widths and longest + room <= widths[0] and all(longest < width for width in widths[1:]):
            return form
    return lambda unit: ""


def _labels(units: list[Unit]) -> Iterator[tuple[Callable[[Unit], str], int]]:
    """Yields functions that label a unit, longest label first, and for each the columns to leave behind the label."""
    num_segments = max(unit.segment for unit in units) + 1
    if num_segments > 1:
        yield lambda unit: f"{unit.microbatch}.{unit.segment}", 1
        if num_segments <= 26:
            yield lambda unit: f"{unit.microbatch}{chr(ord('a') + unit.segment)}", 0
    yield lambda unit: f"{unit.microbatch}", 0


def extent(timeline: Timeline) -> tuple[float, float]:
    """Returns the first start and the last end of a timeline."""
    if not any(timeline):
        raise ValueError("the timeline holds no unit")
    begin = min(start for track in timeline for _, start, _ in track)
    end = max(stop for track in timeline for _, _, stop in track)
    return begin, end


def in_waits(track: Sequence[tuple[Unit, float, float]]) -> list[bool]:
    """Returns whether each entry is a part of W run in a wait: an entry of an equal unit comes later."""
    last = {unit: i for i, (unit, _, _) in enumerate(track)}
    return [last[unit] > i for i, (unit, _, _) in enumerate(track)]


def time_unit(seconds: float) -> tuple[float, str]:
    """Returns the size in seconds and the name of the unit in which ``seconds`` read well: s, ms or us."""
    return next(((size, name) for size, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))


def seconds_text(seconds: float) -> str:
    size, name = time_unit(seconds)
    return f"{seconds / size:.3g} {name}"
