"""Files of ours: written whole or not at all, and read back with errors that name the file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["is_number", "json_fields", "parse_json", "read", "write_whole"]

T = TypeVar("T")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file under a temporary name beside it and renames it: whole, or as it was before.

    What is no file, a pipe or a terminal for instance, is written as it comes.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    temporary = target.with_name(f".seq1f1b-{os.urandom(8).hex()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the temporary name
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], parse: Callable[[str], T]) -> T:
    """What ``parse`` makes of a file's text; a ``ValueError`` begins with the file's name."""
    try:
        with open(path) as file:
            text = file.read()
        return parse(text)
    except UnicodeError as error:  # whose message is not in its args
        raise ValueError(f"{os.fspath(path)}: {error}") from None
    except ValueError as error:
        error.args = (f"{os.fspath(path)}: {error}",)
        raise


def parse_json(text: str) -> Any:
    """``json.loads``, with ``ValueError`` also where the text nests too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"it nests too deep: {error}") from None


def is_number(value: object) -> bool:
    """Whether what JSON holds is a finite number that a float can be; True and False are none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def json_fields(text: str, what: str, format: str, *, again: str = "") -> dict[str, Any]:
    """Fields of a JSON object that says of itself which format it has; ``what`` is the command that writes it.

    Args:
        again: what the error about a file of another version tells the user to do.
    Raises:
        ValueError: not JSON, or another format.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"a {what} must be JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != format:
        found = data.get("format") if isinstance(data, dict) else None
        if again and isinstance(found, str) and found.startswith(f"seq1f1b {what} "):
            raise ValueError(f"the {what} has the format {found!r}, this version reads {format!r}: {again}")
        raise ValueError(f'a {what} must be an object whose "format" is {format!r}; seq1f1b {what} writes one')
    return {name: value for name, value in data.items() if name != "format"}
