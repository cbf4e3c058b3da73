"""Do the CUDA kernels compute attention? Their source, compiled for the CPU, on the emulation of tests/cuda.

Truth is plain attention in fp64 of the whole sequence. What the emulation checks by itself (races, copies that are not
waited for, bounds) makes every run here fail; tests/cuda/emulation.h lists it. On a GPU benchmarks/gpu.py
runs the same kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import tempfile
from collections.abc import Iterator
from ctypes import byref
from pathlib import Path

import pytest
import torch
from emulated_cuda import (
    DTYPES,
    HAS_FMA,
    SANITIZED,
    SHARED_99_KB,
    Attention,
    CudaAttention,
    Emulated,
    KernelError,
    Mutation,
    Refused,
    Sequences,
    Strides,
    attention_of,
    build,
    dense_pieces,
    errors,
    laid_out,
)
from slices import slice_of
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16


class Inputs:
    """q, k, v and document ids of a case, in 16 bit; and what is to come out."""

    def __init__(self, case: Sequences) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = [(case.batch, h, case.tokens, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads)]
        self.q, self.k, self.v = (torch.randn(s, generator=generator).to(case.dtype) for s in sizes)
        self.docs = case.document_ids()
        self.scale = case.scale if case.scale is not None else case.head_dim**-0.5
        group = case.heads // case.kv_heads
        q, k, v = self.q.double(), *(t.double().repeat_interleave(group, 1) for t in (self.k, self.v))
        logits = q @ k.mT * self.scale
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        logits = logits.masked_fill(case.hidden(), -math.inf)
        self.lse = logits.logsumexp(-1)
        self.out = torch.softmax(logits, -1) @ v
        # Each of head_dim / 16 steps rounds a sum by at most 2^-23 of what its terms are in size; exponents are rounded
        # to 2^-24 a few times; the sums of at most some hundred powers have errors of 2^-20 at most.
        size = (q.abs() @ k.abs().mT).max().item() * self.scale
        self.lse_error = size * case.head_dim / 16 * 2**-23 + size * 2**-22 + 2**-20
        # What a kernel on 16-bit tensor cores can do at best: P and out are rounded to 16 bit, nothing else.
        p = torch.exp(logits - logits.amax(-1, keepdim=True))
        rounded = (p.to(case.dtype).double() @ v / p.sum(-1, keepdim=True)).to(case.dtype)
        self.reference_errors = errors(rounded, self.out)


inputs = functools.cache(Inputs)


def forward(emulated: Emulated, case: Sequences) -> tuple[Tensor, Tensor]:
    """out and lse of the whole sequence, segment by segment over a slab whose later rows hold NaN."""
    given, rows = inputs(case), case.tokens + 9
    slab = [torch.full((case.batch, case.kv_heads, rows, case.head_dim), math.nan).to(case.dtype) for _ in range(2)]
    docs = torch.full((case.batch, rows), -1, dtype=torch.int32)
    outs, lses, begin = [], [], 0
    for length in case.segments or (case.tokens,):
        end = begin + length
        own = slice(begin, end)
        slab[0][:, :, own], slab[1][:, :, own], docs[:, own] = (
            given.k[:, :, own],
            given.v[:, :, own],
            given.docs[:, own],
        )
        q = laid_out(given.q[:, :, own], case)
        out = laid_out(torch.full_like(q, math.nan), case)
        lse = torch.full((case.batch, case.heads, length), math.nan)
        # Only the rows of the slab up to `end` may be read.
        read = [t[b, h, :end] for t in slab for b in range(case.batch) for h in range(case.kv_heads)]
        read += [docs[b, :end] for b in range(case.batch)] if case.documents else []
        read += dense_pieces(q)
        written = [lse, *dense_pieces(out)]
        attention = attention_of(case, begin, q, *slab, out, lse, docs, given.scale)
        arguments = CudaAttention(attention, num_parts=case.num_parts)
        emulated.run("attention_forward", arguments, read, written)
        assert emulated.conflicts == 0, f"{emulated.conflicts} bank conflicts"
        outs.append(out.clone())
        lses.append(lse)
        begin = end
    return torch.cat(outs, 2), torch.cat(lses, 2)


def check(emulated: Emulated, case: Sequences) -> tuple[Tensor, Tensor]:
    """Errors of the whole sequence against the reference's, of segments against those of the whole."""
    given = inputs(dataclasses.replace(case, segments=()))
    whole = forward(emulated, dataclasses.replace(case, segments=()))
    for kind, ours, limit in zip(("largest", "mean"), errors(whole[0], given.out), given.reference_errors, strict=True):
        assert ours <= 1.5 * limit, f"{kind} error of out: {ours}, the reference's {limit}"
    results = [whole]
    if case.segments:
        results.append(forward(emulated, case))
        for kind, ours, limit in zip(
            ("largest", "mean"), errors(results[1][0], given.out), errors(whole[0], given.out), strict=True
        ):
            assert ours <= 1.25 * limit, f"{kind} error of out: {ours} in segments, {limit} whole"
    for _, lse in results:
        assert errors(lse, given.lse)[0] <= given.lse_error, f"error of lse: {errors(lse, given.lse)[0]}"
    return results[-1]


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["kernels/cuda/sm80_attention_forward.cu"], Path(work))


