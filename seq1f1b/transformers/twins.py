"""Copies modules with shared tensors, replaces modules in a model, and puts classes in front of a module's class."""

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


def put(root: nn.Module, modules: Mapping[str, nn.Module], *, copies_parents: bool = False) -> None:
    """Puts modules into a model, each at the place of that name.

    Args:
        copies_parents: whether each parent but the root is copied before the change, because another model has it, too.
    """
    copied = set[str]()
    for name, module in modules.items():
        *path, child = name.split(".")
        parent = root
        for i, each in enumerate(path):
            at = ".".join(path[: i + 1])
            if copies_parents and at not in copied:
                parent._modules[each] = shallow(parent.get_submodule(each))
                copied.add(at)
            parent = parent.get_submodule(each)
        parent._modules[child] = module


def become(module: Any, own: Any) -> None:
    """Puts the class ``own`` in front of a module's class; the class name and the module's contents stay."""
    if not isinstance(module, own):
        kind: Any = type(module)
        module.__class__ = _in_front(own, kind)


@cache
def _in_front(own: Any, kind: Any) -> Any:
    return type(kind.__name__, (own, kind), {"__module__": kind.__module__})


def shallow(module: nn.Module) -> Any:
    """Returns a copy of a module that shares children and tensors; replacing a child leaves the original unchanged."""
    new = copy.copy(module)
    for name in ("_modules", "_parameters", "_buffers"):
        new.__dict__[name] = dict(module.__dict__[name])
    if isinstance(module, transformers.PreTrainedModel):
        new.__dict__.update(_tied_weights_keys={}, all_tied_weights_keys={})  # may name modules of other stages
    return new


def stand_for(layer: nn.Module, stand_in: Any, outputs: int) -> None:
    """Gives a stand-in the layer's form of output, and the layer's plain attributes, which the model may read.

    Args:
        outputs: length of the tuple returned by a layer, hidden states first. 0: a layer returns hidden states alone.
    """
    stand_in.outputs = outputs
    kinds = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
    plain = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
    for name, value in (plain | layer.__dict__.copy()).items():  # a copy, since ranks may be threads that cut one model
        if isinstance(value, (bool, int, float, str)) and not hasattr(stand_in, name):
            setattr(stand_in, name, value)


def as_layer(stand_in: Any, hidden: Any, other: Any = None) -> Any:
    """Returns hidden states in the layer's form of output, with ``other`` for all further outputs."""
    count = getattr(stand_in, "outputs", 0)
    return (hidden, *[other] * (count - 1)) if count else hidden


def twin(module: nn.Module, instead: Mapping[nn.Module, nn.Module]) -> Any:
    """Returns a copy of a module and all submodules, in evaluation mode, with shared tensors.

    Tensors on the meta device are replaced by tensors with values, and the modules in ``instead`` by others.
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
    """Returns fixed values for a shape. To save memory, each row of a matrix is the previous row shifted by one."""
    count = max(1, sum(size - 1 for size in tensor.shape) + 1)
    if tensor.is_floating_point() or tensor.is_complex():
        values = torch.rand(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        values += 0.5 if tensor.dim() < 2 else -0.5  # positive scales and frequencies, or centered weights
    else:
        values = torch.arange(count, device="cpu")
    return values.to(tensor.dtype).as_strided(tensor.shape, [1] * tensor.dim())


class HiddenStates(nn.Module):
    """A stand-in for a head whose rows lie on all ranks: keeps and returns the hidden states."""

    hidden: Tensor | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.__dict__["weight"] = torch.empty(0, dtype=dtype, device="cpu")  # models read the head's dtype

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden
