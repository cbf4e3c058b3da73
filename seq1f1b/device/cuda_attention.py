"""Attention of CUDA tensors over the slabs of the KV cache, without a copy of the prefix.

The CUDA kernels of this package's ops; those of the CPU are C. Five ways, by what the call needs:

    own        bfloat16 and float16, head_dim 64 or 128, no ALiBi: this package's kernels, where they are known to be
               right, and faster than what else there is (kernel_library.py)
    cudnn      as flash, without a window, on Hopper and newer: cuDNN's, for shapes that come often enough to pay for
               its plan of one
    flash      bfloat16 and float16, head_dim a multiple of 8, Ampere or newer: ``aten::_flash_attention_*``
    efficient  float32 without a window, head_dim a multiple of 4: ``aten::_efficient_attention_*``
    plain      everything else (float64, soft cap, ALiBi, documents, other heads): matrix products over ranges of keys,
               up to 200 times slower, in bounded memory

Heads of v may have another size than those of q and k. The efficient and plain ways take them as they are; for flash
and cuDNN the narrower ones get zeros up to the size of the wider; own does not take them.

Backward goes over ranges of keys: exact, since the sums over all keys (``lse``) and ``out`` are known, and what the ops
allocate stays of the size of a range. dK and dV add up in float32 in the cache's slab; torch's ops round each range's
part to q's dtype before. Ours take all keys at once, for they add to the slab themselves. Sinks are no business of a
way: out and lse get them at the end of a forward, and a backward that takes these two needs nothing else.

benchmarks/gpu.py holds all of it to float64 on a GPU; an H200 has run it (benchmarks/results/gpu-h200.txt). The tests
run it on the CPU, with stand-ins for the aten ops that torch's dispatcher holds to their schemas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import kernel_library

__all__: list[str] = []

KEY_RANGE = 8192
"""Most keys before the segment that one call of a backward op takes."""

PLAIN_LOGITS = 1 << 26
"""Most logits that the plain way holds at once; it keeps a few tensors of that size."""

PLAN_FLOPS = 4e13
"""Operations that flash computes of a shape before cuDNN makes a plan for it. On an H200 a plan takes 40 to 90 ms, and
cuDNN then saves 1.3 ms in 1e12 operations: a shape that never comes again has cost no more than twice the best choice.
"""

MOST_SHAPES = 1024
"""Shapes that are remembered, and so most plans: with documents of every length few come twice."""

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


# -- the ops, with the arguments of csrc/torch/op_table.h: tensors, then the options from slopes on -------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, Options(options[1], *options))


def causal_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv = (t.new_empty(t.transpose(1, 2).shape, dtype=lse.dtype).transpose(1, 2) for t in (k, v))
    return _backward(dout, q, k, v, out, lse, Options(options[1], *options), dk, dv, store=True)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    keys, values, key_docs = torch.ops.seq1f1b.cache_write.default(k, v, options[1], layer)
    return _forward(q, keys, values, Options(key_docs, *options))


def segment_attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, layer: Tensor, *options_and_heads: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, kv_heads = options_and_heads
    keys, values, dk, dv, key_docs, held = torch.ops.seq1f1b.cache_read.default(q, out, layer, kv_heads)
    chosen = Options(key_docs, *options)
    return _backward(dout, q, keys, values, out, lse, chosen, dk, dv, store=held.numel() == 0)


def positions(x: Tensor, doc_ids: Tensor, dim: int, rank: int, num_parts: int) -> Tensor:
    unit = _C.current_unit()
    length = x.shape[dim]
    first = rank * length
    if unit is not None:
        if length * num_parts != unit.length:
            raise ValueError(
                f"positions of dimension {dim}, which has {length} elements; the segment has {unit.length} tokens "
                f"(parts: {num_parts})"
            )
        first += unit.offset
    position = torch.arange(first, first + length, device=x.device)
    if not doc_ids.numel():
        return position
    if doc_ids.dim() != 2 or doc_ids.shape[1] != length:
        raise ValueError(
            f"doc_ids is {tuple(doc_ids.shape)}, must be (batch, tokens), tokens as many as x has: {length}"
        )
    goes_on = torch.cat([(doc_ids[:, :1] >= 0) & (doc_ids[:, :1] < first), doc_ids[:, 1:] == doc_ids[:, :-1]], 1)
    # Asserted on the device: to read the answer here would wait for all that runs there.
    torch._assert_async(
        ((doc_ids == position) | goes_on).all(),
        "doc_ids must be positions of documents' first tokens: seq1f1b.document_starts makes such ids of a whole row's",
    )
    return position - doc_ids


KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        causal_attention,
        causal_attention_backward,
        segment_attention,
        segment_attention_backward,
        positions,
    )
}


def register(library: torch.library.Library, dispatch_key: str = "CUDA", **options: Any) -> None:
    """Makes these the kernels of the package's ops for a dispatch key, for as long as ``library`` lives."""
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]


