"""Bytes that a pass of a stage allocates beside what its graph keeps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.deferred import deferrable

__all__ = ["measure_workspace"]


def measure_workspace(
    stage: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] | None,
) -> tuple[float, float, float]:
    """Runs a forward and its backward, and again with the backward as I.

    Gradients of the inputs count, those of the parameters do not: they are there already, as in a step's later units.

    Args:
        inputs: of one segment, outside of a step; leaves.
        loss: of the stage's output, for a last stage.
    Returns:
        Bytes of one unit: most that F allocates and gives back; most that B holds beyond what was there; most that I
        holds beyond that, what it leaves to W included.
    """
    _pass_bytes(stage, inputs, loss, nullcontext())  # makes the gradients of the parameters
    forward, backward = _pass_bytes(stage, inputs, loss, nullcontext())
    return forward, backward, _pass_bytes(stage, inputs, loss, _leaving_weights(stage))[1]


def _pass_bytes(
    stage: nn.Module,
    inputs: tuple[Tensor, ...],
    loss: Callable[[Any], Tensor] | None,
    way: AbstractContextManager[None],
) -> tuple[float, float]:
    """Bytes that a forward gives back, and that its backward holds beyond what was there."""
    backward = 0.0
    with way:
        device = inputs[0].device
        output, most, end = _allocated(lambda: stage(*inputs) if loss is None else loss(stage(*inputs)), device)
        roots = [x for x in (output if isinstance(output, tuple) else (output,)) if x.requires_grad]
        if roots:
            back = partial(torch.autograd.backward, roots, [torch.ones_like(x) for x in roots])
            backward = _allocated(back, device)[1]
    for x in inputs:
        x.grad = None
    return most - end, backward


@contextmanager
def _leaving_weights(stage: nn.Module) -> Iterator[None]:
    """Within, layers whose weights' gradients a split backward defers make none, and their inputs and the gradients of
    their outputs stay, as W needs them."""
    left: list[Any] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        left.append(inputs)
        if output.requires_grad:
            output.register_hook(left.append)  # type: ignore[no-untyped-call] # torch's has no types

    layers = [layer for layer in deferrable(stage) if layer.weight.requires_grad]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    for layer in layers:
        layer.weight.requires_grad_(False)
    try:
        yield
    finally:
        for hook, layer in zip(hooks, layers, strict=True):
            hook.remove()
            layer.weight.requires_grad_()


def _allocated(run: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """Runs it; returns its result, the most bytes allocated beyond those at its begin, and those at its end."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return result, float(peak - before), float(after - before)
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
