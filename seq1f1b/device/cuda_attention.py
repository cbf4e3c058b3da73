"""Attention of CUDA tensors over the slabs of the KV cache, without a copy of the prefix.

These functions implement this package's ops for CUDA; the CPU has C code. :func:`way` chooses a way of
attention_ways.py, as the table in docs/ideas/attention.md says. Our kernels are checked on the device before their
first use in each dtype and head size (proofs.py); after a failure the next way is used. No GPU has run the way
"documents", or trees, yet.

Heads of v may differ in size from heads of q and k. The plain way takes all sizes, and cuDNN the sizes that it reports
(including 192 and 128 of latent attention, not yet run on a GPU). Flash pads the narrower heads with zeros; own takes
one size alone.

Backward runs over ranges of keys: the result is exact, because the sums over all keys (``lse``) and ``out`` are known,
and the ops only allocate memory for one range. dK and dV are added up in float32 in the cache's slab; torch's ops first
round each range's part to q's dtype. Our kernels add to the slab themselves, so they take all keys at once; they take
no trees, because they always hide keys behind a call's queries. Sinks are applied outside of the ways: to out and lse
at the end of a forward, and a backward needs no more than these two.

tests/gpu compares all ways with float64 on a GPU; an H200 and an H100 have run these tests (benchmarks/results). The
other tests run the code on the CPU, with stand-ins for the aten ops; torch's dispatcher checks their schemas.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import attention_parts, attention_proof, attention_ways, kernel_library, proofs
from seq1f1b.device.attention_ways import (
    MOST_REMEMBERED,
    BackwardArguments,
    Options,
    PathRows,
    calls_of,
    chain,
    spans_of,
    token_major,
)
from seq1f1b.device.proofs import Use

__all__ = ["Options"]

KEY_RANGE = 16384
"""Most keys before the segment that one call of a backward op takes."""

RANGE_BYTES = 1 << 28
"""Most bytes of a call's dK and dV, unless the segment's own are more: such a call takes fewer keys. Counted with as
many heads as queries have, for so the ops hold them before they add up heads that share keys: 16,384 keys of 32 query
heads of 128, in 16 bits. A constant and not a share of what is free, because the bits of a gradient follow from the
ranges.
"""

PLAIN_LOGITS = 1 << 26
"""Most logits that the plain way holds at once; it keeps a few tensors of that size."""

OFTEN: float = 64
"""Passes of a shape that go by flash before cuDNN makes a plan for it, which takes 40 to 90 ms on an H200 a call. cuDNN
saves a part of a millisecond a pass: layers and micro-batches of the second step reach this, lengths that come in one
step alone do not."""

OLDEST_CUDNN = 91501
"""Older ones read beyond the queries where these are no multiple of 128 (pytorch#169849)."""


# -- the ops, with the arguments of csrc/torch/ops.h: tensors, then the options from slopes on ------------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, Options(options[1], *options)._replace(place=chain(k.shape[2])))


def causal_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv = (t.new_empty(t.transpose(1, 2).shape, dtype=lse.dtype).transpose(1, 2) for t in (k, v))
    chosen = Options(options[1], *options)._replace(place=chain(k.shape[2], store=True))
    return _backward(dout, q, k, v, out, lse, chosen, dk, dv)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    keys, values, key_docs, to_k, to_v = torch.ops.seq1f1b.cache_write.default(k, v, options[1], layer)
    if to_k.shape[2]:  # no rows if a forward runs again
        attention_parts.copy(k, v, to_k, to_v)
    return _forward(q, keys, values, _in_unit(Options(key_docs, *options), layer, keys, 0))


def segment_attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, layer: Tensor, *options_and_heads: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, kv_heads = options_and_heads
    keys, values, dk, dv, key_docs, held = torch.ops.seq1f1b.cache_read.default(q, out, layer, kv_heads)
    chosen = _in_unit(Options(key_docs, *options), layer, keys, held.numel())
    return _backward(dout, q, keys, values, out, lse, chosen, dk, dv)


def _in_unit(options: Options, layer: Tensor, keys: Tensor, kept: int) -> Options:
    """Returns the options of a segment, with the place of its keys.

    Args:
        kept: number of keys with gradients in dk and dv already.
    """
    path = _C.key_ranges()  # the current unit's, in a tree
    if path is None:
        return options._replace(place=PathRows(((0, keys.shape[2], 0),), (), kept))
    ranges, parts, num_documents = path
    options = options._replace(place=PathRows(ranges, parts, kept))
    if parts and (options.window or options.slopes.numel()):
        raise ValueError(
            f"layer {int(layer)} has a window or ALiBi slopes, which count the tokens between two, and {len(parts)} "
            "siblings share this unit: give each sibling a segment of its own"
        )
    if not options.docs.numel():
        return options
    none = options.docs.new_empty(0)
    if num_documents == 1:  # from the step's plan: the ids hide no keys
        return options._replace(docs=none, key_docs=none)
    rows = [options.key_docs.narrow(1, row, end - begin) for begin, end, row in ranges]
    key_docs = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
    if not parts:
        return options._replace(key_docs=key_docs)
    torch._assert_async(  # on the device: a read by the host would wait for all work there
        (key_docs == key_docs[:, -1:]).all(),
        "doc_ids are of several documents, and siblings share this unit: give a tree of siblings one id, or each of "
        "them a segment of its own",
    )
    return options._replace(docs=none, key_docs=none)


def register(library: torch.library.Library, dispatch_key: str = "CUDA", **options: Any) -> None:
    """Registers these functions as kernels of the package's ops for a dispatch key, for the lifetime of ``library``."""
    for kernel in (causal_attention, causal_attention_backward, segment_attention, segment_attention_backward):
        library.impl(kernel.__name__, kernel, dispatch_key, **options)  # type: ignore[no-untyped-call]


# -- the choice ------------------------------------------------------------------------------------------------------


def way(q: Tensor, v_head_dim: int, options: Options, operation: str = "attention_forward") -> str:
    """Returns the name of the way for a call. "cudnn" stands for flash until the shape has come often."""
    sizes, is_chain = (q.shape[3], v_head_dim), options.place.is_chain
    if q.dtype not in kernel_library.CODES or options.slopes.numel() or not _has_flash(q.device):
        return "plain"
    needs_own, fits_own = options.docs.numel() or options.softcap, is_chain and options.scale > 0
    is_ours = q.shape[3] == v_head_dim and (needs_own or kernel_library.preference() == "own")
    if fits_own and is_ours and _has_own(operation, q):
        return "own"
    if needs_own or max(sizes) % 8:
        if is_chain and not options.softcap and not max(sizes) % 8:
            return "documents"
        if fits_own and needs_own:
            kernel_library.warn_of_products(q.device, str(q.dtype).removeprefix("torch."), *sizes)
        return "plain"
    return "cudnn" if not options.window and min(sizes) % 8 == 0 and _has_cudnn(q.device, q.dtype, *sizes) else "flash"


def _has_own(operation: str, q: Tensor) -> bool:
    """Returns whether a kernel of ours takes the queries. Our backward has no deterministic mode: it adds up dQ in any
    order.

    Raises:
        RuntimeError: the environment asks for our kernels, and their library was not built.
    """
    is_random = operation == "attention_backward" and torch.are_deterministic_algorithms_enabled()
    if kernel_library.wanted(operation, q.device) is None or q.shape[3] not in kernel_library.HEADS or is_random:
        return False
    use = Use(operation, q.dtype, q.shape[3], q.shape[3], q.device)
    prove = functools.partial(attention_proof.prove, use)
    instead = "Matrix products, up to 200 times slower,"
    return bool(kernel_library.preference()) or proofs.holds(use, prove, instead)


def _has_flash(device: torch.device) -> bool:
    return device.type != "cuda" or (kernel_library.can_run(device) and not torch.version.hip)  # HIP: other kernels


def _has_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> bool:
    """Returns whether cuDNN's attention takes heads of these sizes on the device, on Hopper alone: with few heads of
    keys, versions of cuDNN are wrong on B200 (pytorch#193893).

    cuDNN's backward adds up dQ in any order, and has no deterministic mode.
    """
    if device.type != "cuda" or torch.version.hip or torch.are_deterministic_algorithms_enabled():
        return False
    is_enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call] # torch's has no types
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call] # torch's has no types
    is_right = kernel_library.capability(device)[0] == 9 and (version or 0) >= OLDEST_CUDNN
    return is_enabled and is_right and _cudnn_takes(device, dtype, head_dim, v_head_dim)


