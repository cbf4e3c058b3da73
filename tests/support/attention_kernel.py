"""The attention kernels of the CPU themselves (kernels/attention.h), over keys that lie where a test wants them."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p

import torch
from core_extension import core
from torch import Tensor

from seq1f1b import _C

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # csrc/core/dtype.h
CANARY = 12345.0  # in rows of dk and dv that no kernel may touch
GAP = 2  # rows that no key has, after the last range
ISAS = ("reference", "portable", "neon", "avx2", "avx512", "avx512bf16")


class Strides(Structure):
    """s1f_strides, as the following their namesakes."""

    _fields_ = [("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class KeyRange(Structure):
    _fields_ = [("begin", c_int64), ("end", c_int64), ("row", c_int64)]


class Arguments(Structure):
    _fields_ = [
        ("dtype", c_int32), *((name, c_int64) for name in
        ("batch", "heads", "kv_heads", "segment_len", "head_dim", "v_head_dim", "q_start")),
        ("q", c_void_p), ("k", c_void_p), ("v", c_void_p), ("q_strides", Strides), ("k_strides", Strides),
        ("v_strides", Strides), ("ranges", POINTER(KeyRange)), ("num_ranges", c_int32), ("out", c_void_p),
        ("out_strides", Strides), ("lse", c_void_p), ("scale", c_double), ("window", c_int64), ("softcap", c_double),
        ("slopes", c_void_p), ("slopes_batch_stride", c_int64), ("docs", c_void_p), ("docs_batch_stride", c_int64),
        ("shared_keys", c_int64), ("sinks", c_void_p), ("dout", c_void_p), ("dout_strides", Strides), ("dq", c_void_p),
        ("dq_strides", Strides), ("dk", c_void_p), ("dv", c_void_p), ("dk_strides", Strides), ("dv_strides", Strides),
        ("kept_kv_grads", c_int64), ("own_dk", c_void_p), ("own_dv", c_void_p), ("own_dk_strides", Strides),
        ("own_dv_strides", Strides), ("dsinks", c_void_p),
    ]  # fmt: skip


assert ctypes.sizeof(Arguments) == core.attention_args_bytes()

Ranges = Sequence[tuple[int, int, int]]  # begin, end, row


@dataclasses.dataclass
class Call:
    """A segment's queries over the T keys of its path. Tensors are (batch, heads, rows, columns)."""

    q: Tensor  # of the last S keys
    k: Tensor  # along the path, as v and docs
    v: Tensor
    dout: Tensor
    window: int = 0
    softcap: float = 0.0
    slopes: Tensor | None = None  # (batch, heads)
    docs: Tensor | None = None  # (batch, T)
    shared: int = 0
    sinks: Tensor | None = None  # (heads), of the dtype of sums
    kept: int = 0  # keys whose dk and dv are added to, 0.5 each
    owns: bool = False  # whether the segment's own dk and dv are asked for as elements
    token_major: bool = False  # and with space between rows

    @property
    def tokens(self) -> int:
        return self.k.shape[2]

    @property
    def begin(self) -> int:
        return self.tokens - self.q.shape[2]

    @property
    def scale(self) -> float:
        return self.q.shape[3] ** -0.5

    def queries(self) -> dict[str, Tensor]:
        return {"q": self.q, "dout": self.dout}

    @property
    def dtype_of_sums(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


@dataclasses.dataclass
class Results:
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor  # along the path; the segment's own rows are its elements where these were asked for
    dv: Tensor
    dsinks: Tensor
    is_clean: bool = True  # whether rows that hold no key kept what was there

    def tensors(self) -> list[Tensor]:
        return [self.out, self.lse, self.dq, self.dk, self.dv, self.dsinks]


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    before = _C.attention_isa()
    core.attention_set_isa(name)
    try:
        yield
    finally:
        core.attention_set_isa(before)


def has(name: str) -> bool:
    try:
        with instruction_set(name):
            return True
    except ValueError:
        return False


def filled(sizes: Sequence[int], value: float, dtype: torch.dtype, token_major: bool) -> Tensor:
    batch, heads, rows, columns = sizes
    if not token_major:
        return torch.full(tuple(sizes), value, dtype=dtype)
    memory = torch.full((batch, rows, heads, columns + 3), value, dtype=dtype)
    return memory.transpose(1, 2)[..., :columns]


def rows_of(ranges: Ranges) -> Tensor:
    return torch.cat([torch.arange(row, row + end - begin) for begin, end, row in ranges])


class Memory:
    """A call's tensors, where the kernel finds them.

    Args:
        ranges: where keys lie. None: one after another, and the kernel is told of no ranges.
        told: a call and ranges whose numbers the kernel is given instead.
    """

    def __init__(self, call: Call, ranges: Ranges | None = None, told: tuple[Call, Ranges] | None = None) -> None:
        self.call, major = call, call.token_major
        self.rows = torch.arange(call.tokens) if ranges is None else rows_of(ranges)
        self.num_rows = int(self.rows.max()) + 1 + GAP
        self.places = {name: filled(t.shape, math.nan, t.dtype, major).copy_(t) for name, t in call.queries().items()}
        for name, t in (("k", call.k), ("v", call.v)):
            of_rows = (*t.shape[:2], self.num_rows, t.shape[3])
            own = (*t.shape[:2], call.q.shape[2], t.shape[3])
            self.places[name] = filled(of_rows, math.nan, t.dtype, major)
            self.places[name][:, :, self.rows] = t
            self.places["d" + name] = filled(of_rows, CANARY, call.dtype_of_sums, major)
            self.places["d" + name][:, :, self.rows[: call.kept]] = 0.5
            self.places["d" + name][:, :, self.rows[call.kept :]] = math.nan
            if call.owns:
                self.places["own_d" + name] = filled(own, math.nan, t.dtype, major)
        self.places["out"] = filled(call.dout.shape, math.nan, call.q.dtype, major)
        self.places["dq"] = filled(call.q.shape, math.nan, call.q.dtype, major)
        self.lse = torch.full(call.q.shape[:3], math.nan, dtype=call.dtype_of_sums)
        sinks = call.q.shape[1] if call.sinks is not None else 0
        self.dsinks = torch.full((sinks,), math.nan, dtype=call.dtype_of_sums)
        self.args = self._arguments(*(told or (call, ranges)))

    def _arguments(self, told: Call, ranges: Ranges | None) -> Arguments:
        call = self.call
        args = Arguments(
            dtype=DTYPES[call.q.dtype], batch=call.q.shape[0], heads=call.q.shape[1], kv_heads=call.k.shape[1],
            segment_len=call.q.shape[2], head_dim=call.q.shape[3], v_head_dim=call.v.shape[3], q_start=call.begin,
            scale=call.scale, window=told.window, softcap=call.softcap, shared_keys=told.shared,
            kept_kv_grads=told.kept, lse=self.lse.data_ptr(),
        )  # fmt: skip
        if ranges is not None:
            args.ranges = (KeyRange * len(ranges))(*(KeyRange(*r) for r in ranges))
            args.num_ranges = len(ranges)
        for name, t in self.places.items():
            setattr(args, name, t.data_ptr())
            setattr(args, f"{name}_strides", Strides(*t.stride()[:3]))
        if told.slopes is not None:
            args.slopes, args.slopes_batch_stride = told.slopes.data_ptr(), told.slopes.stride(0)
        if call.docs is not None:
            args.docs, args.docs_batch_stride = call.docs.data_ptr(), call.docs.stride(0)
        if call.sinks is not None:
            args.sinks, args.dsinks = call.sinks.data_ptr(), self.dsinks.data_ptr()
        return args

    def forward(self, threads: int = 1) -> None:
        core.attention(ctypes.addressof(self.args), False, threads)

    def backward(self, threads: int = 1) -> None:
        core.attention(ctypes.addressof(self.args), True, threads)

    def results(self) -> Results:
        others = torch.ones(self.num_rows, dtype=torch.bool)
        others[self.rows] = False
        grads = []
        for name in ("dk", "dv"):
            grads.append(self.places[name][:, :, self.rows])
            if self.call.owns:
                grads[-1][:, :, self.call.begin :] = self.places["own_" + name]
        is_clean = all(bool((self.places[name][:, :, others] == CANARY).all()) for name in ("dk", "dv"))
        return Results(self.places["out"], self.lse, self.places["dq"], *grads, self.dsinks, is_clean)


def run(
    call: Call, ranges: Ranges | None = None, *, threads: int = 1, told: tuple[Call, Ranges] | None = None
) -> Results:
    """Forward and backward. The arguments are those of ``Memory``."""
    memory = Memory(call, ranges, told)
    memory.forward(threads)
    memory.backward(threads)
    return memory.results()


def formula(call: Call) -> Results:
    """What attention is, in torch's elementary operations and fp64, with gradients by autograd."""
    leaves = [t.double().requires_grad_() for t in (call.q, call.k, call.v)]
    q, k, v = leaves
    sinks = torch.full((q.shape[1],), -math.inf).double() if call.sinks is None else call.sinks.double()
    sinks.requires_grad_()
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * call.scale
    if call.softcap > 0:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    key, token = torch.arange(call.tokens), torch.arange(call.begin, call.tokens)[:, None]
    if call.slopes is not None:
        logits = logits - call.slopes.double()[:, :, None, None] * (token - key)
    hidden = (key > token)[None]
    if call.window:
        hidden = hidden | (token - key >= call.window)
    if call.docs is not None:
        other = call.docs[:, None, :] != call.docs[:, call.begin :, None]
        hidden = hidden | (other & (key >= call.shared))
    logits = logits.masked_fill(hidden[:, None], -math.inf)
    column = sinks[None, :, None, None].expand(*logits.shape[:3], 1)
    lse = torch.logsumexp(torch.cat((logits, column), 3), 3)
    out = torch.exp(logits - lse[..., None]) @ v.repeat_interleave(group, 1)
    dq, dk, dv, dsinks = torch.autograd.grad(out, [*leaves, sinks], call.dout.double())
    for grads in (dk, dv):
        grads[:, :, : call.kept] += 0.5
    return Results(out.detach(), lse.detach(), dq, dk, dv, dsinks if call.sinks is not None else dsinks[:0])
