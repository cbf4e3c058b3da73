"""The stages of gpu.py that tell how fast attention is, beside torch's ops and what the machine could do."""

from __future__ import annotations

import csv
import functools
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gpu
import torch
import torch.nn.functional as F
from gpu_cases import Case, Machine, Unmeasured, own_operations, random, use_cudnn, watched
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import seq1f1b
from seq1f1b.device import attention_ways, cuda_attention, kernel_library

aten = torch.ops.aten
IN_SEGMENTS = "cuDNN in segments"  # as cuda_attention goes by it


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(machine: Machine) -> Iterator[Case]:
    size, side = (1 << 31, 8192) if machine.is_cuda else (1 << 16, 16)

    def copy() -> dict[str, Any]:
        source, target = (torch.empty(size, dtype=torch.uint8, device=machine.device) for _ in range(2))
        return {"GB/s read and written": round(2 * size / machine.seconds(lambda: target.copy_(source)) / 1e9)}

    def product() -> dict[str, Any]:
        a, b = (random(machine, side, side) for _ in range(2))
        return {"TFLOP/s": round(2 * side**3 / machine.seconds(lambda: a @ b) / 1e12, 3)}

    def over_host() -> dict[str, Any]:
        """A message of 16 MiB to host memory and back, as it goes between stages, and by pinned memory."""
        data = torch.empty(1 << 24, dtype=torch.uint8, device=machine.device)
        pageable, pinned = torch.empty(1 << 24, dtype=torch.uint8), torch.empty(1 << 24, dtype=torch.uint8)
        pinned = pinned.pin_memory() if machine.is_cuda else pinned
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
        dtype = torch.bfloat16
        self.offset = end - tokens
        self.q, self.dout = (random(machine, 1, tokens, heads, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
        self.keys, self.values = (random(machine, 1, kv_heads, end, head_dim, dtype=dtype) for _ in range(2))
        self.qkv = (self.q, self.keys, self.values)
        wide = torch.promote_types(dtype, torch.float32)
        self.dk, self.dv = (torch.zeros_like(self.keys, dtype=wide) for _ in range(2))
        empty = self.q.new_empty(0)
        self.options = cuda_attention.Options(empty, empty, empty, empty, head_dim**-0.5, 0, 0.0)
        self.flops = 4 * heads * head_dim * (tokens * self.offset + tokens * (tokens + 1) / 2)

    def own_backward(
        self, operation: kernel_library.Operation, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = attention_ways.Given(self.dout, *self.qkv, out, lse, self.options, self.dk, self.dv, store=False)
        return attention_ways.launch_own_backward(operation, given)

    def timed(self, machine: Machine, name: str, run: Callable[[], Any]) -> str:
        seconds = machine.seconds(run, budget=0.12)
        rate = (2.5 if "backward" in name else 1.0) * self.flops / seconds / 1e12
        return f"{seconds * 1e3:.3f} ms {rate:.0f} TFLOP/s"


def speed(machine: Machine) -> Iterator[Case]:
    def cell(heads: int, kv_heads: int, head_dim: int, tokens: int, end: int) -> dict[str, Any]:
        """ms and TFLOP/s of the library path by flash and by cuDNN, of our kernels where they are right, and of torch's
        ops alone."""
        kernel_library.use_kernels("library")
        use_cudnn(False)
        inputs = Segment(machine, heads, kv_heads, head_dim, tokens, end)
        options = inputs.options
        out, lse = cuda_attention._forward(*inputs.qkv, options)
        found: dict[str, Any] = {"way": cuda_attention.way(inputs.q, inputs.q.shape[3], options), "dtype": "bfloat16"}
        without: dict[str, str] = {}  # what could not be timed, and why

        def timed(name: str, prepare: Callable[[], Callable[[], Any]]) -> None:
            try:
                found[name] = inputs.timed(machine, name, prepare())
            except Exception as error:
                machine.sync()  # raises again if the context is broken
                without[name] = f"{type(error).__name__}: {error}"[:300]

        own = own_runs(machine, inputs, out, lse)
        for name, prepare in own.items():
            timed(name, prepare)
        wrong = dict(without)
        timed("forward", lambda: lambda: cuda_attention._forward(*inputs.qkv, options))

        def backward() -> Any:
            return cuda_attention._backward(inputs.dout, *inputs.qkv, out, lse, options, inputs.dk, inputs.dv)

        timed("backward", lambda: backward)
        found["backward MB"] = round(machine.peak_bytes(backward) / 1e6)
        if cuda_attention._has_cudnn(machine.device):
            use_cudnn(True)
            by_cudnn, _ = cuda_attention._forward(*inputs.qkv, options)
            check_close("out by cuDNN and by flash", by_cudnn, out)
            timed(f"{IN_SEGMENTS} forward", lambda: lambda: cuda_attention._forward(*inputs.qkv, options))
            timed(f"{IN_SEGMENTS} backward", lambda: backward)
            found["backward MB by cuDNN"] = round(machine.peak_bytes(backward) / 1e6)
            use_cudnn(False)
        for name, prepare in peers(machine, inputs, out, lse).items():
            timed(name, prepare)
        if without:
            found["not timed"] = without
        if wrong or (without and not machine.is_cuda):
            found |= {"state": "failed", "why": str(without)}
        return found

    for heads, kv_heads, head_dim, tokens, end in cells(machine):
        name = f"{heads}/{kv_heads} heads of {head_dim}, {tokens} tokens of {end}"
        yield name, functools.partial(cell, heads, kv_heads, head_dim, tokens, end)

    def with_options(options: dict[str, Any]) -> dict[str, Any]:
        """Our kernels and the library path over 8192 tokens, where attention is not over all keys before."""
        shape = (32, 8, 128, 8192, 8192) if machine.is_cuda else SMALL
        inputs, found = Segment(machine, *shape), {}
        chosen = inputs.options._replace(**options)
        results = []
        for kernels in ("library", "own"):
            kernel_library.use_kernels(kernels)
            out, lse = cuda_attention._forward(*inputs.qkv, chosen)
            results.append(out)

            def backward(out: Tensor = out, lse: Tensor = lse) -> Any:
                return cuda_attention._backward(inputs.dout, *inputs.qkv, out, lse, chosen, inputs.dk, inputs.dv)

            way = cuda_attention.way(inputs.q, inputs.q.shape[3], chosen)
            forward = functools.partial(cuda_attention._forward, *inputs.qkv, chosen)
            for name, run in (("forward", forward), ("backward", backward)):
                found[f"{way} {name}"] = f"{machine.seconds(run, budget=0.12) * 1e3:.3f} ms"
        check_close("out of own kernels and of the library path", *results)
        return found

    end = 8192 if machine.is_cuda else SMALL[4]
    docs = torch.arange(end, device=machine.device, dtype=torch.int32)[None] * 5 // end
    tokens = 8192 if machine.is_cuda else SMALL[3]
    options: dict[str, dict[str, Any]] = {
        "a window of an eighth": {"window": end // 8}, "a soft cap": {"softcap": 20.0},
        "five documents": {"docs": docs[:, end - tokens :], "key_docs": docs},
    }  # fmt: skip
    for name, of_name in options.items():
        yield f"{name}, 32/8 heads of 128, 8192 tokens", functools.partial(with_options, of_name)

    for shape, count in (((32, 8, 128, 8192, 8192), 5), ((32, 8, 128, 4096, 16384), 7), ((32, 8, 64, 8192, 8192), 64)):
        name = f"{count} documents by torch's flash ops, heads of {shape[2]}, {shape[3]} tokens of {shape[4]}"
        yield name, functools.partial(over_documents, machine, shape if machine.is_cuda else SMALL, count)

    def plans() -> dict[str, Any]:
        """Milliseconds that cuDNN takes for the first call of a shape, beside the second."""
        machine.need_cuda()
        if not cuda_attention._has_cudnn(machine.device):
            raise Unmeasured("cuDNN's attention is for Hopper and newer")
        kernel_library.use_kernels("library")
        use_cudnn(True)
        found: dict[str, list[float]] = {"forward": [], "backward": []}
        for end in (9008, 9016, 9001, 9024):
            inputs = Segment(machine, 32, 8, 128, 1024, end)
            for _ in range(2):
                machine.sync()
                start = time.perf_counter()
                out, lse = cuda_attention._forward(*inputs.qkv, inputs.options)
                machine.sync()
                between = time.perf_counter()
                cuda_attention._backward(inputs.dout, *inputs.qkv, out, lse, inputs.options, inputs.dk, inputs.dv)
                machine.sync()
                found["forward"].append(round((between - start) * 1e3, 1))
                found["backward"].append(round((time.perf_counter() - between) * 1e3, 1))
        return found

    yield "cuDNN's plans", plans

    def key_ranges() -> dict[str, Any]:
        """Time and memory of the backward of 4096 tokens behind 61440, over the most keys that one call takes."""
        use_cudnn(False)
        inputs = Segment(machine, *(32, 8, 128, 4096, 65536) if machine.is_cuda else SMALL)
        out, lse = cuda_attention._forward(*inputs.qkv, inputs.options)
        found, usual = {}, (cuda_attention.KEY_RANGE, cuda_attention.RANGE_BYTES)

        def backward() -> Any:
            return cuda_attention._backward(inputs.dout, *inputs.qkv, out, lse, inputs.options, inputs.dk, inputs.dv)

        for longest in (2048, 4096, 8192, 16384, 65536):
            cuda_attention.KEY_RANGE, cuda_attention.RANGE_BYTES = longest, 1 << 40
            cuda_attention.forget_plans()
            found[longest] = (
                f"{inputs.timed(machine, 'backward', backward)}, {machine.peak_bytes(backward) / 1e6:.0f} MB"
            )
        cuda_attention.KEY_RANGE, cuda_attention.RANGE_BYTES = usual
        cuda_attention.forget_plans()
        return found

    yield "ranges of keys in the backward", key_ranges

    def call() -> dict[str, Any]:
        """Cost of a call to the host beside the device's work: one token, one head."""
        q, k, v = (random(machine, 1, 1, 1, 64).requires_grad_() for _ in range(3))

        def both() -> None:
            seq1f1b.causal_attention(q, k, v, layer=0).backward(q)

        both()
        start = time.perf_counter()
        repeats = 50 if machine.is_cuda else 1
        for _ in range(repeats):
            both()
        machine.sync()
        return {"us, forward and backward": round((time.perf_counter() - start) / repeats * 1e6)}

    yield "cost of a call", call


def over_documents(machine: Machine, shape: tuple[int, int, int, int, int], count: int) -> dict[str, Any]:
    """Documents by torch's flash ops and by our kernels, beside flash over the whole sequence without documents: by
    time, and by TFLOP/s of what is seen."""
    inputs = Segment(machine, *shape)
    heads, _, head_dim, tokens, end = shape
    docs = torch.arange(end, device=machine.device, dtype=torch.int32)[None] * count // end
    starts = torch.searchsorted(docs[0].contiguous(), docs[0].contiguous())
    pairs = int((torch.arange(end, device=machine.device) - starts + 1)[end - tokens :].sum())
    with_documents = inputs.options._replace(docs=docs[:, end - tokens :], key_docs=docs)
    use_cudnn(False)
    found: dict[str, Any] = {}
    rates: dict[str, float] = {}
    results = []
    of_documents = 4.0 * heads * head_dim * pairs
    cases = (("library", inputs.options, inputs.flops), ("library", with_documents, of_documents),
             ("own", with_documents, of_documents))  # fmt: skip
    for kernels, options, flops in cases:
        kernel_library.use_kernels(kernels)
        out, lse = cuda_attention._forward(*inputs.qkv, options)
        way = cuda_attention.way(inputs.q, head_dim, options)
        results += [out] if options is with_documents else []

        def backward(out: Tensor = out, lse: Tensor = lse, options: Any = options) -> Any:
            return cuda_attention._backward(inputs.dout, *inputs.qkv, out, lse, options, inputs.dk, inputs.dv)

        forward = functools.partial(cuda_attention._forward, *inputs.qkv, options)
        for name, run, share in (("forward", forward, 1.0), ("backward", backward, 2.5)):
            seconds = machine.seconds(run, budget=0.12)
            rates[f"{way} {name}"] = share * flops / seconds / 1e12
            found[f"{way} {name}"] = f"{seconds * 1e3:.3f} ms {share * flops / seconds / 1e12:.0f} TFLOP/s"
    check_close("out over documents by own kernels and by torch's flash ops", *results)
    for name in ("forward", "backward"):
        if f"documents {name}" in rates:
            found[f"{name}: documents' rate beside flash's"] = round(
                rates[f"documents {name}"] / rates[f"flash {name}"], 3
            )
    return found


def cells(machine: Machine) -> list[tuple[int, int, int, int, int]]:
    """(heads, kv_heads, head_dim, tokens, end): 12 shapes, forward and backward of each: the 24 cells of the table."""
    if not machine.is_cuda:
        return [(2, 1, 64, 64, 64)]
    grid = [(32, 8, 128, tokens, end) for tokens in (4096, 2048, 8192) for end in (tokens, 16384, 65536)]
    return [*grid, (8, 8, 128, 1024, 32768), (32, 32, 128, 4096, 32768), (32, 8, 64, 4096, 16384)]


def check_close(what: str, ours: Tensor, theirs: Tensor, allowed: float = 2**-7) -> None:
    """Within an ulp of bf16, of the largest number: each side rounds its inner products and its result."""
    if theirs.numel() == 0:
        return
    difference = float((ours.double() - theirs.double()).abs().max())
    allowed *= max(1.0, float(theirs.abs().max()))
    assert difference <= allowed, f"{what} differ by {difference}, more than {allowed}"


SMALL = (2, 1, 64, 64, 128)


def known_wrong(machine: Machine, head_dim: int) -> list[str]:
    """Cases of the stage that looks at our kernels which failed."""
    cases = gpu.latest_cases(gpu.read(machine.out)).get("own", {})
    return [name for name, case in cases.items() if f" d{head_dim} " in name and case["state"] == "failed"]


def own_runs(machine: Machine, inputs: Segment, out: Tensor, lse: Tensor) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Our kernels, where they were built and are not known to be wrong. Each is first held to the library path."""
    operations, qkv, options = kernel_library.operations(), inputs.qkv, inputs.options
    if known_wrong(machine, inputs.q.shape[3]):
        return {}

    def forward() -> Callable[[], Any]:
        operation = operations["attention_forward"]
        own_out, own_lse = attention_ways.launch_own_forward(operation, *qkv, options)
        check_close("out of own kernels and of the library path", own_out, out)
        check_close("lse of own kernels and of the library path", own_lse, lse, 2**-16)  # sums in float32
        return lambda: attention_ways.launch_own_forward(operation, *qkv, options)

    def backward() -> Callable[[], Any]:
        operation = operations["attention_backward"]
        found, prefix = [], slice(0, inputs.offset)  # its own rows are returned
        for own in (True, False):
            inputs.dk.zero_()
            inputs.dv.zero_()
            if own:
                grads = inputs.own_backward(operation, out, lse)
            else:
                grads = cuda_attention._backward(inputs.dout, *qkv, out, lse, options, inputs.dk, inputs.dv)[:3]
            found.append((*grads, inputs.dk[:, :, prefix].clone(), inputs.dv[:, :, prefix].clone()))
        for name, ours, theirs in zip(("dq", "own dk", "own dv", "dk", "dv"), *found, strict=True):
            check_close(f"{name} of own kernels and of the library path", ours, theirs)
        return lambda: inputs.own_backward(operation, out, lse)

    return {
        f"own {prepare.__name__}": prepare
        for prepare in (forward, backward)
        if f"attention_{prepare.__name__}" in operations
    }


Peer = Callable[[], Callable[[], Any]]
"""Prepares a run of its own, so that one that fails leaves the others."""


def dense(tensors: Iterable[Tensor]) -> list[Tensor]:
    """As torch's flash ops take them: (batch, tokens, heads, head_dim)."""
    return [t.transpose(1, 2).contiguous() for t in tensors]


def packed(machine: Machine, inputs: Segment) -> tuple[list[Tensor], list[Tensor]]:
    """For variable-length flash: sequences without a batch, and the bounds of queries and keys."""
    lengths = (inputs.q.shape[2], inputs.keys.shape[2])
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=machine.device) for n in lengths]
    return [t[0] for t in dense(inputs.qkv)], bounds


def flash_peers(machine: Machine, inputs: Segment, out: Tensor, lse: Tensor) -> dict[str, Peer]:
    """FA2: torch's flash ops."""
    tokens, end = inputs.q.shape[2], inputs.keys.shape[2]
    flash, flash_backward = aten._flash_attention_forward.default, aten._flash_attention_backward.default
    empty = torch.empty(0, dtype=torch.int64, device=machine.device)

    def forward() -> Callable[[], Any]:
        given = dense(inputs.qkv)
        return lambda: flash(*given, None, None, tokens, end, 0.0, True, False)

    def varlen_forward() -> Callable[[], Any]:
        given, bounds = packed(machine, inputs)
        return lambda: flash(*given, *bounds, tokens, end, 0.0, True, False)

    def backward() -> Callable[[], Any]:
        """With the sums over segments in float32 that ours make, too."""
        given, (dout, of) = dense(inputs.qkv), dense((inputs.dout, out))
        sums = [torch.zeros(t.shape, device=machine.device) for t in given[1:]]

        def run() -> None:
            _, *grads = flash_backward(
                dout, *given, of, lse, None, None, tokens, end, 0.0, True, empty, empty
            )  # fmt: skip
            for total, part in zip(sums, grads, strict=True):
                total += part

        return run

    return {"FA2 forward": forward, "FA2 varlen forward": varlen_forward, "FA2 backward + fp32 add": backward}


def recipe_peers(machine: Machine, inputs: Segment, out: Tensor) -> dict[str, Peer]:
    """What the Seq1F1B reference does: keys concatenated, variable-length flash, dK and dV added in bf16."""
    tokens, end, offset = inputs.q.shape[2], inputs.keys.shape[2], inputs.offset
    flash, flash_backward = aten._flash_attention_forward.default, aten._flash_attention_backward.default
    empty = torch.empty(0, dtype=torch.int64, device=machine.device)

    def forward() -> Callable[[], Any]:
        given, bounds = packed(machine, inputs)
        prefix, new = [t[:offset] for t in given[1:]], [t[offset:] for t in given[1:]]

        def run() -> None:
            whole = [torch.cat(pair) for pair in zip(prefix, new, strict=True)]
            flash(given[0], *whole, *bounds, tokens, end, 0.0, True, False)

        return run

    def backward() -> Callable[[], Any]:
        given, bounds = packed(machine, inputs)
        dout, of = (t.transpose(1, 2)[0].contiguous() for t in (inputs.dout, out))
        of_lse = flash(*given, *bounds, tokens, end, 0.0, True, False)[1]
        before = [torch.zeros_like(t) for t in given[1:]]

        def run() -> None:
            _, *grads = flash_backward(
                dout, *given, of, of_lse, *bounds, tokens, end, 0.0, True, empty, empty
            )  # fmt: skip
            for total, part in zip(grads, before, strict=True):
                total += part

        return run

    return {"recipe forward": forward, "recipe backward": backward}


def peers(machine: Machine, inputs: Segment, out: Tensor, lse: Tensor) -> dict[str, Peer]:
    """What else computes this. cuDNN: if the segment is the whole sequence, since it masks from the first key on."""

    def of_autograd(
        run: Callable[..., Tensor], dout: Tensor, given: Sequence[Tensor]
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        leaves = [t.detach().requires_grad_() for t in given]
        result = run(*leaves)
        return lambda: run(*given), lambda: torch.autograd.grad(result, leaves, dout, retain_graph=True)

    def cudnn(*given: Tensor) -> Tensor:
        wanted = SDPBackend.CUDNN_ATTENTION if machine.is_cuda else SDPBackend.MATH
        with sdpa_kernel(wanted):
            return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

    def fa3(*given: Tensor) -> Tensor:
        import flash_attn_interface

        result = flash_attn_interface.flash_attn_func(*given, causal=True)
        return result[0] if isinstance(result, tuple) else result

    found = {**flash_peers(machine, inputs, out, lse), **recipe_peers(machine, inputs, out)}
    if inputs.offset == 0:
        found["cuDNN forward"] = lambda: of_autograd(cudnn, inputs.dout, inputs.qkv)[0]
        found["cuDNN backward"] = lambda: of_autograd(cudnn, inputs.dout, inputs.qkv)[1]
    if importlib.util.find_spec("flash_attn_interface") is not None:
        found["FA3 forward"] = lambda: of_autograd(fa3, inputs.dout.transpose(1, 2), dense(inputs.qkv))[0]
        found["FA3 backward"] = lambda: of_autograd(fa3, inputs.dout.transpose(1, 2), dense(inputs.qkv))[1]
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
        inputs = Segment(machine, *(32, 8, 128, 4096, 16384) if machine.is_cuda else SMALL)
        operations = own_operations(machine)
        out, lse = attention_ways.launch_own_forward(operations["attention_forward"], *inputs.qkv, inputs.options)
        if "attention_backward" in operations:
            inputs.own_backward(operations["attention_backward"], out, lse)
        machine.sync()
        return {}

    yield "32/8 heads of 128, 4096 tokens of 16384", run


def ncu(machine: Machine) -> Iterator[Case]:
    def run() -> dict[str, Any]:
        options = ["--clock-control", "none"]  # the clocks stay as they are: the machine is shared
        options += ["--kernel-name", "regex:s1f_", "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values())]
        said = watched(machine, "ncu", options, "one_shape", 35)
        lines = [line for line in said.splitlines() if line.startswith('"')]
        found = {}
        for row in csv.DictReader(lines):
            values = {name: row.get(metric, "") for name, metric in METRICS.items()}
            if any(values.values()) and row.get("Kernel Name"):  # the row of units has no kernel
                found[row["Kernel Name"]] = values
        if not found:  # without the right to read the GPU's counters, for one
            raise Unmeasured(said[-1000:])
        return found

    yield "32/8 heads of 128, 4096 tokens of 16384", run
