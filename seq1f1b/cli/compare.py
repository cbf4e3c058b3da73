"""``seq1f1b compare``."""

from __future__ import annotations

import argparse
from typing import Any

from seq1f1b.cli import workload
from seq1f1b.cli.values import add_options, read_cap
from seq1f1b.planning.compare import compare


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", nargs="*", help="names of schedules (default: all)")
    workload.add_order_options(command)
    cap = "leave out schedules that hold more on a rank: 4 (micro-batches of activations), or with --model 4GiB"
    add_options(command, {"--cap": (read_cap, {}, cap), "--json": (bool, False, "print JSON")})


def run(options: argparse.Namespace) -> int:
    workload.check_costs(options)
    segments, given = workload.wanted_segments(options), dict[str, Any]()
    if options.model is None:
        given = {name: getattr(options, name) for name in workload.SECONDS}
    else:
        model, hardware, layout = workload.read_workload(options, options.inside)
        given = {"model": model, "hardware": hardware, "layout": layout, "seq_len": workload.tokens_of(options)}
    if (cap := options.cap.get("cap_microbatches", 0)) > options.microbatches:
        raise ValueError(f"--cap {cap:g} is in micro-batches, of which a step has {options.microbatches}: {cap:g}GiB?")
    workload.check_size("compare", options, segments, 2 if options.stages is None else options.stages)
    table = compare(
        options.schedule,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        num_segments=segments,
        stages_per_rank=options.stages,
        segment_sizes=options.sizes,
        **options.cap,
        **given,
    )
    print(table.to_json() + "\n" if options.json else table.to_text(), end="")
    return 0
