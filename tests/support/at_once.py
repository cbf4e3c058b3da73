"""One function in several threads that begin together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["at_once"]


def at_once(count: int, ask: Callable[[], Any]) -> list[Any]:
    """What each thread was answered, those left out that have not ended within ten seconds."""
    barrier, found = threading.Barrier(count), []

    def run() -> None:
        barrier.wait(10)
        found.append(ask())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found
