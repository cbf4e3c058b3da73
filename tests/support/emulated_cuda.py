"""Builds CUDA kernels for the CPU, on the emulation of tests/cuda, and runs them on torch's CPU tensors.

A mutation is a change of the kernels' source that must not pass the tests. All mutations of a list are compiled into
one library, each behind a condition, and switched on one at a time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import kernel_library

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cuda"))

from kernel_table import Kernel, Operation, kernels_of  # noqa: E402

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # then the kernels are built for it too
DTYPES = {torch.bfloat16: 2, torch.float16: 3}  # csrc/core/dtype.h
# nvcc contracts products and sums to FMAs wherever it can; so does the emulation, on a machine that has them.
HAS_FMA = platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text()
CONTRACTION = ["-ffp-contract=fast", *(["-mfma"] if HAS_FMA and platform.machine() == "x86_64" else [])]
SHARED_99_KB, SHARED_163_KB = 99 * 1024, 163 * 1024


@dataclasses.dataclass(frozen=True)
class Sequences:
    """A batch of sequences, how it is cut into segments, and which attention is asked for."""

    tokens: int = 200
    segments: tuple[int, ...] = ()  # none: the whole sequence
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    documents: tuple[int, ...] = ()  # lengths; ids go 0, 1, ... and start again after 3, so that documents come back
    num_parts: int = 0
    head_major: bool = False  # q, out and their gradients (batch, heads, tokens, head_dim), with space between rows

    def __str__(self) -> str:
        shown = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in shown).replace("torch.", "") or "plain"

    def document_ids(self) -> Tensor:
        """(batch, tokens); each entry of the batch has other boundaries. Without documents all are 0."""
        lengths = torch.tensor(self.documents or (self.tokens,))
        assert lengths.sum() == self.tokens
        ids = [torch.repeat_interleave(torch.arange(len(lengths)) % 4, lengths.roll(b)) for b in range(self.batch)]
        return torch.stack(ids).to(torch.int32)

    def hidden(self) -> Tensor:
        """Which keys no query sees, (batch, 1, tokens, tokens)."""
        position, ids = torch.arange(self.tokens), self.document_ids()
        distance = position[:, None] - position[None, :]
        outside = (distance < 0) | (distance >= (self.window or self.tokens))
        return (outside | (ids[:, :, None] != ids[:, None, :]))[:, None]


class Strides(Structure):
    """s1f_strides, as the following their namesakes."""

    _fields_ = [("batch", c_int64), ("head", c_int64), ("row", c_int64)]

    def __repr__(self) -> str:  # names of tests hold it: the same in every process
        return f"Strides({self.batch}, {self.head}, {self.row})"


class Attention(Structure):
    _fields_ = [
        ("dtype", c_int32), *((name, c_int64) for name in
        ("batch", "heads", "kv_heads", "segment_len", "head_dim", "q_start")),
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("q_strides", Strides), ("kv_strides", Strides),
        ("out", c_void_p), ("out_strides", Strides), ("lse", c_void_p), ("scale", c_double), ("window", c_int64),
        ("softcap", c_double), ("slopes", POINTER(c_float)), ("slopes_batch_stride", c_int64), ("docs", c_void_p),
        ("docs_batch_stride", c_int64), ("dout", c_void_p), ("dout_strides", Strides), ("dq", c_void_p),
        ("dq_strides", Strides), ("dk", c_void_p), ("dv", c_void_p), ("dkv_strides", Strides),
        ("store_kv_grads", c_int32), ("own_dk", c_void_p), ("own_dv", c_void_p), ("own_dkv_strides", Strides),
    ]  # fmt: skip


class CudaAttention(Structure):
    _fields_ = [
        ("attention", Attention), ("num_parts", c_int32), ("deterministic", c_int32), ("scratch", c_void_p),
        ("scratch_bytes", c_int64),
    ]  # fmt: skip


class Mutation(NamedTuple):
    name: str
    file: str  # of kernels/cuda
    original: str  # an expression, or whole statements; occurs once
    mutated: str


class KernelError(Exception):
    """The emulation's error: a race, an access out of bounds, a copy that is not waited for ..."""


class Refused(Exception):
    """The launcher did not take the arguments."""


def strides_of(t: Tensor) -> Strides:
    assert t.stride(3) == 1
    return Strides(*t.stride()[:3])


