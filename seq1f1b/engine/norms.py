"""Clips gradients by a norm over all stages, and tells all ranks of an overflow on any rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.engine.gradients import REDUCED
from seq1f1b.engine.pipeline import Pipeline

__all__: list[str] = []


def total_norm(pipeline: Pipeline, norm_type: float) -> Tensor:
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


def clip(pipeline: Pipeline, total: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
    """Clips the rank's gradients by the norm ``total``; ``error_if_nonfinite``: raises RuntimeError for inf, NaN."""
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type:g} over the gradients of all stages is {float(total)}, which cannot clip: "
            "leave out the optimizer's step, or pass error_if_nonfinite=False"
        )
    for shared in (False, True):  # torch refuses DTensors and plain tensors in one call
        own = [p for _, p in pipeline.named_parameters() if hasattr(p.grad, "full_tensor") == shared]
        nn.utils.clip_grads_with_norm_(own, max_norm, total)


def _gradients_in_order(pipeline: Pipeline, excluded: set[int]) -> list[tuple[int, list[Tensor]]]:
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


def share_overflow(pipeline: Pipeline) -> None:
    """Makes a gradient infinite on every rank after an overflow on any, so that all optimizers skip. Collective."""
    gradients = [p.grad for _, p in pipeline.named_parameters() if p.grad is not None]
    finite = all(bool(torch.isfinite(g).all()) for g in gradients)
    if not all(pipeline.group.all_gather_object(finite)) and finite and gradients:
        gradients[0].fill_(float("inf"))
