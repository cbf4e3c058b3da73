"""Linear layers of a stage, as they run while a training step does: their weights' gradients go another way.

A whole backward adds the product to the gradient in one call, where the device has one for it (``products.py``). I of a
split backward leaves it to W (``deferred.py``). The layer computes its output as always.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from seq1f1b.runtime import products
from seq1f1b.runtime.compiled import runs_compiled
from seq1f1b.runtime.data_parallel import is_reduced
from seq1f1b.runtime.unit import live_unit

__all__: list[str] = []

_WIDEST = 8  # times as many outputs as inputs: of a wider layer, a head, the output gradients would fill the memory


class Use(NamedTuple):
    """One call of a layer in a unit's forward. A plain object: autograd does not look for the weight inside."""

    layer: Layer
    weight: nn.Parameter
    tape: Any  # deferred.py: Tape, to which the product is left


class Adding:
    """Which layers add their products to gradients themselves: chosen at the first call in a unit's forward.

    So a checkpoint, which computes a part of the forward again, finds the same choice.

    Args:
        added: gets the elements of every weight for which a layer does, by the weight's id.
    """

    def __init__(self, added: dict[int, int]) -> None:
        self.added = added
        self._chosen: dict[Layer, bool] = {}

    def is_for(self, layer: Layer, dtype: torch.dtype) -> bool:
        """Whether the layer adds a product of operands of this dtype."""
        if layer not in self._chosen:
            self._chosen[layer] = layer.adds and not layer.is_hooked and products.takes(layer.module.weight, dtype)
        return self._chosen[layer]


class Layer:
    """A linear layer of a stage, for the life of an engine: compiled code that calls it sees the same object.

    Attributes:
        waits: whether it may leave its product to W.
        adds: whether it may add its product itself.
    """

    waits = adds = True

    def __init__(self, name: str, parent: nn.Module | None, child: str, module: nn.Linear) -> None:
        self.name, self.module = name, module
        self._parent, self._child = parent, child
        self._cast: tuple[int, Tensor] | None = None  # for autocast: the weight's version, and its copy
        self._is_hooked: bool | None = None

    def is_at(self, place: Place) -> bool:
        return self.module is place.layer and self._parent is place.parent and self._child == place.child

    def forget(self) -> None:
        """At the end of a step."""
        self._cast = self._is_hooked = None

    @property
    def is_hooked(self) -> bool:
        """Whether somebody waits for the weight's gradient: then autograd itself must accumulate it.

        Hooks of the node that accumulates live as long as somebody in Python holds it.
        """
        if _has_hooks(self.module.weight):
            return True
        if self._is_hooked is None:
            edge = get_gradient_edge(self.module.weight)
            self._is_hooked = sys.getrefcount(edge.node) > 2  # the edge's, and the argument's
        return self._is_hooked

    def check(self, weight: nn.Parameter) -> None:
        """Raises where the module or the weight of a forward is no longer the stage's."""
        is_there = self._parent is None or self._parent._modules.get(self._child) is self.module
        if not is_there or self.module._parameters["weight"] is not weight:
            raise RuntimeError(f"{self.name}: the layer or its weight was replaced between F and I")

    def forward(self, input: Tensor) -> Tensor:
        """In place of the module's own forward, while the step runs."""
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling():  # what a compiled backward keeps may be overwritten
            return F.linear(input, weight, bias)
        unit = live_unit()
        if (
            unit is None
            or (unit.tape is None and unit.adding is None)
            or type(weight) is not nn.Parameter
            or type(input) not in (Tensor, nn.Parameter)
            or not weight.requires_grad
            or not torch.is_grad_enabled()
            or torch._C._are_functorch_transforms_active()
        ):
            return F.linear(input, weight, bias)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if unit.tape is not None and self.waits:
            value = weight.detach()
            if dtype is not None:
                input, value, bias = autocast(input, dtype), self._autocast(value, dtype), autocast(bias, dtype)
            is_seen = input.requires_grad or (bias is not None and bias.requires_grad)
            anchor = None if is_seen else torch.zeros((), device=input.device, requires_grad=True)
            output: Tensor = _leave(input, bias, anchor, value, Use(self, weight, unit.tape))
            return output
        if unit.adding is None or not unit.adding.is_for(self, dtype or input.dtype):
            return F.linear(input, weight, bias)
        cast = None
        if dtype is not None:
            input, cast, bias = autocast(input, dtype), self._autocast(weight.detach(), dtype), autocast(bias, dtype)
        output = _add(weight, input, bias, cast, (weight, unit.adding.added))
        return output

    def _autocast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in autocast's dtype, cast once per step as autocast does."""
        if self._cast is None or self._cast[0] != value._version or self._cast[1].dtype != dtype:
            self._cast = value._version, autocast(value, dtype)
        return self._cast[1]


