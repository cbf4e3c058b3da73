"""Every transport that can be asked for, with the edges that it can connect."""

from __future__ import annotations

from typing import NamedTuple

__all__: list[str] = []


class Transport(NamedTuple):
    over: tuple[str, ...]  # what may carry the edge, or its headers if payloads stay on GPUs, by ``transport_to``
    between_gpus: bool = False


TRANSPORTS = {
    "auto": Transport(("loopback", "shm", "c10d")),  # the first of these that can be
    "shm": Transport(("loopback", "shm")),
    "c10d": Transport(("loopback", "c10d")),
    "nccl": Transport(("loopback", "shm", "c10d"), between_gpus=True),
    "copy": Transport(("loopback", "shm"), between_gpus=True),  # GPUs of one host
}
