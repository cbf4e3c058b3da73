"""Is the library of CUDA kernels found, read, chosen and launched as it must be? Without a GPU.

What the built one, where there is one, says of itself and of a launch on a machine without a GPU is looked at too.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from seq1f1b.device import attention_parts, attention_proof, cuda_attention, kernel_library, proofs
from seq1f1b.device.kernel_library import Operation

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
    monkeypatch.setattr(proofs, "results", {})
    monkeypatch.setattr(kernel_library, "can_run", lambda device: True)
    monkeypatch.setattr(attention_proof, "prove", lambda use: None)


# -- which kernel ----------------------------------------------------------------------------------------------------


def test_which_calls_go_by_which_way(library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels leave calls that torch's flash op or cuDNN takes to these, unless the environment asks for ours."""
    on_a_gpu(monkeypatch)
    kernel_library._warn.cache_clear()
    empty, docs = torch.empty(0), torch.zeros(2, 5, dtype=torch.int32)
    plain = cuda_attention.Options(empty, empty, empty, empty, 0.125, 0, 0.0)
    of_documents = plain._replace(docs=docs, key_docs=docs)

    def way(options: cuda_attention.Options, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> str:
        return cuda_attention.way(queries(dtype, head_dim), head_dim, options)

    assert way(plain._replace(softcap=20.0)) == way(of_documents) == "own"
    assert way(of_documents, 96) == "documents"
    with pytest.warns(UserWarning, match="not for heads of 96 in bfloat16"):
        assert way(of_documents._replace(softcap=20.0), 96) == "plain"
    assert way(plain._replace(window=3)) == "flash" and way(plain, dtype=torch.float32) == "plain"
    with monkeypatch.context() as patch:
        patch.setattr(cuda_attention, "_has_cudnn", lambda *of: True)
        assert way(plain) == "cudnn"
    monkeypatch.setattr(kernel_library, "preferred", "own")
    assert way(plain) == "own" and way(plain, 32) == "flash"
    assert way(plain._replace(slopes=torch.ones(4))) == "plain" and way(plain._replace(scale=-1.0)) == "flash"
    assert cuda_attention.way(queries(), 64, plain, "attention_backward") == "flash"  # the library has none
    monkeypatch.setattr(kernel_library, "preferred", "library")
    assert way(of_documents) == "documents"
    monkeypatch.setattr(kernel_library, "preferred", "mine")
    with pytest.raises(ValueError, match=r"SEQ1F1B_CUDA_KERNELS is 'mine', must be 'own', 'library' or unset"):
        way(plain)


def test_where_torch_is_deterministic_no_backward_of_ours_runs(
    library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(monkeypatch)
    library |= dict.fromkeys(kernel_library.ATTENTION, FOUND)
    torch.use_deterministic_algorithms(True)
    try:
        assert [cuda_attention._has_own(name, queries()) for name in kernel_library.ATTENTION] == [True, False]
    finally:
        torch.use_deterministic_algorithms(False)


def test_older_gpus_and_cpus_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (capability, wanted) in enumerate((((7, 5), False), ((8, 0), True), ((12, 0), True))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert kernel_library.can_run(torch.device("cuda", 100 + index)) is wanted
    assert not kernel_library.can_run(torch.device("cpu"))


def test_what_doctor_says(library: dict[str, Operation]) -> None:
    (line,) = kernel_library.describe()
    assert "sm_80 sm_90 compute_80, nvcc 13.0.88; for documents and soft caps, heads of 64 and 128, on each GPU" in line


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_library, "LIBRARY", tmp_path / "none.so")
    on_a_gpu(monkeypatch)
    assert "not built (no nvcc at installation" in kernel_library.describe()[0]
    monkeypatch.setattr(kernel_library, "preferred", "own")
    with pytest.raises(RuntimeError, match=r"there is no .*none.so: install again with nvcc and SEQ1F1B_CUDA=1"):
        cuda_attention._has_own("attention_forward", queries())


# -- launches --------------------------------------------------------------------------------------------------------


def launch() -> None:
    q, k = queries(), torch.zeros(2, 2, 20, 64, dtype=torch.bfloat16)
    options = {"scale": 0.25, "window": 7, "softcap": 30.0, "docs": torch.zeros(2, 20, dtype=torch.int32)}
    operation, lse = kernel_library.operations()["attention_forward"], torch.zeros(2, 4, 5)
    tensors = {"q": q, "k": k, "v": k, "out": q, "lse": lse}
    kernel_library.launch_attention(operation, **(tensors | options))


def test_launches_are_on_the_tensors_device(library: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    """How much scratch memory one needs depends on what the current device can do."""
    current, asked = [0], list[int]()

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    library[FOUND.name] = FOUND._replace(
        scratch_bytes=lambda arguments: asked.append(current[-1]) or 48,
        call=lambda arguments, stream: asked.append(current[-1]) or 0,
    )
    launch()
    attention_parts._launch(library[FOUND.name], attention_parts.Work("total", (queries(),), outs=(queries(),)))
    assert asked == [-1] * 3 and current == [0]


def test_a_launch_that_fails_has_cudas_words(library: dict[str, Operation]) -> None:
    library[FOUND.name] = FOUND._replace(call=lambda arguments, stream: 35)
    with pytest.raises(RuntimeError, match="CUDA error 35: no driver"):
        launch()
    library[FOUND.name] = FOUND._replace(scratch_bytes=lambda arguments: -kernel_library.INVALID_VALUE)
    with pytest.raises(ValueError, match="CUDA error 1: bad value"):
        launch()


def test_libraries_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none.so"):
        kernel_library.find(tmp_path / "none.so", "attention_forward")
    with pytest.raises(ValueError, match=r"libc.so.6.* s1f_cuda_attention_forward"):
        kernel_library.find(Path("libc.so.6"), "attention_forward")
    header = (ROOT / "kernels/cuda/kernel_table.h").read_text()
    assert f"#define S1F_CUDA_ABI {kernel_library.ABI} " in header
    old = kernel_library._Operation(abi=kernel_library.ABI - 1)
    monkeypatch.setattr(kernel_library, "_Operation", SimpleNamespace(in_dll=lambda library, name: old))
    words = f"version {kernel_library.ABI - 1} of its tables, this package needs {kernel_library.ABI}: install"
    with pytest.raises(ValueError, match=words):
        kernel_library.find(Path("libc.so.6"), "attention_forward")


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


def test_it_needs_the_c_library_only_and_has_an_operation_of_each_source(built: Path) -> None:
    sources = {re.sub(r"^sm\d+_", "", Path(source).stem) for source in setup.cuda_sources()}
    assert sources == set(kernel_library.OPERATIONS)
    assert {found.architectures for found in kernel_library.operations().values()} == {"sm_80 sm_90 compute_80"}
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    needed, shown = (
        subprocess.run([*command, built], capture_output=True, text=True, check=True).stdout
        for command in (["readelf", "-d"], ["nm", "-D", "--defined-only"])
    )
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", needed)
    assert [name for name in libraries if not re.fullmatch(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*", name)] == []
    assert {line.split()[-1] for line in shown.splitlines()} == {f"s1f_cuda_{name}" for name in sources}


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
    use = proofs.Use(kernel_library.PARTS, q.dtype, 64, 64, q.device)
    with pytest.raises(RuntimeError, match=error):
        attention_parts.prove(kernel_library.operations()[kernel_library.PARTS], use)
