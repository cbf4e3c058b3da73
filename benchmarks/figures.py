"""Pictures of what the benchmarks measured. Colours are told apart by the colour-blind, and in grey by their marks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from seq1f1b.timeline_text import PASSES, in_waits
from seq1f1b.view import style

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f")
MARKS = ("o", "s", "^", "D", "v")
STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "legend.fontsize": 7, "axes.spines.top": False,
    "axes.spines.right": False, "axes.linewidth": 0.6, "legend.frameon": False, "savefig.dpi": 200,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A value with its interval."""

    value: float
    low: float | None = None
    high: float | None = None


def _errors(points: Sequence[Point]) -> Any:
    lows = [p.value - (p.value if p.low is None else p.low) for p in points]
    return [lows, [(p.value if p.high is None else p.high) - p.value for p in points]]


Panel = tuple[str, str, dict[str, dict[str, Point]]]  # title, axis, {series: {row: point}}


def bars(path: str, rows: Sequence[Sequence[Panel]], caption: str) -> None:
    """Horizontal bars with a line at 1; panels of one row share their names."""
    with plt.rc_context(STYLE):
        names = [
            list(dict.fromkeys(n for *_, series in row for points in series.values() for n in points)) for row in rows
        ]
        heights = [0.9 + 0.22 * len(n) for n in names]
        columns = max(map(len, rows))
        figure, axes = plt.subplots(
            len(rows), columns, figsize=(7.0, 0.5 + sum(heights)), sharey="row", squeeze=False, layout="constrained",
            height_ratios=heights,
        )  # fmt: skip
        labels: dict[str, Any] = {}
        for row, own, row_axes in zip(rows, names, axes, strict=True):
            for axis in row_axes[len(row) :]:
                axis.set_visible(False)
            for axis, (title, unit, series) in zip(row_axes, row, strict=False):
                present = {label: points for label, points in series.items() if points}
                height = 0.8 / len(present)
                for i, (label, points) in enumerate(present.items()):
                    at = [own.index(name) + (i - (len(present) - 1) / 2) * height for name in points]
                    values = list(points.values())
                    labels[label] = axis.barh(
                        at, [p.value for p in values], height, color=COLOURS[list(series).index(label)],
                        xerr=_errors(values), error_kw={"elinewidth": 0.7, "ecolor": "black"},
                    )  # fmt: skip
                axis.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
                axis.set_title(title)
                axis.set_xlabel(unit)
                axis.set_yticks(range(len(own)), own)
                axis.tick_params(axis="y", length=0)
            row_axes[0].invert_yaxis()
        figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=len(labels))
        figure.supxlabel(caption, fontsize=6, color="#555555")
        figure.savefig(path)
        plt.close(figure)


def lines(
    path: str, panels: Sequence[tuple[str, str, str, dict[str, dict[float, Point]]]], caption: str, *, base: int = 2
) -> None:
    """Lines over a logarithmic axis: panels of (title, x axis, y axis, {series: {x: point}}).

    A series whose name begins with "simulated" is drawn dashed, in the colour of the one before it.
    """
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(panels), figsize=(7.0, 3.0), squeeze=False, layout="constrained")
        labels: dict[str, Any] = {}
        colours: dict[str, int] = {}
        for axis, (title, x_label, y_label, series) in zip(axes.flat, panels, strict=True):
            for label, points in series.items():
                simulated = label.startswith("simulated")
                which = colours.setdefault(label.removeprefix("simulated: "), len(set(colours)))
                values = list(points.values())
                labels[label] = axis.errorbar(
                    list(points), [p.value for p in values], yerr=_errors(values), color=COLOURS[which],
                    marker="" if simulated else MARKS[which], markersize=3.5, linewidth=1.0, elinewidth=0.7,
                    capsize=1.5,
                    linestyle="--" if simulated else "-",
                )  # fmt: skip
            axis.set_xscale("log", base=base)
            ticks = sorted({x for points in series.values() for x in points})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.set_title(title)
            axis.set_xlabel(x_label)
            axis.set_ylabel(y_label)
        figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=3)
        figure.supxlabel(caption, fontsize=6, color="#555555")
        figure.savefig(path)
        plt.close(figure)


@dataclass(frozen=True)
class Dot:
    """What an arm needs, and its seconds with their interval."""

    size: float
    seconds: float
    low: float
    high: float


