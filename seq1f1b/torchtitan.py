"""torchtitan's models in segments; needs ``pip install "seq1f1b[torchtitan]"``."""

from __future__ import annotations

from seq1f1b.extras import needs_extra

with needs_extra("torchtitan", "torchtitan"):
    from seq1f1b.adapters.torchtitan import convert, pipelining_fn, segmented, shape_of

__all__ = ["convert", "pipelining_fn", "segmented", "shape_of"]
