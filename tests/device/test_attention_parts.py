"""Is the work around attention over ranges of keys right, by our kernels and by torch's ops, and are kernels taken only
where they have proven themselves? The kernels run on the emulation of tests/cuda, where no GPU is needed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import at_once
from emulated_cuda import DTYPES, Mutation, build, emulated_parts
from slices import slice_of
from torch import Tensor

from seq1f1b import _C, proof
from seq1f1b.device import attention_parts, kernel_library
from seq1f1b.proof import Use

ROOT = Path(__file__).resolve().parents[2]
BODY = "sm80_attention_parts.cuh"
MUTATIONS = [  # of the kernels: each must fail the check at the first use
    Mutation("merge: shares of the other", BODY, "x[0] * own_share + y[0] * before_share",
             "x[0] * before_share + y[0] * own_share"),
    Mutation("merge: lse of one", BODY, "from + log2_fast(sum) * LN_2", "own_lse"),
    Mutation("merge: no guard of -inf", BODY, "most == -S1F_INFINITY ? 0.0f : most", "most"),
    Mutation("add: stores", BODY, "sum = global_load(slab);", "if (IS_LAST) sum = global_load(slab);"),
    Mutation("finish: does not add", BODY, "sum.element[j] += added.element[j];",
             "sum.element[j] = (IS_LAST ? 0.0f : sum.element[j]) + added.element[j];"),
    Mutation("total: leaves one out", BODY, "sums[2 * j + 1] += y;", "sums[2 * j + 1] += i == 1 ? 0.0f : y;"),
]  # fmt: skip
SHAPES = [  # batch, heads, rows, head_dim
    (2, 3, 7, 64),
    (1, 2, 33, 128),
    (2, 1, 5, 40),
    (1, 4, 1, 96),
    (1, 1, 9, 256),
    (3, 5, 2, 8),
]
GRID = [(sizes, dtype) for sizes in SHAPES for dtype in DTYPES]
ALTERNATING = list(zip(SHAPES, itertools.cycle(DTYPES)))
KINDS = ("kernels", "torch")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("emulated")
    build(["kernels/cuda/sm80_attention_parts.cu"], work)
    return work / "emulated.so"


@pytest.fixture
def launched(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The emulated kernels, and what is launched of them."""
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with emulated_parts(library) as names:
        yield names


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to compute, and that the kernels were launched, once for each call."""
    if request.param == "torch":
        monkeypatch.setattr(kernel_library, "preferred", "library")
    yield request.param
    assert bool(launched) == (request.param == "kernels")


# -- the functions, against float64 ----------------------------------------------------------------------------------


class Inputs:
    def __init__(self, dtype: torch.dtype, batch: int, heads: int, rows: int, head_dim: int) -> None:
        self.dtype, self.sizes = dtype, (batch, heads, rows, head_dim)
        self.random = torch.Generator().manual_seed(batch + heads + rows + head_dim)

    def numbers(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.random)

    def part(self, layout: str = "tokens", head_dim: int = 0) -> Tensor:
        """layout: "tokens" or "heads" first in memory, or "space": heads first, with space between rows."""
        batch, heads, rows, of_head = self.sizes
        of_head = head_dim or of_head
        if layout == "tokens":
            return self.numbers(batch, rows, heads, of_head).to(self.dtype).transpose(1, 2)
        return self.numbers(batch, heads, rows, of_head + 8 * (layout == "space")).to(self.dtype)[..., :of_head]

    def slab(self, head_dim: int = 0) -> tuple[Tensor, Tensor]:
        """One that is longer than the rows, and the rows."""
        batch, heads, rows, of_head = self.sizes
        memory = self.numbers(batch, heads, rows + 5, head_dim or of_head)
        return memory, memory[:, :, 2 : 2 + rows]

    def lse(self) -> Tensor:
        """-inf in rows of every third head."""
        lse = self.numbers(*self.sizes[:3]) * 4
        lse[:, ::3, ::2] = -math.inf
        return lse


def is_token_major(t: Tensor) -> bool:
    return t.transpose(1, 2).is_contiguous()


def check(got: Tensor, truth: Tensor) -> None:
    """The sum in float32, rounded once."""
    assert got.shape == truth.shape and not got.isnan().any()
    half_a_step = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float32 else 4e-7
    torch.testing.assert_close(got.double(), truth, rtol=half_a_step * 1.01, atol=2e-6)


@pytest.mark.parametrize("sizes, dtype", slice_of(GRID, ALTERNATING), ids=str)
class TestEachShape:
    @pytest.mark.parametrize("layouts", [("tokens", "tokens"), ("heads", "space")], ids=str)
    def test_merge(
        self, layouts: tuple[str, str], sizes: tuple[int, ...], dtype: torch.dtype, kind: str, launched: list[str]
    ) -> None:
        inputs = Inputs(dtype, *sizes)
        own, before = (inputs.part(layout) for layout in layouts)
        lses = inputs.lse(), inputs.lse().roll(1, 2)
        lses[0][0, 0, 0] = lses[1][0, 0, 0] = -math.inf  # one row sees no key at all
        for part, of_part in zip((own, before), lses, strict=True):
            part[of_part == -math.inf] = 0
        out, lse = attention_parts.merge(own, lses[0], before, lses[1])
        assert out.dtype == dtype and is_token_major(out) and lse.is_contiguous()
        sums = [of_part.double().exp()[..., None] for of_part in lses]
        check(out, (own.double() * sums[0] + before.double() * sums[1]) / (sums[0] + sums[1]).clamp_min(1e-300))
        torch.testing.assert_close(lse.double(), (sums[0] + sums[1]).log()[..., 0], rtol=1e-6, atol=1e-6)
        assert lse[0, 0, 0] == -math.inf and not out[0, 0, 0].any()
        assert len(launched) == (kind == "kernels")

    @pytest.mark.parametrize("layout", ["tokens", "heads", "space"])
    def test_copy(
        self, layout: str, sizes: tuple[int, ...], dtype: torch.dtype, kind: str, launched: list[str]
    ) -> None:
        """To rows of slabs, and to nothing around them."""
        inputs = Inputs(dtype, *sizes)
        parts = inputs.part(layout), inputs.part(layout, head_dim=24)
        memories = [inputs.slab(part.shape[3])[0].to(dtype) for part in parts]
        wanted = [memory.clone() for memory in memories]
        attention_parts.copy(*parts, *[memory[:, :, 2 : 2 + sizes[2]] for memory in memories])
        for part, memory, whole in zip(parts, memories, wanted, strict=True):
            whole[:, :, 2 : 2 + sizes[2]] = part
            assert torch.equal(memory, whole)
        assert launched == ["finish"] * (kind == "kernels")

    @pytest.mark.parametrize("layout", ["tokens", "heads", "space"])
    @pytest.mark.parametrize("store", [False, True], ids=["add", "store"])
    def test_add(
        self, store: bool, layout: str, sizes: tuple[int, ...], dtype: torch.dtype, kind: str, launched: list[str]
    ) -> None:
        inputs = Inputs(dtype, *sizes)
        parts = inputs.part(layout), inputs.part(layout, head_dim=24)
        memories, slabs = zip(inputs.slab(), inputs.slab(head_dim=24), strict=True)
        kept = [memory.clone() for memory in memories]
        if store:
            for slab in slabs:
                slab.fill_(math.nan)
        where = (*slabs, *parts, store) if layout == "tokens" else (*memories, *parts, store, 2)
        attention_parts.add(*where)
        for part, memory, before in zip(parts, memories, kept, strict=True):
            rows = before[:, :, 2 : 2 + sizes[2]]
            rows.copy_(part.float() if store else rows + part.float())
            assert torch.equal(memory, before)
        assert len(launched) == (kind == "kernels")

    @pytest.mark.parametrize("layout", ["tokens", "heads", "space"])
    @pytest.mark.parametrize("store", [False, True], ids=["add", "store"])
    def test_finish(
        self, store: bool, layout: str, sizes: tuple[int, ...], dtype: torch.dtype, launched: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        inputs = Inputs(dtype, *sizes)
        parts = inputs.part(layout), inputs.part(layout, head_dim=24)
        memories, slabs = zip(inputs.slab(), inputs.slab(head_dim=24), strict=True)
        if store:
            for slab in slabs:
                slab.fill_(math.nan)
        kept = [memory.clone() for memory in memories]
        for way, wanted in (("own", 0 if store and all(map(is_token_major, parts)) else 1), ("library", 0)):
            monkeypatch.setattr(kernel_library, "preferred", way)
            launched.clear()
            where = (*slabs, *parts, store) if layout == "tokens" else (*memories, *parts, store, 2)
            sums = attention_parts.finish(*where)
            for part, slab, memory, before, got in zip(parts, slabs, memories, kept, sums, strict=True):
                check(got, part.double() if store else part.double() + slab.double())
                assert got.dtype == dtype and is_token_major(got)
                torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
            assert len(launched) == wanted

    @pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
    def test_total(
        self, count: int, sizes: tuple[int, ...], dtype: torch.dtype, launched: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        inputs = Inputs(dtype, *sizes)
        parts = [inputs.part(("tokens", "heads", "space")[i % 3]) for i in range(count)]
        for way in ("own", "library"):
            monkeypatch.setattr(kernel_library, "preferred", way)
            launched.clear()
            got = attention_parts.total(parts)
            check(got, sum(part.double() for part in parts))
            assert got.dtype == dtype and is_token_major(got)
            assert len(launched) == (way == "own" and 1 < count <= attention_parts.MOST_PARTS)
            assert (got is parts[0]) == (count == 1)


def test_one_part_of_another_layout_is_laid_out_anew(launched: list[str]) -> None:
    part = Inputs(torch.bfloat16, 2, 3, 7, 64).part("heads")
    got = attention_parts.total([part])
    assert torch.equal(got, part) and is_token_major(got) and launched == ["total"]


def test_lse_of_any_layout(launched: list[str]) -> None:
    inputs = Inputs(torch.bfloat16, 2, 3, 7, 64)
    parts, lses = [inputs.part(), inputs.part()], [inputs.numbers(2, 7, 3).transpose(1, 2) for _ in range(2)]
    out, lse = attention_parts.merge(parts[0], lses[0], parts[1], lses[1])
    assert lse.is_contiguous() and launched == ["merge"]
    share = torch.sigmoid(lses[0].double() - lses[1].double())[..., None]
    check(out, share * parts[0].double() + (1 - share) * parts[1].double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_go_torchs_way(dtype: torch.dtype, launched: list[str]) -> None:
    inputs = Inputs(dtype, 2, 3, 5, 16)
    parts = [inputs.part() for _ in range(3)]
    torch.testing.assert_close(attention_parts.total(parts), parts[0] + parts[1] + parts[2])
    slabs = [torch.zeros(2, 3, 5, 16, dtype=dtype) for _ in range(2)]
    attention_parts.add(*slabs, parts[0], parts[1], False)
    assert torch.equal(slabs[1], parts[1]) and not launched
    assert torch.equal(attention_parts.finish(*slabs, parts[0], parts[1], False)[0], parts[0] * 2)
    attention_parts.copy(parts[0], parts[1], *slabs)
    assert torch.equal(slabs[0], parts[0]) and torch.equal(slabs[1], parts[1]) and not launched
    lse = torch.zeros(2, 3, 5, dtype=dtype)
    out, of_both = attention_parts.merge(parts[0], lse, parts[1], lse)
    torch.testing.assert_close(out, (parts[0] + parts[1]) / 2)
    torch.testing.assert_close(of_both, lse + math.log(2))


@pytest.mark.parametrize("begin", [-1, 3])
def test_rows_that_a_slab_does_not_have(begin: int, launched: list[str]) -> None:
    inputs = Inputs(torch.bfloat16, 2, 3, 5, 16)
    parts, slabs = [inputs.part() for _ in range(2)], [torch.zeros(2, 3, 7, 16) for _ in range(2)]
    with pytest.raises((RuntimeError, IndexError), match=r"start|range"):
        attention_parts.add(*slabs, *parts, False, begin)
    assert not launched and not slabs[0].any()


# -- what no kernel takes --------------------------------------------------------------------------------------------


class Launch:
    """Arguments of _C.cuda_attention_parts that a kernel takes, and changes of them."""

    NAMES = ("what", "dtype", "store", "batch", "heads", "rows", "head_dim", "v_head_dim", "parts", "slabs", "outs",
             "lse", "stream")  # fmt: skip

    def __init__(self, what: str) -> None:
        inputs = Inputs(torch.bfloat16, 2, 3, 4, 16)
        self.kept = [inputs.part() for _ in range(4)], [inputs.slab()[1] for _ in range(2)], [inputs.lse()] * 3
        of_parts, of_slabs = ([(t.data_ptr(), *t.stride()) for t in tensors] for tensors in self.kept[:2])
        has_slabs = what in ("add", "finish")
        self.values: dict[str, Any] = {
            "what": what, "dtype": "bfloat16", "store": False, "batch": 2, "heads": 3, "rows": 4, "head_dim": 16,
            "v_head_dim": 16, "parts": tuple(of_parts[:2]), "slabs": tuple(of_slabs) if has_slabs else (),
            "outs": {"add": (), "finish": tuple(of_parts[2:])}.get(what, tuple(of_parts[2:3])),
            "lse": tuple(t.data_ptr() for t in self.kept[2]) if what == "merge" else (0, 0, 0), "stream": 0,
        }  # fmt: skip

    def arguments(self, **changes: Any) -> list[Any]:
        assert changes.keys() <= self.values.keys()
        return [(self.values | changes)[name] for name in self.NAMES]


def moved(rows: tuple[tuple[int, ...], ...], index: int, *difference: int) -> tuple[tuple[int, ...], ...]:
    changed = tuple(a + b for a, b in itertools.zip_longest(rows[index], difference, fillvalue=0))
    return (*rows[:index], changed, *rows[index + 1 :])


def refused() -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of what a kernel takes; functions get the value that was."""
    for what in ("merge", "add", "finish", "total"):
        for name in ("batch", "heads", "rows"):
            yield what, {name: 0}
            yield what, {name: -1}
        yield what, {"batch": 65536}
        yield what, {"heads": 1 << 31}
        yield what, {"rows": 1 << 31}
        yield what, {"rows": 1 << 27, "heads": 8}
        yield what, {"head_dim": 12}
        yield what, {"head_dim": 0}
        yield what, {"head_dim": 1 << 40}
        yield what, {"dtype": "float32"}
        yield what, {"parts": ()}
        for index in (0, 1):
            yield what, {"parts": lambda rows, index=index: moved(rows, index, 8)}
            for of in range(1, 4):
                place = [0] * (of + 1)
                place[of] = 4
                yield what, {"parts": lambda rows, index=index, place=place: moved(rows, index, *place)}
            yield what, {"parts": lambda rows, index=index: moved(rows, index, 0, 0, 0, 0, 1)}
            yield what, {"parts": lambda rows, index=index: (*rows[:index], (0, 96, 16, 48, 1), *rows[index + 1 :])}
        if what in ("merge", "finish", "total"):
            yield what, {"outs": ()}
            yield what, {"outs": lambda rows: moved(rows, 0, 4)}
        if what in ("add", "finish"):
            yield what, {"v_head_dim": 20}
            yield what, {"slabs": lambda rows: rows[:1]}
            yield what, {"slabs": lambda rows: moved(rows, 1, 8)}
            yield what, {"slabs": lambda rows: moved(rows, 0, 0, 0, 2)}
        if what != "total":
            yield what, {"parts": lambda rows: rows[:1]}
            yield what, {"parts": lambda rows: (*rows, rows[0])}
        if what == "merge":
            for index in range(3):
                yield what, {"lse": lambda of, index=index: (*of[:index], 0, *of[index + 1 :])}
                yield what, {"lse": lambda of, index=index: (*of[:index], of[index] + 2, *of[index + 1 :])}


