"""How segments' losses make the losses of whole micro-batches, and their gradients.

A mean over a micro-batch's counted targets is the sum over its segments of (segment's share) x (segment's mean). The
share enters as the seed of the backward, so the graph is that of the plain loss.

Lists are by [micro-batch][segment]; micro-batches may have a number of segments each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from seq1f1b.runtime.divided import sum_divisors
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.splitting import split_sequence

IGNORED = -100  # torch's ignore_index


def count_targets(
    whole: Sequence[Any],
    rows: Sequence[Sequence[int]],
    dim: int,
    count: Callable[[Any], float] | None,
) -> list[list[float]]:
    """Counts the targets of each [micro-batch][segment]: elements that are not -100, or what ``count`` says.

    Args:
        whole: targets of the M micro-batches.
        rows: tokens of each segment, or of each shard of each segment, of every micro-batch.
        dim: the sequence dimension of the targets.
        count: counts one segment's target.
    """
    if count is None:
        return [_default_counts(target, sizes, dim) for target, sizes in zip(whole, rows, strict=True)]
    split = [
        [target] if len(sizes) == 1 else split_sequence(target, sizes, dim, f"target of micro-batch {m}")
        for m, (target, sizes) in enumerate(zip(whole, rows, strict=True))
    ]
    counts = [[float(count(target)) for target in segments] for segments in split]
    for m, segments in enumerate(counts):
        for s, value in enumerate(segments):
            if not value >= 0.0:
                raise ValueError(f"loss_weight of micro-batch {m}, segment {s} is {value}, must be at least 0")
    return counts


def _default_counts(target: Any, sizes: Sequence[int], dim: int) -> list[float]:
    what, target = type(target).__name__, next(iter(tensors_of(target)), None)
    if target is None:
        if len(sizes) == 1:
            return [1.0]
        raise TypeError(
            f"target is a {what}: pass loss_weight= to the engine, a callable that counts a segment's targets"
        )
    if target.is_floating_point():
        return [float(size) for size in sizes]
    if len(sizes) == 1:
        return [count_default(target)]
    counted = target != IGNORED
    per_position = counted.movedim(dim, 0).flatten(1).sum(1) if counted.dim() > 1 else counted.long()
    ends = torch.tensor(sizes, device="cpu").cumsum(0) - 1
    totals = per_position.cumsum(0)[ends.to(target.device)].tolist()
    return [float(end - start) for start, end in zip([0, *totals[:-1]], totals, strict=True)]


def count_default(target: Any) -> float:
    """Targets of any part of a sequence: elements that are not -100."""
    target = next(iter(tensors_of(target)), None)
    if target is None:
        return 1.0
    return float(target.numel() if target.is_floating_point() else (target != IGNORED).sum())


def shares(counts: list[list[float]]) -> list[list[float]]:
    """Each segment's share of its micro-batch; all shares are zero if a micro-batch counts nothing."""
    totals = [sum(segments) for segments in counts]
    return [
        [value / total if total else 0.0 for value in segments] for segments, total in zip(counts, totals, strict=True)
    ]


def make_seeds(values: list[list[float]], device: torch.device) -> list[list[Tensor]]:
    """Scalars on the device by [micro-batch][segment], made by one call."""
    seeds = torch.tensor([value for row in values for value in row], dtype=torch.float64, device=device).unbind()
    ends = [*accumulate(map(len, values), initial=0)]
    return [list(seeds[begin:end]) for begin, end in pairwise(ends)]


def divide(losses: dict[int, Tensor], divisors: Mapping[int, Tensor | float], rows: Sequence[Any]) -> list[Tensor]:
    """Losses of the M micro-batches from the sums and divisors of their segments (by cell); rows: of the segments."""
    found, cell = [], 0
    for row in rows:
        cells = range(cell, cell + len(row))
        total = torch.stack([losses[i].reshape(()) for i in cells]).sum()
        divisor = sum_divisors(divisors[i] for i in cells)
        found.append(total / divisor if divisor else total * 0.0)
        cell += len(row)
    return found


def combine(losses: dict[int, Tensor], weights: list[list[float]], device: torch.device) -> list[Tensor]:
    """Losses of the M micro-batches from those of their segments (by cell); zero if nothing was counted."""
    counts = [len(row) for row in weights]
    if max(counts) == 1 and len(losses) == len(weights) and all(row[0] == 1.0 for row in weights):
        return [losses[m].reshape(()) for m in range(len(weights))]
    zero = None
    if len(losses) < sum(counts):
        zero = torch.zeros_like(next(iter(losses.values()))) if losses else torch.zeros((), device=device)
    parts = [losses.get(i, zero) for i in range(sum(counts))]
    values = torch.stack([part.reshape(()) for part in parts if part is not None])
    scale = torch.tensor([weight for row in weights for weight in row], dtype=values.dtype, device=device)
    if min(counts) == max(counts):
        return list((values * scale).view(len(counts), -1).sum(1).unbind())
    return [part.sum() for part in torch.split(values * scale, counts)]


def shift_labels(tokens: Tensor, dim: int = 1, *, doc_ids: Tensor | None = None) -> Tensor:
    """Makes the targets of next-token prediction: position t gets token t + 1, the last one is ignored (-100).

    Shift before ``step``: a loss that shifts inside a segment silently drops the targets at the borders.

    Args:
        tokens: integer tensor, for example (batch, sequence).
        dim: the sequence dimension.
        doc_ids: ids of packed documents, in the shape of ``tokens``. The last token of each document is ignored, too,
            because the first token of another one follows it.
    """
    if tokens.is_floating_point() or tokens.dim() <= dim:
        raise ValueError(f"shift_labels needs an integer tensor with a dimension {dim}, got {tuple(tokens.shape)}")
    shifted = torch.full_like(tokens, IGNORED)
    length = tokens.size(dim)
    if doc_ids is not None and doc_ids.shape != tokens.shape:
        raise ValueError(f"doc_ids is {tuple(doc_ids.shape)}, must be of tokens' shape {tuple(tokens.shape)}")
    if length > 1:
        shifted.narrow(dim, 0, length - 1).copy_(tokens.narrow(dim, 1, length - 1))
        if doc_ids is not None:
            ends = doc_ids.narrow(dim, 0, length - 1) != doc_ids.narrow(dim, 1, length - 1)
            shifted.narrow(dim, 0, length - 1).masked_fill_(ends, IGNORED)
    return shifted
