"""Does a step run under a cap on memory that only a tier meets, where the allocator itself is held to the cap?

The cap is the kernel's, on private memory that a process may write (RLIMIT_DATA). Torch's allocator is refused what is
beyond it. Files do not count, nor do shared mappings, which the pinned memory of the stand-in is here.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import give_back_what_is_freed, start_processes
from stand_in_engine import StandInEngine
from stand_in_library import stand_in
from tiny_model import Config, batch, cross_entropy, whole_model
from torch import Tensor

from seq1f1b import HOST, LoopbackGroup, Memory, PipelineEngine

CONFIG = Config(hidden=32, heads=1, kv_heads=1, ffn=256, vocab=32, layers=4)
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory|libtorch could not allocate a tensor"  # as ops ask for it


def data_bytes() -> int:
    """What counts for the cap."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def make_engine(memory: Memory) -> PipelineEngine:
    made = StandInEngine if memory.offload is HOST else PipelineEngine
    options: dict[str, Any] = {"schedule": "gpipe", "num_microbatches": 4, "num_segments": 2}
    stage = whole_model(CONFIG, torch.float32)
    return made(stage, loss_fn=cross_entropy, group=LoopbackGroup(1)[0], memory=memory, **options)


def step(engine: PipelineEngine) -> tuple[list[Tensor], int]:
    """Losses and gradients of a step of eight units, and the most that counted at the end of a module's forward."""
    tokens, target = batch(CONFIG, 4, 256, size=6)
    for p in engine.parameters():
        p.grad = None
    seen: list[int] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(data_bytes()))
    try:
        losses = engine.step(tokens, target=target)
    finally:
        hook.remove()
    return [*losses, *(p.grad for p in engine.parameters() if p.grad is not None)], max(seen)


def under_a_cap(_: int, folder: str | None) -> None:
    """The cap lies between what two engines, one of which moves units, need without one."""
    torch.set_num_threads(1)
    give_back_what_is_freed()
    if folder is None:
        stand_in().reset(1)
    kept, moved = make_engine(Memory()), make_engine(Memory(offload=folder or HOST))
    (truth, most), (_, least) = step(kept), step(moved)
    resource.setrlimit(resource.RLIMIT_DATA, ((most + least) // 2, resource.RLIM_INFINITY))
    with pytest.raises((RuntimeError, MemoryError), match=OUT_OF_MEMORY):
        step(kept)
    gc.collect()  # frames of the error hold the units of the step
    found, _ = step(moved)
    assert len(truth) == len(found) and all(map(torch.equal, truth, found))
    assert moved.report().moved_units > 0


@pytest.mark.parametrize("tier", ["pinned memory", "file"])
def test_a_step_under_a_cap_that_only_the_tier_meets(tier: str, tmp_path: Path) -> None:
    start_processes(1, under_a_cap, None if tier == "pinned memory" else str(tmp_path)).join()