def attention_of(
    case: Sequences, begin: int, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, docs: Tensor,
    scale: float,
) -> Attention:  # fmt: skip
    """The arguments of a segment from `begin` on that forward and backward have in common."""
    return Attention(
        dtype=DTYPES[case.dtype], batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, segment_len=q.shape[2],
        head_dim=case.head_dim, q_start=begin, q=q.data_ptr(), k=keys.data_ptr(), v=values.data_ptr(),
        q_strides=strides_of(q), kv_strides=strides_of(keys), out=out.data_ptr(), out_strides=strides_of(out),
        lse=lse.data_ptr(), scale=scale, window=case.window, softcap=case.softcap,
        docs=docs.data_ptr() if case.documents else None, docs_batch_stride=docs.stride(0),
    )  # fmt: skip


def laid_out(t: Tensor, case: Sequences) -> Tensor:
    """A copy in the layout that the case asks for."""
    if not case.head_major:
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    memory = torch.full((*t.shape[:3], case.head_dim + 8), math.nan, dtype=t.dtype)
    memory[..., : case.head_dim] = t
    return memory[..., : case.head_dim]


def dense_pieces(t: Tensor) -> list[Tensor]:
    """Its memory as dense tensors."""
    token_major = t.transpose(1, 2)
    return [token_major] if token_major.is_contiguous() else list(t.flatten(0, 2))


