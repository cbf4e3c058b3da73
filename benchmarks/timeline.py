"""The picture of the README: one step of 1F1B above one of Seq1F1B, as measured on two ranks of this machine.

Two processes of one thread train the same model in the engine, with this package's attention in both schedules. Steps
of the two schedules alternate. A step counts only while other processes use less than 8 % of a core (`--limit`); the
ranks wait for such moments. The picture shows, for each schedule, the counted step of median length. Seq1F1B's split
is measured in steps of equal lengths.

    python benchmarks/timeline.py docs/_static/timeline.png
    python benchmarks/timeline.py docs/_static/waits.png --waits --microbatches 4    # 1F1B, and with W in waits
"""

from __future__ import annotations

import argparse
import math
import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import FOREIGN_LIMIT, MIN_COUNTED, ForeignLoad, header, spawn
from decoder import Stage, cross_entropy
from figures import timelines

import seq1f1b


def take_step(engine: seq1f1b.PipelineEngine, tokens: torch.Tensor, load: ForeignLoad) -> tuple[float, Any]:
    """One step. Returns the cores that other processes used meanwhile, and the report of all ranks."""
    dist.barrier()
    load.start()
    engine.step(tokens[:, :-1], target=tokens[:, 1:])
    dist.barrier()
    foreign = load.cores()
    for parameter in engine.parameters():
        parameter.grad = None
    return foreign, engine.report(gather=True)


def agreed(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def quiet(load: ForeignLoad, limit: float) -> bool:
    load.start()
    time.sleep(0.2 if math.isfinite(limit) else 0.0)
    return load.cores() < limit


def measure(rank: int, options: argparse.Namespace, path: str) -> None:
    stage = Stage(rank, 2, hidden=256, blocks=4, vocab=256)
    common = {"num_microbatches": options.microbatches, "loss_fn": cross_entropy}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (options.microbatches, options.length + 1), generator=generator)
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    load = ForeignLoad(pids)

    equal = seq1f1b.PipelineEngine(stage, num_segments=options.segments, **common)
    for _ in range(3):
        _, report = take_step(equal, tokens, load)
    sizes = seq1f1b.partition_sequence(
        options.length, options.segments, strategy="profiled", costs=report.segment_seconds, multiple_of=16
    )
    if options.waits:
        other, arguments = "1F1B, W in waits", {"schedule": partial(seq1f1b.build_schedule, "1f1b", weights="fill")}
    else:
        other = f"Seq1F1B, {options.segments} segments"
        arguments = {"num_segments": options.segments, "segment_sizes": sizes}
    engines = {
        "1F1B": seq1f1b.PipelineEngine(stage, schedule="1f1b", **common),
        other: seq1f1b.PipelineEngine(stage, **common, **arguments),
    }
    counted: dict[str, list[Any]] = {name: [] for name in engines}
    for engine in engines.values():  # their first steps allocate
        take_step(engine, tokens, load)
    busiest = 0.0
    deadline = time.time() + 60 * options.minutes
    while agreed(min(map(len, counted.values())) < MIN_COUNTED and time.time() < deadline):
        for name, engine in engines.items():
            while not agreed(quiet(load, options.limit) or time.time() > deadline):
                pass
            foreign, report = take_step(engine, tokens, load)
            if foreign < options.limit:
                counted[name].append(report)
                busiest = max(busiest, foreign)
    if rank == 0:
        draw(counted, options, busiest, path)


def draw(counted: dict[str, list[Any]], options: argparse.Namespace, busiest: float, path: str) -> None:
    few = {name: len(reports) for name, reports in counted.items() if len(reports) < MIN_COUNTED}
    if few:
        raise SystemExit(f"fewer than {MIN_COUNTED} steps counted, others use the cores: {few}")
    shown = {name: sorted(reports, key=lambda r: r.makespan)[len(reports) // 2] for name, reports in counted.items()}
    head = header("One measured step of each schedule")
    print(head)
    for name, report in shown.items():
        print(
            f"{name}: {report.makespan:.3f} s, bubble {report.bubble:.1%}, {len(counted[name])} steps counted, "
            f"of {', '.join(str(len(rank.timeline)) for rank in report.ranks)} units"
        )
    print(f"other processes used at most {busiest:.2f} of a core")
    first, second = (report.makespan for report in shown.values())
    machine = head.splitlines()[2].removeprefix("# ")
    timelines(
        path,
        {f"{name}: {r.makespan:.2f} s, bubble {r.bubble:.0%}": r.timeline_with_waits for name, r in shown.items()},
        f"One measured step of 2 ranks, {options.microbatches} micro-batches of {options.length} tokens: "
        f"{'with W in waits it' if options.waits else 'Seq1F1B'} is {first / second:.2f} times as fast",
        f"{machine}; during counted steps other processes used at most {busiest:.2f} of a core",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="PNG file to write")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--segments", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--waits", action="store_true", help="1F1B with W in waits in place of Seq1F1B")
    parser.add_argument("--limit", type=float, default=FOREIGN_LIMIT, help="cores that others may use (%(default)s)")
    parser.add_argument("--minutes", type=float, default=3.0, help="give up after so long (%(default)s)")
    options = parser.parse_args()
    spawn(2, measure, options, os.path.abspath(options.path))


if __name__ == "__main__":
    main()
