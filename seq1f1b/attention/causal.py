"""Causal attention of the current segment over all earlier tokens, and the positions of the segment's tokens.

A module runs in two ways. Outside a pipeline step ``causal_attention`` is plain causal attention of the whole
sequence. Inside a step, the engine has set the current unit: keys and values go to the unit's rows of the KV cache, and
the segment attends to the rows of all segments so far. The current unit decides, not an argument, so a pipeline can be
compared with the same model run whole.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from seq1f1b import _C
from seq1f1b.above import above
from seq1f1b.files import check_part

__all__ = ["causal_attention", "layer_handle", "positions", "token_offset"]

_C.bind_torch(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
_ops = torch.ops.seq1f1b
_cuda_kernels = torch.library.Library("seq1f1b", "IMPL")  # type: ignore[no-untyped-call]
above("attention")(_cuda_kernels)
_definitions = torch.library.Library("seq1f1b", "FRAGMENT")  # type: ignore[no-untyped-call]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256

# Whether a pipeline step is running. Code traced by torch.compile cannot ask C for the current unit: it reads this
# variable, and dynamo guards on the value, so that a module has a graph for inside steps and another for outside.
stepping = False


_steps_lock = threading.Lock()
_steps_inside = 0  # number of engines of the process inside a step; above 1 if ranks are threads


@contextmanager
def inside_step() -> Iterator[None]:
    """Surrounds the units of a step, for engines: torch.compile traces modules for use inside steps."""
    global _steps_inside, stepping
    with _steps_lock:
        _steps_inside += 1
        stepping = True
    try:
        yield
    finally:
        with _steps_lock:
            _steps_inside -= 1
            stepping = _steps_inside > 0


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: Tensor | int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    doc_ids: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes causal attention of the current segment over itself and all earlier tokens.

    Writes ``k`` and ``v`` to their rows of the layer's cache, so row ``i`` of ``q`` sees the prefix and rows ``0..i``.
    In a tree of segments "earlier" means along the segment's path; siblings in one unit see the path and their own
    tokens, and take no window and no ALiBi. Outside a pipeline step the result is plain causal attention. On CUDA,
    tensors and options decide between cuDNN, torch's flash attention, kernels of the package, and matrix products.

    Args:
        q: (batch, heads, tokens, head_dim), float64, float32, bfloat16 or float16; head_dim up to 256. All tensors but
            ``layer`` are on one device, the CPU or a CUDA device.
        k, v: (batch, kv_heads, tokens, head_dim), q's dtype; kv_heads divides heads. Heads of v may have another size
            than heads of q and k, also up to 256; the cache holds them unpadded.
        layer: a handle of ``layer_handle``, one per attention call of the stage; in eager code also the index.
        scale: factor of the products of queries and keys; default 1 / sqrt(head_dim).
        window: number of keys seen by a query, the query's own included; default all.
        softcap: logits become ``softcap * tanh(logits / softcap)``; default none.
        alibi_slopes: (heads) or (batch, heads); ``slope * (position of the query - of the key)`` is subtracted.
        doc_ids: (batch, tokens) integers of the segment's tokens, -2^31..2^31 - 1; a query sees its own document only.
            On CUDA this is fast with the package's kernels alone: head_dim 64 or 128, 16-bit dtypes.
        sinks: (heads), floating, with gradient: a logit for each head, part of the softmax's sum, without a value.
            Soft cap and scale do not apply to sinks.
    Returns:
        (batch, heads, tokens, head_dim of v) of q's dtype, in memory (batch, tokens, heads, head_dim of v).
    Raises:
        ValueError, TypeError: shapes or dtypes disagree, or an option is out of range.
        RuntimeError: inside a step, if the KV cache is used out of order, e.g. one layer twice in a forward; for
            forward-mode differentiation.
    Source: Seq1F1B, arXiv:2406.03488.
    """
    has_more = alibi_slopes is not None or doc_ids is not None or sinks is not None
    if has_more or not all(isinstance(t, Tensor) for t in (q, k, v)):
        _check_tensors({"q": q, "k": k, "v": v}, alibi_slopes=alibi_slopes, doc_ids=doc_ids, sinks=sinks)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
    _check(q, k, v, alibi_slopes, doc_ids, sinks)
    if not isinstance(layer, Tensor):
        _check_layer(layer)
    # A new empty tensor for each missing input: dynamo refuses a tensor in two places of an autograd.Function.
    slopes = q.new_empty(0) if alibi_slopes is None else alibi_slopes.to(torch.float32)
    docs = q.new_empty(0) if doc_ids is None else _ids(doc_ids)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    extra = q.new_empty(0) if sinks is None else sinks.to(sums)
    if scale is not None or window is not None or softcap is not None:
        _check_options(scale, window, softcap)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    options = (slopes, docs, extra, scale, window or 0, softcap or 0.0)
    records = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, extra))
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        for name, t in (("q", q), ("k", k), ("v", v), ("sinks", extra)):  # ops here would silently drop tangents
            if forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call] # torch's has no types
                raise RuntimeError(f"{name} has a tangent: attention has no forward-mode derivative, use the backward")
    if stepping if torch.compiler.is_compiling() else _in_segments():
        handle = layer if isinstance(layer, Tensor) else layer_handle(layer)
        if records:
            return _SegmentAttention.apply(q, k, v, handle, *options)  # type: ignore[no-any-return, no-untyped-call]
        return _ops.segment_attention.default(q, k, v, handle, *options)[0]  # type: ignore[no-any-return]
    if records:
        return _CausalAttention.apply(q, k, v, *options)  # type: ignore[no-any-return, no-untyped-call]
    return _ops.causal_attention.default(q, k, v, *options)[0]  # type: ignore[no-any-return]


