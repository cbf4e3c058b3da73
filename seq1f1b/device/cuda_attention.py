"""Attention of CUDA tensors over the slabs of the KV cache, without a copy of the prefix.

The CUDA kernels of this package's ops; those of the CPU are C. ``WAYS`` lists the ways, of which a call goes by the
first that takes it:

    own        bfloat16 and float16, head_dim 64 or 128, no ALiBi: this package's kernels, where they are known to be
               right, and faster than what else there is (kernel_library.py)
    cudnn      as flash, without a window, on Hopper and newer: cuDNN's, for shapes that come often enough to pay for
               its plan of one (``PLAN_FLOPS``); until then they go by flash
    flash      bfloat16 and float16, head_dim a multiple of 8, Ampere or newer: ``aten::_flash_attention_*``
    documents  as flash, with documents: the same ops over sequences of many lengths, where they have proven themselves
               (attention_documents.py); no GPU has run them so yet
    efficient  float32 without a window, head_dim a multiple of 4: ``aten::_efficient_attention_*``
    plain      everything else (float64, ALiBi, a soft cap that own does not take, documents in float32 or whose tokens
               do not follow one another, other heads): matrix products over ranges of keys, up to 200 times slower, in
               bounded memory

Heads of v may have another size than those of q and k. The efficient and plain ways take them as they are; for flash,
documents and cuDNN the narrower ones get zeros up to the size of the wider; own does not take them.

cuDNN masks from the first key on, so its forward is a call over the segment's own keys and one over those before, and
the two results are merged. Backward goes over ranges of keys: exact, since the sums over all keys (``lse``) and ``out``
are known, and what the ops allocate stays of the size of a range. dK and dV add up in float32 in the cache's slab;
torch's ops round each range's part to q's dtype before. Ours take all keys at once, for they add to the slab
themselves. attention_parts.py has the launches that merge and add. Sinks are no business of a way: out and lse get them
at the end of a forward, and a backward that takes these two needs nothing else.

In a tree of segments the keys of a path lie in several ranges of rows, and siblings may share a unit. A call is over
one range before the segment, or over own keys: cuDNN and flash, where they have proven themselves (attention_paths.py),
have one for the own keys of all siblings, efficient and plain one for each sibling. The results are merged. Documents
and own take no trees: a call of our kernels always hides keys behind its queries.

All that follows from the shapes and strides of a call is decided once, in a plan (``_plan``). A call whose plan is
known makes its views and launches.

tests/gpu holds all of it to float64 on a GPU; an H200 and an H100 have run it (benchmarks/results). The tests
run it on the CPU, with stand-ins for the aten ops that torch's dispatcher holds to their schemas.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device import (
    attention_calls,
    attention_documents,
    attention_parts,
    attention_paths,
    attention_ways,
    document_layout,
    kernel_library,
)
from seq1f1b.device.attention_calls import Call, Place
from seq1f1b.device.attention_ways import Given, Options, Plan, are_rows_aligned, token_major

__all__ = ["Options"]

KEY_RANGE = 16384
"""Most keys before the segment that one call of a backward op takes."""

RANGE_BYTES = 1 << 28
"""Most bytes of a call's dK and dV, unless the segment's own are more: such a call takes fewer keys. Counted with as
many heads as queries have, for so the ops hold them before they add up heads that share keys: 16,384 keys of 32 query
heads of 128, in 16 bits. A constant and not a share of what is free, because the bits of a gradient follow from the
ranges.
"""

MOST_MERGED = 4
"""A forward merges this many results at most two by two. Each merge rounds: the error of three is that of attention by
matrix products in 16 bits, and it grows with the root of their number. More results are added up in float32."""

PLAIN_LOGITS = 1 << 26
"""Most logits that the plain way holds at once; it keeps a few tensors of that size."""

PLAN_FLOPS = 4e13
"""Operations that flash computes of a shape before cuDNN makes a plan for it. On an H200 a plan takes 40 to 90 ms, and
cuDNN then saves 1.3 ms in 1e12 operations: a shape that never comes again has cost no more than twice the best choice.
"""

MOST_SHAPES = 1024
"""Shapes that are remembered, and so most plans, ours and cuDNN's: with documents of every length few come twice."""


