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
from seq1f1b.above import above
from seq1f1b.table import wrapped


def add(command: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no options."""


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

    importlib.import_module("seq1f1b.attention.causal")  # binds torch's functions

    yield f"torch {torch.__version__}: its C ABI is bound"
    fma, bf16 = _C.attention_rates(0.02)
    rates = f", {bf16 / 1e9:.0f} with products of bf16" if bf16 else ""
    yield f"attention on the CPU: {_C.attention_isa()} kernels, {torch.get_num_threads()} threads"
    yield f"GFLOP/s of one core: {fma / 1e9:.0f} in fp32{rates}; SEQ1F1B_ISA forces other kernels"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"CUDA device {index}: {device.name}, sm_{device.major}{device.minor}, {device.total_memory >> 30} GiB"
    if not torch.cuda.is_available():
        yield f"CUDA: no device{'' if torch.version.cuda else ', and a torch built without CUDA'}"
    yield "attention on CUDA: torch's ops, or our kernels where they pass a check"
    yield from above("kernels").describe()
    yield f"NCCL: {above('nccl')()}"
    if torch.cuda.device_count() > 1:
        yield from edges_between(torch.cuda.device_count())
    for package, loss in (("matplotlib", "no PNG and SVG timelines"), ("tokenizers", "no examples/train_gpt.py")):
        found = importlib.util.find_spec(package) is not None
        yield f"{package}: {'found' if found else 'not found: ' + loss}"


def edges_between(num_gpus: int) -> Iterator[str]:
    """Yields a line for each transport and edge between neighbouring GPUs: transport in use after set-up, rate, reason.

    Each transport gets new processes, one per GPU, because a transfer without an end spoils the processes around it.
    """
    table = importlib.import_module("seq1f1b.transport.edges").TRANSPORTS
    for transport in ("auto", *(name for name, row in table.items() if row.between_gpus)):
        try:
            found = seq1f1b.launch(edges_of, num_gpus, transport)
        except (OSError, RuntimeError, ValueError) as error:
            yield f"transport={transport!r}: {str(error).splitlines()[0]}"
        else:
            yield from (f"transport={transport!r}: {text}" for texts in found for text in texts)


def edges_of(transport: str) -> list[str]:
    """Returns a line for each edge on which the rank's GPU sends. Collective; rank r has GPU r."""
    import torch

    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    return sending_edges(rank, torch.nn.Linear(1, 1, device="cuda"), transport=transport)


def sending_edges(rank: int, stage: Any, **options: Any) -> list[str]:
    """Returns a line for each edge on which the rank sends: the set-up of an engine proves all edges. Collective."""
    engine = seq1f1b.PipelineEngine(
        stage, num_microbatches=1, num_segments=1, loss_fn=lambda output, _: output, **options
    )
    edges = [edge for edge in engine.edges if edge.source_stage == rank]
    engine.close()
    return [
        f"GPU {rank} to GPU {edge.destination_stage}: {edge.transport}, {edge.rate * 1e-9:.1f} GB/s, {edge.why}"
        for edge in edges
    ]
