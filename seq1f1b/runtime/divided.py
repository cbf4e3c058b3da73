"""Losses that return their sum and their divisor: gradients are divided once every unit of a step has run.

The divisor of the step is the sum of all segments' divisors, so it is known only then, and on the rank of the last
stage only. Until then gradients are those of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def split_loss(result: tuple[Any, ...]) -> tuple[Any, Tensor | float]:
    """A sum and its divisor, as ``loss_fn`` has returned them."""
    if len(result) != 2:
        raise ValueError(f"loss_fn returned {len(result)} values, must be a scalar loss, or its sum and its divisor")
    total, divisor = result
    is_number = isinstance(divisor, (int, float)) and not isinstance(divisor, bool)
    if not is_number and not (isinstance(divisor, Tensor) and divisor.numel() == 1):
        what = tuple(divisor.shape) if isinstance(divisor, Tensor) else type(divisor).__name__
        raise ValueError(f"the divisor that loss_fn returned beside its sum must be one number, got {what}")
    if isinstance(divisor, Tensor) and divisor.requires_grad:
        raise ValueError(
            "the divisor that loss_fn returned beside its sum requires grad, and the sum is divided once all segments "
            "have gone back: return divisor.detach() if no gradient is to flow through it"
        )
    return total, divisor


class StepRead:
    """Gathers what a step asks the device, for one read: the host waits in each until the device is there."""

    def __init__(self) -> None:
        self._asked: list[tuple[Sequence[Tensor | float], Callable[[list[list[float]]], None]]] = []

    def ask(self, values: Sequence[Tensor | float], take: Callable[[list[list[float]]], None]) -> None:
        """``take`` is told the elements of each, once they are read."""
        self._asked.append((values, take))

    def read(self) -> None:
        """Reads what has been asked for. Tensors of subclasses, and of each device, are read apart."""
        asked, self._asked = self._asked, []
        flat: dict[torch.device, list[Tensor]] = {}
        for value in (value for values, _ in asked for value in values):
            if type(value) is Tensor:
                flat.setdefault(value.device, []).append(value.detach().reshape(-1).double())
        read = {device: iter(torch.cat(every).tolist()) for device, every in flat.items()}
        for values, take in asked:
            take([
                list(islice(read[value.device], value.numel())) if type(value) is Tensor
                else [float(element) for element in value.detach().reshape(-1)] if isinstance(value, Tensor)
                else [float(value)]
                for value in values
            ])  # fmt: skip


def sum_divisors(divisors: Iterable[float]) -> float:
    """Raises ValueError unless the sum is finite and not negative."""
    total = math.fsum(divisors)
    if not 0.0 <= total < math.inf:
        raise ValueError(f"the divisors that loss_fn returned sum to {total}, must be finite and at least 0")
    return total
