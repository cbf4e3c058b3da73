"""What a pass of a stage allocates for a while, beside what its graph keeps: measured on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["measure_workspace"]


def measure_workspace(
    stage: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] | None,
) -> float:
    """Most bytes that a forward allocates and gives back, or that its backward holds beyond what was there.

    Gradients of the inputs count, those of the parameters do not: they are there already, as in a step's later units.

    Args:
        inputs: of one segment, outside of a step; leaves.
        loss: of the stage's output, for a last stage.
    """
    if any(x.device.type != "cpu" for x in inputs):
        return 0.0
    found = 0.0
    for _ in range(2):  # the first time makes the gradients of the parameters
        output, most, end = _allocated(lambda: stage(*inputs) if loss is None else loss(stage(*inputs)))
        found = most - end
        roots = [x for x in (output if isinstance(output, tuple) else (output,)) if x.requires_grad]
        if roots:
            back = partial(torch.autograd.backward, roots, [torch.ones_like(x) for x in roots])
            found = max(found, _allocated(back)[1])
        for x in inputs:
            x.grad = None
    return found


def _allocated(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it returns; the most bytes that were allocated beyond those at its begin, and those at its end."""
    with (
        _without_noise(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, float(most), float(now)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Torch's profiler writes a line to standard error as it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
