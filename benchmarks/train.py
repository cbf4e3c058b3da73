"""Torch's attention against ours, both in our engine.

Two processes of one thread each, 2 micro-batches of one sequence of 8192 tokens in 8 segments, fp32 and bf16 by
autocast; the model of the other benchmarks (hidden 256, 4 blocks, heads of 64, vocabulary 1024). Each pair of steps
runs A B, the next B A; a pair counts only while other processes use less than 8 % of a core. Schedules are compared
by `pipeline.py`.

    python benchmarks/train.py
    python benchmarks/train.py --pairs 15 --only bfloat16
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile

import torch
from arms import Arm, Case, OurArm, Spec, take_rounds
from common import KEPT_HEAP, Records, header, parser_of, spawn


def measure_attention(rank: int, length: int, pairs: int, only: str, limit: float, path: str) -> None:
    """One engine and order under torch's attention, in two calls, and under ours."""
    case, k = Case(length, 2), 8
    for dtype in (torch.float32, torch.bfloat16):
        name = f"S{case.length} M{case.microbatches} k{k} {str(dtype).removeprefix('torch.')}"
        if only not in name:
            continue
        arms: dict[str, Arm] = {
            attention: OurArm(case, Spec("seq1f1b", attention, k), rank, dtype=dtype) for attention in ("torch", "ours")
        }
        losses = [arm.step() for arm in arms.values()]
        if losses[0] is not None and not abs(losses[0] - losses[1]) <= 1e-3 * abs(losses[0]):
            raise RuntimeError(f"{name}: losses {losses} with torch's attention and with ours")
        results = Records(path, limit)
        take_rounds(arms, results, pairs, base=lambda arm: "ours", case=name)
        if rank == 0:
            result = results.pairs("torch", "ours", case=name)
            theirs, ours = (case.tokens / statistics.median(x) if x else math.nan for x in (result.a, result.b))
            print(f"{result.describe(f'{name}, two calls against ours')}; {theirs:.0f} against {ours:.0f} tokens/s")
        for attention, arm in arms.items():
            check_attention(attention, arm)


def check_attention(name: str, arm: OurArm) -> None:
    """Raises RuntimeError unless the last step ran the attention that the arm is named after."""
    calls = [stage.attention_layers for stage in arm.engine.report().stages]  # of `causal_attention`
    if (name == "ours") != all(calls):
        raise RuntimeError(f"the arm {name!r} runs other attention")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="dtypes whose name holds this")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("Torch's attention and ours in training steps, two processes of one thread"))
    os.environ |= KEPT_HEAP
    given = (options.length, options.pairs, options.only, options.foreign)
    with tempfile.TemporaryDirectory() as folder:
        spawn(2, measure_attention, *given, f"{folder}/results")


if __name__ == "__main__":
    main()
