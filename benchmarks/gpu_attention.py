"""The stage of gpu.py that times attention of a segment over its prefix, beside torch's flash op."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu import FLASH_OP, OWN, Case, Machine, Record
from simulated_step import SimulatedStep
from torch import Tensor

import seq1f1b
from seq1f1b import _C
from seq1f1b.device import attention_parts, cuda_attention, kernel_library
from seq1f1b.placement import step_on

CUDNN, FLASH, ELSE = "cuDNN", "flash", "else"
REPEATS = 9
Shape = tuple[int, int, int, int, int]  # heads, kv_heads, head_dim, tokens, and the keys that end with these
SMALL = (2, 1, 64, 64, 128)
HALF_ULP = 2**-7  # of bfloat16: each side rounds its inner products and its result


def use(way: str) -> None:
    """Attention goes by cuDNN from the first call of a shape on, by our kernels, or by neither."""
    kernel_library.preferred = "own" if way == OWN else "library"
    cuda_attention.OFTEN = 0 if way == CUDNN else float("inf")
    cuda_attention._passes.cache_clear()


def ways(machine: Machine) -> list[str]:
    if not machine.is_cuda:
        return [FLASH, CUDNN]
    has_cudnn = cuda_attention._has_cudnn(machine.device, torch.bfloat16, 64, 64)
    return [FLASH, *[CUDNN] * has_cudnn, *[OWN] * bool(kernel_library.operations())]


def drawn(machine: Machine, tokens: int, heads: int, head_dim: int) -> Tensor:
    """As the projections of a model give it: (1, heads, tokens, head_dim), tokens before heads in memory."""
    return torch.randn(1, tokens, heads, head_dim, device=machine.device).to(torch.bfloat16).transpose(1, 2)


class Segment:
    """A segment inside a step: after its prefix, and before a short last one, whose backward comes first, so that dK
    and dV are added up. A window of one key makes the other segments cheap."""

    LAST = 16  # tokens

    def __init__(self, machine: Machine, shape: Shape, documents: int = 0, **options: Any) -> None:
        heads, kv_heads, head_dim, tokens, end = shape
        self.machine, self.options, self.cache = machine, options, _C.kv_cache_create()
        self.sizes = [size for size in (end - tokens, tokens, self.LAST) if size]
        self.own, self.layer = len(self.sizes) - 2, seq1f1b.layer_handle(0)
        torch.manual_seed(0)
        self.dout = drawn(machine, tokens, heads, head_dim)
        self.leaves = [
            [drawn(machine, size, count, head_dim).requires_grad_() for count in (heads, kv_heads, kv_heads)]
            for size in self.sizes
        ]
        tokens_of_all = torch.arange(sum(self.sizes), device=machine.device, dtype=torch.int32)[None]
        self.doc_ids = tokens_of_all * documents // end if documents else None

    def forward(self, step: SimulatedStep, s: int) -> Tensor:
        options = dict(self.options) if s == self.own else {"window": 1}
        if self.doc_ids is not None:
            options["doc_ids"] = self.doc_ids[:, step.slice(s)]
        return seq1f1b.causal_attention(*self.leaves[s], layer=self.layer, **options)

    def run(self) -> tuple[list[Tensor], float, float]:
        """Results of the segment: out, dq, dk, dv. Seconds of its forward and of its backward."""
        step, outs, seconds = SimulatedStep(self.sizes, cache=self.cache), [], []
        with step_on(self.machine.device):
            for s in range(len(self.sizes)):
                with step.unit("F", 0, s):
                    out, forward = self.machine.timed(functools.partial(self.forward, step, s))
                outs.append(out)
                seconds.append(forward)
            with step.unit("B", 0, self.own + 1):
                torch.autograd.grad(outs[-1], self.leaves[-1], torch.zeros_like(outs[-1]))
            with step.unit("B", 0, self.own):
                back = functools.partial(torch.autograd.grad, outs[self.own], self.leaves[self.own], self.dout)
                gradients, backward = self.machine.timed(back)
        return [outs[self.own].detach(), *gradients], seconds[self.own], backward


def median(run: Callable[[], Any], machine: Machine) -> float:
    """Seconds of a call, after a first one."""
    run()
    return statistics.median(machine.timed(run)[1] for _ in range(REPEATS if machine.is_cuda else 1))


def flash_op(machine: Machine, shape: Shape) -> tuple[float, float]:
    """Seconds of torch's flash op over all keys: forward, and backward with sums in float32 as ours has."""
    heads, kv_heads, head_dim, tokens, end = shape
    sizes = ((tokens, heads), (end, kv_heads), (end, kv_heads), (tokens, heads))
    q, k, v, dout = (drawn(machine, n, count, head_dim).transpose(1, 2).contiguous() for n, count in sizes)
    rest = (None, None, tokens, end, 0.0, True)
    ops, empty = torch.ops.aten, torch.empty(0, dtype=torch.int64, device=machine.device)
    forward = functools.partial(ops._flash_attention_forward, q, k, v, *rest, False)
    out, lse, *_ = forward()
    sums = [torch.zeros(t.shape, device=machine.device) for t in (k, v)]

    def backward() -> None:
        _, *grads = ops._flash_attention_backward(dout, q, k, v, out, lse, *rest, empty, empty)
        for total, part in zip(sums, grads, strict=True):
            total += part

    return median(forward, machine), median(backward, machine)


