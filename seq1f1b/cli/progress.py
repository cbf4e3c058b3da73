"""Progress of a long command: a bar on stderr, drawn over itself, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: float, what: str) -> Iterator[Callable[[float], None] | None]:
    """Shows a bar; call the result with the amount done out of ``total``. Without a terminal the result is None."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: float) -> None:
        share = done / total
        filled = int(40 * share)
        bar = "#" * filled + "." * (40 - filled)
        print(f"\r[{bar}] {share:4.0%} of {what}\033[K", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
