"""Values of Python that a traced forward has read of its modules. Stages keep them, so they must stay as they are."""

from __future__ import annotations

import inspect
import numbers
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Frozen"]

_PLAIN = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device, Enum, range)
_SAME = (Tensor, FunctionType, BuiltinFunctionType)  # must stay the same object
_OF_TORCH = frozenset((*dir(nn.Module), *vars(nn.Module())))
_MISSING = "nothing"  # shown where an attribute does not exist
_DEPTH = 4  # containers in containers


class Frozen:
    """Attributes of modules that forward read outside of its blocks, and of objects that these attributes are."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._reads: dict[tuple[nn.Module, tuple[str, ...]], tuple[str, Any]] = {}

    def __deepcopy__(self, memo: Any) -> Frozen:
        return self  # it refers to the model, which a copy of a stage does not hold

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, this thread's reads of attributes are noted."""
        owners: dict[int, tuple[Any, nn.Module, tuple[str, ...]]] = {id(m): (m, m, ()) for m in self._names}
        this_thread = threading.get_ident()  # others may run a step of another rank

        def read(owner: Any, name: str) -> Any:
            known = owners.get(id(owner)) if threading.get_ident() == this_thread else None
            if known is not None and known[0] is owner and name not in _OF_TORCH:
                _, module, path = known
                found, path = _static(owner, name), (*path, name)
                if len(path) > 1 or not any(name in vars(module)[k] for k in ("_parameters", "_buffers", "_modules")):
                    self._reads.setdefault((module, path), (_shown(found), found))
                if not isinstance(found, (*_PLAIN, *_SAME, nn.Module)):
                    owners[id(found)] = found, module, path
                    watch(type(found))
            return object.__getattribute__(owner, name)

        def watch(kind: Any) -> None:
            if kind is nn.Module or kind.__getattribute__ is object.__getattribute__:
                with suppress(TypeError):  # of a kind that C has made
                    kind.__getattribute__ = read
                    stack.callback(delattr, kind, "__getattribute__")

        with ExitStack() as stack:
            watch(nn.Module)
            yield

    def check(self) -> None:
        """Raises ValueError where a value is another one now."""
        for (module, path), (before, _) in self._reads.items():
            value: Any = module
            for name in path:
                value = _static(value, name)
            if _shown(value) != before:
                shown = ".".join(part for part in ("self", self._names[module], *path) if part)
                raise ValueError(
                    f"{shown} was {before[:200]} when the model was cut, is {_shown(value)[:200]} now, and its stages "
                    "keep to the first: cut the model again, or make it a buffer, which stages read in each call"
                )


def _static(owner: Any, name: str) -> Any:
    """An attribute, without the code of a property."""
    found = inspect.getattr_static(owner, name, _MISSING)
    return getattr(owner, name, _MISSING) if isinstance(found, MemberDescriptorType) else found


def _shown(value: Any, depth: int = _DEPTH) -> str:
    """Tells plain values, and what consists of them, from others of their kind; objects of other kinds look alike."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _SAME):
        return f"{type(value).__name__} {id(value):#x}"
    if depth and isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(item, depth - 1)}" for key, item in value.items()) + "}"
    if depth and isinstance(value, (list, tuple)):
        return "[" + ", ".join(_shown(item, depth - 1) for item in value) + "]"
    return "..."
