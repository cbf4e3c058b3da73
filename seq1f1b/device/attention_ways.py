"""The ways of cuda_attention.py: each computes attention, forward and backward, as a plan of its shapes says.

A forward takes the plan, q, keys, values and the options, and returns out (batch, heads, tokens, head_dim of values)
and lse (batch, heads, tokens), both before sinks. A backward adds to the slabs dk and dv, or stores there, and returns
dq, and dk and dv of the queries' own tokens. Keys and values reach from the sequence's first token to the last query's.
What a plan has found out about the tensors' layouts is not asked again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b.device import attention_parts, attention_sequences, kernel_library
from seq1f1b.device.attention_calls import Call, Place
from seq1f1b.device.attention_sequences import Gradients
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
    place: Place | None = None  # of the keys in a tree; None: in the first rows, and the last query sees the last one


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
    hides_first: int  # keys that the window hides from all queries: in a chain they are the first piece
    calls: tuple[Call, ...]
    merges: bool  # a forward's results two by two: each is of all queries, and they are few
    sum_of_dq: str  # "total" of all calls' parts, "in place" of the first's, or "wide": one by one in float32
    key_range: int = 0  # most keys before the segment that a call of the documents' backward takes
    wait: float | None = None  # operations still to come before cuDNN's own plan pays; None: decided
    flops: float = 0.0  # of one call
    place: Place | None = None  # of the keys in a tree
    rows: tuple[int, ...] = ()  # first rows of the pieces there
    packs: tuple[int, ...] = ()  # tokens of siblings that have one call over the own keys of all


# -- pieces of the keys ----------------------------------------------------------------------------------------------


def count_keys(plan: Plan, keys: Tensor) -> int:
    """Along the path."""
    return keys.shape[2] if plan.place is None else plan.place.end


def pieces_of(plan: Plan, keys: Tensor) -> tuple[Tensor, ...]:
    if plan.rows:
        return tuple([keys.narrow(2, row, size) for row, size in zip(plan.rows, plan.pieces, strict=True)])
    return keys.split_with_sizes(plan.pieces, 2) if len(plan.pieces) > 1 else (keys,)


def _hidden_rows(plan: Plan, store: bool) -> list[tuple[int, int]]:
    """First rows and lengths of what a window hides from all queries, and holds nothing yet."""
    if not plan.hides_first:
        return []
    if plan.place is None:
        return [(0, plan.pieces[0])] if store else []
    return [(row, size) for _, row, size in plan.place.rows_between(plan.place.kept, plan.hides_first)]


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


Part = Callable[[Call, Tensor, Tensor], Gradients]
"""dq, dk and dv of a call, from the keys and values of its range."""


def over_ranges(plan: Plan, given: Given, keys: Tensor, values: Tensor, part: Part) -> Gradients:
    """dq, and the own tokens' dk and dv, in q's dtype and token-major memory.

    Later segments went backward before, so the own tokens' rows of the slabs are complete. They are read here for the
    last time, and so not written: earlier segments see none of these rows.
    """
    dtype, dk, dv, store = given.q.dtype, given.dk, given.dv, given.store
    of_keys, of_values = pieces_of(plan, keys), pieces_of(plan, values)
    for row, size in _hidden_rows(plan, store):
        dk.narrow(2, row, size).zero_()
        dv.narrow(2, row, size).zero_()
    own: list[tuple[Tensor, Tensor]] = []
    parts: list[Tensor] = []
    dq = _token_major_zeros(given.q, given.lse.dtype) if plan.sum_of_dq == "wide" else None
    for call in plan.calls:
        part_q, part_k, part_v = part(call, of_keys[call.piece], of_values[call.piece])
        if plan.place is not None:
            store = call.begin >= plan.place.kept
        if call.is_own:
            own.append(attention_parts.finish(dk, dv, part_k, part_v, store, call.row))
        else:
            attention_parts.add(dk, dv, part_k, part_v, store and call.comes_first, call.row)
        del part_k, part_v  # before the next call makes as many
        if plan.sum_of_dq == "total":
            parts.append(part_q)
        elif dq is None:
            dq = part_q
        else:
            dq.narrow(2, call.first, call.num_queries).add_(part_q)
    if dq is None:
        dq = attention_parts.total(parts)
    if not own:
        offset = count_keys(plan, dk) - plan.tokens
        row = offset if plan.place is None else plan.place.row(offset)
        own = [(dk.narrow(2, row, plan.tokens), dv.narrow(2, row, plan.tokens))]
    own_dk, own_dv = own[0] if len(own) == 1 else (torch.cat(parts, 2) for parts in zip(*own, strict=True))
    return token_major(dq, dtype), token_major(own_dk, dtype), token_major(own_dv, dtype)


def _token_major_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head_dim = like.shape
    return like.new_zeros((batch, tokens, heads, head_dim), dtype=dtype).transpose(1, 2)


ForwardPart = Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]]
"""out and lse of a call's queries, from the keys and values of its range."""


