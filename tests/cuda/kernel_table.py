"""kernels/cuda/kernel_table.h for ctypes: for tests and benchmarks, which look at libraries that nobody installs."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path


class Kernel(ctypes.Structure):
    _fields_ = (
        ("name_bytes", ctypes.c_char_p),
        *((name, ctypes.c_int32) for name in (
            "dtype", "head_dim", "query_rows", "key_rows", "warps", "stages", "products", "shared_bytes",
            "shared_limit",
        )),
    )  # fmt: skip

    @property
    def name(self) -> str:
        return str(self.name_bytes.decode())


class Operation(ctypes.Structure):
    _fields_ = (
        ("abi", ctypes.c_int32),
        ("num_kernels", ctypes.c_int32),
        ("source", ctypes.c_char_p),
        ("compiler", ctypes.c_char_p),
        ("architectures", ctypes.c_char_p),
        ("kernels", ctypes.POINTER(Kernel)),
        ("scratch_bytes", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32)),
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)),
        ("error_text", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int32)),
    )


def operation_of(source: str) -> str:
    """Name of the operation of a .cu: that of the file, without its architecture."""
    return re.sub(r"^sm\d+_", "", Path(source).stem)


def find_operation(library: Path, name: str) -> Operation:
    """It keeps the library open."""
    return Operation.in_dll(ctypes.CDLL(str(library)), f"s1f_cuda_{name}")


def kernels_of(operation: Operation) -> list[Kernel]:
    return list(operation.kernels[: operation.num_kernels])
