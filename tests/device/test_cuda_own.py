"""Do our CUDA kernels compute attention where a training step calls them? On the emulation of tests/cuda, not on GPUs.

From causal_attention over the KV cache, the extension and the launcher to the results: the kernels' own source stands
in place of torch's ops. tests/cuda/emulation.h says what is left to chance, as on a GPU. On one benchmarks/gpu.py runs
the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import gradients, random_qkv, segmented
from emulated_cuda import SHARED_99_KB, build, emulated_kernels
from test_cuda_attention import check

from seq1f1b.attention.causal import causal_attention
from seq1f1b.device import attention_proof, cuda_attention, kernel_library, proofs

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

BF16, FP16 = torch.bfloat16, torch.float16
Calls = tuple[list[Call], list[str]]
"""What was called of torch's ops, and launched of our kernels."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def calls(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with emulated_kernels(library) as launched, cuda_kernels_on_the_cpu() as of_aten:
        yield of_aten, launched


def documents(*lengths: int, batch: int = 2) -> dict[str, Any]:
    """Ids go 0, 1, ... and start again after 3, so that documents come back; each row has other boundaries."""
    numbers = torch.arange(len(lengths)) % 4
    rows = [torch.repeat_interleave(numbers, torch.tensor(lengths).roll(row)) for row in range(batch)]
    return {"doc_ids": torch.stack(rows).to(torch.int32)}


# Sizes of segments, heads of queries and of keys, head_dim, dtype, options. Tiles have 64 or 128 rows.
CASES: list[tuple[list[int], tuple[int, int], int, torch.dtype, dict[str, Any]]] = [
    ([66, 1, 33], (4, 2), 64, BF16, {}),
    ([1], (2, 1), 128, FP16, {}),
    ([64, 63], (2, 2), 128, BF16, {"scale": 0.3}),
    ([120, 30], (8, 1), 64, BF16, {}),
    ([70, 60], (2, 1), 128, BF16, {"scale": 1.5}),  # logits of +-60
    ([300, 30], (1, 1), 128, BF16, {"window": 100}),
    ([129, 201], (2, 1), 64, FP16, {"window": 64}),
    ([100, 50], (2, 1), 128, FP16, {"softcap": 2.0}),
    ([200, 130], (2, 1), 64, BF16, documents(50, 143, 1, 60, 76)),
    ([200, 130], (1, 1), 128, FP16, documents(10, 20, 90, 180, 30)),
    ([310, 20], (2, 1), 64, FP16, {"window": 90, "softcap": 3.0, **documents(128, 64, 138)}),
]
IDS = [f"{sizes} {heads} {head_dim} {dtype} {'+'.join(options)}" for sizes, heads, head_dim, dtype, options in CASES]


def check_case(index: int) -> None:
    sizes, heads, head_dim, dtype, options = CASES[index]
    given = {"tokens": sum(sizes), "head_dim": head_dim, "dtype": dtype}
    qkv, dout = (random_qkv(*heads, seed=seed, **given) for seed in (0, 1))
    check(segmented(sizes, options, [qkv], [dout[0]])[0], options, qkv, dout[0])


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_segments_equal_the_formula(index: int, calls: Calls) -> None:
    check_case(index)
    of_aten, launched = calls
    ours = [name for name in launched if name in kernel_library.ATTENTION]
    assert sorted(ours) == sorted(kernel_library.ATTENTION * len(CASES[index][0])) and of_aten == []


@pytest.mark.parametrize("index", [0, 2, 5, 8, 9])
def test_tiles_for_less_shared_memory(index: int, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the backward on sm_86, sm_89 and sm_120."""
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with emulated_kernels(library, SHARED_99_KB) as launched, cuda_kernels_on_the_cpu():
        check_case(index)
    assert "attention_backward" in launched


def test_whole_sequences_and_other_layouts(calls: Calls) -> None:
    """Outside of a step, and of rows with space between."""
    found = (random_qkv(4, 2, seed=seed, dtype=BF16, head_dim=72, tokens=100) for seed in (0, 1))
    qkv, dout = ([t[..., :64] for t in tensors] for tensors in found)
    check(gradients(lambda *t: causal_attention(*t, layer=0), *qkv, dout[0]), {}, qkv, dout[0])
    assert calls == ([], list(kernel_library.ATTENTION))


@pytest.mark.parametrize("name", kernel_library.ATTENTION)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, FP16), (128, BF16)], ids=str)
def test_the_kernels_pass_the_check_at_the_first_use(
    head_dim: int, dtype: torch.dtype, name: str, calls: Calls
) -> None:
    attention_proof.prove(proofs.Use(name, dtype, head_dim, head_dim, torch.device("cpu")))
    assert calls[1] == [name] * len(attention_proof.CASES)


# -- results of torch's ops over ranges of keys, which our kernels merge and add up ------------------------------------


@pytest.mark.parametrize("way", ["cudnn", "flash"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_ranges_are_merged_and_added_up(
    dtype: torch.dtype, way: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "_has_own", lambda *arguments: False)
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda *of: way == "cudnn")
    monkeypatch.setattr(cuda_attention, "OFTEN", 0)
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 8)
    qkv, dout = (random_qkv(4, 2, seed=seed, tokens=40, head_dim=40, dtype=dtype) for seed in (0, 1))
    check(segmented([12, 18, 10], {}, [qkv], [dout[0]])[0], {}, qkv, dout[0])
    of_aten, launched = calls
    assert all(way in name for name, *_ in of_aten) and set(launched) == {"merge", "add", "finish", "total"} - (
        {"merge"} if way == "flash" else set()
    )
    assert launched.count("merge") == (2 if way == "cudnn" else 0)
