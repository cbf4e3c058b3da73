"""How the ranks of a pipeline meet: who maps which memory, and which transport is behind each edge.

Only set-up is here. Messages, waiting, progress and failures are C (``csrc/run/group.c``, ``csrc/run/arena.c``).
"""

from seq1f1b.transport.bootstrap import connect, meeting_of, resolve_group
from seq1f1b.transport.edges import ARENA_BYTES, DTYPES
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.loopback import LoopbackGroup
from seq1f1b.transport.restart import init_process_group

__all__ = [
    "ARENA_BYTES",
    "DTYPES",
    "LoopbackGroup",
    "RankGroup",
    "connect",
    "init_process_group",
    "meeting_of",
    "resolve_group",
]
