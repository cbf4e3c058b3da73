"""Do our kernels merge and add up what torch's attention ops return for ranges of keys? On the emulation of tests/cuda.

From causal_attention over the KV cache to the results, with stand-ins of torch's ops.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aten_stand_ins import cuda_kernels_on_the_cpu
from attention_runs import errors, random_qkv, segmented
from emulated_cuda import build, emulated_parts
from path_runs import by_paths, by_units
from simulated_step import SimulatedStep
from test_cuda_attention import check

from seq1f1b.device import cuda_attention, kernel_library

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("emulated")
    build(["kernels/cuda/sm80_attention_parts.cu"], work)
    return work / "emulated.so"


@pytest.mark.parametrize("way", ["cudnn", "flash"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_segments_equal_the_formula(
    dtype: torch.dtype, way: str, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "preferred", "own")
    monkeypatch.setattr(kernel_library, "choose", lambda *arguments, **options: None)  # this library has no attention
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda device: way == "cudnn")
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda params: True)
    monkeypatch.setattr(cuda_attention, "PLAN_FLOPS", 0.0)
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 8)
    qkv, dout = (random_qkv(4, 2, seed=seed, tokens=40, head_dim=40, dtype=dtype) for seed in (0, 1))
    with emulated_parts(library) as launched, cuda_kernels_on_the_cpu() as of_aten:
        check(segmented([12, 18, 10], {}, [qkv], [dout[0]])[0], {}, qkv, dout[0])
    assert all(way in name for name, *_ in of_aten)
    assert launched.count("merge") == (2 if way == "cudnn" else 0)
    assert launched.count("add") == 2 + 4  # ranges of 8 keys before the second segment, and before the third
    # Keys and values of 3 segments are copied; the last segment's sums are its parts, where these lie as they must.
    assert launched.count("finish") >= 3 + 2
    assert "total" in launched


@pytest.mark.parametrize("batch", [1, 2])
def test_siblings_equal_their_paths(batch: int, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results over the own keys of all siblings, and over two ranges before them, lie as our kernels read them."""
    monkeypatch.setattr(kernel_library, "preferred", "own")
    monkeypatch.setattr(kernel_library, "choose", lambda *arguments, **options: None)
    step = SimulatedStep([9, 7, 15], parents=[-1, 0, 1], parts={2: [4, 1, 10]}, rows=[30, 0, 50], num_rows=65)
    given = {"batch": batch, "tokens": 31, "head_dim": 40, "dtype": torch.bfloat16}
    qkv, dout = (random_qkv(4, 2, seed=seed, **given) for seed in (0, 1))
    order = [(kind, s) for kind, segments in (("F", (0, 1, 2)), ("B", (2, 1, 0))) for s in segments]
    with emulated_parts(library) as launched, cuda_kernels_on_the_cpu():
        found = by_units(step, order, {}, qkv, dout[0])
    assert max(errors(found, by_paths(step, {}, qkv, dout[0]))) < 1e-2
    assert launched.count("merge") == 1 + 2  # of two ranges; of three
    assert launched.count("add") == 1 + 2 and "total" in launched
