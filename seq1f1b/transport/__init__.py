"""Set-up of a pipeline's ranks: the meeting, shared memory, and the transport behind each edge.

Messages, waiting, progress and failures are C (``csrc/run/group.c``, ``csrc/run/arena.c``).
"""

from seq1f1b.transport.bootstrap import connect, meeting_of
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
]
