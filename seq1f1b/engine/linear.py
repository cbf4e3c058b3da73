"""Adds a unit's share to a weight's gradient in one pass: a product for a linear layer, rows for an embedding.

Autograd makes a gradient of the weight's size in each unit, casts the gradient to the dtype in which gradients grow,
and adds: three passes, two in float32 (``grad_dtype``). For an embedding of 128,000 words and hidden 4096 the gradient
takes 1 GB in 16 bits, mostly zeros. Here one op multiplies and adds (``aten::addmm`` with a wider result, on CUDA
alone), and an embedding's gradient gets only the rows of the unit's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.engine.gradients import REDUCED

__all__: list[str] = []

_BLOCK = 1 << 18  # elements of a temporary product on the CPU, if gradients are wider: small enough for the cache
_SPARSE = 4  # rows per token: a table with fewer rows is added whole


def is_plain(tensor: Any) -> bool:
    """Returns whether a tensor is strided, real and of torch's own type, as products and sums of rows here need."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_strided and not (tensor.is_complex() or tensor.is_nested)


def are_one_call(device: torch.device) -> bool:
    """Returns whether torch on this device adds products of 16-bit operands, bfloat16 too, to float32 in one call."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def add_product(weight: nn.Parameter, x: Tensor, dy: Tensor) -> bool:
    """Adds ``dy.t() @ x`` to the weight's gradient; returns False, and adds nothing, if only autograd can.

    Args:
        x: (tokens, inputs).
        dy: (tokens, outputs).
    """
    if weight.grad is None and (weight.grad_dtype or weight.dtype) == dy.dtype:
        weight.grad = dy.t() @ x
        return True
    gradient = _gradient_of(weight)
    if gradient is None:
        return False
    dtype = gradient.dtype
    if dtype == dy.dtype:
        gradient.addmm_(dy.t(), x)
    elif dtype == torch.float32 and dy.dtype in REDUCED and len(x) and are_one_call(dy.device):
        torch.ops.aten.addmm.dtype_out(gradient, dy.t(), x, dtype, out=gradient)
        torch.autograd.graph.increment_version(gradient)  # the op does not, and `StepGradients.added` needs it
    else:
        rows = max(1, _BLOCK // max(1, x.shape[1])) if dy.device.type == "cpu" else dy.shape[1]
        for i in range(0, dy.shape[1], rows):
            gradient[i : i + rows].add_(dy[:, i : i + rows].t() @ x)
    return True


def dense_rows(dy: Tensor, ids: Tensor, num_rows: int, padding: int) -> Tensor:
    """Returns the gradient of the whole table, in dy's dtype."""
    gradient: Tensor = torch.ops.aten.embedding_dense_backward.default(dy, ids, num_rows, padding, False)
    return gradient


def add_rows(weight: nn.Parameter, ids: Tensor, dy: Tensor, padding: int) -> bool:
    """Adds ``dy`` to rows of an embedding's gradient; returns False, and adds nothing, if only autograd can.

    Rows of equal tokens are summed first, in an order that depends on the tokens alone, so equal inputs give equal
    bits.

    Args:
        ids: of any shape.
        dy: (*ids' shape, hidden).
        padding: the row without gradient; -1: none.
    """
    num_rows, gradient = len(weight), _gradient_of(weight) if ids.numel() else None
    if gradient is None:
        return False
    if ids.numel() * _SPARSE > num_rows or torch.are_deterministic_algorithms_enabled():
        gradient.add_(dense_rows(dy, ids, num_rows, padding))
        return True
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    in_order = ids.sort().values
    numbers = torch.searchsorted(in_order, ids)  # first position of each token's id in the sorted ids
    if padding >= 0:
        numbers = numbers.masked_fill(ids == padding, len(ids))
    # One row more than tokens, for the padding's gradient. Float32, so that partial sums are not rounded.
    sums = dense_rows(dy.to(torch.promote_types(dy.dtype, torch.float32)), numbers, len(ids) + 1, len(ids))
    # `sums` is zero where an id comes again: counting distinct ids would wait for the device.
    gradient.index_add_(0, in_order, sums[:-1].to(gradient.dtype))
    return True


def _gradient_of(weight: nn.Parameter) -> Tensor | None:
    """Returns the weight's gradient, new zeros if absent; None if only autograd can add to the gradient."""
    if weight.grad is None:
        weight.grad = torch.zeros(weight.shape, dtype=weight.grad_dtype or weight.dtype, device=weight.device)
    return weight.grad if is_plain(weight.grad) else None
