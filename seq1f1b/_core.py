"""The one module that touches the extension. Everything else imports what it needs of the C core from here."""

from __future__ import annotations

from seq1f1b import _C

ScheduleError = _C.ScheduleError
PipelineError = _C.PipelineError
