"""Losses that return their sum and their divisor: gradients are divided once every unit of a step has run.

The divisor of the step is the sum of all segments' divisors, so it is known only then, and on the rank of the last
stage only. Until then gradients are those of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


def read_at_once(tensors: Sequence[Tensor]) -> list[list[float]]:
    """The elements of each. One read for those of one device, because the host waits in each until the device is there.

    Tensors of subclasses are read apart.
    """
    places: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if type(tensor) is Tensor:
            places.setdefault(tensor.device, []).append(tensor.detach().reshape(-1).double())
    read = {device: iter(torch.cat(flat).tolist()) for device, flat in places.items()}
    return [
        list(islice(read[tensor.device], tensor.numel()))
        if type(tensor) is Tensor
        else [float(element) for element in tensor.detach().reshape(-1)]
        for tensor in tensors
    ]


def read_divisors(divisors: Mapping[int, Tensor | float]) -> dict[int, float]:
    """By cell, as numbers."""
    on_device = {cell: divisor for cell, divisor in divisors.items() if isinstance(divisor, Tensor)}
    read = {cell: own[0] for cell, own in zip(on_device, read_at_once(list(on_device.values())), strict=True)}
    return {cell: read[cell] if cell in read else float(divisor) for cell, divisor in divisors.items()}


def sum_divisors(divisors: Iterable[float]) -> float:
    """Raises ValueError unless the sum is finite and not negative."""
    total = math.fsum(divisors)
    if not 0.0 <= total < math.inf:
        raise ValueError(f"the divisors that loss_fn returned sum to {total}, must be finite and at least 0")
    return total
