"""The ways of cuda_attention.py: each computes attention, forward and backward, as a plan of its shapes says.

A forward takes the plan, q, keys, values and the options, and returns out (batch, heads, tokens, head_dim of values)
and lse (batch, heads, tokens), both before sinks. A backward adds to the slabs dk and dv, or stores there, and returns
dq, and dk and dv of the queries' own tokens. Keys and values reach from the sequence's first token to the last query's.
What a plan has found out about the tensors' layouts is not asked again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b.device import attention_parts, kernel_library
from seq1f1b.device.document_layout import Layout

__all__: list[str] = []

_LSE_ALIGNMENT = 32  # rows of lse that _efficient_attention_backward reads come in multiples of this
_BOTTOM_RIGHT = 2  # custom_mask_type of the efficient ops: causal, the last query sees the last key


class Options(NamedTuple):
    """Which keys a query sees, and how; window 0, softcap 0 and empty tensors stand for none."""

    key_docs: Tensor  # (batch, keys), int32
    slopes: Tensor  # (heads) or (batch, heads), float32
    docs: Tensor  # (batch, tokens) of the queries, int32
    sinks: Tensor  # (heads), float32 or float64 as the sums
    scale: float
    window: int
    softcap: float
    in_pieces: bool = False  # tokens of a document are known not to follow one another
    layout: Layout | None = None  # of the documents, where the way needs it


class Call(NamedTuple):
    """Some of the queries over one range of keys."""

    piece: int  # index of the range among ``Plan.pieces``
    begin: int  # its first key
    first: int  # of the queries that see it
    num_queries: int
    comes_first: bool  # no call before it wrote to this range of dk and dv
    is_own: bool  # its keys are the segment's own, all of them


@dataclass(slots=True, eq=False)
class Plan:
    """How calls of one shape are computed. Holds no tensor and no address."""

    run: Callable[..., Any]  # the way's forward or backward
    way: str
    operation: kernel_library.Operation | None  # of the own way
    tokens: int  # queries; the last of them is the last key's token
    copied: tuple[bool, ...] | None  # tensors whose rows the ops cannot read as they lie; None: they can read all
    width: int  # heads of q and k, and of v, get zeros up to so many; 0: they stay as they are
    pieces: tuple[int, ...]  # lengths of the ranges of keys, from the first key on
    hides_first: bool  # the window hides the first of them from all queries
    calls: tuple[Call, ...]
    sum_of_dq: str  # "total" of all calls' parts, "in place" of the first's, or "wide": one by one in float32
    key_range: int = 0  # most keys before the segment that a call of the documents' backward takes
    wait: float | None = None  # operations still to come before cuDNN's own plan pays; None: decided
    flops: float = 0.0  # of one call


# -- ranges of keys --------------------------------------------------------------------------------------------------


def bounds(start: int, limit: int, longest: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + longest, limit)) for begin in range(start, limit, longest)]


def lengths(of_bounds: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(stop - begin for begin, stop in of_bounds)


def ranges(
    start: int, offset: int, end: int, window: int, longest: int, is_plain: bool = False
) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Lengths of the keys before ``start`` and of all ranges behind them, and the calls of a backward.

    The queries are tokens ``offset`` to ``end``; they see no key before ``start``. The ops mask from the last query and
    key backwards. So the segment's own keys are one range, whose call comes first, and where a window hides a range
    before them from the last rows, these are left out. Under a window torch's flash ops take no more queries than keys,
    and one (they hide keys of the first ones else, whatever the window's right side): rows that see a whole range, and
    so need no window, are a part of their own where there are more. The plain way masks by positions, so its ranges
    begin and end anywhere.
    """
    if is_plain:
        of_bounds = bounds(start, end, longest)
    else:
        of_bounds = [*bounds(start, offset, longest), (offset, end)]
    calls = []
    for piece, (begin, stop) in enumerate(of_bounds, 1 if start else 0):
        first, last = max(begin, offset), min(end, stop + window - 1) if window else end
        is_own = not is_plain and begin == offset
        is_split = window and not is_plain and last - first > stop - begin + 1 and begin + window < last
        if is_split:
            calls.append(Call(piece, begin, first - offset, begin + window - first, True, is_own))
            first = begin + window
        calls.append(Call(piece, begin, first - offset, last - first, not is_split, is_own))
    if not is_plain:
        calls = calls[-1:] + calls[:-1]
    return (start,) * bool(start) + lengths(of_bounds), tuple(calls)


