"""Another stage as the source of a stage's inputs, and as the sink of its outputs.

``loss.py`` has the end that makes the loss, ``vocabulary_step.py`` those of a vocabulary over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from seq1f1b.attention.unit import LiveUnit, as_message
from seq1f1b.engine.parts import Received, Sink, Source
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import mapped

__all__: list[str] = []


class FromStage(Source):
    """The stage before.

    Args:
        previous: its step on the same rank, where tensors are handed over without a transfer; None: on another one.
    """

    def __init__(self, training: bool, previous: StageStep | None) -> None:
        self._training, self._previous = training, previous

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        requires_grad: Sequence[bool] | None = None
        if received is not None:
            tensors, requires_grad = received[0]
        else:
            assert self._previous is not None
            tensors = self._previous.units[unit.cell].take_handed()
        leaves = []
        for i, tensor in enumerate(tensors):
            leaf = tensor.detach()
            if self._training and (tensor.requires_grad if requires_grad is None else requires_grad[i]):
                leaf.requires_grad_()
            leaves.append(leaf)
        unit.leaves = tuple(leaves)
        return unit.leaves

    def give_back(self, unit: LiveUnit) -> tuple[Tensor | None, ...] | None:
        gradients = unit.input_gradients()
        if self._previous is None:
            return gradients
        unit.handed = gradients
        return None


class ToStage(Sink):
    """The stage behind.

    Args:
        following: its step on the same rank; None: on another one.
    """

    def __init__(self, step: StageStep, following: StageStep | None) -> None:
        self._step, self._stage, self._following = step, step.stage, following
        self._spec: dict[int, list[tuple[torch.Size, torch.dtype]]] = {}  # of outputs, by segment length

    def take(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        outputs = output if isinstance(output, tuple) else (output,)
        self._check(outputs, self._step.lengths[unit.cell])
        outputs = tuple([as_message(o) for o in outputs])
        if unit.kept is not None:
            outputs = tuple([unit.kept.with_gradient(o, unit.carried_in) for o in outputs])
        elif unit.training:
            # Only the edge is kept, so that the storage goes once the output is sent.
            unit.roots = tuple([get_gradient_edge(o) if o.requires_grad else None for o in outputs])
            unit.seeds = None
        if unit.is_again:  # F has handed over the same
            return None
        if self._following is None:
            return outputs
        unit.handed = outputs
        return None

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        if received is not None:  # hooks get tensors of their own, so that what they keep is seen
            return [None if gradient is None else gradient.detach() for gradient in received[0][0]]
        assert self._following is not None
        return self._following.units[unit.cell].take_handed()

    def _check(self, outputs: tuple[Any, ...], length: int) -> None:
        device, index = self._stage.device, self._stage.index
        for o in outputs:
            if not isinstance(o, Tensor):
                raise TypeError(
                    f"a stage must return a tensor or a tuple of tensors, stage {index} returned {type(o).__name__}"
                )
            if hasattr(o, "to_local"):
                raise TypeError(f"stage {index} returned a DTensor; return its to_local() instead")
            if o.device != device or o.layout != torch.strided:
                raise ValueError(
                    f"stage {index} returned a {o.layout} tensor on {o.device}; "
                    f"its outputs must be strided tensors on {device}"
                )
        spec = [(o.shape, o.dtype) for o in outputs]
        known = self._spec.setdefault(length, spec)
        if known != spec:
            raise ValueError(
                f"stage {index} returned {_spec_text(spec)} for a segment of {length} tokens, and "
                f"{_spec_text(known)} for another of the same length in this step"
            )


def detached(output: Any) -> Any:
    """A copy that nothing else reads: an output may alias its input's place."""
    return mapped(output, lambda tensor: tensor.detach().clone())


def _spec_text(spec: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in spec)
