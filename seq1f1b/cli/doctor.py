"""``seq1f1b doctor``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
from collections.abc import Iterator
from typing import Any

import seq1f1b
from seq1f1b import _C
from seq1f1b.cli.lines import wrapped

PACKAGES = (
    ("matplotlib", "no PNG and SVG timelines"),
    ("tokenizers", "no examples/train_gpt.py"),
)


def add(commands: Any) -> None:
    about = "say what was found on this machine, and what each absence costs"
    command = commands.add_parser("doctor", help=about, description=f"{about[0].upper()}{about[1:]}.")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    for line in findings():
        print(wrapped(line), flush=True)
    return 0


def findings() -> Iterator[str]:
    yield f"seq1f1b {seq1f1b.__version__}, Python {platform.python_version()}, {platform.machine()}"
    if importlib.util.find_spec("torch") is None:
        yield "torch: not found. Partition and schedules work; attention and the engine do not."
        return
    import torch

    importlib.import_module("seq1f1b.ops.attention")  # binds torch's functions

    yield f"torch {torch.__version__}: bound, {len(_C.torch_functions())} functions of its C ABI"
    fma, bf16 = _C.attention_rates(0.02)
    rates = f", {bf16 / 1e9:.0f} with products of bf16" if bf16 else ""
    yield f"attention on the CPU: {_C.attention_isa()} kernels, {torch.get_num_threads()} threads"
    yield f"GFLOP/s of one core: {fma / 1e9:.0f} in fp32{rates}; SEQ1F1B_ISA forces other kernels"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"CUDA device {index}: {device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 30} GiB"
    if not torch.cuda.is_available():
        yield f"CUDA: no device{'' if torch.version.cuda else ', and a torch built without CUDA'}"
    yield (
        "attention on CUDA: torch's ops, or our kernels where they pass a check; run on H100 and H200 alone (see "
        "benchmarks/gpu.py)"
    )
    yield from importlib.import_module("seq1f1b.device.kernel_library").describe()
    yield f"NCCL: {found_nccl()}"
    yield "messages between GPUs: an edge tries copies, NCCL and host memory at set-up; never yet run between two GPUs"
    for package, loss in PACKAGES:
        found = importlib.util.find_spec(package) is not None
        yield f"{package}: {'found' if found else 'not found: ' + loss}"


def found_nccl() -> str:
    from seq1f1b.device.edge_ways import find_nccl

    try:
        version, path = _C.nccl_find(find_nccl())
    except RuntimeError as error:
        return f"not found ({error}): no transport='nccl'"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, {path}"