def sum_of_dq(calls: tuple[Call, ...], tokens: int) -> str:
    if len(calls) <= attention_parts.MOST_PARTS and all(call.num_queries == tokens for call in calls):
        return "total"
    rows = sorted((call.first, call.first + call.num_queries) for call in calls[1:])
    is_one_each = all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    return "in place" if calls[0].is_own and is_one_each else "wide"


# -- layouts ---------------------------------------------------------------------------------------------------------


def are_rows_aligned(t: Tensor) -> bool:
    """Whether the ops can read (batch, heads, tokens, head_dim) where it lies: 16-byte rows, taken for granted."""
    strides, sizes, unit = t.stride(), t.shape, 16 // t.element_size()
    fits = strides[3] == 1 and all(strides[d] % unit == 0 or sizes[d] == 1 for d in range(3))
    return fits and t.data_ptr() % 16 == 0


def aligned(t: Tensor) -> Tensor:
    return t if are_rows_aligned(t) else _token_major_copy(t)


def _token_major_copy(t: Tensor) -> Tensor:
    return t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def token_major(t: Tensor, dtype: torch.dtype) -> Tensor:
    """In that dtype, in memory (batch, tokens, heads, head_dim), as the ops promise; a copy if need be."""
    _, heads, tokens, head_dim = t.shape
    if t.dtype == dtype:
        if t.stride() == (tokens * heads * head_dim, head_dim, heads * head_dim, 1):
            return t
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, ...) as (batch, kv_heads, heads that share one, ...)."""
    return t.view(t.shape[0], kv_heads, t.shape[1] // kv_heads, *t.shape[2:])


def padded(t: Tensor, width: int) -> Tensor:
    """With zeros behind heads that are narrower."""
    return t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3]))


def readable(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the plan as the way's ops can read them."""
    if plan.width:
        return tuple([aligned(padded(t, plan.width)) for t in tensors])
    if plan.copied is not None:
        return tuple([_token_major_copy(t) if copy else t for t, copy in zip(tensors, plan.copied, strict=True)])
    return tensors


# -- a backward over ranges of keys ----------------------------------------------------------------------------------


class Given(NamedTuple):
    """The arguments of a backward."""

    dout: Tensor
    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    lse: Tensor
    options: Options
    dk: Tensor
    dv: Tensor
    store: bool  # dk and dv hold nothing yet


Gradients = tuple[Tensor, Tensor, Tensor]
Part = Callable[[Call, Tensor, Tensor], Gradients]
"""dq, dk and dv of a call, from the keys and values of its range."""


def over_ranges(plan: Plan, given: Given, keys: Tensor, values: Tensor, part: Part) -> Gradients:
    """dq, and the own tokens' dk and dv, in q's dtype and token-major memory.

    Later segments went backward before, so the own tokens' rows of the slabs are complete. They are read here for the
    last time, and so not written: earlier segments see none of these rows.
    """
    dtype, dk, dv, store = given.q.dtype, given.dk, given.dv, given.store
    of_keys: tuple[Tensor, ...] = (keys,)
    of_values: tuple[Tensor, ...] = (values,)
    if len(plan.pieces) > 1:
        of_keys, of_values = keys.split_with_sizes(plan.pieces, 2), values.split_with_sizes(plan.pieces, 2)
    if plan.hides_first and store:
        dk.narrow(2, 0, plan.pieces[0]).zero_()
        dv.narrow(2, 0, plan.pieces[0]).zero_()
    own: tuple[Tensor, Tensor] | None = None
    parts: list[Tensor] = []
    dq = _token_major_zeros(given.q, given.lse.dtype) if plan.sum_of_dq == "wide" else None
    for call in plan.calls:
        part_q, part_k, part_v = part(call, of_keys[call.piece], of_values[call.piece])
        if call.is_own:
            own = attention_parts.finish(dk, dv, part_k, part_v, store, call.begin)
        else:
            attention_parts.add(dk, dv, part_k, part_v, store and call.comes_first, call.begin)
        del part_k, part_v  # before the next call makes as many
        if plan.sum_of_dq == "total":
            parts.append(part_q)
        elif dq is None:
            dq = part_q
        else:
            dq.narrow(2, call.first, call.num_queries).add_(part_q)
    if dq is None:
        dq = attention_parts.total(parts)
    if own is None:
        offset = dk.shape[2] - plan.tokens
        own = dk.narrow(2, offset, plan.tokens), dv.narrow(2, offset, plan.tokens)
    return token_major(dq, dtype), token_major(own[0], dtype), token_major(own[1], dtype)


