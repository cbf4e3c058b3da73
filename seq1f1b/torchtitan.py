"""torchtitan's models in segments; needs ``pip install "seq1f1b[torchtitan]"``."""

from __future__ import annotations

from seq1f1b.extras import needs_extra

with needs_extra("torchtitan", "torchtitan"):
    from seq1f1b.adapters.torchtitan import segmented, shape_of

__all__ = ["segmented", "shape_of"]
