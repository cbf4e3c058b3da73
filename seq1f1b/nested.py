"""Values with tensors in nested tuples, lists and dicts; the distance of two tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors of a value."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = value if isinstance(value, (tuple, list)) else ()
    if isinstance(value, dict):
        items = value.values()
    return [tensor for item in items for tensor in tensors_of(item)]


def mapped(value: Any, change: Callable[[Any], Any], kind: type[Any] = Tensor) -> Any:
    """Changes every tensor of a value, or every part of another kind; other values stay, containers are copied."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, kind) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: mapped(item, change, kind) for key, item in value.items()}
    return value


# -- differences -------------------------------------------------------------------------------------------------------


def norm(value: Tensor | None) -> float:
    return 0.0 if value is None else float(torch.linalg.vector_norm(_double(value)))


def distance(value: Tensor | None, truth: Tensor | None) -> float:
    """Returns the norm of the difference; equal infinities and NaNs count as 0."""
    if value is None or truth is None:
        return norm(value if truth is None else truth)
    one, other = _double(value), _double(truth)
    return norm((one - other).masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0))


def _double(value: Tensor) -> Tensor:
    dense = value.detach().to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).double()
