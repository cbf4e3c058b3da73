"""Torch's flash ops over contiguous sequences of different lengths: documents, or siblings of one unit.

Each sequence is causal: the last query sees the last key. Each row of the batch needs its own call, because the keys of
two rows are not contiguous in a slab of the KV cache. Every sequence of a call has queries and keys, and the sequences
cover all rows of the tensors, so the ops write every element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from seq1f1b.device import kernel_library

__all__: list[str] = []

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""

FEWEST = 2
"""Least that the op is told of the longest sequence: for one query it leaves the mask out and moves heads about."""


def forward(
    tensors: Sequence[Tensor], bounds: Tensor, key_bounds: Tensor, longest: int, most_keys: int,
    scale: float, window: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns out (tokens, heads, head_dim) and lse (heads, tokens) of a row.

    Args:
        tensors: q, keys and values, each (1, heads, tokens, head_dim) with its own number of heads.
        bounds, key_bounds: (sequences + 1) in int32: 0, and the end of each sequence among the queries and keys.
        longest, most_keys: upper bounds for the tokens and keys of a sequence.
    """
    longest = max(longest, FEWEST)
    left, right = (window - 1, 0) if window else (None, None)
    found = torch.ops.aten._flash_attention_forward.default(
        *[t[0].transpose(0, 1) for t in tensors], bounds, key_bounds, longest, max(longest, most_keys), 0.0,
        True, False, scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return found[0], found[1]


def backward(
    tensors: Sequence[Tensor], lse: Tensor, bounds: Tensor, longest: int, scale: float, window: int = 0
) -> Gradients:
    """Returns dq, dk and dv of a row, each (1, heads, tokens, head_dim), for sequences with as many keys as queries.

    Args:
        tensors: dout, q, keys, values and out, each (tokens, heads, head_dim) with its own number of heads.
        lse: (heads, tokens), contiguous.
    """
    longest = max(longest, FEWEST)
    left, right = (window - 1, 0) if window else (None, None)
    unused = torch.empty(0, dtype=torch.int64, device=bounds.device)  # dropout's state
    grads = torch.ops.aten._flash_attention_backward.default(
        *tensors, lse, bounds, bounds, longest, longest, 0.0, True, unused, unused, scale=scale, window_size_left=left,
        window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (t[None].transpose(1, 2) for t in grads)
    return dq, dk, dv


def results_of(rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins the rows' results: out (batch, heads, tokens, head_dim) and lse (batch, heads, tokens)."""
    if len(rows) == 1:
        return rows[0][0][None].transpose(1, 2), rows[0][1][None]
    outs, sums = zip(*rows, strict=True)
    return torch.stack(outs).transpose(1, 2), torch.stack(sums)


def gradients_of(rows: Sequence[Gradients]) -> Gradients:
    """Joins the rows' dq, dk and dv to gradients of the batch, in token-major memory."""
    if len(rows) == 1:
        return rows[0]
    dq, dk, dv = (torch.cat([t.transpose(1, 2) for t in each]).transpose(1, 2) for each in zip(*rows, strict=True))
    return dq, dk, dv


def siblings_forward(
    parts: tuple[int, ...], scale: float, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns out and lse of siblings, of ``parts`` tokens each, over own keys; tensors (batch, heads, tokens, ...)."""
    bounds, longest = _sibling_bounds(parts, q), max(parts)
    return results_of([
        forward([t.narrow(0, row, 1) for t in (q, keys, values)], bounds, bounds, longest, longest, scale)
        for row in range(len(q))
    ])  # fmt: skip


def siblings_backward(parts: tuple[int, ...], lse: Tensor, scale: float, *tensors: Tensor) -> Gradients:
    """Returns dq, dk and dv (batch, heads, tokens, ...) of siblings over their own keys.

    Args:
        parts: tokens of each sibling.
        lse: (batch, heads, tokens), contiguous.
        tensors: dout, q, keys, values and out, (batch, tokens, heads, head_dim).
    """
    bounds, longest = _sibling_bounds(parts, lse), max(parts)
    rows = zip(*[t.unbind() for t in tensors], strict=True)
    return gradients_of([
        backward(row, of_row, bounds, longest, scale)
        for row, of_row in zip(rows, lse.unbind(), strict=True)
    ])  # fmt: skip


def _sibling_bounds(parts: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns 0 and the end of each sibling, in int32 on the device of ``like``."""
    # All layers of a unit and its backward share the tensor. It is kept by stream, so that the order of the stream's
    # work protects its reads and the reuse of its memory.
    return _kept_bounds(parts, like.device, kernel_library.raw_stream(like.get_device()))


@functools.lru_cache(maxsize=64)
def _kept_bounds(parts: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    ends = torch.tensor([0, *itertools.accumulate(parts)], dtype=torch.int32, device="cpu")
    return ends.to(device, non_blocking=True)
