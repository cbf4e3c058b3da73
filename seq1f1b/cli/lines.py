"""Long lines of text for a terminal."""

from __future__ import annotations

import shutil
import textwrap

__all__ = ["wrapped"]


def wrapped(text: str) -> str:
    """Breaks lines at spaces, where the terminal ends, or after 100 columns without one."""
    width = shutil.get_terminal_size((100, 24)).columns  # or COLUMNS
    lines = (
        textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) or [""]
        for line in text.split("\n")
    )
    return "\n".join(part for line in lines for part in line)
