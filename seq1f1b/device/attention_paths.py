"""Attention over the keys of a tree's path: what a call is told of it, and which ways have proven themselves.

The keys lie in several ranges of rows, and siblings may share a unit (attention_calls.py). A range before the segment's
own rows is one call, over all queries, and the results are merged; siblings' own rows are one call by torch's flash op
over sequences of many lengths (attention_sequences.py), if that way has proven itself. No GPU has run calls over
several ranges: each way proves itself at its first use in each dtype and head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from seq1f1b import proof
from seq1f1b.device import attention_proof
from seq1f1b.device.attention_calls import Place
from seq1f1b.device.attention_ways import Given, Options, Plan

__all__: list[str] = []

PlanBy = Callable[[str, str, tuple[Tensor, ...], Options, bool], Plan]
"""The plan of a way: its name, "attention_forward" or "attention_backward", q, keys and values (before them dout and
behind them out), options, and whether siblings have one call (``Plan.packs``)."""


def options_of(options: Options, layer: Tensor, path: tuple[Any, ...], kept: int) -> Options:
    """The options of a segment of a tree.

    Args:
        path: where the current unit says that its keys lie.
        kept: keys whose rows of dk and dv hold gradients already.
    """
    ranges, parts, num_documents = path
    place = Place(ranges, parts, kept)
    none = options.docs.new_empty(0)
    if parts and (options.window or options.slopes.numel()):
        raise ValueError(
            f"layer {int(layer)} has a window or ALiBi slopes, which count the tokens between two, and {len(parts)} "
            "siblings share this unit: give each sibling a segment of its own"
        )
    if not options.docs.numel():
        return options._replace(place=place)
    if num_documents == 1:  # as the plan of the step says: the ids hide nothing
        return options._replace(place=place, docs=none, key_docs=none)
    rows = [options.key_docs.narrow(1, row, end - begin) for begin, end, row in ranges]
    key_docs = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
    if not parts:
        return options._replace(place=place, key_docs=key_docs)
    torch._assert_async(  # on the device: to read the answer here would wait for all that runs there
        (key_docs == key_docs[:, -1:]).all(),
        "doc_ids are of several documents, and siblings share this unit: give a tree of siblings one id, or each of "
        "them a segment of its own",
    )
    return options._replace(place=place, docs=none, key_docs=none)


# -- the check at the first use --------------------------------------------------------------------------------------

INSTEAD = {
    ("flash", False): "Matrix products, up to 200 times slower, take its place there.",
    ("flash", True): "A call for each sibling takes its place there.",
    ("cudnn", False): "Torch's flash ops take its place there.",
    ("cudnn", True): "Torch's flash ops take its place there.",
}
"""By way, and whether it packs siblings."""

_proofs = {
    use: proof.Proofs("", instead, remedy="Trees cost more time there, and are right")
    for use, instead in INSTEAD.items()
}


def is_right(name: str, packs: bool, q: Tensor, v_head_dim: int, plan_by: PlanBy) -> bool | None:
    """Whether the way has proven itself over paths, now or before; None: not known yet, and not to be used in this
    call."""
    if q.device.type != "cuda":  # in tests, which hold it to float64 themselves
        return True
    head_dim = max(q.shape[3], v_head_dim)
    what = f"attention over {'siblings' if packs else 'the keys of a path'} by {_OPS[name]}"
    use = proof.WayUse(f"{what} ({proof.DTYPES[q.dtype]}, heads of {head_dim})", q.device)
    proves = functools.partial(prove, name, packs, q.dtype, head_dim, q.device, plan_by)
    return _proofs[name, packs].holds(use, proves)


_OPS = {"flash": "torch's flash ops", "cudnn": "cuDNN"}


def prove(name: str, packs: bool, dtype: torch.dtype, head_dim: int, device: torch.device, plan_by: PlanBy) -> None:
    """Runs forward and backward on the small cases of attention_proof.py that the way takes.

    Raises:
        AssertionError, RuntimeError, ...: it is wrong, or does not run.
    """
    for operation, launch in (("attention_forward", _launch_forward), ("attention_backward", _launch_backward)):
        use = proof.Use(operation, dtype, head_dim, head_dim, device)
        plan = functools.partial(plan_by, name, operation)
        for case in attention_proof.PATH_CASES:
            place = case.place
            assert place is not None
            if bool(place.parts) if packs else name == "flash" or not (place.parts or case.window):
                attention_proof.prove(functools.partial(launch, plan, packs, place), use, (case,))


def _launch_forward(
    plan_by: Callable[..., Plan], packs: bool, place: Place, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, window: int, **_: object,
) -> None:  # fmt: skip
    """As kernel_library.launch_attention."""
    options = _options(q, place, scale, window)
    plan = plan_by((q, k, v), options, packs)
    for to, got in zip((out, lse), plan.run(plan, q, k, v, options), strict=True):
        to.copy_(got)


def _launch_backward(
    plan_by: Callable[..., Plan], packs: bool, place: Place, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, window: int, store: bool, dout: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, own_dk: Tensor,
    own_dv: Tensor, **_: object,
) -> None:  # fmt: skip
    options = _options(q, place, scale, window)
    plan = plan_by((dout, q, k, v, out), options, packs)
    given = Given(dout, q, k, v, out, lse, options, dk, dv, store)
    for to, got in zip((dq, own_dk, own_dv), plan.run(plan, given), strict=True):
        to.copy_(got)


def _options(q: Tensor, place: Place, scale: float, window: int) -> Options:
    none = q.new_empty(0)
    return Options(none, none, none, none, scale, window, 0.0, place=place)
