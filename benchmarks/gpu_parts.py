"""The stage of gpu.py for the work around attention over a prefix: are its kernels right, and what do they save?"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_cases import Case, Machine, own_operations
from torch import Tensor

from seq1f1b import proof
from seq1f1b.device import attention_parts, kernel_library

WHATS = ("merge", "add", "finish", "total")
KERNELS, TORCH = "own", "library"  # for kernel_library.use_kernels


class Segment:
    """What is merged and added up around the attention of one segment over a prefix."""

    def __init__(
        self, machine: Machine, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, tokens: int, prefix: int
    ) -> None:
        self.machine, self.dtype = machine, dtype
        self.own, self.before, self.third = (self.part(tokens, heads, head_dim) for _ in range(3))
        self.own_lse, self.before_lse = (torch.randn(1, heads, tokens, device=machine.device) + 9 * i for i in range(2))
        self.before_lse[:, :, : tokens // 7] = float("-inf")
        self.before[:, :, : tokens // 7] = 0
        slabs = [torch.randn(1, kv_heads, prefix + tokens, head_dim, device=machine.device) for _ in range(2)]
        self.prefix, self.rows = ([slab[:, :, part] for slab in slabs] for part in (slice(prefix), slice(prefix, None)))
        self.prefix_parts, self.parts = (
            [self.part(count, kv_heads, head_dim) for _ in range(2)] for count in (prefix, tokens)
        )
        self.rows_of_cache = [slab.to(dtype)[:, :, prefix:] for slab in slabs]

    def part(self, tokens: int, heads: int, head_dim: int) -> Tensor:
        numbers = torch.randn(1, tokens, heads, head_dim, device=self.machine.device)
        return numbers.to(self.dtype).transpose(1, 2)

    def calls(self) -> dict[str, tuple[Callable[[], Any], Callable[[], list[Tensor]], int]]:
        """Each call, what it must give in float64, and how many bytes must be read and written for it."""
        own, before, third = self.own, self.before, self.third
        results, of_parts = own.numel() * 2, sum(part.numel() for part in self.parts)
        of_prefix = sum(part.numel() for part in self.prefix_parts)
        sums = [lse.double().exp()[..., None] for lse in (self.own_lse, self.before_lse)]

        def merged() -> list[Tensor]:
            both = sums[0] + sums[1]
            return [(own.double() * sums[0] + before.double() * sums[1]) / both, both.log()[..., 0]]

        def added(slabs: list[Tensor], parts: list[Tensor], store: bool) -> list[Tensor]:
            return [b.double() if store else a.double() + b.double() for a, b in zip(slabs, parts, strict=True)]

        def add(store: bool) -> list[Tensor]:
            attention_parts.add(*self.prefix, *self.prefix_parts, store)
            return self.prefix

        def finish(parts: list[Tensor], store: bool) -> tuple[Tensor, Tensor]:
            return attention_parts.finish(*self.rows, *parts, store)

        def copied() -> list[Tensor]:
            attention_parts.copy(*self.parts, *self.rows_of_cache)
            return self.rows_of_cache

        other = [part.contiguous() for part in self.parts]  # heads first, or there is nothing to do
        return {
            "merge": (
                lambda: attention_parts.merge(own, self.own_lse, before, self.before_lse), merged,
                3 * results + 3 * self.own_lse.numel() * 4,
            ),
            "copy": (copied, lambda: [part.double() for part in self.parts], of_parts * 4),
            "add": (lambda: add(False), lambda: added(self.prefix, self.prefix_parts, False), of_prefix * 10),
            "add, stored": (lambda: add(True), lambda: added(self.prefix, self.prefix_parts, True), of_prefix * 6),
            "finish": (
                lambda: finish(self.parts, False), lambda: added(self.rows, self.parts, False), of_parts * 8
            ),
            "finish, stored": (lambda: finish(other, True), lambda: added(self.rows, other, True), of_parts * 4),
            "total of 2": (
                lambda: attention_parts.total([own, before]), lambda: [own.double() + before.double()], 3 * results
            ),
            "total of 3": (
                lambda: attention_parts.total([own, before, third]),
                lambda: [own.double() + before.double() + third.double()], 4 * results,
            ),
        }  # fmt: skip


def held(name: str, results: Any, truths: list[Tensor]) -> None:
    results = [results] if isinstance(results, Tensor) else results
    for i, (got, truth) in enumerate(zip(results, truths, strict=True)):
        attention_parts._hold(f"{name}, result {i}", got, truth)


def parts(machine: Machine) -> Iterator[Case]:
    """Each kernel against float64 at the sizes of training, and GB/s of what it must read and write, beside those of
    torch's ops, which read and write more."""

    def one(name: str, dtype: torch.dtype, *sizes: int) -> dict[str, Any]:
        own_operations(machine)
        call, truth, size = Segment(machine, dtype, *sizes).calls()[name]
        found = {}
        for way, says in ((KERNELS, "kernel"), (TORCH, "torch's ops")):
            kernel_library.use_kernels(way)
            machine.poison()
            wanted = truth()  # before: add changes what it adds to
            held(f"{name} by {says}", call(), wanted)
            seconds = machine.seconds(call, budget=0.05)
            found[says] = f"{seconds * 1e6:.0f} us {size / seconds / 1e9:.0f} GB/s"
        return found

    tokens, prefix = (4096, 16384) if machine.is_cuda else (9, 20)
    shapes = [(32, 32, 64), (32, 8, 128)] if machine.is_cuda else [(2, 1, 40)]
    names = ("merge", "copy", "add", "add, stored", "finish", "finish, stored", "total of 2", "total of 3")
    for (heads, kv_heads, head_dim), dtype in itertools.product(shapes, proof.DTYPES):
        for name in names:
            text = f"{name}: {proof.DTYPES[dtype]} {tokens} over {prefix}, {heads}/{kv_heads} heads of"
            sizes = (heads, kv_heads, head_dim, tokens, prefix)
            yield f"{text} {head_dim}", functools.partial(one, name, dtype, *sizes)

    def check() -> dict[str, Any]:
        """The one at the first use, and that kernels which pass it are the default."""
        library = own_operations(machine)[kernel_library.PARTS].library
        seconds = {}
        for what, dtype, head_dim in itertools.product(WHATS, proof.DTYPES, (64, 128, 40, 96, 256)):
            start = time.perf_counter()
            attention_parts.prove(library, proof.Use(what, dtype, head_dim, 64, machine.device))
            seconds[what, dtype, head_dim] = time.perf_counter() - start
        return {"checks": len(seconds), "longest, ms": round(max(seconds.values()) * 1e3, 1)}

    def default() -> dict[str, Any]:
        machine.need_cuda()
        kernel_library.use_kernels("")
        proofs = attention_parts._proofs
        proofs.results.clear()
        for call, truth, _ in Segment(machine, torch.bfloat16, 4, 2, 64, 100, 50).calls().values():
            wanted = truth()
            held("a first call", call(), wanted)
        assert {use[0] for use in proofs.results} == set(WHATS) and all(proofs.results.values()), proofs.results
        assert not proofs.lost
        return {"kernels": len(proofs.results)}

    def graph() -> dict[str, Any]:
        """Captured and replayed: a launch asks nothing of the host."""
        machine.need_cuda()
        kernel_library.use_kernels(KERNELS)
        segment = Segment(machine, torch.bfloat16, 4, 2, 64, 100, 50)
        for name, (call, truth, _) in segment.calls().items():
            call()
            machine.sync()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                results = call()
            wanted = truth()
            captured.replay()
            machine.sync()
            held(f"{name}, replayed", results, wanted)
        return {}

    def host() -> dict[str, Any]:
        """Microseconds that the host needs to launch, of small tensors."""
        found = {}
        segment = Segment(machine, torch.bfloat16, 4, 2, 64, 16, 16)
        repeats = 300 if machine.is_cuda else 1
        for way, says in ((KERNELS, "kernel"), (TORCH, "torch's ops")):
            kernel_library.use_kernels(way)
            for name, (call, _, _) in segment.calls().items():
                call()
                machine.sync()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                found[f"{name} by {says}, us"] = round((time.perf_counter() - start) / repeats * 1e6, 1)
                machine.sync()
        return found

    yield from (("check at the first use", check), ("default", default), ("in a CUDA graph", graph), ("host", host))
