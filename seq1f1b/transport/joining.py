"""From a torch process group to a pipeline: who can meet whom, and what each edge goes over."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from seq1f1b.transport.group import ARENA_BYTES, RankGroup
from seq1f1b.transport.loopback import LoopbackGroup
from seq1f1b.transport.meeting import Meeting
from seq1f1b.transport.shm import connect_shm
from seq1f1b.transport.store import connect_store

_next_generation = 0  # of pipelines whose edges go over a process group


def connect(process_group: Any, transport: str = "auto", *, arena_bytes: int = ARENA_BYTES) -> RankGroup:
    """Joins the processes of a torch process group into a pipeline. Collective.

    Args:
        process_group: of at least one rank; None: the default group. Used for set-up and for the gradients of tied
            parameters only, unless c10d carries edges.
        transport: "shm" (all processes on one host, as one user), "c10d", or "auto": shm on every edge where it can be;
            "nccl" and "copy" (:mod:`seq1f1b.device.edges`) go over what "auto" gives. The same on all ranks.
        arena_bytes: address space of one edge; a smaller one only where address space is limited.
    """
    if transport not in ("auto", "shm", "c10d", "nccl", "copy"):
        raise ValueError(f'transport must be "auto", "shm", "c10d", "nccl" or "copy", got {transport!r}')
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank < 0:
        raise ValueError("this process is not in the pipeline's process group")
    if size == 1:
        return LoopbackGroup(1, arena_bytes=arena_bytes)[0]
    backends = dist.get_backend_config(process_group)
    if "cpu:" not in backends:
        raise ValueError(
            f"the pipeline's process group has no backend for CPU tensors ({backends}); messages of every device go "
            'through host memory: use init_process_group("cpu:gloo,cuda:nccl"), or name no backend'
        )

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * size
        dist.all_gather_object(values, value, group=process_group)
        return values

    global _next_generation
    meeting = Meeting(rank)
    try:
        wishes, names, tokens, generations = zip(
            *gather((transport, meeting.name, meeting.token, _next_generation)), strict=True
        )
        generation = max(generations)
        _next_generation = generation + 1
        if len(set(wishes)) > 1:
            raise ValueError(f"the ranks ask for different transports: {list(wishes)}")
        unmet: list[dict[int, str]] = gather(meeting.dial(names, tokens))
        for above, missed in enumerate(unmet):
            for below, why in missed.items() if transport == "shm" else ():
                raise ValueError(
                    f'transport="shm" needs all ranks on one host, in one network namespace and of one user: rank '
                    f'{above} cannot meet rank {below} ({why}); with "auto" the process group carries such edges'
                )
        dialled_by = {above for above in range(rank + 1, size) if rank not in unmet[above]}
        connections = meeting.accept(dialled_by, tokens)
    finally:
        meeting.close()
    one_host = not any(unmet)
    if one_host and transport != "c10d":
        return connect_shm(rank, size, process_group, connections, arena_bytes)
    if transport == "c10d":
        for connection in connections.values():
            connection.close()
        connections = {}
    address = "127.0.0.1" if one_host else None
    process_group = process_group or dist.group.WORLD
    return connect_store(rank, size, process_group, gather, address, connections, generation, arena_bytes)


def resolve_group(group: Any, transport: str = "auto") -> RankGroup:
    """Resolves an engine's ``group=``: a ProcessGroup, a loopback's rank, or None for the default group, else P = 1."""
    if isinstance(group, RankGroup):
        return group
    if isinstance(group, LoopbackGroup):
        raise TypeError("group= takes one rank of a LoopbackGroup: LoopbackGroup(P)[rank]")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group= takes a ProcessGroup, LoopbackGroup(P)[rank] or None, got {type(group).__name__}")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return LoopbackGroup(1)[0]
    return connect(group, transport)
