"""Do the kernels of every instruction set of this machine keep their errors, their bits and their memory?

Of sizes above a block of keys and of rows, so that blocks are skipped, masked and whole. tests/c/test_attention.c goes
through shapes, strides and float32; here are the errors of 16-bit results beside torch's, and what the ops add:
segments, trees of them, micro-batches, torch's threads and allocations.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from attention_runs import errors as relative_errors
from attention_runs import formula, gradients, random_qkv, segmented
from core_extension import core
from path_runs import Case, by_paths, by_units
from simulated_step import SimulatedStep
from slices import each_value
from torch import Tensor

from seq1f1b import _C
from seq1f1b.attention.causal import causal_attention, layer_handle

ops = torch.ops.seq1f1b
SIZES = [113, 7, 1, 391, 88]  # of segments; ends and beginnings lie anywhere in a block
TOKENS = sum(SIZES)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = (HEAD_DIM**-0.5, 0, 0.0)  # scale, window, softcap
NONE = torch.empty(0)


def instruction_sets() -> Iterator[str]:
    """Those of this machine."""
    for name in ("portable", "neon", "avx2", "avx512", "avx512bf16"):
        with contextlib.suppress(ValueError):
            core.attention_set_isa(name)
            yield name
    core.attention_set_isa(None)


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    core.attention_set_isa(request.param)
    assert _C.attention_isa() == request.param
    yield request.param
    core.attention_set_isa(None)


def documents(*lengths: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(torch.int32)[None]


SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.015625])
SINKS = torch.tensor([0.5, -1.25, 6.0, -0.75])
OPTIONS: dict[str, dict] = {
    "none": {},
    "window below a block": {"window": 100},
    "window above a block": {"window": 250},
    "window and a scale above 1": {"window": 100, "scale": 2.0},
    "softcap": {"softcap": 5.0},
    "slopes": {"alibi_slopes": SLOPES},
    "documents": {"doc_ids": documents(50, 143, 1, 300, 106)},
    "documents that come back": {"doc_ids": documents(50, 143, 1, 300, 106) % 2},
    "sinks": {"sinks": SINKS},
    "all": {
        "window": 250, "softcap": 5.0, "alibi_slopes": SLOPES, "doc_ids": documents(50, 143, 1, 300, 106),
        "sinks": SINKS,
    },
}  # fmt: skip


def whole(options: dict, qkv: list[Tensor], dout: Tensor) -> list[Tensor]:
    return gradients(lambda *t: causal_attention(*t, layer=0, **options), *qkv, dout)


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    sizes = {"batch": 1, "tokens": TOKENS, "head_dim": HEAD_DIM, "dtype": dtype}
    return random_qkv(HEADS, KV_HEADS, seed=seed, **sizes), random_qkv(HEADS, KV_HEADS, seed=seed + 100, **sizes)[0]


@pytest.mark.parametrize("name", [*instruction_sets(), "reference", "of no machine"])
def test_the_environment_forces_one(name: str) -> None:
    """SEQ1F1B_ISA, read at first use; what no machine has is ignored."""
    command = [sys.executable, "-c", "from seq1f1b import _C; print(_C.attention_isa())"]
    found = subprocess.check_output(command, env={**os.environ, "SEQ1F1B_ISA": name}, text=True).strip()
    assert found == name or (name == "of no machine" and found in instruction_sets())


# -- errors -----------------------------------------------------------------------------------------------------


@functools.cache
def truth_and_torchs_error(name: str, dtype: torch.dtype) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """out, dq, dk, dv in fp64 of the same rounded inputs; and how far plain torch in `dtype` is from them."""
    qkv, dout = inputs(dtype)
    truth = gradients(lambda *t: formula(*t, **OPTIONS[name]), *(t.double() for t in (*qkv, dout)))
    plain = gradients(lambda *t: formula(*t, **OPTIONS[name]), *qkv, dout)
    return truth, [errors(*pair) for pair in zip(plain, truth, strict=True)]


def errors(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """Largest and root mean square."""
    difference = got.double() - truth
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


@pytest.mark.parametrize("name, dtype", each_value(list(OPTIONS), [BF16, FP16]), ids=str)
def test_16_bit_errors(isa: str, name: str, dtype: torch.dtype) -> None:
    """Within 1.5 times that of a 16-bit reference of the whole sequence; in segments within 1.25 times that unsplit."""
    qkv, dout = inputs(dtype)
    truth, allowed = truth_and_torchs_error(name, dtype)
    unsplit = whole(OPTIONS[name], qkv, dout)
    split = segmented(SIZES, OPTIONS[name], [qkv], [dout])[0]
    for what, exact, torchs, once, parts in zip(["out", "dq", "dk", "dv"], truth, allowed, unsplit, split, strict=True):
        assert once.dtype == parts.dtype == dtype
        for kind, limit, ours, ours_split in zip(
            ("largest", "mean"), torchs, errors(once, exact), errors(parts, exact), strict=True
        ):
            assert ours <= 1.5 * limit, f"{kind} error of {what}: {ours}, torch's {limit}"
            assert ours_split <= 1.25 * ours, f"{kind} error of {what}: {ours_split} in segments, {ours} whole"


# -- bits -------------------------------------------------------------------------------------------------------


def assert_same(results: list[list[Tensor]]) -> None:
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    "heads, kv_heads, name, dtype",
    [
        (1, 1, "none", BF16), (1, 1, "all", torch.float32), (HEADS, KV_HEADS, "documents", torch.float32),
        (HEADS, KV_HEADS, "window above a block", BF16),
    ],
    ids=str,
)  # fmt: skip
def test_bit_equal_over_threads_and_runs(isa: str, heads: int, kv_heads: int, name: str, dtype: torch.dtype) -> None:
    qkv, dout = inputs(dtype)
    qkv, dout = [qkv[0][:, :heads], qkv[1][:, :kv_heads], qkv[2][:, :kv_heads]], dout[:, :heads]
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"], options["sinks"] = SLOPES[:heads], SINKS[:heads]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4, 1):
            torch.set_num_threads(threads)
            results.append(whole(options, qkv, dout) + segmented(SIZES, options, [qkv], [dout])[0])
    finally:
        torch.set_num_threads(before)
    assert_same(results)


# -- trees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (BF16, 2e-2), (FP16, 3e-3)], ids=str)
def test_trees_over_blocks_of_keys(isa: str, dtype: torch.dtype, limit: float) -> None:
    """Keys in several ranges of rows, gradients of which any number is there already, and siblings of one unit."""
    for seed, name in enumerate(("none", "softcap", "sinks", "window below a block", "slopes", "documents")):
        case = Case(seed, longest=130, with_parts=seed < 3)
        options = dict(OPTIONS[name])
        if name == "documents":
            options["doc_ids"] = torch.arange(case.tokens, dtype=torch.int32)[None] // 90
        sizes = {"batch": 1, "tokens": case.tokens, "head_dim": 24, "v_head_dim": 40, "dtype": dtype}
        qkv, dout = random_qkv(HEADS, KV_HEADS, **sizes), random_qkv(HEADS, KV_HEADS, seed=1, **sizes)[2]
        dout = dout.repeat_interleave(HEADS // KV_HEADS, 1)
        found = by_units(case.step, case.order, options, qkv, dout)
        assert max(relative_errors(found, by_paths(case.step, options, qkv, dout))) < limit, (name, seed)


def test_rows_elsewhere_change_no_bit(isa: str) -> None:
    """A chain whose segments lie in place, and in another order with gaps."""
    order = [*(("F", s) for s in range(5)), *(("B", s) for s in reversed(range(5)))]
    for dtype in (torch.float32, BF16, FP16):
        steps = SimulatedStep(SIZES), SimulatedStep(SIZES, rows=[500, 620, 630, 100, 0], num_rows=650)
        assert_same([by_units(step, order, OPTIONS["all"], *inputs(dtype)) for step in steps])


def test_blocks_of_other_siblings_are_left_out(isa: str) -> None:
    """What is computed of them would be NaN. Siblings begin with a block of keys, and of rows."""
    block, results = 192, []
    q, k, v = random_qkv(HEADS, KV_HEADS, batch=1, tokens=4 * block, head_dim=24, dtype=BF16)
    for _ in range(2):
        step = SimulatedStep([2 * block, 2 * block], parents=[-1, 0], parts={1: [block, block]})
        order = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
        results.append(by_units(step, order, {}, [q, k, v], torch.ones_like(q))[:2])  # out and dq
        k[:, :, 2 * block : 3 * block] = v[:, :, 2 * block : 3 * block] = float("nan")
    for clean, got in zip(*results, strict=True):
        assert torch.equal(got[:, :, 3 * block :], clean[:, :, 3 * block :])
        assert got[:, :, 2 * block : 3 * block].isnan().all()


# -- memory -----------------------------------------------------------------------------------------------------


def allocations(run) -> list[int]:
    """Bytes of each allocation that torch's CPU allocator makes while run() runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    events = profile.profiler.kineto_results.events()
    del kept
    return sorted(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


@pytest.mark.parametrize("name", ["none", "window below a block", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_warm_step_allocates_its_results_only(isa: str, dtype: torch.dtype, name: str) -> None:
    """Counted: torch's allocations by the ops, from the second step on. Scratch and slabs are the KV cache's, and
    tests/c/test_kv_cache.c counts that it asks for none then; tests/c/test_attention.c that no kernel does. Parts of
    one projection are read as they lie."""
    qkv, dout = inputs(dtype)
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in qkv], -1)
    parts = fused.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
    q, k, v = (t.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for t in parts)
    options = OPTIONS[name]
    slopes, docs, sinks = (options.get(option, NONE) for option in ("alibi_slopes", "doc_ids", "sinks"))
    scalars = (PLAIN[0], options.get("window", 0), options.get("softcap", 0.0))
    cache, layer = _C.kv_cache_create(), layer_handle(0)

    def step() -> list[Tensor]:
        simulated, kept = SimulatedStep(SIZES, cache=cache), []
        order = [("F", s) for s in range(len(SIZES))] + [("B", s) for s in reversed(range(len(SIZES)))]
        for kind, s in order:
            rows = simulated.slice(s)
            mine = (slopes, docs[:, rows] if docs.numel() else NONE, sinks, *scalars)
            with simulated.unit(kind, 0, s):
                if kind == "F":
                    kept.append(ops.segment_attention(*(t[:, :, rows] for t in (q, k, v)), layer, *mine))
                else:
                    arguments = (dout[:, :, rows], q[:, :, rows], *kept[s], layer, *mine, KV_HEADS)
                    kept.append(ops.segment_attention_backward(*arguments))
        return kept

    results = [t for unit in step() for t in unit]
    assert allocations(step) == sorted(t.nbytes for t in results if t.numel())
