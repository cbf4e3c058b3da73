"""Is attention of CUDA tensors right over the keys of a tree's path, as far as that can be told without a GPU?

On CPU tensors, over stand-ins of aten's CUDA-only ops that leave unwritten memory NaN; the truth is each path alone, in
float64. What a GPU runs at the first use of a way (cuda_attention.prove) is held to its purpose here: defects fail it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import aten_stand_ins
import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import OPTIONS, errors, formula, random_qkv
from path_runs import Case, by_paths, by_units
from simulated_step import SimulatedStep
from slices import full_only
from torch import Tensor

from seq1f1b import _C, proof
from seq1f1b.attention.causal import causal_attention, layer_handle, positions
from seq1f1b.device import attention_calls, attention_parts, cuda_attention

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

FLASH, CUDNN = "_flash_attention", "_scaled_dot_product_cudnn_attention"
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
BY_DISTANCE = ("window", "window of 1", "slopes", "slopes per batch", "all")  # siblings refuse them
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
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda device: True)


# -- what comes out --------------------------------------------------------------------------------------------------


def run(seed: int, name: str, dtype: torch.dtype, **shape: Any) -> list[float]:
    case = Case(seed, with_parts=name not in (*BY_DISTANCE, "documents"), **shape)
    qkv = random_qkv(4, 2, tokens=case.tokens, head_dim=8, dtype=dtype, seed=seed)
    dout = random_qkv(4, 2, tokens=case.tokens, head_dim=8, dtype=dtype, seed=9)[0]
    options = dict(OPTIONS[name])
    if "doc_ids" in options:
        options["doc_ids"] = torch.arange(2 * case.tokens, dtype=torch.int32).view(2, case.tokens) // 9
    return errors(by_units(case.step, case.order, options, qkv, dout), by_paths(case.step, options, qkv, dout))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_units_equal_paths(name: str, dtype: torch.dtype, calls: list[Call]) -> None:
    for seed in range(2):
        found = run(seed, name, dtype)
        assert max(found) < LIMITS[dtype], (seed, found)
    is_flash = dtype == torch.bfloat16 and name in ("none", "scale", "window", "window of 1", "sinks")
    used = {call[0].split("_attention")[0] for call in calls}
    assert used == ({"_flash"} if is_flash else set())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_segments_longer_than_a_call(dtype: torch.dtype, calls: list[Call]) -> None:
    """Each way cuts what lies before, the plain one own keys too; windows end anywhere."""
    for seed, name in enumerate(("none", "window")):
        found = run(seed, name, dtype, count=5, longest=23)
        assert max(found) < LIMITS[dtype], found


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


def prompt_and(parts: list[int], rows: list[int]) -> SimulatedStep:
    return SimulatedStep([12, sum(parts)], parents=[-1, 0], parts={1: parts}, rows=rows, num_rows=200)


def passes_over(step: SimulatedStep, calls: list[Call]) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Ops of the second unit's forward, and of its backward, and the shapes of their keys."""
    total = sum(step.sizes)
    qkv = [t.requires_grad_() for t in random_qkv(4, 2, batch=1, tokens=total, head_dim=8, dtype=torch.bfloat16)]
    for s in range(2):
        calls.clear()
        with step.unit("F", 0, s):
            out = causal_attention(*[t[:, :, step.slice(s)] for t in qkv], layer=layer_handle(0))
    yield [(name, shape) for name, shape, *_ in calls]
    calls.clear()
    with step.unit("B", 0, 1):
        out.backward(out.detach())
    yield [(name, shape) for name, shape, *_ in calls]


