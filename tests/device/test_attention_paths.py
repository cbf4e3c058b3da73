"""Is attention of CUDA tensors right over the keys of a tree's path, as far as that can be told without a GPU?

As tests/device/test_cuda_attention.py: CPU tensors, over stand-ins of aten's CUDA-only ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import OPTIONS, errors, random_qkv
from path_runs import Case, by_paths, by_units
from simulated_step import SimulatedStep

from seq1f1b import _C
from seq1f1b.device import attention_calls, attention_paths, cuda_attention
from seq1f1b.ops.attention import causal_attention, layer_handle, positions

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
BY_DISTANCE = ("window", "window of 1", "slopes", "slopes per batch", "all")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 3)
    monkeypatch.setattr(cuda_attention, "PLAIN_LOGITS", 0)  # ranges of 16 keys, the fewest
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


def run(seed: int, name: str, dtype: torch.dtype, **shape: Any) -> list[float]:
    case = Case(seed, with_parts=name not in (*BY_DISTANCE, "documents"), **shape)
    qkv = random_qkv(4, 2, tokens=case.tokens, head_dim=8, dtype=dtype, seed=seed)
    dout = random_qkv(4, 2, tokens=case.tokens, head_dim=8, dtype=dtype, seed=9)[0]
    options = dict(OPTIONS[name])
    if "doc_ids" in options:
        options["doc_ids"] = torch.arange(2 * case.tokens, dtype=torch.int32).view(2, case.tokens) // 9
    return errors(by_units(case.step, case.order, options, qkv, dout), by_paths(case.step, options, qkv, dout))


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_units_equal_paths(name: str, dtype: torch.dtype, calls: list[Call]) -> None:
    for seed in range(2):
        found = run(seed, name, dtype)
        assert max(found) < LIMITS[dtype], (seed, found)
    is_flash = dtype == torch.bfloat16 and name in ("none", "scale", "window", "window of 1", "sinks")
    is_efficient = dtype == torch.float32 and name in ("none", "scale", "sinks")
    used = {call[0].split("_attention")[0] for call in calls}
    assert used >= {"_flash"} if is_flash else used >= {"_efficient"} if is_efficient else True


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_segments_longer_than_a_piece(dtype: torch.dtype, calls: list[Call]) -> None:
    """Each way cuts what lies before, the plain one own keys too; windows end anywhere."""
    for seed, name in enumerate(("none", "window")):
        found = run(seed, name, dtype, count=5, longest=23)
        assert max(found) < LIMITS[dtype], found


def test_a_piece_stored_that_should_be_added_to_is_seen(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect that the comparison must tell: a second branch's gradient takes the first one's place."""
    place = attention_calls.Place
    monkeypatch.setattr(attention_paths, "Place", lambda ranges, parts, kept: place(ranges, parts, 0))
    assert max(run(1, "none", torch.float32)) > 1e-2


def test_keys_are_read_where_they_lie(calls: list[Call]) -> None:
    """Ranges apart, two siblings in one unit: a call for each range and each sibling, none over a copy."""
    step = SimulatedStep([8, 8, 16], parents=[-1, 0, 1], parts={2: [8, 8]}, rows=[0, 16, 32], num_rows=48)
    qkv = random_qkv(2, 2, tokens=32, head_dim=8, dtype=torch.bfloat16)
    for s in range(3):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            causal_attention(*(t[:, :, step.slice(s)] for t in qkv), layer=layer_handle(0))
    assert sorted(shape[1] for _, shape, *_ in calls) == [8, 8, 8, 8]
    first = min(address for *_, address in calls)
    assert sorted((address - first) // (8 * 2) for *_, address in calls) == [0, 16, 32, 40]  # rows of 8 in 16 bits


def test_siblings_of_one_unit(calls: list[Call]) -> None:
    """No window, one document, and positions that begin anew."""
    step = SimulatedStep([3, 4], parents=[-1, 0], parts={1: [1, 3]})
    q, k, v = random_qkv(2, 1, tokens=7, batch=1, head_dim=8)
    own = step.slice(1)
    ids = torch.full((1, 3), 5)
    with step.unit("F", 0, 0):
        causal_attention(*(t[:, :, :3] for t in (q, k, v)), layer=layer_handle(0))
        causal_attention(*(t[:, :, :3] for t in (q, k, v)), layer=layer_handle(1), doc_ids=ids)
    tensors = [t[:, :, own] for t in (q, k, v)]
    with pytest.raises(ValueError, match=r"window or ALiBi slopes.* 2 siblings share this unit"), step.unit("F", 0, 1):
        causal_attention(*tensors, layer=layer_handle(0), window=3)
    with pytest.raises(RuntimeError, match="siblings share this unit: give a tree of"), step.unit("F", 0, 1):
        causal_attention(*tensors, layer=layer_handle(1), doc_ids=torch.tensor([[5, 5, 6, 5]]))
    with step.unit("F", 0, 1):
        assert positions(torch.empty(1, 4)).tolist() == [3, 3, 4, 5]
        assert positions(torch.empty(1, 2), sequence_parallel=(1, 2)).tolist() == [4, 5]
        assert positions(torch.empty(1, 4), doc_ids=torch.tensor([[0, 3, 3, 5]])).tolist() == [[3, 0, 1, 0]]
        with pytest.raises(RuntimeError, match="must be positions of documents' first tokens"):
            positions(torch.empty(1, 4), doc_ids=torch.tensor([[0, 3, 3, 0]]))


def test_ids_of_one_document_hide_nothing(calls: list[Call]) -> None:
    """A tree beside rows of documents goes the fast way if the plan of the step says that it is one document."""
    qkv = random_qkv(2, 1, tokens=8, batch=1, head_dim=8, dtype=torch.bfloat16)
    found = []
    for num_documents in (0, 1):
        step = SimulatedStep([4, 4], parents=[-1, 0], rows=[0, 6], num_rows=10)
        for s in range(2):
            calls.clear()
            with step.unit("F", 0, s), torch.no_grad():
                _C.unit_set_documents(num_documents)
                of_segment = (t[:, :, step.slice(s)] for t in qkv)
                out = causal_attention(*of_segment, layer=layer_handle(0), doc_ids=torch.full((1, 4), 7))
        found.append((out, len(calls)))
    assert [count for _, count in found] == [0, 2]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
