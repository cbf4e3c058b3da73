"""The CUDA-only attention ops of aten, on the CPU in fp64, and the package's CUDA kernels in place of its CPU ones.

Written from the documented meaning of the ops, not from ``seq1f1b/device/cuda_attention.py``; a call that the real
kernels would read wrongly (strides, alignment, layout of lse) fails here. Torch's dispatcher, with which they are
registered, holds calls and results to the schemas of the installed torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seq1f1b.device import cuda_attention, document_layout

Call = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Name of an op, shape, strides and address of its keys."""


def _check_rows(*tensors: Tensor) -> None:
    """(batch, tokens, heads, head_dim), readable by 16-byte loads."""
    for t in tensors:
        assert t.dim() == 4 and t.stride(3) == 1, t.stride()
        bytes_apart = [t.stride(d) * t.element_size() for d in range(3) if t.shape[d] > 1]
        assert t.data_ptr() % 16 == 0 and all(apart % 16 == 0 for apart in bytes_apart), (t.shape, t.stride())


def _visible(queries: int, keys: int, left: int, right: int) -> Tensor:
    """Row i sees keys i + keys - queries - left .. i + keys - queries + right; -1: to the end."""
    assert left >= -1 and right >= -1
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    return seen & (ahead <= right) if right >= 0 else seen


