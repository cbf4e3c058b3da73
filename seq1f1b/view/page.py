"""One self-contained HTML page of a timeline, simulated or measured: zoom, hover, and the memory curve of each rank.

``timeline.js`` draws the timeline, as in the schedule explorer of the documentation. The page holds script and numbers,
and opens without a network.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from seq1f1b import _C
from seq1f1b.files import write_whole
from seq1f1b.schedule import Simulation
from seq1f1b.timeline_text import bars_of
from seq1f1b.unit import Timeline, Unit, inputs_of
from seq1f1b.view import style

__all__ = ["live_changes", "memory_changes", "timeline_html"]

Changes = list[tuple[float, int, str]]
"""(time, by how much, of which holding) of what a rank holds, by time; of one time, what is freed comes first."""


def timeline_html(
    path: str | Path,
    tracks: Timeline | Simulation | Mapping[str, Timeline | Simulation],
    *,
    title: str = "seq1f1b",
) -> None:
    """Writes the page. The wheel zooms the time axis and a drag moves along the axis, in all timelines at once.

    Colours are those of :func:`~.draw.timeline_png`. Hovering over a unit, or a tap, shows times, predecessors (latest
    end first) and successors; arrow keys go from unit to unit. A simulation also shows the critical path and each
    unit's slack (``critical=True``), and bytes of each kind of memory (``memory=StepMemory(...)``). Without bytes the
    memory curve counts live units. Memory curves of all ranks and timelines have one scale.

    Args:
        path: file to write.
        tracks: a timeline or simulation, or several with the heading of each, one above the other on a common time
            axis.
    Raises:
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    named = tracks if isinstance(tracks, Mapping) else {"": tracks}
    runs = {heading: run for heading, run in named.items() if isinstance(run, Simulation)}
    timelines = {heading: run.timeline if isinstance(run, Simulation) else run for heading, run in named.items()}
    shown = [
        _shown(heading, timeline, runs.get(heading))
        for heading, timeline in style.named_timelines("page", timelines).items()
    ]
    parts = {
        "title": escape(title),
        "style": style.part("timeline.css"),
        "script": style.part("timeline.js"),
        "facts": _json(style.page_facts()),
        "timelines": _json(shown),
    }
    write_whole(path, (_PAGE % parts).encode())


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>%(title)s</title>
<style>
%(style)s
</style>
<h2>%(title)s</h2>
<p>The wheel, two fingers, + and - zoom, a drag moves, 0 shows the whole. Hover over a unit, tap it, or press arrow
keys, for its times and what it waits for.</p>
<div id="timelines"></div>
<script>
%(script)s
</script>
<script>
const timelines = new Timelines(document.getElementById("timelines"), %(facts)s)
timelines.show(%(timelines)s)
</script>
</html>
"""


def _json(data: Any) -> str:
    """Returns a value as JSON for a script element.

    Escapes every ``<``: ``</script`` ends a script, and ``<!--`` with ``<script`` hides the end.
    """
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def live_changes(track: Sequence[tuple[Unit, float, float]]) -> Changes:
    """Returns the changes of a rank's number of live units, as activations.

    A unit is live from the start of F, or R if recomputed, to the end of B, or W if the backward is split, except
    between A and L; in an order without backwards, from the start to the end of F.
    """
    again = {unit[1:] for unit, _, _ in track if unit.kind == "R"}
    last = "BWA" if any(unit.kind in "BI" for unit, _, _ in track) else "F"
    changes = []
    for unit, start, end in track:
        begins = unit.kind in "RL" or (unit.kind == "F" and unit[1:] not in again)
        changes += [(start, 1, "activations")] * begins + [(end, -1, "activations")] * (unit.kind in last)
    return sorted(changes)


def memory_changes(run: Simulation) -> list[Changes]:
    """Returns the bytes taken and freed by the units of each rank of ``simulate(memory=...)``, by the core's rules."""
    assert run.given is not None
    names = [_C.HOLDINGS[counts_with][0] for _, _, counts_with in _C.HOLDINGS]
    found = []
    for track, bytes_of in zip(run.timeline, run.schedule._byte_changes(run.given), strict=True):
        changes = []
        for (_, start, end), of_unit in zip(track, bytes_of, strict=True):
            for name, (taken, freed) in zip(names, of_unit, strict=True):
                changes += [(start, taken, name)] * (taken > 0) + [(end, -freed, name)] * (freed > 0)
        found.append(sorted(changes))
    return found


def _shown(heading: str, timeline: Timeline, run: Simulation | None) -> dict[str, Any]:
    """Returns a timeline as ``timeline.js`` takes it."""
    makespan = max(bar.end for row in bars_of(timeline) for bar in row)
    placed = [entry for track in timeline for entry in track]
    number = {unit: i for i, (unit, _, _) in enumerate(placed)}
    inputs = inputs_of((unit for unit, _, _ in placed), None if run is None else run.schedule.parents)
    edges = [[number[other] for other in inputs[unit]] for unit, _, _ in placed]
    busy = sum(stop - start for _, start, stop in placed)
    path = None if run is None else run.critical_path
    return {
        "heading": heading,
        "makespan": makespan,
        "bubble": max(0.0, 1 - busy / (makespan * len(timeline))) if makespan > 0 else None,
        "first": _firsts(timeline),
        "pass": [_C.PASSES.index(unit.kind) for unit, _, _ in placed],
        "stage": [unit.stage for unit, _, _ in placed],
        "microbatch": [unit.microbatch for unit, _, _ in placed],
        "segment": [unit.segment for unit, _, _ in placed],
        "start": [start for _, start, _ in placed],
        "end": [stop for _, _, stop in placed],
        "slack": None if run is None or run.slack is None else [*chain(*run.slack)],
        "path": None if path is None else [number[unit] for unit in path],
        "inputs": {"first": _firsts(edges), "units": [*chain(*edges)]},
        "memory": _memory(timeline, run),
    }


def _firsts(rows: Sequence[Sequence[Any]]) -> list[int]:
    """Returns the index of each row's first entry among the entries of all rows, and last the number of all entries."""
    return [*accumulate(map(len, rows), initial=0)]


def _memory(timeline: Timeline, run: Simulation | None) -> dict[str, Any]:
    if run is None or run.memory is None:
        rows, constant = [live_changes(track) for track in timeline], {}
        peaks: Sequence[int] = [max(accumulate((by for _, by, _ in changes), initial=0)) for changes in rows]
    else:
        rows, peaks = memory_changes(run), run.memory.total
        constant = {name: getattr(run.memory, name) for name in ("weights", "optimizer", "logits", "receive")}
    holding = {row["name"]: h for h, row in enumerate(style.page_facts()["holdings"])}
    changes = [change for row in rows for change in row]
    return {
        "whole": None if constant else max(1, len({(unit.stage, unit.segment) for unit, _, _ in timeline[0]})),
        "total": peaks,
        "constant": constant,
        "first": _firsts(rows),
        "when": [moment for moment, _, _ in changes],
        "by": [by for _, by, _ in changes],
        "holding": [holding[name] for _, _, name in changes],
    }
