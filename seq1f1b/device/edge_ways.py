"""The ways by which messages go between GPUs: what each needs at set-up, and what helps where it fails."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from seq1f1b import _C
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


class Way(NamedTuple):
    """One way by which messages go, and how an end of it is made.

    Attributes:
        over: what may carry its headers, by ``RankGroup.transport_to``.
        needs: what to look at where it fails, a sentence without a full stop.
        make: makes an end of this rank from its control end, the watchdog and what was offered; waits for nobody.
        offer: the facts that a sender tells the receiver before the ends of an edge are made.
        is_one_sided: a send takes place without its receive.
    """

    name: str
    over: tuple[str, ...]
    needs: str
    make: Callable[[Any, Any, bytes], object]
    offer: Callable[[], bytes] = bytes
    is_one_sided: bool = True


COPIES = Way(
    "copy",
    TRANSPORTS["copy"].over,
    "CUDA IPC needs processes of one host that share its IPC namespace (docker run --ipc=host) and GPUs that reach "
    "each other (nvidia-smi topo -p2p r); wrong bytes point to an IOMMU, or to PCIe ACS, that is switched on",
    lambda control, watchdog, offered: _C.copy_end(control, watchdog),
)
NCCL = Way(
    "nccl",
    TRANSPORTS["nccl"].over,
    "NCCL says more with NCCL_DEBUG=INFO; in a container it needs room in /dev/shm (docker run --shm-size=1g), "
    "between hosts the right network (NCCL_SOCKET_IFNAME), and it takes one rank per GPU",
    lambda control, watchdog, offered: _C.nccl_end(find_nccl(), offered, control, watchdog),
    lambda: _C.nccl_unique_id(find_nccl()),
    is_one_sided=False,
)
HOST = Way(  # the last resort
    "host",
    TRANSPORTS["auto"].over,
    "this way needs no more than copies between the GPU and the host: look at the GPU itself (nvidia-smi, dmesg)",
    lambda control, watchdog, offered: _C.host_end(control, watchdog),
)
WAYS = (COPIES, NCCL, HOST)
"""In the order in which ``transport="auto"`` tries them."""
