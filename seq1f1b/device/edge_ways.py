"""The ways by which messages go between GPUs: what each needs at set-up, and what helps where it fails."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from pathlib import Path

from seq1f1b import _C
from seq1f1b.transport import RankGroup
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []


def find_nccl() -> str | None:
    """Path of the NCCL to use; None: the copy that torch has loaded, or the loader's.

    ``SEQ1F1B_NCCL`` names one; else torch's, so that the process has a single copy, else that of the Python package
    ``nvidia-nccl``.
    """
    if named := os.environ.get("SEQ1F1B_NCCL"):
        return named
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
        return None
    with contextlib.suppress(ModuleNotFoundError):
        package = importlib.util.find_spec("nvidia.nccl")
        for folder in (package.submodule_search_locations if package else None) or ():
            library = Path(folder) / "lib" / "libnccl.so.2"
            if library.exists():
                return str(library)
    return None


def found_nccl() -> str:
    """The version and path of NCCL, or why it was not found."""
    try:
        version, path = _C.nccl_find(find_nccl())
    except RuntimeError as error:
        return f"not found ({error}): no transport='nccl'"
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}, {path}"


class Way:
    """One way, and its ends on this rank.

    Attributes:
        over: what may carry its headers, by ``RankGroup.transport_to``.
        is_one_sided: a send takes place without its receive.
        needs: what to look at where it fails, a sentence without a full stop.
    """

    name = ""
    over: tuple[str, ...] = ("loopback", "shm", "c10d")
    is_one_sided = True
    needs = ""

    def __init__(self, group: RankGroup, watchdog: object) -> None:
        self._group, self._watchdog = group, watchdog

    def offer(self) -> bytes:
        """The facts that a sender tells the receiver before the ends of an edge are made."""
        return b""

    def make(self, control: object, offered: bytes) -> object:
        """An end of this rank. Does not wait for the peer."""
        raise NotImplementedError

    def connect(self, end: object) -> None:
        """Waits for the peer's end, which has been made."""

    def leave(self, end: object) -> None:
        """Begins to close an end together with the peer, before any end of the rank is closed."""


class Copies(Way):
    name = "copy"
    over = TRANSPORTS["copy"].over
    needs = (
        "CUDA IPC needs processes of one host that share its IPC namespace (docker run --ipc=host) and GPUs that reach "
        "each other (nvidia-smi topo -p2p r); wrong bytes point to an IOMMU, or to PCIe ACS, that is switched on"
    )

    def make(self, control: object, offered: bytes) -> object:
        return _C.copy_end(control, self._watchdog, self._is_one_process())

    def _is_one_process(self) -> bool:
        return self._group.is_thread


class Nccl(Way):
    name = "nccl"
    over = TRANSPORTS["nccl"].over
    is_one_sided = False
    needs = (
        "NCCL says more with NCCL_DEBUG=INFO; in a container it needs room in /dev/shm (docker run --shm-size=1g), "
        "between hosts the right network (NCCL_SOCKET_IFNAME), and it takes one rank per GPU"
    )

    @functools.cached_property
    def _path(self) -> str | None:
        return find_nccl()

    def offer(self) -> bytes:
        return _C.nccl_unique_id(self._path)

    def make(self, control: object, offered: bytes) -> object:
        return _C.nccl_end(self._path, offered, control, self._watchdog)

    def connect(self, end: object) -> None:
        _C.nccl_connect(end)

    def leave(self, end: object) -> None:
        _C.nccl_leave(end)


class Host(Way):
    """The last resort: pageable host memory, and copies that the host waits for."""

    name = "host"
    needs = (
        "this way needs no more than copies between the GPU and the host: look at the GPU itself (nvidia-smi, dmesg)"
    )

    def make(self, control: object, offered: bytes) -> object:
        return _C.host_end(control, self._watchdog)


WAYS: tuple[type[Way], ...] = (Copies, Nccl, Host)
"""In the order in which ``transport="auto"`` tries them."""
