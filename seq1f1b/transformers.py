"""Models of Hugging Face transformers in a pipeline; needs ``pip install "seq1f1b[transformers]"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seq1f1b.extras import needs_extra

with needs_extra("transformers", "transformers", "safetensors"):
    from seq1f1b.adapters.pretrained import load_pretrained, save_pretrained
    from seq1f1b.adapters.transformers import pipeline_stage
    from seq1f1b.adapters.transformers_attention import attention
    from seq1f1b.adapters.transformers_stage import CausalLMStage

if TYPE_CHECKING:
    from seq1f1b.adapters.trainer import Trainer

__all__ = ["CausalLMStage", "Trainer", "attention", "load_pretrained", "pipeline_stage", "save_pretrained"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":  # it needs accelerate, and takes seconds to import
        with needs_extra("transformers", "accelerate"):
            from seq1f1b.adapters.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
