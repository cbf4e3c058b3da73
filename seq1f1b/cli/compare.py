"""``seq1f1b compare``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import seq1f1b
from seq1f1b.cli import workload
from seq1f1b.cli.values import add_options, read_bytes
from seq1f1b.planning.compare import compare


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("schedule", nargs="*", help="names of schedules (default: all)")
    cap = "leave out schedules that hold more on a rank: 4 (micro-batches of activations), or with --model 4GiB"
    options = {
        "--bandwidth BYTES": (read_bytes, None, "bytes per second from one stage to the next"),
        "--token-bytes BYTES": (read_bytes, None, "activations that a rank keeps for a token"),
        "--message-bytes BYTES": (read_bytes, None, "bytes of a token between two stages"),
        "--cap": (str, None, cap),
    }
    add_options(command, options)
    workload.add_order_options(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    workload.check_costs(options)
    sizes, given = options.sizes, dict[str, Any]()
    segments = workload.wanted_segments(options)
    if options.model is not None:
        model, hardware, layout = workload.read_workload(options)
        layout = replace(layout, inside=options.inside)
        given = {"model": model, "hardware": hardware, "layout": layout, "seq_len": workload.tokens_of(options)}
    elif sizes is None and options.seq is not None:
        sizes = seq1f1b.partition_sequence(options.seq, segments, strategy="even")
    given |= {name: getattr(options, name) for name in ("bandwidth", "token_bytes", "message_bytes")}
    cap = options.cap
    in_bytes = cap is not None and cap.endswith("B")
    most = None if cap is None or in_bytes else read_microbatches(cap)
    if most is not None and most > options.microbatches:
        raise ValueError(f"--cap {cap} is in micro-batches, of which a step has {options.microbatches}: {cap}GiB?")
    workload.check_size("compare", options, segments, 2 if options.stages is None else options.stages)
    table = compare(
        options.schedule,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        num_segments=segments,
        stages_per_rank=options.stages,
        **{name: value for name in workload.SECONDS if (value := getattr(options, name)) is not None},
        **given,
        segment_sizes=sizes,
        cap_microbatches=most,
        cap_bytes=read_bytes(cap) if in_bytes else None,
    )
    print(table.to_json() + "\n" if options.json else table.to_text(), end="")
    return 0


def read_microbatches(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--cap {text}: a cap is written 4 (micro-batches) or 4GiB") from None
