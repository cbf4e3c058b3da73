"""Files of the package: written whole or not at all, and read back with errors that name the file."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

__all__: list[str] = []

T = TypeVar("T")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file whole or not at all: a temporary file beside the target takes the target's name and mode.

    A pipe, a terminal or any other special file is written directly.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    temporary = target.with_name(f".seq1f1b-{os.urandom(8).hex()}")
    try:
        temporary.write_bytes(content)
        keep_mode(temporary, target)
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the temporary name
    finally:
        temporary.unlink(missing_ok=True)


def keep_mode(file: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Gives a file the mode of ``target``, before the file is renamed to ``target``.

    Without a target, the file gets the mode of any new file in the folder: safetensors, for instance, makes files that
    only the owner can read.
    """
    new = Path(file).with_name(f".seq1f1b-{os.urandom(8).hex()}")
    try:
        if not os.path.isfile(target):
            new.touch()
            target = new
        with contextlib.suppress(OSError):  # another owner, or a file system without modes
            shutil.copymode(target, file)
    finally:
        new.unlink(missing_ok=True)


def read(path: str | os.PathLike[str], parse: Callable[[str], T]) -> T:
    """Reads a file and parses its text with ``parse``; a ``ValueError`` begins with the file's name."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        return parse(text)
    except UnicodeError as error:  # error.args lack the message
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
    """Returns whether a value of JSON is a finite number in the range of float, and no boolean."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def check_number(name: str, value: float) -> None:
    """Raises unless the value is a number above 0."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not value > 0:
        raise ValueError(f"{name} is {value}, must be above 0")


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """Returns (rank, size) of ``sequence_parallel=``; raises unless 0 <= rank < size."""
    if not (isinstance(part, tuple) and len(part) == 2 and 0 <= part[0] < part[1]):
        raise ValueError(f"sequence_parallel is {part!r}, must be (rank, size) with 0 <= rank < size")
    return part


def json_fields(text: str, what: str, format: str, *, again: str = "") -> dict[str, Any]:
    """Returns the fields of a JSON object after a check of the format; ``what`` names the kind of file in errors.

    Args:
        again: advice in the error about a file of another version.
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


_TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("a whole number", lambda value: type(value) is int and is_number(value)),
    float: ("a finite number", is_number),
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    tuple: ("a list", lambda value: isinstance(value, list)),
    Mapping: ("an object", lambda value: isinstance(value, dict)),
    Any: ("anything", lambda value: True),
}
"""By the type of a field: what it holds, and how JSON's value is recognised."""


def load(kind: Any, data: Any, where: str, *, least: float | None = None) -> Any:
    """Makes a dataclass or named tuple from JSON values, each checked against the type of the field.

    Types are int, float, str, bool, Any, ``Mapping[str, Any]``, another dataclass or named tuple, ``tuple[X, ...]`` and
    ``X | None``. A named tuple may also be a list of values, as ``json.dumps`` writes named tuples. A field with a
    default may be missing.

    Args:
        where: beginning of errors; the path of fields to the wrong value follows.
        least: least value of every number.
    Raises:
        ValueError: no object, an unknown or missing field, or a value of a wrong type or not finite.
    """
    if get_origin(kind) is UnionType:  # X | None
        return None if data is None else load(get_args(kind)[0], data, where, least=least)
    plain = get_origin(kind) or kind
    if plain in _TYPES:
        what, is_kind = _TYPES[plain]
        bound = f" of at least {least}" if least is not None and kind in (int, float) else ""
        if not is_kind(data) or (bound and data < least):
            raise ValueError(f"{where} is {data!r:.80}, must be {what}{bound}")
        if plain is tuple:
            return tuple(load(get_args(kind)[0], each, f"{where}[{i}]", least=least) for i, each in enumerate(data))
        return float(data) if kind is float else data
    hints, fields = get_type_hints(kind), signature(kind).parameters
    if isinstance(data, list) and issubclass(kind, tuple) and len(data) == len(fields):
        data = dict(zip(fields, data, strict=True))
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {data!r:.80}, must be an object with {list(fields)}")
    check_names(data, fields, where, [name for name, field in fields.items() if field.default is not field.empty])
    return kind(**{name: load(hints[name], data[name], f"{where}: {name}", least=least) for name in data})


def check_names(given: Iterable[str], known: Collection[str], where: str, optional: Collection[str] = ()) -> None:
    """Raises a ``ValueError`` with the names of unknown fields and of missing fields, optional fields aside."""
    unknown, missing = sorted(set(given) - set(known)), [f for f in known if f not in given and f not in optional]
    if unknown or missing:
        near = nearest_name(unknown[0], known) if unknown else ""
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}{near}")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message that refuses an unknown name: the nearest known name, or all."""
    known = tuple(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
