"""Losses that return their sum and their divisor: gradients are divided once every unit of a step has run.

The divisor of the step is the sum of all segments' divisors, so it is known only then, and on the rank of the last
stage only. Until then gradients are those of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []


class SetAside:
    """Gradients of earlier steps, while a step runs whose own will be divided.

    Args:
        parameters: of this rank.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._all = list(parameters)
        self._before = [p.grad for p in self._all]
        for parameter in self._all:
            parameter.grad = None

    @torch.no_grad()
    def add_back(self, factor: float) -> None:
        """Multiplies what the step has added, and adds what was there before."""
        for parameter, before in zip(self._all, self._before, strict=True):
            if parameter.grad is None:
                parameter.grad = before
                continue
            if factor != 1.0:
                parameter.grad.mul_(factor)
            if before is not None:
                parameter.grad.add_(before)

    def restore(self) -> None:
        """After a step that failed: what it has added is dropped."""
        for parameter, before in zip(self._all, self._before, strict=True):
            parameter.grad = before


def split_loss(result: Any) -> tuple[Any, Tensor | float | None]:
    """The loss, and its divisor if ``loss_fn`` returned one beside it."""
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2:
        raise ValueError(f"loss_fn returned {len(result)} values, must be a scalar loss, or its sum and its divisor")
    total, divisor = result
    is_number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if not is_number and not (isinstance(divisor, Tensor) and divisor.numel() == 1):
        what = tuple(divisor.shape) if isinstance(divisor, Tensor) else type(divisor).__name__
        raise ValueError(f"the divisor that loss_fn returned beside its sum must be one number, got {what}")
    return total, divisor.detach() if isinstance(divisor, Tensor) else divisor


def sum_divisors(divisors: Iterable[Tensor | float]) -> float:
    """Raises ValueError unless the sum is finite and not negative."""
    total = math.fsum(float(divisor) for divisor in divisors)
    if not 0.0 <= total < math.inf:
        raise ValueError(f"the divisors that loss_fn returned sum to {total}, must be finite and at least 0")
    return total
