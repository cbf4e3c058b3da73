"""Embeddings of a stage, as they run while a training step does: their backward adds the rows of the unit's tokens.

Autograd makes a gradient of the whole table in each unit, mostly zeros: for 128,000 words and hidden 4096, 1 GB in 16
bits, which is cast to 2 GB and added. Here a unit's backward costs as much as its tokens have rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seq1f1b.runtime.layer import Layer, Use

__all__: list[str] = []

_SPARSE = 4  # times as many rows as tokens: a smaller table is added whole


class Embedding(Layer):
    """An ``nn.Embedding`` with a dense gradient that is the sum over tokens."""

    waits = False

    def forward(self, input: Tensor) -> Tensor:
        module, unit = self.module, self.unit(input)
        if unit is None or unit.added is None or not self.adds:
            return nn.Embedding.forward(module, input)
        use = Use(self, module.weight, None, unit.added)
        output: Tensor = _look_up(module.weight, input, module.padding_idx, use)
        return output


class _LookUp(torch.autograd.Function):
    """Adds the table's gradient in its own backward, where autograd would have added it; else returns it."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, ids: Tensor, padding: int | None, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.use = -1 if padding is None else padding, use
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), padding, use = ctx.saved_tensors, ctx.padding, ctx.use
        make = partial(dense, dy, ids, len(use.weight), padding)
        return use.gradient(ctx, lambda weight: add_rows(weight, ids, dy, padding), make), None, None, None


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
        gradient = weight.grad = torch.zeros(
            weight.shape, dtype=weight.grad_dtype or weight.dtype, device=weight.device
        )
    if type(gradient) is not Tensor or gradient.layout != torch.strided:
        return False
    if ids.numel() * _SPARSE > num_rows or torch.are_deterministic_algorithms_enabled():
        gradient.add_(dense(dy, ids, num_rows, padding))
        return True
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    in_order = ids.sort().values
    numbers = torch.searchsorted(in_order, ids)  # where each token's id comes first: equal tokens have one number
    if padding >= 0:
        numbers = numbers.masked_fill(ids == padding, len(ids))
    # One row more than tokens, for the padding's. Float32, for a sum of few of many is not to be rounded.
    sums = dense(dy.to(torch.promote_types(dy.dtype, torch.float32)), numbers, len(ids) + 1, len(ids))
    # An id's sum stands where it comes first, zeros where it comes again: to count them would wait for the device.
    gradient.index_add_(0, in_order, sums[:-1].to(gradient.dtype))
    return True
