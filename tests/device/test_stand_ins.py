"""Have the stand-ins for the CUDA driver and NCCL the declarations of the real ones?"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import stand_in_library


def cuda_include() -> Path:
    """The folder of cuda.h of an installed CUDA toolkit."""
    nvcc = shutil.which("nvcc")
    roots = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    if nvcc is not None:
        roots.insert(0, Path(nvcc).resolve().parent.parent)
    for root in roots:
        if (root / "include" / "cuda.h").exists():
            return root / "include"
    pytest.skip("no CUDA toolkit is installed: there is no cuda.h to compare with")


def nccl_include() -> Path:
    """The folder of nccl.h of NVIDIA's Python package of NCCL."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        if (Path(folder) / "include" / "nccl.h").exists():
            return Path(folder) / "include"
    pytest.skip(
        "NVIDIA's Python package of NCCL (nvidia-nccl-cu13) is not installed: there is no nccl.h to compare with"
    )


def compile_against(source: Path, *flags: str | Path) -> str:
    """The compiler's errors."""
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Werror", *map(str, flags), str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stderr


def test_driver_matches_the_header() -> None:
    flags = ("-DSTAND_IN_REAL_CUDA_H", f"-I{cuda_include()}")
    for source in stand_in_library.FOLDER.glob("driver*.c"):
        assert compile_against(source, *flags) == ""


def test_nccl_matches_the_header() -> None:
    flags = ("-DSTAND_IN_REAL_CUDA_H", "-DSTAND_IN_REAL_NCCL_H", f"-I{cuda_include()}", f"-I{nccl_include()}")
    assert compile_against(stand_in_library.FOLDER / "nccl.c", *flags) == ""
