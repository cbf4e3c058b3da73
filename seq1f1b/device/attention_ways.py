"""Implementations of attention for cuda_attention.py, forward and backward, called ways.

:func:`forward` takes q, keys, values and the options, and returns out (batch, heads, tokens, head_dim of values) and
lse (batch, heads, tokens), both before sinks. :func:`backward` adds to the slabs dk and dv or stores there, and returns
dq and the own tokens' dk and dv. ``Options.place`` gives the rows of keys and values, up to the last query's token.

An op takes contiguous keys, and masks backwards from the last query and key or not at all. Attention of a segment is
therefore cut into calls over its own keys and calls over ranges of earlier keys. In a chain, the keys of a sequence lie
in the first rows of a slab. In a tree, the keys of a path lie in several ranges of rows (:class:`PathRows`), and each
sibling in a shared segment has its own keys.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import attention_parts, kernel_library, proofs

__all__: list[str] = []

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""

# -- calls: some queries over one range of keys ----------------------------------------------------------------------

MOST_REMEMBERED = 1024
"""Shapes for which calls are remembered: with documents of every length few come twice."""


class Call(NamedTuple):
    """Some of the queries over one range of keys."""

    begin: int  # the range's first key, counted along the path
    size: int  # keys of the range
    row: int  # the first key's row in the slabs
    first: int  # the first query, within the segment
    token: int  # its position along the path
    num_queries: int
    comes_first: bool  # whether no earlier call writes to this range of dk and dv
    is_own: bool  # whether the range ends with the queries' own keys, all of them


class PathRows(NamedTuple):
    """The rows of a path's keys, and the siblings in its last segment."""

    ranges: tuple[tuple[int, int, int], ...]  # begin and end of keys along the path, and the first key's row, in order
    parts: tuple[int, ...] = ()  # tokens of each sibling in a shared segment, in order; empty: no siblings
    kept: int = 0  # leading keys with gradients in dk and dv: a backward adds to their rows, and stores the other rows

    @property
    def end(self) -> int:
        return self.ranges[-1][1]

    @property
    def is_chain(self) -> bool:
        """Returns whether the keys lie in the first rows, and a backward adds to all of them or stores all."""
        return not self.parts and self.ranges == ((0, self.end, 0),) and self.kept in (0, self.end)

    def row(self, key: int) -> int:
        """Returns the row of a key in the last range."""
        begin, _, row = self.ranges[-1]
        return row + key - begin

    def rows_between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Returns contiguous pieces of the keys from ``begin`` to ``end``: first key, row and number of keys."""
        cut = [(max(begin, first), min(end, stop), first, row) for first, stop, row in self.ranges]
        return [(lo, row + lo - first, hi - lo) for lo, hi, first, row in cut if lo < hi]


def chain(num_keys: int, store: bool = False) -> PathRows:
    """Returns the place of a chain's keys. ``store``: dk and dv hold no values yet."""
    return PathRows(((0, num_keys, 0),), (), 0 if store else num_keys)


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def calls_of(way: str, place: PathRows, tokens: int, window: int, longest: int, is_backward: bool) -> tuple[Call, ...]:
    """Returns the calls of a segment's forward or backward; calls over own keys come first.

    The keys of a call lie in one range of rows, and its gradients are all added or all stored. In a forward by flash,
    keys right before the own keys join the call over own keys, unless siblings share the segment. cuDNN masks from the
    first key on and gets two calls. Each sibling in the segment has calls over its own keys.

    Args:
        longest: most keys of a call before the own keys; by the plain way, most keys of any call.
    """
    is_plain, offset = way == "plain", place.end - tokens
    start = max(0, offset - window + 1) if window else 0  # the first visible key
    joins = way == "flash" and not is_backward and not place.parts
    lead = offset - max(start, place.ranges[-1][0]) if joins else 0
    own: list[Call] = []
    before: list[Call] = []
    for lo, hi in ((start, min(place.kept, offset - lead)), (max(start, place.kept), offset - lead)):
        for key, row, size in place.rows_between(lo, hi):
            for begin, stop in _bounds(key, key + size, longest, way):
                at = begin, stop, row + begin - key
                before += _calls(at, (offset, place.end), offset, window, False, is_plain)
    for first, end in itertools.pairwise(itertools.accumulate(place.parts or (tokens,), initial=offset)):
        for begin, stop in _bounds(first, end, longest, way) if is_plain else ((first - lead, end),):
            at = begin, stop, place.row(begin)
            own += _calls(at, (first, end), offset, window, not is_plain, is_plain)
    return (*own, *before)


