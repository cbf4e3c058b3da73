"""Sequence-level one-forward-one-backward pipeline parallelism (Seq1F1B, arXiv:2406.03488).

Partition and schedules need no torch; the names of ``_NEEDS_TORCH`` import torch at the first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from seq1f1b._C import PipelineError, ScheduleError
from seq1f1b.extras import torch_remedy
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.schedule import Schedule, Simulation, Unit, build_schedule, schedules
from seq1f1b.simulation import Costs, Links, Noise
from seq1f1b.where import HOST

if TYPE_CHECKING:
    from seq1f1b.adapters.chain import split
    from seq1f1b.adapters.checkpoint import PipelineState
    from seq1f1b.adapters.pipelining import ScheduleSeq1F1B, ScheduleSeqInterleaved1F1B
    from seq1f1b.attention.carry import add_loss, carry_in, carry_out
    from seq1f1b.attention.causal import causal_attention, layer_handle, positions, token_offset
    from seq1f1b.attention.packing import document_starts, pack_documents
    from seq1f1b.attention.ulysses import ulysses_attention
    from seq1f1b.checks.verify import Verification, verify_stage
    from seq1f1b.engine.engine import PipelineEngine
    from seq1f1b.engine.findings import SegmentWarning
    from seq1f1b.engine.options import Limits, Loss, Memory
    from seq1f1b.engine.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
    from seq1f1b.engine.weighting import shift_labels
    from seq1f1b.launcher import launch
    from seq1f1b.transport import LoopbackGroup, init_process_group

__all__ = [
    "HOST",
    "Costs",
    "Limits",
    "Links",
    "LoopbackGroup",
    "Loss",
    "Memory",
    "ModelShape",
    "Noise",
    "PipelineEngine",
    "PipelineError",
    "PipelineState",
    "Schedule",
    "ScheduleError",
    "ScheduleSeq1F1B",
    "ScheduleSeqInterleaved1F1B",
    "SegmentWarning",
    "Simulation",
    "Unit",
    "Verification",
    "VocabularyParallelEmbedding",
    "VocabularyParallelHead",
    "add_loss",
    "build_schedule",
    "carry_in",
    "carry_out",
    "causal_attention",
    "document_starts",
    "init_process_group",
    "launch",
    "layer_handle",
    "pack_documents",
    "partition_sequence",
    "positions",
    "schedules",
    "shift_labels",
    "split",
    "token_offset",
    "ulysses_attention",
    "verify_stage",
]
__version__ = "1.0.0rc3"

# Modules that import torch, and the public names of each.
_MODULES = {
    "adapters.chain": ("split",),
    "adapters.checkpoint": ("PipelineState",),
    "adapters.pipelining": ("ScheduleSeq1F1B", "ScheduleSeqInterleaved1F1B"),
    "attention.carry": ("add_loss", "carry_in", "carry_out"),
    "attention.causal": ("causal_attention", "layer_handle", "positions", "token_offset"),
    "attention.packing": ("document_starts", "pack_documents"),
    "attention.ulysses": ("ulysses_attention",),
    "checks.verify": ("Verification", "verify_stage"),
    "engine.engine": ("PipelineEngine",),
    "engine.findings": ("SegmentWarning",),
    "engine.options": ("Limits", "Loss", "Memory"),
    "engine.vocabulary": ("VocabularyParallelEmbedding", "VocabularyParallelHead"),
    "engine.weighting": ("shift_labels",),
    "launcher": ("launch",),
    "transport": ("LoopbackGroup", "init_process_group"),
}
_NEEDS_TORCH = {name: f"seq1f1b.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_NEEDS_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise ImportError(f"seq1f1b.{name} needs torch, which is not installed; {torch_remedy()}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