def over_path(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, part: ForwardPart) -> tuple[Tensor, Tensor]:
    """out and lse of all queries, over the pieces of the keys."""
    of_keys, of_values = pieces_of(plan, keys), pieces_of(plan, values)
    if plan.merges:
        own, *others = plan.calls
        out, lse = part(own, of_keys[own.piece], of_values[own.piece])
        for call in others:
            out, lse = attention_parts.merge(out, lse, *part(call, of_keys[call.piece], of_values[call.piece]))
        return out, lse
    found = [part(call, of_keys[call.piece], of_values[call.piece]) for call in plan.calls]
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=found[0][1].dtype)
    for call, (_, of_call) in zip(plan.calls, found, strict=True):
        rows = lse.narrow(2, call.first, call.num_queries)
        rows.copy_(torch.logaddexp(rows, of_call))
    batch, heads, tokens, width = *q.shape[:3], found[0][0].shape[3]
    out = q.new_zeros((batch, tokens, heads, width), dtype=lse.dtype).transpose(1, 2)
    for call, (of_call, lse_of_call) in zip(plan.calls, found, strict=True):
        share = torch.exp(lse_of_call - lse.narrow(2, call.first, call.num_queries))
        out.narrow(2, call.first, call.num_queries).add_(of_call * share[..., None])
    return token_major(out, q.dtype), lse


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
    operation: kernel_library.Operation, q: Tensor, keys: Tensor, values: Tensor, options: Options
) -> tuple[Tensor, Tensor]:
    q, (keys, values) = aligned(q), _aligned_pair(keys, values)
    batch, heads, tokens, head_dim = q.shape
    out = q.new_empty((batch, tokens, heads, head_dim)).transpose(1, 2)
    lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
    kernel_library.launch_attention(
        operation, q, keys, values, out, lse, scale=options.scale, window=options.window, softcap=options.softcap,
        docs=options.key_docs,
    )  # fmt: skip
    return out, lse


def launch_own_backward(operation: kernel_library.Operation, given: Given) -> Gradients:
    dout, q, out = aligned(given.dout), aligned(given.q), aligned(given.out)
    (keys, values), options = _aligned_pair(given.keys, given.values), given.options
    batch, heads, tokens, head_dim = q.shape
    dq, own_dk, own_dv = (
        q.new_empty((batch, tokens, of_heads, head_dim)).transpose(1, 2) for of_heads in (heads, *[keys.shape[1]] * 2)
    )
    kernel_library.launch_attention(
        operation, q, keys, values, out, given.lse.contiguous(), scale=options.scale, window=options.window,
        softcap=options.softcap, docs=options.key_docs, dout=dout, dq=dq, dk=given.dk, dv=given.dv, own_dk=own_dk,
        own_dv=own_dv, store=given.store,
    )  # fmt: skip
    return dq, own_dk, own_dv


# -- cuDNN: it masks from the first query and key on, so a segment's own keys and those before are a call each ---------


