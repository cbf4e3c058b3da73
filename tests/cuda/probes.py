"""What each primitive of sm80_primitives.cuh must give, by the PTX ISA and by fp64, and a check that it does.

On a GPU, from benchmarks/gpu.py, this tells whether the hardware does what the emulation of the tests does; on the CPU,
from tests/device/test_cuda_own.py, whether the emulation does what the PTX ISA says.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from kernel_table import Operation
from torch import Tensor

LANES, WORDS = 32, 16
PROBES = [
    "LOAD_MATRICES",
    "LOAD_MATRICES_TRANSPOSED",
    "MULTIPLY_BF16",
    "MULTIPLY_FP16",
    "COPY_ASYNC",
    "SHUFFLE_XOR",
    "SHUFFLE",
    "BALLOT",
    "EXP2",
    "LOG2",
    "RECIPROCAL",
    "PACK_BF16",
    "PACK_FP16",
    "UNPACK_BF16",
    "UNPACK_FP16",
    "GLOBAL_ADD",
    "GLOBAL_ADD_4",
    "GLOBAL_LOAD_4",
    "SHARED_LOAD_PAIR",
    "MAXIMUM",
]  # enum probe of primitive_probes.cu
HALVES = {"BF16": torch.bfloat16, "FP16": torch.float16}


class Arguments(ctypes.Structure):
    _fields_ = (
        ("input", ctypes.c_void_p), ("output", ctypes.c_void_p), ("probe", ctypes.c_int32),
        ("num_warps", ctypes.c_int32),
    )  # fmt: skip


class Prober:
    """Runs a probe. launch(arguments, input, output): of the operation primitive_probes."""

    def __init__(self, launch: Callable[[Arguments, Tensor, Tensor], None], device: torch.device) -> None:
        self.launch, self.device = launch, device

    def __call__(self, probe: str, words: Tensor) -> Tensor:
        """words: (warps, 32, 16), int32; so is what comes back."""
        given = words.to(torch.int32).contiguous().to(self.device)
        output = torch.zeros_like(given)
        arguments = Arguments(given.data_ptr(), output.data_ptr(), PROBES.index(probe), len(given))
        self.launch(arguments, given, output)
        return output.cpu()


def on_the_gpu(operation: Operation) -> Prober:
    def launch(arguments: Arguments, given: Tensor, output: Tensor) -> None:
        error = operation.launch(ctypes.byref(arguments), 0, torch.cuda.current_stream().cuda_stream)
        assert error == 0, operation.error_text(error).decode()

    return Prober(launch, torch.device("cuda", 0))


def words_of(*columns: Tensor) -> Tensor:
    """(32, 16) for one warp: a lane's words, as many as there are columns; -1 behind."""
    words = torch.full((LANES, WORDS), -1, dtype=torch.int32)
    for index, column in enumerate(columns):
        words[:, index] = column
    return words[None]


def halves(low: Tensor, high: Tensor) -> Tensor:
    """int16 pairs as the int32 words that hold them."""
    return torch.stack([low.to(torch.int16), high.to(torch.int16)], -1).view(torch.int32).squeeze(-1)


def bits(values: Tensor) -> Tensor:
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def spread_over_warps(values: Tensor) -> Tensor:
    """All values as words of as many warps as it takes; the first value fills up."""
    per_warp = LANES * WORDS
    count = math.ceil(len(values) / per_warp) * per_warp
    filled = torch.cat([values, values[:1].expand(count - len(values))])
    return bits(filled).view(-1, LANES, WORDS)


LANE = torch.arange(LANES)
GROUP, PAIR = LANE // 4, LANE % 4


def matrices(prober: Prober) -> None:
    """Every element of four 8 x 8 matrices coded by its index: which comes where."""
    code = torch.arange(4 * 64).view(4, 8, 8)
    rows = code.view(LANES, 8)
    given = words_of(*(halves(rows[:, 2 * i], rows[:, 2 * i + 1]) for i in range(4)))
    plain = prober("LOAD_MATRICES", given)[0]
    transposed = prober("LOAD_MATRICES_TRANSPOSED", given)[0]
    for i in range(4):
        assert torch.equal(plain[:, i], halves(code[i, GROUP, 2 * PAIR], code[i, GROUP, 2 * PAIR + 1])), f"matrix {i}"
        expected = halves(code[i, 2 * PAIR, GROUP], code[i, 2 * PAIR + 1, GROUP])
        assert torch.equal(transposed[:, i], expected), f"transposed matrix {i}"