def check_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    difference, allowed = float((ours - theirs).abs().max()), HALF_ULP * max(1.0, float(theirs.abs().max()))
    assert difference <= allowed, f"{what} differ by {difference}, more than {allowed}"


def by_ways(machine: Machine, names: list[str], shape: Shape, **options: Any) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward by each way, whose results are those of the first."""
    truth: list[Tensor] = []
    found = {}
    for way in names:
        use(way)
        segment = Segment(machine, shape, **options)
        results, *_ = segment.run()
        truth = truth or results
        for what, ours, theirs in zip(("out", "dq", "dk", "dv"), results, truth, strict=True):
            check_close(f"{what} by {way} and by {names[0]}", ours, theirs)
        times = [segment.run()[1:] for _ in range(REPEATS if machine.is_cuda else 1)]
        forward, backward = map(statistics.median, zip(*times, strict=True))
        found[way] = forward, backward
    return found


def in_shape(machine: Machine, shape: Shape) -> Record:
    heads, _, head_dim, tokens, end = shape
    found = by_ways(machine, ways(machine), shape)
    found[FLASH_OP] = flash_op(machine, shape)
    visible = tokens * (end - tokens) + tokens * (tokens + 1) / 2
    flops = {"forward": 4.0 * heads * head_dim * visible, "backward": 10.0 * heads * head_dim * visible}
    return {
        f"{way} {which}": f"{1e3 * seconds:.3f} ms {flops[which] / seconds / 1e12:.3g} TFLOP/s"
        for way, times in found.items()
        for which, seconds in zip(flops, times, strict=True)
    }


def with_options(machine: Machine, **options: Any) -> Record:
    """Milliseconds of our kernels and of what takes their place."""
    names = [ELSE, *(way for way in ways(machine) if way == OWN)]
    shape = (32, 8, 128, 8192, 8192) if machine.is_cuda else (*SMALL[:3], 128, 128)
    found = by_ways(machine, names, shape, **options)
    return {f"{way}, ms": [round(1e3 * seconds, 3) for seconds in times] for way, times in found.items()}


def around(machine: Machine) -> Record:
    """Seconds of merging two results and of adding up dK and dV, by our kernels and by torch's ops."""
    heads, kv_heads, head_dim, tokens, prefix = (32, 8, 128, 4096, 16384) if machine.is_cuda else SMALL
    own, before = (drawn(machine, tokens, heads, head_dim) for _ in range(2))
    lses = [torch.randn(1, heads, tokens, device=machine.device) for _ in range(2)]
    slabs = [torch.zeros(1, kv_heads, prefix, head_dim, device=machine.device) for _ in range(2)]
    parts = [drawn(machine, prefix, kv_heads, head_dim) for _ in range(2)]
    runs: dict[str, tuple[Callable[[], Any], int]] = {  # with the bytes that it must read and write
        "merge": (lambda: attention_parts.merge(own, lses[0], before, lses[1]), 6 * own.numel() + 12 * lses[0].numel()),
        "add": (lambda: attention_parts.add(*slabs, *parts, False), 20 * parts[0].numel()),
    }
    found = {}
    for way in (OWN, "library") if OWN in ways(machine) else ("library",):
        kernel_library.preferred = way
        for name, (run, size) in runs.items():
            seconds = median(run, machine)
            found[f"{name} by {way}"] = f"{1e6 * seconds:.0f} us {size / seconds / 1e9:.0f} GB/s"
    return found


def plans(machine: Machine) -> Record:
    """Milliseconds of the first two steps of a new shape by cuDNN: the first one makes plans."""
    use(CUDNN)
    found = []
    for end in (9008, 9024):
        segment = Segment(machine, (32, 8, 128, 1024, end))
        for _ in range(2):
            machine.sync()
            start = time.perf_counter()
            segment.run()
            found.append(round(1e3 * (time.perf_counter() - start), 1))
    return {"ms": found}


def attention(machine: Machine) -> Iterator[Case]:
    shapes: list[Shape] = [(32, 8, 128, tokens, end) for tokens in (4096, 2048, 8192) for end in (tokens, 16384, 65536)]
    shapes += [(8, 8, 128, 1024, 32768), (32, 32, 128, 4096, 32768), (32, 8, 64, 4096, 16384)]
    for shape in shapes if machine.is_cuda else [SMALL]:
        name = "{}/{} heads of {}, {} tokens of {}".format(*shape)
        yield name, functools.partial(in_shape, machine, shape)
    end = 8192 if machine.is_cuda else 128
    options = {"a window of an eighth": {"window": end // 8}, "a soft cap": {"softcap": 20.0}}
    for text, given in (options | {"five documents": {"documents": 5}}).items():
        yield f"{text}, 32/8 heads of 128, 8192 tokens", functools.partial(with_options, machine, **given)
    yield "results merged, gradients added up", functools.partial(around, machine)
    if CUDNN in ways(machine) and machine.is_cuda:
        yield "plans of cuDNN", functools.partial(plans, machine)
