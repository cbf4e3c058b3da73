"""The one module that touches the extension. Everything else imports what it needs of the C core from here."""

from __future__ import annotations

from seq1f1b import _C

ScheduleError = _C.ScheduleError
PipelineError = _C.PipelineError

# partition
partition_even = _C.partition_even
partition_flops = _C.partition_flops
partition_profiled = _C.partition_profiled
partition_check = _C.partition_check
model_flops = _C.model_flops
