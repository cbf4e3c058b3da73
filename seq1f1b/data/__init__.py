"""Documents of any length as planned steps of training. The folders beside this file hold machines and model shapes."""

from __future__ import annotations

from seq1f1b.data.documents import DocumentBatches, PlannedStep

__all__ = ["DocumentBatches", "PlannedStep"]
