"""Is attention of CUDA tensors right over the keys of a tree's path, as far as that can be told without a GPU?

On CPU tensors, over stand-ins of aten's CUDA-only ops that leave unwritten memory NaN; the truth is each path alone, in
float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import OPTIONS, errors, formula, random_qkv
from path_runs import Case, by_paths, by_units, errors_of_tree
from simulated_step import SimulatedStep
from slices import full_only

from seq1f1b import _C
from seq1f1b.attention.causal import causal_attention, layer_handle
from seq1f1b.device import cuda_attention

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

FLASH, CUDNN = "_flash_attention", "_scaled_dot_product_cudnn_attention"
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
HEADS = [(4, 4), (4, 2), (4, 1)]
SIZES = [(64, 64), (16, 16), (24, 40), (40, 24)]  # of q and k, and of v


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 5)
    monkeypatch.setattr(cuda_attention, "PLAIN_LOGITS", 0)  # ranges of 16 keys, the fewest
    monkeypatch.setattr(cuda_attention, "OFTEN", 0)
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


def use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda *of: True)


# -- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_units_equal_paths(name: str, dtype: torch.dtype, calls: list[Call]) -> None:
    """Segments of a few tokens, and longer ones than a call, of which each way cuts what lies before."""
    for seed, shape in enumerate(({}, {"count": 5, "longest": 23})):
        found = errors_of_tree(seed, name, dtype, **shape)
        assert max(found) < LIMITS[dtype], (seed, found)
    is_flash = dtype == torch.bfloat16 and name in ("none", "scale", "window", "window of 1", "sinks")
    used = {call[0].split("_attention")[0] for call in calls}
    if name != "documents" or dtype != torch.bfloat16:  # of which a chain among the trees goes by flash
        assert used == ({"_flash"} if is_flash else set())


@pytest.mark.parametrize("seed", [*range(12), *full_only(*((seed,) for seed in range(12, 400)))])
def test_random_trees(seed: int, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders, rows, heads, sizes and batches. Sums of gradients are stored, added to, or both in one unit. Trees of
    some tokens: the ops multiply dout by out as it is rounded, which shows where there are two or three."""
    choose = random.Random(seed)
    if by_cudnn := choose.random() < 0.5:
        use_cudnn(monkeypatch)
    dtype, batch = choose.choice([torch.bfloat16, torch.float16]), choose.randint(1, 3)
    (heads, kv_heads), (head_dim, v_head_dim) = HEADS[seed % 3], SIZES[seed % 4]
    case = Case(seed, count=choose.randint(3, 6), longest=choose.randint(3, 9), most_parts=6)
    given = {"tokens": case.tokens, "batch": batch, "dtype": dtype}
    qkv = random_qkv(heads, kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, **given, seed=seed)
    dout = random_qkv(heads, heads, head_dim=v_head_dim, **given, seed=seed + 1)[0]
    options = {"scale": choose.choice([None, 0.3])}
    found = errors(by_units(case.step, case.order, options, qkv, dout), by_paths(case.step, options, qkv, dout))
    assert max(found) < LIMITS[dtype], found
    assert by_cudnn or all(name.startswith(FLASH) for name, *_ in calls)


def test_results_over_many_ranges_are_rounded_once(calls: list[Call]) -> None:
    """Merged two by two they would be less exact than the formula in 16 bits."""
    count = 12
    step = SimulatedStep([8] * count, parents=range(-1, count - 1), rows=[s * 37 % count * 10 for s in range(count)],
                         num_rows=10 * count)  # fmt: skip
    qkv = random_qkv(4, 2, batch=1, tokens=8 * count, head_dim=64, dtype=torch.bfloat16)
    for s in range(count):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            out = causal_attention(*[t[:, :, step.slice(s)] for t in qkv], layer=layer_handle(0))
    assert len(calls) == count
    truth, peer = (formula(*(t.to(dtype) for t in qkv))[:, :, -8:] for dtype in (torch.float64, torch.bfloat16))
    assert (out - truth).norm() < 0.8 * (peer - truth).norm()


# -- which calls -----------------------------------------------------------------------------------------------------


def test_a_range_with_the_own_keys_is_one_call(calls: list[Call]) -> None:
    """A range apart is one call more, over no copy: keys are read where they lie."""
    step = SimulatedStep([4, 5, 6], parents=[-1, 0, 1], rows=[20, 2, 7], num_rows=30)
    qkv = random_qkv(2, 2, tokens=15, head_dim=8, dtype=torch.bfloat16)
    for s, (lengths, rows) in enumerate((([4], [20]), ([5, 4], [2, 20]), ([11, 4], [2, 20]))):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            causal_attention(*(t[:, :, step.slice(s)] for t in qkv), layer=layer_handle(0))
        assert [shape[1] for _, shape, *_ in calls] == lengths
        slab = calls[-1][3] - 20 * 8 * 2  # rows of 8 in 16 bits
        assert [(address - slab) // (8 * 2) for *_, address in calls] == rows


def test_siblings_of_one_unit(calls: list[Call]) -> None:
    """No window, and one document."""
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


def test_ids_of_one_document_hide_nothing(calls: list[Call]) -> None:
    """A tree beside rows of documents goes the fast way if the plan of the step says that it is one document."""
    qkv = random_qkv(2, 1, tokens=8, batch=1, head_dim=8, dtype=torch.bfloat16)
    found = []
    for num_documents in (0, 1):
        step = SimulatedStep([4, 4], parents=[-1, 0], rows=[0, 6], num_rows=10)
        for s in range(2):
            calls.clear()
            with step.unit("F", 0, s), torch.no_grad():
                _C.current_unit_set_documents(num_documents)
                of_segment = (t[:, :, step.slice(s)] for t in qkv)
                out = causal_attention(*of_segment, layer=layer_handle(0), doc_ids=torch.full((1, 4), 7))
        found.append((out, len(calls)))
    assert [count for _, count in found] == [0, 2]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)
