"""``seq1f1b doctor``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
from collections.abc import Iterator
from pathlib import Path

import seq1f1b
from seq1f1b import _C
from seq1f1b.cli.lines import wrapped

PACKAGES = (
    ("matplotlib", "no PNG and SVG timelines"),
    ("tokenizers", "no examples/train_gpt.py"),
)


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpus",
        action="store_true",
        help="run pipelines on this machine's GPUs, or under torchrun on those of all hosts, for at most ten minutes "
        "(four on one GPU), and write a page that says what works",
    )
    gpus = command.add_argument_group("with --gpus")
    gpus.add_argument("--output", metavar="FILE", help="the page (default: first-contact.md)", type=Path)
    gpus.add_argument("--ranks", metavar="P", type=int, help="ranks (default: one for each GPU, and four at least)")
    gpus.add_argument("--only", metavar="PARTS", help="parts, comma-separated: machine, messages, drills, killed, ...")
    gpus.add_argument("--cases", metavar="REGEX", help='cases whose "part: ranks: case" holds this, to try them again')
    gpus.add_argument(
        "--seconds", metavar="S", type=float, help="most seconds of the run (default: 600; 240 on one GPU)"
    )
    gpus.add_argument("--rehearse", action="store_true", help="run what a CPU can, without a GPU")


def run(options: argparse.Namespace) -> int:
    if options.gpus:
        return meet_gpus(options)
    named = [
        f"--{name}" for name in ("output", "ranks", "only", "cases", "seconds", "rehearse") if getattr(options, name)
    ]
    if named:
        raise ValueError(f"{', '.join(named)}: of doctor --gpus, which was not asked for")
    for line in findings():
        print(wrapped(line), flush=True)
    return 0


def meet_gpus(options: argparse.Namespace) -> int:
    """Exit status 1 if something failed."""
    contact = importlib.import_module("seq1f1b.first_contact.run")  # needs torch
    outcome = contact.first_contact(
        options.output or Path("first-contact.md"),
        rehearse=options.rehearse,
        num_ranks=options.ranks or 0,
        only=options.only.split(",") if options.only else (),
        cases=options.cases or "",
        seconds=options.seconds or 0.0,
    )
    return int(contact.has_failed(outcome))


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
    if torch.cuda.is_available():
        yield "pipelines on these GPUs: seq1f1b doctor --gpus runs them, in ten minutes at most, and says what works"
    else:
        yield f"CUDA: no device{'' if torch.version.cuda else ', and a torch built without CUDA'}"
    yield (
        "attention on CUDA: torch's ops, or our kernels where they pass a check; run on H100 and H200 alone (see "
        "benchmarks/gpu.py)"
    )
    gpu_part = importlib.import_module("seq1f1b.device.placement").gpu_part
    yield from gpu_part("kernels").describe()
    yield f"NCCL: {gpu_part('nccl')()}"
    yield "messages between GPUs: an edge tries copies, NCCL and host memory at set-up; never yet run between two GPUs"
    for package, loss in PACKAGES:
        found = importlib.util.find_spec(package) is not None
        yield f"{package}: {'found' if found else 'not found: ' + loss}"
