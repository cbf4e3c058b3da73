"""Do our prototypes match torch's headers, and is a torch that is absent or too old refused by name?"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seq1f1b import _C

HERE = Path(__file__).parent
BIND = "import ctypes, sys; from seq1f1b import _C; [ctypes.CDLL(p) for p in sys.argv[1:]]; _C.bind_torch()"


def compiler(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


def bind_in_a_new_process(*libraries: Path) -> str:
    """The error of binding in a process that has loaded these libraries and no torch."""
    command = [sys.executable, "-c", BIND, *map(str, libraries)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def fake_libtorch(folder: Path, version: int) -> Path:
    """A libtorch_cpu.so that knows its version and nothing else."""
    source, library = folder / "fake.c", folder / "libtorch_cpu.so"
    source.write_text(f"unsigned long aoti_torch_abi_version(void) {{ return {version}ul; }}")
    soname = "-Wl,-soname,libtorch_cpu.so"
    subprocess.run([compiler("gcc"), "-shared", "-fPIC", soname, source, "-o", library], check=True)
    return library


def test_prototypes_match_the_headers() -> None:
    include = Path(torch.__file__).parent / "include"
    source = HERE / "torch_abi_headers.cpp"
    command = [compiler("g++"), "-std=c++20", "-fsyntax-only", f"-I{include}", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_function_is_exported() -> None:
    import ctypes

    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    header = Path(__file__).parents[2] / "csrc" / "torch" / "torch_abi.h"
    names = re.findall(r"^    X\(\w+, (\w+),", header.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(set(names)) > 20
    assert [name for name in names if not hasattr(library, name)] == []


def test_without_torch() -> None:
    assert bind_in_a_new_process() == "ImportError: libtorch_cpu.so is not loaded: import torch first"


def test_too_old_a_torch_is_named(tmp_path: Path) -> None:
    library = fake_libtorch(tmp_path, 2 << 56 | 9 << 48 | 1 << 40)
    assert bind_in_a_new_process(library) == "ImportError: torch 2.9.1 is too old, seq1f1b needs torch 2.10 or newer"


def test_a_missing_function_is_named(tmp_path: Path) -> None:
    library = fake_libtorch(tmp_path, 2 << 56 | 10 << 48)
    error = bind_in_a_new_process(library)
    assert error == "ImportError: libtorch has no aoti_torch_dtype_float32; seq1f1b needs torch 2.10 or newer"


def test_again_is_fine() -> None:
    import seq1f1b.attention.causal  # noqa: F401

    _C.bind_torch(None)
    _C.bind_torch("/no/such/libtorch_cpu.so")
