"""Do our CUDA kernels do their work where a training step calls them? On the emulation of tests/cuda, not on a GPU.

The kernels' own source stands in place of torch's ops: from causal_attention over the KV cache, the extension and the
launcher to the results.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import gradients, random_qkv, segmented
from emulated_cuda import build, emulated_kernels
from slices import each_value
from test_cuda_attention import check

from seq1f1b import proof
from seq1f1b.device import attention_documents, attention_proof, kernel_library
from seq1f1b.ops.attention import causal_attention

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

TOKENS, SIZES = 100, [66, 1, 33]  # a tile of 64 rows and a part of one
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "documents": {"doc_ids": torch.arange(2 * TOKENS).view(2, TOKENS) // 37},
    "all": {"window": 90, "softcap": 5.0, "scale": 0.3, "doc_ids": torch.arange(2 * TOKENS).view(2, TOKENS) // 67},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("emulated")
    build([f"kernels/cuda/sm80_{name}.cu" for name in kernel_library.OPERATIONS], work)
    return work / "emulated.so"


@pytest.fixture
def calls(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Call], list[str]]]:
    """The emulated kernels in place of torch's ops: what was called of either."""
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with emulated_kernels(library) as launched, cuda_kernels_on_the_cpu() as of_aten:
        yield of_aten, launched


@pytest.mark.parametrize(
    "name, dtype, head_dim", each_value(list(OPTIONS), [(torch.bfloat16, 64), (torch.float16, 128)]), ids=str
)
def test_segments_equal_the_formula(
    name: str, dtype: torch.dtype, head_dim: int, calls: tuple[list[Call], list[str]]
) -> None:
    heads = {"dtype": dtype, "head_dim": head_dim, "tokens": TOKENS}
    qkv, dout = (random_qkv(4, 2, seed=seed, **heads) for seed in (0, 1))
    options = OPTIONS[name]
    check(segmented(SIZES, options, [qkv], [dout[0]])[0], options, qkv, dout[0])
    check(gradients(lambda *t: causal_attention(*t, layer=0, **options), *qkv, dout[0]), options, qkv, dout[0])
    of_aten, launched = calls
    runs = len(SIZES) + 1
    assert sorted(launched) == sorted(kernel_library.ATTENTION * runs)
    assert of_aten == []


def test_deterministic_gradients_have_the_same_bits(calls: tuple[list[Call], list[str]]) -> None:
    qkv, dout = (random_qkv(4, 1, seed=seed, dtype=torch.bfloat16, head_dim=64, tokens=TOKENS) for seed in (0, 1))
    torch.use_deterministic_algorithms(True)
    try:
        runs = [segmented(SIZES, {}, [qkv], [dout[0]])[0] for _ in range(2)]  # blocks in another order
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ["alibi", "float32", "head_dim", "library"])
def test_what_ours_lack_goes_torchs_way(
    name: str, calls: tuple[list[Call], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"dtype": torch.float32 if name == "float32" else torch.bfloat16, "tokens": 12}
    sizes["head_dim"] = 40 if name == "head_dim" else 64
    qkv, dout = (random_qkv(4, 2, seed=seed, **sizes) for seed in (0, 1))
    options = {"alibi_slopes": torch.rand(4)} if name == "alibi" else {}
    if name == "library":
        monkeypatch.setattr(kernel_library, "preferred", "library")
    check(segmented([5, 7], options, [qkv], [dout[0]])[0], options, qkv, dout[0])
    assert calls[1] == []


# -- by default: after a check, see test_kernel_proof.py --------------------------------------------------------------


@pytest.mark.parametrize("name", kernel_library.ATTENTION)
@pytest.mark.parametrize("dtype", proof.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernels_pass_the_check_at_the_first_use(
    head_dim: int, dtype: torch.dtype, name: str, calls: tuple[list[Call], list[str]]
) -> None:
    launch = functools.partial(kernel_library.launch_attention, kernel_library.operations()[name])
    attention_proof.prove(launch, proof.Use(name, dtype, head_dim, head_dim, torch.device("cpu")))
    assert calls[1] == [name] * len(attention_proof.CASES)


@pytest.mark.parametrize("are_right", [True, False])
def test_by_default_documents_are_for_kernels_that_pass_the_check(
    are_right: bool, calls: tuple[list[Call], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU of which there is no record, and where torch's flash ops have failed theirs."""
    monkeypatch.setattr(attention_documents, "is_right", lambda dtype, head_dim, device: False)
    monkeypatch.setattr(kernel_library, "preferred", "")
    now = kernel_library._proofs
    monkeypatch.setattr(kernel_library, "_proofs", proof.Proofs(now.family, now.instead))
    monkeypatch.setattr(kernel_library, "_choices", {})
    monkeypatch.setattr(kernel_library, "_can_run", lambda device: True)
    launch = kernel_library.launch_attention

    def launch_without_documents(*tensors: Any, docs: torch.Tensor, **options: Any) -> None:
        launch(*tensors, docs=docs[:, :0], **options)

    if not are_right:
        monkeypatch.setattr(kernel_library, "launch_attention", launch_without_documents)
    tokens, sizes = 31 if are_right else 32, [14, 17 if are_right else 18]
    options = {"doc_ids": torch.arange(2 * tokens).view(2, tokens) // 9}
    heads = {"dtype": torch.float16, "head_dim": 64, "tokens": tokens}
    qkv, dout = (random_qkv(4, 2, seed=seed, **heads) for seed in (0, 1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(segmented(sizes, options, [qkv], [dout[0]])[0], options, qkv, dout[0])
    failures = [str(warning.message) for warning in said if "failed its check" in str(warning.message)]
    assert len(failures) == (0 if are_right else len(kernel_library.ATTENTION)), failures
    of_aten, launched = calls
    checks = len(attention_proof.CASES) * 2
    assert of_aten == [] and (len(launched) == checks + 2 * len(sizes) if are_right else len(launched) < checks)