def _expand(t: Tensor, heads: int) -> Tensor:
    """fp64, (batch, heads, tokens, head_dim)."""
    return t.double().transpose(1, 2).repeat_interleave(heads // t.shape[2], 1)


def _forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    heads = q.shape[2]
    logits = _expand(q, heads) @ _expand(k, heads).transpose(-1, -2) * scale
    logits = logits.masked_fill(~seen, -math.inf)
    assert seen.any(1).all(), "a row that sees no key"
    return (logits.softmax(-1) @ _expand(v, heads)).transpose(1, 2), logits.logsumexp(-1)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From lse and out as given, over keys that may be a part of all; dk and dv for each query head."""
    heads = q.shape[2]
    q, k, v, dout, out = (_expand(t, heads) for t in (q, k, v, dout, out))
    weights = torch.exp(q @ k.transpose(-1, -2) * scale - lse.double()[..., None]).masked_fill(~seen, 0)
    dlogits = weights * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    grads = dlogits @ k, dlogits.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ dout
    return tuple(g.transpose(1, 2) for g in grads)  # type: ignore[return-value]


def _seen_in(queries: int, keys: int, longest: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """As the kernels read a window: a side of as many tokens as the longest sequence has keys counts as none, and
    beside another side none is again so many, which hides keys from the first of more queries than keys."""
    left, right = (-1 if side is None or side >= longest else side for side in (left, right))
    right = 0 if causal else right
    if left >= 0 > right:
        right = longest
    if right > 0 > left:
        left = longest
    return _visible(queries, keys, left, right)


def _check_flash(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> None:
    """rest: cum_seq_q, cum_seq_k, max_q, max_k, dropout_p."""
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype
    assert q.shape[3] % 8 == 0 and q.shape[3] <= 256 and q.shape[2] % k.shape[2] == 0
    assert q.shape[3] == k.shape[3] == v.shape[3]
    assert rest == (None, None, q.shape[1], k.shape[1], 0.0)
    _check_rows(q, k, v)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert seqused_k is None and block_table is None
    if cum_seq_q is not None:
        return _varlen_forward(
            q, k, v, (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p), is_causal, scale, window_size_left,
            window_size_right,
        )  # fmt: skip
    _check_flash(q, k, v, (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p))
    assert alibi_slopes is None, "torch's build refuses them"
    of_flash = q.shape[1], k.shape[1], k.shape[1], is_causal and q.shape[1] > 1
    seen = _seen_in(*of_flash, window_size_left, window_size_right)
    out, lse = _forward(q, k, v, seen, q.shape[3] ** -0.5 if scale is None else scale)
    nothing = torch.empty(0, dtype=torch.uint64)
    return torch.empty_like(q).copy_(out), lse.float(), nothing, nothing.clone(), q.new_empty(0)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if cum_seq_q is not None:
        return _varlen_backward(
            dout, q, k, v, out, lse, (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p), is_causal, scale,
            window_size_left, window_size_right,
        )  # fmt: skip
    _check_flash(q, k, v, (cum_seq_q, cum_seq_k, max_q, max_k, dropout_p))
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == q.shape
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and lse.dtype == torch.float32 and lse.is_contiguous()
    of_flash = q.shape[1], k.shape[1], k.shape[1], is_causal and q.shape[1] > 1
    seen = _seen_in(*of_flash, window_size_left, window_size_right)
    dq, dk, dv = _backward(dout, q, k, v, out, lse, seen, q.shape[3] ** -0.5 if scale is None else scale)
    group = q.shape[2] // k.shape[2]
    dk, dv = (g.to(q.dtype).unflatten(2, (k.shape[2], group)).sum(3) for g in (dk, dv))  # rounds each query head's
    return dq.to(q.dtype), dk, dv


# Sequences of many lengths: (all tokens, heads, head_dim), sequence i in rows cum_seq[i] to cum_seq[i + 1]. The kernels
# visit tiles up to max_q and max_k alone, and rows of no sequence: these stay as the memory was, here NaN.


def _sequences(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> list[tuple[slice, slice]]:
    """Rows of queries and keys of each sequence, and the checks of the op. rest: as ``_check_flash``."""
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p = rest
    assert q.dim() == k.dim() == v.dim() == 3 and dropout_p == 0.0
    assert q.shape[1] % k.shape[1] == 0 and k.shape == v.shape and q.shape[2] == k.shape[2]
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256
    _check_rows(q[None], k[None], v[None])
    for cum, total in ((cum_seq_q, len(q)), (cum_seq_k, len(k))):
        assert cum.dtype == torch.int32 and cum.dim() == 1 and cum.is_contiguous()
        assert cum.shape == cum_seq_q.shape and cum[0] >= 0 and cum[-1] <= total and (cum.diff() >= 0).all()
    slices = [[slice(*ends) for ends in itertools.pairwise(cum.tolist())] for cum in (cum_seq_q, cum_seq_k)]
    assert all(rows.stop - rows.start <= max_q for rows in slices[0]), "queries beyond max_q are not computed"
    assert all(rows.stop - rows.start <= max_k for rows in slices[1]), "keys beyond max_k are not seen"
    assert max_q > 1 or q.shape[1] == k.shape[1], "one query a sequence: the op moves heads about"
    return list(zip(*slices, strict=True))


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...], causal: bool, scale: float | None, left: int | None,
    right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], len(q)), math.nan)
    for rows, of_keys in _sequences(q, k, v, rest):
        queries, keys = q[None, rows], (k[None, of_keys], v[None, of_keys])
        if not queries.shape[1]:
            continue
        seen = _seen_in(queries.shape[1], keys[0].shape[1], rest[3], causal and rest[2] > 1, left, right)
        of_out, of_lse = _forward(queries, *keys, seen, q.shape[2] ** -0.5 if scale is None else scale)
        out[rows], lse[:, rows] = of_out[0].to(q.dtype), of_lse[0].float()
    nothing = torch.empty(0, dtype=torch.uint64)
    return out, lse, nothing, nothing.clone(), q.new_empty(0)


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...], causal: bool,
    scale: float | None, left: int | None, right: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == q.shape
    assert lse.shape == (q.shape[1], len(q)) and lse.dtype == torch.float32 and lse.is_contiguous()
    dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    for rows, of_keys in _sequences(q, k, v, rest):
        queries, keys = q[None, rows], (k[None, of_keys], v[None, of_keys])
        seen = _seen_in(queries.shape[1], keys[0].shape[1], rest[3], causal, left, right)
        assert seen.any(1).all(), "a row that sees no key"
        of_rows = dout[None, rows], queries, *keys, out[None, rows], lse[None, :, rows]
        grads = _backward(*of_rows, seen, q.shape[2] ** -0.5 if scale is None else scale)
        dq[rows] = grads[0][0].to(q.dtype)
        for to, grad in ((dk, grads[1]), (dv, grads[2])):
            to[of_keys] = grad[0].to(q.dtype).unflatten(1, (k.shape[1], group)).sum(2)
    return dq, dk, dv


def _efficient_mask(q: Tensor, k: Tensor, custom_mask_type: int) -> Tensor:
    """0: all; 1: causal from the top left; 2: from the bottom right."""
    shift = {0: k.shape[1], 1: 0, 2: k.shape[1] - q.shape[1]}[custom_mask_type]
    return torch.arange(k.shape[1])[None, :] <= torch.arange(q.shape[1])[:, None] + shift


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, *absent: Any) -> None:
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float32, torch.float16) and all(argument is None for argument in absent)
    assert all(t.shape[3] * t.element_size() % 16 == 0 for t in (q, v))
    assert q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]  # v may be of another head size
    _check_rows(q, k, v)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, dropout_p: float, custom_mask_type: int, compute_log_sumexp: bool = False, *,
    scale: float | None = None, seqlen_k: Any = None, window_size: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    _check_efficient(q, k, v, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqlen_k, window_size)
    assert dropout_p == 0.0 and compute_log_sumexp
    seen = _efficient_mask(q, k, custom_mask_type)
    out, lse = _forward(q, k, v, seen, q.shape[3] ** -0.5 if scale is None else scale)
    padded = torch.full((*lse.shape[:2], (q.shape[1] + 31) // 32 * 32), math.inf)
    padded[:, :, : q.shape[1]] = lse
    state = torch.empty((), dtype=torch.int64)
    return out.to(q.dtype).contiguous(), padded, state, state.clone(), q.shape[1], k.shape[1]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, lse: Tensor, dropout_p: float, philox_seed: Tensor, philox_offset: Tensor,
    custom_mask_type: int, bias_requires_grad: bool, *, scale: float | None = None, num_splits_key: Any = None,
    window_size: Any = None, shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_efficient(q, k, v, bias, cu_seqlens_q, cu_seqlens_k, num_splits_key, window_size)
    assert (max_seqlen_q, max_seqlen_k, dropout_p) == (q.shape[1], k.shape[1], 0.0) and not bias_requires_grad
    assert out.is_contiguous() and out.shape == (*q.shape[:3], v.shape[3])  # it is not told the stride along the tokens
    assert lse.shape == (q.shape[0], q.shape[2], (q.shape[1] + 31) // 32 * 32) and lse.is_contiguous()
    assert torch.isposinf(lse[:, :, q.shape[1] :]).all()
    seen = _efficient_mask(q, k, custom_mask_type)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dq, dk, dv = _backward(dout, q, k, v, out, lse[:, :, : q.shape[1]], seen, scale)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), torch.empty(0)


def _check_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, *absent: Any) -> Tensor:
    """Which keys a query sees: causal from the top left."""
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype
    assert q.shape[3] % 8 == v.shape[3] % 8 == 0 and q.shape[1] % k.shape[1] == 0 and min(q.shape[2], k.shape[2]) > 1
    assert q.shape[3] == k.shape[3] and k.shape[:3] == v.shape[:3]  # v may be of another head size
    assert all(argument is None for argument in absent)
    _check_rows(*(t.transpose(1, 2) for t in (q, k, v)))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return seen.tril() if is_causal else seen


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(batch, heads, tokens, head_dim), unlike the flash ops."""
    seen = _check_cudnn(q, k, v, is_causal, attn_bias)
    assert compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask
    out, lse = _forward(*(t.transpose(1, 2) for t in (q, k, v)), seen, q.shape[3] ** -0.5 if scale is None else scale)
    nothing = torch.empty(0)
    sizes = q.shape[2], k.shape[2]
    result = q.new_empty(out.shape).copy_(out).transpose(1, 2)
    return result, lse.float()[..., None], nothing, nothing.clone(), *sizes, *(nothing.clone() for _ in range(3))


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, philox_seed: Tensor,
    philox_offset: Tensor, attn_bias: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    seen = _check_cudnn(q, k, v, is_causal, attn_bias, cum_seq_q, cum_seq_k)
    assert (max_q, max_k, dropout_p) == (q.shape[2], k.shape[2], 0.0)
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == (*q.shape[:3], 1) and lse.dtype == torch.float32 and lse.is_contiguous()
    _check_rows(dout.transpose(1, 2), out.transpose(1, 2))
    rows = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
    grads = _backward(*rows, lse[..., 0], seen, q.shape[3] ** -0.5 if scale is None else scale)
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    dk, dv = (g.unflatten(1, (k.shape[1], group)).sum(2) for g in (dk, dv))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


_OPS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_efficient_attention_forward": _efficient_forward,
    "_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}


@contextmanager
def cuda_kernels_on_the_cpu() -> Iterator[list[Call]]:
    """CPU tensors go the way of CUDA tensors meanwhile. Yields a list that grows with each call of an aten op."""
    calls: list[Call] = []

    def recorded(name: str) -> Any:
        op, keys = _OPS[name], 2 if name.endswith("backward") else 1

        def call(*arguments: Any, **options: Any) -> Any:
            k = arguments[keys]
            calls.append((name, tuple(k.shape), k.stride(), k.data_ptr()))
            return op(*arguments, **options)

        return call

    with torch.library._scoped_library("aten", "IMPL") as aten, torch.library._scoped_library("seq1f1b", "IMPL") as own:
        for name in _OPS:
            aten.impl(name, recorded(name), "CPU")
        cuda_attention.register(own, "CPU", allow_override=True)
        try:
            yield calls
        finally:
            cuda_attention._passes.cache_clear()
            document_layout.forget()


# Leading arguments that we pass by position, keyword-only ones that we pass by name, and how many results come back.
SCHEMAS = {
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        "scale window_size_left window_size_right", 5,
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused",
        "scale window_size_left window_size_right", 3,
    ),
    "_efficient_attention_forward": (
        "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p custom_mask_type "
        "compute_log_sumexp",
        "scale", 6,
    ),
    "_efficient_attention_backward": (
        "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k logsumexp dropout_p "
        "philox_seed philox_offset custom_mask_type bias_requires_grad",
        "scale", 4,
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask",
        "scale", 9,
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k "
        "dropout_p is_causal",
        "scale", 3,
    ),
}  # fmt: skip


def schema_drift(name: str) -> str:
    """Says how the op of the installed torch differs from what attention_ways.py passes and takes; "" if not at all."""
    by_position, by_name, results = SCHEMAS[name]
    op = getattr(torch.ops.aten, name, None)
    if op is None:
        return f"torch has no aten::{name}"
    schema = op.default._schema
    keyword_only = {a.name: a for a in schema.arguments if a.kwarg_only}
    fits = (
        [a.name for a in schema.arguments if not a.kwarg_only] == by_position.split()
        and set(by_name.split()) <= keyword_only.keys()
        and all(a.has_default_value() for a in keyword_only.values())
        and len(schema.returns) == results
    )
    return "" if fits else str(schema)
