"""What attention over a prefix needs beside attention: results over ranges of keys merged, their gradients added up.

All tensors are (batch, heads, rows, head_dim). What these functions return lies in token-major memory: (batch, rows,
heads, head_dim). Sums are taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__: list[str] = []


def merge(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        own, before: (batch, heads, rows, head_dim); zeros in rows that see no key.
        own_lse, before_lse: (batch, heads, rows), logarithms of the sums; -inf in rows that see no key.
    Returns:
        out of own's dtype, in token-major memory, and lse, contiguous.
    """
    return _merge_by_torch(own, own_lse, before, before_lse)


def add(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> None:
    """Adds the parts to rows of the slabs dk and dv; with ``store`` writes them there, and reads nothing."""
    _add_by_torch(dk, dv, part_k, part_v, store)


def finish(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> tuple[Tensor, Tensor]:
    """Sums of dk and part_k, and of dv and part_v, in the parts' dtype and token-major memory; dk and dv stay as they
    are. With ``store`` these hold nothing yet, and the parts are the sums: a part that lies so is returned itself.
    """
    return _finish_by_torch(dk, dv, part_k, part_v, store)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum in their dtype and token-major memory; of one part that lies so, the part itself."""
    return _total_by_torch(parts)


# -- by torch's ops --------------------------------------------------------------------------------------------------


def _token_major_empty(like: Tensor) -> Tensor:
    batch, heads, rows, head_dim = like.shape
    return like.new_empty((batch, rows, heads, head_dim)).transpose(1, 2)


def _token_major(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)  # no copy where it lies so


def _merge_by_torch(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    # The least finite number in place of -inf: the difference of two -inf is no number.
    share = torch.sigmoid(own_lse - before_lse.clamp_min(torch.finfo(before_lse.dtype).min))[..., None]
    out = _token_major_empty(own)
    torch.addcmul(own * share, before, 1.0 - share, out=out)
    return out, torch.logaddexp(own_lse, before_lse).contiguous()


def _add_by_torch(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> None:
    if store:
        dk.copy_(part_k)
        dv.copy_(part_v)
    else:
        dk.add_(part_k)
        dv.add_(part_v)


def _finish_by_torch(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> tuple[Tensor, Tensor]:
    if store:
        return _token_major(part_k), _token_major(part_v)
    own_dk, own_dv = _token_major_empty(part_k), _token_major_empty(part_v)
    torch.add(dk, part_k, out=own_dk)
    torch.add(dv, part_v, out=own_dv)
    return own_dk, own_dv


def _total_by_torch(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    if not others:
        return _token_major(first)
    out = _token_major_empty(first)
    *middle, last = others
    if middle and first.dtype != torch.float64:
        first = first.float()
    for part in middle:
        first = first + part
    return torch.add(first, last, out=out)
