"""Runs a step on a GPU: device, stream, messages through host memory, ranges for Nsight Systems.

Transports in host memory (``"shm"``, ``"c10d"``, ranks as threads) copy a message from one GPU to the host and on to
the other GPU: correct on every machine, and as slow as two copies over PCIe for which the host waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from seq1f1b import _C

__all__: list[str] = []


def common_device(modules: Sequence[Any]) -> torch.device:
    """Returns the device of a rank's parameters; the CPU without parameters. Modules on meta never run."""
    devices = {p.device for m in modules if isinstance(m, nn.Module) for p in m.parameters()}
    devices = devices - {torch.device("meta")} or devices
    if len(devices) > 1:
        raise ValueError(f"the stages of one rank lie on several devices: {sorted(map(str, devices))}")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters lie on {device}: the engine runs on the CPU and on CUDA devices")
    if device.type == "cuda" and torch.version.hip:
        raise ValueError(
            f"parameters lie on {device} of ROCm {torch.version.hip}: the engine runs on the CPU and on NVIDIA's GPUs "
            "alone; move the stages to the CPU, where it sends messages by the process group or shared memory"
        )
    return device


@contextmanager
def step_on(device: torch.device) -> Iterator[None]:
    """Surrounds a step on a GPU: backwards run in the rank's own thread, for ranks as threads and for errors of ops."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
        yield


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of free memory of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo", encoding="utf-8") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")), 0)


def stream_of(index: int) -> int:
    """Returns the CUstream on which work on a CUDA device runs now; 0 for the CPU's index -1."""
    return int(torch.cuda.current_stream(index).cuda_stream) if index >= 0 else 0


def through_host(run: Callable[..., Any], device: torch.device, gpu: object) -> Callable[..., Any]:
    """Wraps a unit's callback: received tensors come from host memory, and sent tensors go to host memory.

    Both copies block, so the transport sends only computed data, and overwrites a receive place only after the copy.
    The copies are no part of the unit's time.

    Args:
        gpu: the core's handle.
    """

    def unit(kind: int, stage: int, cell: int, received: Any) -> Any:
        if received is not None:
            received = tuple(
                ([None if t is None else t.to(device) for t in tensors], requires_grad)
                for tensors, requires_grad in received
            )
            _C.device_restart_unit(gpu)
        sent = run(kind, stage, cell, received)
        if sent is None:
            return None
        _C.device_end_unit(gpu)
        return tuple([None if t is None else t.detach().cpu().requires_grad_(t.requires_grad) for t in sent])

    return unit


def in_ranges(run: Callable[..., Any], texts: Mapping[tuple[int, int, int], str]) -> Callable[..., Any]:
    """Wraps a unit's callback in an NVTX range with the unit's text, for Nsight Systems.

    Args:
        texts: units' texts by number of the pass, stage and cell.
    """

    def unit(kind: int, stage: int, cell: int, received: Any) -> Any:
        with torch.cuda.nvtx.range(texts[kind, stage, cell]):
            return run(kind, stage, cell, received)

    return unit
