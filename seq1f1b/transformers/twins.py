"""Copies of modules that share their tensors, and modules that take the places or the classes of others."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__: list[str] = []


def put(root: nn.Module, modules: Mapping[str, nn.Module], copied: set[str] | None = None) -> None:
    """Puts modules into a model, by the names of their places.

    Args:
        copied: names of what is the model's own: what else contains a place becomes a copy first, and one of these.
            None: all is.
    """
    for name, module in modules.items():
        *path, child = name.split(".")
        parent = root
        for i, each in enumerate(path):
            at = ".".join(path[: i + 1])
            if copied is not None and at not in copied:
                parent._modules[each] = shallow(parent.get_submodule(each))
                copied.add(at)
            parent = parent.get_submodule(each)
        parent._modules[child] = module


def become(module: Any, own: Any) -> None:
    """Puts a class of ours before the class of a module, which keeps its name, its parameters and all else it has."""
    if not isinstance(module, own):
        kind: Any = type(module)
        module.__class__ = _in_front(own, kind)


@cache
def _in_front(own: Any, kind: Any) -> Any:
    return type(kind.__name__, (own, kind), {"__module__": kind.__module__, "__reduce_ex__": _reduce})


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickles a module by the library's class, which unpickling finds by its name."""
    return _new, type(self).__bases__, self.__dict__


def _new(own: Any, kind: Any) -> Any:
    made = _in_front(own, kind)
    return made.__new__(made)


def shallow(module: nn.Module) -> Any:
    """A copy that shares everything below, and to which other modules can be given."""
    new = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(module.__dict__[name])
    if isinstance(module, transformers.PreTrainedModel):
        new.__dict__.update(_tied_weights_keys={}, all_tied_weights_keys={})  # of modules that lie on other stages
    return new


def stand_for(layer: nn.Module, stand_in: Any, outputs: int) -> None:
    """Gives what stands in a layer's place the form of its output, and its plain attributes: the model may read them.

    Args:
        outputs: length of the tuple that a layer returns, hidden states first. 0: it returns these alone.
    """
    stand_in.outputs = outputs
    kinds = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
    plain = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
    for name, value in (plain | layer.__dict__.copy()).items():  # ranks may be threads that cut one model
        if isinstance(value, (bool, int, float, str)) and not hasattr(stand_in, name):
            setattr(stand_in, name, value)


def as_layer(stand_in: Any, hidden: Any, other: Any = None) -> Any:
    """Hidden states in the form in which the layer in whose place it stands would return them, with other outputs."""
    count = getattr(stand_in, "outputs", 0)
    return (hidden, *[other] * (count - 1)) if count else hidden


def twin(module: nn.Module, instead: Mapping[nn.Module, nn.Module]) -> Any:
    """A copy of the module and of all below it, in evaluation mode, which shares their tensors.

    Tensors on the meta device become some with values.

    Args:
        instead: modules of the twin in place of some of the module's.
    """
    made = dict(instead)

    def copied(own: nn.Module) -> nn.Module:
        if own not in made:
            new = made[own] = shallow(own)
            new.training = False
            for tensors in (new._parameters, new._buffers):
                tensors.update({name: _with_values(t) for name, t in tensors.items() if t is not None and t.is_meta})
            for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                new.__dict__[name] = OrderedDict(own.__dict__[name])
            new._modules = {name: child if child is None else copied(child) for name, child in own._modules.items()}
        return made[own]

    return copied(module)


def _with_values(tensor: Tensor) -> Tensor:
    """Equal for equal shapes. Each row of a matrix is the one before, moved by an element: this takes little memory."""
    count = max(1, sum(size - 1 for size in tensor.shape) + 1)
    if tensor.is_floating_point() or tensor.is_complex():
        values = torch.rand(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        values += 0.5 if tensor.dim() < 2 else -0.5  # scales and frequencies, or weights of sums
    else:
        values = torch.arange(count, device="cpu")
    return values.to(tensor.dtype).as_strided(tensor.shape, [1] * tensor.dim())
