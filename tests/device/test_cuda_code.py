"""Does the check of the CUDA kernels' machine code (tests/cuda/sass.py) reject what it must, and accept what it may?

Needs nvcc, cuobjdump and nvdisasm, and no GPU. SEQ1F1B_REQUIRE_NVCC=1 makes their absence a failure.
"""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda"))

import sass

HERE = Path(sass.__file__).parent
WRONG = {  # file of broken/: what the check says of it
    "copies_by_registers": r"copies: STS.128 at 0x\w+ stores what was loaded from global memory",
    "ignored_setmaxnreg": r"compiler: .*\(C7508\)",
    "indexed_array": r"local memory: ({'STACK': 64, 'LOCAL': 0}|\d+ times, first STL\S* at 0x\w+)$",
    "much_shared_memory": r"shared memory: 101377 bytes of 101376",
    "narrow_copies": r"copies: LDGSTS.E at 0x\w+ is narrower than 16 bytes",
    "other_tile": r"products: the loop at 0x\w+ has 16 of a warp, its tiles have 32",
    "rolled_products": r"products: the loop at 0x\w+ has 1 of a warp, its tiles have 16",
    "spilled_registers": r"compiler: ptxas error   : (Registers are spilled to local|Local) memory",
}


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the check says of each file; all are compiled at once, each for one architecture."""
    missing = sass.missing_tools()
    if missing:
        assert os.environ.get("SEQ1F1B_REQUIRE_NVCC") != "1", missing
        pytest.skip(f"{missing}, so no kernel can be compiled and looked at")

    def one(path: Path, work: Path) -> list[str]:
        architecture = "sm_90a" if path.stem == "ignored_setmaxnreg" else "sm_80"
        werror = path.stem != "indexed_array"  # the compiler would refuse it before the disassembly is looked at
        return sass.check([str(path)], work, architectures=[architecture], werror=werror)[0]

    paths = [HERE / "sound.cu", *sorted((HERE / "broken").glob("*.cu"))]
    folders = [tmp_path_factory.mktemp(path.stem) for path in paths]  # the factory is not made for threads
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip((path.stem for path in paths), pool.map(one, paths, folders), strict=True))


def test_every_broken_kernel_has_its_rule() -> None:
    assert {path.stem for path in (HERE / "broken").glob("*.cu")} == set(WRONG)


def test_a_sound_kernel_is_accepted(findings: dict[str, list[str]]) -> None:
    assert findings["sound"] == []


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_kernel_is_rejected(name: str, findings: dict[str, list[str]]) -> None:
    """For its own flaw, and for no other."""
    assert findings[name]
    assert [line for line in findings[name] if not re.search(WRONG[name], line, re.DOTALL)] == []
