"""Pictures of a timeline, simulated or measured: text, PNG, SVG, and a trace for chrome://tracing or ui.perfetto.dev.

A file is written whole or not at all. ``seq1f1b.view.page`` makes the page to zoom into.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from seq1f1b.files import write_whole
from seq1f1b.unit import Timeline, Unit
from seq1f1b.view import style

__all__ = ["column_seconds", "timeline_png", "timeline_svg", "timeline_text", "trace_json"]

_IN_WAITS = ":"  # fills parts of W that ran in waits
_FILL = {letter: dict(zip("FBIWRSTEGOAL", "-=~+^.%'\">|<", strict=True)).get(letter, "*") for letter in style.PASSES}


def timeline_text(timeline: Timeline, *, width: int = 100, column: float | None = None) -> str:
    """One line per rank; a unit starts with its micro-batch and segment and is filled up by its pass.

    The labels are the longest for which ``width`` has room: ``0.1``, or ``0b`` for the same, or ``0``, or none. Blanks
    are bubbles; stages of one rank look alike. Where units are narrower than a column, passes and blanks stand as often
    as they have shares of the time. The last lines say how to read it.

    Args:
        width: columns of a line.
        column: seconds of a column, for several timelines on one scale; None: as few as ``width`` allows.
    """
    units = [unit for track in timeline for unit, _, _ in track]
    begin, end = style.extent(timeline)
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
            for (unit, start, stop), in_wait in zip(track, style.in_waits(track), strict=True):
                left, right = round((start - begin) * scale), round((stop - begin) * scale)
                name, fill = ("", _IN_WAITS) if in_wait else (label(unit), _FILL[unit.kind])
                line = line[:left].ljust(left) + name[: right - left].ljust(right - left, fill)
        lines.append(f"rank {rank}".ljust(margin) + line)
    example = next((unit for unit in units if unit.segment > 0), units[0])
    kinds, unseen = _kinds(timeline)
    legend = ", ".join(f"{label(example)}{_FILL[kind] * 2} {style.PASSES[kind]}" for kind in kinds)
    if any(map(any, map(style.in_waits, timeline))):
        legend += f", {_IN_WAITS * 2} weight gradient in a wait"
    if label(example):
        legend += f" of micro-batch {example.microbatch}" + (f", segment {example.segment}" * (example.segment > 0))
    if unseen:
        legend += f"; not drawn, as no time of a rank: {', '.join(style.PASSES[kind] for kind in unseen)}"
    if scale > 0:
        legend += f"; one column is {style.seconds_text(1 / scale)}" + ", units are shorter" * (scale * narrowest < 1)
    return "\n".join([*lines, *textwrap.wrap(legend, max(width, 40))]) + "\n"


def column_seconds(timeline: Timeline, *, width: int) -> float:
    """Seconds of a column where the timeline fills ``width``; units that are equal get equal columns if they can."""
    begin, end = style.extent(timeline)
    narrowest = min(_shortest(timeline).values(), default=0.0)
    column = (end - begin) / max(width - _margin(timeline), 1)
    return narrowest / int(narrowest / column + 1e-9) if 0 < column <= narrowest else column


def _margin(timeline: Timeline) -> int:
    return len(f"rank {len(timeline) - 1}  ")


def _shortest(timeline: Timeline) -> dict[str, float]:
    """Seconds of the shortest unit of each pass that takes any."""
    shortest: dict[str, float] = {}
    for unit, start, stop in (entry for track in timeline for entry in track):
        if stop > start:
            shortest[unit.kind] = min(shortest.get(unit.kind, stop - start), stop - start)
    return shortest


def _kinds(timeline: Timeline) -> tuple[list[str], list[str]]:
    """Passes with units that take a rank's time, and passes without: moves to a tier run beside other units."""
    there = {unit.kind for track in timeline for unit, _, _ in track}
    seen = _shortest(timeline).keys() or there
    return [kind for kind in _FILL if kind in seen], [kind for kind in _FILL if kind in there - seen]


