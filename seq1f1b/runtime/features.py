"""The features that an engine has around the units of a stage. A new one is a file, and a line here."""

from __future__ import annotations

from seq1f1b.runtime.blocks import BlockRecomputing
from seq1f1b.runtime.deferred import WeightGradients
from seq1f1b.runtime.documents import AskingForDocuments
from seq1f1b.runtime.frozen import Constants
from seq1f1b.runtime.measure import Measuring
from seq1f1b.runtime.mixing import Looking
from seq1f1b.runtime.offload import Offloading
from seq1f1b.runtime.parts import Feature
from seq1f1b.runtime.recompute import Recomputing

__all__: list[str] = []

FEATURES: tuple[type[Feature], ...] = (
    Constants,
    WeightGradients,
    AskingForDocuments,
    BlockRecomputing,
    Recomputing,
    Offloading,
    Looking,
    Measuring,  # the innermost: it counts what a forward keeps, and nothing that others do around it
)
