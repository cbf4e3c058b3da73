"""Is the work around attention over ranges of keys right, by our kernels and by torch's ops, and are kernels taken only
where they have proven themselves? The kernels run on the emulation of tests/cuda, where no GPU is needed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import build, emulated_kernels
from torch import Tensor

from seq1f1b import _C, proof
from seq1f1b.device import attention_parts, kernel_library
from seq1f1b.proof import DTYPES, Use

CPU = torch.device("cpu")
WHATS = ("merge", "add", "finish", "total")
SHAPES = [  # batch, heads, rows, head_dim
    (2, 3, 7, 64),
    (1, 2, 33, 128),
    (2, 1, 5, 40),
    (1, 4, 1, 96),
    (1, 1, 9, 256),
    (3, 5, 2, 8),
]
CASES = list(zip(SHAPES, itertools.cycle(DTYPES)))
LAYOUTS = ("tokens", "heads", "space")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"), [kernel_library.PARTS])


@pytest.fixture
def launched(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The emulated kernels, and what is launched of them. Their library has no other."""
    monkeypatch.setattr(kernel_library, "OPERATIONS", (kernel_library.PARTS,))
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with emulated_kernels(library) as names:
        yield names


@pytest.fixture(params=("own", "library"))
def kind(request: pytest.FixtureRequest, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to compute, and that kernels were launched by one of them alone."""
    monkeypatch.setattr(kernel_library, "preferred", request.param)
    yield request.param
    assert bool(launched) == (request.param == "own")


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

    def slab(self, head_dim: int = 0) -> Tensor:
        """One that is longer than the rows."""
        batch, heads, rows, of_head = self.sizes
        return self.numbers(batch, heads, rows + 5, head_dim or of_head)

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


@pytest.mark.parametrize("sizes, dtype", CASES, ids=str)
class TestEachShape:
    def test_merge(self, sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        inputs = Inputs(dtype, *sizes)
        for layouts in (("tokens", "tokens"), ("heads", "space")):
            own, before = (inputs.part(layout) for layout in layouts)
            lses = inputs.lse(), inputs.lse().roll(1, 2)
            lses[0][0, 0, 0] = lses[1][0, 0, 0] = -math.inf  # one row sees no key at all
            for part, of_part in zip((own, before), lses, strict=True):
                part[of_part == -math.inf] = 0
            out, lse = attention_parts.merge(own, lses[0], before, lses[1].mT.contiguous().mT)
            assert out.dtype == dtype and is_token_major(out) and lse.is_contiguous()
            sums = [of_part.double().exp()[..., None] for of_part in lses]
            check(out, (own.double() * sums[0] + before.double() * sums[1]) / (sums[0] + sums[1]).clamp_min(1e-300))
            torch.testing.assert_close(lse.double(), (sums[0] + sums[1]).log()[..., 0], rtol=1e-6, atol=1e-6)
            assert lse[0, 0, 0] == -math.inf and not out[0, 0, 0].any()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_copy(self, layout: str, sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        """To rows of slabs, and to nothing around them."""
        inputs = Inputs(dtype, *sizes)
        parts = inputs.part(layout), inputs.part(layout, head_dim=24)
        memories = [inputs.slab(part.shape[3]).to(dtype) for part in parts]
        wanted = [memory.clone() for memory in memories]
        attention_parts.copy(*parts, *[memory[:, :, 2 : 2 + sizes[2]] for memory in memories])
        for part, memory, whole in zip(parts, memories, wanted, strict=True):
            whole[:, :, 2 : 2 + sizes[2]] = part
            assert torch.equal(memory, whole)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("store", [False, True], ids=["add", "store"])
    def test_add_and_finish(
        self, store: bool, layout: str, sizes: tuple[int, ...], dtype: torch.dtype, kind: str
    ) -> None:
        inputs, rows = Inputs(dtype, *sizes), slice(2, 2 + sizes[2])
        parts = inputs.part(layout), inputs.part(layout, head_dim=24)
        slabs = inputs.slab(), inputs.slab(head_dim=24)
        for slab in slabs if store else ():
            slab[:, :, rows] = math.nan
        kept = [slab.clone() for slab in slabs]
        truths = [
            part.double() if store else part.double() + slab[:, :, rows].double()
            for part, slab in zip(parts, slabs, strict=True)
        ]
        for got, truth in zip(attention_parts.finish(*slabs, *parts, store, 2), truths, strict=True):
            check(got, truth)
            assert got.dtype == dtype and is_token_major(got)
        torch.testing.assert_close(slabs, tuple(kept), rtol=0, atol=0, equal_nan=True)
        attention_parts.add(*slabs, *parts, store, 2)
        for slab, before, truth in zip(slabs, kept, truths, strict=True):
            before[:, :, rows] = truth.float()
            torch.testing.assert_close(slab, before, rtol=2e-7, atol=1e-7)

    @pytest.mark.parametrize("count", [2, 3, 8])
    def test_total(self, count: int, sizes: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
        inputs = Inputs(dtype, *sizes)
        parts = [inputs.part(LAYOUTS[i % 3]) for i in range(count)]
        got = attention_parts.total(parts)
        check(got, sum(part.double() for part in parts))
        assert got.dtype == dtype and is_token_major(got)
        assert attention_parts.total(parts[:1]) is parts[0]


def test_one_part_of_another_layout_is_laid_out_anew(launched: list[str]) -> None:
    part = Inputs(torch.bfloat16, 2, 3, 7, 64).part("heads")
    got = attention_parts.total([part])
    assert torch.equal(got, part) and is_token_major(got) and launched == ["total"]


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


@pytest.mark.parametrize("change", ["odd rows", "unaligned", "columns apart", "head_dim"])
def test_tensors_that_lie_otherwise_go_torchs_way(change: str, launched: list[str]) -> None:
    """The launcher refuses them."""
    head_dim = 20 if change == "head_dim" else 16
    memory = torch.randn(2, 3, 5, 60).to(torch.bfloat16)
    views = {
        "odd rows": memory.flatten(2)[..., :105].unflatten(2, (5, 21))[..., :16], "unaligned": memory[..., 1:17],
        "columns apart": memory[..., :32:2], "head_dim": memory[..., :20],
    }  # fmt: skip
    part, other = views[change], Inputs(torch.bfloat16, 2, 3, 5, head_dim).part()
    slabs = [torch.zeros(2, 3, 5, head_dim) for _ in range(2)]
    to_k, to_v = torch.empty(2, 2, 3, 5, head_dim, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "cuda_attention_parts", lambda *a, launch=_C.cuda_attention_parts: _refused(launch(*a)))
        assert torch.equal(attention_parts.total([part, other]), part + other)
        attention_parts.add(*slabs, other, part, False)
        attention_parts.copy(part, other, to_k, to_v)
    assert torch.equal(slabs[1], part.float()) and torch.equal(to_k, part) and torch.equal(to_v, other)


def _refused(is_launched: bool) -> bool:
    assert not is_launched
    return False


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
    assert attention_parts._launch(object(), "total", False, (part,), (), (part,))
    assert asked == [(1, 0x5001)] and current == [0]


# -- the check at the first use ---------------------------------------------------------------------------------------


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> proof.Proofs:
    """As in a new process, on a GPU."""
    now = attention_parts._proofs
    fresh = proof.Proofs(now.instead, family=now.family)
    monkeypatch.setattr(attention_parts, "_proofs", fresh)
    monkeypatch.setattr(kernel_library, "preferred", "")
    monkeypatch.setattr(kernel_library, "can_run", lambda device: True)
    return fresh


def chosen(what: str = "merge", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> object | None:
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    return attention_parts._library(what, q, q)


@pytest.mark.parametrize("what, dtype", list(itertools.product(WHATS, DTYPES)), ids=str)
def test_kernels_that_are_right_prove_it_once(
    what: str, dtype: torch.dtype, launched: list[str], proofs: proof.Proofs, recwarn: pytest.WarningsRecorder
) -> None:
    state = torch.get_rng_state()
    for head_dim in (64, 40):
        assert chosen(what, dtype, head_dim) is not None
    count = len(launched)
    assert set(launched) == {what} and chosen(what, dtype, 64) is not None and len(launched) == count
    assert chosen(what, dtype, 20) is chosen(what, torch.float32) is None
    attention_parts.prove(chosen(what, dtype), Use(what, dtype, 64, 24, CPU))
    assert not recwarn.list and torch.equal(torch.get_rng_state(), state)


def changed(index: int, change: Any) -> Any:
    """A launch with another argument of _C.cuda_attention_parts."""
    return lambda launch: lambda *a: launch(*a[:index], change(a[index]), *a[index + 1 :])


def a_result_off(launch: Any) -> Any:
    def run(*arguments: Any) -> bool:
        is_launched = bool(launch(*arguments))
        address = (arguments[11] or arguments[10])[0][0]  # of outs or slabs
        (ctypes.c_uint8 * 16).from_address(address)[3] ^= 0x40
        return is_launched

    return run


DEFECTS = {  # by what is launched, how the launch differs
    "merge: results swapped": changed(9, lambda parts: parts[::-1]),
    "merge: lse swapped": changed(12, lambda lses: (lses[1], lses[0], lses[2])),
    "add: stores": changed(3, lambda store: True),
    "add: does not store": changed(3, lambda store: False),
    "add: k and v swapped": changed(9, lambda parts: parts[::-1]),
    "finish: stores": changed(3, lambda store: True),
    "finish: a row too far": changed(11, lambda outs: tuple((t[0] + 2 * t[3], *t[1:]) for t in outs)),
    "finish: a row is left out": changed(6, lambda rows: rows - 1),
    "total: leaves one out": changed(9, lambda parts: (*parts[:-1], parts[0])),
    "total: an element off": a_result_off,
    "add: an element off": a_result_off,
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_kernel_that_is_wrong_is_told_once_and_not_used(
    name: str, launched: list[str], proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = name.partition(":")[0]
    with monkeypatch.context() as patch:
        patch.setattr(_C, "cuda_attention_parts", DEFECTS[name](_C.cuda_attention_parts))
        words = f"kernel attention_parts {what} .bfloat16, heads of 64. failed its check on cpu"
        with pytest.warns(UserWarning, match=words) as said:
            assert [chosen(what), chosen(what)] == [None] * 2
    (text,) = (str(warning.message) for warning in said)
    assert "SEQ1F1B_CUDA_KERNELS=library" in text and "Install seq1f1b again" in text
    assert chosen(what) is None and chosen("total" if what != "total" else "add") is not None


@pytest.mark.parametrize("fails", [True, False])
def test_a_launch_that_fails_is_not_used(
    fails: bool, launched: list[str], proofs: proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> bool:
        if fails:
            raise RuntimeError("CUDA error 209: no kernel image is available")
        return False

    said = "no kernel image is available. Torch's ops, which are slower" if fails else "does not take a case that it"
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=said):
        patch.setattr(_C, "cuda_attention_parts", fail)
        assert chosen() is None


# -- which library ---------------------------------------------------------------------------------------------------


def test_on_the_cpu_kernels_are_taken_only_when_asked_for(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Inputs(torch.bfloat16, 2, 3, 5, 64).part() for _ in range(2)]
    for wish, count in (("", 0), ("library", 0), ("own", 1)):
        monkeypatch.setattr(kernel_library, "preferred", wish)
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
