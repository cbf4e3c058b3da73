"""Do arguments of a step that come from one autograd graph get the gradients of the whole model?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, a: Any = None, b: Tensor | None = None) -> Tensor:
        x = self.linear(x)
        if isinstance(a, dict):
            a, b = a["a"], a["b"]
        return x if a is None or b is None else x * a + b


def squares(y: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (y - target).square().sum(), target.numel()


# (theta, inputs, target) -> what a step is given: each exp, sin or cos keeps what a second backward would miss.
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Any, dict[str, Any], Any]]] = {
    "two keyword arguments": lambda t, x, y: (x, {"a": (s := t.exp()).sin(), "b": s.cos()}, y),
    "a list of micro-batches": lambda t, x, y: (list((x * t.exp()).chunk(2)), {}, list(y.chunk(2))),
    "inputs and keyword arguments": lambda t, x, y: (x * (s := t.exp()), {"a": s.sin(), "b": s.cos()}, y),
    "sliced ones": lambda t, x, y: (x, {"a": (s := x * t.exp()).sin(), "b": s.cos()}, y),
    "one tensor twice": lambda t, x, y: (x, {"a": (s := t.exp()), "b": s}, y),
    "a parameter, and what is made of it": lambda t, x, y: (x, {"a": t, "b": t.exp()}, y),
    "a dict of both": lambda t, x, y: (x, {"a": {"a": (s := t.exp()).sin(), "b": s.cos()}}, y),
    "inputs and target": lambda t, x, y: (x * (s := t.exp()), {}, y * s.sin()),
    "the target alone": lambda t, x, y: (x, {}, y * t.exp().sin()),
    "one that is not used": lambda t, x, y: (x * (s := t.exp()), {"a": None, "b": s.cos()}, y),
}


@pytest.mark.parametrize("loss_fn", [F.mse_loss, squares])
@pytest.mark.parametrize("name", list(CASES))
def test_gradients_are_those_of_the_whole_model(name: str, loss_fn: Any) -> None:
    torch.manual_seed(0)
    model, theta = Scaled().double(), torch.randn(4, dtype=torch.float64, requires_grad=True)
    x, y = torch.randn(2, 4, 6, 4, dtype=torch.float64)
    inputs, kwargs, target = CASES[name](theta, x, y)
    whole = copy.deepcopy(model)
    output = whole(torch.cat(inputs) if isinstance(inputs, list) else inputs, **kwargs)
    loss = F.mse_loss(output, torch.cat(target) if isinstance(target, list) else target)
    expected = torch.autograd.grad(loss, [theta, *whole.parameters()])

    rule = "slice" if name == "sliced ones" else "replicate"
    engine = PipelineEngine(
        model, num_microbatches=2, num_segments=3, loss_fn=loss_fn, arg_rules={"a": rule, "b": rule}
    )
    inputs, kwargs, target = CASES[name](theta, x, y)
    for times in (1, 2):  # a graph of its own for each step
        engine.step(inputs, target=target, kwargs=kwargs)
        for mine, theirs in zip((theta, *model.parameters()), expected, strict=True):
            torch.testing.assert_close(mine.grad, times * theirs, rtol=1e-10, atol=1e-12)
        inputs, kwargs, target = CASES[name](theta, x, y)


def test_each_rank_has_a_graph_of_its_own() -> None:
    """The first stage's inputs, and the keyword arguments of each rank, depend on a parameter outside the pipeline."""
    torch.manual_seed(0)
    stages, x = [Scaled().double(), Scaled().double()], torch.randn(4, 6, 4, dtype=torch.float64)
    theta = torch.randn(4, dtype=torch.float64)
    whole, own = copy.deepcopy(nn.ModuleList(stages)), theta.clone().requires_grad_()
    shared = own.exp()
    kwargs = {"a": shared.sin(), "b": shared.cos()}
    F.mse_loss(whole[1](whole[0](x * shared, **kwargs), **kwargs), x).backward()

    def work(group: Any) -> Tensor | None:
        outer = theta.clone().requires_grad_()
        shared = outer.exp()
        engine = PipelineEngine(
            stages[group.rank],
            num_microbatches=2,
            num_segments=2,
            loss_fn=F.mse_loss,
            group=group,
            arg_rules={"a": "replicate", "b": "replicate"},
        )
        engine.step(x * shared, target=x, kwargs={"a": shared.sin(), "b": shared.cos()})
        return outer.grad

    first, last = run_ranks(2, work)
    torch.testing.assert_close(first + last, own.grad, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(nn.ModuleList(stages).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
