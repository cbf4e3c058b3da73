"""Results of the attention ops without values, for tracing: shapes, dtypes and layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def _token_major(like: Tensor, heads: int, head_dim: int) -> Tensor:
    return like.new_empty((like.shape[0], like.shape[2], heads, head_dim)).transpose(1, 2)


def _check_devices(*tensors: Tensor) -> None:
    if any(t.device != tensors[0].device for t in tensors):
        raise ValueError(f"all tensors must be on one device: {', '.join(str(t.device) for t in tensors)}")


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns empty results.

    ``others`` begin with a segment's layer handle, on the CPU, if any, and end with slopes, ids, sinks and options.
    """
    _check_devices(q, k, v, *others[-6:-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _token_major(q, q.shape[1], v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_causal_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, slopes: Tensor, doc_ids: Tensor,
    sinks: Tensor, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(dout, q, k, v, out, lse, slopes, doc_ids, sinks)
    dq, dk, dv = (_token_major(t, t.shape[1], t.shape[3]) for t in (q, k, v))
    return dq, dk, dv, lse.new_empty(sinks.shape)


def _fake_segment_attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, layer: Tensor, slopes: Tensor, doc_ids: Tensor, sinks: Tensor,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _check_devices(dout, q, out, lse, slopes, doc_ids, sinks)
    sizes = (q.shape[1], q.shape[3]), (others[-1], q.shape[3]), (others[-1], out.shape[3])
    dq, dk, dv = (_token_major(q, *size) for size in sizes)
    return dq, dk, dv, lse.new_empty(sinks.shape)


def _fake_positions(x: Tensor, doc_ids: Tensor, dim: int, rank: int, num_parts: int) -> Tensor:
    shape = (x.shape[dim],) if doc_ids.dim() == 1 else (doc_ids.shape[0], x.shape[dim])
    return x.new_empty(shape, dtype=torch.int64)


def register_fakes() -> None:
    """Registers the functions above, which tell torch the results of the ops. The ops must be loaded before."""
    for name, fake in (
        ("causal_attention", _fake_attention),
        ("causal_attention_backward", _fake_causal_attention_backward),
        ("segment_attention", _fake_attention),
        ("segment_attention_backward", _fake_segment_attention_backward),
        ("positions", _fake_positions),
    ):
        torch.library.register_fake(f"seq1f1b::{name}", fake)
