"""Do the CUDA kernels compute attention's gradients? Their source, compiled for the CPU, on tests/cuda's emulation.

Truth is plain attention in fp64 of the whole sequence. The kernels get out and lse from it, rounded, not from those of
the forward. What the emulation checks by itself (races, copies that are not waited for, bounds) makes every run here
fail; tests/cuda/emulation.h lists it. On a GPU benchmarks/gpu.py runs the same kernels.
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
from typing import Any

import pytest
import torch
from emulated_cuda import (
    DTYPES,
    SANITIZED,
    SHARED_99_KB,
    SHARED_163_KB,
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
    strides_of,
)
from slices import slice_of
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Case(Sequences):
    deterministic: bool = False
    small: bool = False  # tiles for 99 KB of shared memory instead of 163
    own_rows: bool = True  # complete rows of dK and dV are asked for in 16 bit; else they are read from the slab


class Inputs:
    """The kernels' input, in 16 bit, and the gradients that are to come out: dq, dk, dv."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(1)
        sizes = [(case.batch, h, case.tokens, case.head_dim) for h in (case.heads, case.kv_heads, case.kv_heads)]
        self.q, self.k, self.v, self.dout = (
            torch.randn(size, generator=generator).to(case.dtype) for size in (*sizes, sizes[0])
        )
        self.scale = case.scale if case.scale is not None else case.head_dim**-0.5
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v)]
        logits, slope, hidden = self._logits(case, *leaves[:2])
        values = leaves[2].repeat_interleave(case.heads // case.kv_heads, 1)
        out = torch.softmax(logits.masked_fill(hidden, -math.inf), -1) @ values
        self.truth = torch.autograd.grad(out, leaves, self.dout.double())
        self.out = out.detach().to(case.dtype)
        logits, slope = logits.detach(), slope.detach()
        self.lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1).float()
        self.reference = self._reference(case, logits, slope, hidden)
        # If dS is 0 but for the rounding of sums: dP and delta are sums of head_dim terms in fp32, 16 at a step; dQ
        # has such errors times the keys, weighted by P, which sums to 1, and dK times the queries.
        size = (self.dout.double().abs() @ values.detach().abs().mT).max() * self.scale
        self.floor = size.item() * case.head_dim / 8 * 2**-23 * max(t.abs().max().item() for t in (self.q, self.k))

    def _logits(self, case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Also the cap's derivative, and which pairs are hidden."""
        logits = q @ k.repeat_interleave(case.heads // case.kv_heads, 1).mT * self.scale
        slope = torch.ones_like(logits)
        if case.softcap:
            squashed = torch.tanh(logits / case.softcap)
            logits, slope = case.softcap * squashed, 1 - squashed.square()
        return logits, slope, case.hidden()

    def _reference(self, case: Case, logits: Tensor, slope: Tensor, hidden: Tensor) -> list[Tensor]:
        """What kernels on 16-bit tensor cores can do at best: P, dS and the results are rounded to 16 bit, and out and
        lse were; nothing else."""
        group = case.heads // case.kv_heads
        q, dout, out = (t.double() for t in (self.q, self.dout, self.out))
        k, v = (t.double().repeat_interleave(group, 1) for t in (self.k, self.v))
        p = torch.exp(logits - self.lse.double()[..., None]).masked_fill(hidden, 0)
        ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * slope
        p, ds = (t.to(case.dtype).double() for t in (p, ds))
        by_kv_head = (case.batch, case.kv_heads, group, case.tokens, case.head_dim)
        dk = (ds.mT @ q * self.scale).view(by_kv_head).sum(2)
        dv = (p.mT @ dout).view(by_kv_head).sum(2)
        return [t.to(case.dtype) for t in (ds @ k * self.scale, dk, dv)]


@functools.cache
def _inputs(case: Case) -> Inputs:
    return Inputs(case)


def inputs(case: Case) -> Inputs:
    same = {f.name: f.default for f in dataclasses.fields(Case)}
    asked = ("segments", "num_parts", "deterministic", "small", "head_major", "own_rows")
    return _inputs(dataclasses.replace(case, **{name: same[name] for name in asked}))


def backward(emulated: Emulated, case: Case) -> list[Tensor]:
    """dq, dk and dv of the whole sequence, segment by segment, last first, over slabs as the cache's.

    Rows behind a segment hold NaN, and the kernels may not touch them; so does all of dK and dV before the first
    contribution, and a segment's rows of them once they are complete.
    """
    given, rows = inputs(case), case.tokens + 9
    size = (case.batch, case.kv_heads, rows, case.head_dim)
    keys, values = (torch.full(size, math.nan).to(case.dtype) for _ in range(2))
    keys[:, :, : case.tokens], values[:, :, : case.tokens] = given.k, given.v
    dk, dv = (torch.full(size, math.nan) for _ in range(2))
    docs = torch.full((case.batch, rows), -1, dtype=torch.int32)
    if case.documents:
        docs[:, : case.tokens] = case.document_ids()

    results: list[list[Tensor]] = []
    end = case.tokens
    for length in reversed(case.segments or (case.tokens,)):
        begin = end - length
        own = slice(begin, end)
        keys[:, :, end:], values[:, :, end:], docs[:, end:] = math.nan, math.nan, -1
        q, out, dout = (laid_out(t[:, :, own], case) for t in (given.q, given.out, given.dout))
        dq = laid_out(torch.full_like(q, math.nan), case)
        lse = given.lse[:, :, own].contiguous()
        complete = [torch.full((case.batch, length, case.kv_heads, case.head_dim), math.nan).to(case.dtype)
                    for _ in range(2)]  # fmt: skip
        own_dk, own_dv = (t.transpose(1, 2) for t in complete)
        strips = [(b, h) for b in range(case.batch) for h in range(case.kv_heads)]
        read = [t[b, h, :end] for t in (keys, values) for b, h in strips] + [lse]
        read += [docs[b, :end] for b in range(case.batch)] if case.documents else []
        read += [piece for t in (q, out, dout) for piece in dense_pieces(t)]
        written = [t[b, h, :end] for t in (dk, dv) for b, h in strips]
        written += [*complete, *dense_pieces(dq)]
        attention = attention_of(case, begin, q, keys, values, out, lse, docs, given.scale)
        attention.dout, attention.dout_strides = dout.data_ptr(), strides_of(dout)
        attention.dq, attention.dq_strides = dq.data_ptr(), strides_of(dq)
        attention.dk, attention.dv, attention.dkv_strides = dk.data_ptr(), dv.data_ptr(), strides_of(dk)
        attention.store_kv_grads = end == case.tokens
        if case.own_rows:
            attention.own_dk, attention.own_dv = own_dk.data_ptr(), own_dv.data_ptr()
            attention.own_dkv_strides = strides_of(own_dk)
        arguments = CudaAttention(attention, num_parts=case.num_parts, deterministic=case.deterministic)
        emulated.shared_limit = SHARED_99_KB if case.small else SHARED_163_KB
        emulated.run("attention_backward", arguments, read, written)
        assert emulated.conflicts == 0, f"{emulated.conflicts} bank conflicts"
        if not case.own_rows:
            own_dk, own_dv = dk[:, :, own].clone(), dv[:, :, own].clone()
        dk[:, :, own], dv[:, :, own] = math.nan, math.nan
        results.insert(0, [dq.clone(), own_dk, own_dv])
        end = begin
    return [torch.cat(pieces, 2) for pieces in zip(*results, strict=True)]


def check(emulated: Emulated, case: Case) -> None:
    """Errors of the whole sequence against the reference's, of segments against those of the whole."""
    given = inputs(case)
    whole = backward(emulated, dataclasses.replace(case, segments=()))
    split = backward(emulated, case) if case.segments else whole
    for name, *results in zip(("dq", "dk", "dv"), whole, split, given.reference, given.truth, strict=True):
        truth = results.pop()
        for kind, of_whole, of_split, limit in zip(
            ("largest", "mean"), *(errors(t, truth) for t in results), strict=True
        ):
            limit += given.floor
            assert of_whole <= 1.5 * limit, f"{kind} error of {name}: {of_whole}, the reference's {limit}"
            limit = 1.25 * of_whole + given.floor
            assert of_split <= limit, f"{kind} error of {name}: {of_split} in segments, {of_whole} whole"


@pytest.fixture(scope="module")
def emulated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["kernels/cuda/sm80_attention_backward.cu"], Path(work))


# -- what comes out --------------------------------------------------------------------------------------------------

CASES = [
    Case(),
    Case(tokens=1),
    Case(tokens=63, heads=1, small=True),
    Case(tokens=65, heads=1, dtype=FP16, head_dim=128),
    Case(tokens=200, segments=(70, 1, 64, 65), heads=4, kv_heads=2, batch=2, small=True),
    Case(tokens=200, segments=(126, 74), head_dim=128, heads=3, dtype=FP16),
    Case(
        tokens=150, segments=(100, 50), heads=6, kv_heads=2, head_major=True, own_rows=False, small=True, head_dim=128
    ),
    Case(tokens=330, segments=(300, 30), head_dim=128, window=100, heads=1),
    Case(tokens=330, segments=(129, 201), window=64, dtype=FP16, small=True),
    Case(tokens=200, segments=(150, 50), window=1),
    Case(tokens=150, segments=(100, 50), softcap=2.0, head_dim=128),
    Case(tokens=330, segments=(200, 130), documents=(50, 143, 1, 60, 76), batch=2, small=True),
    Case(tokens=330, segments=(200, 130), documents=(10, 20, 90, 180, 30), num_parts=3, head_dim=128, heads=1),
    Case(tokens=330, segments=(310, 20), window=90, softcap=3.0, documents=(128, 64, 138), dtype=FP16, num_parts=2),
    Case(tokens=100, segments=(50, 50), num_parts=7, batch=2, own_rows=False),
    Case(tokens=150, segments=(120, 30), heads=8),  # several parts by the launcher's choice
    Case(tokens=130, segments=(70, 60), scale=1.5, head_dim=128, heads=1),  # logits of +-60
    Case(tokens=200, segments=(70, 130), deterministic=True, heads=4, kv_heads=2),
    Case(tokens=200, segments=(126, 74), deterministic=True, head_dim=128, window=70, softcap=2.0, dtype=FP16),
    Case(
        tokens=150, segments=(70, 80), deterministic=True, head_dim=128, documents=(30, 50, 1, 69), small=True, batch=2
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(emulated: Emulated, case: Case) -> None:
    emulated.seed = CASES.index(case)
    check(emulated, case)


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_equal_bits(emulated: Emulated, deterministic: bool, num_parts: int) -> None:
    """Whatever the order of blocks, threads and copies: dK and dV always, dQ where asked for."""
    case = Case(tokens=150, segments=(70, 80), heads=4, kv_heads=2, deterministic=deterministic, num_parts=num_parts)
    results = []
    for emulated.seed in range(3):
        results.append(backward(emulated, case))
    for dq, dk, dv in results[1:]:
        assert torch.equal(dk, results[0][1]) and torch.equal(dv, results[0][2])
        assert torch.equal(dq, results[0][0]) or not deterministic


def test_documents_that_do_not_meet_cost_nothing(emulated: Emulated) -> None:
    """Products of the tiles of queries and keys that share a document, and no others."""
    backward(emulated, Case(tokens=512, heads=1, documents=(128, 128, 128, 128)))
    key_gradients = [k for k in emulated.kernels("attention_backward") if k.products == 5]
    tile = next(k for k in key_gradients if (k.dtype, k.head_dim, k.query_rows) == (DTYPES[BF16], 64, 128))
    of_a_pair = tile.products * tile.query_rows * tile.key_rows * tile.head_dim // (16 * 8 * 16)
    assert (tile.key_rows, emulated.products) == (128, 4 * of_a_pair)


def scratch(emulated: Emulated, heads: int, kv_heads: int, tokens: int, end: int, **others: Any) -> int:
    attention = Attention(
        dtype=2, batch=1, heads=heads, kv_heads=kv_heads, segment_len=tokens, head_dim=128, q_start=end - tokens,
        scale=1.0, **others,
    )  # fmt: skip
    return emulated.operation("attention_backward").scratch_bytes(byref(CudaAttention(attention)), -1)


@pytest.mark.parametrize("heads, kv_heads", [(8, 1), (8, 8), (64, 8)])
@pytest.mark.parametrize("tokens", [512, 2048, 8192])
def test_scratch_is_bounded(emulated: Emulated, tokens: int, heads: int, kv_heads: int) -> None:
    """dQ, delta and lse of the segment in fp32, and parts of dK and dV of at most 264 + 263 tiles of 128 keys."""
    of_queries, of_parts = heads * tokens * (128 + 2) * 4, 527 * 128 * 128 * 2 * 4
    found = [scratch(emulated, heads, kv_heads, tokens, end) for end in (tokens, 4 * tokens, 1 << 20)]
    found.append(scratch(emulated, heads, kv_heads, tokens, 1 << 20, window=512, store_kv_grads=1))
    assert all(of_queries <= size <= of_queries + of_parts for size in found)
    assert max(found[:2]) > of_queries or kv_heads * tokens >= 264 * 128


REFUSED = [
    {"dtype": 0}, {"head_dim": 96}, {"kv_heads": 3}, {"scale": -1.0}, {"softcap": -1.0}, {"window": -1},
    {"q_start": 1 << 30}, {"heads": 1 << 16}, {"dout": 8}, {"dq_strides": Strides(0, 4, 0)}, {"dk": 4},
    {"dkv_strides": Strides(0, 0, 2)}, {"own_dk": 16}, {"own_dv": 24, "own_dk": 16},
]  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=str)
def test_refused_arguments(emulated: Emulated, change: dict) -> None:
    attention = Attention(dtype=2, batch=1, heads=2, kv_heads=1, segment_len=64, head_dim=64, scale=1.0)
    for name, value in change.items():
        setattr(attention, name, value)
    with pytest.raises(Refused):
        emulated.run("attention_backward", CudaAttention(attention), [], [])


# -- every error is found --------------------------------------------------------------------------------------------

BACKWARD, KEYS, QUERIES = "sm80_attention_backward.cuh", "sm80_key_gradients.cuh", "sm80_query_gradients.cuh"
PRODUCTS, LAUNCHER = "sm80_products.cuh", "sm80_attention_backward.cu"
WAIT = "copy_async_wait<0>();"
BARRIER = "block_barrier(); /* the turn's tiles are there; all have left the turn before */"
COPY = """if (next < here.end) {
                copy_queries(a, here, next, shared, stage ^ 1);
                if (DOUT_STAGES == 2)
                    copy_dout(a, here, next, shared + DOUT + (stage ^ 1) * QUERY_TILE);
            }"""
DQ_BARRIER = "block_barrier(); /* the tiles are there; all have left those before */"
DQ_COPY = """if (next < keys.end)
                copy_keys(a, next, batch, kv_head, shared + KV + (stage ^ 1) * 2 * KEY_TILE);"""


def lines(*statements: str) -> str:
    return ("\n" + 12 * " ").join(statements)


TURN, DQ_TURN = lines(WAIT, BARRIER, COPY), lines(WAIT, DQ_BARRIER, DQ_COPY)
MUTATIONS = [
    # copies and barriers
    Mutation("wait behind the barrier", KEYS, TURN, lines(BARRIER, WAIT, COPY)),
    Mutation("no wait for a turn's tiles", KEYS, TURN, lines(BARRIER, COPY)),
    Mutation("no barrier before a turn's tiles are used", KEYS, TURN, lines(WAIT, COPY)),
    Mutation("copy before the barrier", KEYS, TURN, lines(WAIT, COPY, BARRIER)),
    Mutation("copy onto the tile in use", KEYS, "copy_queries(a, here, next, shared, stage ^ 1);",
             "copy_queries(a, here, next, shared, stage);"),
    Mutation("no barrier before P and dS are read", KEYS, """block_barrier(); /* P and dS are there */

            multiply_others(dv, shared + P, dout_tile);""", "multiply_others(dv, shared + P, dout_tile);"),
    Mutation("no barrier before dO makes room", KEYS, """block_barrier(); /* all have left dO */
                if (next < here.end)
                    copy_dout(a, here, next, dout_tile);""",
             "if (next < here.end) copy_dout(a, here, next, dout_tile);"),
    Mutation("delta of the other stage", KEYS, "shared + DELTA + stage * STATISTICS",
             "shared + DELTA + (stage ^ 1) * STATISTICS"),
    Mutation("a key behind the last", KEYS, "a.options.num_tokens - here.first_key",
             "a.options.num_tokens - here.first_key + 1"),
    Mutation("no wait for K and V of dQ", QUERIES, DQ_TURN, lines(DQ_BARRIER, DQ_COPY)),
    Mutation("no barrier before K and V of dQ are used", QUERIES, DQ_TURN, lines(WAIT, DQ_COPY)),
    Mutation("copy onto K and V in use", QUERIES, "shared + KV + (stage ^ 1) * 2 * KEY_TILE",
             "shared + KV + stage * 2 * KEY_TILE"),
    # which pairs are seen
    Mutation("the next token is seen", KEYS, "key + i * 16 + r / 2 * 8", "key + i * 16 + r / 2 * 8 - 1"),
    Mutation("the own token is not seen", KEYS, "key + i * 16 + r / 2 * 8", "key + i * 16 + r / 2 * 8 + 1"),
    Mutation("no mask where a tile of queries begins within one of keys", KEYS,
             "here.first_key + KEY_ROWS - 1 > token", "here.first_key + KEY_ROWS - 1 > token + 1"),
    Mutation("no mask where the window begins", KEYS,
             "token + QUERY_ROWS - 1 - here.first_key >= a.options.window",
             "token - here.first_key >= a.options.window"),
    Mutation("the first tile of queries left out", KEYS, "first_row / QUERY_ROWS",
             "(first_row + QUERY_ROWS - 1) / QUERY_ROWS"),
    Mutation("the last tile of queries left out", KEYS, "(seen_to - q_start - 1) / QUERY_ROWS",
             "(seen_to - q_start - 2) / QUERY_ROWS"),
    Mutation("the last query of the window left out", KEYS, "last_key + a.options.window", "last_key + 1"),
    Mutation("the window's first keys left out", LAUNCHER, "(int)a.q_start - window + 1", "(int)a.q_start"),
    Mutation("other documents are seen", KEYS, "key_id[i * 2 + r / 2] == id[r % 2]", "true"),
    Mutation("no mask between documents", KEYS, "keys.low != keys.high || queries.low != queries.high", "false"),
    Mutation("documents of other queries", KEYS, "a.q_start + here.row(turn + lane)", "here.row(turn + lane)"),
    Mutation("documents of a block less", BACKWARD, "block <= last / RANGE_TOKENS", "block < last / RANGE_TOKENS"),
    Mutation("the next token is seen by dQ", QUERIES, "token + r / 2 * 8", "token + r / 2 * 8 + 1"),
    Mutation("other documents are seen by dQ", QUERIES, "key_id[r % 2] == id[r / 2]", "true"),
    # which numbers are multiplied
    Mutation("own P and dS for those of others", KEYS, "(own + other) % QUERY_WARPS", "own"),
    Mutation("columns of K for rows of dS", KEYS, "warp / DQ_ROW_WARPS * DQ_COLUMNS",
             "warp % DQ_ROW_WARPS * DQ_COLUMNS"),
    Mutation("dS not transposed for dQ", PRODUCTS, "corner_at<A_COLUMNS>(a_at, k * 16, i * 16)",
             "corner_at<A_COLUMNS>(a_at, i * 16, k * 16)"),
    Mutation("quarters stored crosswise", PRODUCTS, "word % 2 * 8", "word / 2 * 8"),
    Mutation("dQ of other rows", BACKWARD, "warp % Gradients::DQ_ROW_WARPS * ROWS + lane / 4",
             "warp % Gradients::DQ_ROW_WARPS * ROWS + lane % 8"),
    Mutation("the other kv head", KEYS, "kv_head() * a.group + turn / num_tiles", "kv_head() + turn / num_tiles"),
    Mutation("the other kv head for dQ", QUERIES, "head / a.group", "head % a.kv_heads"),
    # sums
    Mutation("no delta", KEYS, "dp[i][j][r] - of_query(i, j, r)", "dp[i][j][r]"),
    Mutation("delta of half a row", BACKWARD, "delta += shuffle_xor(delta, mask);",
             "delta += mask == 1 ? 0 : shuffle_xor(delta, mask);"),
    Mutation("delta of the other row in dQ", QUERIES, "dp[i][j][r] - delta[r / 2]", "dp[i][j][r] - delta[1 - r / 2]"),
    Mutation("lse to base e", BACKWARD,
             "LOG2_E * global_load(a.lse + (batch * (int64_t)a.heads + head) * a.segment_len + row)",
             "global_load(a.lse + (batch * (int64_t)a.heads + head) * a.segment_len + row)"),
    Mutation("no derivative of the cap", BACKWARD, "1 - t * t", "1.0f"),
    Mutation("dK without the scale", KEYS, "store(a, here, dk, a.scale, a.part_dk, a.dk, a.own_dk);",
             "store(a, here, dk, 1, a.part_dk, a.dk, a.own_dk);"),
    Mutation("sums of dQ not zeroed", BACKWARD, "global_store(sums + i + thread, float_quad{});", ""),
    # the slab
    Mutation("the first contribution adds", KEYS, "parts == nullptr && !a.store_kv_grads", "parts == nullptr"),
    Mutation("later contributions store", KEYS,
             "sum = {before.element[0] + sum.element[0], before.element[1] + sum.element[1]};", ""),
    Mutation("a row behind the last is stored", KEYS, "token >= a.options.num_tokens",
             "token > a.options.num_tokens"),
    Mutation("a turn between parts left out", KEYS, "turns * (part + 1) / a.num_parts",
             "(turns * (part + 1) - 1) / a.num_parts"),
    Mutation("the last part left out", BACKWARD, "part < a.num_parts", "part < a.num_parts - 1"),
    Mutation("room for one part less", LAUNCHER, "p.part_dv + part_rows * a.head_dim * size", "p.part_dv"),
]  # fmt: skip

MUTATION_CASES = [
    Case(tokens=140, segments=(126, 14), heads=2, kv_heads=2, small=True),
    Case(tokens=200, segments=(126, 74), window=70, softcap=3.0, head_dim=128, small=True, heads=1, num_parts=2),
    Case(tokens=197, segments=(130, 67), documents=(128, 40, 29), num_parts=2, heads=2),
    Case(tokens=129, segments=(70, 59), documents=(60, 69), deterministic=True, heads=4, kv_heads=2),
]


EACH_MUTATION = [(index,) for index in range(len(MUTATIONS))]
not_sanitized = pytest.mark.skipif(SANITIZED, reason="mutations may do what sanitizers end the process for")


@pytest.fixture(scope="module")
def mutated() -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        yield build(["kernels/cuda/sm80_attention_backward.cu"], Path(work), MUTATIONS)


@not_sanitized
def test_no_mutation(mutated: Emulated) -> None:
    mutated.mutation = 0
    for case in MUTATION_CASES:
        check(mutated, case)


@not_sanitized
@pytest.mark.parametrize("index", slice_of(EACH_MUTATION, EACH_MUTATION[::3]), ids=[m.name for m in MUTATIONS])
def test_mutation_fails(mutated: Emulated, index: int) -> None:
    """Each fails one of the cases that the kernels pass."""
    mutated.mutation = index + 1
    with pytest.raises((AssertionError, KernelError)):
        for mutated.seed, case in itertools.product(range(2), MUTATION_CASES):
            check(mutated, case)
