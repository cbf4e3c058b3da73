"""How much does attention of CUDA tensors ask of the device and the host, beside attention itself?

Counted for one layer and segment, over stand-ins of aten's CUDA-only ops on the CPU, and launches of attention_parts
that do nothing:

    launches  work for the device: attention, launches of attention_parts, and what of torch's ops computes or copies,
              with the copy of keys and values into the cache
    ops       of torch's dispatcher, those that an op calls in turn included, and none of the stand-ins' own
    python    calls of Python functions, none of the stand-ins' own

What a pass cost before it had plans is beside what it costs now: at f917d3a, by the same count. Calls for trees, whose
keys lie in several ranges, are the same functions: two to six calls of Python more than for chains alone, and in
cuDNN's forward five or six more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Counts(NamedTuple):
    launches: int
    ops: int
    python: int


SIZES, WITHOUT_PREFIX, WITH_PREFIX = [8, 8, 8], 0, 1  # neither segment is the first to go backward

# (way, segment, pass): before, now. Efficient has two calls where others have one: two query heads share one of keys.
COUNTS = {
    ("cudnn", WITH_PREFIX, "forward"): (Counts(11, 62, 58), Counts(4, 16, 41)),
    ("cudnn", WITH_PREFIX, "backward"): (Counts(20, 168, 114), Counts(5, 21, 66)),
    ("cudnn", WITHOUT_PREFIX, "forward"): (Counts(3, 29, 52), Counts(2, 4, 27)),
    ("cudnn", WITHOUT_PREFIX, "backward"): (Counts(10, 89, 68), Counts(3, 16, 51)),
    ("flash", WITH_PREFIX, "forward"): (Counts(3, 23, 49), Counts(2, 11, 24)),
    ("flash", WITH_PREFIX, "backward"): (Counts(20, 156, 112), Counts(5, 45, 73)),
    ("flash", WITHOUT_PREFIX, "forward"): (Counts(3, 22, 48), Counts(2, 11, 24)),
    ("flash", WITHOUT_PREFIX, "backward"): (Counts(10, 83, 67), Counts(3, 30, 55)),
    ("window", WITH_PREFIX, "forward"): (Counts(3, 23, 44), Counts(2, 11, 24)),
    ("window", WITH_PREFIX, "backward"): (Counts(21, 168, 104), Counts(7, 75, 62)),
    ("efficient", WITH_PREFIX, "forward"): (Counts(7, 58, 49), Counts(7, 55, 24)),
    ("efficient", WITH_PREFIX, "backward"): (Counts(37, 261, 165), Counts(21, 140, 68)),
}
DTYPES = {"efficient": torch.float32}

STAND_INS = {f"aten::{name}" for name in aten_stand_ins._OPS}


class Counter:
    """Counts within one call of one of the package's ops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[str] = []
        self.is_ours = False
        monkeypatch.setattr(
            attention_parts, "_library", lambda what, dtype, *_: object() if dtype.itemsize == 2 else None
        )
        monkeypatch.setattr(_C, "cuda_attention_parts", lambda library, what, *_: self.launched.append(what) or True)
        for name, kernel in cuda_attention.KERNELS.items():
            monkeypatch.setitem(cuda_attention.KERNELS, name, self.marked(name, kernel, True))
        for name, stand_in in aten_stand_ins._OPS.items():
            monkeypatch.setitem(aten_stand_ins._OPS, name, self.marked(name, stand_in, False))

    def marked(self, name: str, function: Callable[..., Any], is_ours: bool) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            before, self.is_ours = self.is_ours, is_ours
            try:
                return function(*arguments, **options)
            finally:
                self.is_ours = before

        run.__name__ = name
        return run

    def counts(self, op: str, run: Callable[[], None], again: Callable[[], None]) -> Counts:
        """Launches and ops are those of ``run``, calls in Python those of ``again``, which does the same."""
        self.launched.clear()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        launched, calls = len(self.launched), 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += self.is_ours and event == "call"

        sys.setprofile(count)
        try:
            again()
        finally:
            sys.setprofile(None)
        found = [event for event in profiled.events() if is_within(event, op)]
        return Counts(launched + sum(is_launch(event) for event in found), len(found), calls)


def is_within(event: Any, op: str) -> bool:
    names = [each.name for each in ancestors(event)]
    return f"seq1f1b::{op}" in names and not STAND_INS.intersection(names[1:])


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    counter = Counter(monkeypatch)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(cuda_attention, "PLAN_FLOPS", 0.0)
    with cuda_kernels_on_the_cpu():
        yield counter


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


@pytest.mark.parametrize("way, segment", sorted({(way, segment) for way, segment, _ in COUNTS}))
def test_counts(way: str, segment: int, counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda device: way == "cudnn")
    options = {"window": 6} if way == "window" else {}
    runs = [Run(DTYPES.get(way, torch.bfloat16), options) for _ in range(3)]
    runs[0].forward(len(SIZES))
    runs[0].backward(0)  # from here on all plans are known
    found = {}
    for run in runs[1:]:
        run.forward(segment)
    found["forward"] = counter.counts(
        "segment_attention", *[lambda run=run: run.forward(segment + 1) for run in runs[1:]]
    )
    for run in runs[1:]:
        run.forward(len(SIZES))
        run.backward(segment + 1)
    found["backward"] = counter.counts(
        "segment_attention_backward", *[lambda run=run: run.backward(segment) for run in runs[1:]]
    )
    for name, counts in found.items():
        now = COUNTS[way, segment, name][1]
        assert counts.launches == now.launches, (name, counts)
        assert counts.ops <= now.ops and counts.python <= now.python, (name, counts)


def test_what_is_asked_of_device_and_host_is_half_of_what_it_was() -> None:
    """Over a prefix, by cuDNN. Forward: keys and values into the cache, two attention ops, merged. Backward: two ops,
    what each adds to dK and dV, and dQ."""
    assert COUNTS["cudnn", WITH_PREFIX, "forward"][1].launches == 1 + 2 + 1
    assert COUNTS["cudnn", WITH_PREFIX, "backward"][1].launches == 2 + 2 + 1
    for way in ("cudnn", "flash"):
        for segment in (WITH_PREFIX, WITHOUT_PREFIX):
            before, now = ([COUNTS[way, segment, name][which] for name in ("forward", "backward")] for which in (0, 1))
            assert 2 * sum(counts.ops for counts in now) <= sum(counts.ops for counts in before)