def products(prober: Prober) -> None:
    """A 16 x 16, B 16 x 8 and C 16 x 8 of small integers, whose product is exact, in the fragments of the PTX ISA."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-8, 9, size, generator=generator) for size in ((16, 16), (16, 8), (16, 8)))
    places = [(GROUP, 2 * PAIR), (GROUP, 2 * PAIR + 1), (GROUP + 8, 2 * PAIR), (GROUP + 8, 2 * PAIR + 1)]
    for name, dtype in HALVES.items():
        a_bits, b_bits = bits(a.to(dtype)), bits(b.to(dtype))
        fragments = [
            *(halves(a_bits[r, k], a_bits[r, k + 1])
              for r, k in ((GROUP, 2 * PAIR), (GROUP + 8, 2 * PAIR), (GROUP, 2 * PAIR + 8), (GROUP + 8, 2 * PAIR + 8))),
            *(halves(b_bits[k, GROUP], b_bits[k + 1, GROUP]) for k in (2 * PAIR, 2 * PAIR + 8)),
            *(bits(c[place].float()) for place in places),
        ]  # fmt: skip
        got = prober(f"MULTIPLY_{name}", words_of(*fragments))[0]
        expected = (a @ b + c).float()
        for i, place in enumerate(places):
            assert torch.equal(got[:, i].view(torch.float32), expected[place]), f"{name}, sum {i}"


def sums_of_products(prober: Prober) -> None:
    """Tensor cores lose little of a sum: within 2^-20 of the sum of absolute values, for normal numbers."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(size, generator=generator) for size in ((16, 16), (16, 8)))
    for name, dtype in HALVES.items():
        rounded_a, rounded_b = a.to(dtype), b.to(dtype)
        a_bits, b_bits = bits(rounded_a), bits(rounded_b)
        fragments = [
            *(halves(a_bits[r, k], a_bits[r, k + 1])
              for r, k in ((GROUP, 2 * PAIR), (GROUP + 8, 2 * PAIR), (GROUP, 2 * PAIR + 8), (GROUP + 8, 2 * PAIR + 8))),
            *(halves(b_bits[k, GROUP], b_bits[k + 1, GROUP]) for k in (2 * PAIR, 2 * PAIR + 8)),
            *(torch.zeros(LANES, dtype=torch.int32) for _ in range(4)),
        ]  # fmt: skip
        got = prober(f"MULTIPLY_{name}", words_of(*fragments))[0][:, :4].contiguous().view(torch.float32).double()
        wide_a, wide_b = rounded_a.double(), rounded_b.double()
        for i, place in enumerate(((GROUP, 2 * PAIR), (GROUP, 2 * PAIR + 1), (GROUP + 8, 2 * PAIR),
                                   (GROUP + 8, 2 * PAIR + 1))):  # fmt: skip
            error = (got[:, i] - (wide_a @ wide_b)[place]).abs() / (wide_a.abs() @ wide_b.abs())[place]
            assert error.max() <= 2**-20, f"{name}: {error.max():.1e}"


def copies(prober: Prober) -> None:
    """16 bytes where valid; zeros elsewhere, over whatever lay there."""
    data = torch.arange(LANES * 4).view(LANES, 4) + 1
    valid = (LANE * 7 % 3 != 0).int()
    given = words_of(*data.T, valid, *(LANE,) * 3, *(torch.full((LANES,), 0x7FC00000),) * 4)
    assert torch.equal(prober("COPY_ASYNC", given)[0][:, :4], (data * valid[:, None]).int())


def lanes(prober: Prober) -> None:
    values = torch.randn(LANES, generator=torch.Generator().manual_seed(2))
    for mask in (1, 2, 4, 8, 16, 31):
        got = prober("SHUFFLE_XOR", words_of(bits(values), torch.full((LANES,), mask)))[0][:, 0]
        assert torch.equal(got, bits(values)[LANE ^ mask]), f"mask {mask}"
    source = (LANE * 5 + 3) % LANES
    assert torch.equal(prober("SHUFFLE", words_of(bits(values), source))[0][:, 0], bits(values)[source])
    for seen in ([0], [31], [5, 17, 30], []):
        got = prober("BALLOT", words_of(torch.tensor([lane in seen for lane in range(LANES)])))[0]
        word = sum(1 << lane for lane in seen)
        assert torch.equal(got[:, 0], torch.full((LANES,), word).int()), seen
        assert (got[:, 1] == (min(seen) if seen else 0)).all(), seen


