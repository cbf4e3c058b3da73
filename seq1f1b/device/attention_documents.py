"""Attention over packed documents by torch's flash ops, which take sequences of many lengths in one call.

The documents of a segment are such sequences (attention_sequences.py).

    forward   the first document goes on from an earlier segment: its keys begin there, or where the window does. All
              others have as many keys as queries. So one call computes a row, and no result is merged.
    backward  one call over the segment's own keys, all documents as long in keys as in queries. The keys before the
              segment concern its first document alone, and are taken as the way "flash" takes them: in ranges, each
              seen by that document's queries.

Where documents lie is asked of document_layout.py. No GPU has run this way: it is used where it has proven itself
(``is_right``), at its first use in each dtype and head size.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from seq1f1b import proof
from seq1f1b.device import attention_calls, attention_parts, attention_proof, attention_sequences, attention_ways
from seq1f1b.device.attention_sequences import Gradients
from seq1f1b.device.attention_ways import Given, Options, Plan
from seq1f1b.device.document_layout import Layout, Row, read

__all__: list[str] = []


def forward(plan: Plan, q: Tensor, keys: Tensor, values: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    layout = _layout(options)
    rows = [[t.narrow(0, index, 1) for t in (q, keys, values)] for index in range(len(q))]
    out, lse = attention_sequences.results_of([
        _forward_of_row(plan, options, layout, index, *row) for index, row in enumerate(rows)
    ])  # fmt: skip
    return (out[..., : values.shape[3]] if plan.width else out), lse


def _forward_of_row(
    plan: Plan, options: Options, layout: Layout, index: int, q: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """out (tokens, heads, head_dim) and lse (heads, tokens)."""
    row, offset, end = layout.rows[index], layout.offset, keys.shape[2]
    start = _first_key(row, offset, options.window)
    before = offset - start
    tensors = attention_ways.readable(plan, q, keys.narrow(2, start, end - start), values.narrow(2, start, end - start))
    return attention_sequences.forward(
        tensors, layout.bounds(options.docs)[index], layout.key_bounds(options.docs, index, before),
        row.longest, before + row.num_first, options.scale, options.window,
    )  # fmt: skip


def backward(plan: Plan, given: Given) -> Gradients:
    layout = _layout(given.options)
    return attention_sequences.gradients_of([
        _backward_of_row(plan, layout, index, _of_row(given, index)) for index in range(len(given.q))
    ])  # fmt: skip


def _backward_of_row(plan: Plan, layout: Layout, index: int, given: Given) -> Gradients:
    row, options = layout.rows[index], given.options
    bounds = layout.bounds(options.docs)[index]

    def own(*tensors: Tensor) -> Gradients:
        of_row = [t[0] for t in tensors]
        return attention_sequences.backward(
            of_row, given.lse[0].contiguous(), bounds, row.longest, options.scale, options.window
        )

    return attention_ways.flash_backward(_plan_of_row(plan, layout.offset, row, options.window), given, own)


def _plan_of_row(plan: Plan, offset: int, row: Row, window: int) -> Plan:
    """The backward of a row: its own keys for all queries, the keys before them for those of the first document."""
    start = _first_key(row, offset, window)
    pieces, (own, *others) = attention_calls.ranges(start, offset, offset + row.num_first, window, plan.key_range)
    calls = own._replace(num_queries=plan.tokens), *others
    return replace(
        plan, pieces=(*pieces[:-1], plan.tokens), hides_first=start, calls=calls,
        sum_of_dq=attention_calls.sum_of_dq(calls, plan.tokens, attention_parts.MOST_PARTS),
    )  # fmt: skip


def _first_key(row: Row, offset: int, window: int) -> int:
    """The first key that the segment's first query sees."""
    start = min(row.start, offset)
    return max(start, offset - window + 1) if window else start


def _layout(options: Options) -> Layout:
    assert options.layout is not None
    return options.layout


def _of_row(given: Given, index: int) -> Given:
    dout, q, keys, values, out, lse, dk, dv = (t.narrow(0, index, 1) for t in (*given[:6], given.dk, given.dv))
    return Given(dout, q, keys, values, out, lse, given.options, dk, dv, given.store)


# -- the check at the first use --------------------------------------------------------------------------------------

_proofs = proof.Proofs(
    "",
    "This package's kernels or matrix products, up to 200 times slower, take its place there.",
    remedy="Install seq1f1b with nvcc and SEQ1F1B_CUDA=1 to have its kernels, which take documents too",
)


def is_right(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool | None:
    """Whether the way has proven itself, now or before; None: not known yet, and not to be used in this call.

    Args:
        head_dim: as the op gets it, the wider one of queries and values.
    """
    if device.type != "cuda":  # in tests, which hold it to float64 themselves
        return True
    return _proofs.holds(_use(dtype, head_dim, device), functools.partial(prove, dtype, head_dim, device))


def is_final(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether ``is_right``, which was asked the same before, will not answer otherwise later."""
    return device.type != "cuda" or _use(dtype, head_dim, device) in _proofs.results


def _use(dtype: torch.dtype, head_dim: int, device: torch.device) -> proof.WayUse:
    of_heads = f"({proof.DTYPES[dtype]}, heads of {head_dim})"
    return proof.WayUse(f"attention over documents by torch's flash ops {of_heads}", device)


def prove(dtype: torch.dtype, head_dim: int, device: torch.device) -> None:
    """Runs forward and backward on the small cases of attention_proof.py that have no soft cap.

    Raises:
        AssertionError, RuntimeError, ...: it is wrong, or does not run.
    """
    launches = {"attention_forward": _launch_forward, "attention_backward": _launch_backward}
    for name, launch in launches.items():
        use = proof.Use(name, dtype, head_dim, head_dim, device)
        attention_proof.prove(launch, use, attention_proof.DOCUMENT_CASES)


def _launch_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, docs: Tensor, scale: float, window: int, **_: object
) -> None:
    """As kernel_library.launch_attention."""
    options = _options(q, docs, scale, window)
    got = forward(_plan(q, k), q, k, v, options)
    out.copy_(got[0])
    lse.copy_(got[1])


def _launch_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, docs: Tensor, scale: float, window: int, store: bool,
    dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, own_dk: Tensor, own_dv: Tensor, **_: object,
) -> None:  # fmt: skip
    given = Given(dout, q, k, v, out, lse, _options(q, docs, scale, window), dk, dv, store)
    for to, got in zip((dq, own_dk, own_dv), backward(_plan(q, k), given), strict=True):
        to.copy_(got)


def _plan(q: Tensor, k: Tensor) -> Plan:
    """Ranges of fewer keys than there are before the segment."""
    return Plan(
        run=forward, way="documents", operation=None, tokens=q.shape[2], copied=None, width=0, pieces=(k.shape[2],),
        hides_first=0, calls=(), merges=True, sum_of_dq="total", key_range=40,
    )  # fmt: skip


def _options(q: Tensor, docs: Tensor, scale: float, window: int) -> Options:
    none, own = q.new_empty(0), docs[:, docs.shape[1] - q.shape[2] :]
    return Options(docs, none, own, none, scale, window, 0.0, layout=read(docs, q.shape[2]))
