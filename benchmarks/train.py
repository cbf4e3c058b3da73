"""Torch's attention against ours, both in our engine, and what takes the time of a step.

Two processes of one thread each, 2 micro-batches of one sequence of 8192 tokens in 8 segments, fp32 and bf16 by
autocast. Models: that of the other benchmarks (hidden 256, 4 blocks, heads of 64, vocabulary 1024), and that which
examples/train_gpt.py trains. Each pair of steps runs A B, the next B A; a pair counts only while other processes use
less than 8 % of a core. Schedules are compared by `pipeline.py`.

    python benchmarks/train.py
    python benchmarks/train.py --model example --pairs 15 --only bfloat16
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_attention
from arms import Arm, Case, OurArm, Spec, timed
from common import FOREIGN_LIMIT, KEPT_HEAP, ForeignLoad, Pairs, header, in_turn, look_at_rates, spawn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import model as example


@dataclass(frozen=True)
class ExampleCase(Case):
    """The model of examples/train_gpt.py, in the shape that it has there unless told otherwise."""

    hidden: int = 128
    blocks: int = 5
    vocab: int = 1536

    def stage(self, index: int, num_stages: int, attention: str, *, head: bool = True) -> Any:
        forms: dict[int, torch_attention.InSegments] = {}  # by layer

        def attend(*qkv: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
            return forms.setdefault(int(layer), torch_attention.InSegments(attention))(*qkv)

        stage = example.build_stage(
            example.Config(vocab=self.vocab), index, num_stages, head=head,
            **({} if attention == "ours" else {"attend": attend}),
        )  # fmt: skip
        stage.share_rows = lambda tokens: None  # every micro-batch has rows of its own
        return stage


MODELS = {"benchmark": Case, "example": ExampleCase}


def compare(pairs: int, a: Arm, b: Arm, limit: float = FOREIGN_LIMIT) -> Pairs:
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    for arm in (a, b, a, b):
        timed(arm)
    result, load = Pairs(), ForeignLoad(pids)
    while len(result.a) < pairs and result.discarded < 2 * pairs:
        load.start()
        times = in_turn(partial(timed, a), partial(timed, b), flip=len(result.a) % 2 == 1)
        counted = [load.cores() < limit]
        dist.broadcast_object_list(counted, src=0)
        result.add(*times, counted[0])
    return result


def measure_attention(rank: int, model: str, length: int, pairs: int, only: str, limit: float) -> None:
    """One engine and order under torch's attention, in the form that is fastest here, and under ours."""
    case, k = MODELS[model](length, 2), 8
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{model} S{case.length} M{case.microbatches} k{k} {str(dtype).removeprefix('torch.')}"
        if only not in name:
            continue
        arms = {"ours": OurArm(case, Spec("seq1f1b", "ours", k), rank, dtype=dtype)}
        for form in torch_attention.FORMS:
            arms[form] = OurArm(case, Spec("seq1f1b", "torch", k), rank, form=form, dtype=dtype)
        losses = {a: arm.step() for a, arm in arms.items()}
        for a, loss in losses.items():
            if loss is not None and not abs(loss - losses["ours"]) <= 1e-3 * abs(loss):
                raise RuntimeError(f"{name}: loss {loss} with attention by {a}, {losses['ours']} with ours")
        seconds = {a: timed(arm) for a, arm in arms.items()}
        fastest = [min(torch_attention.FORMS, key=lambda a: seconds[a])]
        dist.broadcast_object_list(fastest, src=0)
        if rank == 0:
            print(f"{name}, seconds of a step: {', '.join(f'{a} {seconds[a]:.2f}' for a in arms)}", flush=True)
        result = compare(pairs, arms[fastest[0]], arms["ours"], limit)
        if rank == 0:
            theirs, ours = (case.tokens / statistics.median(x) if x else math.nan for x in (result.a, result.b))
            print(f"{result.describe(f'{name}, {fastest[0]} against ours')}; {theirs:.0f} against {ours:.0f} tokens/s")
        for name_of_arm, arm in arms.items():
            check_attention(name_of_arm, arm)
        texts = ["", ""]
        dist.all_gather_object(texts, shares(arms["ours"], case.tokens, dtype))
        if rank == 0:
            print("\n".join(f"{name}, rank {r}: {text}" for r, text in enumerate(texts)), flush=True)


def check_attention(name: str, arm: OurArm) -> None:
    """Raises RuntimeError unless the last step ran the attention that the arm is named after."""
    calls = [stage.attention_layers for stage in arm.engine.report().stages]  # of `causal_attention`
    if (name == "ours") != all(calls):
        raise RuntimeError(f"the arm {name!r} runs other attention")


def shares(arm: OurArm, tokens: int, dtype: torch.dtype) -> str:
    """What takes the time of the units in a step, and how fast the linear layers are."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        arm.step()
    busy = arm.engine.report().busy
    seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profile.key_averages()}
    linear = sum(seconds.get(f"aten::{op}", 0.0) for op in ("mm", "addmm"))
    attention = sum(s for op, s in seconds.items() if op.startswith("seq1f1b::segment_attention"))
    layers = [m for module in arm.modules for m in module.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(m.weight.numel() for m in layers)
    rate = 6 * weights * tokens / linear  # 2 FLOPs in each of 3 products
    fma, bf16 = map(statistics.median, zip(*look_at_rates(), strict=True))
    peak = fma if dtype == torch.float32 else max(fma, bf16)
    return (
        f"units {busy:.2f} s: linear layers {linear / busy:.0%} ({rate / 1e9:.0f} GF/s, {rate / peak:.2f} of peak), "
        f"attention {attention / busy:.0%}, the rest {1 - (linear + attention) / busy:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="benchmark")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="dtypes whose name holds this")
    parser.add_argument(
        "--foreign", type=float, default=FOREIGN_LIMIT, help="cores that others may use in a step that counts; inf: any"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("Torch's attention and ours in training steps, two processes of one thread"))
    os.environ |= KEPT_HEAP
    given = (options.model, options.length, options.pairs, options.only, options.foreign)
    spawn(2, measure_attention, *given)


if __name__ == "__main__":
    main()
