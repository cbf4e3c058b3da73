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
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from seq1f1b.runtime.unit import LiveUnit, live_unit

__all__: list[str] = []


class Layer:
    """A layer, for the life of an engine: compiled code that calls it sees the same object.

    Attributes:
        waits: whether it may leave its product to W.
        adds: whether it may add to the gradient itself.
        held: by a weight's id, whether somebody holds the node that accumulates its gradient. Shared by all layers of a
            stage, and asked before a graph of the stage holds it, too.
    """

    waits = adds = True

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module
        self.held: dict[int, bool] = {}

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        raise NotImplementedError

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it can add what it computes in this dtype to the weight's gradient."""
        raise NotImplementedError

    def may_add(self, dtype: torch.dtype) -> bool:
        """Whether it adds to the weight's gradient itself what it computes in this dtype."""
        return self.adds and not self.is_hooked(self.module.weight) and self.takes(dtype)

    def forget(self) -> None:
        """At the end of a step."""
        self.held = {}

    def is_hooked(self, weight: Tensor) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it.
        """
        if has_hooks(weight):
            return True
        if id(weight) not in self.held:
            edge = get_gradient_edge(weight)
            self.held[id(weight)] = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return self.held[id(weight)]

    def unit(self, input: Tensor) -> LiveUnit | None:
        """The running unit, if the weight's gradient may go another way than autograd's in it."""
        unit, weight, bias = live_unit(), self.module.weight, getattr(self.module, "bias", None)
        if (
            unit is None
            or (unit.tape is None and unit.added is None)
            or type(weight) is not nn.Parameter
            or not all(is_plain(t) for t in (weight, input, bias) if t is not None)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
        ):
            return None
        return unit


class To:
    """The weight to whose gradient a layer's backward adds. A plain object: autograd does not look inside.

    The layer gives its weight to ``apply`` as the first tensor, so the graph leads to it as ever.

    Args:
        added: gets the weight's elements, by its id.
    """

    __slots__ = ("added", "weight")

    def __init__(self, weight: nn.Parameter, added: dict[int, int]) -> None:
        self.weight, self.added = weight, added

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
        self.added[id(self.weight)] = self.weight.numel()
        return None


def is_plain(tensor: Any) -> bool:
    """Whether it is a strided, real tensor of torch's own type: what products and sums of rows here are written for."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_strided and not (tensor.is_complex() or tensor.is_nested)


def has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
