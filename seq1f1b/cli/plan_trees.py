"""``seq1f1b plan --prompt``: a step of prompts with their responses, as trees and as rows."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from seq1f1b.cli.workload import read_workload
from seq1f1b.planning.case import GIB
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.search import memory_cap
from seq1f1b.planning.step_plan import StepPlan, plan_step
from seq1f1b.planning.step_rows import TreeShape
from seq1f1b.table import rounded, table_text

_OF_SEQUENCES = ("seq", "lengths", "segments", "documents", "no_optimizer_sync", "verbose", "output")
_MOST_ROWS = 20_000


def run(options: argparse.Namespace) -> int:
    """Prints what a step of trees takes, beside that of their rows."""
    model, hardware, layout = read_workload(options)
    _check(options)
    tree = TreeShape.of_prompt(options.prompt, options.responses)
    rows = tree.paths * options.microbatches
    cost = CostModel.balanced(
        model,
        hardware,
        num_ranks=options.ranks,
        stages_per_rank=1 if options.stages is None else options.stages[0],
        seq_len=max(rows),
        layout=replace(layout, inside="none" if options.inside is None else options.inside[0]),
    )
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
    except ValueError as error:
        found["rows"] = {"refused": str(error)}
    title = f"{options.model}, P {options.ranks} on {hardware.name}, {options.microbatches} prompts"
    print(json.dumps(found, indent=2) if options.json else _text(title, found))
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.responses is None or options.prompt is None:
        raise ValueError("--prompt and --responses go together, as --prompt 2048 --responses 8x256")
    unused = [name for name in _OF_SEQUENCES if getattr(options, name)]
    unused += ["vocabulary"] if options.vocabulary == "ranks" else []
    unused += ["context"] if options.context > 1 else []  # such ranks share the tokens of a segment
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')} is for steps of sequences: leave it out with --prompt")
    for name in ("stages", "inside"):
        if len(getattr(options, name) or [1]) > 1:
            raise ValueError(f"--{name} names several, with --prompt it must be one")
    for name in [name for name in ("prompt", "microbatches", "ranks") if getattr(options, name) < 1]:
        raise ValueError(f"--{name} is {getattr(options, name)}, must be at least 1")
    if options.microbatches * len(options.responses) > _MOST_ROWS:
        raise ValueError(f"a step of more than {_MOST_ROWS} responses takes long to plan: ask for a part of it")


def _figures(plan: StepPlan) -> dict[str, Any]:
    return {
        "seconds": plan.seconds,
        "units": sum(map(len, plan.segment_sizes)),  # of a stage; siblings: at most in one of them
        "siblings": max(len(size) if isinstance(size, tuple) else 1 for row in plan.segment_sizes for size in row),
        "remedied": plan.remedied,
        "rank_bytes": [rank.total for rank in plan.ranks],
    }


def _text(title: str, found: dict[str, Any]) -> str:
    table = [["", "step s", "units", "siblings", "again", "GiB"]]
    for name in ("trees", "rows"):
        own = found[name]
        if "refused" not in own:
            of_rank = max(own["rank_bytes"]) / GIB
            counts = (str(own[count]) for count in ("units", "siblings", "remedied"))
            table.append([name, rounded(own["seconds"]), *counts, f"{of_rank:.1f}"])
    ratio, refused = found["tree_token_ratio"], found["rows"].get("refused")
    gain = f"rows: {refused}" if refused else f"trees are {rounded(found['speedup'])} times as fast as rows"
    return (
        f"{title}, {found['row_tokens']:,} tokens in rows, {found['tree_tokens']:,} in trees: {ratio:.2f} times fewer\n"
        f"cap {found['memory'] / GIB:.1f} GiB\n\n{table_text(table)}"
        "units of a stage; siblings: answers in one of them, at most; again: units of all stages\n"
        f"      that run twice or move; GiB of the fullest rank; seconds without the optimizer\n\n{gain}"
    )
