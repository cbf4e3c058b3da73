"""The stages of gpu.py that tell how fast attention is, beside what the machine could do and beside torch's ops."""

from __future__ import annotations

import csv
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_cases import Case, Machine, own_operations, random, watched
from torch import Tensor

import seq1f1b
from seq1f1b.device import cuda_attention, kernel_library

aten = torch.ops.aten


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(machine: Machine) -> Iterator[Case]:
    size, side = (1 << 31, 8192) if machine.is_cuda else (1 << 22, 256)

    def copy() -> dict[str, Any]:
        source, target = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
        return {"GB/s read and written": round(2 * size / machine.seconds(lambda: target.copy_(source)) / 1e9)}

    def product() -> dict[str, Any]:
        a, b = (random(machine, side, side) for _ in range(2))
        return {"TFLOP/s": round(2 * side**3 / machine.seconds(lambda: a @ b) / 1e12, 3)}

    def over_host() -> dict[str, Any]:
        """A message of 16 MiB to host memory and back, as it goes between stages, and by pinned memory."""
        machine.need_cuda()
        data = torch.empty(1 << 24, dtype=torch.uint8, device=machine.device)
        pageable, pinned = torch.empty(1 << 24, dtype=torch.uint8), torch.empty(1 << 24, dtype=torch.uint8).pin_memory()
        runs: dict[str, Callable[[], Any]] = {
            "to pageable": lambda: pageable.copy_(data), "from pageable": lambda: data.copy_(pageable),
            "to pinned": lambda: pinned.copy_(data), "from pinned": lambda: data.copy_(pinned), "cpu()": data.cpu,
        }  # fmt: skip
        return {f"{name} GB/s": round((1 << 24) / machine.seconds(run) / 1e9, 1) for name, run in runs.items()}

    yield from (("device copy", copy), ("bf16 product", product), ("over host memory", over_host))


# -- speed of attention: one segment over its prefix -----------------------------------------------------------------


