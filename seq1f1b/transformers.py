"""Models of Hugging Face transformers in a pipeline; needs ``pip install "seq1f1b[transformers]"``."""

from __future__ import annotations

from seq1f1b.adapters.pretrained import save_pretrained
from seq1f1b.adapters.transformers import CausalLMStage, attention, pipeline_stage

__all__ = ["CausalLMStage", "attention", "pipeline_stage", "save_pretrained"]
