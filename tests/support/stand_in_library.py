"""The stand-ins for the CUDA driver and for NCCL as one shared object, and what tests say to them and ask of them.

``tests/stand_ins/stand_in.h`` says what they do and what each option, counter and fault means.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "stand_ins"
LOST, FAILS = 0, 6  # results of a fault: none, and ncclRemoteError
CORRUPT, STALLED = range(2)


def build(folder: Path) -> Path:
    """Compiles gpu_stand_in.so into ``folder``; it takes the place of libcuda.so.1 and of libnccl.so.2."""
    library = folder / "gpu_stand_in.so"
    sources = sorted(FOLDER.glob("*.c"))
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]
    subprocess.run([*os.environ.get("CC", "cc").split(), *flags, *sources, "-o", library], check=True)
    return library


class StandIn:
    """The controls of a loaded gpu_stand_in.so; its state is one for the whole process."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self.library = ctypes.CDLL(self.path)
        self.library.stand_in_misuse.restype = ctypes.c_char_p
        self.library.stand_in_misuse.argtypes = [ctypes.c_int64]
        self.library.stand_in_count.restype = ctypes.c_int64

    def reset(self, seed: int, **options: int) -> None:
        self.library.stand_in_reset(ctypes.c_uint64(seed))
        for name, value in {"foreign_memory": 1, **options}.items():  # torch's, which is what engines compute with
            self.set(name, value)

    def set(self, option: str, value: int) -> None:
        if self.library.stand_in_set(option.encode(), ctypes.c_int64(value)) != 0:
            raise ValueError(f"the stand-ins have no option {option} = {value}")

    def count(self, counter: str) -> int:
        found: int = self.library.stand_in_count(counter.encode())
        if found < 0:
            raise ValueError(f"the stand-ins have no counter {counter}")
        return found

    def complaints(self) -> list[str]:
        """Misuse, and host calls that would have waited for ever: nothing, where all is well."""
        lines: list[str] = []
        while (text := self.library.stand_in_misuse(len(lines))) is not None:
            lines.append(text.decode())
        return lines

    def drain(self, patience_ms: int = 100) -> bool:
        """Waits until the queues are empty; False if they are stuck."""
        return self.library.stand_in_drain(ctypes.c_int64(patience_ms)) == 0

    def fault(self, sends: bool, source: int, destination: int, index: int, result: int) -> None:
        self.library.stand_in_fault(int(sends), source, destination, ctypes.c_int64(index), result)

    def fail_call(self, function: str, index: int, result: int) -> None:
        self.library.stand_in_fail_call(function.encode(), ctypes.c_int64(index), result)

    def damage(self, function: str, size: int, kind: int) -> None:
        self.library.stand_in_damage(function.encode(), ctypes.c_int64(size), kind)

    def assert_on(self, ordinal: int, query: int) -> None:
        self.library.stand_in_assert(ordinal, ctypes.c_int64(query))

    def synchronise(self, ordinal: int) -> None:
        """Waits for a device's null stream."""
        self.library.stand_in_synchronise(ordinal)


@functools.cache
def stand_in() -> StandIn:
    """The stand-ins of this process, built at the first call, unless the process that started it has built them."""
    built = os.environ.get("SEQ1F1B_STAND_IN")
    return StandIn(Path(built) if built else build(Path(tempfile.mkdtemp(prefix="seq1f1b-stand-in-"))))
