"""Is attention of CUDA tensors right where siblings share a unit, in one call, and where cuDNN takes a tree's path?

On CPU tensors, over stand-ins of aten's CUDA-only ops that leave unwritten memory NaN; the truth is each path alone, in
float64. What a GPU runs at the first use (attention_paths.py) is held to its purpose here: defects fail it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import errors, formula, random_qkv
from path_runs import Case, by_paths, by_units
from simulated_step import SimulatedStep
from slices import full_only
from torch import Tensor

from seq1f1b import proof
from seq1f1b.device import (
    attention_calls,
    attention_parts,
    attention_paths,
    attention_sequences,
    attention_ways,
    cuda_attention,
)
from seq1f1b.ops.attention import causal_attention, layer_handle

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

FLASH, CUDNN = "_flash_attention", "_scaled_dot_product_cudnn_attention"
LIMITS = {torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
HEADS = [(4, 4), (4, 2), (4, 1)]
SIZES = [(64, 64), (16, 16), (24, 40), (40, 24)]  # of q and k, and of v


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 5)
    monkeypatch.setattr(cuda_attention, "PLAN_FLOPS", 0.0)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


def use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda device: True)


# -- what comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [*range(12), *full_only(*((seed,) for seed in range(12, 400)))])
def test_random_trees(seed: int, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders, rows, heads, sizes and batches. Sums of gradients are stored, added to, or both in one unit. Trees of
    some tokens: the ops multiply dout by out as it is rounded, which shows where there are two or three."""
    choose = random.Random(seed)
    if by_cudnn := choose.random() < 0.5:
        use_cudnn(monkeypatch)
    dtype, batch = choose.choice(list(LIMITS)), choose.randint(1, 3)
    (heads, kv_heads), (head_dim, v_head_dim) = HEADS[seed % 3], SIZES[seed % 4]
    case = Case(seed, count=choose.randint(3, 6), longest=choose.randint(3, 9), most_parts=6)
    given = {"tokens": case.tokens, "batch": batch, "dtype": dtype}
    qkv = random_qkv(heads, kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, **given, seed=seed)
    dout = random_qkv(heads, heads, head_dim=v_head_dim, **given, seed=seed + 1)[0]
    options = {"scale": choose.choice([None, 0.3])}
    found = errors(by_units(case.step, case.order, options, qkv, dout), by_paths(case.step, options, qkv, dout))
    assert max(found) < LIMITS[dtype], found
    assert by_cudnn or all(name.startswith(FLASH) for name, *_ in calls)


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