def _bounds(start: int, limit: int, longest: int, way: str) -> list[tuple[int, int]]:
    """Returns begins and ends of ranges of at most ``longest`` keys."""
    found = []
    for begin in range(start, limit, longest):
        stop = min(begin + longest, limit)
        # cuDNN's backward on Hopper returns NaN for 128 n + 64 keys (cudnn-frontend#628): two halves avoid this size.
        cuts = [(begin + stop) // 2] if way == "cudnn" and (stop - begin) % 128 == 64 else []
        found += list(itertools.pairwise([begin, *cuts, stop]))
    return found


def _calls(
    keys: tuple[int, int, int], queries: tuple[int, int], offset: int, window: int, is_own: bool, is_plain: bool
) -> list[Call]:
    """Returns one or two calls over a range of keys (begin, end and the first key's row), for a range of queries."""
    # With a window, torch's flash ops allow one more query than keys at most: with more queries, they hide keys of the
    # first queries, whatever the window's right side. Queries that see the whole range then get a call without window.
    (begin, stop, row), calls = keys, []
    size, first = stop - begin, max(begin, queries[0])
    last = min(queries[1], stop + window - 1) if window else queries[1]
    is_split = window and not is_plain and last - first > size + 1 and begin + window < last
    if is_split:
        calls.append(Call(begin, size, row, first - offset, first, begin + window - first, True, is_own))
        first = begin + window
    calls.append(Call(begin, size, row, first - offset, first, last - first, not is_split, is_own))
    return calls


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def how_to_add(calls: tuple[Call, ...], tokens: int, most_parts: int) -> str:
    """Returns how to add up the calls' parts of dq: "total" in one launch, "in place" in the first call's part, or
    "wide", one by one in float32."""
    if len(calls) <= most_parts and all(call.num_queries == tokens for call in calls):
        return "total"
    rows = sorted((call.first, call.first + call.num_queries) for call in calls[1:])
    is_one_each = all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    return "in place" if calls[0].is_own and calls[0].num_queries == tokens and is_one_each else "wide"


# -- what a way is given ---------------------------------------------------------------------------------------------

MOST_MERGED = 4
"""A forward merges this many results at most two by two. Each merge rounds: the error of three is that of attention by
matrix products in 16 bits, and it grows with the root of their number. More results are added up in float32."""


Spans = Sequence[Sequence[tuple[int, int, int]]]
"""The documents of a segment, by row of the batch: first key, first query and end of each, as tokens of the row."""


class Options(NamedTuple):
    """Options of attention; window 0, softcap 0 and empty tensors turn an option off."""

    key_docs: Tensor  # (batch, keys), int32
    slopes: Tensor  # (heads) or (batch, heads), float32
    docs: Tensor  # (batch, tokens) of the queries, int32
    sinks: Tensor  # (heads), float32 or float64 as the sums
    scale: float
    window: int
    softcap: float
    place: PathRows = chain(0)  # place of the keys
    longest: int = 0  # most keys of a call before the own keys: see calls_of
    spans: Spans = ()  # of the documents, for the way that takes each alone


class BackwardArguments(NamedTuple):
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


# -- layouts ---------------------------------------------------------------------------------------------------------


def aligned(t: Tensor) -> Tensor:
    """Returns the tensor in a layout for the ops: rows begin at multiples of 16 bytes. Copies only if necessary."""
    *strides, last = t.stride()
    unit = 16 // t.element_size()
    fits = all(stride % unit == 0 or size == 1 for stride, size in zip(strides, t.shape, strict=False))
    if last == 1 and fits and t.data_ptr() % 16 == 0:
        return t
    return t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors in a layout for the ops; narrower heads are padded with zeros to the widest head."""
    width = max(t.shape[3] for t in tensors)
    return [aligned(t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3]))) for t in tensors]


def _cut(t: Tensor, width: int) -> Tensor:
    return t if t.shape[3] == width else t[..., :width]  # without the zeros of of_one_size


def token_major(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the tensor in a dtype and in memory (batch, tokens, heads, head_dim). Copies only if necessary."""
    _, heads, tokens, head_dim = t.shape
    if t.dtype == dtype:
        if t.stride() == (tokens * heads * head_dim, head_dim, heads * head_dim, 1):
            return t
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    return t.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def _token_major_zeros(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, _ = like.shape
    return like.new_zeros((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """Returns (batch, heads, ...) as (batch, kv_heads, heads per kv_head, ...)."""
    return t.view(t.shape[0], kv_heads, t.shape[1] // kv_heads, *t.shape[2:])


def _rows_of(call: Call, *tensors: Tensor, dim: int = 2) -> tuple[Tensor, ...]:
    """Returns the rows of a call's queries."""
    if call.num_queries == tensors[0].shape[dim]:
        return tensors
    return tuple([t.narrow(dim, call.first, call.num_queries) for t in tensors])


def _keys_of(call: Call, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    if call.size == keys.shape[2]:
        return keys, values
    return keys.narrow(2, call.row, call.size), values.narrow(2, call.row, call.size)


# -- passes over calls -----------------------------------------------------------------------------------------------


def forward(way: str, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns out and lse of all queries, from the results of each call."""
    if way in WHOLE:
        return WHOLE[way].forward(q, keys, values, options)
    calls = calls_of(way, options.place, q.shape[2], options.window, options.longest, False)
    q, part = aligned(q), BY_CALL[way].forward
    if len(calls) <= MOST_MERGED and all(call.num_queries == q.shape[2] for call in calls):
        out, lse = part(calls[0], q, *_keys_of(calls[0], keys, values), options)
        for call in calls[1:]:
            out, lse = attention_parts.merge(out, lse, *part(call, q, *_keys_of(call, keys, values), options))
        return out, lse
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, out = q.new_full(q.shape[:3], float("-inf"), dtype=sums), _token_major_zeros(q, values.shape[3], sums)
    for call in calls:
        of_q, rows, lse_of_rows = *_rows_of(call, q), *_rows_of(call, out), *_rows_of(call, lse)
        of_call, lse_of_call = part(call, of_q, *_keys_of(call, keys, values), options)
        both = torch.logaddexp(lse_of_rows, lse_of_call)
        rows.mul_(torch.exp(lse_of_rows - _finite(both))[..., None])
        rows.add_(of_call * torch.exp(lse_of_call - _finite(both))[..., None])
        lse_of_rows.copy_(both)
    return out, lse


def _finite(lse: Tensor) -> Tensor:
    # Rows without a visible key have -inf; the least number replaces it, as the difference of two -inf is NaN.
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def backward(way: str, given: BackwardArguments) -> Gradients:
    """Returns dq and the own tokens' dk and dv, in q's dtype and token-major memory.

    Backwards of later segments are done, so the own tokens' rows of the slabs are complete. These rows are read here
    for the last time and not written, because earlier segments see none of them.
    """
    if way in WHOLE:
        return WHOLE[way].backward(given)
    place, dk, dv, tokens = given.options.place, given.dk, given.dv, given.q.shape[2]
    calls = calls_of(way, place, tokens, given.options.window, given.options.longest, True)
    how = how_to_add(calls, tokens, attention_parts.MOST_PARTS)
    q, dout, out = aligned(given.q), aligned(given.dout), aligned(given.out)
    for _, row, size in place.rows_between(place.kept, min(call.begin for call in calls)):
        dk.narrow(2, row, size).zero_()  # rows outside the window, without values yet
        dv.narrow(2, row, size).zero_()
    own: list[tuple[Tensor, Tensor]] = []
    parts: list[Tensor] = []
    dq = _token_major_zeros(q, q.shape[3], given.lse.dtype) if how == "wide" else None
    for call in calls:
        of_dout, of_q, of_out, lse = _rows_of(call, dout, q, out, given.lse)
        keys, values = _keys_of(call, given.keys, given.values)
        of_call = given._replace(dout=of_dout, q=of_q, keys=keys, values=values, out=of_out, lse=lse)
        part_q, part_k, part_v = BY_CALL[way].backward(call, of_call)
        store = call.begin >= place.kept
        if call.is_own:
            own.append(attention_parts.finish(dk, dv, part_k, part_v, store, call.row))
        else:
            attention_parts.add(dk, dv, part_k, part_v, store and call.comes_first, call.row)
        del part_k, part_v  # frees memory before the next call
        if how == "total":
            parts.append(part_q)
        elif dq is None:
            dq = part_q
        else:
            _rows_of(call, dq)[0].add_(part_q)
    if dq is None:
        dq = attention_parts.total(parts)
    if not own:
        row = place.row(place.end - tokens)
        own = [(dk.narrow(2, row, tokens), dv.narrow(2, row, tokens))]
    own_dk, own_dv = own[0] if len(own) == 1 else (torch.cat(each, 2) for each in zip(*own, strict=True))
    return token_major(dq, q.dtype), token_major(own_dk, q.dtype), token_major(own_dv, q.dtype)


# -- own -------------------------------------------------------------------------------------------------------------


def _launch_own(
    name: str, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, **of_backward: Any
) -> None:
    keys, values = aligned(keys), aligned(values)
    if keys.stride() != values.stride():
        keys, values = keys.contiguous(), values.contiguous()
    kernel_library.launch_attention(
        kernel_library.operations()[name], aligned(q), keys, values, out, lse, scale=options.scale,
        window=options.window, softcap=options.softcap, docs=options.key_docs, **of_backward,
    )  # fmt: skip


def own_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    out, lse = attention_parts.token_major_empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _launch_own("attention_forward", q, keys, values, out, lse, options)
    return out, lse


def own_backward(given: BackwardArguments) -> Gradients:
    own = (t[:, :, : given.q.shape[2]] for t in (given.q, given.keys, given.values))
    dq, own_dk, own_dv = map(attention_parts.token_major_empty, own)
    _launch_own(
        "attention_backward", given.q, given.keys, given.values, aligned(given.out), given.lse.contiguous(),
        given.options, dout=aligned(given.dout), dq=dq, dk=given.dk, dv=given.dv, own_dk=own_dk, own_dv=own_dv,
        store=not given.options.place.kept,
    )  # fmt: skip
    return dq, own_dk, own_dv


# -- cuDNN: its mask starts at the first query and key, so own keys and earlier keys need separate calls ---------------


def cudnn_forward(call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, aligned(keys), aligned(values), None, True, 0.0, call.is_own, False, scale=options.scale
    )
    return found[0], found[1].view(q.shape[:3])


def cudnn_backward(call: Call, of: BackwardArguments) -> Gradients:
    unused = torch.empty((), dtype=torch.int64, device=of.q.device)  # state of dropout
    found: Gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        of.dout, of.q, aligned(of.keys), aligned(of.values), of.out, of.lse.contiguous().unsqueeze(3), unused, unused,
        None, None, None, call.num_queries, call.size, 0.0, call.is_own, scale=of.options.scale,
    )  # fmt: skip
    return found


# -- flash -----------------------------------------------------------------------------------------------------------


def flash_forward(call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    is_causal, left, right = _mask_of(call, options)
    found = torch.ops.aten._flash_attention_forward.default(
        *[t.transpose(1, 2) for t in of_one_size(q, keys, values)], None, None, call.num_queries, call.size, 0.0,
        is_causal, False, scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return _cut(found[0].transpose(1, 2), values.shape[3]), found[1]


def _mask_of(call: Call, options: Options) -> tuple[bool, int | None, int | None]:
    """Returns the flash ops' arguments for the mask of a call: whether it is causal, and the window's left and right.
    The ops mask backwards from the last query and key."""
    behind = call.token + call.num_queries - (call.begin + call.size)  # tokens from last key to last query
    hides = options.window and behind + call.size > options.window  # the last query does not see the first key
    return (behind == 0, options.window - 1 - behind, behind) if hides else (behind == 0, None, None)


def flash_backward(call: Call, of: BackwardArguments) -> Gradients:
    is_causal, left, right = _mask_of(call, of.options)
    dout, q, keys, values, out = (t.transpose(1, 2) for t in of_one_size(of.dout, of.q, of.keys, of.values, of.out))
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of dropout
    found = torch.ops.aten._flash_attention_backward.default(
        dout, q, keys, values, out, of.lse.contiguous(), None, None, call.num_queries, call.size, 0.0, is_causal,
        unused, unused, scale=of.options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    dq, dk, dv = (t.transpose(1, 2) for t in found)
    return _cut(dq, of.q.shape[3]), _cut(dk, of.q.shape[3]), _cut(dv, of.values.shape[3])


# -- documents: flash over each document of each row, as over the last segment of a sequence of its own ----------------

_last: tuple[Any, Tensor, Spans | None] | None = None
"""Ids that :func:`spans_of` read last: memory, version and keys; the ids, so that nothing else gets their
memory; their documents."""


def spans_of(docs: Tensor, key_docs: Tensor) -> Spans | None:
    """Returns the documents of a segment; None if a document is in pieces, or a CUDA graph is being captured.

    The host waits for the device, once in a unit for all layers and their backwards that have the same ids. Outside of
    a unit each call waits: ids may change there, and tensors made by compiled code have no version to show a change.

    Args:
        docs: (batch, tokens), ids of the segment. key_docs: (batch, keys), ids up to the segment's end.
    """
    global _last
    if proofs.is_capturing():
        return None
    if docs.is_inference() or _C.unit_tokens() is None:
        return _read_spans(key_docs, docs.shape[1])
    key = docs.data_ptr(), docs.shape, docs.stride(), docs._version, key_docs.shape[1]
    last = _last
    if last is None or last[0] != key:
        last = _last = key, docs, _read_spans(key_docs, docs.shape[1])
    return last[2]


def _read_spans(key_docs: Tensor, tokens: int) -> Spans | None:
    begins = torch.ones(key_docs.shape, dtype=torch.bool, device=key_docs.device)
    torch.ne(key_docs[:, 1:], key_docs[:, :-1], out=begins[:, 1:])
    row, start = begins.nonzero().unbind(1)
    runs: list[list[tuple[int, int]]] = [[] for _ in key_docs]
    for of_row, *run in torch.stack([row, start, key_docs[row, start]], 1).tolist():
        runs[of_row].append((run[0], run[1]))
    if any(len({name for _, name in of_row}) < len(of_row) for of_row in runs):
        return None
    offset, spans = key_docs.shape[1] - tokens, list[list[tuple[int, int, int]]]()
    for of_row in runs:
        ends = [*(start for start, _ in of_row[1:]), key_docs.shape[1]]
        cut = zip(of_row, ends, strict=True)
        spans.append([(start, max(start, offset), end) for (start, _), end in cut if end > offset])
    return spans


def documents_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    offset, outs, sums = options.place.end - q.shape[2], [], []
    for row, of_row in enumerate(options.spans):
        own, every = q[row : row + 1], (keys[row : row + 1], values[row : row + 1])
        found = []
        for start, begin, end in of_row:
            of_keys, of_values = (t[:, :, start:end] for t in every)
            of_span = options._replace(place=chain(end - start))
            found.append(forward("flash", own[:, :, begin - offset : end - offset], of_keys, of_values, of_span))
        outs.append(torch.cat([out for out, _ in found], 2))
        sums.append(torch.cat([lse for _, lse in found], 2))
    return torch.cat(outs), torch.cat(sums)


def documents_backward(given: BackwardArguments) -> Gradients:
    options, place = given.options, given.options.place
    offset, rows = place.end - given.q.shape[2], list[list[Tensor]]()
    for row, of_row in enumerate(options.spans):
        parts: list[Gradients] = []
        for start, begin, end in of_row:
            tokens, size = slice(begin - offset, end - offset), end - start
            dout, q, out, lse = (t[row : row + 1, :, tokens] for t in (given.dout, given.q, given.out, given.lse))
            keys, values, dk, dv = (
                t[row : row + 1, :, start:end] for t in (given.keys, given.values, given.dk, given.dv)
            )
            kept = min(max(place.kept - start, 0), size)
            of_span = options._replace(place=PathRows(((0, size, 0),), (), kept))
            parts.append(backward("flash", BackwardArguments(dout, q, keys, values, out, lse, of_span, dk, dv)))
        if place.kept < of_row[0][0]:  # keys of earlier documents, without values yet
            given.dk[row, :, place.kept : of_row[0][0]].zero_()
            given.dv[row, :, place.kept : of_row[0][0]].zero_()
        rows.append([torch.cat(each, 2) for each in zip(*parts, strict=True)])
    dq, own_dk, own_dv = (token_major(torch.cat(each), given.q.dtype) for each in zip(*rows, strict=True))
    return dq, own_dk, own_dv


# -- plain: (batch, kv_heads, group, tokens, ...) throughout, in float32 or float64 ----------------------------------


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)


def _logits(q: Tensor, keys: Tensor, options: Options, call: Call) -> tuple[Tensor, Tensor | None]:
    """Returns the logits of a call, with -inf for hidden keys, and the soft cap's derivative; None without a cap."""
    batch, kv_heads, _, tokens, _ = q.shape
    logits = torch.einsum("bhgsd,bhkd->bhgsk", q, keys) * options.scale
    slope = None
    if options.softcap:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = options.softcap * capped, 1 - capped.square()
    position = torch.arange(call.token, call.token + tokens, device=q.device)
    distance = position[:, None] - torch.arange(call.begin, call.begin + call.size, device=q.device)[None, :]
    if options.slopes.numel():
        slopes = _by_kv_head(options.slopes.expand(batch, -1), kv_heads).to(logits.dtype)
        logits = logits - slopes[..., None, None] * distance
    hidden = distance < 0
    if options.window:
        hidden = hidden | (distance >= options.window)
    if options.docs.numel():
        (docs,) = _rows_of(call, options.docs, dim=1)
        other = docs[:, :, None] != options.key_docs[:, None, call.begin : call.begin + call.size]
        hidden = hidden | other[:, None, None]
    return logits.masked_fill(hidden, float("-inf")), slope


def plain_forward(call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    logits, _ = _logits(_wide(_by_kv_head(q, keys.shape[1])), _wide(keys), options, call)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - _finite(lse)[..., None])
    out = torch.einsum("bhgsk,bhkd->bhgsd", weights, _wide(values))
    return out.flatten(1, 2), lse.flatten(1, 2)


def plain_backward(call: Call, of: BackwardArguments) -> Gradients:
    dout, q, out, lse = (_wide(_by_kv_head(t, of.keys.shape[1])) for t in (of.dout, of.q, of.out, of.lse))
    keys, values = _wide(of.keys), _wide(of.values)
    logits, slope = _logits(q, keys, of.options, call)
    weights = torch.exp(logits - lse[..., None])
    dv = torch.einsum("bhgsk,bhgsd->bhkd", weights, dout)
    delta = (dout * out).sum(-1, keepdim=True)
    dlogits = weights * (torch.einsum("bhgsd,bhkd->bhgsk", dout, values) - delta) * of.options.scale
    if slope is not None:
        dlogits = dlogits * slope
    dq = torch.einsum("bhgsk,bhkd->bhgsd", dlogits, keys)
    dk = torch.einsum("bhgsk,bhgsd->bhkd", dlogits, q)
    return dq.flatten(1, 2), dk, dv


class Way(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


WHOLE = {"own": Way(own_forward, own_backward), "documents": Way(documents_forward, documents_backward)}
"""Ways that take all keys at once."""

BY_CALL = {
    "cudnn": Way(cudnn_forward, cudnn_backward),
    "flash": Way(flash_forward, flash_backward),
    "plain": Way(plain_forward, plain_backward),
}
"""Ways of one call, which are given the rows of its queries and of its keys alone."""