class Segment:
    """One segment over its prefix: what attention takes and gives."""

    def __init__(self, machine: Machine, heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> None:
        on_cpu = torch.bfloat16 if machine.emulated else torch.float64  # of the plain way, the one that the CPU has
        dtype = torch.bfloat16 if machine.is_cuda else on_cpu
        self.offset = end - tokens
        self.q, self.dout = (random(machine, 1, tokens, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
        self.keys, self.values = (random(machine, 1, kv_heads, end, head_dim, dtype=dtype) for _ in range(2))
        self.qkv = (self.q, self.keys, self.values)
        wide = torch.promote_types(dtype, torch.float32)
        self.dk, self.dv = (torch.zeros_like(self.keys, dtype=wide) for _ in range(2))
        empty = self.q.new_empty(0)
        self.options = cuda_attention.Options(head_dim**-0.5, 0, 0.0, empty, empty, empty)
        self.flops = 4 * heads * head_dim * (tokens * self.offset + tokens * (tokens + 1) / 2)

    def own_backward(
        self, operation: kernel_library.Operation, out: Tensor, lse: Tensor, kernel: int = -1
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cuda_attention._own_backward(
            operation, self.dout, *self.qkv, out, lse, self.options, self.dk, self.dv, kernel=kernel
        )

    def timed(self, machine: Machine, name: str, run: Callable[[], Any]) -> str:
        seconds = machine.seconds(run, budget=0.25)
        rate = (2.5 if "backward" in name else 1.0) * self.flops / seconds / 1e12
        return f"{seconds * 1e3:.3f} ms {rate:.0f} TFLOP/s"


def speed(machine: Machine) -> Iterator[Case]:
    def cell(heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> dict[str, Any]:
        """ms and TFLOP/s of the library path, of our kernels, and of torch's flash ops alone over the same numbers.

        recipe: of the Seq1F1B reference: keys concatenated, variable-length flash, dK and dV added in bf16.
        """
        os.environ["SEQ1F1B_CUDA_KERNELS"] = "library"
        inputs = Segment(machine, heads, kv_heads, head_dim, tokens, end)
        q, options = inputs.q, inputs.options
        out, lse = cuda_attention._forward(*inputs.qkv, options)
        runs: dict[str, Callable[[], Any]] = {
            "forward": lambda: cuda_attention._forward(*inputs.qkv, options),
            "backward": lambda: cuda_attention._backward(
                inputs.dout, *inputs.qkv, out, lse, options, inputs.dk, inputs.dv
            ),
        }
        if machine.is_cuda:
            runs |= peers(machine, *inputs.qkv, inputs.dout, out, lse, inputs.offset)
            dense = aten._flash_attention_forward.default(
                *(t.transpose(1, 2) for t in inputs.qkv), None, None, tokens, end, 0.0, True, False
            )[0].transpose(1, 2)
            check_close("our forward and the dense op", out, dense)
        if machine.is_cuda or machine.emulated:
            runs |= own_runs(inputs, out, lse)
        found: dict[str, Any] = {"way": cuda_attention.way(q, options), "dtype": str(q.dtype).removeprefix("torch.")}
        found |= {name: inputs.timed(machine, name, run) for name, run in runs.items()}
        found["backward MB"] = round(machine.peak_bytes(runs["backward"]) / 1e6)
        return found

    for heads, kv_heads, head_dim, tokens, end in cells(machine):
        name = f"{heads}/{kv_heads} heads of {head_dim}, {tokens} tokens of {end}"
        yield name, functools.partial(cell, heads, kv_heads, head_dim, tokens, end)

    def key_ranges() -> dict[str, Any]:
        """Time and memory of the backward of 4096 tokens behind 61440, over the most keys that one call takes."""
        machine.need_cuda()
        found = {}
        for longest in (2048, 4096, 8192, 16384, 65536):
            cuda_attention.KEY_RANGE = longest
            result = cell(32, 8, 128, 4096, 65536)
            found[longest] = f"{result['backward']}, {result['backward MB']} MB"
        return found

    yield "ranges of keys in the backward", key_ranges

    def call() -> dict[str, Any]:
        """Cost of a call to the host beside the device's work: one token, one head."""
        q, k, v = (random(machine, 1, 1, 1, 64).requires_grad_() for _ in range(3))

        def both() -> None:
            seq1f1b.causal_attention(q, k, v, layer=0).backward(q)

        both()
        start = time.perf_counter()
        for _ in range(50):
            both()
        machine.sync()
        return {"us, forward and backward": round((time.perf_counter() - start) / 50 * 1e6)}

    yield "cost of a call", call


def cells(machine: Machine) -> list[tuple[int, int, int, int, int]]:
    """(heads, kv_heads, head_dim, tokens, end): 12 shapes, forward and backward of each: the 24 cells of the table."""
    if not machine.is_cuda:
        return [SMALL]
    grid = [(32, 8, 128, tokens, end) for tokens in (4096, 2048, 8192) for end in (tokens, 16384, 65536)]
    return [*grid, (8, 8, 128, 1024, 32768), (32, 32, 128, 4096, 32768), (32, 8, 64, 4096, 16384)]


def check_close(what: str, ours: Tensor, theirs: Tensor, allowed: float = 2**-7) -> None:
    """Within an ulp of bf16, of the largest number: each side rounds its inner products and its result."""
    if theirs.numel() == 0:
        return
    difference = float((ours.double() - theirs.double()).abs().max())
    allowed *= max(1.0, float(theirs.abs().max()))
    assert difference <= allowed, f"{what} differ by {difference}, more than {allowed}"


SMALL = (4, 2, 64, 64, 256)
SHAPES = [(32, 8, 128, 4096, 16384), (8, 8, 128, 1024, 32768), (32, 8, 64, 4096, 16384), (32, 32, 128, 8192, 8192)]


def own_runs(inputs: Segment, out: Tensor, lse: Tensor) -> dict[str, Callable[[], Any]]:
    """Our kernels, where they were built, once their results were found to be those of the library path."""
    operations = kernel_library.operations()
    runs: dict[str, Callable[[], Any]] = {}
    if forward := operations.get("attention_forward"):
        own_out, own_lse = cuda_attention._own_forward(forward, *inputs.qkv, inputs.options)
        check_close("out of own kernels and of the dense op", own_out, out)
        check_close("lse of own kernels and of the dense op", own_lse, lse, 2**-16)  # sums in float32
        runs["own forward"] = lambda: cuda_attention._own_forward(forward, *inputs.qkv, inputs.options)
    if backward := operations.get("attention_backward"):
        found, prefix = [], slice(0, inputs.offset)  # its own rows are returned
        for own in (True, False):
            inputs.dk.zero_()
            inputs.dv.zero_()
            if own:
                grads = inputs.own_backward(backward, out, lse)
            else:
                grads = cuda_attention._backward(
                    inputs.dout, *inputs.qkv, out, lse, inputs.options, inputs.dk, inputs.dv
                )
            found.append((*grads, inputs.dk[:, :, prefix].clone(), inputs.dv[:, :, prefix].clone()))
        for name, ours, theirs in zip(("dq", "own dk", "own dv", "dk", "dv"), *found, strict=True):
            check_close(f"{name} of own kernels and of the library path", ours, theirs)
        runs["own backward"] = lambda: inputs.own_backward(backward, out, lse)
    return runs


def sweep(machine: Machine) -> Iterator[Case]:
    """Every tile of our kernels that is compiled, on four shapes of attention, each held to the launcher's choice."""

    def one(heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> dict[str, Any]:
        operations, found = own_operations(machine), {}
        inputs = Segment(machine, heads, kv_heads, head_dim, tokens, end)
        out, lse = cuda_attention._own_forward(operations["attention_forward"], *inputs.qkv, inputs.options)
        for name, operation in operations.items():
            if name == "attention_forward":
                run = functools.partial(cuda_attention._own_forward, operation, *inputs.qkv, inputs.options)
            else:
                run = functools.partial(inputs.own_backward, operation, out, lse)
            chosen = run()
            for index, kernel in enumerate(operation.kernels):
                if (kernel.dtype, kernel.head_dim, kernel.query_rows > 0) != ("bfloat16", head_dim, True):
                    continue
                of_kernel = functools.partial(run, kernel=index)
                try:
                    results = of_kernel()
                except ValueError as error:  # not one to choose, or more shared memory than this GPU has
                    found[kernel.name] = str(error)
                    continue
                for ours, theirs in zip(results, chosen, strict=True):
                    check_close(f"{kernel.name} and the launcher's choice", ours, theirs)
                found[kernel.name] = inputs.timed(machine, name, of_kernel)
        return found

    for shape in SHAPES if machine.is_cuda else [SMALL, (2, 1, 128, 64, 192)]:
        heads, kv_heads, head_dim, tokens, end = shape
        name = f"{heads}/{kv_heads} heads of {head_dim}, {tokens} tokens of {end}"
        yield name, functools.partial(one, *shape)


def peers(
    machine: Machine, q: Tensor, keys: Tensor, values: Tensor, dout: Tensor, out: Tensor, lse: Tensor, offset: int
) -> dict[str, Callable[[], Any]]:
    tokens, end = q.shape[2], keys.shape[2]
    dense = [t.transpose(1, 2).contiguous() for t in (q, keys, values)]
    packed = [t[0] for t in dense]
    dense_dout, dense_out = (t.transpose(1, 2).contiguous() for t in (dout, out))
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=machine.device) for n in (tokens, end)]
    empty = torch.empty(0, dtype=torch.int64, device=machine.device)
    packed_lse = aten._flash_attention_forward.default(*packed, *bounds, tokens, end, 0.0, True, False)[1]
    before = [torch.zeros_like(t) for t in packed[1:]]
    sums = [torch.zeros(t.shape, device=machine.device) for t in dense[1:]]
    prefix, new = [t[:offset] for t in packed[1:]], [t[offset:] for t in packed[1:]]

    def dense_backward() -> None:
        _, dk, dv = aten._flash_attention_backward.default(
            dense_dout, *dense, dense_out, lse, None, None, tokens, end, 0.0, True, empty, empty
        )
        for total, part in zip(sums, (dk, dv), strict=True):
            total += part

    def recipe_forward() -> None:
        whole = [torch.cat(pair) for pair in zip(prefix, new, strict=True)]
        aten._flash_attention_forward.default(packed[0], *whole, *bounds, tokens, end, 0.0, True, False)

    def recipe_backward() -> None:
        _, dk, dv = aten._flash_attention_backward.default(
            dense_dout[0], *packed, dense_out[0], packed_lse, *bounds, tokens, end, 0.0, True, empty, empty
        )
        dk += before[0]
        dv += before[1]

    found: dict[str, Callable[[], Any]] = {
        "dense forward": lambda: aten._flash_attention_forward.default(
            *dense, None, None, tokens, end, 0.0, True, False
        ),
        "varlen forward": lambda: aten._flash_attention_forward.default(
            *packed, *bounds, tokens, end, 0.0, True, False
        ),
        "recipe forward": recipe_forward,
        "dense backward + fp32 add": dense_backward,
        "recipe backward": recipe_backward,
    }
    if offset == 0:
        expanded = [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (keys, values)]
        found["cudnn forward"] = lambda: aten._scaled_dot_product_cudnn_attention.default(
            q, *expanded, None, True, 0.0, True, False
        )
    return found


# -- under ncu -------------------------------------------------------------------------------------------------------

METRICS = {  # of ncu
    "us": "gpu__time_duration.sum",
    "tensor cores %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "SM %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "bank conflicts of loads": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank conflicts of stores": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "waits for long scoreboard": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "waits for a barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "waits for the math pipe": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
}


def one_shape(machine: Machine) -> Iterator[Case]:
    """Our kernels once, on a shape of the table, for ncu to look at."""

    def run() -> dict[str, Any]:
        inputs = Segment(machine, *SHAPES[0] if machine.is_cuda else SMALL)
        operations = own_operations(machine)
        out, lse = cuda_attention._own_forward(operations["attention_forward"], *inputs.qkv, inputs.options)
        if "attention_backward" in operations:
            inputs.own_backward(operations["attention_backward"], out, lse)
        machine.sync()
        return {}

    yield "32/8 heads of 128, 4096 tokens of 16384", run


def ncu(machine: Machine) -> Iterator[Case]:
    def run() -> dict[str, Any]:
        options = ["--kernel-name", "regex:s1f_", "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values())]
        said = watched(machine, "ncu", options, "one shape", 55)
        lines = [line for line in said.splitlines() if line.startswith('"')]
        found = {}
        for row in csv.DictReader(lines):
            values = {name: row.get(metric, "") for name, metric in METRICS.items()}
            if any(values.values()) and row.get("Kernel Name"):  # the row of units has no kernel
                found[row["Kernel Name"]] = values
        assert found, said[-1000:]
        return found

    yield "32/8 heads of 128, 4096 tokens of 16384", run