# -- which way, and over which keys ----------------------------------------------------------------------------------


def way(q: Tensor, v_head_dim: int, options: Options, operation: str = "attention_forward") -> str:
    """ "own", "flash" (or cuDNN, see ``PLAN_FLOPS``), "efficient" or "plain"; see the top of this file."""
    return "own" if _own(q, v_head_dim, options, operation) is not None else _library_way(q, v_head_dim, options)


def _library_way(q: Tensor, v_head_dim: int, options: Options) -> str:
    if options.softcap or options.slopes.numel() or options.docs.numel() or q.dtype == torch.float64:
        return "plain"
    if q.dtype == torch.float32:
        fits = q.shape[3] % 4 == 0 and v_head_dim % 4 == 0
        return "efficient" if fits and not options.window and not torch.version.hip else "plain"
    return "flash" if max(q.shape[3], v_head_dim) % 8 == 0 and _has_flash(q.device) else "plain"


def _own(q: Tensor, v_head_dim: int, options: Options, operation: str) -> kernel_library.Operation | None:
    if q.dtype not in (torch.bfloat16, torch.float16) or options.slopes.numel() or options.scale <= 0:
        return None
    if q.shape[3] != v_head_dim or not _has_flash(q.device):
        return None
    library = _library_way(q, v_head_dim, options)
    if library == "flash" and not options.window and _has_cudnn(q.device) and kernel_library.preference() != "own":
        return None
    return kernel_library.choose(operation, q, is_right_enough=library == "plain")


def _has_flash(device: torch.device) -> bool:
    if torch.version.hip:  # other kernels behind the same ops
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention is worth a plan. Its backward adds dQ up in any order, and cannot be told not to."""
    if device.type != "cuda" or torch.version.hip or torch.are_deterministic_algorithms_enabled():
        return False
    is_enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return is_enabled and torch.cuda.get_device_capability(device) >= (9, 0)


class _Shapes(threading.local):
    """Operations that flash computed of each shape, or whether cuDNN takes it; a thread has its own, as of plans."""

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, ...], float | bool] = {}


_shapes = _Shapes()

Calls = Sequence[tuple[Tensor, bool]]
"""Keys of calls of cuDNN's, and whether each is causal, from the first query and key on."""


def _cudnn_takes(q: Tensor, calls: Calls, options: Options, num_products: int) -> bool:
    """num_products: matrix products of the pass that asks: 2 forward, 5 backward."""
    if options.window or not _has_cudnn(q.device):
        return False
    layouts = [(keys.shape, keys.stride(), is_causal) for keys, is_causal in calls]
    seen, shape = _shapes.seen, (num_products, q.dtype, q.shape, q.stride(), *layouts)
    found = seen.get(shape, 0.0)
    if isinstance(found, bool):
        return found
    if len(seen) >= MOST_SHAPES:
        for other in [other for other, of_other in seen.items() if not isinstance(of_other, bool)]:
            del seen[other]
    if len(seen) >= MOST_SHAPES:
        return False
    if found < PLAN_FLOPS * len(calls):
        pairs = sum(keys.shape[2] / (2 if is_causal else 1) for keys, is_causal in calls)
        seen[shape] = found + num_products * 2 * q.numel() * pairs
        return False
    fits = seen[shape] = all(_cudnn_fits(q, keys, is_causal) for keys, is_causal in calls)
    return fits


