"""What it costs a step that a half of its units move to a file and back.

Two processes of one thread, fp32, the model and the plan without a cap of `memory.py`, two micro-batches of 8192
tokens: as planned, and with every other unit moved to a tier in the output folder. Both run in turn, and a step counts
only while other processes use less than 8 % of a core. Before, loss and gradients of both are compared with the model
run whole in float64. The processes keep freed memory as malloc does by itself; those of `memory.py` give it back to the
kernel, and so fetch fresh pages for all that comes back.

    python benchmarks/moves.py                      # about eight minutes; again, it goes on where it was
    python benchmarks/moves.py --quick --output /tmp/try --foreign inf      # whether it runs

Writes moves.jsonl and moves.txt into the output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from pathlib import Path

from arms import Case
from common import show_and_write
from memory import FASTEST, Ours, Results, arguments, measure_profile, measure_rounds, search

TITLE = "What moving a half of a step's units costs"
MOVED = "ours, a half moved"


def show(results: Results) -> None:
    print(results.header())
    profile, pairs = results.profile, results.pairs(MOVED, FASTEST)
    print(f"# {results.case}; a step counts while other processes use less than {results.limit:g} of a core")
    print(f"# a process's tier takes {profile.tier_out / 1e9:.2f} GB/s and gives back {profile.tier_in / 1e9:.2f} GB/s")
    print("\n" + pairs.describe(f"{MOVED}, against {FASTEST}"))


def run(options: argparse.Namespace, results: Results) -> None:
    results.begin(TITLE)
    case, segments = (Case(256, 2, hidden=64), (1, 2, 4)) if options.quick else (Case(8192, 2), (1, 4, 16))
    rounds, deadline = 1 if options.quick else options.rounds, time.time() + 60 * options.minutes
    if not results.of("case"):
        results.add(what="case", fields=dataclasses.asdict(case), cap=0)
    os.environ["OMP_NUM_THREADS"] = "1"
    results.again(bool(results.of("profile")), case.ranks, measure_profile, case, segments, options.output)
    if not results.of("arm"):
        text = search(case, results.profile, None).to_json()
        for arm in (Ours(FASTEST, text), Ours(MOVED, text, moves_half=True)):
            results.add(what="arm", fields=dataclasses.asdict(arm))
    left = results.missing((arm.name for arm in results.arms()), rounds) <= 0 or time.time() > deadline
    results.again(left, case.ranks, measure_rounds, case, rounds, deadline, results.limit, options.output)


def main() -> None:
    options = arguments(__doc__, rounds=16, minutes=math.inf)
    results = Results(f"{options.output}/moves.jsonl", options.foreign)
    run(options, results)
    results.reload()
    show_and_write(lambda: show(results), Path(options.output) / "moves.txt")


if __name__ == "__main__":
    main()
