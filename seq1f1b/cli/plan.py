"""``seq1f1b plan``."""

from __future__ import annotations

import argparse

from seq1f1b.cli.terminal import progress_bar
from seq1f1b.cli.values import (
    argument,
    read_bytes,
    read_counts,
    read_lengths,
    read_names,
    read_sizes,
    read_tokens,
)
from seq1f1b.cli.workload import add_model_options, read_workload
from seq1f1b.planning.search import VOCABULARIES, search_plans


def add(command: argparse.ArgumentParser) -> None:
    add_model_options(command, required=True)
    command.add_argument(
        "--seq",
        type=argument(read_tokens),
        metavar="TOKENS",
        help="tokens of a micro-batch, which is one sequence: 131072 or 128k",
    )
    command.add_argument(
        "--lengths",
        metavar="N:COUNT,...|FILE",
        help="in place of --seq, for lengths that differ from step to step: how many sequences have N tokens; or a "
        "file with a line 'N COUNT' for each length, or 'N' for each sequence",
    )
    command.add_argument(
        "--prompt",
        type=argument(read_tokens),
        metavar="TOKENS",
        help="in place of --seq, with --responses: what a step of shared prompts takes, as trees and as rows",
    )
    command.add_argument(
        "--responses", type=argument(read_sizes), metavar="NxTOKENS", help="to each prompt: 8x256 or 4x256,4x1024"
    )
    command.add_argument("--ranks", type=int, required=True, metavar="P", help="pipeline ranks")
    command.add_argument(
        "--microbatches", type=int, required=True, metavar="M", help="micro-batches, or prompts, of a step"
    )
    command.add_argument(
        "--memory",
        type=argument(read_bytes),
        metavar="BYTES",
        help="most memory of a device, as 68GiB or 24e9 (default: 85 %% of what it has)",
    )
    command.add_argument(
        "--schedules", type=read_names, metavar="A,B", help="schedules to try (default: all; auto for the best of them)"
    )
    command.add_argument(
        "--segments",
        type=argument(read_counts),
        metavar="K,K",
        help="numbers of segments to try (default: as many as help)",
    )
    command.add_argument(
        "--stages",
        type=argument(read_counts),
        metavar="V,V",
        help="stages per rank to try (default: 1,2,4)",
    )
    command.add_argument(
        "--inside",
        type=read_names,
        metavar="A,B",
        help="recomputation inside of blocks to try (default: none,ffn,full)",
    )
    command.add_argument(
        "--remedies",
        type=read_names,
        metavar="A,B",
        default=["recompute"],
        help="what single units may do so that an order fits: recompute, offload (default: recompute)",
    )
    command.add_argument(
        "--vocabulary",
        choices=VOCABULARIES,
        default="any",
        help="ends: the first and the last stage have embedding and head; ranks: each rank has a part of both; any: "
        "try both (default: any)",
    )
    command.add_argument(
        "--no-optimizer-sync", action="store_true", help="a rank begins the next step without waiting for the others"
    )
    command.add_argument("--best", type=int, default=5, metavar="N", help="plans to print (default: 5)")
    command.add_argument("--verbose", action="store_true", help="say of each schedule why it is left out")
    command.add_argument("--json", action="store_true", help="print the search as JSON")
    command.add_argument("--output", metavar="FILE", help="write the best plan for PipelineEngine(schedule=FILE)")


def run(options: argparse.Namespace) -> int:
    if options.prompt is not None or options.responses is not None:
        from seq1f1b.cli import plan_trees  # needs torch

        return plan_trees.run(options)
    if (options.seq is None) == (options.lengths is None):
        raise ValueError("plan needs --seq, --lengths (sequences that differ) or --prompt (responses that share one)")
    model, hardware, layout = read_workload(options)
    with progress_bar(1.0, "the search") as show:
        found = search_plans(
            model,
            hardware,
            seq_len=options.seq,
            lengths=None if options.lengths is None else read_lengths(options.lengths),
            num_ranks=options.ranks,
            num_microbatches=options.microbatches,
            memory=options.memory,
            layout=layout,
            optimizer_sync=not options.no_optimizer_sync,
            names=options.schedules,
            segments=options.segments,
            stages_per_rank=options.stages or [1, 2, 4],
            inside=options.inside,
            remedies=options.remedies,
            vocabulary=options.vocabulary,
            best=options.best,
            progress=None if show is None else lambda done, total: show(done / total),
        )
    if options.output:
        found.plans[0].save(options.output)
    print(found.to_json() if options.json else found.to_text(options.model, verbose=options.verbose))
    if options.output and not options.json:
        print(f"plan 1 is in {options.output}: seq1f1b.PipelineEngine(stage, schedule={options.output!r}, ...) runs it")
    return 0
