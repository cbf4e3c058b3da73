"""Have the stand-ins for the CUDA driver and NCCL the declarations of the real ones?"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import stand_in_library


def include_of(header: str, roots: Iterable[str | Path]) -> str:
    """The compiler's option for the first installation that has the header."""
    folders = [Path(root) / "include" for root in roots]
    found = next((folder for folder in folders if (folder / header).exists()), None)
    if found is None:
        pytest.skip(f"there is no {header} to compare with: it comes with a CUDA toolkit, or with nvidia-nccl-cu13")
    return f"-I{found}"


@pytest.mark.parametrize("source", ["driver.c", "nccl.c"])
def test_they_match_the_headers(source: str) -> None:
    nvcc = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve()
    toolkits = [nvcc.parent.parent, *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    flags = [str(stand_in_library.FOLDER / source), "-DSTAND_IN_REAL_CUDA_H", include_of("cuda.h", toolkits)]
    if source == "nccl.c":
        package = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
        installed = package.submodule_search_locations if package is not None else None
        flags += ["-DSTAND_IN_REAL_NCCL_H", include_of("nccl.h", installed or [])]
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-fsyntax-only", "-Wall", "-Werror", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
