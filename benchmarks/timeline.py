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
import os
import tempfile
import time
from functools import partial
from typing import Any

import torch
from arms import Arm, EngineArm, take_rounds
from common import MIN_COUNTED, Records, header, parser_of, spawn
from decoder import Stage, cross_entropy

import seq1f1b
from seq1f1b.view.draw import timeline_png


def measure(rank: int, options: argparse.Namespace, path: str, records: str) -> None:
    stage = Stage(rank, 2, hidden=256, blocks=4, vocab=256)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (options.microbatches, options.length + 1), generator=generator)

    def arm(**arguments: Any) -> EngineArm:
        engine = seq1f1b.PipelineEngine(
            stage, num_microbatches=options.microbatches, loss_fn=cross_entropy, **arguments
        )
        return EngineArm([stage], engine, (tokens[:, :-1], tokens[:, 1:]))

    equal = arm(num_segments=options.segments)
    for _ in range(3):
        equal.step()
        equal.zero_grad()
    costs = equal.engine.report(gather=True).segment_seconds
    sizes = seq1f1b.partition_sequence(
        options.length, options.segments, strategy="profiled", costs=costs, multiple_of=16
    )
    arms: dict[str, Arm] = {"1F1B": arm(schedule="1f1b")}
    if options.waits:
        arms["1F1B, W in waits"] = arm(schedule=partial(seq1f1b.build_schedule, "1f1b", weights="fill"))
    else:
        name = f"Seq1F1B, {options.segments} segments"
        arms[name] = arm(num_segments=options.segments, segment_sizes=sizes)
    reports: list[Any] = []  # of every step; its number is in the records

    def keep(arm: Any) -> tuple[int]:
        reports.append(arm.engine.report(gather=True))
        return (len(reports) - 1,)

    results = Records(records, options.foreign)
    take_rounds(arms, results, MIN_COUNTED, deadline=time.time() + 60 * options.minutes, also=keep)
    if rank == 0:
        draw({name: [reports[number] for _, number in results.counted(name)[0]] for name in arms}, options, path)


def draw(counted: dict[str, list[Any]], options: argparse.Namespace, path: str) -> None:
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
    first, second = (report.makespan for report in shown.values())
    machine = head.splitlines()[2].removeprefix("# ")
    timeline_png(
        path,
        {f"{name}: {r.makespan:.2f} s, bubble {r.bubble:.0%}": r.timeline_with_waits for name, r in shown.items()},
        title=f"One measured step of 2 ranks, {options.microbatches} micro-batches of {options.length} tokens: "
        f"{'with W in waits it' if options.waits else 'Seq1F1B'} is {first / second:.2f} times as fast\n{machine}",
        width=10.0,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("path", help="PNG file to write")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--segments", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--waits", action="store_true", help="1F1B with W in waits in place of Seq1F1B")
    parser.add_argument("--minutes", type=float, default=3.0, help="give up after so long (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(2, measure, options, os.path.abspath(options.path), f"{folder}/records")


if __name__ == "__main__":
    main()
