"""Modules that run as compiled code. The engine leaves them as they are: code of its own would be traced into it."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from torch import nn

__all__: list[str] = []


def is_compiled_whole(module: nn.Module) -> bool:
    """Whether a call of the module runs compiled code, as ``torch.compile`` and ``nn.Module.compile`` make it."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled(module: nn.Module) -> bool:
    """Whether the module itself runs as compiled code, whole or by a method; a part of it may in any case."""
    kind: Any = type(module)
    return is_compiled_whole(module) or any(map(_has_compiled, (module, *_own_kinds(kind))))


@functools.cache
def _own_kinds(kind: type) -> tuple[type, ...]:
    """The classes of a module but torch's own."""
    return tuple([base for base in kind.__mro__ if not base.__module__.startswith(("torch.nn.", "builtins"))])


def _has_compiled(owner: Any) -> bool:
    return any(
        type(value) is FunctionType and hasattr(value, "_torchdynamo_orig_callable") for value in vars(owner).values()
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it runs as compiled code."""
    return any(runs_compiled(part) for part in module.modules())
