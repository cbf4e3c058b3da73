"""Is the library of CUDA kernels found, read, chosen and launched as it must be? Without a GPU.

What the built one, where there is one, says of itself and of a launch on a machine without a GPU is looked at too.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from seq1f1b.device import attention_parts, attention_proof, cuda_attention, kernel_library, kernel_tables
from seq1f1b.device.kernel_tables import Operation

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("seq1f1b_setup", ROOT / "setup.py")
assert spec is not None and spec.loader is not None
setup = importlib.util.module_from_spec(spec)  # it knows how the kernels are compiled
spec.loader.exec_module(setup)
FOUND = Operation(
    "attention_forward", "13.0.88", "sm_80 sm_90 compute_80", lambda arguments: 48, lambda arguments, stream: 0,
    lambda error: b"no driver" if error == 35 else b"bad value",
)  # fmt: skip


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Operation]:
    """The operations of a library, which launch nothing."""
    found = {FOUND.name: FOUND}
    for name, value in {
        "LIBRARY": tmp_path / "library.so",
        "_operations_of": lambda path: found,
        "preferred": "",
    }.items():
        monkeypatch.setattr(kernel_library, name, value)
    return found


def queries(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> Tensor:
    return torch.zeros(2, 4, 5, head_dim, dtype=dtype)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for those of a GPU on which every kernel proves itself."""
    monkeypatch.setattr(kernel_library, "_proofs", attention_proof.Proofs(""))
    monkeypatch.setattr(kernel_library, "can_run", lambda device: True)
    monkeypatch.setattr(attention_proof, "prove", lambda launch, use: None)


# -- which kernel ----------------------------------------------------------------------------------------------------


