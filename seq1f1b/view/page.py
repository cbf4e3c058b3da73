"""One self-contained HTML page of a timeline, simulated or measured: zoom, hover, and the memory curve of each rank.

``timeline.js`` shows it on canvases, as it does in the schedule explorer of the documentation. The page holds the
scripts and the numbers, so that it opens without a network.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from seq1f1b import _C
from seq1f1b.files import write_whole
from seq1f1b.schedule import Simulation
from seq1f1b.timeline_text import extent
from seq1f1b.unit import Timeline, Unit, inputs_of
from seq1f1b.view import style

__all__ = ["live_units", "memory_curves", "predecessors", "timeline_html"]

Curve = list[tuple[float, int]]
"""(time, what is held from then on), a step wherever it changes."""


def timeline_html(
    path: str | Path,
    tracks: Timeline | Simulation | Mapping[str, Timeline | Simulation],
    *,
    title: str = "seq1f1b",
) -> None:
    """Writes the page. A wheel zooms the time axis and a drag moves it, in all timelines at once.

    Colours are those of :func:`~.draw.timeline_png`. Hovering over a unit, or a tap on it, tells its times, what it
    comes after, the last to end first, and what comes after it; arrow keys go from unit to unit. A simulation also has
    its critical path and each unit's slack (``critical=True``) and bytes of each kind of memory
    (``memory=StepMemory(...)``); else memory is that of live units. Memory curves of all ranks and timelines have one
    scale.

    Args:
        path: file to write.
        tracks: a timeline or simulation, or several with the heading of each, one above the other on a common time
            axis.
    Raises:
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    named = tracks if isinstance(tracks, Mapping) else {"": tracks}
    timelines: dict[str, Timeline] = {
        heading: run.timeline if isinstance(run, Simulation) else run for heading, run in named.items()
    }
    for timeline in timelines.values():
        extent(timeline)  # of units that there are
    style.check_size("page", style.count_units(timelines.values()))
    shown = [
        _shown(heading, timeline, run if isinstance(run, Simulation) else None)
        for (heading, timeline), run in zip(timelines.items(), named.values(), strict=True)
    ]
    parts = {
        "title": escape(title),
        "style": style.stylesheet(),
        "script": style.scripts(),
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
body { margin: 10px 16px; font: 14px/1.45 system-ui, sans-serif; background: Canvas; color: CanvasText; }
h2 { margin: 4px 0; font-size: 18px; }
p { margin: 2px 0 6px; }
@media (prefers-color-scheme: dark) { body { background: #15181c; } }
</style>
<h2>%(title)s</h2>
<p>
<span class="by-mouse">The wheel zooms, a drag moves. Hover over a unit, or press arrow keys, for its times and what it
waits for.</span>
<span class="by-touch">Two fingers zoom, one moves. Tap a unit for its times and what it waits for.</span>
</p>
<div id="timelines"></div>
<script>
%(script)s
</script>
<script>
const timelines = new Timelines(document.getElementById("timelines"), %(facts)s)
timelines.show(Timelines.unpack(%(timelines)s))
</script>
</html>
"""


def _json(data: Any) -> str:
    """A value as it may stand in a script; numpy's arrays in the form that ``Timelines.unpack`` reads.

    No ``<`` stays: ``</script`` ends a script, and ``<!--`` with ``<script`` keeps its end from being seen.
    """

    def packed(array: Any) -> dict[str, str]:
        kind = {"i": "Int32Array", "f": "Float64Array", "u": "Uint8Array"}[array.dtype.kind]
        return {"array": kind, "base64": base64.b64encode(array.tobytes()).decode()}

    return json.dumps(data, default=packed, separators=(",", ":")).replace("<", "\\u003c")


# -- what is shown -----------------------------------------------------------------------------------------------------


class _Lifetimes:
    """Bytes that units of an order take at their start and free at their end, as the core says."""

    def __init__(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self._passes = sum(1 << _C.PASSES.index(kind) for kind in {unit.kind for unit in units})
        self._kinds = {unit[1:]: 1 + "RL".index(unit.kind) for unit in units if unit.kind in "RL"}  # of cells, as in C
        self._segments_of: dict[int, int] = {}  # by micro-batch
        for unit in units:
            self._segments_of[unit.microbatch] = max(self._segments_of.get(unit.microbatch, 0), unit.segment + 1)
        self._known: dict[tuple[str, int, int, int], tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def of(self, unit: Unit) -> tuple[tuple[str, ...], tuple[str, ...]]:
        num_segments = self._segments_of[unit.microbatch]
        key = unit.kind, unit.segment, num_segments, self._kinds.get(unit[1:], 0)
        if key not in self._known:
            number = _C.PASSES.index(unit.kind), 0, 0, unit.segment
            self._known[key] = _C.unit_lifetimes(num_segments, self._passes, number, key[3])
        return self._known[key]


def live_units(track: Sequence[tuple[Unit, float, float]]) -> Curve:
    """The memory curve of a rank: (time, units live from then on), a step wherever it changes.

    A unit is live from the start of its F, or R if it is recomputed, to the end of its B, or W where the backward is
    split; where nothing goes back, while it runs.
    """
    units = [unit for unit, _, _ in track]
    lifetimes = _Lifetimes(units)
    changes: dict[float, int] = defaultdict(int)
    for unit, start, end in track:
        takes, frees = lifetimes.of(unit)
        changes[start] += "kept_activations" in takes
        changes[end] -= "kept_activations" in frees
    return _curve(changes)


def memory_curves(run: Simulation) -> list[dict[str, Curve]]:
    """Per rank, the bytes of each kind of :class:`~seq1f1b.schedule.StepMemory`; what lives when, the core says.

    Raises:
        ValueError: the simulation was not given ``memory``.
    """
    given, peaks = run.given, run.memory
    if given is None or peaks is None:
        raise ValueError("memory curves in bytes need simulate(memory=StepMemory(...))")
    kinds = [_C.HOLDINGS[row.counts_with].name for row in _C.HOLDINGS]
    curves = []
    for rank, (track, bytes_of) in enumerate(zip(run.timeline, run.schedule._byte_changes(given), strict=True)):
        changes: dict[str, dict[float, int]] = {name: defaultdict(int) for name in _holdings()}
        for (_, start, end), of_unit in zip(track, bytes_of, strict=True):
            for kind, (taken, freed) in zip(kinds, of_unit, strict=True):
                if taken or freed:
                    changes[kind][start] += taken
                    changes[kind][end] -= freed
        begin, end = track[0][1], max(stop for _, _, stop in track)
        for name in ("weights", "optimizer", "logits", "receive"):
            changes[name][begin] += getattr(peaks, name)[rank]
            changes[name][end] -= getattr(peaks, name)[rank]
        curves.append({name: _curve(of_name) for name, of_name in changes.items()})
    return curves


def _holdings() -> list[str]:
    """Names of what a rank holds, from the bottom of its curve."""
    return [row["name"] for row in style.page_facts()["holdings"]]


def _curve(changes: Mapping[float, int]) -> Curve:
    """The running sum of changes by time."""
    curve, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        if changes[time]:
            curve.append((time, total))
    return curve


def predecessors(timeline: Timeline) -> dict[Unit, list[Unit]]:
    """The units that must end before each unit may start: its inputs, and what its rank runs before it."""
    after = inputs_of(unit for track in timeline for unit, _, _ in track)
    for track in timeline:
        for (earlier, _, _), (unit, _, _) in pairwise(track):
            if earlier not in after[unit]:
                after[unit].append(earlier)
    return after


# -- as data for timeline.js -------------------------------------------------------------------------------------------


def _shown(heading: str, timeline: Timeline, run: Simulation | None) -> dict[str, Any]:
    """A timeline as the head of ``picture.js`` says."""
    import numpy as np

    placed = [entry for track in timeline for entry in track]
    number = {unit: i for i, (unit, _, _) in enumerate(placed)}
    after = predecessors(timeline)
    edges = [[number[other] for other in after[unit]] for unit, _, _ in placed]
    begin, end = extent(timeline)
    busy = sum(stop - start for _, start, stop in placed)
    makespan = end - begin
    path = None if run is None else run.critical_path
    return {
        "heading": heading,
        "makespan": makespan,
        "bubble": max(0.0, 1 - busy / (makespan * len(timeline))) if makespan > 0 else None,
        "first": np.cumsum([0, *map(len, timeline)], dtype=np.int32),
        "pass": np.array([_C.PASSES.index(unit.kind) for unit, _, _ in placed], np.uint8),
        "stage": np.array([unit.stage for unit, _, _ in placed], np.int32),
        "microbatch": np.array([unit.microbatch for unit, _, _ in placed], np.int32),
        "segment": np.array([unit.segment for unit, _, _ in placed], np.int32),
        "start": np.array([start for _, start, _ in placed]),
        "end": np.array([stop for _, _, stop in placed]),
        "slack": None if run is None or run.slack is None else np.concatenate([*map(np.asarray, run.slack)]),
        "path": None if path is None else np.array([number[unit] for unit in path], np.int32),
        "inputs": {
            "first": np.cumsum([0, *map(len, edges)], dtype=np.int32),
            "units": np.array([j for js in edges for j in js], np.int32),
        },
        "memory": _memory(timeline, run),
    }


def _memory(timeline: Timeline, run: Simulation | None) -> dict[str, Any]:
    import numpy as np

    kind, whole = "bytes", 1
    peaks: Sequence[int]
    if run is not None and run.memory is not None:
        all_curves, peaks = memory_curves(run), run.memory.total
    else:
        kind, whole = "units", max(1, len({(unit.stage, unit.segment) for unit, _, _ in timeline[0]}))
        all_curves = [{"activations": live_units(track)} for track in timeline]
        peaks = [max((live for _, live in curves["activations"]), default=0) for curves in all_curves]
    holding = {name: h for h, name in enumerate(_holdings())}
    changes: list[tuple[float, int, int]] = []  # when, by how much, of what
    first = [0]
    for curves in all_curves:
        changes += sorted(
            (moment, held - before, holding[name])
            for name, curve in curves.items()
            for (_, before), (moment, held) in pairwise([(0.0, 0), *curve])
        )
        first.append(len(changes))
    return {
        "kind": kind,
        "whole": whole,
        "total": list(peaks),
        "constant": {},
        "changes": {
            "first": np.array(first, np.int32),
            "when": np.array([moment for moment, _, _ in changes], np.float64),
            "by": np.array([by for _, by, _ in changes], np.float64),
            "holding": np.array([h for _, _, h in changes], np.uint8),
        },
    }
