"""How much does a step of the engine ask of a device, beside attention: by layer and unit, by unit, and by step.

Counted over the stand-in of CUDA's ``addmm`` with a wider result, in a stage of linear layers without biases; attention
is in tests/device/test_cuda_attention.py. Torch alone makes three launches for such a layer: output and two gradients.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from op_counts import launches
from step_trace import lines_of, trace
from torch import Tensor, nn
from wide_products import autograds_sums, wide_products

from seq1f1b import PipelineEngine

HIDDEN = 8


LOSS = {"square", "mean", "div", "pow", "mul"}  # the loss's own, forward and backward


def squares(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def counts(schedule: str, segments: int, layers: int) -> Counter[str]:
    """Launches of a step of two micro-batches, once all has been seen before."""
    torch.manual_seed(0)
    stage = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(layers))).bfloat16()
    engine: Any = PipelineEngine(
        stage, num_microbatches=2, num_segments=segments, loss_fn=squares, schedule=schedule, attention="any"
    )
    x, target = torch.randn(2, 8, HIDDEN).bfloat16(), torch.zeros(2, 8)

    def step() -> None:
        engine.step(x, target=target)
        for parameter in stage.parameters():
            parameter.grad = None

    for _ in range(2):
        step()
    return launches(step)


@pytest.mark.parametrize(("schedule", "is_fused"), [("seq1f1b", True), ("seq1f1b", False), ("seq-zb-h1", True)])
def test_launches_of_a_step(schedule: str, is_fused: bool) -> None:
    """Without the op each layer and unit has four, with the sum of its weight's gradient; before that was summed so."""
    with wide_products() if is_fused else autograds_sums():
        short, deep, long = (counts(schedule, k, layers) for k, layers in ((2, 2), (2, 4), (4, 2)))
    of_two_layers = Counter(deep)
    of_two_layers.subtract(short)
    for_step = Counter(zeros_like=2, copy_=2)  # the float32 gradient, and what of it is rounded at the end
    of_two_layers.subtract(for_step)
    work = +of_two_layers
    assert work.total() == (3 if is_fused else 4) * 2 * 4, work  # two layers in four units
    assert work["addmm" if is_fused else "add_"] == 2 * 4
    of_four_units = Counter(long)
    of_four_units.subtract(short)
    of_four_units.subtract(work)  # of two layers in four units
    rest = {name for name, count in of_four_units.items() if count and name not in LOSS | {"mm", "matmul"}}
    # The first layer's input needs no gradient. I needs a root there, which nothing else gives it.
    assert rest <= ({"zero_"} if schedule == "seq-zb-h1" else set()), of_four_units


def test_the_python_of_a_warm_plain_step_is_read_in_an_hour() -> None:
    found = trace()
    files, functions, calls, _ = found.figures()
    assert files <= 15 and functions <= 60 and calls <= 300, found.figures()
    assert max(map(lines_of, found.calls)) <= 60
