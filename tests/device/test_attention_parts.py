"""Is the work around attention over ranges of keys right, by our kernels and by torch's ops, and are kernels taken only
where they have proven themselves? The kernels run on the emulation of tests/cuda, where no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cuda import build, emulated_kernels
from torch import Tensor

from seq1f1b.device import attention_parts, kernel_library, proofs
from seq1f1b.device.attention_parts import WHATS


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
def gpu(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As in a new process, on a GPU; what is launched there."""
    monkeypatch.setattr(proofs, "results", {})
    monkeypatch.setattr(kernel_library, "preferred", "")
    monkeypatch.setattr(kernel_library, "can_run", lambda device: True)
    return launched


def chosen(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, v_head_dim: int | None = None) -> object | None:
    q = torch.empty(1, 1, 1, head_dim, dtype=dtype)
    return attention_parts._operation(q, torch.empty(1, 1, 1, v_head_dim or head_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", kernel_library.CODES, ids=str)
def test_kernels_that_are_right_prove_it_once(
    dtype: torch.dtype, gpu: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    for sizes in ((64,), (40,), (256,), (8,), (64, 24)):
        assert chosen(dtype, *sizes) is not None
    count = len(gpu)
    assert set(gpu) == set(WHATS) and chosen(dtype) is not None and len(gpu) == count
    assert chosen(dtype, 20) is chosen(torch.float32) is None
    assert not recwarn.list


def changed(field: str, change: Any) -> Any:
    return lambda work: work._replace(**{field: change(getattr(work, field))})


def fails(work: attention_parts.Work) -> attention_parts.Work:
    raise RuntimeError("CUDA error 209: no kernel image is available")


def a_row_too_far(outs: Any) -> Any:
    return tuple(t.as_strided(t.shape, t.stride(), t.storage_offset() + t.stride(2)) for t in outs)


DEFECTS = {  # by what is launched, the work that is done in its place
    "merge: results swapped": changed("parts", lambda parts: parts[::-1]),
    "merge: lse swapped": changed("lses", lambda lses: (lses[1], lses[0], lses[2])),
    "add: stores": changed("store", lambda store: True),
    "add: does not store": changed("store", lambda store: False),
    "add: fails": fails,
    "finish: stores": changed("store", lambda store: True),
    "finish: a row too far": changed("outs", a_row_too_far),
    "finish: a row is left out": changed("parts", lambda parts: tuple(t[:, :, :-1] for t in parts)),
    "total: leaves one out": changed("parts", lambda parts: (*parts[:-1], parts[0])),
    "total: no launch": None,
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_kernel_that_is_wrong_is_told_once_and_not_used(
    name: str, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, defect = attention_parts._launch, DEFECTS[name]

    def wrong(operation: Any, work: attention_parts.Work) -> bool:
        if work.what != name.partition(":")[0]:
            return launch(operation, work)
        return defect is not None and launch(operation, defect(work))

    with monkeypatch.context() as patch:
        patch.setattr(attention_parts, "_launch", wrong)
        words = "kernel attention_parts .bfloat16, heads of 64. failed its check on cpu"
        with pytest.warns(UserWarning, match=words) as said:
            assert [chosen(), chosen()] == [None] * 2
    assert len(said) == 1 and "Torch's ops, which are slower, take its place" in str(said[0].message)
    assert chosen() is None and chosen(torch.float16) is not None


# -- which library ---------------------------------------------------------------------------------------------------


def test_on_the_cpu_kernels_are_taken_only_when_asked_for(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(2)
    for wish, count in (("", 0), ("library", 0), ("own", 1)):
        monkeypatch.setattr(kernel_library, "preferred", wish)
        attention_parts.total(parts)
        assert len(launched) == count, wish
