"""``seq1f1b draw``."""

from __future__ import annotations

import argparse
import shutil

from seq1f1b.cli import workload
from seq1f1b.timeline_text import column_seconds
from seq1f1b.view import draw, page

PICTURES = {
    "png": "draw a PNG picture (needs matplotlib)",
    "svg": "draw an SVG picture (needs matplotlib)",
    "html": "make a page to zoom into, for any browser, without a network",
    "trace": "write a trace for ui.perfetto.dev or chrome://tracing",
}


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("--width", type=int, metavar="N", help="columns of the text (default: the terminal's, or 100)")
    for form, about in PICTURES.items():
        command.add_argument(f"--{form}", metavar="FILE", help=about)
    workload.add_order_options(command, microbatches=4, segments=2)  # units whose names fit into 80 columns
    workload.add_variation_options(command)


def run(options: argparse.Namespace) -> int:
    workload.check_costs(options)
    runs = {}
    for name in options.schedule:
        schedule = workload.make_schedule(name, options)
        most = f"{'trees of up to ' if schedule.parents else ''}{schedule.num_segments} segments"
        heading = name if schedule.num_segments == 1 else f"{name}, {most}"
        critical = options.html is not None and "O" not in schedule.kinds and not schedule.fills
        runs[heading] = workload.simulated(schedule, options, critical=critical)
    tracks = {heading: simulation.timeline for heading, simulation in runs.items()}
    for form, write in (("png", draw.timeline_png), ("svg", draw.timeline_svg), ("trace", draw.trace_json)):
        if getattr(options, form) is not None:
            write(getattr(options, form), tracks)
    if options.html is not None:
        page.timeline_html(options.html, runs, title=" and ".join(tracks))
    if all(getattr(options, form) is None for form in PICTURES):
        width = options.width or shutil.get_terminal_size((100, 24)).columns  # or COLUMNS
        column = max(column_seconds(timeline, width=width) for timeline in tracks.values())
        for heading, timeline in tracks.items():
            print(f"{heading}\n" * (len(tracks) > 1) + draw.timeline_text(timeline, width=width, column=column))
    return 0