def test_the_launcher_refuses_what_no_kernel_takes(library: Path) -> None:
    """Without a launch, so no memory is touched. What is refused in one case is taken in the other."""
    handle = _C.cuda_library_open(str(library))
    emulation = ctypes.CDLL(str(library))
    for what, changes in refused():
        emulation.s1f_emulation_reset(ctypes.c_uint64(0))
        launch = Launch(what)
        changed = {n: value(launch.values[n]) if callable(value) else value for n, value in changes.items()}
        assert _C.cuda_attention_parts(handle, *launch.arguments(**changed)) is False, (what, changed)
    for what in ("merge", "add", "finish", "total"):
        with pytest.raises(RuntimeError, match="CUDA error 719"):  # taken: the emulation was not told of the memory
            _C.cuda_attention_parts(handle, *Launch(what).arguments())


def test_arguments_that_are_wrong(library: Path) -> None:
    handle = _C.cuda_library_open(str(library))
    launch = Launch("total")
    rows = launch.values["parts"][0]
    for error, text, changes in (
        (ValueError, "no operation 'sum', must be merge, add, finish or total", {"what": "sum"}),
        (ValueError, "no dtype 'bf16'", {"dtype": "bf16"}),
        (ValueError, "parts must be a tuple of at most 8 tensors", {"parts": (rows,) * 9}),
        (ValueError, "parts must be a tuple of at most 8 tensors", {"parts": [rows]}),
        (ValueError, "slabs must be a tuple of at most 2 tensors", {"slabs": (rows,) * 3}),
        (ValueError, "outs must be a tuple of at most 2 tensors", {"outs": None}),
        (TypeError, "a tensor is .address, stride, stride, stride, stride.", {"parts": (rows[:4],)}),
        (TypeError, "parts: a tensor is .address", {"parts": ([*rows],)}),
    ):
        with pytest.raises(error, match=text):
            _C.cuda_attention_parts(handle, *launch.arguments(**changes))


