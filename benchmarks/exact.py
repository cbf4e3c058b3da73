"""How far is `auto` from the shortest order there is?

    python exact.py                       the gap over the cases of tests/data/exact.jsonl: some seconds
    python exact.py solve --seconds 10    solves the cases anew and writes that file (pip install "seq1f1b[exact]")

The cases and their rule are in tests/support/exact_cases.py. Solved from the order of `auto`, so that a case that ends
unproved still has that order and a bound; a proof is the solver's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import exact_cases
from common import header

from seq1f1b import Costs, Links, build_schedule

BARS = {"mean gap": 0.02, "worst gap": 0.08, "unproved": 0.1}


def makespan_of_auto(case: dict[str, Any]) -> float:
    schedule, (forward, inputs, weight) = auto_of(case), exact_cases.options_of(case)["costs"]
    backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)]
    places = case["num_microbatches"] * case["num_segments"]
    transfer = exact_cases.options_of(case)["transfer"]
    return (
        schedule.replace(prefetch=places)
        .simulate(Costs(forward, backward, weight, links=Links(latency=transfer)))
        .makespan
    )


def auto_of(case: dict[str, Any]) -> Any:
    return build_schedule("auto", **exact_cases.counts_of(case), options=exact_cases.options_of(case))


def solve(seconds: float, workers: int) -> None:
    from exact_solver import shortest_schedule

    lines = []
    for case in exact_cases.chosen_cases():
        found = shortest_schedule(
            **exact_cases.counts_of(case),
            options=exact_cases.options_of(case),
            start=auto_of(case),
            seconds=seconds,
            workers=workers,
        )
        lines.append(json.dumps(case | {"makespan": found.makespan, "bound": found.bound, "proved": found.proved}))
        print(lines[-1], f"# {found.seconds:.1f} s", flush=True)
    exact_cases.FILE.parent.mkdir(exist_ok=True)
    exact_cases.FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def row(title: str, gaps: Sequence[float]) -> str:
    share = sum(gap < 1e-9 for gap in gaps) / len(gaps)
    return f"{title:24}{len(gaps):8}{100 * statistics.mean(gaps):12.2f}{100 * max(gaps):12.2f}{100 * share:14.0f}"


def report() -> None:
    cases = exact_cases.read_cases()
    print(header("how far auto is from the shortest order there is"))
    begin = time.process_time()
    gaps = [(case, makespan_of_auto(case) / case["makespan"] - 1) for case in cases if case["proved"]]
    print(f"# {time.process_time() - begin:.1f} s for {len(gaps)} orders, one core")
    print(f"{'cases proved optimal':24}{'cases':>8}{'mean gap %':>12}{'worst gap %':>12}{'no gap, % of':>14}")
    for axis in ("costs", "cap", "placement", "transfer", "num_segments"):
        for value in sorted({case[axis] for case, _ in gaps}):
            print(row(f"{axis} {value}", [gap for case, gap in gaps if case[axis] == value]))
    every = [gap for _, gap in gaps]
    print(row("all", every))
    unproved = [case for case in cases if not case["proved"]]
    for case in unproved:
        print("unproved:", json.dumps(case), f"auto {makespan_of_auto(case):g}")
    found = {"mean gap": statistics.mean(every), "worst gap": max(every), "unproved": len(unproved) / len(cases)}
    for name, bar in BARS.items():
        verdict = "reached" if found[name] <= bar else "NOT REACHED"
        print(f"{name} {100 * found[name]:.2f} %, bar {100 * bar:g} %: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("report", "solve"), default="report")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the solver, per case")
    parser.add_argument("--workers", type=int, default=4, help="threads of the solver")
    options = parser.parse_args()
    if options.command == "solve":
        solve(options.seconds, options.workers)
    report()


if __name__ == "__main__":
    main()