def _token_major_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head_dim = like.shape
    return like.new_zeros((batch, tokens, heads, head_dim), dtype=dtype).transpose(1, 2)


def _rows_of(plan: Plan, call: Call, *tensors: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
    """The queries of a call."""
    if call.num_queries == plan.tokens:
        return tensors
    return tuple([t.narrow(dim, call.first, call.num_queries) for t in tensors])


# -- own -------------------------------------------------------------------------------------------------------------


def own_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    assert plan.operation is not None
    return launch_own_forward(plan.operation, q, keys, values, options)


def own_backward(plan: Plan, given: Given) -> Gradients:
    assert plan.operation is not None
    return launch_own_backward(plan.operation, given)


def _aligned_pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The two with equal strides."""
    first, second = aligned(first), aligned(second)
    if first.stride() == second.stride():
        return first, second
    return first.contiguous(), second.contiguous()


def launch_own_forward(
    operation: kernel_library.Operation, q: Tensor, keys: Tensor, values: Tensor, options: Options, kernel: int = -1
) -> tuple[Tensor, Tensor]:
    q, (keys, values) = aligned(q), _aligned_pair(keys, values)
    batch, heads, tokens, head_dim = q.shape
    out = q.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    kernel_library.launch_attention(
        operation, q, keys, values, out, lse, scale=options.scale, window=options.window, softcap=options.softcap,
        docs=options.key_docs, kernel=kernel,
    )  # fmt: skip
    return out, lse


def launch_own_backward(operation: kernel_library.Operation, given: Given, kernel: int = -1) -> Gradients:
    dout, q, out = aligned(given.dout), aligned(given.q), aligned(given.out)
    (keys, values), options = _aligned_pair(given.keys, given.values), given.options
    batch, heads, tokens, head_dim = q.shape
    dq, own_dk, own_dv = (
        q.new_empty((batch, tokens, of_heads, head_dim)).transpose(1, 2) for of_heads in (heads, *[keys.shape[1]] * 2)
    )
    kernel_library.launch_attention(
        operation, q, keys, values, out, given.lse.contiguous(), scale=options.scale, window=options.window,
        softcap=options.softcap, docs=options.key_docs, dout=dout, dq=dq, dk=given.dk, dv=given.dv, own_dk=own_dk,
        own_dv=own_dv, store=given.store, kernel=kernel,
    )  # fmt: skip
    return dq, own_dk, own_dv


# -- cuDNN: it masks from the first query and key on, so a segment's own keys and those before are a call each ---------


def cudnn_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    v_head_dim, scale = values.shape[3], options.scale
    q, keys, values = readable(plan, q, keys, values)
    attend, sums = torch.ops.aten._scaled_dot_product_cudnn_attention.default, q.shape[:3]
    if len(plan.pieces) == 1:
        found = attend(q, keys, values, None, True, 0.0, True, False, scale=scale)
        out, lse = found[0], found[1].view(sums)
    else:
        before, own = keys.split_with_sizes(plan.pieces, 2)
        values_before, own_values = values.split_with_sizes(plan.pieces, 2)
        of_own = attend(q, own, own_values, None, True, 0.0, True, False, scale=scale)
        of_before = attend(q, before, values_before, None, True, 0.0, False, False, scale=scale)
        out, lse = attention_parts.merge(of_own[0], of_own[1].view(sums), of_before[0], of_before[1].view(sums))
    return (out[..., :v_head_dim] if plan.width else out), lse


def cudnn_backward(plan: Plan, given: Given) -> Gradients:
    keys, values, scale, tokens = given.keys, given.values, given.options.scale, plan.tokens
    dout, q, keys, values, out = readable_backward(plan, given)
    lse = given.lse.contiguous().unsqueeze(3)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        keys, values = readable_range(plan, keys, values)
        dq, dk, dv = attend(
            dout, q, keys, values, out, lse, unused, unused, None, None, None, tokens, keys.shape[2], 0.0, call.is_own,
            scale=scale,
        )  # fmt: skip
        return narrowed(plan, given, dq, dk, dv)

    return over_ranges(plan, given, keys, values, part)


def readable_backward(plan: Plan, given: Given) -> tuple[Tensor, ...]:
    """dout, q, keys, values and out; keys and values get their zeros range by range."""
    if not plan.width:
        return readable(plan, *given[:5])
    dout, q, out = readable(plan, given.dout, given.q, given.out)
    return dout, q, given.keys, given.values, out


def readable_range(plan: Plan, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    return readable(plan, keys, values) if plan.width else (keys, values)


def narrowed(plan: Plan, given: Given, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
    """Without the zeros."""
    if not plan.width:
        return dq, dk, dv
    head_dim, v_head_dim = given.q.shape[3], given.values.shape[3]
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_head_dim]


# -- flash -----------------------------------------------------------------------------------------------------------


def flash_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    v_head_dim, window = values.shape[3], options.window
    q, keys, values = readable(plan, q, keys, values)
    left, right = (window - 1, 0) if window else (None, None)
    found = torch.ops.aten._flash_attention_forward.default(
        q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None, None, q.shape[2], keys.shape[2], 0.0,
        True, False, scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    out = found[0].transpose(1, 2)
    return (out[..., :v_head_dim] if plan.width else out), found[1]


OwnPart = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
"""dq, dk and dv from dout, q, keys, values and out, all of the segment, as flash takes them."""


def flash_backward(plan: Plan, given: Given, own: OwnPart | None = None) -> Gradients:
    """own: takes the place of the call over the segment's own keys."""
    dout, q, keys, values, out = readable_backward(plan, given)
    dout, q, out = dout.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2)
    lse, options, end = given.lse.contiguous(), given.options, keys.shape[2]
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._flash_attention_backward.default

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        """Masked from the last query and key backwards, as the op does."""
        keys, values = readable_range(plan, keys, values)
        if own is not None and call.is_own:
            return narrowed(plan, given, *own(dout, q, keys.transpose(1, 2), values.transpose(1, 2), out))
        of_dout, of_q, of_out = _rows_of(plan, call, dout, q, out, dim=1)
        (of_lse,) = _rows_of(plan, call, lse)
        num_keys, window = keys.shape[2], options.window
        behind = (
            end - plan.tokens + call.first + call.num_queries - (call.begin + num_keys)
        )  # from last key to last query
        hides = window and behind + num_keys > window  # the first key from the last query
        left, right = (window - 1 - behind, behind) if hides else (None, None)
        dq, dk, dv = attend(
            of_dout, of_q, keys.transpose(1, 2), values.transpose(1, 2), of_out, of_lse.contiguous(), None, None,
            call.num_queries, num_keys, 0.0, behind == 0, unused, unused, scale=options.scale, window_size_left=left,
            window_size_right=right,
        )  # fmt: skip
        return narrowed(plan, given, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))

    return over_ranges(plan, given, keys, values, part)


