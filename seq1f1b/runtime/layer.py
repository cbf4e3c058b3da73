"""A layer of a stage that adds its weight's gradient itself: what the kinds of layers have in common.

Autograd makes a gradient of the weight's size in each unit, casts it to the dtype in which gradients grow, and adds it.
A layer whose backward can add to the gradient in place of that does so while a training step runs. Wherever somebody
waits for the gradient itself, the layer returns it, and autograd does the rest as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from seq1f1b.runtime.unit import LiveUnit, live_unit

__all__: list[str] = []


class Adding:
    """Which layers add to gradients themselves: chosen at the first call in a unit's forward.

    So a checkpoint, which computes a part of the forward again, finds the same choice.

    Args:
        added: gets the elements of every weight for which a layer does, by the weight's id.
    """

    def __init__(self, added: dict[int, int]) -> None:
        self._added = added
        self._chosen: dict[Layer, bool] = {}

    def is_for(self, layer: Layer, dtype: torch.dtype) -> bool:
        """Whether the layer adds a gradient that it computes in this dtype."""
        if layer not in self._chosen:
            self._chosen[layer] = layer.adds and not layer.is_hooked and layer.takes(dtype)
        return self._chosen[layer]

    def note(self, weight: Tensor) -> None:
        self._added[id(weight)] = weight.numel()


class Layer:
    """A layer, for the life of an engine: compiled code that calls it sees the same object.

    Args:
        parent: the module that holds it as ``child``; None: the layer is the stage.
    Attributes:
        waits: whether it may leave its product to W.
        adds: whether it may add to the gradient itself.
        held: by a weight's id, whether somebody holds the node that accumulates its gradient. Shared by all layers of a
            stage, and asked before a graph of the stage holds it, too.
    """

    waits = adds = True

    def __init__(self, name: str, parent: nn.Module | None, child: str, module: Any) -> None:
        self.name, self.module = name, module
        self._parent, self._child = parent, child
        self.held: dict[int, bool] = {}

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        raise NotImplementedError

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it can add what it computes in this dtype to the weight's gradient."""
        raise NotImplementedError

    def is_at(self, parent: nn.Module | None, child: str, module: nn.Module) -> bool:
        return self.module is module and self._parent is parent and self._child == child

    def forget(self) -> None:
        """At the end of a step."""
        self.held = {}

    @property
    def is_hooked(self) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it.
        """
        weight = self.module.weight
        if has_hooks(weight):
            return True
        if id(weight) not in self.held:
            edge = get_gradient_edge(weight)
            self.held[id(weight)] = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return self.held[id(weight)]

    def check(self, weight: nn.Parameter) -> None:
        """Raises where the module or the weight of a forward is no longer the stage's."""
        is_there = self._parent is None or self._parent._modules.get(self._child) is self.module
        if not is_there or self.module._parameters["weight"] is not weight:
            raise RuntimeError(f"{self.name}: the layer or its weight was replaced between F and I")

    def unit(self, input: Tensor) -> LiveUnit | None:
        """The running unit, if the weight's gradient may go another way than autograd's in it."""
        unit, weight = live_unit(), self.module.weight
        if (
            unit is None
            or (unit.tape is None and unit.adding is None)
            or type(weight) is not nn.Parameter
            or type(input) not in (Tensor, nn.Parameter)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        ):
            return None
        return unit


class To:
    """The weight to whose gradient a layer's backward adds. A plain object: autograd does not look inside.

    The layer gives its weight to ``apply`` as the first tensor, so the graph leads to it as ever.
    """

    __slots__ = ("adding", "weight")

    def __init__(self, weight: nn.Parameter, adding: Adding) -> None:
        self.weight, self.adding = weight, adding

    def gradient(self, ctx: Any, add: Callable[[nn.Parameter], bool], make: Callable[[], Tensor]) -> Tensor | None:
        """In a backward: adds to the weight's gradient and returns None, or returns what autograd is to have.

        Args:
            add: adds to the gradient of a weight; False: it cannot, and has done nothing.
            make: makes the gradient.
        """
        if torch.is_grad_enabled():  # this backward is to be differentiated: all of it is autograd's
            return make()
        try:
            if not torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
                return None  # torch.autograd.grad, or backward(inputs=...), of other tensors
        except RuntimeError:  # torch's answer where autograd.grad names the weight
            return make()
        if has_hooks(self.weight) or not add(self.weight):
            return make()
        self.adding.note(self.weight)
        return None


def has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
