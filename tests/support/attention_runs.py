"""The definition of causal attention in torch's elementary operations, and what runs ours beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from simulated_step import SimulatedStep
from torch import Tensor

from seq1f1b.attention.causal import causal_attention, layer_handle


def _all_options() -> dict[str, dict[str, Any]]:
    """Each option of attention alone, for 12 tokens and up to 4 heads, and all together."""
    docs = torch.tensor([[0] * 4 + [1] * 3 + [7] * 5, [3] * 12], dtype=torch.int32)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    single: dict[str, dict[str, object]] = {
        "none": {},
        "scale": {"scale": 0.3},
        "window": {"window": 4},
        "window of 1": {"window": 1},
        "softcap": {"softcap": 1.5},
        "slopes": {"alibi_slopes": slopes},
        "slopes per batch": {"alibi_slopes": torch.stack([slopes, 2 * slopes])},
        "documents": {"doc_ids": docs},
        "sinks": {"sinks": torch.tensor([0.5, -1.25, 2.0, -0.75])},
    }
    every: dict[str, object] = {}
    for option in ("scale", "window", "softcap", "slopes", "documents", "sinks"):
        every.update(single[option])
    return {**single, "all": every}


OPTIONS = _all_options()


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    doc_ids: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, written with torch's elementary operations; rounds to q's dtype after each of them."""
    batch, heads, tokens, head_dim = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) * (scale if scale is not None else 1 / math.sqrt(head_dim))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    position = torch.arange(tokens, device=q.device)
    distance = position[:, None] - position[None, :]
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(batch, heads).to(q.dtype)
        logits = logits - slopes[:, :, None, None] * distance
    hidden = (distance < 0).expand(batch, 1, tokens, tokens)
    if window is not None:
        hidden = hidden | (distance >= window)
    if doc_ids is not None:
        hidden = hidden | (doc_ids[:, None, :, None] != doc_ids[:, None, None, :])
    logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(q.dtype)[None, :, None, None].expand(batch, heads, tokens, 1)
        logits = torch.cat([logits, column], dim=-1)
    return torch.softmax(logits, dim=-1)[..., :tokens] @ v


def random_qkv(heads: int, kv_heads: int, *, batch: int = 2, tokens: int = 12, head_dim: int = 6,
               v_head_dim: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64,
               ) -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim or head_dim)
    return [
        torch.randn(batch, h, tokens, size, generator=generator, dtype=torch.float64).to(dtype) for h, size in sizes
    ]


def gradients(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of run(q, k, v)."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def backward(leaves: Sequence[Tensor], dout: Tensor, in_step: bool, **options: Any) -> Tensor:
    """Goes forward and back outside of a step, or as the one segment of one."""
    step = SimulatedStep([dout.shape[2]])
    with step.unit("F", 0, 0) if in_step else nullcontext():
        out = causal_attention(*leaves, layer=0, **options)
    with step.unit("B", 0, 0) if in_step else nullcontext():
        out.backward(dout)
    return out.detach()


def gradients_by_layout(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, in_step: bool) -> Iterator[list[Tensor]]:
    """gradients() of the same values in other memory: transposes of (batch, tokens, heads, head_dim), slices of one
    projection, a last stride that is not 1 in all or in v alone, rows that are not 16 bytes apart, an odd address."""
    head_dim = q.shape[3]
    parts = [t.transpose(1, 2).flatten(2) for t in (q, k, v)]
    fused = torch.cat(parts, -1).split([t.shape[2] for t in parts], -1)
    for tensors in (
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        [t.unflatten(2, (-1, head_dim)).transpose(1, 2) for t in fused],
        [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)],
        [q, k, v.transpose(1, 2).contiguous().transpose(1, 2)],
        [torch.cat([t, t[..., :3]], -1)[..., :head_dim] for t in (q, k, v)],
        [torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for t in (q, k, v)],
    ):
        leaves = [t.detach().requires_grad_() for t in tensors]
        assert [t.stride() for t in leaves] == [t.stride() for t in tensors]
        out = backward(leaves, dout, in_step)
        assert out.transpose(1, 2).is_contiguous()
        yield [out, *(t.grad for t in leaves if t.grad is not None)]


def errors(got: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Norm of the difference over the norm, for out, dq, dk and dv. They are of one size, or zero: dq, window 1."""
    norms = torch.stack([t.double().norm() for t in truth])
    floor = 0.1 * norms.square().mean().sqrt()
    differences = torch.stack([(a.double() - b.double()).norm() for a, b in zip(got, truth, strict=True)])
    return (differences / norms.clamp_min(floor)).tolist()  # type: ignore[no-any-return] # floats


def segmented(
    sizes: Sequence[int], options: dict, qkv_of_microbatches: Sequence[list[Tensor]], douts: Sequence[Tensor]
) -> list[list[Tensor]]:
    """gradients() of each micro-batch by segments: micro-batches are interleaved, each in its own slot."""
    count = len(qkv_of_microbatches)
    step = SimulatedStep(sizes, kv_slots=count, grad_slots=count)
    handle = layer_handle(0)
    options = dict(options)
    docs = options.pop("doc_ids", None)
    leaves, outs = {}, {}
    for s in range(len(sizes)):
        rows = step.slice(s)
        for m, qkv in enumerate(qkv_of_microbatches):
            leaves[m, s] = [t[:, :, rows].detach().clone().requires_grad_() for t in qkv]
            with step.unit("F", m, s, slot=m):
                mine = {} if docs is None else {"doc_ids": docs[:, rows]}
                outs[m, s] = causal_attention(*leaves[m, s], layer=handle, **options, **mine)
    for s in reversed(range(len(sizes))):
        for m in range(count):
            with step.unit("B", m, s, slot=m, grad_slot=m):
                outs[m, s].backward(douts[m][:, :, step.slice(s)])
    segments = range(len(sizes))
    return [
        [torch.cat([outs[m, s].detach() for s in segments], dim=2)]
        + [torch.cat([leaves[m, s][i].grad for s in segments], dim=2) for i in range(3)]
        for m in range(count)
    ]
