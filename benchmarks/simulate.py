"""Units per second of the simulator, on one core, with random costs in every run.

    python benchmarks/simulate.py [--runs 15]

P = 64, M = 512, k = 16 of seq1f1b: 1048576 units, checked and lowered once, which has its own row. Every run has new
random costs per (pass, stage, segment), alone and then with what is optional: transfers with latency and bandwidth,
bytes of every kind of memory, times that vary. It is timed as a user calls it, `Schedule.simulate`, in CPU seconds of
its one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from common import header

from seq1f1b import Costs, Links, Noise, build_schedule
from seq1f1b.schedule import StepMemory

COUNTS = {"num_ranks": 64, "num_microbatches": 512, "num_segments": 16}
WARM_UP = 3


def random_table(rng: random.Random, scale: float) -> list[list[float]]:
    P, k = COUNTS["num_ranks"], COUNTS["num_segments"]
    return [[scale * (0.5 + rng.random()) for _ in range(k)] for _ in range(P)]


def costs(rng: random.Random, links: Links = Links()) -> Costs:
    return Costs(random_table(rng, 1.0), random_table(rng, 2.0), links=links)


def with_links_and_bytes(rng: random.Random) -> dict[str, Any]:
    P, k = COUNTS["num_ranks"], COUNTS["num_segments"]
    links = Links(0.1 * rng.random(), 1e9, message_bytes=[rng.randrange(10**8) for _ in range(k)])
    activations = [[rng.randrange(10**9) for _ in range(k)] for _ in range(P)]
    memory = StepMemory(activations=activations, kv=10**8, kv_gradients=10**8)
    return {"costs": costs(rng, links), "memory": memory}


CASES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "random costs alone": lambda rng: {"costs": costs(rng)},
    "random costs, transfers, bytes": with_links_and_bytes,
    "the same with jitter": lambda rng: with_links_and_bytes(rng) | {"noise": Noise(0.1, 0.1, rng.getrandbits(64))},
}


def row(name: str, units: int, seconds: list[float]) -> str:
    rates = sorted(units / s / 1e6 for s in seconds)
    return (
        f"{name:<34}{units:>11}{statistics.median(seconds):>9.3f}{statistics.median(rates):>10.1f}"
        f"  {rates[0]:.1f}..{rates[-1]:.1f}, {len(seconds)} runs"
    )


def measure(runs: int) -> None:
    rng = random.Random(0)
    units = 2 * COUNTS["num_ranks"] * COUNTS["num_microbatches"] * COUNTS["num_segments"]
    begin = time.process_time()
    schedule = build_schedule("seq1f1b", **COUNTS)
    built = time.process_time()
    schedule.simulate()
    print(row("build", units, [built - begin]))
    print(row("check, lower, first simulation", units, [time.process_time() - built]))
    for name, draw in CASES.items():
        seconds = []
        for run in range(WARM_UP + runs):
            given = draw(rng)
            begin = time.process_time()
            schedule.simulate(**given)
            if run >= WARM_UP:
                seconds.append(time.process_time() - begin)
        print(row(name, units, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="4096 units: whether it runs")
    options = parser.parse_args()
    if options.quick:
        COUNTS.update(num_ranks=8, num_microbatches=16)
    print(header("Simulator: median CPU seconds of a run, millions of units per second (lowest..highest)"))
    print(f"{'what':<34}{'units':>11}{'s':>9}{'10^6/s':>10}", flush=True)
    measure(options.runs)


if __name__ == "__main__":
    main()
