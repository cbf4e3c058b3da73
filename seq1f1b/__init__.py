"""Sequence-level one-forward-one-backward pipeline parallelism (Seq1F1B, arXiv:2406.03488)."""

from seq1f1b._core import PipelineError, ScheduleError

__all__ = ["PipelineError", "ScheduleError"]
__version__ = "0.1.0"
