"""The parts of the core that tests and benchmarks use and the package does not, as the module ``core``.

``tests/c/core_extension.c`` says what they are. It is compiled here, at the first import after a change of the C code.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from seq1f1b import _C
from seq1f1b.unit import Unit, unit_of

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "c" / "core_extension.c"
BUILT = ROOT / "build" / f"core_extension{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> None:
    """Compiles it, unless what is there is newer than all that it is made of."""
    needed = max(path.stat().st_mtime for path in (SOURCE, *ROOT.glob("csrc/**/*.h"), *ROOT.glob("kernels/*.h")))
    if BUILT.exists() and BUILT.stat().st_mtime > needed:
        return
    BUILT.parent.mkdir(exist_ok=True)
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-shared"]
    includes = f"-I{sysconfig.get_path('include')}"
    with tempfile.TemporaryDirectory(dir=BUILT.parent) as folder:  # several processes may build at once
        made = Path(folder) / BUILT.name
        subprocess.run([*os.environ.get("CC", "cc").split(), *flags, includes, SOURCE, "-o", made], check=True)
        os.replace(made, BUILT)


def load() -> ModuleType:
    build()
    spec = importlib.util.spec_from_file_location("core_extension", BUILT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


core = load()


def instructions_of(program: object, rank: int) -> list[tuple[str, int, Unit, int, int, int, int]]:
    """Opcode, edge, unit, place, KV slot, gradient slot and number of a message, of each instruction of a rank."""
    return [
        (_C.OPCODES[opcode], edge, unit_of(unit), *rest)
        for opcode, edge, unit, *rest in core.program_instructions(program, rank)
    ]
