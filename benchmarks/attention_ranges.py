"""What do several ranges of keys cost, beside one of the same length?

    python benchmarks/attention_ranges.py [--rounds 41]

The kernels alone, one thread: a segment of 256 tokens at the end of 4096 keys, whose rows lie in one piece, or in
ranges in a random order with gaps between them. dK and dV of all keys are added to, as in the backward of a chain. All
arms take their turn in each round, in an order that moves on, and are timed by CPU time. "x" is the median over the
rounds of the time by that of one piece in the same round, with its 95 % interval; "+-" is half the range between the
quartiles by the median. Results are compared with one piece's, to the bit, before they are timed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from attention import keep_memory
from attention_kernel import Call, Memory, Ranges
from common import Pairs, header

from seq1f1b import _C

HEADS, SEGMENT = 8, 256
LENGTHS = (512, 256, 64, 16)  # of ranges; below 256 the last one is longer, for the segment lies in one
WANTED = 1.05  # from 512 keys a range on
WARM = 3  # rounds that do not count


def ranges_of(length: int, tokens: int, segment: int = SEGMENT) -> Ranges:
    """Ranges of so many keys, and the segment's own in the last one, in a random order of rows."""
    begins = [*range(0, tokens - max(length, segment), length), tokens - max(length, segment)]
    ends, draw = [*begins[1:], tokens], random.Random(length)
    ranges, row = [], 0
    for i in draw.sample(range(len(begins)), len(begins)):
        row += draw.randint(1, 9)
        ranges.append((begins[i], ends[i], row))
        row += ends[i] - begins[i]
    return sorted(ranges)


def call_of(dtype: torch.dtype, dim: int, tokens: int) -> Call:
    generator = torch.Generator().manual_seed(0)
    q, dout, k, v = (
        torch.randn(1, HEADS, n, dim, generator=generator).to(dtype) for n in (SEGMENT, SEGMENT, tokens, tokens)
    )
    return Call(q, k, v, dout, kept=tokens)


def seconds(memory: Memory) -> tuple[float, float]:
    start = time.thread_time()
    memory.forward()
    middle = time.thread_time()
    memory.backward()
    return middle - start, time.thread_time() - middle


def spread(times: list[float]) -> float:
    low, middle, high = statistics.quantiles(times, n=4)
    return 50 * (high - low) / middle


def measure(dtype: torch.dtype, dim: int, tokens: int, rounds: int) -> bool:
    """Prints a line per pass and length. Returns whether ranges of 512 keys are within what is wanted."""
    call = call_of(dtype, dim, tokens)
    arms = [Memory(call), *(Memory(call, ranges_of(length, tokens)) for length in LENGTHS)]
    for memory in arms:
        seconds(memory)
    one, *others = ([*memory.results().tensors()] for memory in arms)
    if not all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True)):
        sys.exit("results differ")
    times: list[list[tuple[float, float]]] = [[] for _ in arms]
    for turn in range(rounds + WARM):
        for i in range(len(arms)):
            i = (i + turn) % len(arms)
            times[i].append(seconds(arms[i]))
    held = True
    for which, name in enumerate(("forward", "backward")):
        piece, *of_ranges = [[t[which] for t in arm[WARM:]] for arm in times]
        start = f"{str(dtype).removeprefix('torch.'):8} {dim:4} {name:8}"
        print(f"{start} | one piece       {1000 * statistics.median(piece):8.2f} {spread(piece):4.1f}", flush=True)
        for length, taken in zip(LENGTHS, of_ranges, strict=True):
            ratio, low, high = Pairs(taken, piece).ratio()
            verdict = "" if length < 512 else "  ok" if ratio <= WANTED else "  FAILED"
            held &= ratio <= WANTED or length < 512
            print(
                f"{start} | {len(ranges_of(length, tokens)):4} of {length:4}    {1000 * statistics.median(taken):8.2f} "
                f"{spread(taken):4.1f}   x {ratio:.3f} [{low:.3f}, {high:.3f}]{verdict}",
                flush=True,
            )
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="keys (%(default)s)")
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    print(header(f"Attention of {SEGMENT} tokens at the end of {options.tokens} keys in ranges, {HEADS} heads"))
    print(f"# attention kernels: {_C.attention_isa()}")
    print("dtype       d pass     | ranges                ms  +-%   by one piece")
    given = [
        (dtype, dim, options.tokens, options.rounds) for dtype in (torch.float32, torch.bfloat16) for dim in (64, 128)
    ]
    held = [measure(*each) for each in given]
    print(f"# ranges of 512 keys within {WANTED} of one piece: {'all' if all(held) else 'not all'}")


if __name__ == "__main__":
    main()