def test_layers_and_passes_share_bounds(calls: list[Call]) -> None:
    """They are made once for a unit, on the host: nothing is counted and nothing read."""
    attention_sequences._kept_bounds.cache_clear()
    step = prompt_and([2, 3, 4], [0, 12])
    qkv = [t.requires_grad_() for t in random_qkv(4, 2, batch=1, tokens=21, head_dim=8, dtype=torch.bfloat16)]
    outs = []
    for s in range(2):
        with step.unit("F", 0, s):
            outs = [causal_attention(*[t[:, :, step.slice(s)] for t in qkv], layer=layer) for layer in range(3)]
    with step.unit("B", 0, 1):
        torch.autograd.backward(outs, [out.detach() for out in outs])
    found = attention_sequences._kept_bounds.cache_info()
    assert (found.misses, found.hits) == (1, 5)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_graph_has_bounds_of_its_own(is_captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run after those of a unit are gone."""
    monkeypatch.setattr(proof, "is_capturing", lambda: is_captured)
    found = [attention_sequences._bounds((3, 1, 4), torch.empty(0)) for _ in range(2)]
    assert [bounds.tolist() for bounds in found] == [[0, 3, 4, 8]] * 2
    assert (found[0] is found[1]) != is_captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_range_with_the_own_keys_is_one_call(dtype: torch.dtype, calls: list[Call]) -> None:
    """A chain that lies elsewhere in the slab is no worse off forward than one in the first rows; a range apart is one
    call more."""
    step = SimulatedStep([4, 5, 6], parents=[-1, 0, 1], rows=[20, 2, 7], num_rows=30)
    qkv = random_qkv(2, 2, tokens=15, head_dim=8, dtype=dtype)
    for s, lengths in enumerate(([4], [5, 4], [11, 4])):
        calls.clear()
        with step.unit("F", 0, s), torch.no_grad():
            causal_attention(*(t[:, :, step.slice(s)] for t in qkv), layer=layer_handle(0))
        assert [shape[1] for _, shape, *_ in calls] == lengths


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


# -- the check at the first use --------------------------------------------------------------------------------------

USES = list(itertools.product(("flash", "cudnn"), (False, True)))


def prove(name: str, packs: bool, head_dim: int = 64) -> None:
    attention_paths.prove(name, packs, torch.bfloat16, head_dim, torch.device("cpu"), cuda_attention._plan_by)


@pytest.mark.parametrize("name, packs", USES)
def test_ways_pass_their_check(name: str, packs: bool, calls: list[Call]) -> None:
    """Each by the ops that it takes, of sequences of many lengths where siblings have one call."""
    prove(name, packs)
    assert {op.removesuffix("_forward").removesuffix("_backward") for op, *_ in calls} == (
        {FLASH} if name == "flash" else {CUDNN, FLASH} if packs else {CUDNN}
    )
    assert any(len(shape) == 3 for _, shape, *_ in calls) == packs


def changed_result(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda whole: lambda *arguments, **options: change(whole(*arguments, **options))


def changed_argument(index: int, value: Any) -> Callable[..., Any]:
    return lambda whole: lambda *given, **options: whole(*given[:index], value, *given[index + 1 :], **options)


def shifted(bounds: Tensor) -> Tensor:
    bounds = bounds.clone()
    bounds[1] += 1
    return bounds


def without_the_last(found: tuple[Any, ...]) -> tuple[Any, ...]:
    rows, sizes, calls = found
    return rows, sizes, calls[:-1]


def a_row_further(found: tuple[Any, ...]) -> tuple[Any, ...]:
    rows, sizes, calls = found
    return (rows[0] + 1, *rows[1:]), sizes, calls


ALL = [("flash", False), ("cudnn", True)]
PACKED, FLASH_ALONE = [("flash", True), ("cudnn", True)], [("flash", False)]
DEFECTS: dict[str, tuple[list[tuple[str, bool]], Any, str, Any]] = {
    "a bound off by one": (PACKED, attention_sequences, "_bounds", changed_result(shifted)),
    "the last sibling's bound is missing": (PACKED, attention_sequences, "_bounds", changed_result(lambda t: t[:-1])),
    "one sibling": (PACKED, attention_sequences, "_bounds", changed_result(lambda t: t[[0, -1]])),
    "a range is left out": (ALL, attention_calls, "ranges_of_path", changed_result(without_the_last)),
    "rows of another range": (ALL, attention_calls, "ranges_of_path", changed_result(a_row_further)),
    "results are not merged": (ALL, attention_parts, "merge", lambda whole: lambda *given: given[:2]),
    "sums of half the keys": (ALL, attention_parts, "merge", lambda whole: lambda *given: (whole(*given)[0], given[1])),
    "stored, not added": (ALL, attention_parts, "add", changed_argument(4, True)),
    "added, not stored": (ALL, attention_parts, "add", changed_argument(4, False)),
    "one part of dq": (ALL, attention_parts, "total", lambda whole: lambda parts: whole(parts[:1])),
    "hidden keys keep what memory held": (FLASH_ALONE, attention_ways, "_hidden_rows", changed_result(lambda rows: [])),
    "a window that is not told": (
        FLASH_ALONE, attention_ways, "_flash_sides", changed_result(lambda found: (found[0], (None, None)))
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "defect, name, packs", [(defect, *use) for defect, (uses, *_) in DEFECTS.items() for use in uses]
)
def test_a_defect_fails_the_check(
    defect: str, name: str, packs: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module, attribute, change = DEFECTS[defect]
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 100)
    monkeypatch.setattr(module, attribute, change(getattr(module, attribute)))
    with pytest.raises((AssertionError, RuntimeError)):
        prove(name, packs)


@pytest.mark.parametrize(
    "answers, forward",
    [
        ((True, True, True), [(f"{FLASH}_forward", 3), (CUDNN, 4)]),
        ((True, True, False), [(f"{FLASH}_forward", 3), (f"{FLASH}_forward", 4)]),
        ((True, False, False), [(f"{FLASH}_forward", 4)] * 4),
        ((True, None, None), [(f"{FLASH}_forward", 4)] * 4),
        ((False, True, True), []),
        ((None, True, True), []),
    ],
)
def test_a_way_that_fails_its_check_is_not_taken(
    answers: tuple[bool | None, ...],
    forward: list[tuple[str, int]],
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """answers: of the checks of flash, of flash over siblings, and of cuDNN over siblings. What is not known yet is
    asked again at the next call."""
    use_cudnn(monkeypatch)
    answer = dict(zip([("flash", False), ("flash", True), ("cudnn", True)], answers, strict=True))
    asked: list[tuple[str, bool]] = []
    monkeypatch.setattr(attention_paths, "is_right", lambda *use: asked.append(use[:2]) or answer[use[:2]])
    step = prompt_and([2, 3, 4], [0, 20])
    for is_first in (True, False):
        asked.clear()
        found = next(passes_over(step, calls))
        assert [(name, len(shape)) for name, shape in found] == forward
        assert bool(asked) == (is_first or None in answers)
    qkv = random_qkv(4, 2, batch=1, tokens=21, head_dim=8, dtype=torch.bfloat16)
    order = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    found = errors(by_units(prompt_and([2, 3, 4], [0, 20]), order, {}, qkv, qkv[0]), by_paths(step, {}, qkv, qkv[0]))
    assert max(found) < LIMITS[torch.bfloat16]


def test_a_failed_check_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each way, dtype and head size, and what takes its place."""
    proved: list[tuple[Any, ...]] = []

    def prove(*use: Any) -> None:
        proved.append(use[:4])
        assert not use[1], "dq of siblings is off by 1.0e+00 of its norm"

    fresh = {use: proof.Proofs("", of.instead, remedy=of.remedy) for use, of in attention_paths._proofs.items()}
    monkeypatch.setattr(attention_paths, "_proofs", fresh)
    monkeypatch.setattr(attention_paths, "prove", prove)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    q = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 4, 20, 64))
    text = r"siblings by torch's flash ops \(bfloat16, heads of 80\) failed its check on cuda:0, a GPU: dq of.*each sib"
    found, plan_by = [], cuda_attention._plan_by
    with pytest.warns(UserWarning, match=text):
        for _ in range(2):
            found.append([attention_paths.is_right("flash", packs, q, 80, plan_by) for packs in (False, True)])
    assert found == [[True, False]] * 2
    assert proved == [("flash", packs, torch.bfloat16, 80) for packs in (False, True)]
