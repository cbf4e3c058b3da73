"""Pictures of a timeline, simulated or measured: text, PNG, SVG, and a trace for chrome://tracing or ui.perfetto.dev.

Every file is written whole or not at all. ``seq1f1b.view.page`` makes a page with zoom.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seq1f1b.files import write_whole
from seq1f1b.timeline_text import PASSES, extent, in_waits, kinds_of, time_unit, timeline_text
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
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ImportError('a picture of a timeline needs matplotlib; run: pip install "seq1f1b[plot]"') from error

    named = style.named_timelines("picture", tracks)
    longest = max(end - begin for begin, end in map(extent, named.values()))
    second, unit_name = time_unit(longest)
    rows = [len(timeline) for timeline in named.values()]
    figure = Figure(
        figsize=(width, 1.5 + 0.42 * sum(rows) + 0.6 * len(rows)),
        dpi=110,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.08),  # inches
    )
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    axes[-1].set_xlim(0, longest / second or 1)
    axes[-1].set_xlabel(f"time ({unit_name})")
    hatches: set[str | None] = set()
    for ax, (heading, timeline) in zip(axes, named.items(), strict=True):
        ax.set_title(heading, loc="left", fontsize=11)
        hatches |= _draw_tracks(ax, timeline, second, width)
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    handles = _legend_handles(named, hatches)
    columns = max(1, int(width / 1.7))  # 8 in 14 inches
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    write_whole(path, picture.getvalue())


_HATCHES = {"////": "later stages of a rank", "....": "W in waits"}


def _draw_tracks(ax: Any, timeline: Timeline, second: float, width: float) -> set[str | None]:
    """Draws one row of bars per rank, with micro-batch and segment if there is room; returns the hatches used."""
    used: set[str | None] = set()
    begin, _ = extent(timeline)
    has_segments = any(unit.segment > 0 for track in timeline for unit, _, _ in track)
    room = 0.07 / width * ax.get_xlim()[1]  # length of a character on the time axis
    centred = {"ha": "center", "va": "center_baseline", "fontsize": 8}
    for rank, track in enumerate(timeline):
        first_stage = min((unit.stage for unit, _, _ in track), default=0)
        hatches = [
            "...." if in_wait else "////" if unit.stage != first_stage else None
            for (unit, _, _), in_wait in zip(track, in_waits(track), strict=True)
        ]
        used.update(hatches)
        for hatch in (None, *_HATCHES):
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
    ax.spines[["top", "right", "left"]].set_visible(False)
    return used


def _legend_handles(named: Mapping[str, Timeline], hatches: set[str | None]) -> list[Any]:
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
    seen = {kind for timeline in named.values() for kind in kinds_of(timeline)[0]}
    for kind, strength in style.STRENGTH.items():
        if kind in seen:
            handles.append(Patch(facecolor=(1 - 0.6 * strength,) * 3, label=f"{kind}: {PASSES[kind]}"))
    for hatch, text in _HATCHES.items():
        if hatch in hatches:
            handles.append(Patch(facecolor="0.7", edgecolor="white", hatch=hatch, label=text))
    return handles


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
        begin, _ = extent(timeline)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": heading}})
        names_stage = any(unit.stage != rank for rank, track in enumerate(timeline) for unit, _, _ in track)
        for rank, track in enumerate(timeline):
            thread = {"ph": "M", "pid": pid, "tid": rank}
            events.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
            for (unit, start, stop), in_wait in zip(track, in_waits(track), strict=True):
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": rank,
                        "ts": (start - begin) * 1e6,
                        "dur": (stop - start) * 1e6,
                        "name": f"[{unit.stage}]{unit}" if names_stage else str(unit),
                        "cat": PASSES[unit.kind] + " in a wait" * in_wait,
                        "args": {"stage": unit.stage, "microbatch": unit.microbatch, "segment": unit.segment},
                    }
                )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
