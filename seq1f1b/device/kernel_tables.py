"""Tables and launchers of the shared object of CUDA kernels, by ctypes.

The object links no CUDA driver: without a GPU it opens, its tables can be read, and every launch fails with CUDA's own
text. The structs are defined in ``kernels/cuda``: kernel_table.h, attention_arguments.h and
attention_parts_arguments.h. This module does not need torch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple

__all__: list[str] = []

ABI = 3  # S1F_CUDA_ABI
INVALID_VALUE = 1  # the cudaError_t for arguments without a kernel
DTYPES = {2: "bfloat16", 3: "float16"}  # by number in dtype.h

ATTENTION = struct.Struct("i6q 3P6q P3q P d q d Pq P3q P3q 2P3q i 2P3q Pq")  # s1f_cuda_attention
PARTS = struct.Struct(f"4i 5q {'P3q' * 12} 3P")  # s1f_attention_parts


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
