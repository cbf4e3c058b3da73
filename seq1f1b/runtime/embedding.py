"""Embeddings of a stage, as they run while a training step does: their backward adds the rows of the unit's tokens.

Autograd makes a gradient of the whole table in each unit, mostly zeros: for 128,000 words and hidden 4096, 1 GB in 16
bits, which is cast to 2 GB and added. Here a unit's backward costs as much as its tokens have rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seq1f1b.runtime.layer import Layer, To

__all__: list[str] = []

_SPARSE = 4  # times as many rows as tokens: a smaller table is added whole


class Embedding(Layer):
    """An ``nn.Embedding`` with a dense gradient that is the sum over tokens."""

    waits = False

    def takes(self, dtype: torch.dtype) -> bool:
        return not (self.module.sparse or self.module.scale_grad_by_freq or self.module.max_norm is not None)

    def forward(self, input: Tensor) -> Tensor:
        module = self.module
        unit = None if torch.compiler.is_compiling() else self.unit(input)
        if unit is None or unit.adding is None or not unit.adding.is_for(self, module.weight.dtype):
            return nn.Embedding.forward(module, input)
        output: Tensor = _look_up(module.weight, input, module.padding_idx, To(module.weight, unit.adding))
        return output


class _LookUp(torch.autograd.Function):
    """Adds the table's gradient in its own backward, where autograd would have added it; else returns it."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int | None, to: To) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.to, ctx.rows = padding, to, weight.shape[0]
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding
        dw = ctx.to.gradient(
            ctx, lambda weight: add_rows(weight, ids, dy, padding), lambda: dense(dy, ids, ctx.rows, padding)
        )
        return dw, None, None, None


_look_up: Callable[..., Tensor] = _LookUp.apply


def dense(dy: Tensor, ids: Tensor, num_rows: int, padding: int) -> Tensor:
    """The gradient of the whole table, in dy's dtype."""
    gradient: Tensor = torch.ops.aten.embedding_dense_backward.default(dy, ids, num_rows, padding, False)
    return gradient


def add_rows(weight: nn.Parameter, ids: Tensor, dy: Tensor, padding: int) -> bool:
    """Adds the gradient of a table's rows to the table's; False: that cannot be, and nothing has been done.

    Rows of equal tokens are summed first, in an order that the tokens alone decide, so equal inputs give equal bits.

    Args:
        ids: of any shape.
        dy: (*ids' shape, hidden).
        padding: the row that gets nothing; -1: there is none.
    """
    if not ids.numel():
        return False
    gradient, num_rows = weight.grad, weight.shape[0]
    if gradient is None:
        dtype = weight.grad_dtype or weight.dtype
        gradient = weight.grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if type(gradient) is not Tensor or gradient.layout != torch.strided:
        return False
    if ids.numel() * _SPARSE > num_rows or torch.are_deterministic_algorithms_enabled():
        gradient.add_(dense(dy, ids, num_rows, padding))
        return True
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    rows, numbers = _distinct(ids)
    if padding >= 0:
        numbers = numbers.masked_fill(ids == padding, len(ids))
    # One row more than tokens, for the padding's. Float32, for a sum of few of many is not to be rounded.
    sums = dense(dy.to(torch.promote_types(dy.dtype, torch.float32)), numbers, len(ids) + 1, len(ids))
    gradient.index_add_(0, rows, sums[:-1].to(gradient.dtype))
    return True


def _distinct(ids: Tensor) -> tuple[Tensor, Tensor]:
    """As many rows as tokens, the distinct ids first, and the number of each token's id among them.

    Found on the device: to ask how many there are would wait for it. What follows the distinct ones are any rows.
    """
    in_order, places = ids.sort(stable=True)
    is_new = torch.ones_like(ids)
    is_new[1:] = in_order[1:] != in_order[:-1]
    numbers_in_order = is_new.cumsum(0) - 1
    numbers = torch.empty_like(ids).scatter_(0, places, numbers_in_order)
    rows = torch.arange(len(ids), device=ids.device, dtype=ids.dtype)
    return rows.scatter_(0, numbers_in_order, in_order), numbers