@pytest.mark.parametrize("by_cudnn", [False, True])
def test_eight_siblings_take_two_calls(by_cudnn: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """In each direction: one over the prompt, by the way of such calls, and one over the own keys of all siblings. What
    is left beside them is one merge forward, and one launch for each gradient backward."""
    if by_cudnn:
        use_cudnn(monkeypatch)
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 100)
    launched: list[str] = []
    for name in ("merge", "add", "finish", "total"):
        run = getattr(attention_parts, name)
        monkeypatch.setattr(
            attention_parts, name, lambda *given, run=run, name=name: launched.append(name) or run(*given)
        )
    passes = passes_over(prompt_and([3, 1, 4, 1, 5, 9, 2, 6], [100, 7]), calls)
    way, over_prompt = (CUDNN, (1, 2, 12, 8)) if by_cudnn else (FLASH, (1, 12, 2, 8))
    forward = way if by_cudnn else f"{way}_forward"
    assert next(passes) == [(f"{FLASH}_forward", (31, 2, 8)), (forward, over_prompt)]
    assert launched[-1:] == ["merge"] and launched.count("merge") == 1
    launched.clear()
    assert next(passes) == [(f"{FLASH}_backward", (31, 2, 8)), (f"{way}_backward", over_prompt)]
    assert launched == ["finish", "add", "total"]


def test_keys_are_read_where_they_lie(calls: list[Call]) -> None:
    """Ranges apart, two siblings in one unit: a call for each range and each row of siblings, none over a copy."""
    step = SimulatedStep([8, 8, 16], parents=[-1, 0, 1], parts={2: [8, 8]}, rows=[0, 16, 32], num_rows=48)
    qkv = random_qkv(2, 2, tokens=32, head_dim=8, dtype=torch.bfloat16, batch=1)
    for s in range(3):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            causal_attention(*(t[:, :, step.slice(s)] for t in qkv), layer=layer_handle(0))
    assert [shape[-3] for _, shape, *_ in calls] == [16, 8, 8]
    first = min(address for *_, address in calls)
    assert sorted((address - first) // (8 * 2) for *_, address in calls) == [0, 16, 32]  # rows of 8 in 16 bits


def test_a_range_with_the_own_keys_is_one_call(calls: list[Call]) -> None:
    """A chain that lies elsewhere in the slab is no worse off forward than one in the first rows; a range apart is one
    call more."""
    step = SimulatedStep([4, 5, 6], parents=[-1, 0, 1], rows=[20, 2, 7], num_rows=30)
    qkv = random_qkv(2, 2, tokens=15, head_dim=8, dtype=torch.bfloat16)
    for s, lengths in enumerate(([4], [5, 4], [11, 4])):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            causal_attention(*(t[:, :, step.slice(s)] for t in qkv), layer=layer_handle(0))
        assert [shape[1] for _, shape, *_ in calls] == lengths


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
                _C.current_unit_set_documents(num_documents)
                of_segment = (t[:, :, step.slice(s)] for t in qkv)
                out = causal_attention(*of_segment, layer=layer_handle(0), doc_ids=torch.full((1, 4), 7))
        found.append((out, len(calls)))
    assert [count for _, count in found] == [0, 2]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-2, atol=1e-2)


# -- the check at the first use --------------------------------------------------------------------------------------


def prove(name: str, head_dim: int = 64, v_head_dim: int = 64) -> None:
    cuda_attention.prove(name, proof.Use("", torch.bfloat16, head_dim, v_head_dim, torch.device("cpu")))


FAMILIES = {"flash": FLASH, "cudnn": CUDNN, "documents": FLASH}


def test_ways_pass_their_check(calls: list[Call]) -> None:
    """Each by its own ops, and by flash's over sequences of many lengths for siblings; values may have other heads. All
    that a process can check in a dtype and head size on a device is few calls."""
    for v_head_dim in (128, 64):
        calls.clear()
        for name in cuda_attention._CHECKED:
            begin = len(calls)
            prove(name, v_head_dim=v_head_dim)
            family = FAMILIES[name]
            assert all(op.startswith(family) or (FLASH in op and len(shape) == 3) for op, shape, *_ in calls[begin:])
            assert any(op.startswith(family) for op, *_ in calls[begin:])
    print(f"calls of all checks: {len(calls)}")
    assert len(calls) <= 130


Op = Callable[..., Any]
Fault = Callable[[Op], Op]


