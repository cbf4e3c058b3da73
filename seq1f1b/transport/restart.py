"""Process groups for jobs restarted by torchrun."""

from __future__ import annotations

import datetime
import hashlib
import os
import secrets
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # from C by a star: no export
from torch.distributed.rendezvous import rendezvous

from seq1f1b.transport.meeting import SharedStore, poll

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_SHARED = ("env://", "tcp://")  # methods for which torch uses torchrun's store


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    *more: Any,
    **options: Any,
) -> None:
    """Calls ``torch.distributed.init_process_group`` for jobs that torchrun may restart (``--max-restarts``).

    The function sets ``CUDA_DEVICE_MAX_CONNECTIONS`` to 32 hardware queues, unless the variable is set: with CUDA's
    default of 8, messages may wait for units. CUDA reads the number at its start, so call this function before
    ``torch.cuda.set_device``.

    torchrun keeps one store for all starts of a job. gloo would read addresses of earlier starts there, without a
    listener, and the new start would fail or hang. The ranks therefore first agree on a name for each start, and the
    group writes only under this name. Without torchrun, or with the caller's own store or file, only the setting of
    CUDA is added to torch's function.

    Args:
        backend, init_method, timeout, world_size, rank, store: arguments of torch's function, in torch's order.
        more, options: torch's further arguments.
    Raises:
        TimeoutError: a rank has not come within ``timeout``, 30 minutes by default.
    """
    has_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's has no types
    if has_started and QUEUES not in os.environ:
        warnings.warn(
            "CUDA had started before seq1f1b.init_process_group was called, with 8 hardware queues: call it before "
            f"torch.cuda.set_device, or start the ranks with {QUEUES}=32",
            stacklevel=2,
        )
    else:
        os.environ.setdefault(QUEUES, "32")
    limits: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    method = "env://" if init_method is None else init_method
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and store is None and method.startswith(_SHARED):
        found, rank, world_size = next(rendezvous(method, rank, world_size, **limits))
        name = agree_on_name(SharedStore(found, "seq1f1b/start"), rank, world_size, found.timeout.total_seconds())
        init_method, store = None, PrefixStore(name, found)
    dist.init_process_group(backend, init_method, timeout, world_size, rank, store, *more, **options)


def agree_on_name(store: SharedStore, rank: int, size: int, limit_s: float) -> str:
    """Returns a new name, equal on all ranks of this start and unlike the name of every earlier start. Collective.

    Each rank writes a random token, and a list of all ranks' visible tokens. Once all lists are equal, all come from
    living ranks, because every list holds this rank's new token.
    """
    own, start = secrets.token_hex(8).encode(), time.monotonic()
    tokens = [f"token/{each}" for each in range(size)]
    views = [f"view/{each}" for each in range(size)]

    def look() -> str | None:
        view = b" ".join(store.get(key) or b"-" for key in tokens)
        store.set(views[rank], view)
        others = [store.get(key) or b"" for key in views]
        if all(other == view for other in others):
            return hashlib.sha256(view).hexdigest()[:16]
        if time.monotonic() - start > limit_s:
            missing = [each for each, other in enumerate(others) if own not in other.split()]
            raise TimeoutError(f"ranks {missing} have not come to init_process_group for {limit_s:.0f} s")
        return None

    store.set(tokens[rank], own)
    return poll(look, 0.05)
