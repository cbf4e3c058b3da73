"""A layer of a stage that adds its weight's gradient itself: what linear layers and embeddings have in common.

Autograd makes a gradient of the weight's size in each unit, casts it to the dtype in which gradients grow, and adds it.
A layer whose backward can add to the gradient in place of that does so while a training step runs. Wherever somebody
waits for the gradient itself, the layer returns it, and autograd does the rest as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from seq1f1b.runtime.unit import LiveUnit, live_unit

__all__: list[str] = []


class Layer:
    """A layer, for the life of an engine.

    Attributes:
        in_step: its forward; one object for all steps, for compiled code that calls the layer looks at it.
        waits: whether it may leave its product to W.
        adds: whether it may add to the gradient itself.
        weights: what the step knows of weights. All layers of a stage share it.
    """

    waits = adds = True
    weights: Weights
    in_step: Callable[[Tensor], Tensor]

    def __init__(self, name: str, module: Any) -> None:
        self.name, self.module = name, module

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        raise NotImplementedError

    def unit(self, input: Tensor) -> LiveUnit | None:
        """The running unit, if the weight's gradient may go another way than autograd's in it."""
        if torch.compiler.is_compiling():  # what a compiled backward keeps may be overwritten
            return None
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
            # DDP holds the nodes of its weights, and takes their gradients after W.
            or (self.weights.is_hooked(weight) if self.adds else has_hooks(weight))
        ):
            return None
        return unit


class Weights:
    """The weights of a stage as one step knows them, by their ids."""

    def __init__(self) -> None:
        self._held: dict[int, bool] = {}
        self._casts: dict[int, tuple[Any, Any, Tensor]] = {}  # for autocast: a weight, what it was, and its copy

    def is_hooked(self, weight: Tensor) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it. The first answer for a weight
        must come before a graph of the stage holds its node, too.
        """
        if id(weight) not in self._held:
            edge = get_gradient_edge(weight)
            self._held[id(weight)] = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return has_hooks(weight) or self._held[id(weight)]

    def cast(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The weight in autocast's dtype, cast once per step as autocast does."""
        key = weight.data_ptr(), weight._version, dtype
        known = self._casts.get(id(weight))
        if known is None or known[1] != key:
            known = self._casts[id(weight)] = weight, key, autocast(weight.detach(), dtype)
        return known[2]


class Use(NamedTuple):
    """One call of a layer. A plain object: autograd does not look for the weight inside.

    Attributes:
        tape: to which I leaves the product (``deferred.py``); None: B adds it.
        added: gets the elements of weights to whose gradients B has added, by the weight's id.
    """

    layer: Layer
    weight: nn.Parameter
    tape: Any
    added: dict[int, int] | None

    def gradient(self, ctx: Any, add: Callable[[nn.Parameter], bool], make: Callable[[], Tensor]) -> Tensor | None:
        """In a B: adds to the weight's gradient and returns None, or returns what autograd is to have.

        The layer has given its weight to ``apply`` as the first tensor, so the graph leads to it as ever.

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
        assert self.added is not None
        self.added[id(self.weight)] = self.weight.numel()
        return None


def autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts what autocast would cast: floating tensors but doubles."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def is_plain(tensor: Any) -> bool:
    """Whether it is a strided, real tensor of torch's own type: what products and sums of rows here are written for."""
    is_strided = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_strided and not (tensor.is_complex() or tensor.is_nested)


def has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
