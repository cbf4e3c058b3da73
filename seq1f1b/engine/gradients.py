"""Keeps a step's gradients apart from earlier ones, where accumulation in ``.grad`` would be wrong; and clips them.

Fp32 parameters without ties are not kept apart, if the loss returns no divisor. In a first step the kind of the loss
may be unknown: then all gradients are kept apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

REDUCED = (torch.bfloat16, torch.float16)


class StepGradients:
    """Gradients of one training step that start from zero; earlier gradients are added at the end.

    A step adds to 16-bit gradients M k times, so they grow in a wider dtype and are rounded once. Gradients of tied
    parameters are summed over ranks. All gradients start from zero if the loss may return a divisor: the division
    comes after the last unit.

    Args:
        parameters: parameters whose gradients start from zero, each once.
        wide: ids of parameters whose gradients grow in ``dtype``.
    """

    def __init__(self, parameters: list[nn.Parameter], wide: Collection[int], dtype: torch.dtype | None) -> None:
        self._parameters, self._wide, self._dtype = parameters, wide, dtype
        self._before: dict[int, Tensor | None] = {id(p): p.grad for p in parameters}
        # A gradient of DDP may be a view of a bucket, and the next reduction overwrites the bucket.
        self._copies = {key: g.detach().clone() for key, g in self._before.items() if g is not None and _is_part(g)}
        self._zeros: dict[int, Tensor] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Sets earlier gradients aside within the context; an error puts them back."""
        try:
            for parameter in self._parameters:
                parameter.grad = None
                if id(parameter) in self._wide:
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
        """Sets the gradient of an autograd leaf outside of all modules aside, before the step adds to the gradient."""
        if id(leaf) not in self._before:
            self._parameters.append(leaf)
            self._before[id(leaf)], leaf.grad = leaf.grad, None

    def added(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns the step's gradient of a parameter, without earlier gradients; None if no unit added any."""
        zeros = self._zeros.get(id(parameter))
        return None if zeros is not None and parameter.grad is zeros and not zeros._version else parameter.grad

    @torch.no_grad()
    def replace(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Replaces the step's gradient of a parameter, see :meth:`added`."""
        if parameter.grad is not None and parameter.grad is self._zeros.get(id(parameter)):
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient.to(parameter.grad_dtype or parameter.dtype, copy=True)

    @torch.no_grad()
    def end(self, factor: float = 1.0) -> None:
        """Ends the step: adds earlier gradients to the step's.

        Args:
            factor: multiplies the step's gradients, if all started from zero; 0: drops gradients, even if not finite.
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
    is_plain = not hasattr(gradient, "to_local") and gradient.layout == torch.strided
    return is_plain and gradient.untyped_storage().nbytes() > gradient.nbytes


def growing_wide(module: nn.Module) -> dict[int, nn.Parameter]:
    """Returns a module's 16-bit parameters whose gradients may be accumulated in a wider dtype, by id.

    Leaves out sparse gradients, and parameters with a ``grad_dtype`` chosen by the user.
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


def _make_zeros(parameter: nn.Parameter, dtype: torch.dtype | None) -> Tensor:
    """Gives a parameter a gradient of zeros in a wider dtype. The setter of ``grad`` refuses the dtype.

    ``Tensor.grad_dtype`` would allow the dtype, but once set never follows the parameter's dtype again.
    """
    zeros = parameter.data
    parameter.grad = zeros
    local = _local(zeros)
    local.data = torch.zeros_like(local, dtype=dtype)
    return zeros


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def dense(gradient: Tensor) -> Tensor:
    """Returns a gradient's values as a dense tensor; torch.gather or an embedding may leave them sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


# -- the gradients of all stages ---------------------------------------------------------------------------------------


def total_norm(pipeline: Any, norm_type: float) -> Tensor:
    """Returns the norm over the gradients of all stages, equal on every rank. Collective."""
    pipeline.tied.meet()
    counted = _gradients_in_order(pipeline, pipeline.tied.counted_elsewhere())
    is_double = any(g.dtype == torch.float64 for _, gradients in counted for g in gradients)
    norms = [(stage, [_norm(g, norm_type) for g in gradients]) for stage, gradients in counted]
    everyones = pipeline.group.all_gather_object((is_double, norms))
    in_order = sorted((entry for _, theirs in everyones for entry in theirs), key=lambda entry: entry[0])
    dtype = torch.float64 if any(theirs for theirs, _ in everyones) else torch.float32
    found = torch.tensor([norm for _, theirs in in_order for norm in theirs], dtype=dtype, device="cpu")
    return torch.linalg.vector_norm(found, norm_type) if len(found) else found.new_zeros(())


def clip(pipeline: Any, total: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
    """Clips the rank's gradients by the norm ``total``; ``error_if_nonfinite``: raises RuntimeError for inf, NaN."""
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type:g} over the gradients of all stages is {float(total)}, which cannot clip: "
            "leave out the optimizer's step, or pass error_if_nonfinite=False"
        )
    for shared in (False, True):  # torch refuses DTensors and plain tensors in one call
        own = [p for _, p in pipeline.named_parameters() if hasattr(p.grad, "full_tensor") == shared]
        nn.utils.clip_grads_with_norm_(own, max_norm, total)


def _gradients_in_order(pipeline: Any, excluded: set[int]) -> list[tuple[int, list[Tensor]]]:
    """Returns gradients by stage, the loss last, each once, without parameters with ``excluded`` ids."""
    options = pipeline.options
    parts: list[tuple[int, Any]] = [(pipeline.rank - pipeline.num_ranks, options.embedding), *pipeline.modules.items()]
    if pipeline.has_last or options.head is not None:
        parts.append((pipeline.num_stages + (pipeline.rank if options.head is not None else 0), options.loss_fn))
    seen, found = set(excluded), []
    for index, part in parts:
        parameters = part.parameters() if isinstance(part, nn.Module) else ()
        gradients = []
        for parameter in parameters:
            if id(parameter) not in seen and parameter.grad is not None and parameter.grad.numel():
                gradients.append(parameter.grad)
            seen.add(id(parameter))
        found.append((index, gradients))
    return found


def _norm(gradient: Tensor, norm_type: float) -> float:
    dtype = torch.float32 if gradient.dtype in REDUCED else None
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce().values()
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def share_overflow(pipeline: Any) -> None:
    """Makes a gradient infinite on every rank after an overflow on any, so that all optimizers skip. Collective."""
    gradients = [p.grad for _, p in pipeline.named_parameters() if p.grad is not None]
    finite = all(bool(torch.isfinite(g).all()) for g in gradients)
    if not all(pipeline.group.all_gather_object(finite)) and finite and gradients:
        gradients[0].fill_(float("inf"))
