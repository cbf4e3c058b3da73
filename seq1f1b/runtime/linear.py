"""Linear layers of a stage, as they run while a training step does: their weights' gradients go another way.

Autograd makes the product in the dtype of its operands, casts it to the gradient's and adds it: three passes over a
tensor of the weight's size in every unit, two of them in float32 (``grad_dtype``). ``aten::addmm`` with a wider result
needs one. Torch has that op on CUDA alone; there B adds the product itself. I of a split backward leaves it to W
(``deferred.py``). The layer computes its output as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seq1f1b.runtime.gradients import REDUCED, dense
from seq1f1b.runtime.layer import Layer, Use, autocast, is_plain

__all__: list[str] = []

_BLOCK = 1 << 18  # elements of a temporary on the CPU, where a gradient is wider than its product: so it stays in cache


class Linear(Layer):
    """An ``nn.Linear``."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias, unit = self.module.weight, self.module.bias, self.unit(input)
        tape = unit.tape if unit is not None and self.waits else None
        if unit is None or (tape is None and not (unit.added is not None and self.adds)):
            return F.linear(input, weight, bias)
        value, kind = weight.detach(), input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, value, bias = autocast(input, dtype), self.weights.cast(weight, dtype), autocast(bias, dtype)
        edge = weight
        if tape is not None:
            is_seen = input.requires_grad or (bias is not None and bias.requires_grad)
            edge = None if is_seen else torch.zeros((), device=input.device, requires_grad=True)
        output: Tensor = _product(edge, input, bias, value, Use(self, weight, tape, unit.added))
        return output


class _Product(torch.autograd.Function):
    """``F.linear``, whose backward adds the weight's gradient itself, or leaves it to a tape.

    The first argument is the weight where B adds. For a tape the graph must not know the weight, so that nothing of its
    own fires at I; where nothing else gives the output a graph, another leaf does.
    """

    @staticmethod
    def forward(ctx: Any, edge: Tensor | None, x: Tensor, bias: Tensor | None, value: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.use = use
        # A product may come out otherwise, in its last bits, of a weight that needs no gradient.
        output = F.linear(x, use.weight if value.dtype == use.weight.dtype else value, bias)
        # With more than two dimensions the output is a view of the product, which no caller may change in place.
        return output if output._base is None else torch.ops.aten._unsafe_view(output._base, output.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), dy, use = ctx.saved_tensors, dense(dy), ctx.use
        if torch.is_grad_enabled():  # this backward is to be differentiated
            value = use.weight.to(dy.dtype)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (rows @ value).view(x.shape) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        if use.tape is not None:
            use.tape.note(use, flat.detach(), rows)
            return None, dx, db, None, None
        dw = use.gradient(ctx, lambda w: add_product(w, flat, rows), lambda: (rows.t() @ flat).to(use.weight.dtype))
        return dw, dx, db, None, None


_product: Callable[..., Tensor] = _Product.apply


def are_one_call(device: torch.device) -> bool:
    """Whether torch adds products of 16-bit operands to float32 in one call there, bfloat16 among them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def add_product(weight: nn.Parameter, x: Tensor, dy: Tensor) -> bool:
    """Adds ``dy.t() @ x`` to the weight's gradient; False: only autograd can, and nothing has been done.

    Args:
        x: (tokens, inputs).
        dy: (tokens, outputs).
    """
    gradient = weight.grad
    dtype = weight.grad_dtype or weight.dtype if gradient is None else gradient.dtype
    if gradient is None and dtype == dy.dtype:
        weight.grad = dy.t() @ x
        return True
    if gradient is None:
        gradient = weight.grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if not is_plain(gradient):
        return False
    if dtype == dy.dtype:
        gradient.addmm_(dy.t(), x)
    elif dtype == torch.float32 and dy.dtype in REDUCED and len(x) and are_one_call(dy.device):
        torch.ops.aten.addmm.dtype_out(gradient, dy.t(), x, dtype, out=gradient)
        torch.autograd.graph.increment_version(gradient)  # by which a step tells whether a gradient has been added to
    else:
        rows = max(1, _BLOCK // max(1, x.shape[1])) if dy.device.type == "cpu" else dy.shape[1]
        for i in range(0, dy.shape[1], rows):
            gradient[i : i + rows].add_(dy[:, i : i + rows].t() @ x)
    return True