def _cudnn_fits(q: Tensor, keys: Tensor, is_causal: bool) -> bool:
    """Whether torch hands such a call to cuDNN."""
    params = torch.backends.cuda.SDPAParams(q, keys, keys, None, 0.0, is_causal, q.shape[1] != keys.shape[1])
    return min(q.shape[2], keys.shape[2]) > 1 and torch.backends.cuda.can_use_cudnn_attention(params)


def _forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, tokens, head_dim of values), token-major in memory, and lse (batch, heads, tokens).

    keys, values: (batch, kv_heads, N, their head_dim); the last query is token N - 1.
    """
    operation = _own(q, values.shape[3], options, "attention_forward")
    if operation is not None:
        return _with_sinks(*_own_forward(operation, q, keys, values, options), options.sinks, q.dtype)
    forwards = {"flash": _flash_forward, "efficient": _efficient_forward, "plain": _plain_forward}
    out, lse = forwards[_library_way(q, values.shape[3], options)](q, keys, values, options)
    return _with_sinks(out, lse, options.sinks, q.dtype)


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both as if each row had seen a key of the sink's logit and of value 0."""
    if sinks.numel():
        out = out * torch.sigmoid(lse - sinks[:, None])[..., None]
        lse = torch.logaddexp(lse, sinks[:, None])
    return _token_major(out, dtype), lse.contiguous()


def _sink_gradients(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    if not sinks.numel():
        return lse.new_empty(0)
    delta = (dout.to(lse.dtype) * out).sum(-1)
    return -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2))