# -- the ops, with the arguments of csrc/torch/op_table.h: tensors, then the options from slopes on -------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, Options(options[1], *options))


def causal_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dk, dv = (t.new_empty(t.transpose(1, 2).shape, dtype=lse.dtype).transpose(1, 2) for t in (k, v))
    return _backward(dout, q, k, v, out, lse, Options(options[1], *options), dk, dv, store=True)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    keys, values, key_docs, to_k, to_v = torch.ops.seq1f1b.cache_write.default(k, v, options[1], layer)
    if to_k.shape[2]:  # none where a forward runs again
        attention_parts.copy(k, v, to_k, to_v)
    chosen, path = Options(key_docs, *options), _C.key_ranges()
    if path is not None:
        chosen = attention_paths.options_of(chosen, layer, path, 0)
    return _forward(q, keys, values, chosen)


def segment_attention_backward(
    dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, layer: Tensor, *options_and_heads: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *options, kv_heads = options_and_heads
    keys, values, dk, dv, key_docs, held = torch.ops.seq1f1b.cache_read.default(q, out, layer, kv_heads)
    kept, num_keys = held.numel(), keys.shape[2]
    chosen, path = Options(key_docs, *options), _C.key_ranges()
    if path is not None:
        chosen = attention_paths.options_of(chosen, layer, path, kept)
    elif kept not in (0, num_keys):
        chosen = chosen._replace(place=Place(((0, num_keys, 0),), (), kept))
    return _backward(dout, q, keys, values, out, lse, chosen, dk, dv, store=kept == 0)


def positions(x: Tensor, doc_ids: Tensor, dim: int, rank: int, num_parts: int) -> Tensor:
    unit = _C.current_unit()
    length = x.shape[dim]
    first = rank * length
    if unit is not None and length * num_parts != unit.length:
        raise ValueError(
            f"positions of dimension {dim}, which has {length} elements; the segment has {unit.length} tokens "
            f"(parts: {num_parts})"
        )
    found = _C.key_ranges()
    if found is not None and found[1]:
        assert unit is not None
        of_parts = [torch.arange(unit.offset, unit.offset + part, device=x.device) for part in found[1]]
        position = torch.cat(of_parts).narrow(0, first, length)
    else:
        first += 0 if unit is None else unit.offset
        position = torch.arange(first, first + length, device=x.device)
    if not doc_ids.numel():
        return position
    if doc_ids.dim() != 2 or doc_ids.shape[1] != length:
        raise ValueError(
            f"doc_ids is {tuple(doc_ids.shape)}, must be (batch, tokens), tokens as many as x has: {length}"
        )
    before = torch.cat([doc_ids[:, :1], doc_ids[:, :-1]], 1)
    follows = torch.cat([position[:1] < 0, position[1:] == position[:-1] + 1])  # not the first, also of a part
    goes_on = torch.where(follows, doc_ids == before, (doc_ids >= 0) & (doc_ids < position[:1]))
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


# -- the ways --------------------------------------------------------------------------------------------------------


def way(q: Tensor, v_head_dim: int, options: Options, operation: str = "attention_forward") -> str:
    """The first of ``WAYS`` that takes such a call. "cudnn" stands for flash until the shape has come often."""
    return next(name for name, each in WAYS.items() if each.takes(q, v_head_dim, options, operation))


def _own_takes(q: Tensor, v_head_dim: int, options: Options, operation: str) -> bool:
    return _own(q, v_head_dim, options, operation) is not None


def _own(q: Tensor, v_head_dim: int, options: Options, operation: str) -> kernel_library.Operation | None:
    return kernel_library.choose(operation, q) if _asks_for_own(q, v_head_dim, options, operation) else None


def _is_final(q: Tensor, v_head_dim: int, options: Options, operation: str) -> bool:
    """Whether the ways, which were asked the same before, will not answer otherwise later."""
    width = max(q.shape[3], v_head_dim)
    if not _is_known_over_path(q, v_head_dim, options):
        return False
    for_documents = _is_for_documents(q, v_head_dim, options)
    if for_documents and not attention_documents.is_final(q.dtype, width, q.device):
        return False
    return not _asks_for_own(q, v_head_dim, options, operation) or kernel_library.is_final(operation, q)


def _asks_for_own(q: Tensor, v_head_dim: int, options: Options, operation: str) -> bool:
    """Whether such calls are for our kernels, if these prove themselves. They are where torch's flash ops do not take
    the call or are slower, and for documents also where they were timed: they are near flash, and ask nothing of the
    host."""
    if q.dtype not in (torch.bfloat16, torch.float16) or options.slopes.numel() or options.scale <= 0:
        return False
    if q.shape[3] != v_head_dim or not _has_flash(q.device) or options.place is not None:
        return False
    if kernel_library.preference() == "own":
        return True
    if _flash_takes(q, v_head_dim, options):
        return bool(options.window or not _has_cudnn(q.device)) and kernel_library.is_faster(operation, q)
    return kernel_library.is_timed(operation, q) or not _documents_takes(q, v_head_dim, options)


def _cudnn_takes(q: Tensor, v_head_dim: int, options: Options, operation: str = "") -> bool:
    if options.place is not None and options.place.parts and not _has_many_parts(q, options):
        return False  # siblings have a call each, of shapes that rarely come twice
    is_fast = not options.window and not math.isinf(PLAN_FLOPS) and _has_cudnn(q.device)
    return is_fast and _flash_takes(q, v_head_dim, options)


def _flash_takes(q: Tensor, v_head_dim: int, options: Options, operation: str = "") -> bool:
    if not _flash_fits(q, v_head_dim, options):
        return False
    return options.place is None or _is_right("flash", False, q, v_head_dim) is True


def _flash_fits(q: Tensor, v_head_dim: int, options: Options) -> bool:
    if q.dtype not in (torch.bfloat16, torch.float16) or _needs_products(options):
        return False
    return max(q.shape[3], v_head_dim) % 8 == 0 and _has_flash(q.device)


def _has_many_parts(q: Tensor, options: Options) -> bool:
    """Whether siblings are more than rows of the batch, each of which has a call if that takes all siblings."""
    return options.place is not None and len(options.place.parts) > len(q)


def _packs(q: Tensor, v_head_dim: int, options: Options) -> bool:
    """Whether siblings have one call of flash over the own keys of all: ``Plan.packs``."""
    return _has_many_parts(q, options) and _is_right("flash", True, q, v_head_dim) is True


def _is_right(name: str, packs: bool, q: Tensor, v_head_dim: int) -> bool | None:
    return attention_paths.is_right(name, packs, q, v_head_dim, _plan_by)


def _is_known_over_path(q: Tensor, v_head_dim: int, options: Options) -> bool:
    """Whether ``_is_right`` has an answer to what a plan by flash follows from."""
    if options.place is None or not _flash_fits(q, v_head_dim, options):
        return True
    found = _is_right("flash", False, q, v_head_dim)
    if found and _has_many_parts(q, options):
        found = _is_right("flash", True, q, v_head_dim)
    return found is not None


def _is_for_documents(q: Tensor, v_head_dim: int, options: Options) -> bool:
    if not options.docs.numel() or options.in_pieces or options.softcap or options.slopes.numel():
        return False
    if options.place is not None:
        return False
    is_known_dtype = q.dtype in (torch.bfloat16, torch.float16)
    return is_known_dtype and max(q.shape[3], v_head_dim) % 8 == 0 and _has_flash(q.device)


def _documents_takes(q: Tensor, v_head_dim: int, options: Options, operation: str = "") -> bool:
    if not _is_for_documents(q, v_head_dim, options):
        return False
    return bool(attention_documents.is_right(q.dtype, max(q.shape[3], v_head_dim), q.device))


def _efficient_takes(q: Tensor, v_head_dim: int, options: Options, operation: str = "") -> bool:
    if q.dtype != torch.float32 or options.window or _needs_products(options) or torch.version.hip:
        return False
    return q.shape[3] % 4 == 0 and v_head_dim % 4 == 0


def _plain_takes(q: Tensor, v_head_dim: int, options: Options, operation: str = "") -> bool:
    return True


def _needs_products(options: Options) -> bool:
    return bool(options.softcap or options.slopes.numel() or options.docs.numel())


class Way(NamedTuple):
    takes: Callable[[Tensor, int, Options, str], bool]
    forward: Callable[[Plan, Tensor, Tensor, Tensor, Options], tuple[Tensor, Tensor]]
    backward: Callable[[Plan, Given], tuple[Tensor, Tensor, Tensor]]


WAYS = {
    "own": Way(_own_takes, attention_ways.own_forward, attention_ways.own_backward),
    "cudnn": Way(_cudnn_takes, attention_ways.cudnn_forward, attention_ways.cudnn_backward),
    "flash": Way(_flash_takes, attention_ways.flash_forward, attention_ways.flash_backward),
    "documents": Way(_documents_takes, attention_documents.forward, attention_documents.backward),
    "efficient": Way(_efficient_takes, attention_ways.efficient_forward, attention_ways.efficient_backward),
    "plain": Way(_plain_takes, attention_ways.plain_forward, attention_ways.plain_backward),
}


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _has_flash(device: torch.device) -> bool:
    if torch.version.hip:  # other kernels behind the same ops
        return False
    return device.type != "cuda" or _capability(device) >= (8, 0)


def _has_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention is worth a plan. Its backward adds dQ up in any order, and cannot be told not to."""
    if device.type != "cuda" or torch.version.hip or torch.are_deterministic_algorithms_enabled():
        return False
    is_enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return is_enabled and _capability(device) >= (9, 0)


# -- forward and backward over the rows of a cache -------------------------------------------------------------------


def _forward(q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """out (batch, heads, tokens, head_dim of values), token-major in memory, and lse (batch, heads, tokens).

    keys, values: (batch, kv_heads, N, their head_dim); the last query is token N - 1.
    """
    plan = _plan("attention_forward", (q, keys, values), options)
    if plan.way == "documents":
        plan, options = _with_layout(plan, "attention_forward", (q, keys, values), options)
    out, lse = plan.run(plan, q, keys, values, options)
    if options.sinks.numel():
        out, lse = _with_sinks(out, lse, options.sinks)
    return token_major(out, q.dtype), lse.contiguous()


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Both as if each row had seen a key of the sink's logit and of value 0."""
    return out * torch.sigmoid(lse - sinks[:, None])[..., None], torch.logaddexp(lse, sinks[:, None])


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
    the queries' own tokens in q's dtype: later segments went backward before, so these rows are complete, and the
    slabs' own hold nothing of use behind the call. All token-major in memory. Last the gradients of the sinks.
    """
    plan = _plan("attention_backward", (dout, q, keys, values, out), options)
    if plan.way == "documents":
        plan, options = _with_layout(plan, "attention_backward", (dout, q, keys, values, out), options)
    dq, own_dk, own_dv = plan.run(plan, Given(dout, q, keys, values, out, lse, options, dk, dv, store))
    return dq, own_dk, own_dv, _sink_gradients(dout, out, lse, options.sinks)


# -- plans -----------------------------------------------------------------------------------------------------------


class _Plans(threading.local):
    """Plans by shape. A thread has its own, as of cuDNN's: no locks, and nothing that another thread's calls decide.

    When half of ``MOST_SHAPES`` have come, those that do not come while the other half does are forgotten.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], Plan] = {}
        self.before: dict[tuple[Any, ...], Plan] = {}
        self.of_cudnn: set[tuple[Any, ...]] = set()  # shapes of its calls; torch keeps the plans that it made

    def find(self, shape: tuple[Any, ...]) -> Plan | None:
        found = self.before.pop(shape, None)
        if found is not None:
            self.keep(shape, found)
        return found

    def keep(self, shape: tuple[Any, ...], plan: Plan) -> None:
        if len(self.recent) >= max(1, MOST_SHAPES // 2) and shape not in self.recent:
            self.recent, self.before = {}, self.recent
        self.recent[shape] = plan


_plans = _Plans()


def forget_plans() -> None:
    """In all threads. For tests and benchmarks that change what plans follow from."""
    global _plans
    _plans = _Plans()
    document_layout.forget()


def _with_layout(plan: Plan, operation: str, tensors: tuple[Tensor, ...], options: Options) -> tuple[Plan, Options]:
    """The plan, and the options with the documents' layout; another way's plan where there is none."""
    layout = document_layout.layout_of(options.docs, options.key_docs)
    if layout is not None:
        return plan, options._replace(layout=layout)
    options = options._replace(in_pieces=True)
    return _plan(operation, tensors, options), options


def _plan(operation: str, tensors: tuple[Tensor, ...], options: Options) -> Plan:
    """tensors: q, keys and values of a forward; dout, q, keys, values and out of a backward."""
    plans, first = _plans, tensors[0]
    shape = (
        operation, first.dtype, first.device, options.scale > 0, options.window, options.softcap > 0,
        options.slopes.numel() > 0, options.docs.numel() > 0, options.in_pieces,
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        kernel_library.preferred, options.place, *[(t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
    )  # fmt: skip
    plan = plans.recent.get(shape) or plans.find(shape)
    if plan is None:
        plan = _make_plan(operation, tensors, options)
        q, _, values = _queries_keys_values(tensors)
        if _is_final(q, values.shape[3], options, operation):  # not so while a kernel has yet to prove itself
            plans.keep(shape, plan)
    if plan.wait is None:
        return plan
    if plan.wait > 0:
        plan.wait -= plan.flops
        return plan
    by_cudnn = _plan_by_cudnn(operation, tensors, options)
    if by_cudnn is None:
        plan.wait = None
        return plan
    plans.keep(shape, by_cudnn)
    return by_cudnn


def _make_plan(operation: str, tensors: tuple[Tensor, ...], options: Options) -> Plan:
    """By flash, for as long as cuDNN's plan would not pay, where it is cuDNN that takes the call."""
    q, _, values = _queries_keys_values(tensors)
    chosen = way(q, values.shape[3], options, operation)
    if chosen != "cudnn":
        packs = chosen == "flash" and _packs(q, values.shape[3], options)
        return _plan_by(chosen, operation, tensors, options, packs)
    plan = _plan_by("flash", operation, tensors, options, _packs(q, values.shape[3], options))
    shapes = _shapes_of_cudnn(operation, tensors, options)
    pairs = sum(shape.num_keys / (2 if shape.is_causal else 1) for shape in shapes)
    plan.flops = PRODUCTS[operation] * 2 * q.numel() * pairs
    plan.wait = PLAN_FLOPS * len(set(shapes) - _plans.of_cudnn)
    return plan


def _plan_by_cudnn(operation: str, tensors: tuple[Tensor, ...], options: Options) -> Plan | None:
    """None: torch does not hand each of the calls to cuDNN, cuDNN has plans enough, or is not known to be right."""
    shapes = _shapes_of_cudnn(operation, tensors, options)
    of_cudnn = _plans.of_cudnn.union(shapes)
    if len(of_cudnn) > MOST_SHAPES or not all(_cudnn_fits(tensors, shape) for shape in set(shapes)):
        return None
    q, _, values = _queries_keys_values(tensors)
    packs = _has_many_parts(q, options)
    if options.place is not None and not _is_right("cudnn", packs, q, values.shape[3]):
        return None
    _plans.of_cudnn = of_cudnn
    return _plan_by("cudnn", operation, tensors, options, packs)


PRODUCTS = {"attention_forward": 2, "attention_backward": 5}
"""Matrix products of a pass."""


class _CudnnShape(NamedTuple):
    """For what cuDNN makes a plan."""

    operation: str
    dtype: torch.dtype
    device: torch.device
    q: tuple[torch.Size, tuple[int, ...]]
    kv_heads: int
    v_head_dim: int
    key_strides: tuple[int, ...]
    num_keys: int
    is_causal: bool


def _shapes_of_cudnn(operation: str, tensors: tuple[Tensor, ...], options: Options) -> list[_CudnnShape]:
    """One for each call."""
    q, keys, values = _queries_keys_values(tensors)
    packs = _has_many_parts(q, options)
    _, _, pieces, ranges = _ranges("cudnn", operation, q, keys, values, options, packs)
    calls = [(pieces[call.piece], call.is_own) for call in ranges if not (packs and call.is_own)]
    of_all = operation, q.dtype, q.device, (q.shape, q.stride()), keys.shape[1], values.shape[3], keys.stride()
    return [_CudnnShape(*of_all, *call) for call in calls]


def _cudnn_fits(tensors: tuple[Tensor, ...], shape: _CudnnShape) -> bool:
    """Whether torch hands such a call to cuDNN."""
    q, keys, values = _queries_keys_values(tensors)
    width = max(q.shape[3], values.shape[3])
    q, keys = attention_ways.padded(q, width), attention_ways.padded(keys.narrow(2, 0, shape.num_keys), width)
    params = torch.backends.cuda.SDPAParams(q, keys, keys, None, 0.0, shape.is_causal, q.shape[1] != keys.shape[1])
    return min(q.shape[2], shape.num_keys) > 1 and torch.backends.cuda.can_use_cudnn_attention(params)


def _queries_keys_values(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tensors if len(tensors) == 3 else tensors[1:4]


def _plan_by(name: str, operation: str, tensors: tuple[Tensor, ...], options: Options, packs: bool = False) -> Plan:
    q, keys, values = _queries_keys_values(tensors)
    tokens = q.shape[2]
    width = max(q.shape[3], values.shape[3])
    is_backward = operation == "attention_backward"
    hidden, rows, pieces, calls = _ranges(name, operation, q, keys, values, options, packs)
    copied = tuple(not are_rows_aligned(t) for t in tensors)
    return Plan(
        run=WAYS[name].backward if is_backward else WAYS[name].forward,
        way=name,
        operation=_own(q, values.shape[3], options, operation) if name == "own" else None,
        tokens=tokens,
        copied=copied if any(copied) else None,
        width=width if name in ("cudnn", "flash", "documents") and q.shape[3] != values.shape[3] else 0,
        pieces=pieces,
        hides_first=hidden,
        calls=calls,
        merges=len(calls) <= MOST_MERGED and all(call.num_queries == tokens for call in calls),
        sum_of_dq=attention_calls.sum_of_dq(calls, tokens, attention_parts.MOST_PARTS) if is_backward else "",
        place=options.place,
        rows=rows,
        packs=options.place.parts if options.place is not None and packs else (),
        key_range=_key_range(q, values) if name == "documents" else 0,
    )


def _ranges(
    name: str, operation: str, q: Tensor, keys: Tensor, values: Tensor, options: Options, packs: bool
) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[Call, ...]]:
    """How many keys a window hides, the first rows of ranges of keys (none in a chain), their lengths and the calls.

    In a chain those that a window hides are the first range.
    """
    place, is_plain, is_backward = options.place, name == "plain", operation == "attention_backward"
    end = keys.shape[2] if place is None else place.end
    offset = end - q.shape[2]
    start = max(0, offset - options.window + 1) if options.window else 0
    longest = _plain_range(q) if is_plain else _key_range(q, values) if is_backward else end
    if place is not None:
        joins = not is_backward and name in ("flash", "efficient")
        return start, *attention_calls.ranges_of_path(
            place, start, offset, options.window, longest, is_plain=is_plain, joins=joins, packs=packs
        )
    if name == "cudnn" or (is_backward and name not in ("own", "documents")):
        return start, (), *attention_calls.ranges(start, offset, end, options.window, longest, is_plain)
    if not is_plain:
        return 0, (), (end,), ()
    of_bounds = attention_calls.bounds(0, end, longest)
    calls = tuple(Call(i, begin, 0, q.shape[2], True, False, begin) for i, (begin, _) in enumerate(of_bounds))
    return 0, (), attention_calls.lengths(of_bounds), calls


def _key_range(q: Tensor, values: Tensor) -> int:
    """Most keys of a call of a backward op; as many as the own ones do not take more."""
    batch, heads, tokens, head_dim = q.shape
    bytes_per_key = batch * heads * (head_dim + values.shape[3]) * q.element_size()
    return min(KEY_RANGE, max(tokens, RANGE_BYTES // bytes_per_key))


def _plain_range(q: Tensor) -> int:
    batch, heads, tokens, _ = q.shape
    return max(16, PLAIN_LOGITS // (batch * heads * tokens))