class _Leaving(torch.autograd.Function):
    """Leaves the weight's gradient to a tape.

    The weight comes as a value that autograd does not see, so that nothing of its own fires at I. ``anchor`` gives the
    output a graph where nothing else does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        return _output(x, value, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, value = ctx.saved_tensors
        dx = dy @ value if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        ctx.use.tape.note(ctx.use, x, dy)
        return dx, db, None, None, None


class _Adding(torch.autograd.Function):
    """Adds the weight's gradient in its own backward, where autograd would have added it; else returns it.

    ``cast`` is the weight in autocast's dtype. The weight comes first, for its place among the next functions.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, x: Tensor, bias: Tensor | None, cast: Tensor | None, to: Any) -> Tensor:
        ctx.save_for_backward(weight, x, *([] if cast is None else [cast]))
        ctx.to = to  # the parameter itself, for its gradient, and Adding.added
        return _output(x, weight if cast is None else cast, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, *cast = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        is_differentiated = torch.is_grad_enabled()  # the graph of this backward is wanted: all of it is autograd's
        value = weight.to(dy.dtype) if is_differentiated or not cast else cast[0]
        dx = dy @ value if ctx.needs_input_grad[1] else None
        db = flat.sum(0) if ctx.needs_input_grad[2] else None
        dw = None
        fate = "handed out" if is_differentiated else _fate(ctx)
        if fate:
            x, (parameter, added) = x.reshape(-1, x.shape[-1]), ctx.to
            if fate == "added" and not _has_hooks(parameter) and products.add(parameter, x, flat):
                added[id(parameter)] = parameter.numel()
            else:
                dw = (flat.t() @ x).to(weight.dtype)
        return dw, dx, db, None, None


_leave: Callable[..., Tensor] = _Leaving.apply
_add: Callable[..., Tensor] = _Adding.apply


def _output(x: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    output = F.linear(x, value, bias)
    # With more than two dimensions the output is a view of the product, which no caller may change in place.
    return output if output._base is None else torch.ops.aten._unsafe_view(output._base, output.shape)


def autocast(tensor: Any, dtype: torch.dtype) -> Any:
    """Casts what autocast would cast: floating tensors but doubles."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _fate(ctx: Any) -> str:
    """What becomes of the weight's gradient in this backward: "added" to ``.grad``, "handed out", or "" if nothing.

    ``torch.autograd.grad``, and ``backward(inputs=...)``, go to the tensors that they name.
    """
    try:
        return "added" if torch._C._will_engine_execute_node(ctx.next_functions[0][0]) else ""
    except RuntimeError:  # torch's answer where autograd.grad names the weight itself
        return "handed out"


# -- which layers ------------------------------------------------------------------------------------------------------


class Layers:
    """The linear layers of a stage. They are looked for in each step, for users change modules in between."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Layer, Callable[..., Tensor]]] = {}  # with its forward, by the module's id

    @contextmanager
    def replaced(self, stage: Any, losses: Sequence[nn.Module], others: Iterable[nn.Module]) -> Iterator[None]:
        """Within, the layers run as this file says. Compiled modules stay as they are.

        Args:
            stage, losses: modules whose layers are meant. What losses hold leaves nothing to W, nor does a layer that
                shares its weight with anything but a linear layer of the stage.
            others: further modules of the same rank.
        """
        known, self._known = self._known, {}
        roots = [root for root in (stage, *losses) if isinstance(root, nn.Module)]
        for root in roots:
            for place in _places(root, [m for m in (*roots, *others) if m is not root]):
                found = known.get(id(place.layer))
                if found is None or not found[0].is_at(place):
                    layer = Layer(place.name, place.parent, place.child, place.layer)
                    found = layer, layer.forward
                found[0].waits, found[0].adds = place.waits and root is stage, place.adds
                self._known[id(place.layer)] = found
        for layer, forward in self._known.values():
            layer.module.__dict__["forward"] = forward  # no attribute of torch's: it would be looked at as a submodule
        try:
            yield
        finally:
            for layer, _ in self._known.values():
                layer.module.__dict__.pop("forward", None)
                layer.forget()


class Place(NamedTuple):
    """Where a linear layer stands."""

    name: str
    parent: nn.Module | None  # None: the layer is the stage
    child: str
    layer: nn.Linear
    waits: bool  # it may leave its product to W
    adds: bool  # it may add its product itself


def deferrable(module: Any) -> list[nn.Linear]:
    """The linear layers that leave their weights' gradients to W where no other module has a part in them."""
    return [place.layer for place in _places(module, ()) if place.waits] if isinstance(module, nn.Module) else []


def _places(module: nn.Module, others: Sequence[nn.Module]) -> Iterator[Place]:
    shared: set[int] = set()  # parameters of other modules than linear layers
    reduced: set[int] = set()  # parameters for whose gradients DDP or FSDP wait
    for root in (module, *others):
        for owner in root.modules():
            if not _is_linear(owner) or root is not module:
                shared.update(map(id, owner._parameters.values()))
            if is_reduced(owner):
                reduced.update(map(id, owner.parameters()))
    for name, parent, child, layer in _uncompiled("", None, "", module):
        if _is_linear(layer):
            weight, is_wide = id(layer._parameters["weight"]), layer.out_features > _WIDEST * layer.in_features
            yield Place(name, parent, child, layer, weight not in shared and not is_wide, weight not in reduced)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A subclass may compute something else, and so may an instance with a forward or a weight of its own."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and "weight" in module._parameters


def _uncompiled(
    name: str, parent: nn.Module | None, child: str, module: nn.Module
) -> Iterator[tuple[str, nn.Module | None, str, nn.Module]]:
    """The module and its parts, but for what runs as compiled code: the name of each, its parent, its name there."""
    if runs_compiled(module):
        return
    yield name, parent, child, module
    for own, part in module._modules.items():
        if part is not None:
            yield from _uncompiled(f"{name}.{own}" if name else own, module, own, part)