# -- memory-efficient: as many heads of keys as of queries, so one call per query head of a group --------------------


def _groups(q: Tensor, kv_heads: int) -> list[Tensor]:
    """Query heads that read different kv heads: for each of a group, (batch, kv_heads, tokens, ...)."""
    return [q] if q.shape[1] == kv_heads else list(_by_kv_head(q, kv_heads).unbind(2))


def _ungroup(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)


def efficient_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    q, keys, values = readable(plan, q, keys, values)
    outs, lses, kv_heads = [], [], keys.shape[1]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    for group in _groups(q, kv_heads):
        found = torch.ops.aten._efficient_attention_forward.default(
            group.transpose(1, 2), keys, values, None, None, None, None, None, 0.0, _BOTTOM_RIGHT, True,
            scale=options.scale,
        )  # fmt: skip
        outs.append(found[0].transpose(1, 2))
        lses.append(found[1] if found[1].shape[2] == plan.tokens else found[1].narrow(2, 0, plan.tokens))
    return _ungroup(outs), _ungroup(lses)  # the op rounds the number of rows of lse up


def efficient_backward(plan: Plan, given: Given) -> Gradients:
    dout, q, keys, values, out = readable_backward(plan, given)
    kv_heads, padding, scale = keys.shape[1], -plan.tokens % _LSE_ALIGNMENT, given.options.scale
    lse = F.pad(given.lse, (0, padding), value=float("inf")) if padding else given.lse
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._efficient_attention_backward.default
    groups = [
        (of_dout.transpose(1, 2), of_q.transpose(1, 2), of_out.transpose(1, 2).contiguous(), of_lse.contiguous())
        for of_dout, of_q, of_out, of_lse in zip(*(_groups(t, kv_heads) for t in (dout, q, out, lse)), strict=True)
    ]

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        num_keys, mask = keys.shape[2], _BOTTOM_RIGHT if call.is_own else 0
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        dqs, dk, dv = [], None, None
        for of_dout, of_q, of_out, of_lse in groups:
            part_dq, part_dk, part_dv, _ = attend(
                of_dout, of_q, keys, values, None, of_out, None, None, plan.tokens, num_keys, of_lse, 0.0, unused,
                unused, mask, False, scale=scale,
            )  # fmt: skip
            dqs.append(part_dq.transpose(1, 2))
            dk = part_dk if dk is None else dk + part_dk
            dv = part_dv if dv is None else dv + part_dv
        assert dk is not None and dv is not None
        return _ungroup(dqs), dk.transpose(1, 2), dv.transpose(1, 2)

    return over_ranges(plan, given, keys, values, part)


