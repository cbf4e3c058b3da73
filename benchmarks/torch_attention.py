"""Causal attention of a segment over its prefix as torch offers it on the CPU: what ours is measured against.

Tensors are (batch, heads, tokens, head_dim), with as many keys as prefix and segment have tokens, and maybe fewer kv
heads than heads; autograd gives the gradients. ``two_calls`` takes prefix and segment apart, as it uses them. Where a
sinks tensor is given, (heads), each head has one more logit without a value. Torch's flash attention for the CPU wants
heads of one size: ``padded`` gives the narrower ones zeros. Its flex attention has no backward on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b import _C
from seq1f1b.attention.unit import current

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _TwoCalls(torch.autograd.Function):
    """Torch's flash attention over the prefix, not causal, and over the segment, causal: the best that torch has.

    Exact: the softmax over all keys is a mean of the two, weighted by their sums, and the flash backward of either part
    needs no more than the output and the sum of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_prefix: Tensor, v_prefix: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        parts = [_of_all_heads(q, t) for t in (k_prefix, v_prefix, k, v)]
        out, lse = _flash(q, *parts[2:], 0.0, True, scale=scale)
        if k_prefix.shape[2] > 0:
            out_prefix, lse_prefix = _flash(q, *parts[:2], 0.0, False, scale=scale)
            weight = torch.sigmoid(lse_prefix - lse).unsqueeze(-1)
            out = out.to(lse.dtype).lerp_(out_prefix.to(lse.dtype), weight).to(q.dtype)
            lse = torch.logaddexp(lse_prefix, lse)
        if sinks is not None:
            out = (out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)).to(q.dtype)
            lse = torch.logaddexp(lse, sinks[:, None])
        ctx.save_for_backward(q, *parts, out, lse, sinks)
        ctx.kv_heads, ctx.scale = k.shape[1], scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k_prefix, v_prefix, k, v, out, lse, sinks = ctx.saved_tensors
        dq, dk, dv = _flash_backward(dout, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
        dsinks = None if sinks is None else -(torch.exp(sinks[:, None] - lse) * (dout * out).sum(-1)).sum((0, 2))
        if k_prefix.shape[2] == 0:
            return dq, None, None, *(_of_kv_heads(ctx.kv_heads, t) for t in (dk, dv)), dsinks, None
        dq_prefix, *grads = _flash_backward(dout, q, k_prefix, v_prefix, out, lse, 0.0, False, scale=ctx.scale)
        return dq.add_(dq_prefix), *(_of_kv_heads(ctx.kv_heads, t) for t in (*grads, dk, dv)), dsinks, None


class _TwoCallsInRows(_TwoCalls):
    """Two calls over the rows of a micro-batch, to which it writes the segment's keys and values.

    Every segment has a graph of its own: what its backward owes to earlier segments waits in the rows for theirs.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: _Rows, offset: int) -> Tensor:
        ctx.rows, ctx.offset = rows, offset
        return _TwoCalls.forward(ctx, q, *rows.write(k, v, offset))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dq, *gradients = _TwoCalls.backward(ctx, dout)[:5]
        return dq, *ctx.rows.collect(gradients, ctx.offset), None, None


def _of_all_heads(q: Tensor, t: Tensor) -> Tensor:
    return t if t.shape[1] == q.shape[1] else t.repeat_interleave(q.shape[1] // t.shape[1], dim=1)


def _of_kv_heads(kv_heads: int, gradient: Tensor) -> Tensor:
    return gradient if gradient.shape[1] == kv_heads else gradient.unflatten(1, (kv_heads, -1)).sum(2)


def two_calls(
    q: Tensor, k_prefix: Tensor, v_prefix: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    wide = padded(q, k_prefix, v_prefix, k, v)
    out = _TwoCalls.apply(*wide, sinks, q.shape[3] ** -0.5)
    return out[..., : v.shape[3]]


def padded(*tensors: Tensor) -> list[Tensor]:
    width = max(t.shape[3] for t in tensors)
    return [t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])) for t in tensors]


def explicit_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens, keys = q.shape[2], k.shape[2]
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def padded_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    tokens, keys, scale = q.shape[2], k.shape[2], q.shape[3] ** -0.5
    mask = torch.ones(tokens, keys, dtype=torch.bool).tril(keys - tokens)
    out = F.scaled_dot_product_attention(*padded(q, k, v), attn_mask=mask, enable_gqa=True, scale=scale)
    return out[..., : v.shape[3]]


def sink_as_a_key(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The sink is the bias of one more key, which is zero, as is its value."""
    tokens, keys = q.shape[2], k.shape[2]
    later = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
    bias = torch.zeros(tokens, keys, dtype=q.dtype).masked_fill_(later, -math.inf).expand(len(sinks), -1, -1)
    mask = torch.cat((bias, sinks.to(q.dtype)[:, None, None].expand(-1, tokens, 1)), dim=2)
    return F.scaled_dot_product_attention(q, *(F.pad(t, (0, 0, 0, 1)) for t in (k, v)), attn_mask=mask, enable_gqa=True)


def eager(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    tokens, keys = q.shape[2], k.shape[2]
    later = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
    k, v = _of_all_heads(q, k), _of_all_heads(q, v)
    logits = (q * q.shape[3] ** -0.5) @ k.transpose(2, 3)
    logits = logits.masked_fill_(later, -math.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
        return torch.softmax(torch.cat((logits, column), dim=-1), dim=-1)[..., :keys] @ v
    return torch.softmax(logits, dim=-1) @ v


WHOLE = {"explicit mask": explicit_mask, "eager": eager}
WHOLE_LATENT = {"explicit mask": explicit_mask, "mask, v padded": padded_mask, "eager": eager}
WHOLE_WITH_SINKS = {"sink as a key": sink_as_a_key, "eager": eager}


class _Rows:
    """Keys, values and their gradients of one micro-batch."""

    def __init__(self, like: Tensor, tokens: int) -> None:
        shape = (*like.shape[:2], tokens, like.shape[3])
        self.slab = like.new_empty(shape), like.new_empty(shape)
        self.gradients: Sequence[Tensor] = ()  # of the prefix; none before the last segment's backward

    def write(self, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, ...]:
        """Keys and values of the prefix and of the segment, as views.

        These have versions of their own, through ``data``: later rows may be written while they are saved.
        """
        end = offset + k.shape[2]
        parts = [(t.data[:, :, :offset], t.data[:, :, offset:end]) for t in self.slab]
        for (_, own), t in zip(parts, (k, v), strict=True):
            own.copy_(t)
        return *(prefix for prefix, _ in parts), *(own for _, own in parts)

    def collect(self, gradients: Sequence[Tensor], offset: int) -> Sequence[Tensor]:
        """The segment's own, with what later segments left for it; keeps those of the prefix. Adds in place."""
        of_prefix, own = gradients[:2], gradients[2:]
        if not self.gradients:  # nothing came from later segments
            self.gradients = of_prefix
            return own
        for t, held in zip(own, self.gradients, strict=True):
            t.add_(held[:, :, offset : offset + t.shape[2]])
        if offset > 0:
            for t, held in zip(of_prefix, self.gradients, strict=True):
                held[:, :, :offset].add_(t)
        return own


class InSegments:
    """Two calls inside our pipeline steps; outside one, torch's attention over the whole sequence.

    Keys and values of earlier segments are kept in rows, without a copy per segment: what ours does with its cache.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}  # by micro-batch, as long as it has segments to come

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unit, found = current(), _C.unit_tokens()
        with torch.autocast("cpu", enabled=False):
            if unit is None or found is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            offset, _, tokens = found
            rows = _Rows(k, tokens) if unit.segment == 0 else self._rows.pop(unit.microbatch)
            if not unit.is_last:
                self._rows[unit.microbatch] = rows
            q = q.transpose(1, 2).contiguous().transpose(1, 2)  # without its k and v; out lies alike
            return _TwoCallsInRows.apply(q, k, v, rows, offset)
