"""Pictures of a timeline, simulated or measured: text, PNG, SVG, and a trace for chrome://tracing or ui.perfetto.dev.

A file is written whole or not at all. ``seq1f1b.view.page`` makes the page to zoom into.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seq1f1b.files import write_whole

if TYPE_CHECKING:
    from seq1f1b.schedule import Timeline, Unit

MOST_UNITS = 100_000  # of a picture or page: some seconds, in matplotlib or in a browser
MOST_TRACED = 1_000_000  # 170 MB of JSON

__all__ = ["timeline_png", "timeline_svg", "timeline_text", "trace_json"]

_PASSES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_FILL = {"F": "-", "B": "=", "I": "~", "W": "+"}


def timeline_text(timeline: Timeline, *, width: int = 100) -> str:
    """One line per rank; a unit starts with its micro-batch and segment and is filled up by its pass.

    The labels are the longest for which ``width`` has room: ``0.1``, or ``0b`` for the same, or ``0``, or none. Blanks
    are bubbles; stages of one rank look alike. Where units are narrower than a column, passes and blanks stand as often
    as they have shares of the time. The last lines say how to read it.
    """
    units = [unit for track in timeline for unit, _, _ in track]
    begin, end = _extent(timeline)
    margin = len(f"rank {len(timeline) - 1}  ")
    columns = max(width - margin, 1)
    shortest: dict[str, float] = {}  # of each pass
    for unit, start, stop in (entry for track in timeline for entry in track):
        if stop > start:
            shortest[unit.kind] = min(shortest.get(unit.kind, stop - start), stop - start)
    narrowest = min(shortest.values(), default=0.0)
    scale = columns / (end - begin) if end > begin else 0.0
    if scale * narrowest >= 1:  # equal units get equal columns
        scale = int(scale * narrowest + 1e-9) / narrowest
    label = _label(units, sorted(int(scale * length + 1e-9) for length in shortest.values()))
    lines = []
    for rank, track in enumerate(timeline):
        line = ""
        if scale * narrowest < 1:
            line = _shares(track, begin, scale, columns)
        else:
            for unit, start, stop in track:
                left, right = round((start - begin) * scale), round((stop - begin) * scale)
                line = line[:left].ljust(left) + label(unit)[: right - left].ljust(right - left, _FILL[unit.kind])
        lines.append(f"rank {rank}".ljust(margin) + line)
    example = next((unit for unit in units if unit.segment > 0), units[0])
    kinds = [kind for kind in _FILL if any(unit.kind == kind for unit in units)]
    legend = ", ".join(f"{label(example)}{_FILL[kind] * 2} {_PASSES[kind]}" for kind in kinds)
    if label(example):
        legend += f" of micro-batch {example.microbatch}" + (f", segment {example.segment}" * (example.segment > 0))
    if scale > 0:
        legend += f"; one column is {_seconds(1 / scale)}" + ", units are shorter" * (scale * narrowest < 1)
    return "\n".join([*lines, *textwrap.wrap(legend, max(width, 40))]) + "\n"


def _shares(track: Sequence[tuple[Unit, float, float]], begin: float, scale: float, columns: int) -> str:
    """One pass or blank per column: what is most in arrears of its share of the time so far."""
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for unit, start, stop in track:
        left, right, fill = (start - begin) * scale, (stop - begin) * scale, _FILL[unit.kind]
        for column in range(int(left), min(math.ceil(right), columns)):
            share = min(right, column + 1) - max(left, column)
            shares[column][fill] = shares[column].get(fill, 0.0) + share
    line, due = "", dict.fromkeys((" ", *_FILL.values()), 0.0)
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


def check_size(what: str, num_units: int) -> None:
    """Refuses a picture, page or trace that would take minutes and help nobody."""
    most = MOST_TRACED if what == "trace" else MOST_UNITS
    if num_units > most:
        raise ValueError(
            f"a {what} of {num_units} units, more than the {most} that it shows in good time; draw fewer "
            "micro-batches, ranks or segments, the pattern repeats"
        )


def count_units(timelines: Iterable[Timeline]) -> int:
    """Of all together."""
    return sum(len(track) for timeline in timelines for track in timeline)


def _extent(timeline: Timeline) -> tuple[float, float]:
    """First start and last end."""
    if not any(timeline):
        raise ValueError("the timeline holds no unit")
    begin = min(start for track in timeline for _, start, _ in track)
    end = max(stop for track in timeline for _, _, stop in track)
    return begin, end


def _first_stages(timeline: Timeline) -> list[int]:
    """Per rank, the first of its stages: the others are marked."""
    return [min((unit.stage for unit, _, _ in track), default=0) for track in timeline]


def _time_unit(seconds: float) -> tuple[float, str]:
    """Seconds per unit, and the unit in which a time of this size reads well."""
    return next(((size, name) for size, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= size), (1e-6, "us"))


def _seconds(seconds: float) -> str:
    size, name = _time_unit(seconds)
    return f"{seconds / size:.3g} {name}"


_MICROBATCH_COLORS = ("#1f77b4", "#e6862d", "#2c9a45", "#cc3b3b", "#7d5fb2",
                      "#8a6552", "#d062a8", "#6f7f8a", "#a3a029", "#1ca7b8")  # fmt: skip
_STRENGTH = {"F": 0.38, "B": 1.0, "I": 0.8, "W": 0.6}


def _color(unit: Unit) -> tuple[float, ...]:
    """The micro-batch's hue: pale forward, full backward, between the two where the backward is split."""
    color = _MICROBATCH_COLORS[unit.microbatch % len(_MICROBATCH_COLORS)]
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(1 - _STRENGTH[unit.kind] * (1 - channel) for channel in channels)