def _in_segments() -> bool:
    """Returns whether the running unit is a segment of a step. Notes the call for the stage's first look."""
    unit = _C.unit_state()
    if unit is None:  # on another thread than the unit's, as in a backward
        return _C.unit_tokens() is not None
    if unit.watch is not None:
        unit.watch.noted.add("attends")
    return not unit.is_whole


def layer_handle(index: int) -> Tensor:
    """Returns a handle, the name of one attention call's entry of the KV cache.

    Make handles in a module's ``__init__``, as plain attributes and not buffers, because handles stay on the CPU. A
    handle is a tensor, not an int, so that ``torch.compile`` compiles a block once for all layers. Every attention call
    of a stage needs a different index.

    Raises:
        ValueError: index is negative.
    """
    _check_layer(index)
    return torch.tensor(index, dtype=torch.int64, device="cpu")


def _check_layer(index: int) -> None:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"layer is {index!r}, must be an int or a handle of seq1f1b.layer_handle")
    if index < 0:
        raise ValueError(f"layer key is {index}, must be at least 0")


def token_offset(*, sequence_parallel: tuple[int, int] | None = None) -> int:
    """Returns the position of the current segment's first token, 0 outside a step. In compiled code call ``positions``.

    In a tree of segments the position counts along the segment's path: its ancestors' tokens, then its own.

    Args:
        sequence_parallel: (rank, size) if several ranks each hold a part of the segment, for the position of the
            rank's first token.
    """
    if sequence_parallel is None:
        return _C.token_position(0)
    rank, size = check_part(sequence_parallel)
    tokens = _C.unit_tokens()
    if tokens is None and rank > 0:
        raise ValueError(f"token_offset(sequence_parallel=({rank}, {size})) outside a step: use positions")
    return 0 if tokens is None else _C.token_position(rank * (tokens[1] // size))


def positions(
    x: Tensor, dim: int = 1, *, doc_ids: Tensor | None = None, sequence_parallel: tuple[int, int] | None = None
) -> Tensor:
    """Returns positions in the sequence of ``x``'s tokens, along ``dim``: (tokens), int64, on x's device.

    An op reads the offset at run time, so compiled code is traced once for all segments. In a tree of segments
    positions count along the segment's path. Siblings in one unit each begin at the end of the parent's path.

    Args:
        doc_ids: (batch, tokens), ids of packed documents in the form of :func:`seq1f1b.document_starts` for whole rows.
            Positions then count within documents, also if a document began in an earlier segment, and the result is
            (batch, tokens).
        sequence_parallel: (rank, size) if x holds this rank's part of the segment; all parts are equally long.
    Raises:
        ValueError: x is not as long as the segment or its part, or doc_ids are not positions of first tokens.
    """
    _check_tensors({"x": x}, doc_ids=doc_ids)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}, x has {x.dim()} dimensions")
    rank, size = (0, 1) if sequence_parallel is None else check_part(sequence_parallel)
    x = x.detach()
    docs = x.new_empty(0, dtype=torch.int32) if doc_ids is None else _ids(doc_ids)
    return _ops.positions.default(x, docs, dim, rank, size)  # type: ignore[no-any-return]


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, docs: Tensor, sinks: Tensor, *options: Any
    ) -> Tensor:
        out, lse = _ops.causal_attention.default(q, k, v, slopes, docs, sinks, *options)
        ctx.save_for_backward(q, k, v, out, lse, slopes, docs, sinks)
        ctx.options = options
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *grads, dsinks = _ops.causal_attention_backward.default(dout, *ctx.saved_tensors, *ctx.options)
        return (*grads, None, None, dsinks if ctx.needs_input_grad[5] else None, None, None, None)


