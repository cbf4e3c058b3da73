"""Builds CUDA kernels for the CPU, on the emulation of tests/cuda, and has the package launch them on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from seq1f1b.device import attention_parts, kernel_library
from seq1f1b.device.kernel_library import Operation

ROOT = Path(__file__).resolve().parents[2]
SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")  # then the kernels are built for it too
SHARED_99_KB, SHARED_163_KB = 99 * 1024, 163 * 1024


def build(work: Path, operations: Sequence[str] = kernel_library.OPERATIONS) -> Path:
    """Compiles the operations' .cu files and the emulation into a library in the folder ``work``."""
    if platform.machine() != "x86_64" or not {"fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip("the emulation of CUDA needs an x86-64 with FMA and F16C")
    command = os.environ.get("CXX", "g++").split()
    command += ["-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    # nvcc contracts products and sums to FMAs wherever it can.
    command += ["-ffp-contract=fast", "-mfma", "-mf16c", f"-I{ROOT / 'tests/cuda'}"]
    if SANITIZED:
        command += ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"]
    sources = [ROOT / "tests/cuda/emulation.cpp", *(ROOT / f"kernels/cuda/sm80_{name}.cu" for name in operations)]
    objects = [work / f"{path.stem}.o" for path in sources]
    processes = [
        subprocess.Popen([*command, "-x", "c++", "-c", path, "-o", to])
        for path, to in zip(sources, objects, strict=True)
    ]
    for process in processes:
        assert process.wait() == 0, f"{process.args} failed"
    library = work / "emulated.so"
    subprocess.run([*command, "-shared", *objects, "-o", library], check=True)
    return library


@contextmanager
def emulated_kernels(library: Path, shared_limit: int = SHARED_163_KB) -> Iterator[list[str]]:
    """The package launches the kernels of an emulated library meanwhile, on CPU tensors; yields what it launched.
    Scratch memory of attention holds NaN before each launch."""
    emulated = ctypes.CDLL(str(library))
    emulated.s1f_emulation_error.restype = ctypes.c_char_p
    emulated.s1f_emulation_set(shared_limit)
    launched: list[str] = []

    def with_records(operation: Operation) -> Operation:
        def call(arguments: bytes, stream: int) -> int:
            if operation.name == kernel_library.PARTS:
                launched.append(attention_parts.WHATS[struct.unpack_from("i", arguments)[0]])
            else:
                launched.append(operation.name)
                scratch, size = struct.unpack("Pq", arguments[-16:])
                ctypes.memset(scratch, 0xFF, size)
            emulated.s1f_emulation_reset(ctypes.c_uint64(len(launched)))
            error = operation.call(arguments, stream)
            assert not (text := emulated.s1f_emulation_error()), text.decode()
            return error

        return operation._replace(call=call)

    found = {name: with_records(each) for name, each in kernel_library._operations_of(library).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_library, "LIBRARY", library)
        patch.setattr(kernel_library, "_operations_of", lambda path: found)
        yield launched
