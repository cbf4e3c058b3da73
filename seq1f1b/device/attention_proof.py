"""Compares our kernels of attention with matrix products in float64 on small cases, for their first use (proofs.py).

A case is a segment over a prefix, with ragged sizes: with documents, with a window and a soft cap, and with all
options. The truth is the plain way (attention_ways.py) on the CPU. Memory around the results must not change.
tests/gpu compares larger cases.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b.device import attention_ways, kernel_library
from seq1f1b.device.attention_ways import BackwardArguments, Options, chain
from seq1f1b.device.proofs import Use, apart, memory_of, numbers

__all__: list[str] = []

BATCH, HEADS, KV_HEADS, PREFIX, TOKENS, BEHIND = 2, 4, 2, 68, 70, 3
KEYS = PREFIX + TOKENS  # keys and queries are a few more than whole tiles of the kernels
DOCUMENTS = ((0, 41, 90, 131), (0, 100))  # first tokens, by row of the batch

ERROR = 2.0
"""How far a result may be off, as a part of its norm and in units of the dtype's eps: about twice what matrix products
are off whose intermediate results are rounded to that dtype."""

SPREAD = 32.0
"""How far one element may be off, in root mean squares of what all may be off."""

LSE_ERROR = 1e-4
"""As a part of 1 + lse: sums in float32, of logits up to 10, by approximations of 2^-20."""


class Case(NamedTuple):
    name: str
    has_documents: bool = False
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None
    store: bool = False  # False: a backward adds to sums


CASES = (
    Case("documents", has_documents=True),
    Case("a window and a soft cap", window=45, softcap=2.0),
    Case("documents, a window and a soft cap", True, 70, 2.0, 0.3, store=True),
)


def prove(use: Use) -> None:
    """Compares attention_forward or attention_backward with float64 on the cases.

    Raises:
        AssertionError, RuntimeError, ...: the operation is wrong, or does not run.
    """
    with apart(use.device):
        for case in CASES:
            _prove_case(use, case)


def _prove_case(use: Use, case: Case) -> None:
    drawn, is_backward = numbers(), use.kernel == "attention_backward"
    q, dout = (drawn(BATCH, HEADS, TOKENS, size).to(use.dtype) for size in (use.head_dim, use.v_head_dim))
    k, v = (drawn(BATCH, KV_HEADS, KEYS, size).to(use.dtype) for size in (use.head_dim, use.v_head_dim))
    docs, none = _documents(case), torch.empty(0, device="cpu")
    options = Options(
        docs, none, docs[:, PREFIX:], none, case.scale or use.head_dim**-0.5, case.window, case.softcap,
        chain(KEYS, case.store), longest=KEYS,
    )  # fmt: skip
    exact = q.double(), k.double(), v.double()
    true_out, true_lse = attention_ways.forward("plain", *exact, options)

    inputs: Any = [_within(use, t, use.dtype) for t in (q, k, v)]
    launch: Any = functools.partial(
        kernel_library.launch_attention, kernel_library.operations()[use.kernel], *inputs, scale=options.scale,
        window=case.window, softcap=case.softcap, docs=docs.to(use.device),
    )  # fmt: skip
    if not is_backward:
        out, lse = _within(use, dout, use.dtype, math.nan), _rows_of_sums(use)
        launch(out, lse)
        _hold("out", out, true_out, use, case)
        error = ((lse.cpu() - true_lse).abs() / (1.0 + true_lse.abs())).max()
        if not error <= LSE_ERROR:
            raise AssertionError(f"lse of {case.name} is off by {error:.1e}")
        _hold_around("lse", lse, case)
        return

    before = [drawn(*t.shape) for t in (k, v)]
    sums = [_within(use, t, torch.float32, math.nan if case.store else None) for t in before]
    true_dk, true_dv = true_sums = [t.double() for t in before]
    given = BackwardArguments(dout.double(), *exact, true_out, true_lse, options, true_dk, true_dv)
    true_dq, *_ = attention_ways.backward("plain", given)
    dq, *own = (_within(use, t, use.dtype, math.nan) for t in (q, k[:, :, PREFIX:], v[:, :, PREFIX:]))
    results: dict[str, Any] = {"dq": dq, "dk": sums[0], "dv": sums[1], "own_dk": own[0], "own_dv": own[1]}
    lse = _rows_of_sums(use).copy_(true_lse)
    launch(_within(use, true_out, use.dtype), lse, dout=_within(use, dout, use.dtype), store=case.store, **results)
    _hold("dq", dq, true_dq, use, case)
    for name, true in zip(("dk", "dv"), true_sums, strict=True):
        _hold(name, results[name], true, use, case, PREFIX)
        _hold(f"own_{name}", results[f"own_{name}"], true[:, :, PREFIX:], use, case)


def _documents(case: Case) -> Tensor:
    """Returns ids of all keys; (batch, 0) without documents."""
    docs = torch.zeros(BATCH, KEYS if case.has_documents else 0, dtype=torch.int32, device="cpu")
    for row, starts in zip(docs, DOCUMENTS, strict=True):
        for start in starts:
            row[start:] = start
    return docs


def _within(use: Use, like: Tensor, dtype: torch.dtype, value: float | None = None) -> Tensor:
    """Returns rows on the device with the values of ``like``, or all of ``value``, within memory of NaN.

    Memory of queries' tokens is token-major, that of keys is a slab.
    """
    batch, heads, rows, head_dim = like.shape
    rows += 2 * BEHIND
    is_slab = like.shape[2] == KEYS
    sizes = (batch, heads, rows, head_dim) if is_slab else (batch, rows, heads, head_dim)
    memory = torch.full(sizes, math.nan, dtype=dtype, device=use.device)
    found = (memory if is_slab else memory.transpose(1, 2))[:, :, BEHIND:-BEHIND]
    return found.copy_(like) if value is None else found.fill_(value)


def _rows_of_sums(use: Use) -> Tensor:
    """Returns room for lse within memory of NaN."""
    count = BATCH * HEADS * TOKENS
    memory = torch.full((4 + count + 4,), math.nan, dtype=torch.float32, device=use.device)
    return memory[4 : 4 + count].view(BATCH, HEADS, TOKENS)


def _hold(name: str, result: Tensor, truth: Tensor, use: Use, case: Case, rows: int | None = None) -> None:
    """Raises AssertionError if the first rows of a result are off, or memory around all of it was written."""
    got, truth = result[:, :, :rows].cpu().double(), truth[:, :, :rows]
    limit = ERROR * torch.finfo(use.dtype).eps
    error = (got - truth).norm() / truth.norm()
    if not error <= limit:
        raise AssertionError(f"{name} of {case.name} is off by {error:.1e} of its norm, not {limit:.1e}")
    furthest = (got - truth).abs().max() / truth.square().mean().sqrt()
    if not furthest <= SPREAD * limit:
        raise AssertionError(f"an element of {name} of {case.name} is off by {furthest:.1e} of their size")
    _hold_around(name, result, case)


def _hold_around(name: str, result: Tensor, case: Case) -> None:
    result.fill_(math.nan)
    if not memory_of(result).isnan().all():
        raise AssertionError(f"memory around {name} of {case.name} was written")
