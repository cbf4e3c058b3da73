"""Does a run with a plan stay below the cap that the plan was made for, and take the time that it says?

Two processes of one thread, the model of the training benchmarks, fp32. Its parts are profiled once. Then twelve plans:
2048 to 16384 tokens, two and four micro-batches, each under a cap between what the fastest plan needs and the least
that any needs; units may recompute, and move to a file. Each runs in processes of its own. Memory is the peak of
resident memory of each rank over what is resident before its model is made, weights, cache and receive places included;
libraries have their own memory by then, as another model has run on as many tokens as the longest segment. Gradients
are zeroed in place between steps, as a plan holds them throughout. A plan takes at least three steps and ten seconds:
what is on its way to the file and back at a peak differs from step to step. Time is the median of the steps in which
other processes used less than 8 % of a core. Receive places lie in memory that both of their ranks hold; what of it is
resident is counted once, as the receivers'.

    python benchmarks/caps.py                      # about a quarter of an hour
    python benchmarks/caps.py --lora 8 --ranks 1   # plans of adapters, without a cap; also for two ranks
    python benchmarks/caps.py --quick --output /tmp/try --foreign inf      # whether it runs

Writes caps.jsonl and caps.txt, or with --lora caps-loraR-pN, into the output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import statistics
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist
from arms import Case
from common import ForeignLoad, gathered, show_and_write, spawn, status_bytes
from memory import MACHINE, MIB, WARM_TOKENS, Ours, PlannedArm, Results, arguments, measure_profile, mib, search
from pipeline import peaks_of_steps

from seq1f1b.plan import Plan
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import ProfiledHardware
from seq1f1b.planning.profile import Profile

TITLE = "Plans under caps: peaks of resident memory, and periods"
LENGTHS, MICROBATCHES = (2048, 4096, 8192, 16384), (2, 4)
SHARES = {(length, M): (0.6,) for length in LENGTHS for M in MICROBATCHES}  # of the way from the least to the fastest
SHARES |= {(length, M): (0.6, 0.25) for length in (4096, 8192) for M in MICROBATCHES}
OF_ADAPTERS = {(length, 2): (1.0,) for length in LENGTHS[:-1]}
WITHIN = 0.05
STEPS, LEAST = 3, 2  # steps of each plan behind the first, at the least, and how many have to count
STEP_SECONDS = 10.0  # of them together: what the tier has in flight at a peak differs from step to step


def receive_bytes(case: Case, plan: Plan, profile: Profile) -> list[int]:
    """The bytes that the receive places of each rank take."""
    counts = {"num_ranks": case.ranks, "stages_per_rank": plan.stages_per_rank, "seq_len": case.length}
    cost = CostModel(case.shape, ProfiledHardware.of(profile, MACHINE), **counts, layout=plan.layout)
    return [rank.receive for rank in cost.price(plan.segment_sizes).rank_bytes(plan.build())]


def choose(case: Case, results: Results, share: float) -> tuple[str, Plan]:
    """A plan under a cap so far from the least that is possible to what the fastest needs, and the cap's name."""
    fastest = search(case, results.profile, None)
    try:
        search(case, results.profile, 1 << 20)
    except ValueError as error:
        least = int(float(str(error).split("the least possible is ")[1].split(" GiB")[0]) * 2**30)
    cap = int(least + share * (max(fastest.peak) - least))
    return f"S{case.length} M{case.microbatches} {share:.0%}", search(case, results.profile, cap)


def measure(rank: int, case: Case, name: str, text: str, steps: int, directory: str, path: str) -> None:
    if case.lora:
        importlib.import_module("peft")  # before the peak is looked at: its code is no part of a plan
    load = ForeignLoad(gathered(os.getpid()))
    seconds: list[tuple[float, float]] = []

    class TimedArm(PlannedArm):
        def step(self) -> float | None:
            load.start()
            dist.barrier()
            began = time.perf_counter()
            loss = super().step()
            dist.barrier()
            seconds.append((time.perf_counter() - began, load.cores()))
            return loss

        def zero_grad(self) -> None:
            for module in self.modules:
                module.zero_grad(set_to_none=False)

    warm = max(WARM_TOKENS, *Plan.from_json(text).segment_sizes)
    arm = partial(TimedArm, case, Ours(name, text), rank, directory)
    made, _, total = peaks_of_steps(case, "ours", arm, steps + 1, warm)
    everyone, shared = gathered(total), gathered(status_bytes("RssShmem"))
    if rank == 0:
        report = made.engine.report()
        units = [report.kept_units, report.recomputed_units, report.moved_units]
        Results(path, 0.0).add(what="ran", name=name, total=everyone, shared=shared, steps=seconds[1:], units=units)


