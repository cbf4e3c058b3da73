"""Causal attention of a segment over its prefix as torch offers it on the CPU: what ours is measured against.

Tensors are (batch, heads, tokens, head_dim), with as many keys as prefix and segment have tokens, and maybe fewer kv
heads than heads; autograd gives the gradients. ``two_calls`` takes prefix and segment apart, as it uses them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from seq1f1b import carry_in, carry_out

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _TwoCalls(torch.autograd.Function):
    """Torch's flash attention over the prefix, not causal, and over the segment, causal: the best that torch has.

    Exact: the softmax over all keys is a mean of the two, weighted by their sums, and the flash backward of either part
    needs no more than the output and the sum of the whole.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k_prefix: Tensor, v_prefix: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [_of_all_heads(q, t) for t in (k_prefix, v_prefix, k, v)]
        out, lse = _flash(q, *parts[2:], 0.0, True)
        if k_prefix.shape[2] > 0:
            out_prefix, lse_prefix = _flash(q, *parts[:2], 0.0, False)
            weight = torch.sigmoid(lse_prefix - lse).unsqueeze(-1)
            out = torch.lerp(out.to(lse.dtype), out_prefix.to(lse.dtype), weight).to(q.dtype)
            lse = torch.logaddexp(lse_prefix, lse)
        ctx.save_for_backward(q, *parts, out, lse)
        ctx.kv_heads = k.shape[1]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k_prefix, v_prefix, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _flash_backward(dout, q, k, v, out, lse, 0.0, True)
        if k_prefix.shape[2] == 0:
            return dq, None, None, *(_of_kv_heads(ctx.kv_heads, t) for t in (dk, dv))
        dq_prefix, *grads = _flash_backward(dout, q, k_prefix, v_prefix, out, lse, 0.0, False)
        return dq + dq_prefix, *(_of_kv_heads(ctx.kv_heads, t) for t in (*grads, dk, dv))


def _of_all_heads(q: Tensor, t: Tensor) -> Tensor:
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _of_kv_heads(kv_heads: int, gradient: Tensor) -> Tensor:
    return gradient if gradient.shape[1] == kv_heads else gradient.unflatten(1, (kv_heads, -1)).sum(2)


def two_calls(q: Tensor, k_prefix: Tensor, v_prefix: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _TwoCalls.apply(q, k_prefix, v_prefix, k, v)  # type: ignore[no-any-return, no-untyped-call]


def explicit_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens, keys = q.shape[2], k.shape[2]
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def lower_right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), enable_gqa=True
    )


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens, keys = q.shape[2], k.shape[2]
    later = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
    k, v = _of_all_heads(q, k), _of_all_heads(q, v)
    logits = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
    return torch.softmax(logits.masked_fill_(later, -math.inf), dim=-1) @ v


WHOLE = {"explicit mask": explicit_mask, "causal_lower_right": lower_right, "eager": eager}


def of_segment(name: str, q: Tensor, k: Tensor, v: Tensor, *, layer: Tensor) -> Tensor:
    """ "two calls" or one of ``WHOLE``, inside a pipeline step: keys and values so far come by ``carry_in``."""
    with torch.autocast("cpu", enabled=False):
        segment = torch.stack((k, v))
        prefix = carry_in(layer, segment[:, :, :, :0])
        whole = torch.cat((prefix, segment), dim=3)
        carry_out(layer, whole)
        if name == "two calls":
            return two_calls(q, *prefix.unbind(), k, v)
        return WHOLE[name](q, *whole.unbind())
