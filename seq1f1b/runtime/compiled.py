"""What runs as compiled code: the engine leaves it as it is, for code of its own would be traced into it."""

from __future__ import annotations

from torch import nn

__all__: list[str] = []


def is_compiled_whole(module: nn.Module) -> bool:
    """Whether a call of the module runs compiled code, as ``torch.compile`` and ``nn.Module.compile`` make it."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def runs_compiled(module: nn.Module) -> bool:
    """Whether the module itself runs as compiled code, whole or by a method; a part of it may in any case."""
    if is_compiled_whole(module):
        return True
    kinds = [vars(kind) for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module]
    values = [value for names in (vars(module), *kinds) for value in names.values()]
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in values)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it runs as compiled code."""
    return any(runs_compiled(part) for part in module.modules())
