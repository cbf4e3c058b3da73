"""Is the machine code of the CUDA kernels what it must be? Without a GPU: by the compiler's words and the disassembly.

    python tests/cuda/sass.py            all of kernels/cuda/*.cu, for sm_80 and sm_90
    python tests/cuda/sass.py --install  and leaves the library in the package, as build_ext --inplace would

Each kernel's row in the table of its .cu declares its tile and its shared memory; what must hold follows from that:

    compiler        warns of nothing: no spilled register, no local memory, no line C75xx (wgmma made to wait,
                    setmaxnreg ignored), which ptxas gives as mere information
    local memory    neither a stack nor an LDL or STL
    products        of every innermost loop with tensor-core instructions: as many per warp as a pair of tiles has
    copies          from global to shared memory asynchronous and 16 bytes wide; in such a loop none through registers
    shared memory   what the code has and what the launch adds is within the limit of the configuration

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import kernel_table
from kernel_table import Kernel

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEM_SHARED_BYTES = 1024
PRODUCTS = ("HMMA.16816.F32", "HMMA.16816.F32.BF16")  # mma.m16n8k16 of fp16 and bf16, sums in fp32


def load_setup() -> ModuleType:
    """setup.py as a module: it knows how the kernels are compiled."""
    spec = importlib.util.spec_from_file_location("seq1f1b_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


# -- the disassembly -------------------------------------------------------------------------------------------------


@dataclass
class Instruction:
    address: int
    guarded: bool  # by a predicate: may not be executed
    opcode: str  # "LDGSTS.E.BYPASS.128"
    operands: list[str]


@dataclass
class Function:
    """One kernel in one architecture's code."""

    architecture: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)  # REG, STACK, SHARED, LOCAL, ...


def read_disassembly(text: str) -> list[Function]:
    """Functions in the output of ``cuobjdump -sass``."""
    functions: list[Function] = []
    architecture = ""
    for line in text.splitlines():
        if found := re.match(r"\s*arch = (\S+)", line):
            architecture = found[1]
        elif found := re.match(r"\s*Function : (\S+)", line):
            functions.append(Function(architecture, found[1]))
        elif found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;", line):
            operands = re.split(r",\s*", found[4]) if found[4] else []
            functions[-1].instructions.append(Instruction(int(found[1], 16), bool(found[2]), found[3], operands))
    return functions