def _shares(track: Sequence[tuple[Unit, float, float]], begin: float, scale: float, columns: int) -> str:
    """One pass or blank per column: what is most in arrears of its share of the time so far."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for (unit, start, stop), in_wait in zip(track, style.in_waits(track), strict=True):
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
    """The longest that fits. ``widths``: columns of the shortest unit of each pass, ascending.

    A pass is told by what fills its unit up behind the label, so at most one may be all label.
    """
    for form, room in _labels(units):
        longest = max(len(form(unit)) for unit in units)
        if widths and longest + room <= widths[0] and all(longest < width for width in widths[1:]):
            return form
    return lambda unit: ""


def _labels(units: list[Unit]) -> Iterator[tuple[Callable[[Unit], str], int]]:
    """Ways to name a unit where its pass is told otherwise, longest first, and the columns to leave behind the name."""
    num_segments = max(unit.segment for unit in units) + 1
    if num_segments > 1:
        yield lambda unit: f"{unit.microbatch}.{unit.segment}", 1
        if num_segments <= 26:
            yield lambda unit: f"{unit.microbatch}{chr(ord('a') + unit.segment)}", 0
    yield lambda unit: f"{unit.microbatch}", 0


def timeline_png(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None, width: float = 14.0
) -> None:
    """Draws one or several timelines, one below the other on a common time axis.

    A colour is a micro-batch, pale forward, paler recomputation and full backward; where a rank holds several stages
    all but its first are hatched.

    Args:
        path: file to write; its suffix chooses the format.
        tracks: a timeline, or several with the heading of each, for instance planned and measured.
        width: inches. Letters keep their size, so fewer inches make them larger in a page.
    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    _save_figure(path, tracks, title, Path(path).suffix[1:] or "png", width)


def timeline_svg(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None, width: float = 14.0
) -> None:
    """The picture of :func:`timeline_png` as SVG, which stays sharp at any size."""
    _save_figure(path, tracks, title, "svg", width)


