"""``seq1f1b draw``."""

from __future__ import annotations

import argparse
import shutil

from seq1f1b.cli import workload
from seq1f1b.timeline_text import column_seconds
from seq1f1b.view import draw, page, style

PICTURES = {
    "png": ("picture", "draw a PNG picture (needs matplotlib)"),
    "svg": ("picture", "draw an SVG picture (needs matplotlib)"),
    "html": ("page", "make a page to zoom into, for any browser, without a network"),
    "trace": ("trace", "write a trace for ui.perfetto.dev or chrome://tracing"),
}


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", nargs="+", help=workload.schedule_kinds())
    command.add_argument("--width", type=int, metavar="N", help="columns of the text (default: the terminal's, or 100)")
    for form, (_, about) in PICTURES.items():
        command.add_argument(f"--{form}", metavar="FILE", help=about)
    workload.add_order_options(command, microbatches=4, segments=2)  # units whose names fit into 80 columns
    workload.add_variation_options(command)


def run(options: argparse.Namespace) -> int:
    workload.check_costs(options)
    if options.width is not None and not 20 <= options.width <= 10000:
        raise ValueError(f"--width is {options.width}, must be in 20..10000")
    for form in PICTURES:
        if getattr(options, form) == "":
            raise ValueError(f"--{form} needs the name of a file")
    schedules = {name: workload.make_schedule(name, options) for name in options.schedule}
    num_units = sum(2 * each.num_stages * each.num_microbatches * each.num_segments for each in schedules.values())
    for form, (what, _) in PICTURES.items():
        if getattr(options, form) is not None:
            style.check_size(what, num_units)  # before minutes of simulating
    runs = {}
    for name, schedule in schedules.items():
        heading = name if schedule.num_segments == 1 else f"{name}, {schedule.num_segments} segments"
        runs[heading] = schedule.simulate(
            workload.costs_of(schedule, options),
            memory=workload.memory_of(schedule, options),
            noise=workload.noise_of(options),
            critical=options.html is not None and "O" not in schedule.kinds and not schedule.fills,
        )
    tracks = {heading: simulation.timeline for heading, simulation in runs.items()}
    [first, *others] = tracks
    drawn, title = (tracks, None) if others else (tracks[first], first)
    if options.png:
        draw.timeline_png(options.png, drawn, title=title)
    if options.svg:
        draw.timeline_svg(options.svg, drawn, title=title)
    if options.html:
        page.timeline_html(options.html, runs if others else runs[first], title=" and ".join(tracks))
    if options.trace:
        draw.trace_json(options.trace, drawn)
    if not any(getattr(options, form) for form in PICTURES):
        width = options.width
        if width is None:
            width = shutil.get_terminal_size((100, 24)).columns  # or COLUMNS
        column = max(column_seconds(timeline, width=width) for timeline in tracks.values())
        for heading, timeline in tracks.items():
            print(f"{heading}\n" * bool(others) + draw.timeline_text(timeline, width=width, column=column))
    return 0
