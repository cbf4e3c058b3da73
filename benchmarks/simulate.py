"""Units per second of the simulator, on one core, with random costs in every run.

    python benchmarks/simulate.py [--runs 15]

P = 64, M = 512, k = 16 of seq1f1b: 1048576 units, checked and lowered once, which has its own row. Every run has new
random costs per (pass, stage, segment), transfers with latency and bandwidth, and bytes of every kind of memory; it is
timed as a user calls it, `Schedule.simulate`, in CPU seconds of its one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import header

from seq1f1b import build_schedule
from seq1f1b.schedule import StepMemory

COUNTS = {"num_ranks": 64, "num_microbatches": 512, "num_segments": 16}
WARM_UP = 3


def arguments(rng: random.Random, P: int, k: int) -> dict[str, object]:
    """Random costs, transfers and bytes of everything."""

    def random_table(scale: float) -> list[list[float]]:
        return [[scale * (0.5 + rng.random()) for _ in range(k)] for _ in range(P)]

    return {
        "forward": random_table(1.0),
        "backward": random_table(2.0),
        "transfer": 0.1 * rng.random(),
        "bandwidth": 1e9,
        "message_bytes": [rng.randrange(10**8) for _ in range(k)],
        "memory": StepMemory(
            activations=[[rng.randrange(10**9) for _ in range(k)] for _ in range(P)], kv=10**8, kv_gradients=10**8
        ),
    }


def num_units(counts: dict[str, int]) -> int:
    return 2 * counts["num_ranks"] * counts["num_microbatches"] * counts["num_segments"]


def row(name: str, units: int, seconds: list[float]) -> str:
    rates = sorted(units / s / 1e6 for s in seconds)
    return (
        f"{name:<34}{units:>11}{statistics.median(seconds):>9.3f}{statistics.median(rates):>10.1f}"
        f"  {rates[0]:.1f}..{rates[-1]:.1f}, {len(seconds)} runs"
    )


def measure(runs: int) -> None:
    rng = random.Random(0)
    units = num_units(COUNTS)
    begin = time.process_time()
    schedule = build_schedule("seq1f1b", **COUNTS)
    built = time.process_time()
    schedule.simulate()
    print(row("build", units, [built - begin]))
    print(row("check, lower, first simulation", units, [time.process_time() - built]))
    for name, more in (
        ("random costs, transfers, bytes", {}),
        ("the same with jitter", {"jitter": 0.1, "transfer_jitter": 0.1}),
    ):
        seconds = []
        for run in range(WARM_UP + runs):
            given = arguments(rng, COUNTS["num_ranks"], COUNTS["num_segments"]) | more
            begin = time.process_time()
            schedule.simulate(**given, seed=run)
            if run >= WARM_UP:
                seconds.append(time.process_time() - begin)
        print(row(name, units, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    print(header("Simulator: median CPU seconds of a run, millions of units per second (lowest..highest)"))
    print(f"{'what':<34}{'units':>11}{'s':>9}{'10^6/s':>10}", flush=True)
    measure(options.runs)


if __name__ == "__main__":
    main()