def of_argument(index: int, change: Callable[[Any], Any]) -> Fault:
    """The dispatcher leaves the last arguments out where they have their default."""
    return lambda whole: lambda *a, **o: whole(*a[:index], *map(change, a[index : index + 1]), *a[index + 1 :], **o)


def of_result(index: int, change: Callable[..., Any]) -> Fault:
    """change: of the result, and of the op's arguments."""

    def of(whole: Op) -> Op:
        def call(*a: Any, **options: Any) -> Any:
            found = list(whole(*a, **options))
            found[index] = change(found[index], *a)
            return tuple(found)

        return call

    return of


def of_mask(change: Callable[[Tensor], Tensor]) -> Fault:
    """Changes the answer by the keys that a query sees, where these are not all."""
    return lambda whole: lambda *a: seen if (seen := whole(*a)).all() else change(seen)


def first_of_each_group(index: int) -> Fault:
    """dk or dv of cuDNN's backward (batch, heads, ...) from the first query head alone of those that share keys."""

    def of(whole: Op) -> Op:
        def call(dout: Tensor, q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
            is_first = torch.arange(q.shape[1])[:, None, None] % (q.shape[1] // k.shape[1]) == 0
            found = list(whole(dout, q, k, *rest, **options))
            found[index] = whole(dout * is_first, q, k, rest[0], rest[1] * is_first, *rest[2:], **options)[index]
            return tuple(found)

        return call

    return of


def in_padded_sums(whole: Op) -> Op:
    """An lse of (sequences, heads, longest), as another torch may give."""

    def call(*a: Any, **options: Any) -> Any:
        out, lse, *rest = whole(*a, **options)
        return out, lse if a[3] is None else lse[None].expand(len(a[3]) - 1, -1, -1).contiguous(), *rest

    return call


def causal_from_the_top(whole: Op) -> Op:
    """Query i of a sequence sees its keys 0..i: right only where there are as many keys as queries."""

    def call(*a: Any, **options: Any) -> Any:
        if a[3] is not None:
            q_bounds, k_bounds = a[3], a[4].clone()
            k_bounds[1:] -= k_bounds[1] - q_bounds[1]
            a = *a[:4], k_bounds, *a[5:]
        return whole(*a, **options)

    return call


def without_a_window(whole: Op) -> Op:
    return lambda *a, **options: whole(*a, **options | dict.fromkeys(("window_size_left", "window_size_right")))


def as_one_sequence(whole: Op) -> Op:
    def call(
        q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, key_bounds: Any, *rest: Any, **options: Any
    ) -> Any:
        if bounds is not None:
            bounds, key_bounds, rest = bounds[[0, -1]], key_bounds[[0, -1]], (len(q), len(k), *rest[2:])
        return whole(q, k, v, bounds, key_bounds, *rest, **options)

    return call


def nan_of_small_sums(dq: Tensor, *a: Any) -> Tensor:
    """A part of cudnn-frontend#628."""
    return dq * (float("nan") if bool((a[5] < -88.7).any()) else 1.0)


def nan_behind_whole_tiles(dq: Tensor, *a: Any) -> Tensor:
    """All of it: keys lie in dimension 2, and the mask is causal or there is none."""
    return nan_of_small_sums(dq, *a) if a[2].shape[2] % 128 == 64 and not a[14] else dq


FAULTS: dict[str, tuple[str, str, Fault]] = {  # of a library, beside those that test_kernel_proof.py plants
    "cuDNN: no mask": ("cudnn", CUDNN, of_argument(6, lambda is_causal: False)),
    "cuDNN: no mask backward": ("cudnn", f"{CUDNN}_backward", of_argument(14, lambda is_causal: False)),
    "cuDNN: a key too many": ("cudnn", "_check_cudnn", of_mask(lambda seen: seen | seen.roll(1, 1))),
    "cuDNN: all keys before the segment left out": (
        "cudnn", CUDNN, of_result(1, lambda lse, *a: lse if len(a) > 6 and a[6] else lse - math.inf)
    ),
    "cuDNN: heads of keys swapped": ("cudnn", CUDNN, of_argument(1, lambda k: k.flip(1))),
    "cuDNN: dq of small sums NaN": ("cudnn", f"{CUDNN}_backward", of_result(0, nan_of_small_sums)),
    "cuDNN: dk of one query head of a group": ("cudnn", f"{CUDNN}_backward", first_of_each_group(1)),
    "cuDNN: gradients without dout out": ("cudnn", f"{CUDNN}_backward", of_argument(4, torch.zeros_like)),
    "documents: sums padded": ("documents", f"{FLASH}_forward", in_padded_sums),
    "documents: causal from the top left": ("documents", f"{FLASH}_forward", causal_from_the_top),
    "documents: as one": ("documents", f"{FLASH}_forward", as_one_sequence),
    "flash: sums padded": ("flash", f"{FLASH}_forward", in_padded_sums),
    "flash: siblings see each other": ("flash", f"{FLASH}_forward", as_one_sequence),
    "flash: no window": ("flash", f"{FLASH}_forward", without_a_window),
    "flash: no window backward": ("flash", f"{FLASH}_backward", without_a_window),
}  # fmt: skip


def plant(name: str, patch: pytest.MonkeyPatch) -> str:
    """Plants a fault in an op of the library, or in the mask of a family of them; returns the way that it is in."""
    way, target, change = FAULTS[name]
    if target in aten_stand_ins._OPS:
        patch.setitem(aten_stand_ins._OPS, target, change(aten_stand_ins._OPS[target]))
    else:
        patch.setattr(aten_stand_ins, target, change(getattr(aten_stand_ins, target)))
    return way


def test_the_check_finds_every_planted_fault(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in FAULTS:
        with monkeypatch.context() as patch:
            way = plant(name, patch)
            with cuda_kernels_on_the_cpu():
                try:
                    prove(way)
                except (AssertionError, RuntimeError) as error:
                    found[name] = str(error).splitlines()[0]
    print(*(f"{name}: {found.get(name, 'not found')}" for name in FAULTS), sep="\n")
    print(f"found: {len(found)} of {len(FAULTS)} planted faults")
    assert found.keys() == FAULTS.keys()


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_check_finds_what_keys_are_cut_for(
    is_cut: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn-frontend#628, where keys before the segment would be one call."""
    fault = of_result(0, nan_behind_whole_tiles)(aten_stand_ins._OPS[f"{CUDNN}_backward"])
    monkeypatch.setitem(aten_stand_ins._OPS, f"{CUDNN}_backward", fault)
    if not is_cut:
        monkeypatch.setattr(attention_calls, "_bounds", lambda start, limit, longest, way: [(start, limit)])
    attention_calls.calls_of.cache_clear()
    with (
        cuda_kernels_on_the_cpu(),
        nullcontext() if is_cut else pytest.raises(AssertionError, match=r"dq of .* is off"),
    ):
        prove("cudnn")
    attention_calls.calls_of.cache_clear()


@pytest.mark.parametrize(
    "proven, forward",
    [
        (("flash", "cudnn"), [(f"{FLASH}_forward", 3), (CUDNN, 4)]),
        (("flash",), [(f"{FLASH}_forward", 3), (f"{FLASH}_forward", 4)]),
        (("cudnn",), []),
    ],
)
def test_a_way_that_fails_its_check_is_not_taken(
    proven: tuple[str, ...], forward: list[tuple[str, int]], calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cudnn(monkeypatch)
    monkeypatch.setattr(cuda_attention, "_is_proven", lambda name, q, width: name in proven)
    step = prompt_and([2, 3, 4], [0, 20])
    assert [(name, len(shape)) for name, shape in next(passes_over(step, calls))] == forward
    qkv = random_qkv(4, 2, batch=1, tokens=21, head_dim=8, dtype=torch.bfloat16)
    order = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    found = errors(by_units(prompt_and([2, 3, 4], [0, 20]), order, {}, qkv, qkv[0]), by_paths(step, {}, qkv, qkv[0]))
    assert max(found) < LIMITS[torch.bfloat16]