def cudnn_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    v_head_dim, scale = values.shape[3], options.scale
    q, keys, values = readable_forward(plan, q, keys, values)
    attend, sums = torch.ops.aten._scaled_dot_product_cudnn_attention.default, q.shape[:3]

    def part(call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if plan.width:
            keys, values = readable(plan, keys, values)
        if plan.packs and call.is_own:
            return attention_sequences.siblings_forward(plan.packs, q, keys, values, scale)
        found = attend(q, keys, values, None, True, 0.0, call.is_own, False, scale=scale)
        return found[0], found[1].view(sums)

    out, lse = over_path(plan, q, keys, values, part)
    return (out[..., :v_head_dim] if plan.width else out), lse


def cudnn_backward(plan: Plan, given: Given) -> Gradients:
    keys, values, scale, tokens = given.keys, given.values, given.options.scale, plan.tokens
    dout, q, keys, values, out = readable_backward(plan, given)
    lse = given.lse.contiguous().unsqueeze(3)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        keys, values = readable_range(plan, keys, values)
        if plan.packs and call.is_own:
            of_all = [t.transpose(1, 2) for t in (dout, q, keys, values, out)]
            of_own = attention_sequences.siblings_backward(plan.packs, lse.squeeze(3), scale, *of_all)
            return narrowed(plan, given, *of_own)
        dq, dk, dv = attend(
            dout, q, keys, values, out, lse, unused, unused, None, None, None, tokens, keys.shape[2], 0.0, call.is_own,
            scale=scale,
        )  # fmt: skip
        return narrowed(plan, given, dq, dk, dv)

    return over_ranges(plan, given, keys, values, part)


def readable_forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """q, keys and values; these two get their zeros range by range."""
    return (*readable(plan, q), keys, values) if plan.width else readable(plan, q, keys, values)


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
    v_head_dim, window, offset = values.shape[3], options.window, count_keys(plan, keys) - plan.tokens

    def attend(q: Tensor, keys: Tensor, values: Tensor, causal: bool, sides: _Sides) -> tuple[Tensor, Tensor]:
        found = torch.ops.aten._flash_attention_forward.default(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), None, None, q.shape[2], keys.shape[2], 0.0,
            causal, False, scale=options.scale, window_size_left=sides[0], window_size_right=sides[1],
        )  # fmt: skip
        return found[0].transpose(1, 2), found[1]

    def part(call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = readable_range(plan, keys, values)
        if plan.packs and call.is_own:
            return attention_sequences.siblings_forward(plan.packs, q, keys, values, options.scale)
        behind, sides = _flash_sides(call, offset, keys.shape[2], window)
        (queries,) = _rows_of(plan, call, q)
        return attend(queries, keys, values, behind == 0, sides)

    if plan.place is None:
        q, keys, values = readable(plan, q, keys, values)
        out, lse = attend(q, keys, values, True, (window - 1, 0) if window else (None, None))
    else:
        q, keys, values = readable_forward(plan, q, keys, values)
        out, lse = over_path(plan, q, keys, values, part)
    return (out[..., :v_head_dim] if plan.width else out), lse


_Sides = tuple[int | None, int | None]
"""A window's, as the flash ops take them: keys that a query sees to its left and right."""


def _flash_sides(call: Call, offset: int, num_keys: int, window: int) -> tuple[int, _Sides]:
    """How far the last query of a call is behind the last of its keys, and the window. offset: of the segment."""
    behind = offset + call.first + call.num_queries - (call.begin + num_keys)
    hides = window and behind + num_keys > window  # the first key from the last query
    return behind, (window - 1 - behind, behind) if hides else (None, None)


OwnPart = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Gradients]
"""dq, dk and dv from dout, q, keys, values and out, all of the segment, as flash takes them."""


