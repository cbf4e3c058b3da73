"""``seq1f1b simulate``."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from seq1f1b import Schedule, Simulation
from seq1f1b.cli import workload
from seq1f1b.cli.values import add_options
from seq1f1b.table import rounded, table_text


def add(command: argparse.ArgumentParser) -> None:
    options = {
        "--steps N": (int, 1, "steps in a row, for the time from step to step (default: 1)"),
        "--optimizer S": (float, None, "seconds of the optimizer after a step (default: 0, or the model's)"),
        "--sync": (bool, False, "the optimizer waits for all ranks, as clipping by a norm over all ranks does"),
    }
    add_options(command, options)
    workload.add_order_options(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    workload.add_variation_options(command)


def run(options: argparse.Namespace) -> int:
    workload.check_costs(options)
    found = []
    for name in options.schedule:
        schedule = workload.make_schedule(name, options)
        simulation = workload.simulated(schedule, options, steps=options.steps, optimizer_sync=options.sync)
        found.append((name, schedule, simulation))
    if options.json:
        print(json.dumps([simulation_json(*each) for each in found], indent=1))
    else:
        print(table_text(table_rows(found, is_model=options.model is not None)), end="")
        if options.model is not None:
            _, hardware, _ = workload.read_workload(options)
            above = [n for n, _, run in found if run.memory is not None and max(run.memory.total) > hardware.memory]
            if above:
                print(f"\nmore than the {hardware.memory / 2**30:.1f} GiB of {hardware.name}: {', '.join(above)}")
    return 0


def table_rows(found: list[tuple[str, Schedule, Simulation]], *, is_model: bool) -> list[tuple[str, ...]]:
    """Returns the table's head and a row for each schedule; times by a model's rates are good for three digits."""

    def seconds(value: float | None) -> str:
        return "" if value is None else rounded(value) if is_model else f"{value:.3f}"

    unit = " s" if is_model else ""
    rows: list[tuple[str, ...]] = [
        ("schedule", "k", f"makespan{unit}", f"period{unit}", "bubble", "peak units", "= micro-batches", "GiB")
    ]
    shows_segments = any(schedule.num_segments > 1 for _, schedule, _ in found)
    for name, schedule, simulation in found:
        peak = max(simulation.peak)
        rows.append(
            (
                name,
                str(schedule.num_segments) if shows_segments else "",
                seconds(simulation.makespan),
                seconds(simulation.period),
                f"{simulation.bubble_ratio:.1%}",
                str(peak),
                f"{peak / workload.units_per_microbatch(schedule):.2f}",
                "" if simulation.memory is None else f"{max(simulation.memory.total) / 2**30:.1f}",
            )
        )
    return rows


def simulation_json(name: str, schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    """Returns the fields for JSON: times in seconds, memory in bytes, lists with a value per rank."""
    figures = ("makespan", "period", "bubble_ratio", "span", "busy", "wait", "bubble", "peak")
    counts = ("num_ranks", "num_stages", "num_microbatches", "num_segments")
    return {
        "schedule": name,
        **{count: getattr(schedule, count) for count in counts},
        **{figure: getattr(simulation, figure) for figure in figures},
        "peak_microbatches": max(simulation.peak) / workload.units_per_microbatch(schedule),
        "memory": None if simulation.memory is None else asdict(simulation.memory),
    }
