"""Text on a terminal: long lines, and the progress of a long command."""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

__all__ = ["progress_bar", "wrapped"]


def wrapped(text: str) -> str:
    """Returns the text with lines broken at spaces to fit the terminal, or 100 columns without a terminal."""
    width = shutil.get_terminal_size((100, 24)).columns  # or COLUMNS
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a function of a finished and a total number that shows the finished share on stderr, always in one line;
    None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield lambda done, total: print(f"\r{done / total:4.0%} of {what}\033[K", end="", file=sys.stderr, flush=True)
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
