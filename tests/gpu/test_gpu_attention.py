"""Is causal attention in segments, and in trees of them, right on this GPU, forward and backward, against float64?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import path_runs
import pytest
import torch
from attention_runs import errors, formula, gradients, random_qkv, segmented
from gpu_runs import Ranks, poison
from torch import Tensor

from seq1f1b.device import cuda_attention
from seq1f1b.placement import step_on

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HEADS = 8
FLOORS = {FP64: 1e-12, FP32: 1e-5}


@pytest.fixture
def device(ranks: Ranks) -> Iterator[torch.device]:
    from aten_stand_ins import cuda_kernels_on_the_cpu

    with cuda_kernels_on_the_cpu() if ranks.is_rehearsed else nullcontext():
        yield torch.device("cpu") if ranks.is_rehearsed else torch.device("cuda", torch.cuda.current_device())


def options_of(name: str, tokens: int) -> dict[str, Any]:
    documents = torch.arange(tokens).mul(5).div(tokens, rounding_mode="floor").expand(2, -1)
    every: dict[str, dict[str, Any]] = {
        "": {}, "window": {"window": tokens // 5}, "softcap": {"softcap": 20.0}, "scale": {"scale": 0.3},
        "slopes": {"alibi_slopes": 2.0 ** -torch.arange(1, HEADS + 1)}, "documents": {"doc_ids": documents},
        "sinks": {"sinks": torch.linspace(-2.0, 2.0, HEADS)}, "far logits": {},
    }  # fmt: skip
    return every[name]


CASES = [
    *((dtype, 64, 64, 2, "") for dtype in (BF16, FP16, FP32, FP64)),
    *((dtype, 64, 64, 2, name) for dtype in (BF16, FP32) for name in ("window", "softcap", "slopes", "documents")),
    *((BF16, 128, 128, kv_heads, "") for kv_heads in (8, 1)),
    *((BF16, size, size, 2, "") for size in (32, 40, 80, 96, 192, 256, 36)),
    *((BF16, 64, 64, 2, name) for name in ("scale", "sinks", "far logits")),
    *((BF16, *sizes, 2, name) for sizes in ((192, 128), (64, 128)) for name in ("", "documents")),
]


@pytest.mark.parametrize("sizes", [(113, 7, 1, 391), (192, 128, 192)], ids=str)
@pytest.mark.parametrize(("dtype", "head_dim", "v_head_dim", "kv_heads", "name"), CASES, ids=str)
def test_segments_are_right(
    device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int, kv_heads: int, name: str,
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """At first, and by cuDNN once the shape has come often."""
    if device.type == "cpu":  # stand-ins are slow
        sizes = tuple(-(-size // 16) for size in sizes)
    hold(device, dtype, (head_dim, v_head_dim), kv_heads, name, sizes, (math.inf, 0), monkeypatch)


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 2), (64, 8), (128, 2), (128, 8)])
def test_tails_are_right(device: torch.device, head_dim: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys before a segment, and queries, that end anywhere in a tile, where cuDNN has failed others: pytorch#169849
    (queries), cudnn-frontend#628 (64 keys behind whole tiles, far logits), pytorch#193893 (few heads of keys)."""
    prefixes = (64,) if device.type == "cpu" else (64, 192, 704, 1000, 1216, 1280)
    for prefix, tokens, name in itertools.product(prefixes, (128, 192, 261), ("", "far logits")):
        hold(device, BF16, (head_dim, head_dim), kv_heads, name, (prefix, tokens), (0,), monkeypatch)


def hold(
    device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], kv_heads: int, name: str,
    sizes: tuple[int, ...], often: tuple[float, ...], patch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Our error is at most twice that of the formula in the same dtype, whenever cuDNN takes a shape."""
    (head_dim, v_head_dim), tokens = head_dims, sum(sizes)

    def drawn(seed: int, size: int) -> list[Tensor]:
        made = random_qkv(HEADS, kv_heads, tokens=tokens, head_dim=size, v_head_dim=v_head_dim, seed=seed, dtype=dtype)
        return [t.to(device) for t in made]

    (q, k, v), (dout, *_) = drawn(0, head_dim), drawn(1, v_head_dim)
    if name == "far logits":  # all near -100, as exp(-lse) then leaves the range of float32
        q, k = 0.1 * q + 3.5, 0.1 * k - 3.5
    options = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in options_of(name, tokens).items()}
    truth = gradients(lambda *t: formula(*t, **options), *(t.double() for t in (q, k, v, dout)))
    theirs = errors(gradients(lambda *t: formula(*t, **options), q, k, v, dout), truth)
    floor = FLOORS.get(dtype, torch.finfo(dtype).eps / 16)
    for passes in often:
        patch.setattr(cuda_attention, "OFTEN", passes)
        poison(device)
        with step_on(device):
            ours = errors(segmented(sizes, options, [[q, k, v]], [dout])[0], truth)
        assert all(own <= 2 * peer + floor for own, peer in zip(ours, theirs, strict=True)), (sizes, ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((dtype, "") for dtype in (BF16, FP16, FP32, FP64)),
        *((BF16, n) for n in ("window", "softcap", "slopes", "sinks")),
    ],
    ids=str,
)
def test_trees_are_right(device: torch.device, dtype: torch.dtype, name: str) -> None:
    """Unit by unit in random rows, against every path alone: keys lie in several ranges, and siblings share units."""
    longest = 9 if device.type == "cpu" else 150
    for seed in range(3):
        case = path_runs.Case(seed, longest=longest, with_parts=name not in ("window", "slopes"), most_parts=6)
        made = [random_qkv(HEADS, 2, tokens=case.tokens, head_dim=64, seed=s, dtype=dtype) for s in (seed, seed + 100)]
        qkv, (dout, *_) = ([t.to(device) for t in each] for each in made)
        given = options_of(name, longest).items()
        options = {key: t.to(device) if isinstance(t, Tensor) else t for key, t in given}
        truth = path_runs.by_paths(case.step, options, qkv, dout)
        theirs = errors(path_runs.by_paths(case.step, options, qkv, dout, dtype), truth)
        poison(device)
        with step_on(device):
            ours = errors(path_runs.by_units(case.step, case.order, options, qkv, dout), truth)
        floor = FLOORS.get(dtype, torch.finfo(dtype).eps / 16)
        assert all(own <= 2 * peer + floor for own, peer in zip(ours, theirs, strict=True)), (ours, theirs)