def test_strides_of_a_dimension_of_size_1_do_not_matter(launched: list[str]) -> None:
    part = torch.randn(64).to(torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    got = attention_parts.total([part, part])
    assert torch.equal(got, part * 2) and launched == ["total"]


@pytest.mark.parametrize("change", ["odd rows", "unaligned", "columns apart", "head_dim"])
def test_tensors_that_lie_otherwise_go_torchs_way(change: str, launched: list[str]) -> None:
    head_dim = 20 if change == "head_dim" else 16
    memory = torch.randn(2, 3, 5, 60).to(torch.bfloat16)
    views = {
        "odd rows": memory.flatten(2)[..., :105].unflatten(2, (5, 21))[..., :16], "unaligned": memory[..., 1:17],
        "columns apart": memory[..., :32:2], "head_dim": memory[..., :20],
    }  # fmt: skip
    part, other = views[change], Inputs(torch.bfloat16, 2, 3, 5, head_dim).part()
    assert torch.equal(attention_parts.total([part, other]), part + other)
    slabs = [torch.zeros(2, 3, 5, head_dim) for _ in range(2)]
    attention_parts.add(*slabs, other, part, False)
    assert torch.equal(slabs[1], part.float())
    to_k, to_v = torch.empty(2, 2, 3, 5, head_dim, dtype=torch.bfloat16)
    attention_parts.copy(part, other, to_k, to_v)
    assert torch.equal(to_k, part) and torch.equal(to_v, other)
    with emulated_parts(kernel_library.LIBRARY):  # a kernel that is asked for less is launched
        attention_parts.total([part.clone(), part.clone()])


def test_a_launch_on_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the tensors' device the current one meanwhile, and takes the stream that is current there."""
    asked: list[Any] = []
    current = [0]

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(kernel_library, "_current_device", lambda: current[0])
    monkeypatch.setattr(kernel_library, "_raw_stream", lambda index: 0x5000 + index)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 1)
    monkeypatch.setattr(_C, "cuda_attention_parts", lambda *a: asked.append((current[0], a[-1])) or True)
    part = Inputs(torch.bfloat16, 1, 1, 1, 8).part()
    assert attention_parts._launch(object(), "total", False, part, part, (part,), (), (part,))
    assert asked == [(1, 0x5001)] and current == [0]