def _ink(color: Sequence[float]) -> str:
    """Of a label on that colour: dark where it is light (relative luminance, ITU-R BT.709)."""
    red, green, blue = color
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.62 else "0.15"


def timeline_png(path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None) -> None:
    """Draws one or several timelines, one below the other on a common time axis.

    A colour is a micro-batch, pale forward and full backward; where a rank holds several stages all but its first are
    hatched.

    Args:
        path: file to write; its suffix chooses the format.
        tracks: a timeline, or several with the heading of each, for instance planned and measured.
    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a timeline holds no unit, or all together more than 100000.
    """
    _save_figure(path, tracks, title, Path(path).suffix[1:] or "png")


def timeline_svg(path: str | Path, tracks: Timeline | Mapping[str, Timeline], *, title: str | None = None) -> None:
    """The picture of :func:`timeline_png` as SVG, which stays sharp at any size."""
    _save_figure(path, tracks, title, "svg")


def _save_figure(path: str | Path, tracks: Timeline | Mapping[str, Timeline], title: str | None, form: str) -> None:
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ImportError("a picture of a timeline needs matplotlib; run: pip install matplotlib") from error

    named: Mapping[str, Timeline] = tracks if isinstance(tracks, Mapping) else {"": tracks}
    longest = max(end - begin for begin, end in map(_extent, named.values()))
    check_size("picture", count_units(named.values()))
    second, unit_name = _time_unit(longest)
    rows = [len(timeline) for timeline in named.values()]
    figure = Figure(
        figsize=(14, 1.5 + 0.42 * sum(rows) + 0.6 * len(rows)),
        dpi=110,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.08),  # inches
    )
    axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    axes[-1].set_xlim(0, longest / second or 1)
    axes[-1].set_xlabel(f"time ({unit_name})")
    for ax, (heading, timeline) in zip(axes, named.items(), strict=True):
        ax.set_title(heading, loc="left", fontsize=11)
        _draw_tracks(ax, timeline, second)
    if title is not None:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
    handles = _legend_handles(named)
    columns = -(-len(handles) // -(-len(handles) // 8))  # at most 8, rows equally long
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    write_whole(path, picture.getvalue())


def _draw_tracks(ax: Any, timeline: Timeline, second: float) -> None:
    """One row of bars per rank, each with its micro-batch and segment where it has room for them."""
    begin, _ = _extent(timeline)
    has_segments = any(unit.segment > 0 for track in timeline for unit, _, _ in track)
    room = 0.005 * ax.get_xlim()[1]  # that one character takes
    centred = {"ha": "center", "va": "center_baseline", "fontsize": 8}
    for rank, (track, first_stage) in enumerate(zip(timeline, _first_stages(timeline), strict=True)):
        for hatch in (None, "////"):
            shown = [entry for entry in track if (entry[0].stage != first_stage) is (hatch is not None)]
            bars = [((start - begin) / second, (stop - start) / second) for _, start, stop in shown]
            colors = [_color(unit) for unit, _, _ in shown]
            ax.broken_barh(bars, (rank - 0.42, 0.84), facecolors=colors, edgecolor="white", lw=0.6, hatch=hatch)
            for (unit, _, _), (left, width) in zip(shown, bars, strict=True):
                text = f"{unit.microbatch}.{unit.segment}" if has_segments else f"{unit.microbatch}"
                if width >= room * len(text):
                    color = _color(unit)
                    box = {"facecolor": color, "edgecolor": "none", "pad": 1.5} if hatch else None
                    ax.text(left + width / 2, rank, text, color=_ink(color), bbox=box, **centred)
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
    num_colors = len(_MICROBATCH_COLORS)
    handles = [
        Patch(facecolor=_MICROBATCH_COLORS[m % num_colors], label=f"micro-batch {m}") for m in microbatches[:num_colors]
    ]
    if len(microbatches) > num_colors:
        handles.append(Patch(facecolor="none", label="... colours repeat"))
    for kind, strength in _STRENGTH.items():
        if any(unit.kind == kind for unit in units):
            handles.append(Patch(facecolor=(1 - 0.6 * strength,) * 3, label=f"{kind}: {_PASSES[kind]}"))
    if any(
        unit.stage != first
        for timeline in named.values()
        for track, first in zip(timeline, _first_stages(timeline), strict=True)
        for unit, _, _ in track
    ):
        handles.append(Patch(facecolor="0.7", edgecolor="white", hatch="////", label="later stages of a rank"))
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
    check_size("trace", count_units(named.values()))
    events: list[dict[str, object]] = []
    for pid, (heading, timeline) in enumerate(named.items()):
        begin, _ = _extent(timeline)
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": heading}})
        names_stage = any(unit.stage != rank for rank, track in enumerate(timeline) for unit, _, _ in track)
        for rank, track in enumerate(timeline):
            thread = {"ph": "M", "pid": pid, "tid": rank}
            events.append({**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": rank}})
            for unit, start, stop in track:
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": rank,
                        "ts": (start - begin) * 1e6,
                        "dur": (stop - start) * 1e6,
                        "name": f"[{unit.stage}]{unit}" if names_stage else str(unit),
                        "cat": _PASSES[unit.kind],
                        "args": {"stage": unit.stage, "microbatch": unit.microbatch, "segment": unit.segment},
                    }
                )
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())
