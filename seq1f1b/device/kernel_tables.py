"""The shared object of CUDA kernels, by ctypes: what its tables say, and its launchers.

It links no CUDA driver: it opens on a machine without a GPU, where its tables can be read and every launch fails with
CUDA's own words. The structs are those of ``kernels/cuda``: kernel_table.h, attention_arguments.h and
attention_parts_arguments.h. Nothing here needs torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

__all__: list[str] = []

ABI = 1  # S1F_CUDA_ABI
INVALID_VALUE = 1  # the cudaError_t of arguments that no kernel takes
DTYPES = {2: "bfloat16", 3: "float16"}  # by number in dtype.h

ATTENTION = struct.Struct("i6q 3P6q P3q P d q d Pq Pq P3q P3q 2P3q i 2P3q")  # s1f_cuda_attention
ATTENTION_END = struct.Struct("2i P q")  # what s1f_cuda_attention_args has behind it
PARTS = struct.Struct(f"4i 5q {'P3q' * 12} 3P")  # s1f_attention_parts


class Kernel(NamedTuple):
    name: str
    dtype: str  # "": of any
    head_dim: int
    products: int  # matrix products of a pair of tiles; 0: it has none


class Operation(NamedTuple):
    """A launcher and its kernels.

    Attributes:
        scratch_bytes: bytes of the device that a launch needs, by its arguments and the index of a kernel; minus the
            error where it would fail.
        call: launches on a stream, by arguments, index of a kernel (-1: the launcher chooses) and stream; the error.
        error_text: CUDA's words for an error.
    """

    name: str
    source: str  # sha256 of the code that it was compiled from, comments left out
    compiler: str
    architectures: str  # "sm_80 sm_90 compute_80"
    kernels: tuple[Kernel, ...]
    heads: frozenset[tuple[str, int]]  # dtypes and head sizes of the kernels
    scratch_bytes: Callable[[bytes, int], int]
    call: Callable[[bytes, int, int], int]
    error_text: Callable[[int], bytes]

    def launch(self, arguments: bytes, stream: int) -> None:
        """Raises ValueError where no kernel takes the arguments, RuntimeError where CUDA fails otherwise."""
        self.check(self.call(arguments, -1, stream))

    def check(self, error: int) -> None:
        if error:
            kind = ValueError if error == INVALID_VALUE else RuntimeError
            raise kind(f"CUDA error {error}: {self.error_text(error).decode()}")


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p), ("dtype", c_int32), ("head_dim", c_int32), ("tile", c_int32 * 4), ("products", c_int32),
        ("shared", c_int32 * 2),
    ]  # fmt: skip


class _Operation(ctypes.Structure):
    _fields_ = [
        ("abi", c_int32), ("num_kernels", c_int32),
        ("source", c_char_p), ("compiler", c_char_p), ("architectures", c_char_p),
        ("kernels", POINTER(_Kernel)),
        ("scratch_bytes", ctypes.CFUNCTYPE(c_int64, c_char_p, c_int32)),
        ("launch", ctypes.CFUNCTYPE(c_int32, c_char_p, c_int32, c_void_p)),
        ("error_text", ctypes.CFUNCTYPE(c_char_p, c_int32)),
    ]  # fmt: skip


def find(path: Path, name: str) -> Operation:
    """An operation of the shared object, "attention_forward" for instance.

    Raises:
        OSError: the object cannot be opened.
        ValueError: it has no such operation, or was built for other structs.
    """
    found = _Operation.in_dll(ctypes.CDLL(str(path)), f"s1f_cuda_{name}")
    if found.abi != ABI:
        raise ValueError(
            f"{path} was built with version {found.abi} of its tables, this package needs {ABI}: install again"
        )
    kernels = [
        Kernel(row.name.decode(), DTYPES.get(row.dtype, ""), row.head_dim, row.products)
        for row in found.kernels[: found.num_kernels]
    ]
    source, compiler, architectures = (text.decode() for text in (found.source, found.compiler, found.architectures))
    heads = frozenset((kernel.dtype, kernel.head_dim) for kernel in kernels if kernel.head_dim)
    return Operation(
        name, source, compiler, architectures, tuple(kernels), heads, found.scratch_bytes, found.launch,
        found.error_text,
    )  # fmt: skip