# -- what comes out --------------------------------------------------------------------------------------------------

CASES = [
    Sequences(),
    Sequences(tokens=1),
    Sequences(tokens=64, head_dim=128),
    Sequences(tokens=63, heads=1),
    Sequences(tokens=65, heads=1, dtype=FP16),
    Sequences(tokens=200, segments=(70, 1, 64, 65), head_dim=128, heads=4, kv_heads=2, batch=2),
    Sequences(tokens=200, segments=(64, 64, 72), heads=3, dtype=FP16),
    Sequences(tokens=150, segments=(100, 50), heads=6, kv_heads=2, head_major=True),
    Sequences(tokens=330, segments=(300, 30), head_dim=128, window=100),
    Sequences(tokens=330, segments=(129, 201), window=64, dtype=FP16),
    Sequences(tokens=200, segments=(150, 50), window=1),
    Sequences(tokens=150, segments=(100, 50), softcap=2.0),
    Sequences(tokens=330, segments=(200, 130), documents=(50, 143, 1, 60, 76), batch=2),
    Sequences(tokens=330, segments=(200, 130), documents=(10, 20, 90, 180, 30), num_parts=3, head_dim=128),
    Sequences(tokens=330, segments=(200, 130), window=90, softcap=3, documents=(128, 64, 138), dtype=FP16, num_parts=2),
    Sequences(tokens=330, segments=(320, 10), num_parts=4, heads=4, kv_heads=2),
    Sequences(tokens=100, segments=(50, 50), num_parts=7, batch=2),
    Sequences(tokens=700, segments=(690, 10), head_dim=128),
    Sequences(tokens=330, segments=(200, 130), head_dim=128, dtype=FP16, window=130),
    Sequences(tokens=100, scale=1.5, head_dim=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(emulated: Emulated, case: Sequences) -> None:
    emulated.seed = CASES.index(case)
    check(emulated, case)


def test_equal_bits(emulated: Emulated) -> None:
    """Whatever the order of blocks, threads and copies."""
    case = Sequences(tokens=300, segments=(150, 150), heads=4, kv_heads=2, num_parts=2)
    results = []
    for emulated.seed in range(3):
        results.append(forward(emulated, case))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.skipif(not HAS_FMA, reason="this processor has no FMA, and rounds each product")
def test_sums_do_not_drift_over_many_blocks(emulated: Emulated) -> None:
    """lse of one block of rows over 256 blocks of keys. Its maximum seldom changes, and where it does not, sums shrink
    by exactly 1, however products and sums are contracted."""
    tokens, rows, scale = 2048 if SANITIZED else 16384, 128, 2.0
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 1, tokens, 64, generator=generator).to(BF16) for _ in range(2))
    q = torch.randn(1, 1, rows, 64, generator=generator).to(BF16)
    out, lse, docs = torch.empty_like(q), torch.empty(1, 1, rows), torch.empty(0, dtype=torch.int32)
    case = Sequences(tokens=tokens, heads=1)
    attention = attention_of(case, tokens - rows, q, keys, values, out, lse, torch.empty(1, 0), scale)
    emulated.run("attention_forward", CudaAttention(attention, num_parts=1), [q, keys, values, docs], [out, lse])
    logits = q.double() @ keys.double().mT * scale
    hidden = torch.ones(rows, tokens, dtype=torch.bool).triu(tokens - rows + 1)
    truth = logits.masked_fill(hidden, -math.inf).logsumexp(-1)
    error = errors(lse, truth)[0]
    assert error <= 4 * 2**-24 * truth.abs().max().item(), error


