"""Progress of a long command, drawn over itself on stderr where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: float, what: str) -> Iterator[Callable[[float], None] | None]:
    """What to call with the amount done out of ``total``; None where nobody looks. Gone at the end."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: float) -> None:
        share = done / total if total > 0 else 0.0
        filled = int(40 * share)
        bar = "#" * filled + "." * (40 - filled)
        print(f"\r[{bar}] {share:4.0%} of {what}\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
