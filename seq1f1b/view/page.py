"""One self-contained HTML page of a timeline, simulated or measured: zoom, hover, and the memory curve of each rank.

Bokeh draws it on a canvas, so that pages of many thousands of units stay quick, and its script lies in the page: it
opens without a network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from seq1f1b import _C
from seq1f1b.files import write_whole
from seq1f1b.schedule import Simulation
from seq1f1b.unit import Timeline, Unit, inputs_of
from seq1f1b.view import style

__all__ = ["live_units", "memory_curves", "predecessors", "timeline_html"]

_UNITS, _MEMORY = (0.05, 0.56), (0.62, 0.98)  # of a rank's row: its units, and below them its memory curve
_CRITICAL = 0.60  # of a rank's row: the critical path runs under its units
_CONSTANT_COLORS = {"weights": "#4d5763", "optimizer": "#6f7a87", "logits": "#c9a227", "receive": "#d98cb3"}
_HOLDING_COLORS = {
    "kv": "#3a87ad",
    "kv_gradients": "#7fbcd6",
    "output_gradients": "#8f79b8",
    "inputs": "#6fb08e",
    "activations": "#a9b4c0",
}
_HELD = [row for h, row in enumerate(_C.HOLDINGS) if row.counts_with == h]
_MEMORY_COLORS = {  # from the bottom: what changes least lies lowest
    **_CONSTANT_COLORS,
    **_HOLDING_COLORS,
    **{row.name: "#d9c7a0" for row in _HELD if row.name not in _HOLDING_COLORS},
}
_KIND_NAMES = {
    "receive": "receive places",
    "optimizer": "optimizer state",
    **{row.name: row.text for row in _HELD},
}
Curve = list[tuple[float, int]]
"""(time, what is held from then on), a step wherever it changes."""


class _Memory(NamedTuple):
    """The memory of a timeline: per rank, a curve of each kind; what a number of them is; and the peak of each rank."""

    curves: list[dict[str, Curve]]
    scale: float  # micro-batches or bytes per number, so that timelines share one scale
    peaks: Sequence[int]
    is_bytes: bool

    def text(self, amount: int) -> str:
        if not self.is_bytes:
            return f"{amount} live"
        return f"{amount / 2**30:.3g} GiB" if amount >= 2**30 else f"{amount / 2**20:.3g} MiB"


def timeline_html(
    path: str | Path,
    tracks: Timeline | Simulation | Mapping[str, Timeline | Simulation],
    *,
    title: str = "seq1f1b",
) -> None:
    """Writes the page. A wheel zooms the time axis and a drag moves it, in all timelines at once.

    Colours are those of :func:`~.draw.timeline_png`. Hovering over a unit tells its times, what it comes after,
    the last to end first, and what comes after it. A simulation also has its critical path and each unit's slack
    (``critical=True``) and bytes of each kind of memory (``memory=StepMemory(...)``); else memory is that of live
    units. Memory curves of all ranks and timelines have one scale.

    Args:
        path: file to write.
        tracks: a timeline or simulation, or several with the heading of each, one above the other on a common time
            axis.
    Raises:
        ImportError: bokeh is not installed.
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    try:
        from bokeh.embed import file_html
        from bokeh.layouts import column
        from bokeh.models import Div, Range1d
        from bokeh.resources import INLINE
    except ModuleNotFoundError as error:
        raise ImportError('an HTML page needs bokeh; run: pip install "seq1f1b[plot]"') from error

    named = tracks if isinstance(tracks, Mapping) else {"": tracks}
    runs = {heading: run if isinstance(run, Simulation) else None for heading, run in named.items()}
    timelines: dict[str, Timeline] = {
        heading: run.timeline if isinstance(run, Simulation) else run for heading, run in named.items()
    }
    longest = max(end - begin for begin, end in map(style.extent, timelines.values()))
    style.check_size("page", style.count_units(timelines.values()))
    second, unit_name = style.time_unit(longest)
    width = longest / second or 1.0
    times = Range1d(-0.01 * width, 1.01 * width, bounds=(-0.05 * width, 1.05 * width))
    memories = {heading: _memory(timeline, runs[heading]) for heading, timeline in timelines.items()}
    tallest = max(memory.scale * max(memory.peaks) for memory in memories.values()) or 1.0
    num_ranks = sum(map(len, timelines.values()))
    rows: list[Any] = [Div(text=_legend(title, timelines, memories, runs), sizing_mode="stretch_width")]
    for heading, timeline in timelines.items():
        plot = _Plot(timeline, runs[heading], times, second, unit_name)
        plot.draw(heading, max(44, min(72, 540 // num_ranks)))
        plot.draw_memory(memories[heading], tallest)
        plot.follow()
        rows.append(plot.figure)
    page = column(rows, sizing_mode="stretch_width")
    write_whole(path, file_html(page, INLINE, title=title).encode())


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
    for rank, (track, bytes_of) in enumerate(zip(run.timeline, run.schedule.byte_changes(given), strict=True)):
        changes: dict[str, dict[float, int]] = {name: defaultdict(int) for name in _MEMORY_COLORS}
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


def _curve(changes: Mapping[float, int]) -> Curve:
    """The running sum of changes by time."""
    curve, total = [], 0
    for time in sorted(changes):
        total += changes[time]
        if changes[time]:
            curve.append((time, total))
    return curve


def _memory(timeline: Timeline, run: Simulation | None) -> _Memory:
    if run is not None and run.memory is not None:
        return _Memory(memory_curves(run), 1.0, run.memory.total, True)
    curves = [{"activations": live_units(track)} for track in timeline]
    per_microbatch = len({(unit.stage, unit.segment) for unit, _, _ in timeline[0]})
    peaks = [max((live for _, live in curve["activations"]), default=0) for curve in curves]
    return _Memory(curves, 1 / max(per_microbatch, 1), peaks, False)


def predecessors(timeline: Timeline) -> dict[Unit, list[Unit]]:
    """The units that must end before each unit may start: its inputs, and what its rank runs before it."""
    after = inputs_of(unit for track in timeline for unit, _, _ in track)
    for track in timeline:
        for (earlier, _, _), (unit, _, _) in pairwise(track):
            if earlier not in after[unit]:
                after[unit].append(earlier)
    return after


# -- how it is drawn ---------------------------------------------------------------------------------------------------

# Numbers go into the page and their texts are made where they are shown: a page of 100000 units stays small.
_TELL_UNIT = """
const {left, right, kind, stage, microbatch, segment, rank, first, slack, critical} = units.data
const i = special_vars.index, before = edges.data.unit
const time = (x) => `${+x.toPrecision(6)} ${unit_name}`
const name = (j) => `${names_stage ? `[${stage[j]}]` : ""}${letters[kind[j]]}${microbatch[j]}.${segment[j]}`
const list = (js, tell) => js.map((j) => `${name(j)} on rank ${rank[j]}, ${tell(j)}`).join("; ") || "nothing"
const last = (j) => j + 1 < first.length ? first[j + 1] : before.length
switch (format) {
  case "unit": return `${name(i)}, ${passes[kind[i]]}`
  case "rank": return `${rank[i]}, stage ${stage[i]}`
  case "time": return `${time(left[i])} to ${time(right[i])}, ${time(right[i] - left[i])} long`
  case "slack": return critical[i] ? "on the critical path" : `may take ${time(slack[i])} longer`
  case "after": {
    const earlier = Array.from(before.slice(first[i], last(i)))
    return list(earlier.sort((a, b) => right[b] - right[a]), (j) => `ended at ${time(right[j])}`)
  }
  case "before": {
    const later = []
    for (let j = 0; j < first.length; j++)
      for (let e = first[j]; e < last(j); e++)
        if (before[e] === i) later.push(j)
    return list(later.sort((a, b) => left[a] - left[b]), (j) => `from ${time(left[j])}`)
  }
}
"""
_TELL_MEMORY = """
const {left, right, top, rank, held} = kind.data
const i = special_vars.index
const bytes = (x) => x >= 2**30 ? `${+(x / 2**30).toPrecision(4)} GiB` : `${+(x / 2**20).toPrecision(4)} MiB`
const amount = (x) => is_bytes ? bytes(x) : `${Math.round(x)} units`
const all = (rank[i] + base - top[i]) / height
switch (format) {
  case "rank": return `${rank[i]}`
  case "held": return is_bytes ? `${name}: ${amount(held[i])}` : `${amount(held[i])} of at most ${peaks[rank[i]]}`
  case "all": return `${amount(all)} of at most ${amount(peaks[rank[i]])}`
  case "time": return `${+left[i].toPrecision(6)} to ${+right[i].toPrecision(6)} ${unit_name}`
}
"""
# A unit in view with room for a label gets one; white edges would hide units of a pixel. Bokeh would draw
# what lies outside the view too, so filters keep to what does not.
_FOLLOW_ZOOM = """
const {left, right, top, bottom, microbatch, segment, ink} = units.data
const pixels = plot.inner_width / (times.end - times.start)
const shown = {x: [], y: [], text: [], ink: []}
for (let i = 0; i < left.length; i++) {
  if (right[i] < times.start || left[i] > times.end) continue
  const text = has_segments ? `${microbatch[i]}.${segment[i]}` : `${microbatch[i]}`
  if ((right[i] - left[i]) * pixels < 3 + 6.5 * text.length) continue
  shown.x.push((left[i] + right[i]) / 2)
  shown.y.push((top[i] + bottom[i]) / 2)
  shown.text.push(text)
  shown.ink.push(inks[ink[i]])
}
labels.data = shown
units_drawn.glyph.line_alpha = shortest * pixels < 2 ? 0 : 1
for (const [source, filter] of in_view) {
  const {left, right} = source.data, indices = []
  for (let i = 0; i < left.length; i++)
    if (right[i] >= times.start && left[i] <= times.end) indices.push(i)
  if (indices.length < left.length || filter.indices !== null) filter.indices = indices
}
"""
_INKS = ("#222222", "white")


class _Plot:
    """One row per rank: its units, and below them its memory curve."""

    def __init__(self, timeline: Timeline, run: Simulation | None, times: Any, second: float, unit_name: str) -> None:
        self.timeline, self.times, self.second, self.unit_name = timeline, times, second, unit_name
        self.begin, _ = style.extent(timeline)
        self.in_view: list[tuple[Any, Any]] = []  # source and filter of all boxes
        self.path: Sequence[Unit] = ()
        self.slack: dict[Unit, float] = {}
        self.is_critical = run is not None and run.slack is not None
        if run is not None and run.slack is not None:
            self.path = run.critical_path or ()
            for track, row in zip(timeline, run.slack, strict=True):
                self.slack.update((unit, seconds) for (unit, _, _), seconds in zip(track, row, strict=True))

    def at(self, moment: float) -> float:
        return (moment - self.begin) / self.second

    def draw(self, heading: str, row_height: int) -> None:
        """The units."""
        from bokeh.models import BooleanFilter, CDSView, ColumnDataSource
        from bokeh.plotting import figure

        num_ranks = len(self.timeline)
        self.figure = plot = figure(
            title=self._heading(heading),
            height=90 + row_height * num_ranks,
            sizing_mode="stretch_width",
            x_range=self.times,
            y_range=(num_ranks, 0),
            x_axis_label=f"time ({self.unit_name})",
            tools="xpan,xwheel_zoom,xbox_zoom,reset",
            active_drag="xpan",
            active_scroll="xwheel_zoom",
            toolbar_location="above",
            lod_threshold=None,
        )
        plot.toolbar.logo = None
        bars, edges = self._bars()
        units = ColumnDataSource(bars)
        quads = plot.quad(
            "left", "right", "top", "bottom", source=units, view=CDSView(filter=self._in_view(units)),
            fill_color="color", line_color="white", line_width=0.6, line_alpha=0,
            hover_line_alpha=1, hover_line_color="black", hover_fill_color="color",
        )  # fmt: skip
        if bars["later"].any():  # a hatch is slow to draw: only where there is one
            plot.quad(
                "left", "right", "top", "bottom", source=units,
                view=CDSView(filter=self._in_view(units) & BooleanFilter(bars["later"])),
                fill_alpha=0, line_alpha=0, hatch_pattern="right_diagonal_line", hatch_color="white", hatch_alpha=0.45,
                hatch_scale=9.0,
            )  # fmt: skip
        if self.is_critical:
            self._draw_path()
        labels = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []})
        plot.text(
            "x", "y", "text", source=labels, text_color="ink", text_align="center", text_baseline="middle",
            text_font_size="11px", level="annotation",
        )  # fmt: skip
        names_stage = any(unit.stage != rank for rank, track in enumerate(self.timeline) for unit, _, _ in track)
        told = {"unit": "unit", "rank": "rank", "time": "time", "after": "after", "before": "before"}
        if self.is_critical:
            told["slack"] = "slack"
        self._hover(
            [quads],
            told,
            _TELL_UNIT,
            units=units,
            edges=ColumnDataSource({"unit": edges}),
            unit_name=self.unit_name,
            names_stage=names_stage,
            letters=list(_C.PASSES),
            passes=[style.PASSES[kind] for kind in _C.PASSES],
        )
        self.units, self.labels, self.quads = units, labels, quads
        plot.ygrid.visible = False

    def _in_view(self, source: Any) -> Any:
        """A filter that keeps to what :meth:`follow` finds in view; at first everything."""
        from bokeh.models import IndexFilter

        self.in_view.append((source, IndexFilter()))
        return self.in_view[-1][1]

    def follow(self) -> None:
        """Once all is drawn: keeps labels, edges and filters with the zoom."""
        from bokeh.models import CustomJS

        plot, data = self.figure, self.units.data
        lengths = data["right"] - data["left"]
        follow = CustomJS(
            args={
                "units": self.units, "labels": self.labels, "plot": plot, "times": self.times, "inks": _INKS,
                "has_segments": any(unit.segment > 0 for track in self.timeline for unit, _, _ in track),
                "units_drawn": self.quads, "shortest": min(lengths[lengths > 0], default=0.0),
                "in_view": self.in_view,
            },
            code=_FOLLOW_ZOOM,
        )  # fmt: skip
        self.times.js_on_change("end", follow)
        plot.js_on_change("inner_width", follow)

    def _heading(self, heading: str) -> str:
        """The heading with makespan and bubble."""
        _, end = style.extent(self.timeline)
        makespan = end - self.begin
        busy = sum(stop - start for track in self.timeline for _, start, stop in track)
        text = f"{makespan / self.second:.3g} {self.unit_name}"
        if makespan > 0:
            text += f", bubble {max(0.0, 1 - busy / (makespan * len(self.timeline))):.1%}"
        return f"{heading}: {text}" if heading else text

    def _hover(self, renderers: list[Any], told: Mapping[str, str], code: str, **given: Any) -> None:
        """A tooltip whose lines come from ``code``, one call for each."""
        from bokeh.models import CustomJSHover, HoverTool

        self.figure.add_tools(
            HoverTool(
                renderers=renderers,
                point_policy="follow_mouse",
                tooltips=[(label, f"@left{{{form}}}") for form, label in told.items()],
                formatters={"@left": CustomJSHover(args=given, code=code)},
            )
        )

    def _bars(self) -> tuple[dict[str, Any], Any]:
        """Columns of all units, and, from ``first`` of a unit on, the numbers of those it comes after."""
        import numpy as np

        placed = [(rank, *entry) for rank, track in enumerate(self.timeline) for entry in track]
        number = {unit: i for i, (_, unit, _, _) in enumerate(placed)}
        after = predecessors(self.timeline)
        edges = [[number[other] for other in after[unit]] for _, unit, _, _ in placed]
        first_stages = style.first_stages(self.timeline)
        path = set(self.path)
        colors = {key: style.color_of(key) for key in {unit._replace(stage=0, segment=0) for _, unit, _, _ in placed}}
        ranks = np.array([rank for rank, *_ in placed], np.int32)
        shades = [colors[unit._replace(stage=0, segment=0)] for _, unit, _, _ in placed]
        red_green_blue = np.round(255 * np.array(shades)).astype(np.uint32)
        columns = {
            "left": np.array([self.at(start) for _, _, start, _ in placed]),
            "right": np.array([self.at(end) for _, _, _, end in placed]),
            "top": (ranks + _UNITS[0]).astype(np.float32),
            "bottom": (ranks + _UNITS[1]).astype(np.float32),
            "color": red_green_blue @ np.array([1 << 24, 1 << 16, 1 << 8], np.uint32) + np.uint32(255),
            "ink": np.array([style.ink_on(shade) == "white" for shade in shades], np.uint8),
            "kind": np.array([_C.PASSES.index(unit.kind) for _, unit, _, _ in placed], np.uint8),
            "rank": ranks,
            "stage": np.array([unit.stage for _, unit, _, _ in placed], np.int32),
            "microbatch": np.array([unit.microbatch for _, unit, _, _ in placed], np.int32),
            "segment": np.array([unit.segment for _, unit, _, _ in placed], np.int32),
            "later": np.array([unit.stage != first_stages[rank] for rank, unit, _, _ in placed]),
            "first": np.cumsum([0, *map(len, edges[:-1])], dtype=np.int32),
            "slack": np.array([self.slack.get(unit, 0.0) / self.second for _, unit, _, _ in placed], np.float32),
            "critical": np.array([unit in path for _, unit, _, _ in placed], np.uint8),
        }
        return columns, np.array([j for js in edges for j in js], np.int32)

    def _draw_path(self) -> None:
        """A line under the units of the critical path, and from each to the next."""
        from bokeh.models import Legend

        rank_of = {unit: (rank, start, end) for rank, track in enumerate(self.timeline) for unit, start, end in track}
        xs, ys = [], []
        for unit in self.path:
            rank, start, end = rank_of[unit]
            xs += [self.at(start), self.at(end)]
            ys += [rank + _CRITICAL] * 2
        line = self.figure.line(xs, ys, line_color="#111111", line_width=2, line_join="round", level="annotation")
        line.visible = len(self.path) <= 500  # of more the units would not be seen
        legend = Legend(
            items=[("critical path (click to show or hide)", [line])], click_policy="hide", orientation="horizontal",
            border_line_color=None, padding=0, margin=0, label_text_font_size="11px",
        )  # fmt: skip
        self.figure.add_layout(legend, "above")

    def draw_memory(self, memory: _Memory, tallest: float) -> None:
        """A bar per step and kind, one upon the other."""
        import numpy as np
        from bokeh.models import CDSView, ColumnDataSource, FixedTicker

        height = memory.scale * (_MEMORY[1] - _MEMORY[0]) / tallest
        layers: dict[str, list[tuple[float, float, float, float, int, int]]] = defaultdict(list)
        for rank, curves in enumerate(memory.curves):
            below: Curve = []
            for kind, curve in curves.items():
                base, below = below, _sum(below, curve)
                for left, right, low, held in _steps(base, curve):
                    bottom = rank + _MEMORY[1] - height * low
                    layers[kind].append((self.at(left), self.at(right), bottom - height * held, bottom, rank, held))
        for kind, bars in layers.items():
            columns = zip(("left", "right", "top", "bottom", "rank", "held"), np.array(bars).T, strict=True)
            source = ColumnDataSource(dict(columns))
            quads = self.figure.quad(
                "left", "right", "top", "bottom", source=source, view=CDSView(filter=self._in_view(source)),
                color=_MEMORY_COLORS[kind], line_width=0,
            )  # fmt: skip
            told = {"rank": "rank", "held": "held" if memory.is_bytes else "live", "time": "time"}
            if memory.is_bytes:
                told["all"] = "with all below"
            self._hover(
                [quads],
                told,
                _TELL_MEMORY,
                kind=source,
                name=_KIND_NAMES.get(kind, kind),
                is_bytes=memory.is_bytes,
                base=_MEMORY[1],
                height=height,
                peaks=list(memory.peaks),
                unit_name=self.unit_name,
            )
        num_ranks, axis = len(self.timeline), self.figure.yaxis
        middles = [sum(part) / 2 for part in (_UNITS, _MEMORY)]
        axis.ticker = FixedTicker(ticks=[rank + middle for rank in range(num_ranks) for middle in middles])
        axis.major_label_overrides = {
            **{rank + middles[0]: f"rank {rank}" for rank in range(num_ranks)},
            **{rank + middles[1]: f"at most {memory.text(peak)}" for rank, peak in enumerate(memory.peaks)},
        }
        axis.major_tick_line_color = None


def _sum(a: Curve, b: Curve) -> Curve:
    """The sum of two curves."""
    changes: dict[float, int] = defaultdict(int)
    for curve in (a, b):
        for (time, held), (_, before) in zip(curve, [(0.0, 0), *curve], strict=False):
            changes[time] += held - before
    total, curve = 0, []
    for time in sorted(changes):
        total += changes[time]
        curve.append((time, total))
    return curve


def _steps(base: Curve, curve: Curve) -> list[tuple[float, float, int, int]]:
    """(left, right, base, held) wherever the curve holds something: a step where it or its base changes."""
    changes: dict[float, list[int]] = {}
    for time, low in base:
        changes[time] = [low, -1]
    for time, held in curve:
        changes.setdefault(time, [-1, -1])[1] = held
    steps: list[tuple[float, float, int, int]] = []
    low, held, last = 0, 0, (-1, -1)
    moments = sorted(changes)
    for left, right in pairwise(moments):
        low, held = (old if new < 0 else new for old, new in zip((low, held), changes[left], strict=True))
        if held > 0 and (low, held) == last and steps[-1][1] == left:
            steps[-1] = (steps[-1][0], right, low, held)
        elif held > 0:
            steps.append((left, right, low, held))
        last = (low, held)
    return steps


def _legend(title: str, named: Mapping[str, Timeline], memories: Mapping[str, _Memory], runs: Mapping[str, Any]) -> str:
    def swatch(color: str, text: str) -> str:
        box = f"display:inline-block;width:12px;height:12px;margin:0 4px 0 12px;vertical-align:-1px;background:{color}"
        return f"<span style='white-space:nowrap'><span style='{box}'></span>{text}</span>"

    kinds = {unit.kind for timeline in named.values() for track in timeline for unit, _, _ in track}
    shades = [
        swatch(_hex(style.color_of(Unit(kind, 0, 0, 0))), style.PASSES[kind]) for kind in _C.PASSES if kind in kinds
    ]
    has_later = any(
        unit.stage != first
        for timeline in named.values()
        for track, first in zip(timeline, style.first_stages(timeline), strict=True)
        for unit, _, _ in track
    )
    if has_later:
        stripes = "repeating-linear-gradient(135deg,#777 0 2px,#ddd 2px 4px)"
        shades.append(swatch(stripes, "later stages of a rank"))
    shown = {
        kind: memory.is_bytes for memory in memories.values() for curves in memory.curves for kind in curves
        if curves[kind] and max(held for _, held in curves[kind]) > 0
    }  # fmt: skip
    held = [
        swatch(_MEMORY_COLORS[kind], _KIND_NAMES.get(kind, kind) if shown[kind] else "live units")
        for kind in reversed(_MEMORY_COLORS)
        if kind in shown
    ]
    slack = ", its slack" if any(run is not None and run.slack is not None for run in runs.values()) else ""
    return (
        f"<h2 style='margin:4px 0'>{escape(title)}</h2>"
        f"<div>A colour is a micro-batch:{''.join(shades)}</div>"
        f"<div style='margin:2px 0'>Memory, under each rank:{''.join(held)}</div>"
        f"<div>The wheel zooms, a drag moves. Hover over a unit for its times{slack} and what it comes after and "
        "before.</div>"
    )


def _hex(color: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in color)
