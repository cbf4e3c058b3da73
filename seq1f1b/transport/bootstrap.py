"""Set-up of a pipeline from a torch process group: ranks with shared memory, and the transport of each edge."""

from __future__ import annotations

import mmap
import time
from typing import Any

import torch.distributed as dist

from seq1f1b import _C
from seq1f1b.transport.descriptors import address_space
from seq1f1b.transport.edges import ARENA_BYTES
from seq1f1b.transport.group import RankGroup
from seq1f1b.transport.handshake import Handshake, share_on_host
from seq1f1b.transport.loopback import LoopbackGroup
from seq1f1b.transport.meeting import Meeting
from seq1f1b.transport.processes import ProcessRank
from seq1f1b.transport.store import StoreRank


def connect(
    process_group: Any,
    transport: str = "auto",
    *,
    arrival_timeout: float = 1800.0,
    timeout: float = 120.0,
    meeting: Meeting | None = None,
) -> RankGroup:
    """Joins the processes of a torch process group into a pipeline. Collective.

    Args:
        process_group: torch's group; None: the default group. Used only for set-up and the gradients of tied
            parameters, unless c10d carries edges.
        transport: "shm" (all processes on one host, as one user), "c10d", or "auto": shm on every edge within a host;
            "nccl" and "copy" (:mod:`seq1f1b.device.edges`) use the transports of "auto". Equal on all ranks.
        arrival_timeout: seconds for all ranks to come. timeout: seconds for each later part.
        meeting: result of :func:`meeting_of`, if the caller has called it.
    Raises:
        ValueError: the transport is impossible here; raised on every rank.
        PipelineError: a rank failed or did not come.
    """
    if meeting is None and (meeting := meeting_of(process_group)) is None:
        return LoopbackGroup(1)[0]
    backends = dist.get_backend_config(process_group)
    if "cpu:" not in backends:
        raise ValueError(
            f"the pipeline's process group has no backend for CPU tensors ({backends}); messages of every device go "
            'through host memory: use init_process_group("cpu:gloo,cuda:nccl"), or name no backend'
        )

    group = None
    try:
        meeting.begin(arrival_timeout, timeout)
        group = _connect(meeting, transport, timeout)
        meeting.gather(None)  # every rank has a group now
        return group
    except BaseException as error:
        if isinstance(error, (ConnectionError, _C.PipelineError)):  # gives the failed rank time to report the cause
            time.sleep(0.3)
        first = meeting.fail(error)
        if group is not None:
            group.fail(f"set-up ended: {type(error).__name__}: {error}")  # close() then waits for no rank
            group.timeout_s = 0.5  # the store may be stopped
            group.close()
        if first is not None and isinstance(error, (_C.PipelineError, OSError)):  # perhaps a result of the first error
            raise first from error
        raise
    finally:
        if not isinstance(group, StoreRank):
            meeting.close()


def _connect(meeting: Meeting, transport: str, timeout: float) -> RankGroup:
    rank, size = meeting.rank, meeting.size
    handshake = Handshake(rank, timeout)
    try:
        own = transport, handshake.name, handshake.token, address_space(ARENA_BYTES)
        wishes, names, tokens, allowed = zip(*meeting.gather(own), strict=True)
        if len(set(wishes)) > 1:
            raise ValueError(f"the ranks ask for different transports: {list(wishes)}")
        unmet: list[dict[int, str]] = meeting.gather(handshake.dial(names, tokens))
        for above, missed in enumerate(unmet):
            for below, why in missed.items() if transport == "shm" else ():
                raise ValueError(
                    f'transport="shm" needs all ranks on one host, in one network namespace and of one user: rank '
                    f'{above} cannot meet rank {below} ({why}); with "auto" the process group carries such edges'
                )
        dialled_by = {above for above in range(rank + 1, size) if rank not in unmet[above]}
        connections = handshake.accept(dialled_by, tokens)
    finally:
        handshake.close()
    arena_bytes = min(allowed)  # either end maps an edge
    one_host = not any(unmet)
    if one_host and transport != "c10d":
        block = share_on_host(rank, connections, _C.group_block_bytes(size))
        return ProcessRank(rank, size, meeting.process_group, meeting.attempt, connections, arena_bytes, block)
    if transport == "c10d":
        for connection in connections.values():
            connection.close()
        connections = {}
    host = {rank, *connections}
    # All ranks of a host meet the same ranks, unless a connection was refused; memory is not shared then.
    is_whole = all(
        (min(one, other) not in unmet[max(one, other)]) == (other in host) for one in host for other in range(size)
    )
    spoiled = share_on_host(rank, connections, mmap.PAGESIZE) if connections and is_whole else None
    return StoreRank(meeting, connections, arena_bytes, spoiled)


def meeting_of(group: Any) -> Meeting | None:
    """Returns the meeting of an engine's ``group=``; None if the rank has no other processes to meet.

    Raises ValueError if the process is not in the group.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the pipeline's process group")
    return Meeting(group) if dist.get_world_size(group) > 1 else None


def resolve_group(group: Any, transport: str = "auto", **options: Any) -> RankGroup:
    """Resolves an engine's ``group=``: a ProcessGroup, a loopback's rank, or None for the default group, else P = 1.

    Args:
        options: further arguments of :func:`connect`.
    """
    if isinstance(group, RankGroup):
        return group
    if isinstance(group, LoopbackGroup):
        raise TypeError("group= takes one rank of a LoopbackGroup: LoopbackGroup(P)[rank]")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group= takes a ProcessGroup, LoopbackGroup(P)[rank] or None, got {type(group).__name__}")
    return connect(group, transport, **options)
