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


def mapped(value: Any, change: Callable[[Any], Any], kind: type[Any] = Tensor) -> Any:
    """Changes every tensor of a value, or all else of one kind; what is neither that nor a container stays."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change, kind) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: mapped(item, change, kind) for key, item in value.items()}
    return value


def taken_apart(value: Any, count: int, name: str, cut: Callable[[Tensor, str], list[Any]]) -> list[Any]:
    """So many parts of a value, where ``cut`` makes those of a tensor.

    Tuples and dicts become tuples and dicts of parts, and anything else is repeated.

    Args:
        name: of the value, for errors of ``cut``.
    """
    if isinstance(value, Tensor):
        return cut(value, name)
    if isinstance(value, tuple):
        each = [taken_apart(item, count, name, cut) for item in value]
        return [tuple(parts[i] for parts in each) for i in range(count)]
    if isinstance(value, dict):
        named = {key: taken_apart(item, count, f"{name}[{key!r}]", cut) for key, item in value.items()}
        return [{key: parts[i] for key, parts in named.items()} for i in range(count)]
    return [value] * count