def test_kernels_take_documents_and_soft_caps(library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels leave a call to torch's flash op or cuDNN if either takes it."""
    on_a_gpu(monkeypatch)
    kernel_library._warn_of_products.cache_clear()
    empty, docs = torch.empty(0), torch.zeros(2, 5, dtype=torch.int32)
    options = cuda_attention.Options(empty, empty, empty, empty, 0.125, 0, 0.0)
    of_documents = options._replace(docs=docs, key_docs=docs)
    assert cuda_attention.way(queries(), 64, options._replace(softcap=20.0)) == "own"
    assert cuda_attention.way(queries(), 64, of_documents) == "own"
    assert cuda_attention.way(queries(head_dim=96), 96, of_documents) == "documents"
    with pytest.warns(UserWarning, match="not for heads of 96 in bfloat16"):
        assert cuda_attention.way(queries(head_dim=96), 96, of_documents._replace(softcap=20.0)) == "plain"
    assert cuda_attention.way(queries(), 64, options._replace(window=3)) == "flash"
    monkeypatch.setattr(cuda_attention, "_has_cudnn", lambda *of: True)
    assert cuda_attention.way(queries(), 64, options) == "cudnn"
    monkeypatch.setattr(kernel_library, "preferred", "own")
    assert cuda_attention.way(queries(), 64, options) == "own"
    monkeypatch.setattr(kernel_library, "preferred", "library")
    assert cuda_attention.way(queries(), 64, of_documents) == "documents"


def test_where_torch_is_deterministic_no_backward_of_ours_runs(
    library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch)
    library |= dict.fromkeys(kernel_library.ATTENTION, FOUND)
    torch.use_deterministic_algorithms(True)
    try:
        chosen = [kernel_library.choose(name, queries()) for name in kernel_library.ATTENTION]
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen == [FOUND, None]


def test_the_environment_asks_for_ours(library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "preferred", "own")
    assert kernel_library.choose("attention_forward", queries()) is not None
    assert kernel_library.choose("attention_forward", queries(head_dim=96)) is None
    assert kernel_library.choose("attention_backward", queries()) is None
    empty = torch.empty(0)
    options = cuda_attention.Options(empty, empty, empty, empty, 0.125, 0, 0.0)
    assert cuda_attention.way(queries(), 64, options) == "own"
    for other in (options._replace(slopes=torch.ones(4)), options._replace(scale=-1.0)):
        assert cuda_attention.way(queries(), 64, other) != "own"
    assert cuda_attention.way(queries(), 32, options) == "flash"
    assert cuda_attention.way(queries(torch.float32), 64, options) == "plain"

    monkeypatch.setattr(kernel_library, "preferred", "mine")
    with pytest.raises(ValueError, match=r"SEQ1F1B_CUDA_KERNELS is 'mine', must be 'own', 'library' or unset"):
        kernel_library.choose("attention_forward", queries())


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", tmp_path / "none.so")
    on_a_gpu(monkeypatch)
    assert "not built (no nvcc at installation" in kernel_library.describe()[0]
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with pytest.raises(RuntimeError, match=r"there is no .*none.so: install again with nvcc and SEQ1F1B_CUDA=1"):
        kernel_library.choose("attention_forward", queries())


def test_what_doctor_says(library: dict[str, Operation]) -> None:
    (line,) = kernel_library.describe()
    assert "sm_80 sm_90 compute_80, nvcc 13.0.88; for documents and soft caps, heads of 64 and 128" in line
    assert line.endswith("on each GPU of Ampere or later that passes a check at the first use")


# -- launches --------------------------------------------------------------------------------------------------------


def launch() -> None:
    q, k = queries(), torch.zeros(2, 2, 20, 64, dtype=torch.bfloat16)
    options = {"scale": 0.25, "window": 7, "softcap": 30.0, "docs": torch.zeros(2, 20, dtype=torch.int32)}
    operation, lse = kernel_library.operations()["attention_forward"], torch.zeros(2, 4, 5)
    tensors = {"q": q, "k": k, "v": k, "out": q, "lse": lse}
    kernel_library.launch_attention(operation, **(tensors | options))


def test_launches_are_on_the_tensors_device(library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """How much scratch memory one needs depends on what the current device can do."""
    current: list[int] = []
    asked: list[list[int]] = []

    @contextmanager
    def on(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def recorded(run: Callable[..., int]) -> Callable[..., int]:
        return lambda *a: asked.append([*current]) or run(*a)

    library[FOUND.name] = FOUND._replace(scratch_bytes=recorded(FOUND.scratch_bytes), call=recorded(FOUND.call))
    with monkeypatch.context() as patch:
        patch.setattr(kernel_library, "on", on)
        launch()
        attention_parts._launch(library[FOUND.name], "total", False, (queries(),), (), (queries(),))
    assert asked == [[-1]] * 3 and not current

    entered: list[int] = []
    monkeypatch.setattr(kernel_library, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    for index in (-1, 0, 1):
        with kernel_library.on(index):
            assert entered == [1] * (index == 1)


def test_a_launch_that_fails_has_cudas_words(library: dict[str, Operation]) -> None:
    library[FOUND.name] = FOUND._replace(call=lambda arguments, stream: 35)
    with pytest.raises(RuntimeError, match="CUDA error 35: no driver"):
        launch()
    library[FOUND.name] = FOUND._replace(scratch_bytes=lambda arguments: -kernel_tables.INVALID_VALUE)
    with pytest.raises(ValueError, match="CUDA error 1: bad value"):
        launch()


def test_libraries_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none.so"):
        kernel_tables.find(tmp_path / "none.so", "attention_forward")
    with pytest.raises(ValueError, match=r"libc.so.6.* s1f_cuda_attention_forward"):
        kernel_tables.find(Path("libc.so.6"), "attention_forward")
    header = (ROOT / "kernels/cuda/kernel_table.h").read_text()
    assert f"#define S1F_CUDA_ABI {kernel_tables.ABI} " in header
    old = kernel_tables._Operation(abi=kernel_tables.ABI - 1)
    monkeypatch.setattr(kernel_tables, "_Operation", SimpleNamespace(in_dll=lambda library, name: old))
    words = f"version {kernel_tables.ABI - 1} of its tables, this package needs {kernel_tables.ABI}: install"
    with pytest.raises(ValueError, match=words):
        kernel_tables.find(Path("libc.so.6"), "attention_forward")


# -- how it is built -------------------------------------------------------------------------------------------------


def test_a_compiler_that_fails_is_no_obstacle_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo V99.1.2; else echo "no such host compiler"; exit 1; fi'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("SEQ1F1B_CUDA", raising=False)
    assert setup.find_nvcc() == str(nvcc) and setup.wants_cuda()
    assert setup.CudaKernels().optional  # then setuptools warns, and goes on without
    with pytest.raises(setup.CompileError, match="no such host compiler"):
        setup.build_cuda_library(setup.cuda_sources(), tmp_path / "library.so", tmp_path)
    monkeypatch.setenv("SEQ1F1B_CUDA", "1")
    assert not setup.CudaKernels().optional
    monkeypatch.setenv("SEQ1F1B_CUDA", "0")
    assert not setup.wants_cuda()
    monkeypatch.setenv("SEQ1F1B_CUDA", "yes")
    with pytest.raises(SystemExit, match="SEQ1F1B_CUDA is 'yes', must be 0 or 1"):
        setup.wants_cuda()


# -- the library that was built ---------------------------------------------------------------------------------------


@pytest.fixture
def built() -> Path:
    if not kernel_library.LIBRARY.exists():
        pytest.skip("the CUDA kernels were not built: no nvcc at installation, or SEQ1F1B_CUDA=0")
    return kernel_library.LIBRARY


def test_it_needs_the_c_library_only_and_shows_its_operations_only(built: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    output = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in (["readelf", "-d", str(built)], ["nm", "-D", "--defined-only", str(built)])
    ]
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output[0])
    assert [name for name in needed if not re.fullmatch(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*", name)] == []
    assert {line.split()[-1] for line in output[1].splitlines()} >= {f"s1f_cuda_{n}" for n in kernel_library.OPERATIONS}
    assert [line for line in output[1].splitlines() if not line.split()[-1].startswith("s1f_cuda_")] == []


def test_it_has_an_operation_of_each_source(built: Path) -> None:
    sources = [re.sub(r"^sm\d+_", "", Path(source).stem) for source in setup.cuda_sources()]
    assert sorted(sources) == sorted(kernel_library.OPERATIONS)
    assert {found.architectures for found in kernel_library.operations().values()} == {"sm_80 sm_90 compute_80"}


def test_a_launch_without_a_gpu_says_so(built: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: benchmarks/gpu.py launches on it")
    q, lse, error = queries(), torch.zeros(2, 4, 5), r"CUDA error (35|100): (CUDA driver|no CUDA)"
    for name in kernel_library.ATTENTION:
        with pytest.raises(RuntimeError, match=error):
            kernel_library.launch_attention(
                kernel_library.operations()[name], q, q, q, q, lse, scale=1.0, window=0, softcap=0.0,
                docs=torch.empty(0), dout=q, dq=q, dk=q.float(), dv=q.float(),
            )  # fmt: skip
    for what in ("merge", "add", "finish", "total"):
        use = attention_proof.Use(what, q.dtype, 64, 64, q.device)
        with pytest.raises(RuntimeError, match=error):
            attention_parts.prove(kernel_library.operations()[kernel_library.PARTS], use)
