"""Extras of the package, and the error for a missing extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs_extra", "torch_remedy"]


@contextmanager
def needs_extra(extra: str, *packages: str) -> Iterator[None]:
    """Replaces the error of an import of a missing package by a ``ModuleNotFoundError`` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in packages:
            raise
        raise ModuleNotFoundError(
            f'{missing} is not installed; run: pip install "seq1f1b[{extra}]"', name=error.name
        ) from error


def torch_remedy() -> str:
    """Returns the command that installs a supported torch."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        wanted = next(line for line in requires("seq1f1b") or () if line.startswith("torch"))
    except (PackageNotFoundError, StopIteration):
        wanted = "torch"
    return f'run: pip install "{wanted}"'
