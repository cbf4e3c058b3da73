"""Functions and classes of higher rooms, found by name: attention for GPUs; checks and reports for the engine.

No room imports a room above. Lower rooms ask here for a name, and its first use imports the module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__: list[str] = []

_PLACES = {
    "attention": "device.cuda_attention:register",
    "edges": "device.edges:DeviceEdges",
    "first look": "checks.first_look:FirstLook",
    "host tier": "device.host_tier:HostTier",
    "kernels": "device.kernel_library",
    "look at a loss": "checks.loss_look:look_of",
    "nccl": "device.edges:found_nccl",
    "report": "report.report:make_report",
    "tuner": "report.tuning:Tuner",
    "verify": "checks.verify:verify",
}


def above(name: str) -> Any:
    """Returns the class, function or module with a name of the table above."""
    module, _, attribute = _PLACES[name].partition(":")
    found = import_module(f"seq1f1b.{module}")
    return getattr(found, attribute) if attribute else found
