"""``aten::addmm.dtype_out`` on the CPU, in place of CUDA's: engines add weight gradients as they do on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from seq1f1b.engine import split_backward

Shape = tuple[int, int, int]
"""Tokens, inputs and outputs of a product."""


@contextmanager
def wide_products() -> Iterator[list[Shape]]:
    """Within, CPU tensors go the way of CUDA tensors; the list gets every call."""
    calls: list[Shape] = []

    def addmm(
        self: Tensor, a: Tensor, b: Tensor, dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1, out: Tensor
    ) -> Tensor:
        assert a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16), "16-bit operands"
        assert self.dtype == dtype == out.dtype == torch.float32 and (beta, alpha) == (1, 1)
        assert a.dim() == b.dim() == 2 and out.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0] > 0
        assert not any(t.requires_grad for t in (self, a, b, out) if torch.is_grad_enabled())
        calls.append((a.shape[1], b.shape[1], a.shape[0]))
        return out.copy_(self.double() + a.double() @ b.double())

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CPU")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(split_backward, "are_one_call", lambda device: True)
            yield calls
    finally:
        library._destroy()


@contextmanager
def autograds_sums() -> Iterator[None]:
    """Within, autograd makes and adds every gradient, as on a device without the op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_backward, "are_one_call", lambda device: False)
        yield