def read_usage(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """Resources in the output of ``cuobjdump -res-usage``, by architecture and kernel."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    architecture = name = ""
    for line in text.splitlines():
        if match := re.match(r"\s*arch = (\S+)", line):
            architecture = match[1]
        elif match := re.match(r"\s*Function (\S+):$", line):
            name = match[1]
        elif "REG:" in line:
            found[architecture, name] = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
    return found


def shared_bytes(function: Function, kernel: Kernel) -> int:
    """Shared memory that a block asks for. From sm_90 on cuobjdump adds what the system keeps in each block."""
    reserved = SYSTEM_SHARED_BYTES if int(re.findall(r"\d+", function.architecture)[0]) >= 90 else 0
    return function.usage.get("SHARED", 0) - reserved + kernel.shared_bytes


def disassemble(library: Path) -> list[Function]:
    cuobjdump, nvdisasm = find_tool("cuobjdump"), find_tool("nvdisasm")
    assert cuobjdump is not None and nvdisasm is not None, missing_tools()
    environment = {**os.environ, "PATH": f"{Path(nvdisasm).parent}{os.pathsep}{os.environ['PATH']}"}

    def output(option: str) -> str:
        command = [cuobjdump, option, str(library)]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    functions, usage = read_disassembly(output("-sass")), read_usage(output("-res-usage"))
    for function in functions:
        function.usage = usage[function.architecture, function.name]
    return functions


# -- loops -----------------------------------------------------------------------------------------------------------

Graph = dict[int, list[int]]  # index of an instruction: those that may come next


def flow(instructions: list[Instruction]) -> Graph:
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    graph: Graph = {}
    for i, instruction in enumerate(instructions):
        name = instruction.opcode.split(".")[0]
        graph[i] = [i + 1] if i + 1 < len(instructions) else []
        if name in ("EXIT", "RET", "BRX", "JMX") and not instruction.guarded:
            graph[i] = []
        if name in ("BRA", "JMP"):
            target = index[int(re.findall(r"0x[0-9a-f]+", instruction.operands[-1])[-1], 16)]
            conditional = instruction.guarded or len(instruction.operands) > 1
            graph[i] = [target, *(graph[i] if conditional else [])]
    return graph


def cycles(graph: Graph, nodes: set[int]) -> Iterator[set[int]]:
    """Strongly connected parts of more than one node: the outermost loops within ``nodes`` (Tarjan's, iterative)."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for root in sorted(nodes):
        if root in order:
            continue
        visits = [(root, iter(graph[root]))]
        order[root] = lowest[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while visits:
            node, successors = visits[-1]
            for successor in successors:
                if successor not in nodes:
                    continue
                if successor not in order:
                    order[successor] = lowest[successor] = len(order)
                    stack.append(successor)
                    on_stack.add(successor)
                    visits.append((successor, iter(graph[successor])))
                    break
                if successor in on_stack:
                    lowest[node] = min(lowest[node], order[successor])
            else:
                visits.pop()
                if visits:
                    lowest[visits[-1][0]] = min(lowest[visits[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    part = set(stack[stack.index(node) :])
                    del stack[stack.index(node) :]
                    on_stack -= part
                    if len(part) > 1 or node in graph[node]:
                        yield part


def innermost_loops(graph: Graph, wanted: set[int]) -> list[set[int]]:
    """Loops with a wanted instruction in them and no loop within that has one."""
    found, open_parts = [], list(cycles(graph, set(graph)))
    while open_parts:
        part = open_parts.pop()
        if not part & wanted:
            continue
        entries = {node for other in graph.keys() - part for node in graph[other]} & part or {min(part)}
        inner = [loop for loop in cycles(graph, part - entries) if loop & wanted]
        if inner:
            open_parts += inner
        else:
            found.append(part)
    return found


# -- the rules -------------------------------------------------------------------------------------------------------


MOVES = ("MOV", "IMAD", "SEL", "PRMT")  # IMAD.MOV among them


def registers(operand: str, count: int = 1) -> set[int]:
    """R4 and the count - 1 after it."""
    match = re.fullmatch(r"R(\d+)(\.\w+)*", operand)
    return set(range(int(match[1]), int(match[1]) + count)) if match else set()


def words(opcode: str) -> int:
    """Registers that a load or store moves."""
    return {"128": 4, "64": 2}.get(next((part for part in opcode.split(".") if part in ("128", "64")), ""), 1)


def copies_by_registers(instructions: list[Instruction]) -> list[Instruction]:
    """Stores to shared memory of what a load from global memory left in the register."""
    loaded: set[int] = set()
    found = []
    for instruction in [*instructions, *instructions]:  # twice: what one iteration loads the next may store
        name = instruction.opcode.split(".")[0]
        if name == "LDG":
            loaded |= registers(instruction.operands[0], words(instruction.opcode))
        elif name == "STS":
            if registers(instruction.operands[-1], words(instruction.opcode)) & loaded:
                found.append(instruction)
        elif instruction.operands:
            target, sources = instruction.operands[0], instruction.operands[1:]
            if name in MOVES and any(registers(source) & loaded for source in sources):
                loaded |= registers(target)
            elif not instruction.guarded:
                loaded -= registers(target)
    return [instruction for instruction in instructions if instruction in found]


def violations_of_function(function: Function, kernel: Kernel) -> Iterator[str]:
    stack = {key: function.usage.get(key, 0) for key in ("STACK", "LOCAL")}
    if any(stack.values()):
        yield f"local memory: {stack}"
    local = [i for i in function.instructions if i.opcode.split(".")[0] in ("LDL", "STL")]
    if local:
        yield f"local memory: {len(local)} times, first {local[0].opcode} at {local[0].address:#x}"

    shared = shared_bytes(function, kernel)
    if shared > kernel.shared_limit:
        yield f"shared memory: {shared} bytes of {kernel.shared_limit}"

    for instruction in function.instructions:
        parts = instruction.opcode.split(".")
        if parts[0] == "LDGSTS" and "128" not in parts:
            yield f"copies: {instruction.opcode} at {instruction.address:#x} is narrower than 16 bytes"

    products = {i for i, instruction in enumerate(function.instructions) if instruction.opcode.startswith("HMMA")}
    foreign = {function.instructions[i].opcode for i in products} - set(PRODUCTS)
    if foreign:
        yield f"products: {', '.join(sorted(foreign))}, where the tiles are counted in {PRODUCTS[0]}"
    loops = innermost_loops(flow(function.instructions), products)
    expected = kernel.products_of_a_warp()
    if expected and not loops:
        yield "products: no loop has a tensor-core instruction"
    for loop in loops:
        first, count = function.instructions[min(loop)], len(loop & products)
        if count != expected:
            yield f"products: the loop at {first.address:#x} has {count} of a warp, its tiles have {expected:g}"
        for instruction in copies_by_registers([function.instructions[i] for i in sorted(loop)]):
            yield f"copies: {instruction.opcode} at {instruction.address:#x} stores what was loaded from global memory"


def violations(functions: list[Function], kernels: dict[str, Kernel], said: str) -> list[str]:
    """Each broken rule as a line; ``said``: what the compiler printed."""
    found = [f"compiler: {line.strip()}" for line in said.splitlines() if re.search(r"\bC75\d\d\b", line)]
    by_name = {function.name for function in functions}
    found += [f"{name}: declared, and not in the code" for name in kernels if name not in by_name]
    for function in functions:
        if function.name not in kernels:
            found.append(f"{function.name}: in the code, and in no table")
            continue
        of_it = violations_of_function(function, kernels[function.name])
        found += [f"{function.name}, {function.architecture}: {text}" for text in of_it]
    return found


def check(sources: list[str], work: Path, **options: Any) -> tuple[list[str], str]:
    """Compiles the files into one library in ``work``; returns the broken rules, and a line for each kernel.

    options: of setup.py's build_cuda_library.
    """
    setup = load_setup()
    library = work / f"{setup.CUDA_LIBRARY}.so"
    try:
        said = setup.build_cuda_library(sources, library, work, **options)
    except setup.CompileError as error:
        said = str(error).splitlines()
        return [f"compiler: {line}" for line in said if re.search(r"\b(error|warning) *:", line)] or said, ""
    operations = [kernel_table.find_operation(library, kernel_table.operation_of(source)) for source in sources]
    kernels = {kernel.name: kernel for operation in operations for kernel in kernel_table.kernels_of(operation)}
    functions = disassemble(library)
    lines = []
    for kernel in kernels.values():
        codes = [function for function in functions if function.name == kernel.name]
        registers = ", ".join(f"{code.architecture} {code.usage['REG']}" for code in codes)
        shared = max((shared_bytes(code, kernel) for code in codes), default=0)
        lines.append(f"{kernel.name}: registers {registers}; {shared} bytes of shared memory")
    return violations(functions, kernels, "".join(said.values())), "\n".join(lines)


def main() -> int:
    missing = missing_tools()
    if missing:
        print(f"SKIPPED: {missing}, so the CUDA kernels are neither compiled nor checked")
        return int(os.environ.get("SEQ1F1B_REQUIRE_NVCC") == "1")
    began = time.monotonic()
    setup = load_setup()
    with tempfile.TemporaryDirectory(prefix="seq1f1b-cuda-") as work:
        found, described = check(setup.cuda_sources(), Path(work))
        if "--install" in sys.argv and not found:
            shutil.copy(Path(work) / f"{setup.CUDA_LIBRARY}.so", ROOT / "seq1f1b")
    print(described)
    print(*found, sep="\n")
    print(f"{len(found)} broken rules, {time.monotonic() - began:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
