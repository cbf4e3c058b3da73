"""Detects compiled modules, from which the engine keeps its own code: dynamo would trace the code, too."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

from torch import nn

__all__: list[str] = []


def is_compiled_whole(module: nn.Module) -> bool:
    """Returns whether a call of the module runs compiled code (``torch.compile`` or ``nn.Module.compile``)."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled(module: nn.Module) -> bool:
    """Returns whether the module is compiled, whole or in a method; does not look at submodules."""
    kind: Any = type(module)
    return is_compiled_whole(module) or any(map(_has_compiled, (module, *_own_kinds(kind))))


@functools.cache
def _own_kinds(kind: type) -> tuple[type, ...]:
    return tuple([base for base in kind.__mro__ if not base.__module__.startswith(("torch.nn.", "builtins"))])


def _has_compiled(owner: Any) -> bool:
    return any(
        type(value) is FunctionType and hasattr(value, "_torchdynamo_orig_callable") for value in vars(owner).values()
    )


def is_compiled(module: nn.Module) -> bool:
    """Returns whether the module or a submodule is compiled."""
    return any(runs_compiled(part) for part in module.modules())
