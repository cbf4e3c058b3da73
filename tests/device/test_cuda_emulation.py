"""Does the emulation of tests/cuda object to what a GPU leaves undefined?"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from ctypes import Structure, c_int32, c_void_p
from pathlib import Path

import pytest
import torch
from emulated_cuda import SANITIZED, Emulated, KernelError, build
from torch import Tensor

BLOCKS, THREADS, PER_BLOCK = 2, 64, 64 * 16  # of breaches.cu
SEEDS = range(4 if SANITIZED else 20)


class BreachArguments(Structure):
    _fields_ = [("in_", c_void_p), ("out", c_void_p), ("what", c_int32)]


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["tests/cuda/breaches.cu"], Path(work))


def run(emulated: Emulated, name: str, given: Tensor | None = None, what: int = 0) -> Tensor:
    """What a kernel of breaches.cu makes of (blocks, PER_BLOCK) words."""
    read = torch.zeros(BLOCKS, PER_BLOCK, dtype=torch.int32)
    if given is not None:
        words = given.contiguous().view(torch.int32).reshape(BLOCKS, -1)
        read[:, : words.shape[1]] = words
    written = torch.zeros(BLOCKS, PER_BLOCK, dtype=torch.int32)
    kernel = [k.name for k in emulated.kernels("breaches")].index(f"s1f_{name}")
    emulated.launch("breaches", BreachArguments(read.data_ptr(), written.data_ptr(), what), [read], [written], kernel)
    return written


def test_bank_conflicts(emulated: Emulated) -> None:
    run(emulated, "banks_swizzled")
    assert emulated.conflicts == 0
    run(emulated, "banks")
    assert emulated.conflicts == BLOCKS * 2 * 4 * 7  # two warps load four matrices; eight rows take eight turns


# -- what it objects to ----------------------------------------------------------------------------------------------

RACE, TOO_SOON = "with no barrier between", "before the asynchronous copy to it was waited for"
BREACHES = {
    1: RACE,
    2: RACE,
    3: RACE,
    4: RACE,
    5: TOO_SOON,
    6: TOO_SOON,
    7: TOO_SOON,
    8: f"{RACE}|{TOO_SOON}",
    9: f"{RACE}|{TOO_SOON}",
    10: "never waited for",
    11: "never written",
    12: "outside of the block",
    13: "not a multiple of 4",
    14: "outside of every extent",
    15: "only to be read",
    16: "outside of every extent",
    17: "not a multiple of 16",
    18: "written by another block",
    19: "by another block",
    20: "a warp waits for lanes",
    21: "a barrier waits for threads",
    22: "do different things together",
    23: "another block",
}


def test_what_breaks_no_rule(emulated: Emulated) -> None:
    for emulated.seed in SEEDS:
        given = torch.arange(1, BLOCKS * THREADS * 4 + 1, dtype=torch.int32).reshape(BLOCKS, THREADS, 4)
        got = run(emulated, "breach", given)[:, :THREADS]
        copied = torch.where(torch.arange(THREADS) < 40, given[:, :, 0], 0)
        assert torch.equal(got, copied[:, (torch.arange(THREADS) + 32) % THREADS])


@pytest.mark.parametrize("what", BREACHES)
def test_breach(emulated: Emulated, what: int) -> None:
    for emulated.seed in SEEDS:
        with pytest.raises(KernelError, match=BREACHES[what]):
            run(emulated, "breach", what=what)