def show(results: Results) -> None:
    print(results.header())
    print(f"# {results.case}; a step counts while other processes use less than {results.limit:g} of a core")
    print(
        f"\n{'plan':<15}{'schedule':<20}{'k':>3}{'cap':>7}{'planned MiB':>14}{'measured MiB':>15}{'/ planned':>14}"
        f"{'interval s':>16}{'measured':>9}{'steps':>6}   units of rank 0 kept, recomputed, moved"
    )
    near = below = inside = counted = 0
    ran = results.of("ran")
    for r in ran:
        planned = results.last("plan", name=r["name"])
        assert planned is not None
        plan = Plan.from_json(planned["text"])
        places = planned["receive"]
        totals = [
            total - shared + shared * own / max(1, sum(places))
            for total, shared, own in zip(r["total"], r["shared"], places, strict=True)
        ]
        ratios = [total / peak for total, peak in zip(totals, plan.peak, strict=True)]
        near += max(abs(ratio - 1) for ratio in ratios) <= WITHIN
        below += max(totals) <= plan.cap
        steps = [seconds for seconds, foreign in r["steps"] if foreign < results.limit]
        measured = statistics.median(steps) if len(steps) >= LEAST else None
        if measured is not None:
            counted, inside = counted + 1, inside + (plan.low <= measured <= plan.high)
        print(
            f"{r['name']:<15}{plan.schedule:<20}{plan.num_segments:>3}{plan.cap / MIB:>7.0f}{mib(plan.peak):>14}"
            f"{mib(totals):>15}{', '.join(f'{ratio:.3f}' for ratio in ratios):>14}"
            f"{f'{plan.low:.2f}..{plan.high:.2f}':>16}{'-' if measured is None else f'{measured:.2f}':>9}"
            f"{len(steps):>6}   {', '.join(map(str, r['units']))}"
        )
    print(f"\npeaks of all ranks within {WITHIN:.0%} of the plan's: {near} of {len(ran)}")
    print(f"no rank above the cap: {below} of {len(ran)}")
    print(f"periods in the plan's interval: {inside} of {counted}")


def run(options: argparse.Namespace, results: Results) -> None:
    results.begin(TITLE)
    chosen = OF_ADAPTERS if options.lora else SHARES
    longest = 256 if options.quick else max(length for length, _ in chosen)
    case = Case(longest, 2, ranks=options.ranks, hidden=64 if options.quick else 256, lora=options.lora)
    if not results.of("case"):
        results.add(what="case", fields=dataclasses.asdict(case), cap=0)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # so that freed memory is seen to go
    segments = (1, 2) if options.quick else (8, 32)
    results.again(bool(results.of("profile")), case.ranks, measure_profile, case, segments, options.output)
    wanted = {(longest, 2): (0.6,)} if options.quick else chosen
    for (length, M), shares in wanted.items():
        for share in shares:
            own = dataclasses.replace(case, length=length, microbatches=M)
            name, plan = choose(own, results, share)
            if results.of("ran", name=name):
                continue
            places = receive_bytes(own, plan, results.profile)
            results.add(what="plan", name=name, text=plan.to_json(), receive=places)
            steps = STEPS if options.quick else max(STEPS, math.ceil(STEP_SECONDS / plan.seconds))
            spawn(own.ranks, measure, own, name, plan.to_json(), steps, options.output, results.path)
            results.reload()


def main() -> None:
    options = arguments(__doc__, ranks=2, lora=0)
    name = f"caps-lora{options.lora}-p{options.ranks}" if options.lora else "caps"
    results = Results(str(Path(options.output) / f"{name}.jsonl"), options.foreign)
    run(options, results)
    results.reload()
    show_and_write(lambda: show(results), Path(options.output) / f"{name}.txt")


if __name__ == "__main__":
    main()
