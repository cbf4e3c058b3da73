"""Builds CUDA kernels for the CPU, on the emulation of tests/cuda, and has the package launch them on CPU tensors."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest

from seq1f1b import _C
from seq1f1b.device import kernel_library

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # then the kernels are built for it too
SHARED_99_KB, SHARED_163_KB = 99 * 1024, 163 * 1024


def build(work: Path, operations: Sequence[str] = kernel_library.OPERATIONS) -> Path:
    """Compiles the operations' .cu files and the emulation into a library in the folder ``work``."""
    if platform.machine() != "x86_64" or not {"fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("the emulation of CUDA needs an x86-64 with FMA and F16C")
    # nvcc contracts products and sums to FMAs wherever it can.
    command = [
        *os.environ.get("CXX", "g++").split(),
        "-std=c++17",
        "-O2",
        "-g1",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    command += ["-ffp-contract=fast", "-mfma", "-mf16c", "-Wno-unused-function", f"-I{ROOT / 'tests/cuda'}"]
    if SANITIZED:
        command += ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"]
    sources = [ROOT / "tests/cuda/emulation.cpp", *(ROOT / f"kernels/cuda/sm80_{name}.cu" for name in operations)]
    objects = [work / f"{path.stem}.o" for path in sources]
    processes = [
        subprocess.Popen([*command, "-x", "c++", "-c", path, "-o", to])
        for path, to in zip(sources, objects, strict=True)
    ]
    for process in processes:
        assert process.wait() == 0, f"{process.args} failed"
    library = work / "emulated.so"
    subprocess.run([*command, "-shared", *objects, "-o", library], check=True)
    return library


STORE = 23  # place of an argument of _C.cuda_attention: dk and dv hold nothing yet


def extents(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int, bool]]:
    """Address and bytes of each tensor that a launch gets, and whether it is dk or dv of the slab."""
    _, batch, heads, kv_heads, tokens, head_dim, q_start, *_, docs, docs_stride = arguments[:12]
    q, k, v, out, lse, dout, dq, dk, dv, own_dk, own_dv = arguments[12:23]
    end = q_start + tokens
    shapes = [(t, heads, tokens, 2) for t in (q, out, dout, dq)] + [(t, kv_heads, end, 2) for t in (k, v)]
    shapes += [(t, kv_heads, end, 4) for t in (dk, dv)] + [(t, kv_heads, tokens, 2) for t in (own_dk, own_dv)]
    for t, of_heads, rows, element_bytes in shapes:
        if t is not None:
            address, *strides = t
            counts = (batch - 1, of_heads - 1, rows - 1)
            last = sum(count * stride for count, stride in zip(counts, strides, strict=True))
            yield address, (last + head_dim) * element_bytes, element_bytes == 4
    yield lse, batch * heads * tokens * 4, False
    if docs:
        yield docs, ((batch - 1) * docs_stride + end) * 4, False


def _runs(rows: tuple[int, ...], sizes: tuple[int, int, int, int], element_bytes: int) -> list[tuple[int, int]]:
    """Address and bytes of each piece of memory, as long as can be, that a tensor (address, four strides) fills."""
    address, *strides, _ = rows
    batch, heads, tokens, head_dim = sizes
    places = itertools.product(range(batch), range(heads), range(tokens))
    starts = sorted(sum(i * stride for i, stride in zip(place, strides, strict=True)) for place in places)
    found: list[tuple[int, int]] = []
    for begin in starts:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], begin + head_dim)
        else:
            found.append((begin, begin + head_dim))
    return [(address + begin * element_bytes, (end - begin) * element_bytes) for begin, end in found]


def parts_extents(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int, bool]]:
    """Address and bytes of all that a launch of attention_parts may touch, and whether it may write there."""
    _, what, _, store, batch, heads, rows, head_dim, v_head_dim, parts, slabs, outs, lse, _ = arguments
    for tensors, element_bytes, is_written in ((parts, 2, False), (slabs, 4, what == "add"), (outs, 2, True)):
        of_kv = (head_dim, v_head_dim) if what in ("add", "finish") else (head_dim,) * len(tensors)
        if tensors is slabs and what == "finish" and store:
            continue
        for tensor, of_head in zip(tensors, of_kv, strict=False):  # add has no outs
            for address, size in _runs(tensor, (batch, heads, rows, of_head), element_bytes):
                yield address, size, is_written
    for i, address in enumerate(lse):
        if address:
            yield address, batch * heads * rows * 4, i == 2


@contextmanager
def emulated_kernels(library: Path, shared_limit: int = SHARED_163_KB) -> Iterator[list[str]]:
    """The package launches the kernels of an emulated library meanwhile, on CPU tensors; yields what it launched.

    What is to be written without being read, and scratch memory, holds NaN before each launch.
    """
    emulated = ctypes.CDLL(str(library))
    emulated.s1f_emulation_error.restype = ctypes.c_char_p
    emulated.s1f_emulation_set(shared_limit)
    launched: list[str] = []
    attention, parts, installed = _C.cuda_attention, _C.cuda_attention_parts, kernel_library.LIBRARY

    def launch(name: str, run: Any, memory: Iterator[tuple[int, int, bool, bool]], arguments: Any) -> Any:
        launched.append(name)
        emulated.s1f_emulation_reset(c_uint64(len(launched)))
        for address, size, is_written, is_void in memory:
            if is_void:
                ctypes.memset(address, 0xFF, size)
            emulated.s1f_emulation_add_extent(c_void_p(address), c_int64(size), int(is_written))
        try:
            return run(*arguments)
        except RuntimeError as error:
            raise AssertionError(emulated.s1f_emulation_error().decode()) from error

    def launch_attention(*arguments: Any) -> None:
        _, name, _, of_call, scratch, size, _ = arguments
        memory = [(address, extent, True, is_sum and of_call[STORE]) for address, extent, is_sum in extents(of_call)]
        launch(name, attention, iter([*memory, (scratch, size, True, True)]), arguments)

    def launch_parts(*arguments: Any) -> Any:
        what, store = arguments[1], arguments[3]
        memory = ((*found, found[2] and (what != "add" or store)) for found in parts_extents(arguments))
        return launch(what, parts, memory, arguments)

    kernel_library.LIBRARY, _C.cuda_attention, _C.cuda_attention_parts = library, launch_attention, launch_parts
    try:
        yield launched
    finally:
        kernel_library.LIBRARY, _C.cuda_attention, _C.cuda_attention_parts = installed, attention, parts
