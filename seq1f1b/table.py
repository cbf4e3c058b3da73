"""Tables of numbers as text, and long lines in a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

__all__ = ["rounded", "table_text", "wrapped"]


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Returns aligned rows; the first row holds the heads. Leaves out columns without an entry below the head."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    texts = ("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
    return "".join(text.rstrip() + "\n" for text in texts)


def rounded(value: float, digits: int = 3) -> str:
    """Returns a number as text with so many significant digits: 12.3, 0.0123, 12300."""
    return f"{float(f'{value:.{digits}g}'):.10g}"


def wrapped(text: str) -> str:
    """Returns the text with lines broken at spaces to fit the terminal, or 100 columns without a terminal."""
    width = shutil.get_terminal_size((100, 24)).columns  # or COLUMNS
    wrapper = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))
