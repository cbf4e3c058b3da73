"""The CUDA-only attention ops of aten, on the CPU in fp64, and the package's CUDA kernels in place of its CPU ones.

Written from the documented meaning of the ops, not from ``seq1f1b/device/cuda_attention.py``; a call that the real
kernels would read wrongly (strides, alignment, layout of lse) fails here. Torch's dispatcher, with which they are
registered, holds calls and results to the schemas of the installed torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from seq1f1b.device import cuda_attention

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
    return tuple(g.transpose(1, 2) for g in grads)  # type: ignore[return-value] # three


def _seen_in(queries: int, keys: int, causal: bool, left: int | None, right: int | None) -> Tensor:
    """As the kernels read a window: a side of as many tokens as there are keys counts as none, and beside another side
    none is again so many, which hides keys from the first of more queries than keys."""
    left, right = (-1 if side is None or side >= keys else side for side in (left, right))
    right = 0 if causal else right
    if left >= 0 > right:
        right = keys
    if right > 0 > left:
        left = keys
    return _visible(queries, keys, left, right)


# The flash ops take (batch, tokens, heads, head_dim).


def _check_flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float
) -> None:
    assert q.dtype in (torch.bfloat16, torch.float16) and k.dtype == v.dtype == q.dtype and dropout == 0.0
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[-2] % k.shape[-2] == 0
    assert q.shape[-1] == k.shape[-1] and k.shape == v.shape
    assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[1], k.shape[1])
    _check_rows(q, k, v)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None,
    num_splits: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert seqused_k is None and block_table is None
    assert alibi_slopes is None, "torch's build refuses them"
    _check_flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p)
    seen = _seen_in(max_q, max_k, is_causal and max_q > 1, window_size_left, window_size_right)
    out, lse = _forward(q, k, v, seen, q.shape[-1] ** -0.5 if scale is None else scale)
    nothing = torch.empty(0, dtype=torch.uint64)
    found = torch.empty_like(q).copy_(out), lse.float().contiguous()
    return *found, nothing, nothing.clone(), q.new_empty(0)


def _flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p)
    assert dout.dtype == out.dtype == q.dtype and dout.shape == out.shape == q.shape
    assert lse.shape == q[..., 0].mT.shape and lse.dtype == torch.float32 and lse.is_contiguous()
    seen = _seen_in(max_q, max_k, is_causal and max_q > 1, window_size_left, window_size_right)
    dq, dk, dv = _backward(dout, q, k, v, out, lse, seen, q.shape[-1] ** -0.5 if scale is None else scale)
    dk, dv = (g.to(q.dtype).unflatten(2, (k.shape[2], -1)).sum(3) for g in (dk, dv))  # rounds each query head's
    return torch.empty_like(q).copy_(dq), torch.empty_like(k).copy_(dk), torch.empty_like(v).copy_(dv)


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
