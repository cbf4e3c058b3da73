"""Have the stand-ins for the CUDA driver and NCCL the declarations of the real ones, and do they load as one library?

What they do is tested in C: tests/c/test_{driver,nccl}_stand_in.c.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import stand_in_library

HEADERS = ("cuda_api.h", "nccl_api.h", "stand_in.h")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_library.build(tmp_path_factory.mktemp("stand_in"))


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


def changed_copy(folder: Path, name: str, old: str, new: str) -> Path:
    shutil.copytree(stand_in_library.FOLDER, folder, dirs_exist_ok=True)
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    return folder / name


def test_driver_matches_the_header(tmp_path: Path) -> None:
    flags = ("-DSTAND_IN_REAL_CUDA_H", f"-I{cuda_include()}")
    for source in stand_in_library.FOLDER.glob("driver*.c"):
        assert compile_against(source, *flags) == ""
    drifted = changed_copy(
        tmp_path, "driver_streams.c", "CUresult cuEventRecord(CUevent event,", "CUresult cuEventRecord(CUcontext event,"
    )
    assert "conflicting types for" in compile_against(drifted, *flags)


def test_nccl_matches_the_header(tmp_path: Path) -> None:
    flags = ("-DSTAND_IN_REAL_CUDA_H", "-DSTAND_IN_REAL_NCCL_H", f"-I{cuda_include()}", f"-I{nccl_include()}")
    assert compile_against(stand_in_library.FOLDER / "nccl.c", *flags) == ""
    drifted = changed_copy(
        tmp_path,
        "nccl.c",
        "ncclCommUserRank(const ncclComm_t comm, int *",
        "ncclCommUserRank(const ncclComm_t comm, long *",
    )
    assert "conflicting types for" in compile_against(drifted, *flags)


def test_exports_what_its_headers_declare(library: Path) -> None:
    listed = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    texts = [(stand_in_library.FOLDER / name).read_text() for name in HEADERS]
    declared = {name for text in texts for name in re.findall(r"\b((?:cu[A-Z]|nccl[A-Z]|stand_in_)\w+)\(", text)}
    assert {line.split()[-1] for line in listed.splitlines()} == declared
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", needed)) <= {"libc.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def test_controls_from_python(library: Path) -> None:
    stand_in = stand_in_library.StandIn(library)
    stand_in.reset(3, queues=1, hosts=1)
    stand_in.name_thread("the test")
    driver = stand_in.library
    stream, value = ctypes.c_void_p(), ctypes.c_uint64()
    stand_in.enter(0)
    assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(value), ctypes.c_size_t(8)) == 0
    assert driver.cuMemsetD8Async(value, 7, ctypes.c_size_t(9), stream) == 1
    [misuse] = stand_in.misuses
    assert misuse == "cuMemsetD8Async on the test: 9 bytes at offset 0 of an allocation of 8 bytes"
    assert driver.cuStreamWaitValue64_v2(stream, value, ctypes.c_uint64(5), 1) == 0
    assert driver.cuStreamSynchronize(stream) == 702
    assert stand_in.deadlock is not None and stand_in.deadlock.endswith("the test waits in cuStreamSynchronize\n")
    assert stand_in.synchronisations == ["cuStreamSynchronize device 0 the test"]
    assert not stand_in.drain(10) and "value wait" in (stand_in.stuck or "")
    ctypes.c_uint64.from_address(value.value).value = 5
    assert stand_in.drain() and stand_in.stuck is None
    assert stand_in.count("wait_value") == stand_in.count("cuStreamWaitValue64_v2") == 1
    with pytest.raises(ValueError, match="no counter waits"):
        stand_in.count("waits")
    with pytest.raises(ValueError, match="no option queues = 0"):
        stand_in.set("queues", 0)
