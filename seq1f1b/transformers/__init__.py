"""Models of Hugging Face transformers in a pipeline; needs ``pip install "seq1f1b[transformers]"``."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING, Any

from seq1f1b.extras import needs_extra

if TYPE_CHECKING:
    from seq1f1b.transformers.attention_function import attention
    from seq1f1b.transformers.cut import pipeline_stage
    from seq1f1b.transformers.pretrained import load_pretrained, save_pretrained
    from seq1f1b.transformers.stage import CausalLMStage
    from seq1f1b.transformers.trainer import Trainer

__all__ = ["CausalLMStage", "Trainer", "attention", "load_pretrained", "pipeline_stage", "save_pretrained"]

# Public name -> module that defines it, imported when the name is first used: transformers takes seconds.
_MODULES = {
    "CausalLMStage": "seq1f1b.transformers.stage",
    "Trainer": "seq1f1b.transformers.trainer",
    "attention": "seq1f1b.transformers.attention_function",
    "load_pretrained": "seq1f1b.transformers.pretrained",
    "pipeline_stage": "seq1f1b.transformers.cut",
    "save_pretrained": "seq1f1b.transformers.pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packages = ["transformers", "safetensors", *(["accelerate"] if name == "Trainer" else [])]
    with needs_extra("transformers", *packages):
        for package in packages:  # an error inside transformers would not name the missing package
            import_module(package)
        from transformers.utils.versions import require_version

        with suppress(PackageNotFoundError):  # this package runs from its sources
            for requirement in (wanted.partition(";")[0] for wanted in requires("seq1f1b") or ()):
                if requirement.startswith(tuple(packages)):  # the modules here use private names of a tested release
                    require_version(requirement, 'Run: pip install "seq1f1b[transformers]"')
        value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
