"""Is the work around attention over ranges of keys right, by our kernels and by torch's ops, and are kernels taken only
where they have proven themselves? The kernels run on the emulation of tests/cuda, where no GPU is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import build, emulated_kernels
from torch import Tensor

from seq1f1b.device import attention_parts, attention_proof, kernel_library
from seq1f1b.device.attention_proof import Use

CPU = torch.device("cpu")
WHATS = ("merge", "add", "finish", "total")
DTYPES = list(attention_proof.DTYPES)


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


def parts_of(count: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 16) -> list[Tensor]:
    """Tensors of two rows of a batch, three heads and five tokens, in token-major memory."""
    random = torch.Generator().manual_seed(count)
    return [torch.randn(2, 5, 3, head_dim, generator=random).to(dtype).transpose(1, 2) for _ in range(count)]


def test_one_part_of_another_layout_is_laid_out_anew(launched: list[str]) -> None:
    part = parts_of(1)[0].contiguous()
    got = attention_parts.total([part])
    assert torch.equal(got, part) and got.transpose(1, 2).is_contiguous() and launched == ["total"]
    assert attention_parts.total([got]) is got


@pytest.mark.parametrize("change", ["odd rows", "unaligned", "columns apart", "head_dim"])
def test_tensors_that_lie_otherwise_go_torchs_way(change: str, launched: list[str]) -> None:
    """The launcher refuses them."""
    head_dim = 20 if change == "head_dim" else 16
    memory = torch.randn(2, 3, 5, 60).to(torch.bfloat16)
    views = {
        "odd rows": memory.flatten(2)[..., :105].unflatten(2, (5, 21))[..., :16], "unaligned": memory[..., 1:17],
        "columns apart": memory[..., :32:2], "head_dim": memory[..., :20],
    }  # fmt: skip
    part, other = views[change], parts_of(1, head_dim=head_dim)[0]
    slabs = [torch.zeros(2, 3, 5, head_dim) for _ in range(2)]
    to_k, to_v = torch.empty(2, 2, 3, 5, head_dim, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_parts, "_launch", lambda *a, launch=attention_parts._launch: _refused(launch(*a)))
        assert torch.equal(attention_parts.total([part, other]), part + other)
        attention_parts.add(*slabs, other, part, False)
        attention_parts.copy(part, other, to_k, to_v)
    assert torch.equal(slabs[1], part.float()) and torch.equal(to_k, part) and torch.equal(to_v, other)


def _refused(is_launched: bool) -> bool:
    assert not is_launched
    return False


# -- the check at the first use ---------------------------------------------------------------------------------------


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> attention_proof.Proofs:
    """As in a new process, on a GPU."""
    now = attention_parts._proofs
    fresh = attention_proof.Proofs(now.instead, now.family)
    monkeypatch.setattr(attention_parts, "_proofs", fresh)
    monkeypatch.setattr(kernel_library, "preferred", "")
    monkeypatch.setattr(kernel_library, "can_run", lambda device: True)
    return fresh


def chosen(what: str = "merge", dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> object | None:
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    return attention_parts._operation(what, q, q)


@pytest.mark.parametrize("what, dtype", list(itertools.product(WHATS, DTYPES)), ids=str)
def test_kernels_that_are_right_prove_it_once(
    what: str, dtype: torch.dtype, launched: list[str], proofs: attention_proof.Proofs, recwarn: pytest.WarningsRecorder
) -> None:
    state = torch.get_rng_state()
    for head_dim in (64, 128, 40, 96, 256, 8):
        assert chosen(what, dtype, head_dim) is not None
    count = len(launched)
    assert set(launched) == {what} and chosen(what, dtype, 64) is not None and len(launched) == count
    assert chosen(what, dtype, 20) is chosen(what, torch.float32) is None
    attention_parts.prove(chosen(what, dtype), Use(what, dtype, 64, 24, CPU))
    assert not recwarn.list and torch.equal(torch.get_rng_state(), state)


def changed(index: int, change: Any) -> Any:
    """A launch with another argument of attention_parts._launch."""
    return lambda launch: lambda *a: launch(*a[:index], change(a[index]), *a[index + 1 :])


def a_result_off(launch: Any) -> Any:
    def run(*a: Any) -> bool:
        is_launched = bool(launch(*a))
        (a[5] or a[4])[0][0, 0, 0, 1] += 64.0  # of outs or slabs
        return is_launched

    return run


def _raise(*arguments: Any) -> bool:
    raise RuntimeError("CUDA error 209: no kernel image is available")


def a_row_too_far(outs: Any) -> Any:
    return tuple(t.as_strided(t.shape, t.stride(), t.storage_offset() + t.stride(2)) for t in outs)


DEFECTS = {  # by what is launched, how the launch differs
    "merge: results swapped": changed(3, lambda parts: parts[::-1]),
    "merge: lse swapped": changed(6, lambda lses: (lses[1], lses[0], lses[2])),
    "add: stores": changed(2, lambda store: True),
    "add: does not store": changed(2, lambda store: False),
    "add: k and v swapped": changed(3, lambda parts: parts[::-1]),
    "finish: stores": changed(2, lambda store: True),
    "finish: a row too far": changed(5, a_row_too_far),
    "finish: a row is left out": changed(3, lambda parts: tuple(t[:, :, :-1] for t in parts)),
    "total: leaves one out": changed(3, lambda parts: (*parts[:-1], parts[0])),
    "total: an element off": a_result_off,
    "add: an element off": a_result_off,
    "add: a launch fails": lambda launch: _raise,
    "total: no launch": lambda launch: lambda *a: False,
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_kernel_that_is_wrong_is_told_once_and_not_used(
    name: str, launched: list[str], proofs: attention_proof.Proofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = name.partition(":")[0]
    with monkeypatch.context() as patch:
        patch.setattr(attention_parts, "_launch", DEFECTS[name](attention_parts._launch))
        words = f"kernel attention_parts {what} .bfloat16, heads of 64. failed its check on cpu"
        with pytest.warns(UserWarning, match=words) as said:
            assert [chosen(what), chosen(what)] == [None] * 2
    (text,) = (str(warning.message) for warning in said)
    assert "SEQ1F1B_CUDA_KERNELS=library" in text and "Install seq1f1b again" in text
    assert chosen(what) is None and chosen("total" if what != "total" else "add") is not None


# -- which library ---------------------------------------------------------------------------------------------------


def test_on_the_cpu_kernels_are_taken_only_when_asked_for(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(2)
    for wish, count in (("", 0), ("library", 0), ("own", 1)):
        monkeypatch.setattr(kernel_library, "preferred", wish)
        attention_parts.total(parts)
        assert len(launched) == count, wish
