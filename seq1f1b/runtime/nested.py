"""Values that may be tensors in nested tuples, lists and dicts: a stage's output, a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

__all__: list[str] = []


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a value."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = value if isinstance(value, (tuple, list)) else ()
    if isinstance(value, dict):
        items = value.values()
    return [tensor for item in items for tensor in tensors_of(item)]


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Changes every tensor of a value; what is neither a tensor nor a container stays."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value
