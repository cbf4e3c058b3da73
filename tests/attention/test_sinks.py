"""Are the gradients of attention sinks right, and do sinks of any size leave no NaN?

test_attention.py and the tests of the kernels have sinks among the options, and the model of support/order_runs.py has
them in every kind of step; here is what a parameter adds.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from attention_runs import OPTIONS, formula, gradients, random_qkv, segmented
from simulated_step import SimulatedStep
from slices import pairs_of
from torch import Tensor

from seq1f1b.attention.causal import causal_attention


@pytest.mark.parametrize(
    "sizes, name, dtype",
    pairs_of(
        [None, [12], [5, 2, 4, 1]], ["none", "all"], [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    ),
    ids=str,
)
def test_gradients_of_sinks(sizes: list[int] | None, name: str, dtype: torch.dtype) -> None:
    """Those of segments and micro-batches add up as those of any parameter, in the parameter's dtype."""
    microbatches, douts = ([random_qkv(4, 2, seed=s + m, dtype=dtype) for m in range(2)] for s in (0, 10))
    options = {key: value for key, value in OPTIONS[name].items() if key != "sinks"}
    narrow = dtype if dtype.itemsize == 2 else torch.float32
    sinks, truth = (
        torch.tensor([0.5, -1.25, 2.0, -0.75], dtype=t, requires_grad=True) for t in (narrow, torch.float64)
    )
    for qkv, dout in zip(microbatches, douts, strict=True):
        formula(*(t.double() for t in qkv), sinks=truth, **options).backward(dout[0].double())
    if sizes is None:
        for qkv, dout in zip(microbatches, douts, strict=True):
            causal_attention(*qkv, layer=0, sinks=sinks, **options).backward(dout[0])
    else:
        segmented(sizes, {**options, "sinks": sinks}, microbatches, [dout[0] for dout in douts])
    assert sinks.grad is not None and sinks.grad.dtype == narrow
    # delta is taken from the stored out; and a sum over segments is rounded to the parameter's dtype after each.
    bound = 4e-6 if narrow == torch.float32 else 8 * torch.finfo(narrow).eps
    torch.testing.assert_close(sinks.grad.double(), truth.grad, rtol=bound, atol=bound * float(truth.grad.abs().max()))


@pytest.mark.parametrize("in_step", [False, True])
def test_frozen_sinks_and_sinks_alone(in_step: bool) -> None:
    qkv, dout = random_qkv(4, 2), random_qkv(4, 2, seed=1)[0]
    sinks = OPTIONS["sinks"]["sinks"].double().requires_grad_()  # type: ignore[attr-defined]
    expected = torch.autograd.grad(formula(*qkv, sinks=sinks), sinks, dout)[0]

    def attend(qkv: list[Tensor], sinks: Tensor) -> None:
        step = SimulatedStep([12])
        with step.unit("F", 0, 0) if in_step else contextlib.nullcontext():
            out = causal_attention(*qkv, layer=0, sinks=sinks)
        with step.unit("B", 0, 0) if in_step else contextlib.nullcontext():
            out.backward(dout)

    attend(qkv, sinks)
    torch.testing.assert_close(sinks.grad, expected, rtol=1e-10, atol=1e-12)
    leaves = [t.clone().requires_grad_() for t in qkv]
    attend(leaves, sinks.detach())
    truth = gradients(lambda *t: formula(*t, sinks=sinks.detach()), *qkv, dout)
    for leaf, exact in zip(leaves, truth[1:], strict=True):
        torch.testing.assert_close(leaf.grad, exact, rtol=1e-10, atol=1e-12)
