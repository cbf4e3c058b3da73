"""The backward of one unit: where it starts, and what it leaves to the segment and the stage before."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from seq1f1b.runtime.unit import LiveUnit

__all__: list[str] = []


def start_of(
    unit: LiveUnit, gradients: Sequence[Tensor | None], auxiliary_seeds: Callable[[LiveUnit], tuple[float, float]]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Roots of the unit's backward, and the gradient of each.

    Args:
        gradients: what the next stage sent for the unit's outputs; not read where the unit has seeds of its own.
        auxiliary_seeds: the gradients of an auxiliary loss of the segment, and of one of the sequence.
    """
    roots, seeds = unit.roots, unit.seeds
    if seeds is None:
        seeds = tuple(gradients)  # not the cached views themselves: roots are added below
        if None in roots or any(g is None for g in gradients):
            pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if r is not None and g is not None]
            roots, seeds = tuple([r for r, _ in pairs]), tuple([g for _, g in pairs])
    if unit.auxiliary is not None:
        roots += tuple([loss for loss, _ in unit.auxiliary])
        own = auxiliary_seeds(unit)
        seeds += tuple([torch.full_like(loss, own[is_of_all]) for loss, is_of_all in unit.auxiliary])
    if unit.carried_out is not None and unit.carried_back is not None:
        for name, leaf in unit.carried_back.items():
            state = unit.carried_out[name]
            if leaf.grad is not None and state.requires_grad:  # R may have made one without, F could not tell
                roots += (get_gradient_edge(state),)
                seeds += (leaf.grad,)
    return roots, seeds


def carry_back(unit: LiveUnit) -> None:
    """Adds the gradients of what the unit carried in to those of others that carried in the same."""
    if unit.carried_in is None or unit.previous is None:
        return
    if unit.previous.carried_back is None:
        unit.previous.carried_back = unit.carried_in
        return
    back = unit.previous.carried_back
    for name, leaf in unit.carried_in.items():
        first = back.setdefault(name, leaf)
        if first is not leaf and leaf.grad is not None:
            first.grad = leaf.grad if first.grad is None else first.grad + leaf.grad


def input_gradients(unit: LiveUnit) -> tuple[Tensor | None, ...]:
    """Gradients of the unit's inputs, for the stage before."""
    return tuple([None if leaf.grad is None else as_message(leaf.grad) for leaf in unit.leaves])


def as_message(tensor: Tensor) -> Tensor:
    """The tensor as its bytes go to another rank: contiguous, and conjugated where torch has put that off."""
    tensor = tensor.contiguous()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def import_backward() -> None:
    """Imports what torch imports in its first backward that is given gradients, sympy among it: 0.5 s and more.

    Called before the ranks meet, all import at the same time; else each would while the others wait for its backward.
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