def _backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, dk: Tensor,
    dv: Tensor, store: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Adds to dk and dv, as keys and values in float32 or float64, or stores; returns dq, and dk and dv of
    the queries' own tokens in q's dtype: later segments went backward before, so these rows are complete. All
    token-major in memory. Last the gradients of the sinks.
    """
    dsinks = _sink_gradients(dout, out, lse, options.sinks)
    operation = _own(q, values.shape[3], options, "attention_backward")
    if operation is not None:
        return *_own_backward(operation, dout, q, keys, values, out, lse, options, dk, dv, store), dsinks
    dq = _library_backward(dout, q, keys, values, out, lse, options, dk, dv, store)
    own = slice(keys.shape[2] - q.shape[2], None)
    return dq, _token_major(dk[:, :, own], q.dtype), _token_major(dv[:, :, own], q.dtype), dsinks


def _library_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, dk: Tensor,
    dv: Tensor, store: bool,
) -> Tensor:  # fmt: skip
    chosen = _library_way(q, values.shape[3], options)
    backwards = {"flash": _flash_backward, "efficient": _efficient_backward, "plain": _plain_backward}
    tokens, end = q.shape[2], keys.shape[2]
    offset = end - tokens
    parts = list(_ranges(offset, end, options.window, _plain_range(q) if chosen == "plain" else None))
    dq = _token_major_zeros(q, lse.dtype) if len(parts) > 1 else None
    written = 0  # keys before this one have their sums
    for begin, stop, rows in parts:
        part_q, part_k, part_v = backwards[chosen](
            dout[:, :, rows], q[:, :, rows], keys[:, :, begin:stop], values[:, :, begin:stop], out[:, :, rows],
            lse[:, :, rows], _of_range(options, rows, slice(begin, stop)), offset + rows.start, begin,
        )  # fmt: skip
        for total, part in ((dk, part_k), (dv, part_v)):
            if store and begin >= written:
                total[:, :, written:begin] = 0.0  # hidden by the window
                total[:, :, begin:stop] = part
            else:
                total[:, :, begin:stop] += part
        written = stop
        if dq is None:
            return _token_major(part_q, q.dtype)
        dq[:, :, rows] += part_q
    assert dq is not None
    return dq.to(q.dtype)


def _ranges(offset: int, end: int, window: int, plain: int | None) -> Iterator[tuple[int, int, slice]]:
    """Ranges [begin, stop) of keys that a segment of tokens [offset, end) sees, and the rows of it that do.

    The ops mask from the last query and key backwards. So the segment's own keys are one range, and where a window
    hides a range before them from the last rows, these are left out. Under a window torch's flash ops take no more
    queries than keys, and one (they hide keys of the first ones else, whatever the window's right side): rows that
    see a whole range, and so need no window, are a part of their own where there are more. The plain way, which takes
    ranges of ``plain`` keys, masks by positions.
    """
    start = max(0, offset - window + 1) if window else 0
    longest, limit = (plain, end) if plain else (KEY_RANGE, offset)
    bounds = [(begin, min(begin + longest, limit)) for begin in range(start, limit, longest)]
    for begin, stop in bounds if plain else [*bounds, (offset, end)]:
        first = max(begin, offset) if plain else offset
        last = min(end, stop + window - 1) if window else end
        if window and not plain and last - first > stop - begin + 1 and begin + window < last:
            yield begin, stop, slice(first - offset, begin + window - offset)
            first = begin + window
        yield begin, stop, slice(first - offset, last - offset)


def _of_range(options: Options, rows: slice, keys: slice) -> Options:
    if not options.docs.numel():
        return options
    return options._replace(docs=options.docs[:, rows], key_docs=options.key_docs[:, keys])


def _plain_range(q: Tensor) -> int:
    batch, heads, tokens, _ = q.shape
    return max(16, PLAIN_LOGITS // (batch * heads * tokens))


# -- layouts ---------------------------------------------------------------------------------------------------------


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """(batch, heads, ...) as (batch, kv_heads, heads that share one, ...)."""
    return t.view(t.shape[0], kv_heads, t.shape[1] // kv_heads, *t.shape[2:])


def _token_major_zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head_dim = like.shape
    return like.new_zeros((batch, tokens, heads, head_dim), dtype=dtype).transpose(1, 2)


def _token_major(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype, laid out in memory as (batch, tokens, heads, head_dim): what the ops promise."""
    return t.transpose(1, 2).to(dtype).contiguous().transpose(1, 2)


def _bshd(t: Tensor) -> Tensor:
    """(batch, tokens, heads, head_dim), a view where the ops can read it: 16-byte rows, which they take for granted."""
    t = t.transpose(1, 2)
    unit = 16 // t.element_size()
    strides_fit = t.stride(3) == 1 and all(t.stride(d) % unit == 0 or t.shape[d] == 1 for d in range(3))
    if strides_fit and t.data_ptr() % 16 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def _of_one_size(*tensors: Tensor) -> list[Tensor]:
    """With zeros behind the heads that are narrower than others."""
    width = max(t.shape[3] for t in tensors)
    return [t if t.shape[3] == width else F.pad(t, (0, width - t.shape[3])) for t in tensors]


# -- own -------------------------------------------------------------------------------------------------------------


def _aligned(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, tokens, head_dim), rows at multiples of 16 bytes."""
    return [_bshd(t).transpose(1, 2) for t in tensors]


def _aligned_pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The two with equal strides."""
    first, second = _aligned(first, second)
    if first.stride() == second.stride():
        return first, second
    return first.contiguous(), second.contiguous()


def _own_forward(
    operation: kernel_library.Operation, q: Tensor, keys: Tensor, values: Tensor, options: Options, kernel: int = -1
) -> tuple[Tensor, Tensor]:
    (q,), (keys, values) = _aligned(q), _aligned_pair(keys, values)
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    kernel_library.launch_attention(
        operation, q, keys, values, out, lse, scale=options.scale, window=options.window, softcap=options.softcap,
        docs=options.key_docs, kernel=kernel,
    )  # fmt: skip
    return out, lse


def _own_backward(
    operation: kernel_library.Operation, dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor,
    lse: Tensor, options: Options, dk: Tensor, dv: Tensor, store: bool = False, kernel: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (dout, q, out), (keys, values) = _aligned(dout, q, out), _aligned_pair(keys, values)
    batch, heads, tokens, head_dim = q.shape
    dq, own_dk, own_dv = (
        q.new_empty((batch, tokens, of_heads, head_dim)).transpose(1, 2) for of_heads in (heads, *[keys.shape[1]] * 2)
    )
    kernel_library.launch_attention(
        operation, q, keys, values, out, lse.contiguous(), scale=options.scale, window=options.window,
        softcap=options.softcap, docs=options.key_docs, dout=dout, dq=dq, dk=dk, dv=dv, own_dk=own_dk, own_dv=own_dv,
        store=store, kernel=kernel,
    )  # fmt: skip
    return dq, own_dk, own_dv


# -- flash -----------------------------------------------------------------------------------------------------------


def _flash_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    v_head_dim = values.shape[3]
    q, keys, values = _of_one_size(q, keys, values)
    out, lse = _flash_forward_of_one_size(q, keys, values, options)
    return out[..., :v_head_dim], lse


def _flash_forward_of_one_size(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    offset = keys.shape[2] - q.shape[2]
    calls = [(keys[:, :, offset:], True), (keys[:, :, :offset], False)]
    if _cudnn_takes(q, calls[: 2 if offset else 1], options, 2):
        return _cudnn_forward(q, keys, values, options)
    left, right = (options.window - 1, 0) if options.window else (None, None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward.default(
        _bshd(q), _bshd(keys), _bshd(values), None, None, q.shape[2], keys.shape[2], 0.0, True, False,
        scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out.transpose(1, 2), lse


def _flash_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, query: int,
    key: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv of queries that begin at token ``query`` over keys that begin at token ``key``."""
    head_dim, v_head_dim = q.shape[3], values.shape[3]
    dout, q, keys, values, out = _of_one_size(dout, q, keys, values, out)
    dq, dk, dv = _flash_backward_of_one_size(dout, q, keys, values, out, lse, options, query, key)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_head_dim]


def _flash_backward_of_one_size(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, query: int,
    key: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    behind = (query + q.shape[2]) - (key + keys.shape[2])  # tokens from the last key to the last query
    if _cudnn_takes(q, [(keys, behind == 0)], options, 5):
        return _cudnn_backward(dout, q, keys, values, out, lse, options, behind == 0)
    hides = options.window and behind + keys.shape[2] > options.window  # the first key from the last query
    left, right = (options.window - 1 - behind, behind) if hides else (None, None)
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward.default(
        _bshd(dout), _bshd(q), _bshd(keys), _bshd(values), _bshd(out), lse.contiguous(), None, None, q.shape[2],
        keys.shape[2], 0.0, behind == 0, unused, unused,
        scale=options.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# -- cuDNN: it masks from the first query and key on, so a segment's own keys and those before are a call each ---------


def _cudnn_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    (q,), (keys, values) = _aligned(q), _aligned(keys, values)

    def attend(part: slice, is_causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, keys[:, :, part], values[:, :, part], None, True, 0.0, is_causal, False, scale=options.scale
        )
        return out, lse.view(q.shape[:3])

    offset = keys.shape[2] - q.shape[2]
    out, lse = attend(slice(offset, None), True)
    if not offset:
        return out, lse
    before, of_before = attend(slice(0, offset), False)
    share = torch.sigmoid(lse - of_before)[..., None]  # of the own keys
    return (out * share).addcmul_(before, 1.0 - share), torch.logaddexp(lse, of_before)


def _cudnn_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, keys, values, out = _aligned(dout, q, keys, values, out)
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        dout, q, keys, values, out, lse.contiguous()[..., None], unused, unused, None, None, None, q.shape[2],
        keys.shape[2], 0.0, is_causal, scale=options.scale,
    )  # fmt: skip
    return dq, dk, dv


# -- memory-efficient: as many heads of keys as of queries, so one call per query head of a group --------------------


def _groups(q: Tensor, keys: Tensor) -> list[Tensor]:
    """Query heads that read different kv heads: for each of a group, (batch, kv_heads, tokens, ...)."""
    return list(_by_kv_head(q, keys.shape[1]).unbind(2))


def _ungroup(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, 2).flatten(1, 2)


def _efficient_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for group in _groups(q, keys):
        out, lse, *_ = torch.ops.aten._efficient_attention_forward.default(
            _bshd(group), _bshd(keys), _bshd(values), None, None, None, None, None, 0.0, _BOTTOM_RIGHT, True,
            scale=options.scale,
        )  # fmt: skip
        outs.append(out.transpose(1, 2))
        lses.append(lse[:, :, : q.shape[2]])  # the op rounds the number of rows up
    return _ungroup(outs), _ungroup(lses)


def _efficient_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, query: int,
    key: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens = q.shape[2]
    mask = _BOTTOM_RIGHT if query + tokens == key + keys.shape[2] else 0
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    padded = F.pad(lse, (0, -tokens % _LSE_ALIGNMENT), value=float("inf"))
    dqs, dk, dv = [], None, None
    for group in zip(*(_groups(t, keys) for t in (dout, q, out, padded)), strict=True):
        part_dout, part_q, part_out, part_lse = group
        part_dq, part_dk, part_dv, _ = torch.ops.aten._efficient_attention_backward.default(
            _bshd(part_dout), _bshd(part_q), _bshd(keys), _bshd(values), None, _bshd(part_out).contiguous(), None,
            None, tokens, keys.shape[2], part_lse.contiguous(), 0.0, unused, unused, mask, False, scale=options.scale,
        )  # fmt: skip
        dqs.append(part_dq.transpose(1, 2))
        dk = part_dk if dk is None else dk + part_dk
        dv = part_dv if dv is None else dv + part_dv
    assert dk is not None and dv is not None
    return _ungroup(dqs), dk.transpose(1, 2), dv.transpose(1, 2)


# -- plain: (batch, kv_heads, group, tokens, ...) throughout, in float32 or float64 ----------------------------------


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)


def _logits(q: Tensor, keys: Tensor, options: Options, query: int, key: int) -> tuple[Tensor, Tensor | None]:
    """Logits, -inf where hidden, and what the soft cap leaves of the products' gradients."""
    batch, kv_heads, _, tokens, _ = q.shape
    logits = torch.einsum("bhgsd,bhkd->bhgsk", q, keys) * options.scale
    slope = None
    if options.softcap:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = options.softcap * capped, 1 - capped.square()
    position = torch.arange(query, query + tokens, device=q.device)
    distance = position[:, None] - torch.arange(key, key + keys.shape[2], device=q.device)[None, :]
    if options.slopes.numel():
        slopes = _by_kv_head(options.slopes.expand(batch, -1), kv_heads).to(logits.dtype)
        logits = logits - slopes[..., None, None] * distance
    hidden = distance < 0
    if options.window:
        hidden = hidden | (distance >= options.window)
    if options.docs.numel():
        other = options.docs[:, :, None] != options.key_docs[:, None, :]
        hidden = hidden | other[:, None, None]
    return logits.masked_fill(hidden, float("-inf")), slope


def _plain_forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Over ranges of keys twice: first the sums, then the products with what they make of the logits."""
    kv_heads, end = keys.shape[1], keys.shape[2]
    query, wide = end - q.shape[2], _wide(_by_kv_head(q, kv_heads))
    ranges = [(begin, min(begin + _plain_range(q), end)) for begin in range(0, end, _plain_range(q))]

    def logits_of(begin: int, stop: int) -> Tensor:
        part = _of_range(options, slice(None), slice(begin, stop))
        return _logits(wide, _wide(keys[:, :, begin:stop]), part, query, begin)[0]

    lse = wide.new_full(wide.shape[:4], float("-inf"))
    for begin, stop in ranges:
        lse = torch.logaddexp(lse, logits_of(begin, stop).logsumexp(-1))
    out = wide.new_zeros((*wide.shape[:4], values.shape[3]))
    for begin, stop in ranges:
        weights = torch.exp(logits_of(begin, stop) - lse[..., None])
        out += torch.einsum("bhgsk,bhkd->bhgsd", weights, _wide(values[:, :, begin:stop]))
    return out.flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, query: int,
    key: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    kv_heads = keys.shape[1]
    dout, q, out = (_wide(_by_kv_head(t, kv_heads)) for t in (dout, q, out))
    keys, values = _wide(keys), _wide(values)
    logits, slope = _logits(q, keys, options, query, key)
    weights = torch.exp(logits - _by_kv_head(lse, kv_heads)[..., None])
    dv = torch.einsum("bhgsk,bhgsd->bhkd", weights, dout)
    delta = (dout * out).sum(-1, keepdim=True)
    dlogits = weights * (torch.einsum("bhgsd,bhkd->bhgsk", dout, values) - delta) * options.scale
    if slope is not None:
        dlogits = dlogits * slope
    dq = torch.einsum("bhgsk,bhkd->bhgsd", dlogits, keys)
    dk = torch.einsum("bhgsk,bhgsd->bhkd", dlogits, q)
    return dq.flatten(1, 2), dk, dv