def _save_figure(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], title: str | None, form: str, width: float
) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ImportError('a picture of a timeline needs matplotlib; run: pip install "seq1f1b[plot]"') from error

    named: Mapping[str, Timeline] = tracks if isinstance(tracks, Mapping) else {"": tracks}
    longest = max(end - begin for begin, end in map(style.extent, named.values()))
    style.check_size("picture", style.count_units(named.values()))
    second, unit_name = style.time_unit(longest)
    rows = [len(timeline) for timeline in named.values()]
    figure = Figure(
        figsize=(width, 1.5 + 0.42 * sum(rows) + 0.6 * len(rows)),
        dpi=110,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.08),  # inches
    )
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    axes[-1].set_xlim(0, longest / second or 1)
    axes[-1].set_xlabel(f"time ({unit_name})")
    for ax, (heading, timeline) in zip(axes, named.items(), strict=True):
        ax.set_title(heading, loc="left", fontsize=11)
        _draw_tracks(ax, timeline, second, width)
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    handles = _legend_handles(named)
    most = max(1, int(width / 1.7))  # 8 in 14 inches
    columns = -(-len(handles) // -(-len(handles) // most))  # rows equally long
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    write_whole(path, picture.getvalue())


def _draw_tracks(ax: Any, timeline: Timeline, second: float, width: float) -> None:
    """One row of bars per rank, each with its micro-batch and segment where it has room for them."""
    begin, _ = style.extent(timeline)
    has_segments = any(unit.segment > 0 for track in timeline for unit, _, _ in track)
    room = 0.07 / width * ax.get_xlim()[1]  # that one character takes
    centred = {"ha": "center", "va": "center_baseline", "fontsize": 8}
    for rank, (track, first_stage) in enumerate(zip(timeline, style.first_stages(timeline), strict=True)):
        hatches = [
            "...." if in_wait else "////" if unit.stage != first_stage else None
            for (unit, _, _), in_wait in zip(track, style.in_waits(track), strict=True)
        ]
        for hatch in (None, "////", "...."):
            shown = [entry for entry, its in zip(track, hatches, strict=True) if its == hatch]
            bars = [((start - begin) / second, (stop - start) / second) for _, start, stop in shown]
            colors = [style.color_of(unit) for unit, _, _ in shown]
            ax.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colors, edgecolor="white", lw=0.6, hatch=hatch)
            for (unit, _, _), (left, length) in zip(shown, bars, strict=True):
                text = f"{unit.microbatch}.{unit.segment}" if has_segments else f"{unit.microbatch}"
                if length >= room * len(text):
                    color = style.color_of(unit)
                    box = {"facecolor": color, "edgecolor": "none", "pad": 1.5} if hatch else None
                    ax.text(left + length / 2, rank, text, color=style.ink_on(color), bbox=box, **centred)
    ax.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
    ax.set_ylim(len(timeline) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="0.9", lw=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _legend_handles(named: Mapping[str, Timeline]) -> list[Any]:
    from matplotlib.patches import Patch

    units = [unit for timeline in named.values() for track in timeline for unit, _, _ in track]
    microbatches = sorted({unit.microbatch for unit in units})
    num_colors = len(style.MICROBATCH_COLORS)
    handles = [
        Patch(facecolor=style.MICROBATCH_COLORS[m % num_colors], label=f"micro-batch {m}")
        for m in microbatches[:num_colors]
    ]
    if len(microbatches) > num_colors:
        handles.append(Patch(facecolor="none", label="... colours repeat"))
    seen = {kind for timeline in named.values() for kind in _kinds(timeline)[0]}
    for kind, strength in style.STRENGTH.items():
        if kind in seen:
            handles.append(Patch(facecolor=(1 - 0.6 * strength,) * 3, label=f"{kind}: {style.PASSES[kind]}"))
    if any(
        unit.stage != first
        for timeline in named.values()
        for track, first in zip(timeline, style.first_stages(timeline), strict=True)
        for unit, _, _ in track
    ):
        handles.append(Patch(facecolor="0.7", edgecolor="white", hatch="////", label="later stages of a rank"))
    if any(any(style.in_waits(track)) for timeline in named.values() for track in timeline):
        handles.append(Patch(facecolor="0.7", edgecolor="white", hatch="....", label="W in waits"))
    return handles


def trace_json(path: str | Path, tracks: Timeline | Mapping[str, Timeline]) -> None:
    """Writes a trace with one track per rank; open it in ui.perfetto.dev or chrome://tracing.

    Args:
        path: file to write.
        tracks: a timeline, or several with the name of each, for instance planned and measured: a process each.
    Raises:
        ValueError: a timeline holds no unit, or all together more than 1000000.
    """
    named: Mapping[str, Timeline] = tracks if isinstance(tracks, Mapping) else {"pipeline": tracks}
    style.check_size("trace", style.count_units(named.values()))
    events: list[dict[str, object]] = []
    for pid, (heading, timeline) in enumerate(named.items()):
        begin, _ = style.extent(timeline)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": heading}})
        names_stage = any(unit.stage != rank for rank, track in enumerate(timeline) for unit, _, _ in track)
        for rank, track in enumerate(timeline):
            thread = {"ph": "M", "pid": pid, "tid": rank}
            events.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
            for (unit, start, stop), in_wait in zip(track, style.in_waits(track), strict=True):
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": rank,
                        "ts": (start - begin) * 1e6,
                        "dur": (stop - start) * 1e6,
                        "name": f"[{unit.stage}]{unit}" if names_stage else str(unit),
                        "cat": style.PASSES[unit.kind] + " in a wait" * in_wait,
                        "args": {"stage": unit.stage, "microbatch": unit.microbatch, "segment": unit.segment},
                    }
                )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