class _SegmentAttention(torch.autograd.Function):
    """Attention of one segment over the KV cache. Saves no keys and values, because B reads them in the cache.

    A segment's backward adds dK and dV of earlier segments to their rows of the cache, and returns dK and dV of the
    segment's own rows. Both are complete: backwards of later segments of the micro-batch have run before.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: Tensor, slopes: Tensor, docs: Tensor, sinks: Tensor,
        *options: Any,
    ) -> Tensor:  # fmt: skip
        out, lse = _ops.segment_attention.default(q, k, v, layer, slopes, docs, sinks, *options)
        # Copies q if a projection has put q, k and v into one storage: saving q would keep k and v alive too, although
        # the cache has them already. Compiled code has separate buffers.
        if not torch.compiler.is_compiling() and q.untyped_storage().nbytes() != q.nbytes:
            q = q.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, out, lse, layer, slopes, docs, sinks)
        ctx.options = options
        ctx.kv_heads = k.shape[1]
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *grads, dsinks = _ops.segment_attention_backward.default(dout, *ctx.saved_tensors, *ctx.options, ctx.kv_heads)
        return (*grads, None, None, None, dsinks if ctx.needs_input_grad[6] else None, None, None, None)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Casts tensors under autocast as torch's attention does: all floating dtypes but float64."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _check(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, docs: Tensor | None, sinks: Tensor | None) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} is {_text(t)}, must be (batch, heads, tokens, head_dim)")
        if t.device.type not in ("cpu", "cuda", "meta"):
            raise ValueError(f"{name} is on {t.device}: attention runs on the CPU and on CUDA devices")
        if t.layout != torch.strided:
            raise ValueError(f"{name} has layout {t.layout}, must be torch.strided")
    if q.dtype not in _DTYPES:
        raise TypeError(f"q is {q.dtype}, must be float64, float32, bfloat16 or float16")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(f"q, k and v must have one dtype: {q.dtype}, {k.dtype}, {v.dtype}")
    for name, other in (("k", k), ("v", v), ("alibi_slopes", slopes), ("doc_ids", docs), ("sinks", sinks)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name} is on {other.device}, q on {q.device}: they must be on one device")
    (batch, heads, tokens, head_dim), kv_heads, v_head_dim = q.shape, k.shape[1], v.shape[3]
    if batch < 1 or heads < 1 or tokens < 1 or head_dim < 1 or kv_heads < 1 or v_head_dim < 1:
        raise ValueError(f"q is {_text(q)}, k is {_text(k)}, v is {_text(v)}: no size may be 0")
    for name, size in (("head_dim", head_dim), ("head_dim of v", v_head_dim)):
        if size > _MAX_HEAD_DIM:
            raise ValueError(f"{name} is {size}, must be at most {_MAX_HEAD_DIM}")
    if k.shape[0] != batch or k.shape[2] != tokens or k.shape[3] != head_dim:
        raise ValueError(f"k is {_text(k)}: must agree with q {_text(q)} in all but heads")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {_text(v)}: must agree with k {_text(k)} in all but head_dim")
    if heads % kv_heads != 0:
        raise ValueError(f"kv_heads must divide heads: k has {kv_heads}, q has {heads}")
    if slopes is not None or docs is not None or sinks is not None:
        _check_more(batch, heads, tokens, slopes, docs, sinks)


def _check_more(
    batch: int, heads: int, tokens: int, slopes: Tensor | None, docs: Tensor | None, sinks: Tensor | None
) -> None:
    if slopes is not None:
        if slopes.is_complex():
            raise TypeError(f"alibi_slopes is {slopes.dtype}, must be real")
        if slopes.requires_grad:
            raise ValueError("alibi_slopes requires grad: slopes are constants, no gradient reaches them")
        if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads or (slopes.dim() == 2 and slopes.shape[0] != batch):
            raise ValueError(f"alibi_slopes is {_text(slopes)}, must be ({heads}) or ({batch}, {heads})")
    if docs is not None:
        if docs.is_floating_point() or docs.is_complex():
            raise TypeError(f"doc_ids is {docs.dtype}, must be an integer type")
        if docs.dim() != 2 or docs.shape[0] != batch or docs.shape[1] != tokens:
            raise ValueError(f"doc_ids is {_text(docs)}, must be (batch, tokens) = ({batch}, {tokens})")
    if sinks is not None:
        if not sinks.is_floating_point():
            raise TypeError(f"sinks is {sinks.dtype}, must be a floating type")
        if sinks.shape != (heads,):
            raise ValueError(f"sinks is {_text(sinks)}, must be ({heads}): one of each query head")


def _check_tensors(needed: dict[str, Any], **optional: Any) -> None:
    for name, value in {**needed, **optional}.items():
        if not isinstance(value, Tensor) and (name in needed or value is not None):
            raise TypeError(f"{name} is {value!r:.80}, must be a tensor{'' if name in needed else ' or None'}")


def _ids(doc_ids: Tensor) -> Tensor:
    ids = doc_ids.to(torch.int32)
    if doc_ids.dtype != torch.int64 or doc_ids.device.type == "meta":
        return ids
    fit, rule = (ids == doc_ids).all(), "doc_ids must lie in -2^31..2^31 - 1"
    if torch.compiler.is_compiling() or doc_ids.is_cuda:
        torch._assert_async(fit, rule)  # without waiting for a device
    elif not fit:
        raise ValueError(f"{rule}: they reach from {int(doc_ids.min())} to {int(doc_ids.max())}")
    return ids


def _check_options(scale: float | None, window: int | None, softcap: float | None) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"window is {window!r}, must be an int")
    if window is not None and not 1 <= window < 2**63:
        raise ValueError(f"window is {window}, must be at least 1 and below 2^63")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, must be above 0 and finite")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}, must be finite")


def _text(t: Tensor) -> str:
    return str(tuple(t.shape))


# -- the op positions, on every device -------------------------------------------------------------------------------

_STARTS = "must be the position of its document's first token: seq1f1b.document_starts makes such ids of a whole row's"


def _positions(x: Tensor, doc_ids: Tensor, dim: int, rank: int, num_parts: int) -> Tensor:
    unit, path, length = _C.unit_tokens(), _C.key_ranges(), x.shape[dim]
    if unit is not None and length * num_parts != unit[1]:
        raise ValueError(
            f"positions of dimension {dim}, which has {length} elements; the segment has {unit[1]} tokens "
            f"(parts: {num_parts})"
        )
    start, siblings = 0 if unit is None else unit[0], () if path is None else path[1]
    of_parts = [torch.arange(start, start + part, device=x.device) for part in siblings or (length * num_parts,)]
    position = torch.cat(of_parts).narrow(0, rank * length, length)
    if not doc_ids.numel():
        return position
    if doc_ids.dim() != 2 or doc_ids.shape[1] != length:
        raise ValueError(f"doc_ids is {_text(doc_ids)}, must be (batch, tokens), tokens as many as x has: {length}")
    before = torch.cat([doc_ids[:, :1], doc_ids[:, :-1]], 1)
    follows = torch.cat([position[:1] < 0, position[1:] == position[:-1] + 1])  # False for the first of each part
    goes_on = torch.where(follows, doc_ids == before, (doc_ids >= 0) & (doc_ids < position[:1]))
    is_right = (doc_ids == position) | goes_on
    if doc_ids.device.type != "cpu":  # asserted on the device: a read by the host would wait for all work there
        torch._assert_async(is_right.all(), f"a token's doc_ids {_STARTS}")
    elif not is_right.all():
        row, token = (~is_right).nonzero()[0].tolist()
        which = f"doc_ids of row {row}, token {int(position[token])} is {int(doc_ids[row, token])}"
        raise ValueError(f"{which}, {_STARTS}")
    return position - doc_ids


_definitions.define("positions(Tensor x, Tensor doc_ids, SymInt dim, SymInt rank, SymInt num_parts) -> Tensor")  # type: ignore[no-untyped-call]
_definitions.impl("positions", _positions, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


# -- results of the ops without values, for tracing: shapes, dtypes and layouts ----------------------------------------


def _token_major(like: Tensor, heads: int, head_dim: int) -> Tensor:
    return like.new_empty((like.shape[0], like.shape[2], heads, head_dim)).transpose(1, 2)


def _check_devices(*tensors: Tensor) -> None:
    if any(t.device != tensors[0].device for t in tensors):
        raise ValueError(f"all tensors must be on one device: {', '.join(str(t.device) for t in tensors)}")


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """Returns empty results.

    ``others`` begin with a segment's layer handle, on the CPU, if any, and end with slopes, ids, sinks and options.
    """
    _check_devices(q, k, v, *others[-6:-3])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _token_major(q, q.shape[1], v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_causal_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Returns empty results; ``others``: slopes, ids, sinks and options."""
    _check_devices(dout, q, k, v, out, lse, *others[:3])
    return *(_token_major(t, t.shape[1], t.shape[3]) for t in (q, k, v)), lse.new_empty(others[2].shape)


def _fake_segment_attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, layer: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Returns empty results; ``others``: slopes, ids, sinks, options and the number of heads of keys."""
    _check_devices(dout, q, out, lse, *others[:3])
    sizes = (q.shape[1], q.shape[3]), (others[-1], q.shape[3]), (others[-1], out.shape[3])
    return *(_token_major(q, *size) for size in sizes), lse.new_empty(others[2].shape)


def _fake_positions(x: Tensor, doc_ids: Tensor, dim: int, rank: int, num_parts: int) -> Tensor:
    shape = (x.shape[dim],) if doc_ids.dim() == 1 else (doc_ids.shape[0], x.shape[dim])
    return x.new_empty(shape, dtype=torch.int64)


for _name, _fake in (
    ("causal_attention", _fake_attention),
    ("causal_attention_backward", _fake_causal_attention_backward),
    ("segment_attention", _fake_attention),
    ("segment_attention_backward", _fake_segment_attention_backward),
    ("positions", _fake_positions),
):
    torch.library.register_fake(f"seq1f1b::{_name}", _fake)
