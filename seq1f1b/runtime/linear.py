"""Linear layers of a stage, as they run while a training step does: their weights' gradients go another way.

A whole backward adds the product to the gradient in one call, where the device has one for it (``products.py``). I of a
split backward leaves it to W (``deferred.py``). The layer computes its output as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seq1f1b.runtime import products
from seq1f1b.runtime.gradients import dense
from seq1f1b.runtime.layer import Layer, To, has_hooks

__all__: list[str] = []


class Use(NamedTuple):
    """One call of a layer whose product is left to W. A plain object: autograd does not look for the weight inside."""

    layer: Linear
    weight: nn.Parameter
    tape: Any  # deferred.py: Tape


class Linear(Layer):
    """An ``nn.Linear``."""

    def __init__(self, name: str, module: nn.Linear) -> None:
        super().__init__(name, module)
        self._casts: dict[int, tuple[Any, Any, Tensor]] = {}  # for autocast, by id: a weight, what it was, and its copy

    def forget(self) -> None:
        super().forget()
        self._casts.clear()

    def takes(self, dtype: torch.dtype) -> bool:
        return products.takes(self.module.weight, dtype)

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling():  # what a compiled backward keeps may be overwritten
            return F.linear(input, weight, bias)
        unit = self.unit(input)
        if unit is None:
            return F.linear(input, weight, bias)
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        output: Tensor
        # DDP holds the nodes of its weights, and takes their gradients after W.
        is_hooked = self.is_hooked(weight) if self.adds else has_hooks(weight)
        if unit.tape is not None and self.waits and not is_hooked:
            value = weight.detach()
            if dtype is not None:
                input, value, bias = autocast(input, dtype), self._autocast(weight, dtype), autocast(bias, dtype)
            is_seen = input.requires_grad or (bias is not None and bias.requires_grad)
            anchor = None if is_seen else torch.zeros((), device=input.device, requires_grad=True)
            output = _leave(input, bias, anchor, value, Use(self, weight, unit.tape))
            return output
        if unit.added is None or not self.may_add(dtype or input.dtype):
            return F.linear(input, weight, bias)
        cast = None
        if dtype is not None:
            input, cast, bias = autocast(input, dtype), self._autocast(weight, dtype), autocast(bias, dtype)
        output = _add(weight, input, bias, cast, To(weight, unit.added))
        return output

    def _autocast(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The weight in autocast's dtype, cast once per step as autocast does: the layer may be given several."""
        key = weight.data_ptr(), weight._version, dtype
        known = self._casts.get(id(weight))
        if known is None or known[1] != key:
            known = self._casts[id(weight)] = weight, key, autocast(weight.detach(), dtype)
        return known[2]


class _Leaving(torch.autograd.Function):
    """Leaves the weight's gradient to a tape.

    The weight comes as a value that autograd does not see, so that nothing of its own fires at I. ``anchor`` gives the
    output a graph where nothing else does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        # A product may come out otherwise, in its last bits, of a weight that needs no gradient.
        return _output(x, use.weight if value.dtype == use.weight.dtype else value, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), dy = ctx.saved_tensors, dense(dy)
        dx = dy @ value if ctx.needs_input_grad[0] else None
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        ctx.use.tape.note(ctx.use, x, dy)
        return dx, db, None, None, None


class _Adding(torch.autograd.Function):
    """Adds the weight's gradient in its own backward, where autograd would have added it; else returns it.

    ``cast`` is the weight in autocast's dtype. The weight comes first, for its place among the next functions.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, x: Tensor, bias: Tensor | None, cast: Tensor | None, to: To) -> Tensor:
        ctx.save_for_backward(weight, x, *([] if cast is None else [cast]))
        ctx.to = to
        return _output(x, weight if cast is None else cast, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (weight, x, *cast), dy = ctx.saved_tensors, dense(dy)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        value = weight.to(dy.dtype) if not cast or torch.is_grad_enabled() else cast[0]
        dx = (rows @ value).view(x.shape) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        dw = ctx.to.gradient(ctx, lambda w: products.add(w, flat, rows), lambda: (rows.t() @ flat).to(weight.dtype))
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
