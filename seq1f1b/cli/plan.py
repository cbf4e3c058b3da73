"""``seq1f1b plan``."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from seq1f1b.cli.values import add_options, read_bytes, read_counts, read_lengths, read_names, read_sizes, read_tokens
from seq1f1b.cli.workload import add_model_options, read_workload
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import OPTIMIZERS
from seq1f1b.planning.result import GIB
from seq1f1b.planning.search import VOCABULARIES, memory_cap, search_plans
from seq1f1b.table import rounded, table_text

_ARGUMENTS = {"seq": "seq_len", "ranks": "num_ranks", "microbatches": "num_microbatches", "schedules": "names"}
_ARGUMENTS |= {name: name for name in ("memory", "segments", "inside", "remedies", "vocabulary", "best")}
"""Options that go to ``search_plans`` as they are, and its names for them."""


def add(command: argparse.ArgumentParser) -> None:
    add_model_options(command, required=True)
    lengths = (
        "in place of --seq: how many sequences have N tokens; or a file with lines 'N COUNT', or 'N' for each sequence"
    )
    prompt = "in place of --seq, with --responses: tokens of a prompt; compares a step of trees with a step of rows"
    remedies = "ways to make an order fit, unit by unit: recompute, offload (default: recompute)"
    vocabulary = "embedding and head in the first and the last stage, or over the ranks; any: try both (default: any)"
    memory = "most memory of a device, as 68GiB or 24e9 (default: 85 %% of the device's memory)"
    options = {
        "--seq TOKENS": (read_tokens, None, "tokens of a micro-batch, which is one sequence: 131072 or 128k"),
        "--lengths N:COUNT,...|FILE": (str, None, lengths),
        "--prompt TOKENS": (read_tokens, None, prompt),
        "--responses NxTOKENS": (read_sizes, None, "responses to each prompt, and their tokens: 8x256 or 4x256,4x1024"),
        "--ranks P": (int, ..., "pipeline ranks"),
        "--microbatches M": (int, ..., "micro-batches, or prompts, of a step"),
        "--memory BYTES": (read_bytes, None, memory),
        "--schedules A,B": (read_names, None, "schedules to try (default: all; auto for the best of them)"),
        "--segments K,K": (read_counts, None, "numbers of segments to try (default: as many as help)"),
        "--stages V,V": (read_counts, None, "stages per rank to try (default: 1,2,4)"),
        "--inside A,B": (read_names, None, "recomputation inside of blocks to try (default: none,ffn,full)"),
        "--remedies A,B": (read_names, ["recompute"], remedies),
        "--vocabulary": (VOCABULARIES, "any", vocabulary),
        "--optimizer": (tuple(OPTIMIZERS), "adamw", "the optimizer, for the bytes of its state (default: adamw)"),
        "--no-optimizer-sync": (bool, False, "a rank begins the next step without waiting for the others"),
        "--best N": (int, 5, "plans to print (default: 5)"),
        "--verbose": (bool, False, "say why each schedule is left out"),
        "--json": (bool, False, "print the search as JSON"),
        "--output FILE": (str, None, "write the best plan for PipelineEngine(schedule=FILE)"),
    }
    add_options(command, options)


def run(options: argparse.Namespace) -> int:
    if options.prompt is not None or options.responses is not None:
        return _run_trees(options)
    if (options.seq is None) == (options.lengths is None):
        raise ValueError("plan needs --seq, --lengths (sequences that differ) or --prompt (responses that share one)")
    model, hardware, layout = read_workload(options)
    hardware = hardware.with_optimizer(options.optimizer)
    shows = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        print(f"\r{done / total:4.0%} of the search\033[K", end="", file=sys.stderr, flush=True)

    try:
        found = search_plans(
            model,
            hardware,
            **{parameter: getattr(options, name) for name, parameter in _ARGUMENTS.items()},
            lengths=None if options.lengths is None else read_lengths(options.lengths),
            layout=layout,
            optimizer_sync=not options.no_optimizer_sync,
            stages_per_rank=options.stages or [1, 2, 4],
            progress=show if shows else None,
        )
    finally:
        print("\r\033[K" * shows, end="", file=sys.stderr, flush=True)
    if options.output:
        found.plans[0].save(options.output)
    how: dict[str, Any] = {"verbose": options.verbose, "file": options.output or "FILE"}
    print(found.to_json() if options.json else found.to_text(options.model, **how))
    return 0


_OF_SEQUENCES = ("seq", "lengths", "segments", "documents", "no_optimizer_sync", "verbose", "output")
_MOST_ROWS = 20_000


def _run_trees(options: argparse.Namespace) -> int:
    """Prints the seconds, units and memory of a step of trees, and of a step of equivalent rows without sharing."""
    from seq1f1b.planning.step_plan import plan_step  # here, so that plans of sequences need no torch
    from seq1f1b.planning.step_rows import TreeShape

    _check(options)
    model, hardware, layout = read_workload(options, "none" if options.inside is None else options.inside[0])
    hardware = hardware.with_optimizer(options.optimizer)
    tree = TreeShape.of_prompt(options.prompt, options.responses)
    rows = tree.paths * options.microbatches
    counts = {"num_ranks": options.ranks, "stages_per_rank": (options.stages or [1])[0], "seq_len": max(rows)}
    cost = CostModel.balanced(model, hardware, layout=layout, **counts)
    given: dict[str, Any] = {"memory": memory_cap(hardware, options.memory), "remedies": options.remedies}
    given |= {"schedule": options.schedules} if options.schedules else {}
    plan = plan_step([tree] * options.microbatches, cost, **given)
    found: dict[str, Any] = {
        "prompts": options.microbatches,
        "tree_tokens": tree.tokens * options.microbatches,
        "row_tokens": sum(rows),
        "tree_token_ratio": sum(tree.paths) / tree.tokens,
        "memory": given["memory"],
        "segment_sizes": plan.segment_sizes[0],
        "trees": _figures(plan),
    }
    try:
        found["rows"] = _figures(plan_step(rows, cost, **given))
        found["speedup"] = found["rows"]["seconds"] / plan.seconds
        gain = f"trees are {rounded(found['speedup'])} times as fast as rows"
    except ValueError as error:
        found["rows"] = {"refused": str(error)}
        gain = f"rows: {error}"
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    table = [["", "step s", "units", "siblings", "again", "GiB"]]
    for name in ("trees", "rows") if "speedup" in found else ("trees",):
        own = found[name]
        counts_of = (str(own[count]) for count in ("units", "siblings", "remedied"))
        table.append([name, rounded(own["seconds"]), *counts_of, f"{max(own['rank_bytes']) / GIB:.1f}"])
    print(
        f"{options.model}, P {options.ranks} on {hardware.name}, {options.microbatches} prompts, "
        f"{found['row_tokens']:,} tokens in rows, {found['tree_tokens']:,} in trees: "
        f"{found['tree_token_ratio']:.2f} times fewer\ncap {found['memory'] / GIB:.1f} GiB\n\n{table_text(table)}"
        "units of a stage; siblings: answers in one of them, at most; again: units of all stages\n"
        f"      that run twice or move; GiB of the fullest rank; seconds without the optimizer\n\n{gain}"
    )
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.responses is None or options.prompt is None:
        raise ValueError("--prompt and --responses go together, as --prompt 2048 --responses 8x256")
    unused = [name for name in _OF_SEQUENCES if getattr(options, name)]
    unused += ["vocabulary"] * (options.vocabulary == "ranks")
    unused += ["context"] * (options.context > 1)  # context-parallel ranks share the tokens of a segment
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')} is for steps of sequences: leave it out with --prompt")
    for name in ("stages", "inside"):
        if len(getattr(options, name) or [1]) > 1:
            raise ValueError(f"--{name} names several values: give one with --prompt")
    for name in ("prompt", "microbatches", "ranks"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} is {getattr(options, name)}, must be at least 1")
    if options.microbatches * len(options.responses) > _MOST_ROWS:
        raise ValueError(f"a step of more than {_MOST_ROWS} responses takes long to plan: ask for a part of it")


def _figures(plan: Any) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "units": sum(map(len, plan.segment_sizes)),  # of a stage; siblings: most leaves in one unit
        "siblings": max(len(size) if isinstance(size, tuple) else 1 for row in plan.segment_sizes for size in row),
        "remedied": plan.remedied,
        "rank_bytes": [rank.total for rank in plan.ranks],
    }
