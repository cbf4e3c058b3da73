"""Checks each of our kernels at its first use in the process: once for each kernel, dtype, head size and device.

Nobody can test every GPU and compiler in advance. A warning names each wrong kernel, and the process does not use the
kernel again. ``attention_proof.py`` has the cases of attention, ``attention_parts.py`` those of the kernels around it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

__all__: list[str] = []


class Use(NamedTuple):
    """A kernel in one use: every dtype, head size and device needs a check of its own."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    device: torch.device

    def __str__(self) -> str:
        heads = self.head_dim if self.head_dim == self.v_head_dim else f"{self.head_dim} and {self.v_head_dim}"
        return f"{self.kernel} ({str(self.dtype).removeprefix('torch.')}, heads of {heads})"


results: dict[Use, bool] = {}  # of the checks in this process
lock = threading.Lock()


def holds(use: Use, prove: Callable[[], None], instead: str) -> bool:
    """Returns whether the kernel is right, after a check at the first call.

    Returns False without a check while a CUDA graph is captured; a later call checks.

    Args:
        prove: raises if the kernel is wrong or does not run.
        instead: what takes the place of a wrong kernel, for the warning.
    """
    if use not in results and is_capturing():
        return False
    with lock:
        if use not in results:
            try:
                prove()
                results[use] = True
            except Exception as error:
                results[use] = False
                _warn(use, error, instead)
    return results[use]


def _warn(use: Use, error: Exception, instead: str) -> None:
    name = torch.cuda.get_device_name(use.device) if use.device.type == "cuda" else "this machine"
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    warnings.warn(
        f"the CUDA kernel {use} failed its check on {use.device}, {name}: {first}. {instead} take its place there. "
        "Install seq1f1b again to build its kernels anew, or set SEQ1F1B_CUDA_KERNELS=library to do without them",
        stacklevel=2,
    )


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured. A check must not run then: it waits for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Surrounds a check: no gradients, no autocast, and a new stream, as earlier work may wait for another rank."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call] # no types
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield


def numbers() -> Callable[..., Tensor]:
    """Returns a function that makes random tensors of given sizes on the CPU: float32, equal in each process."""
    return functools.partial(
        torch.randn, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float32, device="cpu"
    )


def memory_of(t: Tensor) -> Tensor:
    """Returns the tensor's whole storage as one dimension."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
