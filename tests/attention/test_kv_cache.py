"""Is every use of the KV cache out of order an error that names it, and does nothing of the past leak into a step?"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from core_extension import core
from processes import resident_bytes, results_of
from simulated_step import SimulatedStep
from torch import Tensor

from seq1f1b import _C, Loss, PipelineEngine
from seq1f1b.attention.causal import causal_attention, layer_handle

SIZES = [3, 2, 1]
TOKENS = sum(SIZES)


def qkv(microbatch: int = 0, dtype: torch.dtype = torch.float64, batch: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randn(batch, h, TOKENS, 4, generator=generator, dtype=torch.float64).to(dtype) for h in (2, 1, 1)]


class Run:
    """A step of micro-batches whose gradient of the output is all ones; a unit of it at a time."""

    def __init__(self, *, layers: int = 1, sizes: list[int] = SIZES, **options: object) -> None:
        self.step = SimulatedStep(sizes, **options)
        self.handles = [layer_handle(i) for i in range(layers)]
        self.leaves: dict[tuple[int, int], list[Tensor]] = {}
        self.outs: dict[tuple[int, int], Tensor] = {}

    def play(self, units: str) -> None:
        """Runs units written F0.1: in layer 0, and in 1 after +1; of KV slot 1 with @1, of gradient slot 1 with ^1."""
        for unit in units.split():
            found = re.fullmatch(r"(\w)(\d)\.(\d)(?:\+(\d))?(?:@(\d))?(?:\^(\d))?", unit)
            assert found is not None, unit
            kind, *numbers = found.groups()
            m, s, layer, slot, grad_slot = (None if number is None else int(number) for number in numbers)
            with self.step.unit(kind, m, s, slot=slot or 0, grad_slot=grad_slot or 0):
                if kind == "F":
                    leaves = [t[:, :, self.step.slice(s)].detach().clone().requires_grad_() for t in qkv(m)]
                    layers = [0] if layer is None else [0, layer]
                    self.outs[m, s] = sum(causal_attention(*leaves, layer=self.handles[i]) for i in layers)
                    self.leaves[m, s] = leaves
                elif kind == "B":
                    self.outs[m, s].sum().backward()

    def gradients(self, m: int) -> list[Tensor]:
        return [torch.cat([self.leaves[m, s][i].grad for s in range(len(SIZES))], dim=2) for i in range(3)]


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# -- out of order --------------------------------------------------------------------------------------------------

TREE = {"sizes": [1, 1, 1, 1], "parents": [-1, 0, 0, 2], "rows": [0, 1, 2, 3]}
TWO_SLOTS, ALL = {"kv_slots": 2, "grad_slots": 2}, "F0.0 F0.1 F0.2"
OUT_OF_ORDER = {  # Run.play has the words
    r"\[0\]F0.1: micro-batch 0 does not hold KV slot 0": ("F0.1", {}),
    r"\[0\]F0.2: forward of segment 2 before that of segment 1": ("F0.0 F0.2", {}),
    r"\[0\]F1.0: KV slot 0 is still held by micro-batch 0": (f"{ALL} F1.0", {}),
    r"\[0\]B0.2: backward before the forward of segment 2": ("F0.0 B0.2", {}),
    r"\[0\]B0.1: backward of segment 1, which 1 segments follow": (f"{ALL} B0.1", {}),
    r"\[0\]B0.2: second backward of segment 2": (f"{ALL} B0.2 B0.2", {}),
    r"\[0\]B1.2: gradient slot 0 is still held by micro-batch 0": (
        f"{ALL} F1.0@1 F1.1@1 F1.2@1 B0.2 B1.2@1", TWO_SLOTS,
    ),
    r"\[0\]B0.1: micro-batch 0 does not hold gradient slot 1": (f"{ALL} B0.2 B0.1^1", TWO_SLOTS),
    r"\[0\]F0.1: layer 1 reads segment 0 of micro-batch 0, which was never written": ("F0.0 F0.1+1", {}),
    # Rows of an earlier micro-batch do not count as written.
    r"\[0\]F1.1: layer 1 reads segment 0 of micro-batch 1": (
        "F0.0+1 F0.1+1 F0.2+1 B0.2 B0.1 B0.0 F1.0 F1.1+1", {},
    ),
    r"\[0\]F0.0: layer 0 is used twice in one forward, .* micro-batch 0, segment 0": ("F0.0+0", {}),
    "forward of segment 3 before that of segment 2, which it follows": ("F0.0 F0.3", TREE),
    "second forward of segment 2": ("F0.0 F0.2 F0.2", TREE),
    "segment 0, which 2 segments follow, after the backward of 1 of": ("F0.0 F0.1 F0.2 B0.1 B0.0", TREE),
    "second backward of segment 1": ("F0.0 F0.1 B0.1 B0.1", TREE),
    "segment 1 is recomputed after its backward": ("F0.0 F0.1 B0.1 R0.1", TREE),
    "segment 2 is recomputed before its forward": ("F0.0 R0.2", TREE),
}  # fmt: skip


@pytest.mark.parametrize("message", OUT_OF_ORDER)
def test_a_unit_out_of_order(message: str) -> None:
    units, options = OUT_OF_ORDER[message]
    before, _, last = units.rpartition(" ")
    run = Run(layers=2, **options)
    run.play(before)
    with pytest.raises(RuntimeError, match=message):
        run.play(last)


def test_a_backward_twice_in_one_unit() -> None:
    run = Run(sizes=[TOKENS])
    run.play("F0.0")
    message = "second backward of layer 0, micro-batch 0, segment 0"
    with pytest.raises(RuntimeError, match=message), run.step.unit("B", 0, 0):
        run.outs[0, 0].sum().backward(retain_graph=True)
        run.outs[0, 0].sum().backward()


def test_a_backward_within_a_forward_unit() -> None:
    run = Run(sizes=[TOKENS])
    leaves = [t.requires_grad_() for t in qkv()]
    message = r"\[0\]F0.0: backward of layer 0 within a forward unit"
    with pytest.raises(RuntimeError, match=message), run.step.unit("F", 0, 0):
        causal_attention(*leaves, layer=0).sum().backward()


def test_a_key_of_another_type() -> None:
    step = SimulatedStep([TOKENS])
    with pytest.raises(RuntimeError, match=r"layer is .* must be a handle"), step.unit("F", 0, 0):
        causal_attention(*qkv(), layer=torch.tensor(0, dtype=torch.int32))


def test_a_layer_that_changes_within_a_step() -> None:
    step = SimulatedStep([3, 3])
    with step.unit("F", 0, 0):
        causal_attention(*(t[:, :, :3] for t in qkv()), layer=0)
    for changed in (qkv(dtype=torch.float32), qkv(batch=2)):
        with pytest.raises(RuntimeError, match="layer 0 changed within a step"), step.unit("F", 0, 1):
            causal_attention(*(t[:, :, 3:] for t in changed), layer=0)
        assert type(_C.take_op_failure()) is ValueError
    with pytest.raises(RuntimeError, match=r"with document ids; its first use .* without"), step.unit("F", 0, 1):
        causal_attention(*(t[:, :, 3:] for t in qkv()), layer=0, doc_ids=torch.zeros(1, 3, dtype=torch.int64))


def test_a_segment_of_another_length() -> None:
    step = SimulatedStep(SIZES)
    with pytest.raises(RuntimeError, match="layer 0 attends with 6 tokens, the segment has 3"), step.unit("F", 0, 0):
        causal_attention(*qkv(), layer=0)


# -- in order ------------------------------------------------------------------------------------------------------


def test_a_layer_skipped_in_the_last_segment() -> None:
    """The first contribution to dK/dV stores, whichever segment it comes from: nothing of the micro-batch before."""

    def gradients_of_the_second(before: int) -> list[Tensor]:
        run = Run(layers=2)
        for m in (before, 5):
            run.play(f"F{m}.0+1 F{m}.1+1 F{m}.2 B{m}.2 B{m}.1 B{m}.0")
        return run.gradients(5)

    leaves = [t.requires_grad_() for t in qkv(5)]
    both = causal_attention(*leaves, layer=0)
    skipped = causal_attention(*(t[:, :, :5] for t in leaves), layer=1)
    (both.sum() + skipped.sum()).backward()
    for before in (3, 4):
        assert_close(gradients_of_the_second(before), [t.grad for t in leaves])


def finish(run: Run, units: str) -> None:
    """Plays what is left of micro-batch 0, whose gradients must then be those of plain attention."""
    run.play(units)
    leaves = [t.requires_grad_() for t in qkv()]
    causal_attention(*leaves, layer=0).sum().backward()
    assert_close(run.gradients(0), [t.grad for t in leaves])


def test_a_failed_step_leaves_nothing_behind() -> None:
    cache = _C.kv_cache_create()
    run = Run(cache=cache)
    run.play("F1.0 F1.1 F1.2 B1.2")
    with pytest.raises(ZeroDivisionError), run.step.unit("B", 1, 1):
        _ = 1 / 0
    finish(Run(cache=cache), f"{ALL} B0.2 B0.1 B0.0")


def test_a_unit_may_be_tried_again() -> None:
    run = Run()
    run.play("F0.0")
    with pytest.raises(ZeroDivisionError), run.step.unit("F", 0, 1):
        causal_attention(*(t[:, :, 3:5] for t in qkv(7)), layer=0)
        _ = 1 / 0
    finish(run, "F0.1 F0.2 B0.2 B0.1 B0.0")


def test_rows_never_written_do_not_leak() -> None:
    """A step of longer sequences fills the slabs with NaN; the next, of shorter ones, is not touched by them."""
    cache = _C.kv_cache_create()
    step = SimulatedStep([64], cache=cache)
    with step.unit("F", 0, 0):
        causal_attention(*(torch.full((1, h, 64, 4), torch.nan, dtype=torch.float64) for h in (2, 1, 1)), layer=0)
    finish(Run(cache=cache), f"{ALL} B0.2 B0.1 B0.0")


def test_stages_of_one_rank_keep_their_own_rows() -> None:
    """A layer key names two entries if two stages have it."""
    cache = _C.kv_cache_create()
    core.kv_cache_begin_step(cache, [(0, 1, 1), (3, 1, 1)], TOKENS, 2)
    outs = {}
    for s, (offset, length) in enumerate([(0, 4), (4, 2)]):
        for stage in (0, 3):
            place = (s - 1, 1 - s, [(0, offset + length, 0)], [length])
            core.current_unit_set(cache, 0, stage, 0, s, 2, 0, -1, False, offset, length, TOKENS, place)
            outs[stage, s] = causal_attention(*(t[:, :, offset : offset + length] for t in qkv(stage)), layer=0)
            core.current_unit_clear()
    for stage in (0, 3):
        whole = causal_attention(*qkv(stage), layer=0)
        torch.testing.assert_close(torch.cat([outs[stage, 0], outs[stage, 1]], dim=2), whole)


@pytest.mark.parametrize("v_head_dim", [4, 3])
def test_bytes_are_those_of_the_plan(v_head_dim: int) -> None:
    """Slots x layers x (k and v); dK and dV in fp32, once where backwards are consecutive. Kept for the next step."""
    cache, layers, slots = _C.kv_cache_create(), 3, 2
    assert _C.kv_cache_bytes(cache) == (0, 0)
    handles = [layer_handle(i) for i in range(layers)]
    elements = 1 * 1 * TOKENS * (4 + v_head_dim)
    for dtype, sums in ((torch.bfloat16, 4), (torch.bfloat16, 4)):
        step, outs = SimulatedStep(SIZES, kv_slots=slots, cache=cache), {}
        for m in range(slots):
            q, k, v = qkv(m, dtype)
            leaves = [t.requires_grad_() for t in (q, k, v[..., :v_head_dim])]
            for s in range(3):
                mine = [t[:, :, step.slice(s)] for t in leaves]
                with step.unit("F", m, s, slot=m):
                    outs[m, s] = sum(causal_attention(*mine, layer=handle) for handle in handles)
        for m in range(slots):
            for s in (2, 1, 0):
                with step.unit("B", m, s, slot=m):
                    outs[m, s].sum().backward()
        assert _C.kv_cache_bytes(cache) == (slots * layers * elements * 2, layers * elements * sums)
        of_token = (4 + v_head_dim) * 2, (4 + v_head_dim) * sums
        assert [layer[1:] for layer in _C.kv_cache_layers(cache)] == [of_token] * layers


def resident_slabs(rank: int, pipe: Connection, tokens: int) -> None:
    def resident() -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what torch's tensors left in the heap
        return resident_bytes()

    class Attends(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x * self.scale
            return causal_attention(q, q, q, layer=0, window=64)  # whose memory is that of a whole one

    x = torch.randn(1, 8192 // tokens, tokens, 256)
    engine = PipelineEngine(
        Attends(),
        num_microbatches=1,
        num_segments=8,
        seq_dim=2,
        loss_fn=lambda o, t: o.sum(),
        loss=Loss(reduction="sum"),
    )
    engine.step(x, target=x)
    before = resident()
    engine.step(x, target=x)
    report = engine.report()
    assert report.kv_bytes == 16 << 20 and report.grad_bytes == 16 << 20
    engine.eval(x)  # keeps K and V: nothing is released without a backward
    kept = resident()
    engine.step(x, target=x)
    after = resident()
    if tokens == 8192:
        assert kept - before > 12 << 20
        assert after - before < 4 << 20
    else:
        assert max(abs(kept - before), abs(after - before)) < 4 << 20
        before = after
        del engine
        assert before - resident() > 28 << 20  # all were resident


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory: resident says nothing"
)
@pytest.mark.parametrize("tokens", [8192, 4096])
def test_slabs_of_a_long_sequence_give_back_the_rows_of_segments_that_are_done(tokens: int, tmp_path: Path):
    """In a fresh process, 8 MiB of K, V, dK and dV each: after a step no more than the pages at segment borders stay.
    Those of a shorter sequence stay, for its attention would take little longer than the page faults."""
    assert results_of(1, tmp_path, resident_slabs, tokens) == [None]
