"""Tables of numbers as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["rounded", "table_text"]


def table_text(rows: Sequence[Sequence[str]]) -> str:
    """Aligns rows under the first one, which holds the heads. A column empty below its head is left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    texts = ("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)
    return "".join(text.rstrip() + "\n" for text in texts)


def rounded(value: float, digits: int = 3) -> str:
    """Writes three digits, as many as the rates of a machine deserve: 12.3, 0.0123, 12300."""
    return f"{float(f'{value:.{digits}g}'):.10g}"
