"""Checks each kernel against float64 at its first use, on a small case.

Nobody can test every GPU and compiler in advance. So a kernel, or a replacement by torch's ops, must pass a check in
the process before its use: once for each kernel, dtype, head size and device. A warning names each wrong kernel, and
the process does not use the kernel again.
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

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Use(NamedTuple):
    """A kernel in one use: every dtype, head size and device needs a check of its own."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    device: torch.device

    def __str__(self) -> str:
        heads = self.head_dim if self.head_dim == self.v_head_dim else f"{self.head_dim} and {self.v_head_dim}"
        return f"{self.kernel} ({DTYPES[self.dtype]}, heads of {heads})"


REBUILD = "Install seq1f1b again to build its kernels anew, or set SEQ1F1B_CUDA_KERNELS=library to do without them"


class Proofs:
    """Results of the checks of a family of kernels in the process.

    Args:
        instead: end of the warning about a wrong kernel: the replacement, and the remedy.
        family: beginning of the warning: text before the kernel's name.
    """

    PATIENCE = 10.0  # seconds to wait for another thread's check, which may itself wait for work of this thread

    def __init__(self, instead: str, family: str = "") -> None:
        self.instead, self.family = instead, family
        self.lock = threading.Lock()
        self.results: dict[Use, bool] = {}

    def holds(self, use: Use, prove: Callable[[], None]) -> bool:
        """Returns whether the kernel is right, after a check at the first call.

        Returns False without a check while a CUDA graph is captured, or while another thread's check takes long; a
        later call checks.

        Args:
            prove: raises if the kernel is wrong or does not run.
        """
        found = self.results.get(use)
        if found is not None:
            return found
        if is_capturing() or not self.lock.acquire(timeout=self.PATIENCE):
            return False
        try:
            if use not in self.results:
                prove()
                self.results[use] = True
        except Exception as error:
            self.results[use] = False
            self._warn(use, error)
        finally:
            self.lock.release()
        return self.results[use]

    def _warn(self, use: Use, error: Exception) -> None:
        name = torch.cuda.get_device_name(use.device) if use.device.type == "cuda" else "this machine"
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(
            f"{self.family}{use} failed its check on {use.device}, {name}: {first}. {self.instead}",
            stacklevel=2,
        )


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured. A check must not run then: it waits for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Surrounds a check: no gradients, no autocast, and a new stream, as earlier work may wait for another rank."""
    of_device = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), of_device:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield


def numbers() -> Callable[..., Tensor]:
    """Returns a function that makes random tensors of given sizes on the CPU: float32, equal in each process."""
    generator = torch.Generator("cpu").manual_seed(1)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
