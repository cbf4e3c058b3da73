"""Other people's interfaces: torch's pipelining and checkpoints, torchtitan."""

from __future__ import annotations

from seq1f1b.renamed import watch_old_paths

watch_old_paths()
