"""torchtitan's models in segments; needs ``pip install "seq1f1b[torchtitan]"``."""

from __future__ import annotations

from seq1f1b.extras import needs_extra
from seq1f1b.renamed import refuse_old_names

with needs_extra("torchtitan", "torchtitan"):
    from seq1f1b.adapters.torchtitan import segmented, shape_of

__all__ = ["segmented", "shape_of"]

refuse_old_names(__name__)