@functools.cache
def _cudnn_takes(device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> bool:
    """Returns whether torch hands heads of these sizes to cuDNN."""
    sizes = (2, head_dim), (1, head_dim), (1, v_head_dim)
    q, k, v = (torch.empty(1, heads, 128, size, dtype=dtype, device=device) for heads, size in sizes)
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, True))


def _comes_often(operation: str, q: Tensor, keys: Tensor, values: Tensor, place: PathRows, longest: int) -> bool:
    """Counts a pass of a shape; returns whether the shape has come often. cuDNN takes no call of one query or key."""
    calls = calls_of("cudnn", place, q.shape[2], 0, longest, operation == "attention_backward")
    sizes = tuple([(call.num_queries, call.size) for call in calls])
    if min(map(min, sizes)) == 1:
        return False
    layout = q.shape, q.stride(), keys.shape[1], keys.stride(), values.shape[3]
    return next(_passes(operation, q.dtype, q.device, layout, sizes)) >= OFTEN


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def _passes(*shape: Any) -> Iterator[int]:
    return itertools.count()


# -- forward and backward over the rows of a cache -------------------------------------------------------------------


def _forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Returns out (batch, heads, tokens, head_dim of values) in token-major memory, and lse (batch, heads, tokens).

    keys, values: (batch, kv_heads, N, head_dim), two sizes of heads; in a chain the last query is token N - 1.
    """
    name, options = _chosen("attention_forward", q, keys, values, options)
    out, lse = attention_ways.forward(name, q, keys, values, options)
    if options.sinks.numel():  # one more key for each row, with the sink as its logit and the value 0
        sinks = options.sinks[:, None]
        out, lse = out * torch.sigmoid(lse - sinks)[..., None], torch.logaddexp(lse, sinks)
    return token_major(out, q.dtype), lse.contiguous()


def _backward(
    dout: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, options: Options, dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Adds to dk and dv (float32 or float64, shapes of keys and values), or stores there.

    Returns dq and the own tokens' dk and dv in q's dtype, all token-major, and the gradients of the sinks. Backwards of
    later segments are done, so the own rows are complete; the slabs' own rows are undefined after the call.
    """
    name, options = _chosen("attention_backward", q, keys, values, options)
    given = BackwardArguments(dout, q, keys, values, out, lse, options, dk, dv)
    dq, own_dk, own_dv = attention_ways.backward(name, given)
    sinks, dsinks = options.sinks, lse.new_empty(0)
    if sinks.numel():
        delta = (dout.to(lse.dtype) * out).sum(-1)
        dsinks = -(torch.exp(sinks[:, None] - lse) * delta).sum((0, 2))
    return dq, own_dk, own_dv, dsinks


def _chosen(operation: str, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[str, Options]:
    """Returns the way of a call, and the options with the range of keys for it."""
    name, longest = way(q, values.shape[3], options, operation), options.place.end
    if name == "documents":
        spans = spans_of(options.docs, options.key_docs)
        name, options = ("plain", options) if spans is None else (name, options._replace(spans=spans))
    if name == "plain":
        longest = max(16, PLAIN_LOGITS // q.shape[:3].numel())
    elif operation == "attention_backward":
        longest = _key_range(q, values)
    if name == "cudnn" and not _comes_often(operation, q, keys, values, options.place, longest):
        name = "flash"
    return name, options._replace(longest=longest)


def _key_range(q: Tensor, values: Tensor) -> int:
    """Returns the most keys of a call of a backward op; RANGE_BYTES allows at least the segment's own keys."""
    batch, heads, tokens, head_dim = q.shape
    bytes_per_key = batch * heads * (head_dim + values.shape[3]) * q.element_size()
    return min(KEY_RANGE, max(tokens, RANGE_BYTES // bytes_per_key))
