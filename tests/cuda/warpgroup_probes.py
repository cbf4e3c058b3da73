"""What products of a warpgroup (sm90a_warpgroup_probes.cu) must give, and a check that they do.

On a GPU of sm_90 alone, from benchmarks/gpu.py: no emulation knows these instructions. A tile holds the numbers of its
rows, or of its columns, and the other factor is the identity, so what comes out says which element was read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from kernel_table import Operation
from torch import Tensor

SIZE = 64
# enum probe of the .cu: whether a row of the second factor's tile is one of its depth, and how many columns it has
PROBES = {
    "BOTH_BY_ROWS": (False, SIZE),
    "SECOND_BY_COLUMNS": (True, SIZE),
    "FIRST_IN_REGISTERS": (True, SIZE),
    "TWO_PANELS": (True, 2 * SIZE),
}

Launch = Callable[[str, Tensor, Tensor, Tensor], None]
"""probe, the first factor's tile, the second's, and (128, columns / 2) for what each thread has of the product."""


class Arguments(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("out", ctypes.c_void_p), ("probe", ctypes.c_int32),
    )  # fmt: skip


def on_the_gpu(operation: Operation) -> Launch:
    def launch(probe: str, a: Tensor, b: Tensor, out: Tensor) -> None:
        given, found = [t.to("cuda", torch.bfloat16).contiguous() for t in (a, b)], out.cuda()
        arguments = Arguments(*(t.data_ptr() for t in (*given, found)), list(PROBES).index(probe))
        error = operation.launch(ctypes.byref(arguments), 0, torch.cuda.current_stream().cuda_stream)
        assert error == 0, operation.error_text(error).decode()
        out.copy_(found)

    return launch


def places(columns: int) -> tuple[Tensor, Tensor]:
    """Row and column of the product's element [thread, register]."""
    thread, register = torch.arange(128)[:, None], torch.arange(columns // 2)[None, :]
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    return row, register // 4 * 8 + thread % 4 * 2 + register % 2


def check(probe: str, launch: Launch) -> None:
    by_columns, columns = PROBES[probe]
    row, column = places(columns)
    shape = (SIZE, columns)
    for coded in ("first", "second"):
        for axis in range(2):
            numbers = torch.arange(SIZE if coded == "first" else shape[axis])
            sizes = (SIZE, SIZE) if coded == "first" else shape
            code = (numbers[:, None] if axis == 0 else numbers[None, :]).expand(sizes)
            a = code if coded == "first" else torch.eye(SIZE, dtype=torch.int64)
            b = torch.eye(*shape, dtype=torch.int64) if coded == "first" else code
            out = torch.full((128, columns // 2), float("nan"))
            launch(probe, a, b if by_columns else b.T, out)
            expected = (a @ b).float()[row, column]
            wrong = (out != expected).nonzero()
            if len(wrong):
                thread, register = wrong[0].tolist()
                which = f"{coded} factor's {('rows', 'columns')[axis]}"
                raise AssertionError(
                    f"{probe}: {len(wrong)} of {out.numel()} wrong with the {which}: "
                    f"thread {thread}, register {register} has {out[thread, register]}, "
                    f"not {expected[thread, register]}"
                )
