"""Proofs at first use: a kernel, or a way by torch's ops, computes a small case, which is held to float64.

No record can say that a kernel is right on a GPU that nobody had, or from a compiler that came later. So it is used
where it has just been seen to be right: once in a process for each kernel, dtype, head size and device. A warning names
one that is wrong, and it is not used again.
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
    """A kernel or a way as it was proven: in another dtype, of other heads or on another device it is proven anew."""

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
    """Which kernels of a family have proven themselves in this process.

    Args:
        instead: for the warning of a kernel that failed: what takes its place, and the remedy.
        family: for that warning: what stands before the kernel's name.
    """

    PATIENCE = 10.0  # seconds for another thread's check, which may wait for what this thread has yet to launch

    def __init__(self, instead: str, family: str = "") -> None:
        self.instead, self.family = instead, family
        self.lock = threading.Lock()
        self.results: dict[Use, bool] = {}

    def holds(self, use: Use, prove: Callable[[], None]) -> bool:
        """Whether the kernel has proven itself, now or before.

        While a CUDA graph is captured, or another thread's check takes long, an unproven kernel is not to be used; a
        later call finds out.

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
    """Whether a CUDA graph is captured here: no place for a check, which waits for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A check runs so: without gradients or autocast, and on a stream of its own, so that it waits for nothing that was
    launched before, which may wait for another rank."""
    of_device = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), of_device:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            yield


def numbers() -> Callable[..., Tensor]:
    """Makes random numbers for a case, from sizes: equal in each process, in float32 and on the CPU, whatever torch's
    defaults are. The program's own generators stay as they are."""
    generator = torch.Generator("cpu").manual_seed(1)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