def arithmetic(prober: Prober) -> None:
    """Within the errors that sm80_primitives.cuh states, 2^-22; at the ends of the range what it states."""

    def run(probe: str, x: Tensor) -> Tensor:
        return prober(probe, spread_over_warps(x)).flatten()[: len(x)].view(torch.float32).double()

    exponents = torch.linspace(-120, 20, 20001)
    exact = torch.exp2(exponents.double())
    assert ((run("EXP2", exponents) - exact).abs() / exact).max() <= 2**-22
    assert run("EXP2", torch.tensor([-math.inf, 0.0, -1e4])).tolist() == [0.0, 1.0, 0.0]

    numbers = torch.exp2(torch.linspace(-60, 60, 20001))
    assert (run("LOG2", numbers) - torch.log2(numbers.double())).abs().max() <= 2**-22 * 60  # relative above 1
    near = torch.linspace(0.5, 2, 20001)
    assert (run("LOG2", near) - torch.log2(near.double())).abs().max() <= 2**-22
    assert run("LOG2", torch.tensor([0.0, 1.0])).tolist() == [-math.inf, 0.0]

    exact = 1 / numbers.double()
    assert ((run("RECIPROCAL", numbers) - exact).abs() / exact).max() <= 2**-22
    assert run("RECIPROCAL", torch.tensor([math.inf, 1.0])).tolist() == [0.0, 1.0]


def rounding(prober: Prober) -> None:
    """Rounds to nearest even, the first number in the low half; and back."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(4096, generator=generator) * 100
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -0.0, 0.0])
    ends_of_fp16 = torch.tensor(
        [2**-24, 2**-25, 3 * 2**-25, 2**-14 - 2**-26, 65519.0, 65520.0]
    )  # an even number in all
    numbers = torch.cat([numbers, ties, ends_of_fp16])
    for name, dtype in HALVES.items():
        packed = prober(f"PACK_{name}", spread_over_warps(numbers)).flatten()[: len(numbers) : 2]
        got = packed.contiguous().view(torch.int16)
        assert torch.equal(got, bits(numbers.to(dtype))), name
        words = torch.stack([packed, torch.zeros_like(packed)], -1).flatten()
        unpacked = prober(f"UNPACK_{name}", spread_over_warps(words)).flatten()[: len(numbers)]
        assert torch.equal(unpacked, bits(numbers.to(dtype).float())), name


def sums(prober: Prober) -> None:
    got = prober("GLOBAL_ADD", words_of(bits((LANE + 1).float())))[0]
    assert float(got[0, :1].view(torch.float32)) == LANES * (LANES + 1) / 2

    numbers = torch.arange(3 * LANES * WORDS).view(3, LANES, WORDS)
    added = prober("GLOBAL_ADD_4", bits(numbers.float()))
    found = prober("GLOBAL_LOAD_4", added)[0, :, :4].contiguous().view(torch.float32)
    assert torch.equal(found, numbers[:, :, :4].sum(0).float())


def pairs_and_extremes(prober: Prober) -> None:
    values = torch.randn(LANES, 4, generator=torch.Generator().manual_seed(4))
    source = (LANE * 11 + 5) % LANES
    got = prober("SHARED_LOAD_PAIR", words_of(*bits(values).T, source))[0][:, :2]
    assert torch.equal(got, bits(values)[source, 2:])
    first, second = values[:, 0].clone(), values[:, 1].clone()
    first[:2] = -math.inf
    second[1:3] = -math.inf
    got = prober("MAXIMUM", words_of(bits(first), bits(second)))[0][:, 0]
    assert torch.equal(got.view(torch.float32), torch.maximum(first, second))


CHECKS: tuple[Callable[[Prober], None], ...] = (
    matrices, products, sums_of_products, copies, lanes, arithmetic, rounding, sums, pairs_and_extremes,
)  # fmt: skip
