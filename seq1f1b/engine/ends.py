"""The two ends of a stage in a step: a source of inputs and a sink of outputs.

``loss.py`` has the sink of the last stage, ``vocabulary_step.py`` source and sink of a vocabulary over the ranks. The
end of an edge, which sends or receives messages, belongs to ``transport``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from seq1f1b.attention.unit import LiveUnit, as_message
from seq1f1b.engine.features import Received
from seq1f1b.nested import mapped

__all__: list[str] = []


Spec: TypeAlias = "list[tuple[Any, ...]]"
"""The shape, dtype, type, device and layout of each output of a unit."""


@dataclass(eq=False)
class Source:
    """Source of a stage's inputs, here the step's arguments by cell."""

    given: Sequence[tuple[Any, ...]] = ()

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        """Returns the module's positional arguments, for F of a unit."""
        return self.given[unit.cell]

    give_back: ClassVar[Any] = None
    """Called with a unit after its backward, for the inputs' gradients that cross to another rank; None: none do."""


class FromStage(Source):
    """Source of all stages but the first: outputs of the previous stage, as leaves of the unit's graph.

    Args:
        previous: :class:`StageStep` of the previous stage if it lies on this rank: no transfer is needed; else None.
    """

    def __init__(self, training: bool, previous: Any) -> None:
        self._training, self._previous = training, previous

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        if received is not None:
            tensors, requires_grad = received[0]
        else:
            tensors = self._previous.units[unit.cell].take_handed()
            requires_grad = [tensor.requires_grad for tensor in tensors]
        leaves = []
        for tensor, needs_gradient in zip(tensors, requires_grad, strict=True):
            leaf = tensor.detach()
            if self._training and needs_gradient:
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


@dataclass(eq=False)
class ToStage:
    """Sink of a stage's outputs in one step, here the following stage.

    Args:
        step: :class:`StageStep` of the stage.
        following: :class:`StageStep` of the following stage if it lies on this rank; else None.
    """

    step: Any
    following: Any
    _specs: dict[int, Spec] = field(default_factory=dict)  # of outputs, by segment length

    end: ClassVar[Any] = None
    """Called with the unit at the end of F, outside of all that surrounds it; None: nothing is left to do."""

    def take(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        """Sets, in F and R, where the unit's backward starts (roots and seeds); returns tensors for other ranks."""
        outputs = output if isinstance(output, tuple) else (output,)
        spec: Spec = [(o.shape, o.dtype, type(o), o.device, o.layout) for o in outputs if isinstance(o, Tensor)]
        if len(spec) < len(outputs) or self._specs.get(self.step.lengths[unit.cell]) != spec:
            self._check(outputs, spec, self.step.lengths[unit.cell])
        outputs = tuple([as_message(o) for o in outputs])
        if unit.kept is not None:
            outputs = tuple([unit.kept.with_gradient(o, unit.carried_in) for o in outputs])
        elif unit.training:
            # A gradient edge in place of the output: the storage is freed once the output is sent.
            unit.roots = tuple([get_gradient_edge(o) if o.requires_grad else None for o in outputs])
        if unit.is_again:  # R: F has handed over the outputs
            return None
        if self.following is None:
            return outputs
        unit.handed = outputs
        return None

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        """Returns the gradients of the unit's roots, for B; None for a root without gradient."""
        if received is not None:  # detached: a hook may keep its gradient, and `leave_place` counts holders of views
            return [None if gradient is None else gradient.detach() for gradient in received[0][0]]
        handed: Sequence[Tensor | None] = self.following.units[unit.cell].take_handed()
        return handed

    def _check(self, outputs: tuple[Any, ...], spec: Spec, length: int) -> None:
        device, index = self.step.stage.device, self.step.stage.index
        for o in outputs:
            if not isinstance(o, Tensor):
                raise TypeError(
                    f"a stage must return a tensor or a tuple of tensors, stage {index} returned {type(o).__name__}"
                )
            if hasattr(o, "to_local"):
                raise TypeError(f"stage {index} returned a DTensor; return its to_local() instead")
            if o.device != device or o.layout != torch.strided:
                raise ValueError(
                    f"stage {index} returned a {o.layout} tensor on {o.device}; its outputs must be strided on {device}"
                )
        known = self._specs.setdefault(length, spec)
        if [own[:2] for own in known] != [own[:2] for own in spec]:
            raise ValueError(
                f"stage {index} returned {_spec_text(spec)} for a segment of {length} tokens, and "
                f"{_spec_text(known)} for another of the same length in this step"
            )


def detached(output: Any) -> Any:
    """Returns a copy of an output in memory of its own: the output may alias the receive place of an input."""
    return mapped(output, lambda tensor: tensor.detach().clone())


def _spec_text(spec: Spec) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype, *_ in spec)