def _write_names(axis: Any, dots: Sequence[Dot], named: dict[str, Dot], line: Any) -> None:
    """Writes each name in the first place near its dot where it covers no dot, no other name and not the line."""
    renderer, inside = axis.figure.canvas.get_renderer(), axis.get_window_extent()
    centres = [axis.transData.transform((dot.size, dot.seconds)) for dot in dots]
    boxes = [matplotlib.transforms.Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    corners = itertools.pairwise(line.get_path().transformed(axis.transData).vertices)
    boxes += [matplotlib.transforms.Bbox([a.tolist(), b.tolist()]).padded(1) for a, b in corners]
    places = [(dx, dy * up) for dy in (7, 18, 30, 42, 54) for dx in (6, -6) for up in (1, -1)]
    for name, dot in named.items():
        for dx, dy in places:
            text = axis.annotate(
                name, (dot.size, dot.seconds), (dx, dy), textcoords="offset points", fontsize=8,
                ha="left" if dx > 0 else "right", va="bottom" if dy > 0 else "top",
                arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if abs(dy) > 7 else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = matplotlib.text.Text.get_window_extent(text, renderer)
            is_inside = inside.x0 < box.x0 and box.x1 < inside.x1 and inside.y0 < box.y0 and box.y1 < inside.y1
            if is_inside and not any(box.overlaps(other) for other in boxes):
                boxes.append(box)
                break
            text.remove()


def trade_off(path: str, ours: dict[str, Dot], peers: dict[str, Dot], *, base: str, title: str, caption: str) -> None:
    """Seconds over memory: ours as the least time within each size, each peer as a point with its name.

    Arms of ours that another one beats in both are hollow. The upper axis counts in shares of the size of ``base``.
    """
    with plt.rc_context({**STYLE, "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10}):
        figure, axis = plt.subplots(figsize=(8.0, 5.0), layout="constrained")
        best: dict[str, Dot] = {}
        for name, dot in sorted(ours.items(), key=lambda entry: (entry[1].size, entry[1].seconds)):
            if not best or dot.seconds < min(other.seconds for other in best.values()):
                best[name] = dot
        right = 1.1 * max(dot.size for dot in (*ours.values(), *peers.values()))
        sizes = [*(dot.size for dot in best.values()), right]
        seconds = [dot.seconds for dot in best.values()]
        [line] = axis.step(sizes, [*seconds, seconds[-1]], where="post", color=COLOURS[0], linewidth=1.6)
        for name, dot in (*ours.items(), *peers.items()):
            colour = COLOURS[0] if name in ours else COLOURS[1]
            axis.errorbar(
                dot.size, dot.seconds, yerr=[[dot.seconds - dot.low], [dot.high - dot.seconds]], color=colour,
                marker=MARKS[0] if name in ours else MARKS[1], markersize=5.5, elinewidth=0.8, capsize=2.0,
                markerfacecolor=colour if name in best or name in peers else "white",
            )  # fmt: skip
        axis.set_xlim(0, right)
        axis.set_ylim(0, 1.12 * max(dot.high for dot in (*ours.values(), *peers.values())))
        axis.set_xlabel("growth of resident memory in a step, on the rank where it is largest (MiB)")
        axis.set_ylabel("seconds of a step")
        axis.grid(color="#eeeeee", linewidth=0.6)
        axis.set_axisbelow(True)
        unit = peers[base].size
        upper = axis.secondary_xaxis("top", functions=(lambda x: x / unit, lambda x: x * unit))
        upper.set_xlabel(f"the same over that of {base}")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left")
        caption += "\nhollow: another one of ours is faster in less memory"
        figure.supxlabel(caption, fontsize=6, color="#555555")
        figure.canvas.draw()  # places the axes, from which names take their room
        figure.set_layout_engine("none")
        _write_names(axis, [*ours.values(), *peers.values()], {**best, **peers}, line)
        figure.savefig(path)
        plt.close(figure)


BUBBLE = {"facecolor": "white", "edgecolor": "#bbbbbb", "hatch": "////", "linewidth": 0.0}


def timelines(path: str, tracks: dict[str, Any], title: str, caption: str) -> None:
    """Measured steps, {heading: timeline}, one above the other on one time axis. Dots are W in waits."""
    with plt.rc_context({**STYLE, "font.size": 11, "axes.titlesize": 12, "axes.labelsize": 11, "legend.fontsize": 11}):
        figure, axes = plt.subplots(len(tracks), 1, figsize=(10.0, 4.2), sharex=True, layout="constrained")
        longest = 0.0
        shown = [unit for timeline in tracks.values() for track in timeline for unit, _, _ in track]
        for axis, (heading, timeline) in zip(axes, tracks.items(), strict=True):
            begin = min(start for track in timeline for _, start, _ in track)
            end = max(stop for track in timeline for _, _, stop in track) - begin
            longest = max(longest, end)
            in_segments = any(unit.segment for track in timeline for unit, _, _ in track)
            axis.set_title(heading, loc="left")
            for rank, track in enumerate(timeline):
                axis.barh(rank, end, 0.86, **BUBBLE)
                for (unit, start, stop), in_wait in zip(track, in_waits(track), strict=True):
                    colour = matplotlib.colors.to_rgb(COLOURS[unit.microbatch % len(COLOURS)])
                    strength = style.STRENGTH[unit.kind]
                    axis.barh(
                        rank, stop - start, 0.86, left=start - begin, edgecolor="white", linewidth=0.8,
                        color=[[1 - strength * (1 - part) for part in colour]], hatch="...." if in_wait else None,
                    )  # fmt: skip
                    if stop - start < 0.012 * len(tracks) * end:
                        continue  # no room for its name
                    text = f"{unit.microbatch}.{unit.segment}" if in_segments else f"{unit.microbatch}"
                    axis.text(
                        (start + stop) / 2 - begin, rank, text, ha="center", va="center_baseline",
                        fontsize=8 if in_segments else 11, color="white" if strength > 0.6 else "black",
                    )  # fmt: skip
            axis.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in range(len(timeline))])
            axis.tick_params(axis="y", length=0)
            axis.invert_yaxis()
            axis.spines["left"].set_visible(False)
        axes[-1].set_xlim(0, longest)
        axes[-1].set_xlabel("seconds")
        patch = matplotlib.patches.Patch
        handles = [
            patch(color=COLOURS[m % len(COLOURS)], label=f"micro-batch {m}")
            for m in sorted({unit.microbatch for unit in shown})
        ]
        handles += [
            patch(color=str(1 - 0.6 * strength), label=PASSES[kind])
            for kind, strength in style.STRENGTH.items()
            if any(unit.kind == kind for unit in shown)
        ]
        if any(any(in_waits(track)) for timeline in tracks.values() for track in timeline):
            handles.append(patch(facecolor="0.7", edgecolor="white", hatch="....", label="W in a wait"))
        handles.append(patch(**BUBBLE, label="bubble: the rank waits"))
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles) if len(handles) < 8 else (len(handles) + 1) // 2,
            columnspacing=1.2,
            handlelength=1.2,
            title=caption,
            title_fontsize=7,
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=13)
        figure.savefig(path, dpi=150)
        plt.close(figure)
