"""Weight gradients of linear layers by the product itself: one call multiplies, and adds the result to the gradient.

Autograd makes the product in the dtype of its operands, casts it to the gradient's and adds it: three passes over a
tensor of the weight's size in every unit, two of them in float32 (``grad_dtype``). ``aten::addmm`` with a wider result
needs one. Torch has that op on CUDA alone; elsewhere, and where it computes something else, gradients are summed as
ever.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from seq1f1b import proof
from seq1f1b.runtime.gradients import REDUCED
from seq1f1b.runtime.layer import is_plain

__all__: list[str] = []

WITH_WIDE_RESULT = ("cuda",)
"""Types of devices on which ``aten::addmm.dtype_out`` adds products of 16-bit operands to float32."""

_SCHEMA = (
    "aten::addmm.dtype_out(Tensor self, Tensor mat1, Tensor mat2, ScalarType out_dtype, *, Scalar beta=1, "
    "Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)"
)
_BLOCK = 1 << 18  # elements of a temporary on the CPU, where a gradient is wider than its product: so it stays in cache

_proofs = proof.Proofs(
    "Autograd makes these gradients in each unit, casts and adds them, which costs some percent of a step.",
    remedy="Torch 2.10 to 2.13 built for CUDA are known to do it right",
)


def are_one_call(device: torch.device) -> bool:
    """Whether products of 16-bit operands can be added to float32 in one call: the first answer computes some."""
    return is_proven("torch's op aten::addmm.dtype_out", device, _prove)


def is_proven(way: str, device: torch.device, prove: Callable[[torch.device], None]) -> bool:
    """Whether a way of adding to gradients is for the device, and has computed there what it should."""
    if device.type not in WITH_WIDE_RESULT or torch.version.hip:
        return False
    return _proofs.holds(proof.Use(way, torch.float32, 0, 0, device), partial(_apart, device, prove))


def _apart(device: torch.device, prove: Callable[[torch.device], None]) -> None:
    with proof.apart(device):
        prove(device)


def _prove(device: torch.device) -> None:
    if str(torch.ops.aten.addmm.dtype_out._schema) != _SCHEMA:
        raise RuntimeError(f"its schema is {torch.ops.aten.addmm.dtype_out._schema}")
    for dtype in REDUCED:
        dy, x = (_waves(40, columns, 0.7, device).to(dtype) for columns in (48, 64))
        total = _waves(48, 64, 0.3, device)
        exact = total.double() + dy.double().t() @ x.double()
        _add_wide(total, x, dy)
        if not bool((total - exact).abs().max() <= 1e-5 * exact.abs().max()):
            raise AssertionError(f"sums of products in {dtype} are wrong")


def _waves(rows: int, columns: int, step: float, device: torch.device) -> Tensor:
    return torch.cos(step * torch.arange(rows * columns, device=device, dtype=torch.float32)).view(rows, columns)


def _add_wide(gradient: Tensor, x: Tensor, dy: Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(gradient, dy.t(), x, gradient.dtype, out=gradient)
    torch.autograd.graph.increment_version(gradient)  # by which a step tells whether a gradient has been added to


def takes(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`add` adds products of this dtype to the weight's gradient, on a device of :func:`are_one_call`."""
    wanted = dtype_of_sum(weight)
    return dtype == wanted or (dtype in REDUCED and wanted == torch.float32)


def dtype_of_sum(weight: Tensor) -> torch.dtype:
    """The dtype of the weight's gradient: of the one that is there, or of the first one to come."""
    return weight.grad_dtype or weight.dtype if weight.grad is None else weight.grad.dtype


def add(weight: nn.Parameter, x: Tensor, dy: Tensor) -> bool:
    """Adds ``dy.t() @ x`` to the weight's gradient in one call; False: that cannot be, and nothing has been done.

    Args:
        x: (tokens, inputs).
        dy: (tokens, outputs).
    """
    gradient = weight.grad
    if not x.numel() or not dy.numel() or not takes(weight, dy.dtype):
        return False
    if gradient is None and dtype_of_sum(weight) == dy.dtype:
        weight.grad = dy.t() @ x
        return True
    if gradient is None:
        gradient = weight.grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    if not is_plain(gradient):
        return False
    if gradient.dtype == dy.dtype:
        gradient.addmm_(dy.t(), x)
    else:
        _add_wide(gradient, x, dy)
    return True


def accumulate(weight: nn.Parameter, x: Tensor, dy: Tensor, is_hooked: bool) -> None:
    """Adds the product to the weight's gradient as autograd would; by autograd itself where that is more than a sum."""
    if is_hooked or not (weight.grad is None or is_plain(weight.grad)):
        torch.autograd.backward([weight], [(dy.t() @ x).to(weight.dtype)])
        return
    dtype = dtype_of_sum(weight)
    if (dtype == dy.dtype or are_one_call(dy.device)) and add(weight, x, dy):
        return
    if weight.grad is None:
        weight.grad = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    rows = max(1, _BLOCK // x.shape[1]) if dy.device.type == "cpu" else dy.shape[1]
    for i in range(0, dy.shape[1], rows):
        weight.grad[i : i + rows].add_(dy[:, i : i + rows].t() @ x)