def flash_backward(plan: Plan, given: Given, own: OwnPart | None = None) -> Gradients:
    """own: takes the place of the call over the segment's own keys."""
    dout, q, keys, values, out = readable_backward(plan, given)
    dout, q, out = dout.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2)
    lse, options, offset = given.lse.contiguous(), given.options, count_keys(plan, keys) - plan.tokens
    if plan.packs:
        own = functools.partial(attention_sequences.siblings_backward, plan.packs, lse, options.scale)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._flash_attention_backward.default

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        """Masked from the last query and key backwards, as the op does."""
        keys, values = readable_range(plan, keys, values)
        if own is not None and call.is_own:
            return narrowed(plan, given, *own(dout, q, keys.transpose(1, 2), values.transpose(1, 2), out))
        of_dout, of_q, of_out = _rows_of(plan, call, dout, q, out, dim=1)
        (of_lse,) = _rows_of(plan, call, lse)
        num_keys = keys.shape[2]
        behind, (left, right) = _flash_sides(call, offset, num_keys, options.window)
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

    def attend(q: Tensor, keys: Tensor, values: Tensor, mask: int) -> tuple[Tensor, Tensor]:
        outs, lses, kv_heads, tokens = [], [], keys.shape[1], q.shape[2]
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        for group in _groups(q, kv_heads):
            found = torch.ops.aten._efficient_attention_forward.default(
                group.transpose(1, 2), keys, values, None, None, None, None, None, 0.0, mask, True, scale=options.scale,
            )  # fmt: skip
            outs.append(found[0].transpose(1, 2))
            lses.append(found[1] if found[1].shape[2] == tokens else found[1].narrow(2, 0, tokens))
        return _ungroup(outs), _ungroup(lses)  # the op rounds the number of rows of lse up

    def part(call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        (queries,) = _rows_of(plan, call, q)
        return attend(queries, keys, values, _BOTTOM_RIGHT if call.is_own else 0)

    return attend(q, keys, values, _BOTTOM_RIGHT) if plan.place is None else over_path(plan, q, keys, values, part)


def efficient_backward(plan: Plan, given: Given) -> Gradients:
    dout, q, keys, values, out = readable_backward(plan, given)
    kv_heads, scale = keys.shape[1], given.options.scale
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    attend = torch.ops.aten._efficient_attention_backward.default

    def groups_of(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> list[tuple[Tensor, ...]]:
        padding = -lse.shape[2] % _LSE_ALIGNMENT
        lse = F.pad(lse, (0, padding), value=float("inf")) if padding else lse
        return [
            (of_dout.transpose(1, 2), of_q.transpose(1, 2), of_out.transpose(1, 2).contiguous(), of_lse.contiguous())
            for of_dout, of_q, of_out, of_lse in zip(*(_groups(t, kv_heads) for t in (dout, q, out, lse)), strict=True)
        ]

    of_all = dout, q, out, given.lse
    groups = groups_of(*of_all)

    def part(call: Call, keys: Tensor, values: Tensor) -> Gradients:
        num_keys, mask = keys.shape[2], _BOTTOM_RIGHT if call.is_own else 0
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        dqs, dk, dv = [], None, None
        is_all = call.num_queries == plan.tokens
        for of_dout, of_q, of_out, of_lse in groups if is_all else groups_of(*_rows_of(plan, call, *of_all)):
            part_dq, part_dk, part_dv, _ = attend(
                of_dout, of_q, keys, values, None, of_out, None, None, call.num_queries, num_keys, of_lse, 0.0, unused,
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
    kv_heads, offset = keys.shape[1], count_keys(plan, keys) - plan.tokens
    wide, of_keys, of_values = _wide(_by_kv_head(q, kv_heads)), pieces_of(plan, keys), pieces_of(plan, values)

    def logits_of(call: Call) -> Tensor:
        rows = slice(call.first, call.first + call.num_queries)
        part = _wide(of_keys[call.piece])
        return _logits(wide[:, :, :, rows], part, options, rows, offset + call.first, call.begin)[0]

    lse = wide.new_full(wide.shape[:4], float("-inf"))
    for call in plan.calls:
        sums = lse.narrow(3, call.first, call.num_queries)
        sums.copy_(torch.logaddexp(sums, logits_of(call).logsumexp(-1)))
    out = wide.new_zeros((*wide.shape[:4], values.shape[3]))
    for call in plan.calls:
        weights = torch.exp(logits_of(call) - lse.narrow(3, call.first, call.num_queries)[..., None])
        products = torch.einsum("bhgsk,bhkd->bhgsd", weights, _wide(of_values[call.piece]))
        out.narrow(3, call.first, call.num_queries).add_(products)
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_backward(plan: Plan, given: Given) -> Gradients:
    kv_heads, options = given.keys.shape[1], given.options
    offset = count_keys(plan, given.keys) - plan.tokens

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
