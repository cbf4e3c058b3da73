"""Small cases whose shortest order is known: their rule, their file ``data/exact.jsonl``, one line each.

``test_exact.py`` holds ``auto`` to the file. ``python tests/support/exact_cases.py`` solves the cases anew and prints
the lines of the file (pip install "seq1f1b[exact]"): at most 10 seconds a case, and no order that is longer than that
of ``auto``, so that a case that ends unproved still has that makespan and a bound.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seq1f1b import Costs, Links, ModelShape, Schedule, build_schedule, partition_sequence

FILE = Path(__file__).parents[1] / "data" / "exact.jsonl"
NUM_CASES = 120
MOST_UNITS = 200  # F, I and W of a case: larger ones are seldom proved in seconds
LAYOUTS = (("loop", 1), ("loop", 2), ("v", 2))  # placement, stages per rank
SEVEN_B = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=0)
MEAN_FORWARD = 20  # of a unit, in the cases' unit of time


def costs_of_7b(tokens: int, num_segments: int) -> tuple[list[list[float]], list[int]]:
    """F, I and W of each segment of a 7B model's layers, in floating-point operations, and the segments' tokens.

    Segments of equal forward operations. Per segment W and the linear part of I cost what the linear part of F does;
    attention has no W, and goes back in 5 products where it went forward in 2 (FlashAttention, arXiv:2205.14135).
    """
    sizes = partition_sequence(tokens, num_segments, model=SEVEN_B, multiple_of=128)
    ends = list(itertools.accumulate(sizes))
    per_token = SEVEN_B.flops(0, 1) - 4 * SEVEN_B.hidden * SEVEN_B.layers  # less the one key that token 0 sees
    forward = [SEVEN_B.flops(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    linear = [per_token * size for size in sizes]
    inputs = [part + 2.5 * (whole - part) for part, whole in zip(linear, forward, strict=True)]
    return [forward, inputs, linear], sizes


def _costs(name: str, num_stages: int, k: int) -> tuple[list[list[list[int]]], list[int]]:
    """F, I and W, [stage][segment] in whole numbers, and bytes of each segment."""
    if name in ("equal", "slow"):
        rows = [
            [MEAN_FORWARD * (3 if name == "slow" and s == num_stages // 2 else 2) // 2] * k for s in range(num_stages)
        ]
        return [rows] * 3, [1] * k
    costs, sizes = costs_of_7b({"32k": 32768, "128k": 131072}[name], k)
    scale = MEAN_FORWARD * k / sum(costs[0])
    return [[[max(1, round(scale * cost)) for cost in row]] * num_stages for row in costs], [n // 128 for n in sizes]


def _all_cases() -> Iterator[dict[str, Any]]:
    axes: tuple[tuple[Any, ...], ...] = (
        tuple(range(2, 9)),
        ("1", "2", "P", "2P"),
        (1, 2, 4),
        LAYOUTS,
        ("equal", "32k", "128k", "slow"),
        ("least", "middle", "none"),
        (0, 0.25),
    )
    for P, many, k, (placement, v), costs, cap, transfer in itertools.product(*axes):
        M = {"1": 1, "2": 2, "P": P, "2P": 2 * P}[many]
        is_again = (many == "P" and P == 2) or (M == 1 and cap != "none")  # one micro-batch fits any cap
        if not is_again and 3 * P * v * M * k <= MOST_UNITS:
            yield {
                "num_ranks": P,
                "num_microbatches": M,
                "num_segments": k,
                "stages_per_rank": v,
                "placement": placement,
                "costs": costs,
                "cap": cap,
                "transfer": transfer,
                "many": many,
            }


def chosen_cases() -> list[dict[str, Any]]:
    """NUM_CASES of them, such that each value of each axis comes up as evenly as it can."""
    left = list(_all_cases())
    random.Random(0).shuffle(left)
    seen: Counter[tuple[str, Any]] = Counter()
    chosen = []
    for _ in range(NUM_CASES):
        case = min(left, key=lambda case: sum(seen[item] for item in case.items()))
        left.remove(case)
        seen.update(case.items())
        chosen.append(case)
    for case in chosen:
        del case["many"]
    return sorted(chosen, key=lambda case: list(map(str, case.values())))


def counts_of(case: dict[str, Any]) -> dict[str, int]:
    return {name: case[name] for name in ("num_ranks", "num_microbatches", "num_segments", "stages_per_rank")}


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    """For ``auto`` and for the exact solver: whole numbers."""
    P, M, k, v = counts_of(case).values()
    costs, segment_bytes = _costs(case["costs"], P * v, k)
    least = v * sum(segment_bytes)  # one micro-batch
    options: dict[str, Any] = {"costs": costs, "placement": case["placement"]}
    options["transfer"] = round(case["transfer"] * MEAN_FORWARD)
    if case["cap"] != "none":
        options["unit_bytes"] = [segment_bytes] * (P * v)
        options["cap_bytes"] = least if case["cap"] == "least" else least * (1 + M) // 2
    return options


def makespan(schedule: Schedule, options: dict[str, Any]) -> float:
    """Returns the makespan of a step under these options of ``auto``, with a place for every message."""
    forward, inputs, weight = options.get("costs", (1, 1, 1))
    if isinstance(forward, list):
        backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)]
    else:
        backward = inputs + weight
    places = schedule.num_microbatches * schedule.num_segments
    return (
        schedule.replace(prefetch=places)
        .simulate(Costs(forward, backward, weight, links=Links(latency=options.get("transfer", 0))))
        .makespan
    )


def read_cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def main() -> None:
    from exact_solver import shortest_schedule

    for case in chosen_cases():
        counts, options = counts_of(case), options_of(case)
        most = round(makespan(build_schedule("auto", **counts, options=options), options))
        found = shortest_schedule(**counts, options=options, most=most, seconds=10.0, workers=4)
        print(json.dumps(case | {"makespan": found.makespan, "bound": found.bound, "proved": found.proved}), flush=True)


if __name__ == "__main__":
    main()
