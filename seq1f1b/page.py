"""One self-contained HTML page of a timeline, simulated or measured: zoom, hover, and the memory curve of each rank.

Bokeh draws it on a canvas, so that pages of thousands of units stay quick, and its script lies in the page: it opens
without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq1f1b.draw import _PASSES, _color, _extent, _first_stages, _time_unit, write_whole

if TYPE_CHECKING:
    from seq1f1b.schedule import Timeline, Unit

__all__ = ["live_units", "predecessors", "timeline_html"]

_UNITS, _MEMORY = (0.05, 0.58), (0.62, 0.98)  # of a rank's row: its units, and below them its memory curve
_CHARACTER = 7.0  # pixels of a label's character


def timeline_html(path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str = "seq1f1b") -> None:
    """Writes the page. A wheel zooms the time axis and a drag moves it, in all timelines at once.

    Colours are those of :func:`seq1f1b.draw.timeline_png`. Hovering over a unit tells its times, what it comes after,
    the last to end first, and what comes after it; over a memory curve, how many units are live.

    Args:
        path: file to write.
        tracks: a timeline, or several with the heading of each, one above the other on a common time axis.
    Raises:
        ImportError: bokeh is not installed.
        ValueError: a timeline holds no unit.
    """
    try:
        from bokeh.embed import file_html
        from bokeh.layouts import column
        from bokeh.models import Div, Range1d
        from bokeh.resources import INLINE
    except ModuleNotFoundError as error:
        raise ImportError('an HTML page needs bokeh; run: pip install "seq1f1b[plot]"') from error

    named: Mapping[str, Timeline] = tracks if isinstance(tracks, Mapping) else {"": tracks}
    longest = max(end - begin for begin, end in map(_extent, named.values()))
    second, unit_name = _time_unit(longest)
    width = longest / second or 1.0
    times = Range1d(-0.01 * width, 1.01 * width, bounds=(-0.05 * width, 1.05 * width))
    rows: list[Any] = [Div(text=_legend(title, named), sizing_mode="stretch_width")]
    rows += [_plot(heading, timeline, times, second, unit_name) for heading, timeline in named.items()]
    page = column(rows, sizing_mode="stretch_width")
    write_whole(path, file_html(page, INLINE, title=title).encode())


def live_units(track: Sequence[tuple[Unit, float, float]]) -> list[tuple[float, int]]:
    """The memory curve of a rank: (time, units live from then on), a step wherever it changes.

    A unit is live from the start of its F to the end of its B, or W where the backward is split; where nothing goes
    back, while it runs.
    """
    last = {(unit.stage, unit.microbatch, unit.segment): end for unit, _, end in track}
    changes: dict[float, int] = {}
    for unit, start, _ in track:
        if unit.kind == "F":
            changes[start] = changes.get(start, 0) + 1
            end = last[unit.stage, unit.microbatch, unit.segment]
            changes[end] = changes.get(end, 0) - 1
    curve, live = [], 0
    for time in sorted(changes):
        live += changes[time]
        if changes[time]:
            curve.append((time, live))
    return curve


def predecessors(timeline: Timeline) -> dict[Unit, list[Unit]]:
    """Of every unit, those that must have ended before it may start: by the rules of csrc/check.h, and on its rank."""
    units = {unit for track in timeline for unit, _, _ in track}
    after = {unit: [other for other in _neighbours(unit) if other in units] for unit in units}
    for track in timeline:
        for i, (unit, _, _) in enumerate(track):
            is_second = i > 0 and _is_pair(track[i - 1], track[i])
            earlier = i - 2 if is_second else i - 1
            if earlier >= 0 and track[earlier][0] not in after[unit]:
                after[unit].append(track[earlier][0])
            if is_second:  # a pair starts once the inputs of both are there
                first = track[i - 1][0]
                after[unit] = after[first] = list(dict.fromkeys(after[first] + after[unit]))
    return after


def _is_pair(first: tuple[Unit, float, float], second: tuple[Unit, float, float]) -> bool:
    """Units that run together."""
    return first[1:] == second[1:] and first[1] < first[2]


def _neighbours(unit: Unit) -> list[Unit]:
    """What comes right before a unit by the rules, where it exists."""
    if unit.kind == "F":
        return [unit._replace(segment=unit.segment - 1), unit._replace(stage=unit.stage - 1)]
    if unit.kind == "W":
        return [unit._replace(kind="I")]
    behind = [unit._replace(segment=unit.segment + 1), unit._replace(stage=unit.stage + 1)]
    return [unit._replace(kind="F"), *(other._replace(kind=kind) for other in behind for kind in "BI")]


def _plot(heading: str, timeline: Timeline, times: Any, second: float, unit_name: str) -> Any:
    """One row per rank: its units, and below them its memory curve."""
    from bokeh.models import BooleanFilter, CDSView, ColumnDataSource, CustomJS, FixedTicker, HoverTool
    from bokeh.plotting import figure

    bars, curves, peaks = _bars(timeline, second, unit_name), *_curves(timeline, second, unit_name)
    num_ranks = len(timeline)
    plot = figure(
        title=heading or None,
        height=90 + (64 if num_ranks <= 16 else 36) * num_ranks,
        sizing_mode="stretch_width",
        x_range=times,
        y_range=(num_ranks, 0),
        x_axis_label=f"time ({unit_name})",
        tools="xpan,xwheel_zoom,xbox_zoom,reset",
        active_drag="xpan",
        active_scroll="xwheel_zoom",
        toolbar_location="above",
        lod_threshold=None,
    )
    units = ColumnDataSource(bars)
    memory = plot.quad("left", "right", "top", "bottom", source=ColumnDataSource(curves), color="#9aa7b4", line_width=0)
    quads = plot.quad(
        "left", "right", "top", "bottom", source=units, fill_color="color", line_color="white", line_width=0.6,
        hover_line_color="black", hover_fill_color="color",
    )  # fmt: skip
    if any(bars["later"]):  # a hatch is slow to draw: only where there is one
        plot.quad(
            "left", "right", "top", "bottom", source=units, view=CDSView(filter=BooleanFilter(bars["later"])),
            fill_alpha=0, line_alpha=0, hatch_pattern="right_diagonal_line", hatch_color="white", hatch_alpha=0.5,
            hatch_scale=7.0,
        )  # fmt: skip
    labels = plot.text(
        "middle", "row", "label", source=units, text_color="ink", text_align="center", text_baseline="middle",
        text_font_size="11px", level="annotation",
    )  # fmt: skip
    plot.add_tools(
        HoverTool(
            renderers=[quads],
            point_policy="follow_mouse",
            tooltips=[
                ("unit", "@name, @pass"),
                ("rank", "@rank, stage @stage"),
                ("time", "@times"),
                ("after", "@after"),
                ("before", "@before"),
            ],
        ),
        HoverTool(renderers=[memory], point_policy="follow_mouse", tooltips=[("rank", "@rank"), ("live", "@live")]),
    )
    # Labels show once the shortest unit has room for the longest.
    spans = [right - left for left, right in zip(bars["left"], bars["right"], strict=True) if right > left]
    room = max(map(len, bars["label"])) * _CHARACTER / min(spans, default=1.0)  # pixels per time unit
    labels.visible = room * (times.end - times.start) <= 1100
    show = CustomJS(
        args={"labels": labels, "plot": plot, "times": times, "room": room},
        code="labels.visible = room * (times.end - times.start) <= plot.inner_width",
    )
    times.js_on_change("end", show)
    plot.js_on_change("inner_width", show)
    middles = [sum(part) / 2 for part in (_UNITS, _MEMORY)]
    plot.yaxis.ticker = FixedTicker(ticks=[rank + middle for rank in range(num_ranks) for middle in middles])
    plot.yaxis.major_label_overrides = {
        rank + middle: text
        for rank in range(num_ranks)
        for middle, text in zip(middles, (f"rank {rank}", f"at most {peaks[rank]} live"), strict=True)
    }
    plot.yaxis.major_tick_line_color = None
    plot.ygrid.visible = False
    return plot


def _bars(timeline: Timeline, scale: float, unit_name: str) -> dict[str, list[Any]]:
    """Columns of all units: where they are drawn and what hovering tells."""
    begin, _ = _extent(timeline)
    placed = {unit: (rank, start, end) for rank, track in enumerate(timeline) for unit, start, end in track}
    after = predecessors(timeline)
    before: dict[Unit, list[Unit]] = {unit: [] for unit in placed}
    for unit, others in after.items():
        for other in others:
            before[other].append(unit)
    first_stages = _first_stages(timeline)
    has_segments = any(unit.segment > 0 for unit in placed)
    names_stage = any(unit.stage != rank for unit, (rank, _, _) in placed.items())

    def time(value: float) -> str:
        return f"{value / scale:.6g} {unit_name}"

    def name(unit: Unit) -> str:
        return f"[{unit.stage}]{unit}" if names_stage else str(unit)

    def ended(unit: Unit) -> str:
        rank, _, end = placed[unit]
        return f"{name(unit)} on rank {rank}, ended at {time(end - begin)}"

    def started(unit: Unit) -> str:
        rank, start, _ = placed[unit]
        return f"{name(unit)} on rank {rank}, from {time(start - begin)}"

    halves: dict[Unit, tuple[float, float]] = {}  # of the height, for the units of a pair
    for track in timeline:
        for first, second in pairwise(track):
            if _is_pair(first, second):
                halves |= {first[0]: (0.0, 0.5), second[0]: (0.5, 1.0)}
    rows = []
    for unit, (rank, start, end) in placed.items():
        top, bottom = (rank + _UNITS[0] + part * (_UNITS[1] - _UNITS[0]) for part in halves.get(unit, (0.0, 1.0)))
        left, right = (start - begin) / scale, (end - begin) / scale
        earlier = sorted(after[unit], key=lambda other: -placed[other][2])
        later = sorted(before[unit], key=lambda other: placed[other][1])
        rows.append(
            {
                "left": left,
                "right": right,
                "middle": (left + right) / 2,
                "row": (top + bottom) / 2,
                "top": top,
                "bottom": bottom,
                "color": "#" + "".join(f"{round(255 * channel):02x}" for channel in _color(unit)),
                "ink": "#222222" if unit.kind == "F" else "white",
                "later": unit.stage != first_stages[rank],
                "label": f"{unit.microbatch}.{unit.segment}" if has_segments else str(unit.microbatch),
                "name": name(unit),
                "pass": _PASSES[unit.kind],
                "rank": rank,
                "stage": unit.stage,
                "times": f"{time(start - begin)} to {time(end - begin)}, {time(end - start)} long",
                "after": "; ".join(map(ended, earlier)) or "nothing",
                "before": "; ".join(map(started, later)) or "nothing",
            }
        )
    return {key: [row[key] for row in rows] for key in rows[0]}


def _curves(timeline: Timeline, second: float, unit_name: str) -> tuple[dict[str, list[Any]], list[int]]:
    """Columns of the memory curves, one bar per step, on a scale common to the ranks; and the peak of each rank."""
    begin, _ = _extent(timeline)
    curves = [live_units(track) for track in timeline]
    peaks = [max((live for _, live in curve), default=0) for curve in curves]
    height = (_MEMORY[1] - _MEMORY[0]) / max(*peaks, 1)
    columns: dict[str, list[Any]] = {key: [] for key in ("left", "right", "top", "bottom", "rank", "live")}
    for rank, curve in enumerate(curves):
        for (start, live), (end, _) in pairwise(curve):
            if live == 0:
                continue
            columns["left"].append((start - begin) / second)
            columns["right"].append((end - begin) / second)
            columns["top"].append(rank + _MEMORY[1] - height * live)
            columns["bottom"].append(rank + _MEMORY[1])
            columns["rank"].append(rank)
            columns["live"].append(
                f"{live} units of at most {peaks[rank]}, "
                f"{(start - begin) / second:.6g} to {(end - begin) / second:.6g} {unit_name}"
            )
    return columns, peaks


def _legend(title: str, named: Mapping[str, Timeline]) -> str:
    kinds = {unit.kind for timeline in named.values() for track in timeline for unit, _, _ in track}
    shades = ", ".join(f"{shade}: {_PASSES[kind]}" for kind, shade in _SHADES.items() if kind in kinds)
    return (
        f"<h2 style='margin: 4px 0'>{escape(title)}</h2>A colour is a micro-batch; {shades}; hatched: later stages of "
        "a rank. Below each rank: its live units. The wheel zooms, a drag moves; hover over a unit for its times and "
        "for what it comes after and before."
    )


_SHADES = {"F": "pale", "B": "full", "I": "nearly full", "W": "half"}
