"""The stages of gpu.py that tell whether attention is right: by torch's ops, by our kernels, and under CUDA's tools."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import attention_runs
import torch
from gpu_cases import TOOL_FOUND_ERRORS, Case, Machine, hold, own_operations, use_cudnn, watched
from torch import Tensor

import seq1f1b
from seq1f1b import proof
from seq1f1b.device import attention_parts, attention_paths, attention_proof, cuda_attention, kernel_library
from seq1f1b.device.placement import step_on

# -- attention: against fp64 of the whole sequence -------------------------------------------------------------------


def attention_errors(
    machine: Machine, dtype: torch.dtype, head_dim: int, kv_heads: int, sizes: list[int], options: dict[str, Any],
    kernels: str, key_range: int = cuda_attention.KEY_RANGE, by_cudnn: bool = False, v_head_dim: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Errors of segments and of the whole, forward and backward, and whether a second run gives the same bits."""
    kernel_library.use_kernels(kernels)
    heads, cuda_attention.KEY_RANGE = 8, key_range
    use_cudnn(by_cudnn)
    options = {k: v.to(machine.device) if isinstance(v, Tensor) else v for k, v in options.items()}

    def drawn(seed: int, head_dim: int) -> list[Tensor]:
        made = attention_runs.random_qkv(
            heads, kv_heads, tokens=sum(sizes), head_dim=head_dim, v_head_dim=v_head_dim, seed=seed, dtype=dtype
        )
        return [t.to(machine.device) for t in made]

    qkv, (dout, *_) = drawn(0, head_dim), drawn(1, v_head_dim or head_dim)
    whole = functools.partial(seq1f1b.causal_attention, layer=0, **options)
    truth = attention_runs.gradients(
        lambda *t: attention_runs.formula(*t, **options), *(t.double() for t in (*qkv, dout))
    )
    peer = attention_runs.gradients(lambda *t: attention_runs.formula(*t, **options), *qkv, dout)
    machine.poison()
    with step_on(machine.device):
        runs = [attention_runs.segmented(sizes, options, [qkv], [dout])[0] for _ in range(2)]
    found = {
        "segmented": attention_runs.errors(runs[0], truth),
        "whole": attention_runs.errors(attention_runs.gradients(whole, *qkv, dout), truth),
        "formula": attention_runs.errors(peer, truth),
    }
    texts = hold(found, dtype)
    equal = dict(zip(("out", "dq", "dk", "dv"), (torch.equal(*pair) for pair in zip(*runs, strict=True)), strict=True))
    return {**texts, "reruns equal": equal}


