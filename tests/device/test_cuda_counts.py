"""How much does attention of CUDA tensors ask of the device and the host, beside attention itself?

Counted for one layer and segment, over stand-ins of aten's CUDA-only ops on the CPU, and launches of attention_parts
that do nothing:

    launches  work for the device: attention, launches of attention_parts, and what of torch's ops computes or copies,
              with the copy of keys and values into the cache
    ops       of torch's dispatcher, those that an op calls in turn included, and none of the stand-ins' own
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aten_stand_ins
import pytest
import torch
from aten_stand_ins import cuda_kernels_on_the_cpu
from attention_runs import random_qkv
from op_counts import ancestors, is_launch
from simulated_step import SimulatedStep
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from seq1f1b import _C
from seq1f1b.device import attention_parts, cuda_attention
from seq1f1b.ops.attention import causal_attention

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

SIZES, WITHOUT_PREFIX, WITH_PREFIX = [8, 8, 8], 0, 1  # neither segment is the first to go backward

# By way and segment: launches and ops of a forward, and of a backward. Over a prefix by cuDNN, forward: keys and values
# into the cache, two attention ops, merged; backward: two ops, what each adds to dK and dV, and dQ. Efficient has two
# calls where others have one: two query heads share one of keys.
COUNTS = {
    ("cudnn", WITH_PREFIX): ((1 + 2 + 1, 22), (2 + 2 + 1, 29)),
    ("cudnn", WITHOUT_PREFIX): ((2, 4), (3, 16)),
    ("flash", WITH_PREFIX): ((2, 11), (5, 51)),
    ("flash", WITHOUT_PREFIX): ((2, 11), (3, 30)),
    ("window", WITH_PREFIX): ((2, 17), (7, 79)),
    ("efficient", WITH_PREFIX): ((7, 55), (21, 146)),
}
DTYPES = {"efficient": torch.float32}
STAND_INS = {f"aten::{name}" for name in aten_stand_ins._OPS}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    launched: list[str] = []
    monkeypatch.setattr(attention_parts, "_library", lambda what, k, v: object() if k.dtype.itemsize == 2 else None)
    monkeypatch.setattr(_C, "cuda_attention_parts", lambda library, what, *_: launched.append(what) or True)
    monkeypatch.setattr(cuda_attention, "OFTEN", 0)
    with cuda_kernels_on_the_cpu():
        yield launched


class Run:
    """A micro-batch forward, and backward, until one of its segments."""

    def __init__(self, dtype: torch.dtype, options: dict[str, Any]) -> None:
        qkv = [t.requires_grad_() for t in random_qkv(4, 2, head_dim=8, tokens=sum(SIZES), dtype=dtype)]
        self.step, self.options = SimulatedStep(SIZES), options
        parts = [[t[:, :, self.step.slice(s)].transpose(1, 2) for t in qkv] for s in range(len(SIZES))]
        self.qkv = [[t.contiguous().transpose(1, 2) for t in part] for part in parts]
        self.outs: list[Tensor] = []

    def forward(self, until: int) -> None:
        for s in range(len(self.outs), until):
            with self.step.unit("F", 0, s):
                self.outs.append(causal_attention(*self.qkv[s], layer=0, **self.options))

    def backward(self, until: int) -> None:
        for s in reversed(range(until, len(self.outs))):
            with self.step.unit("B", 0, s):
                self.outs.pop().backward(self.qkv[s][0].detach())


@pytest.mark.parametrize("way, segment", COUNTS)
def test_counts(way: str, segment: int, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda device: way == "cudnn")
    run = Run(DTYPES.get(way, torch.bfloat16), {"window": 6} if way == "window" else {})

    def counts(op: str, run_to: Any, last: int) -> tuple[int, int]:
        launched.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run_to(last)
        names = [([each.name for each in ancestors(event)], event) for event in profiled.events()]
        found = [
            event for of, event in names if f"seq1f1b::{op}" in of and not STAND_INS.intersection(of[1:])
        ]  # fmt: skip
        return len(launched) + sum(is_launch(event) for event in found), len(found)

    run.forward(segment)
    forward = counts("segment_attention", run.forward, segment + 1)
    run.forward(len(SIZES))
    run.backward(segment + 1)
    found = forward, counts("segment_attention_backward", run.backward, segment)
    for (launches, ops), (wanted, most) in zip(found, COUNTS[way, segment], strict=True):
        assert launches == wanted and ops <= most, found
