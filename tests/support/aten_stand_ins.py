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


# Flash takes rows of a batch, (batch, tokens, heads, head_dim), or sequences of many lengths, (all tokens, heads,
# head_dim), where sequence i lies in rows cum_seq[i] to cum_seq[i + 1]. The kernels visit tiles of a sequence up to
# max_q and max_k alone, and rows of no sequence stay as the memory was, here NaN.


def _sequences(t: Tensor, cum: Tensor | None) -> list[Tensor]:
    """Views of each sequence, (1, tokens, heads, head_dim)."""
    if cum is None:
        return list(t.split(1))
    return [t[None, begin:end] for begin, end in itertools.pairwise(cum.tolist())]


def _sums(lse: Tensor, cum: Tensor | None) -> list[Tensor]:
    """Returns the same rows of lse, which is (batch, heads, tokens) or (heads, all tokens)."""
    return [t.mT for t in _sequences(lse.mT, cum)]


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor | None, cum_k: Tensor | None, max_q: int, max_k: int, dropout: float
) -> None:
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype and dropout == 0.0
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] == k.shape[-1] and k.shape == v.shape
    if cum_q is None or cum_k is None:
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
        _check_rows(q, k, v)
        return
    assert q.dim() == k.dim() == 3
    _check_rows(q[None], k[None], v[None])
    for cum, total, most in ((cum_q, len(q), max_q), (cum_k, len(k), max_k)):
        assert cum.dtype == torch.int32 and cum.dim() == 1 and cum.is_contiguous()
        assert cum.shape == cum_q.shape and cum[0] >= 0 and cum[-1] <= total and (cum.diff() >= 0).all()
        assert cum.diff().max() <= most, "queries beyond max_q are not computed, keys beyond max_k are not seen"
    assert max_q > 1 or q.shape[1] == k.shape[1], "one query a sequence: the op moves heads about"


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert seqused_k is None and block_table is None
    assert alibi_slopes is None, "torch's build refuses them"
    _check_flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p)
    out, lse = torch.full_like(q, math.nan), torch.full_like(q[..., 0].mT, math.nan, dtype=torch.float32)
    lse = lse.contiguous()
    of_keys = _sequences(k, cum_k), _sequences(v, cum_k), _sequences(out, cum_q), _sums(lse, cum_q)
    for queries, keys, values, of_out, of_lse in zip(_sequences(q, cum_q), *of_keys, strict=True):
        if queries.shape[1]:
            sizes = queries.shape[1], keys.shape[1], max_k
            seen = _seen_in(*sizes, is_causal and max_q > 1, window_size_left, window_size_right)
            found = _forward(queries, keys, values, seen, q.shape[-1] ** -0.5 if scale is None else scale)
            of_out.copy_(found[0])
            of_lse.copy_(found[1])
    nothing = torch.empty(0, dtype=torch.uint64)
    return out, lse, nothing, nothing.clone(), q.new_empty(0)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p)
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == q.shape
    assert lse.shape == q[..., 0].mT.shape and lse.dtype == torch.float32 and lse.is_contiguous()
    grads = tuple(torch.full_like(t, math.nan) for t in (q, k, v))
    of_all = [_sequences(t, cum) for t, cum in ((dout, cum_q), (q, cum_q), (k, cum_k), (v, cum_k), (out, cum_q))]
    of_grads = [_sequences(t, cum) for t, cum in zip(grads, (cum_q, cum_k, cum_k), strict=True)]
    of_each = zip(*of_all, _sums(lse, cum_q), *of_grads, strict=True)
    for of_dout, queries, keys, values, of_out, of_lse, *to in of_each:
        sizes = queries.shape[1], keys.shape[1], max_k
        seen = _seen_in(*sizes, is_causal and max_q > 1, window_size_left, window_size_right)
        assert cum_q is None or seen.any(1).all(), "a row that sees no key"
        of_rows = of_dout, queries, keys, values, of_out, of_lse
        found = _backward(*of_rows, seen, q.shape[-1] ** -0.5 if scale is None else scale)
        to[0].copy_(found[0])
        for of_keys, grad in zip(to[1:], found[1:], strict=True):  # rounds each query head's
            of_keys.copy_(grad.to(q.dtype).unflatten(2, (keys.shape[2], -1)).sum(3))
    return grads


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
            document_layout._remembered.clear()
            document_layout._asking.clear()