# -- plain: (batch, kv_heads, group, tokens, ...) throughout, in float32 or float64 ----------------------------------


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)


def _logits(
    q: Tensor, keys: Tensor, options: Options, rows: slice, query: int, key: int
) -> tuple[Tensor, Tensor | None]:
    """Logits, -inf where hidden, and what the soft cap leaves of the products' gradients.

    rows: of the segment, those of q; query, key: the first tokens of q and keys.
    """
    batch, kv_heads, _, tokens, _ = q.shape
    num_keys = keys.shape[2]
    logits = torch.einsum("bhgsd,bhkd->bhgsk", q, keys) * options.scale
    slope = None
    if options.softcap:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = options.softcap * capped, 1 - capped.square()
    position = torch.arange(query, query + tokens, device=q.device)
    distance = position[:, None] - torch.arange(key, key + num_keys, device=q.device)[None, :]
    if options.slopes.numel():
        slopes = _by_kv_head(options.slopes.expand(batch, -1), kv_heads).to(logits.dtype)
        logits = logits - slopes[..., None, None] * distance
    hidden = distance < 0
    if options.window:
        hidden = hidden | (distance >= options.window)
    if options.docs.numel():
        other = options.docs[:, rows, None] != options.key_docs[:, None, key : key + num_keys]
        hidden = hidden | other[:, None, None]
    return logits.masked_fill(hidden, float("-inf")), slope


def plain_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Over ranges of keys twice: first the sums, then the products with what they make of the logits."""
    kv_heads = keys.shape[1]
    query, wide, every = keys.shape[2] - q.shape[2], _wide(_by_kv_head(q, kv_heads)), slice(None)
    ranges = list(zip(keys.split_with_sizes(plan.pieces, 2), values.split_with_sizes(plan.pieces, 2), strict=True))
    begins = [0, *itertools.accumulate(plan.pieces)]

    def logits_of(part: Tensor, begin: int) -> Tensor:
        return _logits(wide, _wide(part), options, every, query, begin)[0]

    lse = wide.new_full(wide.shape[:4], float("-inf"))
    for (of_keys, _), begin in zip(ranges, begins, strict=False):
        lse = torch.logaddexp(lse, logits_of(of_keys, begin).logsumexp(-1))
    out = wide.new_zeros((*wide.shape[:4], values.shape[3]))
    for (of_keys, of_values), begin in zip(ranges, begins, strict=False):
        weights = torch.exp(logits_of(of_keys, begin) - lse[..., None])
        out += torch.einsum("bhgsk,bhkd->bhgsd", weights, _wide(of_values))
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_backward(plan: Plan, given: Given) -> Gradients:
    kv_heads, offset, options = given.keys.shape[1], given.keys.shape[2] - plan.tokens, given.options

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        rows = slice(call.first, call.first + call.num_queries)
        dout, q, out = (_wide(_by_kv_head(t[:, :, rows], kv_heads)) for t in (given.dout, given.q, given.out))
        lse, keys, values = _by_kv_head(given.lse[:, :, rows], kv_heads), _wide(keys), _wide(values)
        logits, slope = _logits(q, keys, options, rows, offset + call.first, call.begin)
        weights = torch.exp(logits - lse[..., None])
        dv = torch.einsum("bhgsk,bhgsd->bhkd", weights, dout)
        delta = (dout * out).sum(-1, keepdim=True)
        dlogits = weights * (torch.einsum("bhgsd,bhkd->bhgsk", dout, values) - delta) * options.scale
        if slope is not None:
            dlogits = dlogits * slope
        dq = torch.einsum("bhgsk,bhkd->bhgsd", dlogits, keys)
        dk = torch.einsum("bhgsk,bhgsd->bhkd", dlogits, q)
        return dq.flatten(1, 2), dk, dv

    return over_ranges(plan, given, given.keys, given.values, part)