@pytest.mark.parametrize(
    "case, pairs",
    [
        (Sequences(tokens=512, heads=1), 2 + 4 + 6 + 8),
        (Sequences(tokens=512, heads=1, segments=(384, 128)), 8),
        (Sequences(tokens=512, heads=1, segments=(384, 128), num_parts=3), 8),
        (Sequences(tokens=512, heads=1, window=64), 2 + 3 + 3 + 3),
        (Sequences(tokens=512, heads=1, documents=(128, 128, 128, 128)), 4 * 2),
        (Sequences(tokens=512, heads=1, documents=(100, 28, 256, 128)), 2 + 2 + 4 + 2),
        (Sequences(tokens=16, heads=8, kv_heads=1), 1),
    ],
    ids=str,
)
def test_work_is_what_is_seen(emulated: Emulated, case: Sequences, pairs: int) -> None:
    """pairs: in the last segment, of 128 rows, of all query heads of a kv head, and 64 keys that they may see."""
    forward(emulated, case)
    assert emulated.products == pairs * 2 * 128 * 64 * case.head_dim / (16 * 8 * 16)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": 0}, {"head_dim": 96}, {"kv_heads": 3}, {"scale": -1.0}, {"softcap": -1.0}, {"window": -1},
        {"q_start": 1 << 30}, {"q": 8}, {"q_strides": Strides(0, 4, 0)}, {"batch": 1 << 16},
    ],
    ids=str,
)  # fmt: skip
def test_refused_arguments(emulated: Emulated, change: dict) -> None:
    attention = Attention(dtype=2, batch=1, heads=2, kv_heads=1, segment_len=64, head_dim=64, scale=1.0)
    for name, value in change.items():
        setattr(attention, name, value)
    arguments = CudaAttention(attention)
    assert emulated.operation("attention_forward").scratch_bytes(byref(arguments), -1) == -1
    with pytest.raises(Refused):
        emulated.run("attention_forward", arguments, [], [])


def test_too_little_scratch_is_refused(emulated: Emulated) -> None:
    attention = Attention(dtype=2, batch=1, heads=1, kv_heads=1, segment_len=64, head_dim=64, scale=1.0)
    arguments = CudaAttention(attention, num_parts=2)
    wanted = emulated.operation("attention_forward").scratch_bytes(byref(arguments), -1)
    assert wanted == 2 * 64 * 4 + 2 * 64 * 64 * 4
    arguments.scratch, arguments.scratch_bytes = 1 << 20, wanted - 1
    with pytest.raises(Refused):
        emulated.launch("attention_forward", arguments, [], [], -1)


def test_kernels_fit_their_configuration(emulated: Emulated) -> None:
    """One for each head size and dtype, in 99 KB of shared memory for a block."""
    kernels = [k for k in emulated.kernels("attention_forward") if k.products]
    assert all(k.shared_bytes <= k.shared_limit for k in kernels)
    found = sorted((k.dtype, k.head_dim, k.shared_limit) for k in kernels)
    assert found == sorted(itertools.product(DTYPES.values(), (64, 128), [SHARED_99_KB]))


