"""Is the machine code of the CUDA kernels what it must be? Without a GPU: by the compiler's words and the disassembly.

    python tests/cuda/sass.py            all of kernels/cuda/*.cu, for sm_80 and sm_90
    python tests/cuda/sass.py --install  and leaves the library in the package, as build_ext --inplace would

The compiler warns of nothing, no kernel has a spilled register or another access to local memory, and each kernel whose
row in the table of its .cu declares matrix products has tensor-core instructions in the code for every architecture.

Needs nvcc, and cuobjdump and nvdisasm, which come as Python packages (.ci/requirements.txt). Where they are absent this
says SKIPPED, or fails where SEQ1F1B_REQUIRE_NVCC=1.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from seq1f1b.device import kernel_tables

ROOT = Path(__file__).resolve().parent.parent.parent
Code = dict[str, Counter[str]]  # by kernel and architecture, "name, sm_80": how often each opcode occurs


def load_setup() -> ModuleType:
    """setup.py as a module: it knows how the kernels are compiled."""
    spec = importlib.util.spec_from_file_location("seq1f1b_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def operation_of(source: str) -> str:
    """Name of the operation of a .cu: that of the file, without its architecture."""
    return re.sub(r"^sm\d+_", "", Path(source).stem)


def find_tool(name: str) -> str | None:
    """On the path, beside nvcc, or in the folder where NVIDIA's Python packages put their programs."""
    found = shutil.which(name)
    for folder in (sysconfig.get_path("purelib"), *sys.path):
        found = found or next((str(path) for path in Path(folder).glob(f"nvidia/*/bin/{name}")), None)
    return found


def missing_tools() -> str:
    """Names the parts of the toolchain that are not here, "" if all are."""
    missing = [] if load_setup().find_nvcc() else ["nvcc"]
    missing += [name for name in ("cuobjdump", "nvdisasm") if find_tool(name) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


def disassemble(library: Path) -> str:
    """The output of ``cuobjdump -sass``."""
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    assert cuobjdump is not None and nvdisasm is not None, missing_tools()
    environment = {**os.environ, "PATH": f"{Path(nvdisasm).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [cuobjdump, "-sass", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def read_disassembly(text: str) -> Code:
    found: Code = {}
    architecture, opcodes = "", Counter[str]()
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            opcodes = found[f"{match[1]}, {architecture}"] = Counter()
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", line):
            opcodes[match[1]] += 1
    return found


def violations(code: Code, kernels: Iterable[kernel_tables.Kernel], architectures: Iterable[str]) -> list[str]:
    """Each broken rule as a line."""
    products = {f"{kernel.name}, {name}": kernel.products for kernel in kernels for name in architectures}
    lines = [f"{name}: in the code, and in no table" for name in code.keys() - products.keys()]
    for name, count in products.items():
        opcodes = code.get(name)
        if opcodes is None:
            lines.append(f"{name}: declared, and not in the code")
            continue
        if local := opcodes["LDL"] + opcodes["STL"]:
            lines.append(f"{name}: {local} accesses to local memory")
        if count and not opcodes["HMMA"]:
            lines.append(f"{name}: no tensor-core instruction")
    return lines


def check(library: Path, work: Path) -> tuple[Code, list[str]]:
    """Compiles the kernels into the library; returns their code and the broken rules."""
    setup = load_setup()
    sources = setup.cuda_sources()
    try:
        setup.build_cuda_library(sources, library, work)  # a warning, as of a spill, is an error there
    except setup.CompileError as error:
        return {}, [f"compiler: {line}" for line in str(error).splitlines()]
    kernels = [each for source in sources for each in kernel_tables.find(library, operation_of(source)).kernels]
    code = read_disassembly(disassemble(library))
    return code, violations(code, kernels, [name for name in setup.CUDA_ARCHITECTURES if name.startswith("sm_")])


def main() -> int:
    missing = missing_tools()
    if missing:
        print(f"SKIPPED: {missing}, so the CUDA kernels are neither compiled nor checked")
        return int(os.environ.get("SEQ1F1B_REQUIRE_NVCC") == "1")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        library = Path(work) / "libseq1f1b_cuda.so"
        code, found = check(library, Path(work))
        if "--install" in sys.argv and not found:
            shutil.copy(library, ROOT / "seq1f1b")
    for name, opcodes in code.items():
        print(f"{name}: {opcodes.total()} instructions, {opcodes['HMMA']} of tensor cores")
    print(*found, sep="\n")
    print(f"{len(found)} broken rules, {time.monotonic() - began:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
