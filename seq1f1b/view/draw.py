"""Pictures of a timeline, simulated or measured: text, PNG, SVG, and a trace for chrome://tracing or ui.perfetto.dev.

Every file is written whole or not at all. ``seq1f1b.view.page`` makes a page with zoom.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seq1f1b.extras import needs_extra
from seq1f1b.files import write_whole
from seq1f1b.timeline_text import PASSES, Bar, bars_of, shortest_of, time_unit, timeline_text
from seq1f1b.unit import Timeline
from seq1f1b.view import style

__all__ = ["timeline_png", "timeline_svg", "timeline_text", "trace_json"]


def timeline_png(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None, width: float = 14.0
) -> None:
    """Draws timelines below each other, on a common time axis.

    A colour is a micro-batch, pale forward, paler recomputation and full backward; units of all but the first stage of
    a rank are hatched.

    Args:
        path: file to write; its suffix chooses the format.
        tracks: a timeline, or several with the heading of each, for instance planned and measured.
        width: inches. Letters have a fixed size, so fewer inches make letters larger in a page.
    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    _save_figure(path, tracks, title, Path(path).suffix[1:] or "png", width)


def timeline_svg(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None, width: float = 14.0
) -> None:
    """Draws the picture of :func:`timeline_png` as SVG, which stays sharp at any size."""
    _save_figure(path, tracks, title, "svg", width)


def _save_figure(
    path: str | Path, tracks: Timeline | Mapping[str, Timeline], title: str | None, form: str, width: float
) -> None:
    with needs_extra("plot", "matplotlib"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

    named = {heading: bars_of(each) for heading, each in style.named_timelines("picture", tracks).items()}
    longest = max(bar.end for rows in named.values() for row in rows for bar in row)
    second, unit_name = time_unit(longest)
    heights = [len(rows) for rows in named.values()]
    figure = Figure(
        figsize=(width, 1.5 + 0.42 * sum(heights) + 0.6 * len(heights)),
        dpi=110,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.08),  # inches
    )
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    axes[-1].set_xlim(0, longest / second or 1)
    axes[-1].set_xlabel(f"time ({unit_name})")
    hatches: set[str | None] = set()
    for ax, (heading, rows) in zip(axes, named.items(), strict=True):
        ax.set_title(heading, loc="left", fontsize=11)
        hatches |= _draw_rows(ax, rows, second, width)
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    handles = _legend_handles([row for rows in named.values() for row in rows], hatches)
    columns = max(1, int(width / 1.7))  # 8 in 14 inches
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    write_whole(path, picture.getvalue())


_HATCHES = {"////": "later stages of a rank", "....": "W in waits"}


def _draw_rows(ax: Any, rows: Sequence[Sequence[Bar]], second: float, width: float) -> set[str | None]:
    """Draws one row of bars per rank, with micro-batch and segment if there is room; returns the hatches used."""
    used: set[str | None] = set()
    has_segments = any(bar.unit.segment > 0 for row in rows for bar in row)
    room = 0.07 / width * ax.get_xlim()[1]  # length of a character on the time axis
    centred = {"ha": "center", "va": "center_baseline", "fontsize": 8}
    for rank, row in enumerate(rows):
        first_stage = min((bar.unit.stage for bar in row), default=0)
        hatches = ["...." if bar.in_wait else "////" if bar.unit.stage != first_stage else None for bar in row]
        used.update(hatches)
        for hatch in (None, *_HATCHES):
            shown = [bar for bar, its in zip(row, hatches, strict=True) if its == hatch]
            places = [(bar.start / second, (bar.end - bar.start) / second) for bar in shown]
            colors = [style.color_of(bar.unit) for bar in shown]
            ax.broken_barh(places, (rank - 0.42, 0.84), facecolors=colors, edgecolor="white", lw=0.6, hatch=hatch)
            for bar, color, (left, length) in zip(shown, colors, places, strict=True):
                text = f"{bar.unit.microbatch}.{bar.unit.segment}" if has_segments else f"{bar.unit.microbatch}"
                if length >= room * len(text):
                    box = {"facecolor": color, "edgecolor": "none", "pad": 1.5} if hatch else None
                    ax.text(left + length / 2, rank, text, color=style.ink_on(color), bbox=box, **centred)
    ax.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="0.9", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return used


def _legend_handles(rows: Sequence[Sequence[Bar]], hatches: set[str | None]) -> list[Any]:
    from matplotlib.patches import Patch

    units = {bar.unit for row in rows for bar in row}
    microbatches = sorted({unit.microbatch for unit in units})
    seen = shortest_of(rows).keys() or {unit.kind for unit in units}
    num_colors = len(style.MICROBATCH_COLORS)
    handles = [Patch(facecolor=style.MICROBATCH_COLORS[m % num_colors], label=f"micro-batch {m}") for m in microbatches]
    if len(microbatches) > num_colors:
        handles[num_colors:] = [Patch(facecolor="none", label="... colours repeat")]
    handles += [
        Patch(facecolor=(1 - 0.6 * strength,) * 3, label=f"{kind}: {PASSES[kind]}")
        for kind, strength in style.STRENGTH.items()
        if kind in seen
    ]
    return handles + [
        Patch(facecolor="0.7", edgecolor="white", hatch=hatch, label=text)
        for hatch, text in _HATCHES.items()
        if hatch in hatches
    ]


def trace_json(path: str | Path, tracks: Timeline | Mapping[str, Timeline]) -> None:
    """Writes a trace with one track per rank; open it in ui.perfetto.dev or chrome://tracing.

    Args:
        path: file to write.
        tracks: a timeline, or several with the name of each, for instance planned and measured: a process each.
    Raises:
        ValueError: a timeline holds no unit, or all together more than 1000000.
    """
    events: list[dict[str, object]] = []
    for pid, (heading, timeline) in enumerate(style.named_timelines("trace", tracks, "pipeline").items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": heading}})
        rows = bars_of(timeline)
        names_stage = any(bar.unit.stage != rank for rank, row in enumerate(rows) for bar in row)
        for rank, row in enumerate(rows):
            thread = {"pid": pid, "tid": rank}
            events.append({"ph": "M", **thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({"ph": "M", **thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
            for unit, start, end, in_wait in row:
                name = f"[{unit.stage}]{unit}" if names_stage else str(unit)
                about = {"name": name, "cat": PASSES[unit.kind] + " in a wait" * in_wait}
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                where = {"stage": unit.stage, "microbatch": unit.microbatch, "segment": unit.segment}
                events.append({"ph": "X", **thread, **times, **about, "args": where})
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
