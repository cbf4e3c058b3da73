"""Gradients that a training step adds, kept apart from those that were there where they must be."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

REDUCED = (torch.bfloat16, torch.float16)


class StepGradients:
    """Gradients of one training step that start from nothing; what was there is added at the end.

    16-bit parameters are added to M k times. Their gradients grow in a wider dtype meanwhile, and are rounded once.
    Others start from nothing because they are summed over ranks, or because the loss may say at the end by what the
    step is divided.

    Args:
        parameters: those meant, each once.
        wide: ids of those whose gradients grow in ``dtype``.
    """

    def __init__(self, parameters: list[nn.Parameter], wide: Collection[int], dtype: torch.dtype | None) -> None:
        self._parameters, self._wide, self._dtype = parameters, wide, dtype
        self._before: dict[int, Tensor | None] = {id(p): p.grad for p in parameters}
        # DDP's gradients may lie in a bucket that its next reduction overwrites.
        self._copies = {key: g.detach().clone() for key, g in self._before.items() if g is not None and _is_part(g)}
        self._zeros: dict[int, Tensor] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, an error puts back what was there; what the step has added is undefined then."""
        try:
            for parameter in self._parameters:
                parameter.grad = None
                if id(parameter) in self._wide:
                    assert self._dtype is not None
                    self._zeros[id(parameter)] = _make_zeros(parameter, self._dtype)
            yield
        except BaseException:
            with torch.no_grad():
                for parameter in self._parameters:
                    parameter.grad = self._before[id(parameter)]
                for key, copy in self._copies.items():
                    self._before[key].copy_(copy)  # type: ignore[union-attr]
            raise

    def set_apart(self, leaf: Any) -> None:
        """A tensor that no module holds, whose gradient is to start from nothing, too: before the step adds to it."""
        if id(leaf) not in self._before:
            self._parameters.append(leaf)
            self._before[id(leaf)], leaf.grad = leaf.grad, None

    def added(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the step has added."""
        zeros = self._zeros.get(id(parameter))
        return None if zeros is not None and parameter.grad is zeros and not zeros._version else parameter.grad

    @torch.no_grad()
    def replace(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Takes another gradient for :meth:`added`."""
        if parameter.grad is not None and parameter.grad is self._zeros.get(id(parameter)):
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype, copy=True)

    @torch.no_grad()
    def end(self, factor: float = 1.0) -> None:
        """Puts together what was there and what the step has added.

        Args:
            factor: by which the latter is multiplied, where all gradients started from nothing; 0: it is nothing, even
                if it is not finite.
        """
        for parameter in self._parameters:
            before, added = self._before[id(parameter)], self.added(parameter)
            copy = self._copies.get(id(parameter), before)
            if added is not None:
                local = _local(added)
                if factor == 0.0:
                    local.zero_()
                elif factor != 1.0:
                    local.mul_(factor)
                if copy is not None:
                    _local(copy).add_(local)
                elif added is self._zeros.get(id(parameter)):
                    local.data = local.to(_local(parameter).dtype)
            if added is None or before is not None:
                parameter.grad = before
            if before is not None and copy is not None and copy is not before:
                before.copy_(copy)


def _is_part(gradient: Tensor) -> bool:
    """Whether it lies in a larger tensor."""
    is_plain = not hasattr(gradient, "to_local") and gradient.layout == torch.strided
    return is_plain and gradient.untyped_storage().nbytes() > gradient.nbytes


def growing_wide(module: nn.Module) -> dict[int, nn.Parameter]:
    """A module's 16-bit parameters whose gradients may lie in a wider dtype for a while, by their ids.

    A sparse gradient is no sum, and a user may have chosen another dtype for one.
    """
    sparse = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    return {
        id(p): p
        for p in module.parameters()
        if p.dtype in REDUCED
        and p.requires_grad
        and id(p) not in sparse
        and p.grad_dtype in (p.dtype, None)
        and (type(p.data) is Tensor or hasattr(p, "to_local"))
        and (p.grad is None or p.grad.layout == torch.strided)
    }


def _make_zeros(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Gives a parameter a gradient of zeros in a wider dtype, which its setter would refuse.

    ``Tensor.grad_dtype`` lets it pass, but once set it never follows the parameter's dtype again.
    """
    zeros = parameter.data
    parameter.grad = zeros
    local = _local(zeros)
    local.data = torch.zeros_like(local, dtype=dtype)
    return zeros


def _local(tensor: Any) -> Tensor:
    """The part of a DTensor that lies here, or the tensor itself."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def dense(gradient: Tensor) -> Tensor:
    """The values of a gradient, which torch.gather or an embedding may leave sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def import_backward() -> None:
    """Imports what torch imports in its first backward that is given gradients, sympy among it: 0.5 s and more.

    Called before the ranks meet, all import at the same time; else each would while the others wait for its backward.
    """
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