def test_the_launcher_splits_keys_where_blocks_are_few(emulated: Emulated) -> None:
    operation, rows = emulated.operation("attention_forward"), {}
    for heads, tokens, q_start in ((1, 64, 16384), (1, 64, 0), (128, 128, 16384), (8, 1024, 1 << 20)):
        attention = Attention(
            dtype=2, batch=1, heads=heads, kv_heads=heads, segment_len=tokens, head_dim=64, q_start=q_start, scale=1.0
        )
        wanted = operation.scratch_bytes(byref(CudaAttention(attention)), -1)
        rows[heads, tokens, q_start] = wanted / (heads * tokens * 65 * 4)
    # 256 blocks are wanted, of 4 blocks of 64 keys each or more; 1 head of 64 tokens is 1 tile, 8 of 1024 are 64
    assert list(rows.values()) == [(16384 + 64) // 256, 0, 0, 4]


# -- mutations -------------------------------------------------------------------------------------------------------

FORWARD, OPTIONS = "sm80_attention_forward.cuh", "attention_options.cuh"
TILE, PRODUCTS = "sm80_tile.cuh", "sm80_products.cuh"
WAIT, BARRIER, COPY = "copy_async_wait<AHEAD - 1>();", "block_barrier();", "copy_next(coming, a, at, keys, ring);"
LOAD_Q = "load_factors<HEAD_DIM>(q, q_tile, at.warp * WARP_ROWS);"
NEW_LINE = "\n" + 8 * " "
# Longer originals before those that they contain.
MUTATIONS = [
    # copies and barriers
    Mutation(
        "wait behind the barrier", FORWARD, NEW_LINE.join([WAIT, BARRIER, COPY]), NEW_LINE.join([BARRIER, WAIT, COPY])
    ),
    Mutation("no wait for a tile", FORWARD, WAIT, ""),
    Mutation("wait for a tile less", FORWARD, WAIT, "copy_async_wait<AHEAD>();"),
    Mutation("no barrier before a tile is used", FORWARD, BARRIER + NEW_LINE + COPY, COPY),
    Mutation("copy before the barrier", FORWARD, BARRIER + NEW_LINE + COPY, COPY + BARRIER),
    Mutation("no wait for Q", FORWARD, "copy_async_wait<AHEAD>();", ""),
    Mutation("no barrier before Q is used", FORWARD, BARRIER + NEW_LINE + "    " + LOAD_Q, LOAD_Q),
    Mutation("no wait for Q where no key is seen", FORWARD, "copy_async_wait<0>();", ""),
    Mutation("no barrier before out is read back", FORWARD, "warp_barrier();", ""),
    Mutation("a tile less under way", FORWARD, "i < AHEAD", "i < AHEAD - 1"),
    Mutation("a slot less", FORWARD, "slot + 1 == SLOTS", "slot + 2 == SLOTS"),
    Mutation("a slot more", FORWARD, "slot + 1 == SLOTS", "slot == SLOTS"),
    Mutation("no zeros for keys behind the last", TILE, "row < num_rows", "true"),
    Mutation("zeros for the last key", TILE, "row < num_rows", "row < num_rows - 1"),
    Mutation(
        "a key behind the last", FORWARD, "a.options.num_tokens - first_key", "a.options.num_tokens - first_key + 1"
    ),
    Mutation("no zeros for rows behind the last", FORWARD, "at.first_row + row < at.num_rows", "true"),
    Mutation("no swizzle", TILE, "column_chunk ^ (row & 7)", "column_chunk"),
    Mutation("a swizzle over four rows", TILE, "column_chunk ^ (row & 7)", "column_chunk ^ (row & 3)"),
    # which keys are seen
    Mutation(
        "the next token is seen", OPTIONS, "(uint32_t)(token - key)", "(uint32_t)(token - key + (key == token + 1))"
    ),
    Mutation(
        "the own token is not seen", OPTIONS, "(uint32_t)(token - key)", "(uint32_t)(token - key - (token == key))"
    ),
    Mutation("a key more in the window", OPTIONS, "(uint32_t)rule.window", "(uint32_t)rule.window + 1"),
    Mutation("a key less in the window", OPTIONS, "(uint32_t)rule.window", "(uint32_t)rule.window - 1"),
    Mutation("no mask on the diagonal", OPTIONS, "last_key > first_token", "last_key > last_token"),
    Mutation(
        "no mask where the window begins",
        OPTIONS,
        "last_token - first_key >= rule.window",
        "last_token - first_key - 63 > rule.window",
    ),
    Mutation(
        "the first block of the window left out",
        OPTIONS,
        "first_key > 0 ? first_key / KEYS : 0",
        "first_key > 0 ? (first_key + KEYS - 1) / KEYS : 0",
    ),
    Mutation("the last block left out", OPTIONS, "last_token / KEYS + 1", "last_token > KEYS ? last_token / KEYS : 1"),
    Mutation("other documents are seen", FORWARD, "docs[line] != doc", "false"),
    Mutation("a block of the own document left out", OPTIONS, "a.low <= b.high", "a.low < b.high"),
    Mutation("no mask between documents", OPTIONS, "ids.low != ids.high || queries.low != queries.high", "false"),
    Mutation(
        "ranges of documents too narrow",
        OPTIONS,
        "token < behind && token < num_tokens",
        "token < behind - 1 && token < num_tokens",
    ),
    Mutation(
        "parts overlap", OPTIONS, "blocks * (part + 1) / num_parts", "(blocks * (part + 1) + num_parts - 1) / num_parts"
    ),
    Mutation(
        "a part ends too soon", OPTIONS, "blocks * (part + 1) / num_parts", "(blocks * (part + 1) - 1) / num_parts"
    ),
    # lanes
    Mutation("matrices 1 and 2 of A and of V swapped", TILE, "row + lane % 16", "row + lane % 8 + lane / 16 * 8"),
    Mutation("columns of K from lanes of others", TILE, "column_chunk + lane / 8 % 2", "column_chunk + lane / 16"),
    Mutation("chunks added, not exchanged", PRODUCTS, "address ^ (uint32_t)(columns * 2)", "address + columns * 2"),
    Mutation(
        "halves of B swapped",
        PRODUCTS,
        "matrix_multiply_add<Element>(d[i][column], a[i], b[0], b[1]);",
        "matrix_multiply_add<Element>(d[i][column], a[i], b[1], b[0]);",
    ),
    Mutation(
        "quarters of P swapped",
        PRODUCTS,
        "d[i][k * 2 + word / 2][word % 2 * 2]",
        "d[i][k * 2 + word % 2][word / 2 * 2]",
    ),
    Mutation("a maximum of two lanes", FORWARD, "shuffle_xor(high, 2)", "shuffle_xor(high, 1)"),
    Mutation("a sum of two lanes", FORWARD, "shuffle_xor(total, 2)", "total"),
    Mutation("rows of out in the order of lanes", FORWARD, "line * 8 + lane / 4", "line * 8 + lane % 8"),
    # sums
    Mutation("no log2 e in the scale", OPTIONS, "args.scale * log2_e", "args.scale"),
    Mutation("no cap", FORWARD, "options.cap * tanh_fast(options.inner * s)", "s * options.inner * options.cap"),
    Mutation("out not rescaled", FORWARD, "scale_rows(out, shrink);", ""),
    Mutation("sums not rescaled", FORWARD, "sum[line] * shrink[line]", "sum[line]"),
    Mutation(
        "rescaled only where all lanes ask for it", FORWARD, "warp_ballot(changed) != 0", "~warp_ballot(changed) == 0"
    ),
    Mutation("the level of a row that sees nothing", FORWARD, "high > -S1F_INFINITY ? high : 0", "high"),
    Mutation("lse to base 2", FORWARD, "lse * LN_2", "lse"),
    # heads and parts
    Mutation(
        "the other kv head",
        FORWARD,
        "at.kv_head * a.kv_strides.head",
        "(a.heads / a.group - 1 - at.kv_head) * a.kv_strides.head",
    ),
    Mutation("K for V", FORWARD, "coming.values ? a.v : a.k", "a.k"),
    Mutation(
        "heads of a group swapped",
        FORWARD,
        "at.kv_head * a.group + row % a.group",
        "at.kv_head * a.group + a.group - 1 - row % a.group",
    ),
    Mutation("parts of equal weight", FORWARD, "weight * of_part.element[i]", "of_part.element[i]"),
    Mutation("the first part left out", FORWARD, "sum += weight;", "sum += part == 0 ? 0 : weight;"),
]

MUTATION_CASES = [
    Sequences(tokens=150, segments=(100, 50), heads=4, kv_heads=2),
    Sequences(tokens=200, segments=(140, 60), window=70),
    Sequences(tokens=200, segments=(140, 60), documents=(40, 60, 27, 73), num_parts=2),
    Sequences(tokens=130, num_parts=4, softcap=3.0),
    Sequences(tokens=100, head_dim=128, num_parts=3),
]


EACH_MUTATION = [(index,) for index in range(len(MUTATIONS))]
not_sanitized = pytest.mark.skipif(SANITIZED, reason="mutations may do what sanitizers end the process for")


@pytest.fixture(scope="module")
def mutated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["kernels/cuda/sm80_attention_forward.cu"], Path(work), MUTATIONS)


@not_sanitized
def test_no_mutation(mutated: Emulated) -> None:
    mutated.mutation = 0
    for mutated.seed, case in itertools.product(range(2), MUTATION_CASES):
        check(mutated, case)


@not_sanitized
@pytest.mark.parametrize("index", slice_of(EACH_MUTATION, EACH_MUTATION[::3]), ids=[m.name for m in MUTATIONS])
def test_mutation_fails(mutated: Emulated, index: int) -> None:
    """Each fails one of the cases that the kernels pass."""
    mutated.mutation = index + 1
    with pytest.raises((AssertionError, KernelError)):
        for mutated.seed, case in itertools.product(range(2), MUTATION_CASES):
            check(mutated, case)
