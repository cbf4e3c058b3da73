"""A module's requests to the running step: state carried along the sequence, and auxiliary losses.

Outside a step, ``carry_in`` returns the default, and ``carry_out`` and ``add_loss`` do nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# torch.compiler.disable imports the compiler at once, in two seconds; _disable_dynamo waits for the first call.
from torch._compile import _disable_dynamo

from seq1f1b.attention.unit import current

__all__ = ["add_loss", "carry_in", "carry_out"]


@_disable_dynamo
def carry_in(layer: Tensor | int, default: Tensor) -> Tensor:
    """Returns the state left by the previous segment's :func:`carry_out`.

    With packed documents, a layer must forget the state at the first token of every document, anywhere in the segment:
    ``positions(x, doc_ids=doc_ids)`` is 0 there.

    Args:
        layer: name of the state, a handle or int; attention may use the same handle.
        default: the state before the first token, returned in the first segment and outside a step.
    Returns:
        The tensor given to ``carry_out`` in the previous segment. The gradient flows back to the previous segment.
    Raises:
        RuntimeError: the previous segment left no state under the name.
    """
    unit = current()
    if unit is not None and unit.watch is not None:
        unit.watch.noted.add("carries")
    if unit is None or unit.segment == 0:
        return default
    if unit.num_parts > 1:
        raise ValueError(
            f"stage {unit.stage}, micro-batch {unit.microbatch}: segment {unit.segment} holds {unit.num_parts} "
            "siblings, and carry_in has one state for all of them: give each leaf a segment of its own in "
            "segment_sizes, as plan_step(siblings=False) does"
        )
    key = int(layer)
    if unit.carried_in is None:
        unit.carried_in = {}
    known = unit.carried_in.get(key)
    if known is not None:  # R reads F's state again, or the module reads the state twice
        return known
    left = None if unit.previous is None else unit.previous.carried_out
    state = None if left is None else left.get(key)
    if state is None:
        raise RuntimeError(
            f"stage {unit.stage}, micro-batch {unit.microbatch}: segment {unit.segment} reads carried state {key}, "
            f"which segment {unit.segment - 1 if unit.previous is None else unit.previous.segment} did not leave by "
            "carry_out"
        )
    leaf = state.detach()
    if unit.training and state.requires_grad:
        leaf.requires_grad_()
    unit.carried_in[key] = leaf
    if unit.kept is not None:
        unit.kept.note(leaf)
    return leaf


@_disable_dynamo
def carry_out(layer: Tensor | int, state: Tensor) -> None:
    """Leaves ``state`` for the next segment's :func:`carry_in`; the gradient comes back from there.

    Raises:
        RuntimeError: gradients are off in a training forward (reentrant checkpointing); use ``use_reentrant=False``.
        ValueError: the name was used twice in one segment.
    """
    unit = current()
    if unit is None or unit.in_backward:
        return
    if unit.watch is not None:
        unit.watch.noted.add("carries")
    if unit.training and not torch.is_grad_enabled() and unit.kept is None:
        raise RuntimeError(
            "carry_out with gradients off in a training step: under torch.utils.checkpoint pass use_reentrant=False"
        )
    if unit.is_whole:  # no segment follows; a whole tree runs path by path, each path without a next segment
        return
    key = int(layer)
    if unit.carried_out is None:
        unit.carried_out = {}
    if key in unit.carried_out:
        raise ValueError(f"carried state {key} is left twice in one segment; use one name per state")
    unit.carried_out[key] = state if unit.kept is None else unit.kept.with_gradient(state, unit.carried_in)


@_disable_dynamo
def add_loss(tensor: Tensor, *, of: str = "segment") -> None:
    """Adds an auxiliary loss, for instance for the balance of experts, on any stage.

    The loss becomes a further root of the segment's backward. Weights make means over a segment's tokens a mean over
    the batch: the segment's share of the sequence, and, as for the main loss, 1 / M, or the micro-batch's share of the
    targets (``weight="targets"``, ``loss_weight=``, rows). With ``Loss(reduction="sum")`` no weights apply. The losses
    returned by ``step`` do not contain auxiliary losses.

    Args:
        tensor: a tensor of one element.
        of: ``"segment"``: a loss of the segment's own tokens, as above. ``"sequence"``: a loss of all tokens up to the
            segment's end, made of sums handed on by :func:`carry_in` and :func:`carry_out`. Call ``add_loss`` in every
            segment: the loss of the last segment is the micro-batch's, not weighted by the segment's share; losses of
            earlier segments do not count.
    Raises:
        TypeError, ValueError: no tensor, more than one element, or an unknown ``of``.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"add_loss needs a tensor of one element, got {type(tensor).__name__}")
    if tensor.numel() != 1:
        raise ValueError(f"add_loss needs a tensor of one element, got shape {tuple(tensor.shape)}")
    unit = current()
    if of not in ("segment", "sequence"):
        raise ValueError(f'of is {of!r}, must be "segment" or "sequence"')
    if unit is None or unit.in_backward or not unit.training or not tensor.requires_grad:
        return
    if of == "sequence" and unit.of_tree:
        raise ValueError(
            'add_loss(of="sequence") in a step of trees: a token that several paths share would count once for each; '
            'give losses of="segment", which count every token once, or step over rows'
        )
    if of == "sequence" and not unit.is_last:
        return
    if unit.auxiliary is None:
        unit.auxiliary = []
    unit.auxiliary.append((tensor, of == "sequence"))
