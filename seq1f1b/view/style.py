"""Facts for all drawings of a timeline: limits, headings, and colours of units and of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seq1f1b.timeline_text import PASSES
from seq1f1b.unit import Timeline, Unit

_HERE = Path(__file__).parent

MOST_UNITS = 100_000  # units of a picture or page: takes some seconds, in matplotlib or in a browser
MOST_TRACED = 1_000_000  # units of a trace: 170 MB of JSON


def named_timelines(what: str, tracks: Timeline | Mapping[str, Timeline], alone: str = "") -> Mapping[str, Timeline]:
    """Returns timelines by heading; raises if a picture, page or trace of so many units would take minutes.

    Args:
        alone: heading of a single timeline.
    """
    named: Mapping[str, Timeline] = tracks if isinstance(tracks, Mapping) else {alone: tracks}
    num_units = sum(len(track) for timeline in named.values() for track in timeline)
    most = MOST_TRACED if what == "trace" else MOST_UNITS
    if num_units > most:
        raise ValueError(
            f"a {what} of {num_units} units, more than the {most} that it shows in good time; draw fewer "
            "micro-batches, ranks or segments, the pattern repeats"
        )
    return named


MICROBATCH_COLORS = ("#1f77b4", "#e6862d", "#2c9a45", "#cc3b3b", "#7d5fb2",
                      "#8a6552", "#d062a8", "#6f7f8a", "#a3a029", "#1ca7b8")  # fmt: skip
STRENGTH = dict.fromkeys(PASSES, 0.5)
STRENGTH |= {"F": 0.38, "B": 1.0, "I": 0.8, "W": 0.6, "R": 0.2, "S": 0.3, "T": 0.9, "E": 0.15, "G": 0.7}


def color_of(unit: Unit) -> tuple[float, ...]:
    """Returns the micro-batch's hue: full for backward passes, pale for forward passes."""
    color = MICROBATCH_COLORS[unit.microbatch % len(MICROBATCH_COLORS)]
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(1 - STRENGTH[unit.kind] * (1 - channel) for channel in channels)


def ink_on(color: Sequence[float]) -> str:
    """Returns the colour of a label: dark on a light ``color``, else white (relative luminance, ITU-R BT.709)."""
    red, green, blue = color
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.62 else "#222222"


_HOLDINGS = {  # from the bottom up: the kinds that change least lie lowest
    "weights": ("#5b6472", "weights"),
    "optimizer": ("#98a2ae", "optimizer state"),
    "logits": ("#d9b310", "logits"),
    "receive": ("#e377b0", "receive places"),
    "kv": ("#1f77b4", "KV cache"),
    "kv_gradients": ("#6fc0ea", "KV gradients"),
    "output_gradients": ("#8757b8", "output gradients kept for W"),
    "inputs": ("#2c9a45", "kept inputs, loss gradients"),
    "activations": ("#f0944d", "activations"),
    "shard_logits": ("#a9823c", "logits of a shard"),
}
"""Colours and words by the fields of :class:`seq1f1b.schedule.PeakMemory`."""


def part(name: str) -> str:
    """Returns the text of ``timeline.js`` or ``timeline.css``."""
    return (_HERE / name).read_text(encoding="utf-8")


def page_facts() -> dict[str, Any]:
    """Returns facts of passes and of held memory for ``timeline.js``."""

    def colors(letter: str) -> list[dict[str, str]]:
        found = [color_of(Unit(letter, 0, microbatch, 0)) for microbatch in range(len(MICROBATCH_COLORS))]
        return [{"fill": f"rgb({','.join(str(round(255 * c)) for c in one)})", "ink": ink_on(one)} for one in found]

    return {
        "passes": [{"letter": letter, "text": text, "colors": colors(letter)} for letter, text in PASSES.items()],
        "holdings": [{"name": name, "color": color, "text": text} for name, (color, text) in _HOLDINGS.items()],
    }
