"""Models of Hugging Face transformers in a pipeline; needs ``pip install "seq1f1b[transformers]"``."""

from __future__ import annotations

from seq1f1b.adapters.pretrained import load_pretrained, save_pretrained
from seq1f1b.adapters.transformers import CausalLMStage, attention, pipeline_stage

__all__ = ["CausalLMStage", "attention", "load_pretrained", "pipeline_stage", "save_pretrained"]