# -- the check at the first use ---------------------------------------------------------------------------------------


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> proof.Proofs:
    """As in a new process."""
    now = attention_parts._proofs
    fresh = proof.Proofs(now.family, now.instead, ends_all=now.ends_all)
    monkeypatch.setattr(attention_parts, "_proofs", fresh)
    monkeypatch.setattr(kernel_library, "preferred", "")
    attention_parts._built_library.cache_clear()
    attention_parts._own_library.cache_clear()
    return fresh


def chosen(what: str = "merge", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> object | None:
    """The library for a call on a device; on the CPU it is asked only for ``own``."""
    return attention_parts._proven_library(what, dtype, head_dim, head_dim, torch.device("cpu"))


USES = list(itertools.product(("merge", "add", "finish", "total"), DTYPES))


@pytest.mark.parametrize("what, dtype", USES, ids=str)
def test_kernels_that_are_right_prove_it(
    what: str, dtype: torch.dtype, library: Path, proofs: proof.Proofs, recwarn: pytest.WarningsRecorder
) -> None:
    state = torch.get_rng_state()
    with emulated_parts(library) as launched:
        for head_dim in (64, 40):
            assert chosen(what, dtype, head_dim) is not None
        count = len(launched)
        assert set(launched) == {what} and chosen(what, dtype, 64) is not None and len(launched) == count  # once
        attention_parts.prove(chosen(what, dtype), Use(what, dtype, 64, 24, torch.device("cpu")))
    assert not recwarn.list and torch.equal(torch.get_rng_state(), state)


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("mutated")
    build(["kernels/cuda/sm80_attention_parts.cu"], work, MUTATIONS)
    return work / "emulated.so"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_kernel_that_is_wrong_is_found(mutation: Mutation, mutated: Path, proofs: proof.Proofs) -> None:
    what = mutation.name.partition(":")[0]
    with emulated_parts(mutated, MUTATIONS.index(mutation) + 1):
        with pytest.warns(UserWarning, match=f"attention_parts {what} .bfloat16, heads of 64. failed its check"):
            assert chosen(what) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen(what) is None and chosen("total") is None and chosen(what, head_dim=128) is None


def test_a_kernel_that_is_wrong_is_not_used(
    mutated: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the function to the result, as on a GPU."""
    monkeypatch.setattr(attention_parts, "_library", lambda what, dtype, *heads_and_device: chosen(what, dtype))
    parts = [Inputs(torch.bfloat16, 2, 3, 5, 64).part() for _ in range(3)]
    with emulated_parts(mutated, 1 + [m.name for m in MUTATIONS].index("total: leaves one out")) as launched:
        with pytest.warns(UserWarning, match="failed its check") as said:
            for _ in range(3):
                check(attention_parts.total(parts), sum(part.double() for part in parts))
        checks = len(launched)
        attention_parts.total(parts)
        assert len(launched) == checks and len(said) == 1
    (text,) = (str(warning.message) for warning in said)
    assert "SEQ1F1B_CUDA_KERNELS=library" in text and "Install seq1f1b again" in text and "on cpu" in text


def test_a_launch_that_raises_ends_the_use(
    library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> bool:
        raise RuntimeError("CUDA error 209: no kernel image is available")

    monkeypatch.setattr(kernel_library, "LIBRARY", library)
    monkeypatch.setattr(_C, "cuda_attention_parts", fail)
    with pytest.warns(UserWarning, match="no kernel image is available. Torch's ops, which are slower") as said:
        assert [chosen(), chosen(), chosen("add")] == [None] * 3
    assert len(said) == 1


def test_a_launcher_that_takes_nothing_ends_the_use(
    library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", library)
    monkeypatch.setattr(_C, "cuda_attention_parts", lambda *arguments: False)
    with pytest.warns(UserWarning, match="does not take a case that it must"):
        assert chosen() is None


def test_nothing_is_proven_while_a_graph_is_captured(
    library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with emulated_parts(library) as launched:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert chosen() is None and launched == []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert chosen() is not None and launched == ["merge"]


def test_threads_prove_once(library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", library)
    proven: list[Use] = []
    monkeypatch.setattr(attention_parts, "prove", lambda handle, use: proven.append(use))
    found = at_once(4, chosen)
    assert len(proven) == 1 and len(found) == 4 and None not in found


def test_a_thread_does_not_wait_for_anothers_check_for_ever(
    library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", library)
    monkeypatch.setattr(proof.Proofs, "PATIENCE", 0.01)
    with proofs.lock:
        assert chosen() is None
    monkeypatch.setattr(attention_parts, "prove", lambda handle, use: None)
    assert chosen() is not None


# -- which library ---------------------------------------------------------------------------------------------------


def test_on_the_cpu_kernels_are_taken_only_when_asked_for(
    library: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Inputs(torch.bfloat16, 2, 3, 5, 64).part() for _ in range(2)]
    for wish, count in (("", 0), ("library", 0), ("own", 1)):
        monkeypatch.setattr(kernel_library, "preferred", wish)
        with emulated_parts(library) as launched:
            attention_parts.total(parts)
            assert len(launched) == count, wish


def test_a_library_that_was_not_built(
    tmp_path: Path, proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", tmp_path / "none.so")
    assert chosen() is None and not recwarn.list
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with pytest.raises(RuntimeError, match=r"there is no .*none.so: install again with nvcc and SEQ1F1B_CUDA=1"):
        attention_parts.total([Inputs(torch.bfloat16, 2, 3, 5, 64).part("heads")])


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(**macros: str) -> Path:
        if shutil.which("cc") is None:
            pytest.skip("there is no C compiler")
        path = tmp_path_factory.mktemp("stand_in") / "stand_in.so"
        command = ["cc", "-std=c11", "-shared", "-fPIC", "-o", str(path), str(ROOT / "tests/cuda/stand_in_library.c")]
        subprocess.run([*command, *(f"-D{name}={value}" for name, value in macros.items())], check=True, timeout=120)
        return path

    return make


@pytest.mark.parametrize(
    "macros, text",
    [({"VERSION": "1", "OPERATION": "s1f_cuda_attention_forward"}, "has no operation attention_parts"),
     ({"VERSION": "99", "OPERATION": "s1f_cuda_attention_parts"}, "built with version 99 of its tables")],
    ids=["older", "another ABI"],
)  # fmt: skip
def test_a_library_without_the_operation_is_told_once(
    macros: dict[str, str], text: str, make: Callable[..., Path], proofs: proof.Proofs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernel_library, "LIBRARY", make(**macros))
    with pytest.warns(UserWarning, match=f"take the place of the CUDA kernels attention_parts: .*{text}") as said:
        assert [chosen(), chosen("add"), chosen()] == [None] * 3
    assert len(said) == 1 and "SEQ1F1B_CUDA_KERNELS=library" in str(said[0].message)
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with pytest.raises(ValueError, match=text):
        attention_parts.total([Inputs(torch.bfloat16, 2, 3, 5, 64).part("heads")])
    monkeypatch.setattr(kernel_library, "preferred", "library")
    attention_parts.total([Inputs(torch.bfloat16, 2, 3, 5, 64).part("heads")])


def test_an_older_library_keeps_its_other_operations(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", make(VERSION="1", OPERATION="s1f_cuda_attention_forward"))
    monkeypatch.setattr(kernel_library, "OPERATIONS", ("attention_forward", kernel_library.PARTS))
    kernel_library.operations.cache_clear()
    assert list(kernel_library.operations()) == ["attention_forward"]
    kernel_library.operations.cache_clear()


def test_what_doctor_says(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "OPERATIONS", (kernel_library.PARTS,))
    with emulated_parts(library):
        (line,) = kernel_library.describe()
    assert (
        line.startswith("own CUDA kernels attention_parts: ") and "bfloat16, float16, head_dim a multiple of 8" in line
    )
    assert line.endswith("default on each GPU of Ampere or later that passes a check at the first use")