def errors(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """Largest and root mean square of the differences."""
    difference = got.double() - truth
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def build(
    sources: Sequence[str], work: Path, mutations: Sequence[Mutation] = (), flags: Sequence[str] = ()
) -> Emulated:
    """Compiles .cu files, named as from the root, and the emulation into a library in the folder ``work``."""
    tree = work / "tree"
    for folder in ("kernels", "kernels/cuda", "csrc/core", "tests/cuda"):
        (tree / folder).mkdir(parents=True)
        for path in itertools.chain(*((ROOT / folder).glob(kind) for kind in ("*.h", "*.cuh", "*.cu"))):
            shutil.copy(path, tree / folder)
    for index, mutation in enumerate(mutations, 1):
        _insert(mutation, index, tree / "kernels/cuda" / mutation.file)
    objects = []
    command = [*os.environ.get("CXX", "g++").split(), "-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", *flags]
    command += [*CONTRACTION, "-Wno-unused-function", f"-I{ROOT / 'tests/cuda'}"]
    if SANITIZED:
        command += ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"]
    command.append("-w" if mutations else "-Werror")
    processes = []
    for path in [ROOT / "tests/cuda/emulation.cpp", *(tree / source for source in sources)]:
        objects.append(work / f"{path.stem}.o")
        processes.append(subprocess.Popen([*command, "-x", "c++", "-c", path, "-o", objects[-1]]))
    for process in processes:
        assert process.wait() == 0, f"{process.args} failed"
    library = work / "emulated.so"
    subprocess.run([*command, "-shared", *objects, "-o", library], check=True)
    return Emulated(library)


def _insert(mutation: Mutation, index: int, path: Path) -> None:
    text = (ROOT / "kernels/cuda" / mutation.file).read_text()
    assert text.count(mutation.original) == 1, f"{mutation.name}: {mutation.original!r} must occur once"
    condition = f"::s1f::emulation::mutation != {index}"
    if mutation.original.rstrip().endswith((";", "}")):
        both = f"if ({condition}) {{ {mutation.original} }} else {{ {mutation.mutated} }}"
    else:
        both = f"({condition} ? ({mutation.original}) : ({mutation.mutated}))"
    changed = path.read_text()
    assert mutation.original in changed, f"{mutation.name}: earlier mutations changed a part of {mutation.original!r}"
    path.write_text(changed.replace(mutation.original, both, 1))


class Emulated:
    """A library of kernels on the emulation. Random orders follow from ``seed``."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.s1f_emulation_error.restype = c_char_p
        self.seed = 0
        self.mutation = 0  # index from 1 of the mutation that is switched on
        self.shared_limit = SHARED_163_KB
        self.conflicts = self.products = self.blocks = 0  # of the last run

    def operation(self, name: str) -> Operation:
        return Operation.in_dll(self._library, f"s1f_cuda_{name}")

    def kernels(self, name: str) -> list[Kernel]:
        return kernels_of(self.operation(name))

    def run(self, name: str, arguments: CudaAttention, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Launches with as much scratch as the operation asks for. ``read``, ``written``: dense tensors, the only
        memory that the kernels may touch."""
        self._library.s1f_emulation_set(self.mutation, self.shared_limit)
        wanted = self.operation(name).scratch_bytes(byref(arguments), -1)
        scratch = torch.full((max(wanted, 0) // 4,), math.nan)
        arguments.scratch, arguments.scratch_bytes = scratch.data_ptr(), max(wanted, 0)
        self.launch(name, arguments, read, [*written, scratch], -1)

    def launch(self, name: str, arguments: Structure, read: Sequence[Tensor], written: Sequence[Tensor],
               kernel: int) -> None:  # fmt: skip
        library = self._library
        library.s1f_emulation_reset(c_uint64(self.seed))
        library.s1f_emulation_set(self.mutation, self.shared_limit)
        for tensors, writable in ((read, 0), (written, 1)):
            for t in tensors:
                size = t.numel() * t.element_size()
                library.s1f_emulation_add_extent(c_void_p(t.data_ptr()), c_int64(size), writable)
        status = self.operation(name).launch(byref(arguments), kernel, None)
        counts = [c_int64() for _ in range(3)]
        library.s1f_emulation_counts(*(byref(count) for count in counts))
        self.conflicts, self.products, self.blocks = (count.value for count in counts)
        error = library.s1f_emulation_error().decode()
        if error:
            raise KernelError(error)
        if status != 0:
            raise Refused(f"{name} returned {status}")


# -- in place of the installed kernels -------------------------------------------------------------------------------

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
def emulated_parts(library: Path, mutation: int = 0) -> Iterator[list[str]]:
    """The package launches attention_parts of an emulated library meanwhile, on CPU tensors; yields what it launched.

    What is to be written without being read holds NaN before each launch.
    """
    emulated = Emulated(library)
    launched: list[str] = []
    launch, installed = _C.cuda_attention_parts, kernel_library.LIBRARY

    def within_extents(*arguments: Any) -> bool:
        what, store = arguments[1], arguments[3]
        launched.append(what)
        emulated._library.s1f_emulation_reset(c_uint64(len(launched)))
        emulated._library.s1f_emulation_set(mutation, emulated.shared_limit)
        for address, size, is_written in parts_extents(arguments):
            if is_written and (what != "add" or store):
                ctypes.memset(address, 0xFF, size)
            emulated._library.s1f_emulation_add_extent(c_void_p(address), c_int64(size), int(is_written))
        try:
            return launch(*arguments)
        except RuntimeError as error:
            raise AssertionError(emulated._library.s1f_emulation_error().decode()) from error

    kernel_library.LIBRARY, _C.cuda_attention_parts = library, within_extents
    kernel_library.operations.cache_clear()
    try:
        yield launched
    finally:
        kernel_library.LIBRARY, _C.cuda_attention_parts = installed, launch
        kernel_library.operations.cache_clear()


@contextmanager
def emulated_kernels(library: Path) -> Iterator[list[str]]:
    """The package launches the kernels of an emulated library meanwhile, on CPU tensors; yields what it launched of
    attention.

    Scratch memory, and sums that are to be stored, hold NaN before each launch.
    """
    emulated = Emulated(library)
    launched: list[str] = []
    launch = _C.cuda_attention

    def within_extents(
        handle: object, name: str, kernel: int, arguments: Any, scratch: int, size: int, stream: int
    ) -> None:
        launched.append(name)
        ctypes.memset(scratch, 0xFF, size)
        emulated._library.s1f_emulation_reset(c_uint64(len(launched)))
        for address, extent, is_sum in [*extents(arguments), (scratch, size, False)]:
            if is_sum and arguments[STORE]:
                ctypes.memset(address, 0xFF, extent)
            emulated._library.s1f_emulation_add_extent(c_void_p(address), c_int64(extent), 1)
        try:
            launch(handle, name, kernel, arguments, scratch, size, stream)
        except RuntimeError as error:
            raise AssertionError(emulated._library.s1f_emulation_error().decode()) from error

    with emulated_parts(library):
        _C.cuda_attention = within_extents
        try:
            yield launched
        finally:
            _C.cuda_attention = launch
