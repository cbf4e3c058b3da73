"""Progress of a long command on stderr: a bar drawn over itself on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(total: float, what: str, every: float = 0.0) -> Iterator[Callable[[float], None] | None]:
    """Shows a bar; call the result with the amount done out of ``total``.

    Args:
        every: without a terminal, a line at each such share of the total; 0: the result is None.
    """
    if not sys.stderr.isatty():
        yield _lines(total, what, every) if every else None
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


def _lines(total: float, what: str, every: float) -> Callable[[float], None]:
    told = 0.0

    def show(done: float) -> None:
        nonlocal told
        share = done / total if total > 0 else 0.0
        if share >= told + every:
            told = share
            print(f"seq1f1b: {share:.0%} of {what}", file=sys.stderr, flush=True)

    return show
