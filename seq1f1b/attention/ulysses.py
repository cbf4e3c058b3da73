"""Sequence parallelism inside a stage: ranks share the tokens of each segment, and the heads of attention.

An all-to-all before attention exchanges a part of the tokens, of all heads, for all tokens of a part of the heads; a
second all-to-all is the way back. All other layers of a stage work token by token.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from seq1f1b import _C
from seq1f1b.attention.causal import _autocast, _check, causal_attention

__all__ = ["ulysses_attention"]


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None,
    layer: Tensor | int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    doc_ids: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention if the N ranks of a group each hold 1/N of the segment's tokens.

    The result equals :func:`seq1f1b.causal_attention`. Rank r holds part r of the segment, as cut by
    ``PipelineEngine(sequence_parallel=(r, N))``; all parts are equally long. The KV cache of each rank then holds 1/N
    of the heads, for all tokens. If N does not divide kv_heads, keys and values are repeated: with 2 heads and 8 ranks,
    each rank holds one head.

    Args:
        q: (batch, heads, tokens, head_dim), this rank's tokens of all heads; N divides heads.
        k, v: (batch, kv_heads, tokens, head_dim); kv_heads divides heads. Heads of v may have another size.
        group: the ranks of one stage. None: this rank holds all tokens, as in a model run whole.
        layer, scale, window, softcap, alibi_slopes, sinks: as in ``causal_attention``; slopes and sinks of all heads.
            A rank's gradient of the sinks is 0 for heads of other ranks; the ranks' gradients add up, as gradients of
            all parameters do.
        doc_ids: (batch, tokens), or ids of the whole segment, (batch, N * tokens), which saves a gather per call.
    Returns:
        (batch, heads, tokens, head_dim of v), this rank's tokens of all heads.
    Raises:
        ValueError: N does not divide heads, the tokens are not 1/N of the segment's, or ``causal_attention`` refuses
            the arguments.
        RuntimeError: a rank of the group was lost, or did not come within the group's time-out.
    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    attend = partial(causal_attention, layer=layer, scale=scale, window=window, softcap=softcap)
    if group is None:
        return attend(q, k, v, alibi_slopes=alibi_slopes, doc_ids=doc_ids, sinks=sinks)
    size = dist.get_world_size(group)
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, alibi_slopes, None, sinks)
    _check_shards(q, doc_ids, size)
    heads, kv_heads = q.shape[1], k.shape[1]
    copies = next(c for c in range(1, size + 1) if kv_heads * c % size == 0)
    if copies > 1:
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
    own, own_kv = heads // size, kv_heads * copies // size

    # One message for q, k and v: (rank, tokens, batch, elements of the rank's heads).
    blocks = torch.cat([_in_parts(t, 1, size).permute(1, 3, 0, 2, 4).flatten(3) for t in (q, k, v)], 3)
    whole = _all_to_all(blocks, group).flatten(0, 1)
    parts = torch.split(whole, [own * q.shape[3], own_kv * k.shape[3], own_kv * v.shape[3]], 2)
    q, k, v = (
        torch.unflatten(part, 2, (of_part, -1)).permute(1, 2, 0, 3)
        for part, of_part in zip(parts, (own, own_kv, own_kv), strict=True)
    )
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.narrow(-1, dist.get_rank(group) * own, own)
    if sinks is not None:
        sinks = sinks.narrow(0, dist.get_rank(group) * own, own)
    if doc_ids is not None and doc_ids.shape[1] != q.shape[2]:
        doc_ids = _all_to_all(doc_ids.to(torch.int32).t().expand(size, -1, -1), group).flatten(0, 1).t()
    out = attend(q, k, v, alibi_slopes=alibi_slopes, doc_ids=doc_ids, sinks=sinks)
    blocks = _in_parts(out.permute(2, 0, 1, 3), 0, size)
    return _all_to_all(blocks, group).permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)


def _in_parts(t: Tensor, dim: int, size: int) -> Tensor:
    return torch.unflatten(t, dim, (size, t.shape[dim] // size))


def _all_to_all(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends block j to rank j; block i of the result came from rank i. Gradients go back likewise."""
    out = collectives.all_to_all_single_autograd(blocks.contiguous(), None, None, group)
    return out.wait() if isinstance(out, collectives.AsyncCollectiveTensor) else out


def _check_shards(q: Tensor, doc_ids: Tensor | None, size: int) -> None:
    """Checks shapes before the first message, because a message of unexpected size would hang the other ranks."""
    batch, heads, tokens, _ = q.shape
    if heads % size:
        raise ValueError(f"q has {heads} heads, which the {size} ranks of the group do not divide: take fewer ranks")
    if doc_ids is not None and tuple(doc_ids.shape) not in ((batch, tokens), (batch, size * tokens)):
        raise ValueError(
            f"doc_ids is {tuple(doc_ids.shape)}, must be ({batch}, {tokens}), as q, or of the whole segment, "
            f"({batch}, {size * tokens})"
        )
    unit = None if torch.compiler.is_compiling() else _C.unit_tokens()
    if unit is not None and tokens * size != unit[1]:
        raise ValueError(
            f"q has {tokens} tokens on this rank, the segment has {unit[1]}: must be 1/{size} of them; give the "
            f"engine sequence_parallel=(rank, {size})"
        )
