"""Do our CUDA kernels do their work where a training step calls them? On the emulation of tests/cuda, not on a GPU.

The kernels' own source stands in place of torch's ops: from causal_attention over the KV cache, the extension and the
launcher to the results. Each primitive of sm80_primitives.cuh is held to what the PTX ISA says of it, by the same
checks that benchmarks/gpu.py makes on a GPU; the other stages of that script that look at our kernels run too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import gradients, random_qkv, segmented
from emulated_cuda import Emulated, build
from test_cuda_attention import check

from seq1f1b import _C
from seq1f1b.device import kernel_library
from seq1f1b.ops.attention import causal_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu
import gpu_cases
import gpu_stages
import probes

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

TOKENS, SIZES = 150, [70, 1, 46, 33]
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "documents": {"doc_ids": torch.arange(2 * TOKENS).view(2, TOKENS) // 37},
    "all": {"window": 90, "softcap": 5.0, "scale": 0.3, "doc_ids": torch.arange(2 * TOKENS).view(2, TOKENS) // 67},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Emulated, Path]:
    work = tmp_path_factory.mktemp("emulated")
    sources = [f"kernels/cuda/sm80_{name}.cu" for name in kernel_library.OPERATIONS]
    sources.append("tests/cuda/primitive_probes.cu")
    return build(sources, work, flags=["-DS1F_CUDA_ALL_TILES=1"]), work / "emulated.so"


STORE = 23  # place of an argument of _C.cuda_attention: dk and dv hold nothing yet


def extents(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int, bool]]:
    """Address and bytes of each tensor that a launch gets, and whether it is dk or dv of the slab."""
    _, batch, heads, kv_heads, tokens, head_dim, q_start, *_, docs, docs_stride = arguments[:12]
    q, k, v, out, lse, dout, dq, dk, dv, own_dk, own_dv = arguments[12:23]
    end = q_start + tokens
    shapes = [(t, heads, tokens, 2) for t in (q, out, dout, dq)] + [(t, kv_heads, end, 2) for t in (k, v)]
    shapes += [(t, kv_heads, end, 4) for t in (dk, dv)] + [(t, kv_heads, tokens, 2) for t in (own_dk, own_dv)]
    for t, of_heads, rows, element_bytes in shapes:
        if t is not None:
            address, *strides = t
            counts = (batch - 1, of_heads - 1, rows - 1)
            last = sum(count * stride for count, stride in zip(counts, strides, strict=True))
            yield address, (last + head_dim) * element_bytes, element_bytes == 4
    yield lse, batch * heads * tokens * 4, False
    if docs:
        yield docs, ((batch - 1) * docs_stride + end) * 4, False


@pytest.fixture
def calls(library: tuple[Emulated, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Call], list[str]]]:
    """The emulated kernels in place of torch's ops: what was called of either."""
    emulated, path = library
    launched: list[str] = []
    launch = _C.cuda_attention

    def within_extents(
        handle: object, name: str, kernel: int, arguments: Any, scratch: int, size: int, stream: int
    ) -> None:
        launched.append(name)
        ctypes.memset(scratch, 0xFF, size)  # NaN
        emulated._library.s1f_emulation_reset(ctypes.c_uint64(len(launched)))
        for address, extent, is_sum in [*extents(arguments), (scratch, size, False)]:
            if is_sum and arguments[STORE]:
                ctypes.memset(address, 0xFF, extent)
            emulated._library.s1f_emulation_add_extent(ctypes.c_void_p(address), ctypes.c_int64(extent), 1)
        try:
            launch(handle, name, kernel, arguments, scratch, size, stream)
        except RuntimeError as error:
            raise AssertionError(emulated._library.s1f_emulation_error().decode()) from error

    monkeypatch.setattr(kernel_library, "LIBRARY", path)
    monkeypatch.setattr(_C, "cuda_attention", within_extents)
    monkeypatch.setenv("SEQ1F1B_CUDA_KERNELS", "own")
    kernel_library.operations.cache_clear()
    with cuda_kernels_on_the_cpu() as of_aten:
        yield of_aten, launched
    kernel_library.operations.cache_clear()


@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 64), (torch.float16, 128)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
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
    assert sorted(launched) == sorted(kernel_library.OPERATIONS * runs)
    lacking = {"attention_forward", "attention_backward"} - set(kernel_library.OPERATIONS)
    assert {call[0] for call in of_aten} <= {f"_flash_{name}" for name in lacking}


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
        monkeypatch.setenv("SEQ1F1B_CUDA_KERNELS", "library")
    check(segmented([5, 7], options, [qkv], [dout[0]])[0], options, qkv, dout[0])
    assert calls[1] == []


@pytest.mark.parametrize("of", probes.CHECKS, ids=lambda check: check.__name__)
def test_a_primitive_is_as_the_ptx_isa_says(
    of: Callable[[probes.Prober], None], library: tuple[Emulated, Path]
) -> None:
    emulated = library[0]

    def launch(arguments: probes.Arguments, given: torch.Tensor, output: torch.Tensor) -> None:
        emulated.launch("primitive_probes", arguments, [given], [output], 0)

    of(probes.Prober(launch, torch.device("cpu")))


@pytest.mark.parametrize("stage", ["own kernels", "tiny", "one shape", "speed", "sweep"])
def test_the_stages_of_the_gpu_benchmark(stage: str, calls: tuple[list[Call], list[str]], tmp_path: Path) -> None:
    """So that a first run on a GPU does not end in a mistake of the script: one case of each, but all tiles."""
    machine = gpu_cases.Machine("cpu")
    machine.emulated = True
    cases = list(gpu_stages.STAGES[stage](machine))[: None if stage == "sweep" else 1]
    gpu_cases.run_cases(stage, cases, tmp_path / "results.jsonl", machine)
    found = [record for record in gpu.read(tmp_path / "results.jsonl") if record.get("case")]
    failed = [record for record in found if record["state"] == "failed"]
    assert failed == [] and any(record["state"] == "passed" for record in found)
    assert set(calls[1]) == set(kernel_library.OPERATIONS)
    if stage in ("speed", "sweep"):  # figures of each kernel
        named = {name.replace("attention_", "own ") for name in kernel_library.OPERATIONS} if stage == "speed" else {
            kernel.name for operation in kernel_library.operations().values() for kernel in operation.kernels
            if (kernel.dtype, kernel.head_dim, kernel.query_rows > 0) == ("bfloat16", 64, True)
        }  # fmt: skip
        assert named <= found[0].keys()
