"""The library of the package's own CUDA kernels, by ctypes, and the launch of attention.

The kernels run on every GPU of Ampere or later, and each is checked at its first use (proofs.py).
``SEQ1F1B_CUDA_KERNELS=own``, for tests and benchmarks, uses them for every possible call, without the check;
``library`` uses none. The environment is read once, at the import of this module.

The library links no CUDA driver: without a GPU it opens, its tables can be read, and every launch fails with CUDA's own
text. The structs are defined in ``kernels/cuda``: kernel_table.h, attention_arguments.h and
attention_parts_arguments.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import warnings
from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from seq1f1b.placement import stream_of

__all__: list[str] = []

LIBRARY = Path(__file__).parents[1] / "libseq1f1b_cuda.so"
ATTENTION = ("attention_forward", "attention_backward")
PARTS = "attention_parts"  # merges and sums of results over ranges of keys; see attention_parts.py
USES = {
    **dict.fromkeys(ATTENTION, "for documents and soft caps, heads of 64 and 128"),
    PARTS: "for results over ranges of keys, which are merged and added up, heads of a multiple of 8",
}
OPERATIONS = tuple(USES)
HEADS = (64, 128)  # head sizes of the kernels of attention
CODES = {torch.bfloat16: 2, torch.float16: 3}  # as in dtype.h

ABI = 3  # S1F_CUDA_ABI
INVALID_VALUE = 1  # the cudaError_t for arguments without a kernel

ATTENTION_ARGUMENTS = struct.Struct("i6q 3P6q P3q P d q d Pq P3q P3q 2P3q i 2P3q Pq")  # s1f_cuda_attention
PARTS_ARGUMENTS = struct.Struct(f"4i 5q {'P3q' * 12} 3P")  # s1f_attention_parts


class Operation(NamedTuple):
    """A launcher and its kernels.

    Attributes:
        scratch_bytes: returns the device memory needed by a launch with these arguments, in bytes; if the launch would
            fail, minus the error.
        call: launches, by arguments and stream; returns the error.
        error_text: returns CUDA's text for an error.
    """

    name: str
    compiler: str
    architectures: str  # "sm_80 sm_90 compute_80"
    scratch_bytes: Callable[[bytes], int]
    call: Callable[[bytes, int], int]
    error_text: Callable[[int], bytes]

    def launch(self, arguments: bytes, stream: int) -> None:
        """Raises ValueError if no kernel takes the arguments, and RuntimeError for every other failure of CUDA."""
        self.check(self.call(arguments, stream))

    def check(self, error: int) -> None:
        if error:
            kind = ValueError if error == INVALID_VALUE else RuntimeError
            raise kind(f"CUDA error {error}: {self.error_text(error).decode()}")


class _Operation(ctypes.Structure):
    _fields_ = [
        ("abi", c_int32),
        ("compiler", c_char_p), ("architectures", c_char_p),
        ("scratch_bytes", ctypes.CFUNCTYPE(c_int64, c_char_p)),
        ("launch", ctypes.CFUNCTYPE(c_int32, c_char_p, c_void_p)),
        ("error_text", ctypes.CFUNCTYPE(c_char_p, c_int32)),
    ]  # fmt: skip


def find(path: Path, name: str) -> Operation:
    """Returns an operation of the shared object, "attention_forward" for example.

    Raises:
        OSError: the object cannot be opened.
        ValueError: the object lacks the operation, or was built for another version of the structs.
    """
    found = _Operation.in_dll(ctypes.CDLL(str(path)), f"s1f_cuda_{name}")
    if found.abi != ABI:
        raise ValueError(
            f"{path} was built with version {found.abi} of its tables, this package needs {ABI}: install again, or set "
            "SEQ1F1B_CUDA_KERNELS=library to do without these kernels"
        )
    compiler, architectures = found.compiler.decode(), found.architectures.decode()
    return Operation(name, compiler, architectures, found.scratch_bytes, found.launch, found.error_text)


def operations() -> dict[str, Operation]:
    """Returns the library's operations by name; empty if the library was not built.

    Raises:
        OSError, ValueError: the library exists and cannot be used.
    """
    return _operations_of(LIBRARY)


@functools.cache
def _operations_of(path: Path) -> dict[str, Operation]:
    if not path.exists():
        return {}
    return {name: find(path, name) for name in OPERATIONS}


preferred = os.environ.get("SEQ1F1B_CUDA_KERNELS", "")
"""The preference that was asked for, which tests and benchmarks change; read it by ``preference()``."""


def preference() -> str:
    """Returns 'own', 'library' or ''; with '', the check at the first use decides.

    Raises:
        ValueError: the environment variable has another value.
    """
    if preferred not in ("", "own", "library"):
        raise ValueError(f"SEQ1F1B_CUDA_KERNELS is {preferred!r}, must be 'own', 'library' or unset")
    return preferred


def wanted(name: str, device: torch.device) -> Operation | None:
    """Returns our operation, unchecked; None if it is not built, not for the device, or ruled out by the environment.

    Raises:
        RuntimeError: the environment asks for our kernels, and their library was not built.
        OSError, ValueError: the library exists and cannot be used.
    """
    wish = preference()
    if wish == "library" or not (wish or can_run(device)):
        return None
    found = operations()
    if wish and not found:
        raise RuntimeError(
            f"SEQ1F1B_CUDA_KERNELS=own, but there is no {LIBRARY}: install again with nvcc and SEQ1F1B_CUDA=1"
        )
    return found.get(name)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability; (0, 0) for a device other than CUDA."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def can_run(device: torch.device) -> bool:
    """Returns whether the device can run our kernels: Ampere or later."""
    return capability(device) >= (8, 0)


def warn_of_products(device: torch.device, dtype: str, head_dim: int, v_head_dim: int) -> None:
    """Warns once if matrix products run a call for lack of a kernel, although the device could run our kernels."""
    if preference() or not can_run(device):
        return
    heads = " and ".join(map(str, sorted({head_dim, v_head_dim})))
    if not operations():
        _warn("which were not built: install seq1f1b again with nvcc and SEQ1F1B_CUDA=1")
    elif head_dim != v_head_dim or head_dim not in HEADS:  # otherwise the kernel failed its check, which said so
        _warn(
            f"which are for heads of 64 or 128 in bfloat16 or float16, not for heads of {heads} in {dtype}: choose such"
        )


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(
        "attention with a soft cap goes by matrix products, up to 200 times slower than by this package's CUDA "
        f"kernels, {why}, or set SEQ1F1B_CUDA_KERNELS=library to do without this warning",
        stacklevel=2,
    )


def launch_attention(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int,
    softcap: float, docs: Tensor, dout: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, own_dk: Tensor | None = None, own_dv: Tensor | None = None,
    store: bool = False,
) -> None:  # fmt: skip
    """Launches on the current stream of q's device. Rows of the tensors begin at multiples of 16 bytes.

    Args:
        q, out, dout, dq: (batch, heads, tokens, head_dim). The last query is token N - 1.
        k, v, dk, dv: (batch, kv_heads, N, head_dim); k and v have equal strides, and so do dk and dv, in float32.
        own_dk, own_dv: (batch, kv_heads, tokens, head_dim), in q's dtype, with equal strides: the sums of the last rows
            of dk and dv, whose own values are undefined after the launch.
        store: whether to overwrite dk and dv instead of adding to them.
        lse: (batch, heads, tokens), contiguous, float32.
        docs: (batch, N), int32; empty: no documents.
    """
    batch, heads, tokens, head_dim = q.shape
    docs, of_keys = docs if docs.stride(-1) == 1 else docs.contiguous(), _rows(k, v)
    pack = functools.partial(
        ATTENTION_ARGUMENTS.pack, CODES[q.dtype], batch, heads, k.shape[1], tokens, head_dim, k.shape[2] - tokens,
        q.data_ptr(), *of_keys[:2], *q.stride()[:3], *of_keys[2:], *_rows(out), lse.data_ptr(),
        scale, window, softcap,
        docs.data_ptr() if docs.numel() else 0, docs.stride(0) if docs.numel() else 0,
        *_rows(dout), *_rows(dq), *_rows(dk, dv), store, *_rows(own_dk, own_dv),
    )  # fmt: skip
    index = q.get_device()
    with torch.cuda.device(index):  # which the launcher queries; -1, for the CPU, changes nothing
        size = operation.scratch_bytes(pack(0, 0))
        operation.check(max(0, -size))
        scratch = q.new_empty(size, dtype=torch.uint8)  # returns to the stream's pool after the launch
        operation.launch(pack(scratch.data_ptr(), size), stream_of(index))


def _rows(*tensors: Tensor | None) -> tuple[int, ...]:
    """Returns the addresses of tensors, and the strides of batch, head and row common to all; zeros for None."""
    found = [t for t in tensors if t is not None]
    if not found:
        return (0,) * (len(tensors) + 3)
    assert all(t.stride() == found[0].stride() for t in found)
    return *[t.data_ptr() for t in found], *found[0].stride()[:3]


def describe() -> list[str]:
    """Returns lines for ``seq1f1b doctor``: the kernels, or the effect of their absence."""
    try:
        found = operations()
    except (OSError, ValueError) as error:
        return [f"own CUDA kernels: unusable, torch's ops instead: {error}"]
    if not found:
        return ["own CUDA kernels: not built (no nvcc at installation, or SEQ1F1B_CUDA=0): torch's ops only"]
    return [
        f"own CUDA kernels {operation.name}: {operation.architectures}, nvcc {operation.compiler}; "
        f"{USES[operation.name]}, on each GPU of Ampere or later that passes a check at the first use"
        for operation in found.values()
    ]