def attention_options(tokens: int) -> dict[str, dict[str, Any]]:
    docs = torch.arange(tokens).mul(5).div(tokens, rounding_mode="floor").expand(2, -1)
    slopes = 2.0 ** -torch.arange(1, 9)
    every: dict[str, dict[str, Any]] = {
        "window": {"window": tokens // 5}, "softcap": {"softcap": 20.0}, "alibi": {"alibi_slopes": slopes},
        "documents": {"doc_ids": docs}, "documents, window": {"doc_ids": docs, "window": tokens // 7},
        "scale": {"scale": 0.3}, "sinks": {"sinks": torch.linspace(-2.0, 2.0, 8)},
    }  # fmt: skip
    return every | {"all": {name: value for options in every.values() for name, value in options.items()}}


def library(machine: Machine) -> Iterator[Case]:
    """Attention by torch's ops over the cache."""
    bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
    tokens = 512 if machine.is_cuda else 24
    odd = [113, 7, 1, 391] if machine.is_cuda else [9, 3, 1, 11]
    halves, many = [tokens // 2] * 2, [tokens // 8] * 8
    every = attention_options(tokens)
    shapes: list[tuple[torch.dtype, int, int, list[int], str]] = []
    few_keys = 100 if machine.is_cuda else 4
    shapes += [(dtype, 64, 2, odd, "") for dtype in (bf16, fp16, fp32, fp64)]
    shapes += [(bf16, 128, kv_heads, sizes, "") for kv_heads in (8, 2, 1) for sizes in (halves, odd, many)]
    shapes += [(dtype, 64, 2, odd, name) for name in every for dtype in (bf16, fp32)]
    shapes += [(bf16, head_dim, 2, odd, "") for head_dim in (32, 40, 80, 96, 192, 256, 36)]
    shapes += [(bf16, head_dim, 2, sizes, "documents") for head_dim in (40, 128, 192, 256) for sizes in (odd, many)]
    shapes += [(fp32, head_dim, kv_heads, odd, "") for head_dim in (128, 36, 30) for kv_heads in (8, 1)]
    shapes += [(fp16, 128, 2, [tokens - 1, 1], ""), (bf16, 64, 2, [1, tokens - 1], "window")]
    for dtype, head_dim, kv_heads, sizes, name in shapes if machine.is_cuda else shapes[::5]:
        text = f"{str(dtype).removeprefix('torch.')} d{head_dim} kv{kv_heads} {sizes} {name}".rstrip()
        arguments = (machine, dtype, head_dim, kv_heads, sizes, every.get(name, {}), "library")
        yield text, functools.partial(attention_errors, *arguments)
        if sizes == odd and head_dim == 64:
            yield f"{text}, backward by {few_keys} keys", functools.partial(attention_errors, *arguments, few_keys)
        if name in ("", "sinks") and dtype in (bf16, fp16):
            cudnn = functools.partial(attention_errors, *arguments, by_cudnn=True)
            yield f"{text}, cuDNN where it takes the shape", cudnn
    for head_dim, v_head_dim, name in (
        (192, 128, ""),
        (128, 64, "sinks"),
        (64, 128, "window"),
        (192, 128, "documents"),
    ):
        arguments = (machine, bf16, head_dim, 2, odd, every.get(name, {}), "library")
        for by_cudnn in (False, True):
            run = functools.partial(attention_errors, *arguments, v_head_dim=v_head_dim, by_cudnn=by_cudnn)
            text = f"bfloat16 d{head_dim}, values d{v_head_dim} kv2 {odd} {name}".rstrip()
            yield f"{text}{', cuDNN where it takes the shape' * by_cudnn}", run
    for dtype, head_dim in ((bf16, 64), (bf16, 128), (fp16, 128)) if machine.is_cuda else ():
        for name, packs in attention_paths.INSTEAD:
            text = f"{proof.DTYPES[dtype]} d{head_dim} check of {name} over {'siblings' if packs else 'paths'}"
            yield text, functools.partial(over_paths, machine, name, packs, dtype, head_dim)


def over_paths(machine: Machine, name: str, packs: bool, dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """The check at the first use, of attention over the keys of a tree's path: the first time, and again."""
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        attention_paths.prove(name, packs, dtype, head_dim, machine.device, cuda_attention._plan_by)
        seconds.append(time.perf_counter() - start)
    return {"ms": [round(each * 1e3, 1) for each in seconds]}


# -- the package's own kernels ---------------------------------------------------------------------------------------


def own(machine: Machine) -> Iterator[Case]:
    """Against fp64, with NaN in all that they are given to write; out, dk and dv have the same bits again."""

    def one(*arguments: Any) -> dict[str, Any]:
        own_operations(machine)
        found = attention_errors(machine, *arguments, "own")
        assert all(found["reruns equal"][name] for name in ("out", "dk", "dv")), found
        return found

    tokens = 1024 if machine.is_cuda else 130
    odd = [113, 7, 1, tokens - 121] if machine.is_cuda else [70, 1, 59]
    many = [tokens // 4] * 3 + [tokens - tokens // 4 * 3]
    every = attention_options(tokens)
    del every["alibi"], every["all"]["alibi_slopes"]
    shapes: list[tuple[torch.dtype, int, int, list[int], str]] = []
    for head_dim, dtype in itertools.product((128, 64), (torch.bfloat16, torch.float16)):
        shapes += [(dtype, head_dim, kv_heads, odd, "") for kv_heads in (8, 2, 1)]
        shapes += [(dtype, head_dim, 2, odd, name) for name in every]
        shapes += [(dtype, head_dim, 2, sizes, "") for sizes in ([tokens], many, [tokens - 1, 1], [1, tokens - 1])]
    for dtype, head_dim, kv_heads, sizes, name in shapes if machine.is_cuda else [shapes[34]]:
        text = f"{str(dtype).removeprefix('torch.')} d{head_dim} kv{kv_heads} {sizes} {name}".rstrip()
        yield text, functools.partial(one, dtype, head_dim, kv_heads, sizes, every.get(name, {}))

    def check(name: str, dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
        """The one at the first use: the first time, with what CUDA loads then, and again."""
        launch = functools.partial(kernel_library.launch_attention, own_operations(machine)[name])
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            attention_proof.prove(launch, proof.Use(name, dtype, head_dim, head_dim, machine.device))
            seconds.append(time.perf_counter() - start)
        return {"ms": [round(each * 1e3, 1) for each in seconds]}

    uses = list(itertools.product(kernel_library.ATTENTION, proof.DTYPES, (128, 64)))
    for name, dtype, head_dim in uses if machine.is_cuda else uses[1:2]:
        text = f"{proof.DTYPES[dtype]} d{head_dim} check of {name} at its first use"
        yield text, functools.partial(check, name, dtype, head_dim)


def tiny(machine: Machine) -> Iterator[Case]:
    """Each of our kernels once, on few tokens: for the tools that watch every access."""

    def one() -> dict[str, Any]:
        kernel_library.use_kernels("own")
        tokens = 200 if machine.is_cuda else 80
        options = {"window": 70, "softcap": 20.0, "doc_ids": attention_options(tokens)["documents"]["doc_ids"]}
        options["doc_ids"] = options["doc_ids"].to(machine.device)
        qkv, (dout, *_) = (
            [
                t.to(machine.device)
                for t in attention_runs.random_qkv(8, 2, tokens=tokens, head_dim=64, seed=seed, dtype=torch.bfloat16)
            ]
            for seed in (0, 1)
        )
        with step_on(machine.device):
            attention_runs.segmented([tokens - 50, 1, 49], options, [qkv], [dout])
        machine.sync()
        return {}

    def merged_and_added_up() -> dict[str, Any]:
        library = own_operations(machine)[kernel_library.PARTS].library
        for what in ("merge", "add", "finish", "total"):
            use = proof.Use(what, torch.bfloat16, 64, 64, machine.device)
            attention_parts.prove(library, use)
        machine.sync()
        return {}

    yield "window, soft cap and documents", one
    yield "merged and added up", merged_and_added_up


def sanitizer(machine: Machine) -> Iterator[Case]:
    """initcheck watches all kernels, torch's too: of those that it does not watch it sees no write."""
    ours = ["--kernel-name", "kns=s1f_"]
    options = {"memcheck": [*ours, "--report-api-errors", "no"], "racecheck": ours, "synccheck": ours, "initcheck": []}

    def one(tool: str) -> dict[str, Any]:
        arguments = ["--tool", tool, "--error-exitcode", str(TOOL_FOUND_ERRORS), *options[tool]]
        said = watched(machine, "compute-sanitizer", arguments, "tiny", 25, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        return {"said": said.strip().splitlines()[-1]}

    for tool in options if machine.is_cuda else ["memcheck"]:
        yield tool, functools.partial(one, tool)
