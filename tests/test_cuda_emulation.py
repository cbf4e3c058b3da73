"""Does the emulation of tests/cuda do what the PTX ISA says of each instruction, and object to what it forbids?

The lane maps are written out here as in the PTX ISA ("Matrix fragments for mma.m16n8k16", "ldmatrix").
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from ctypes import Structure, c_int32, c_void_p
from pathlib import Path

import pytest
import torch
from emulated_cuda import SANITIZED, Emulated, KernelError, build
from torch import Tensor

BLOCKS, THREADS, PER_BLOCK = 2, 64, 64 * 16  # of probe.cu
SEEDS = range(4 if SANITIZED else 20)


class ProbeArguments(Structure):
    _fields_ = [("in_", c_void_p), ("out", c_void_p), ("what", c_int32)]


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["tests/cuda/probe.cu"], Path(work))


def probe(emulated: Emulated, name: str, given: Tensor | None = None, what: int = 0) -> Tensor:
    """The words that a kernel of probe.cu makes of others: (blocks, threads, words of each)."""
    read = torch.zeros(BLOCKS, PER_BLOCK, dtype=torch.int32)
    if given is not None:
        words = given.contiguous().view(torch.int32).reshape(BLOCKS, -1)
        read[:, : words.shape[1]] = words
    written = torch.zeros(BLOCKS, PER_BLOCK, dtype=torch.int32)
    kernel = [k.name for k in emulated.kernels("probe")].index(f"s1f_probe_{name}")
    emulated.launch("probe", ProbeArguments(read.data_ptr(), written.data_ptr(), what), [read], [written], kernel)
    return written


def words_of(written: Tensor, words: int) -> Tensor:
    return written[:, : THREADS * words].reshape(BLOCKS, THREADS, words)


# -- instructions ----------------------------------------------------------------------------------------------------


def row_of_a(group: int, i: int) -> int:
    return group if i < 2 or 4 <= i < 6 else group + 8


def column_of_a(pair: int, i: int) -> int:
    return pair * 2 + (i & 1) + (8 if i >= 4 else 0)


def row_of_b(pair: int, i: int) -> int:
    return pair * 2 + (i & 1) + (8 if i >= 2 else 0)


def row_of_c(group: int, i: int) -> int:
    return group if i < 2 else group + 8


def column_of_c(pair: int, i: int) -> int:
    return pair * 2 + (i & 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_multiply(emulated: Emulated, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    warps = BLOCKS * THREADS // 32
    a, b = (torch.randn(warps, *size, generator=generator).to(dtype) for size in ((16, 16), (16, 8)))
    c = torch.randn(warps, 16, 8, generator=generator)
    given = torch.zeros(warps, 32, 10, dtype=torch.int32)
    for lane in range(32):
        group, pair = lane // 4, lane % 4
        of_a = torch.stack([a[:, row_of_a(group, i), column_of_a(pair, i)] for i in range(8)], 1)
        of_b = torch.stack([b[:, row_of_b(pair, i), group] for i in range(4)], 1)
        of_c = torch.stack([c[:, row_of_c(group, i), column_of_c(pair, i)] for i in range(4)], 1)
        given[:, lane] = torch.cat([t.view(torch.int32) for t in (of_a, of_b, of_c)], 1)
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    got = words_of(probe(emulated, f"multiply_{name}", given), 4).view(torch.float32).reshape(warps, 32, 4)
    truth = c.double() + a.double() @ b.double()
    for lane in range(32):
        for i in range(4):
            exact = truth[:, row_of_c(lane // 4, i), column_of_c(lane % 4, i)]
            ours = got[:, lane, i].double()
            assert ((ours - exact).abs() <= exact.abs() * 2**-23).all()
            assert (ours.abs() <= exact.abs()).all()  # rounded towards zero


@pytest.mark.parametrize("name", ["load", "load_async"])
def test_load_matrices(emulated: Emulated, name: str) -> None:
    given = torch.arange(BLOCKS * THREADS * 8, dtype=torch.int16).reshape(
        BLOCKS * 2, 4, 8, 8
    )  # warp, matrix, row, column
    for emulated.seed in SEEDS:
        got = words_of(probe(emulated, name, given), 8).view(torch.int16).reshape(BLOCKS * 2, 32, 2, 4, 2)
        for lane in range(32):
            group, pair = lane // 4, lane % 4
            assert torch.equal(got[:, lane, 0], given[:, :, group, 2 * pair : 2 * pair + 2])
            assert torch.equal(got[:, lane, 1], given[:, :, 2 * pair : 2 * pair + 2, group])


def test_lanes_and_conversions(emulated: Emulated) -> None:
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([
        0.0, 1.0, 2**-24, 2**-25, 3 * 2**-25, 2**-14 - 2**-26, 65504.0, 65519.0, 65520.0, 1e-30,
        1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8,
    ])  # fmt: skip
    x = torch.randn(BLOCKS * THREADS, generator=generator)
    x[20 : 20 + len(edges)] = edges
    got = words_of(probe(emulated, "lanes", x), 8).reshape(-1, 32, 8)
    x = x.reshape(-1, 32)
    floats = got.view(torch.float32)
    assert torch.equal(floats[:, :, 0], x[:, torch.arange(32) ^ 1])
    assert torch.equal(floats[:, :, 1], x[:, 5:6].expand(-1, 32))
    votes = ((x > 0).to(torch.int64) << torch.arange(32)).sum(1)
    assert torch.equal(got[:, :, 2].to(torch.int64) & 0xFFFFFFFF, votes[:, None].expand(-1, 32))
    for word, dtype in ((3, torch.bfloat16), (4, torch.float16)):
        halves = got[:, :, word].contiguous().view(dtype).reshape(-1, 32, 2)
        assert torch.equal(halves, torch.stack([x, -x], 2).to(dtype))
    assert (floats[:, :, 5] == 0).all()
    assert torch.equal(floats[:, :, 6], x.to(torch.float16).float())
    small = x.abs() < 10
    torch.testing.assert_close(floats[:, :, 7][small], 1 + x[small])


def test_add(emulated: Emulated) -> None:
    x = torch.arange(BLOCKS * THREADS, dtype=torch.float32).reshape(BLOCKS, THREADS)
    got = probe(emulated, "add", torch.nn.functional.pad(x, (0, PER_BLOCK - THREADS))).view(torch.float32)
    assert got[0, 0] == x[0].sum() and got[1, 0] == x[1].sum() and got[0, 1] == x.sum()


def test_bank_conflicts(emulated: Emulated) -> None:
    probe(emulated, "banks_swizzled")
    assert emulated.conflicts == 0
    probe(emulated, "banks")
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
        got = words_of(probe(emulated, "breach", given), 1)[:, :, 0]
        copied = torch.where(torch.arange(THREADS) < 40, given[:, :, 0], 0)
        assert torch.equal(got, copied[:, (torch.arange(THREADS) + 32) % THREADS])


@pytest.mark.parametrize("what", BREACHES)
def test_breach(emulated: Emulated, what: int) -> None:
    for emulated.seed in SEEDS:
        with pytest.raises(KernelError, match=BREACHES[what]):
            probe(emulated, "breach", what=what)
