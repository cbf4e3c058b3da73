"""Small values as bytes for peers. Unpacking returns data and never runs code."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type[Any])
_records: dict[str, type[Any]] = {}
_SCALARS = {"bool": (bool,), "int": (int,), "float": (float, int), "str": (str,)}


def sendable(kind: _Class) -> _Class:
    """Registers a dataclass or named tuple for use in values; the fields must be values."""
    _records[kind.__name__] = kind
    return kind


def pack(value: Any) -> bytes:
    """Returns a value as JSON. Types unknown to JSON become an object with one key, the type.

    Raises:
        TypeError: the value, or a part of it, is not None, bool, int, float, str, bytes, list, tuple, dict or a
            :func:`sendable` class.
    """
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Returns the packed value.

    Raises:
        ValueError: the bytes do not come from :func:`pack`.
    """
    try:
        return _decode(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a value of a peer: {type(error).__name__}: {error}") from error


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is list:
        return [_encode(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [_encode(each) for each in value]}
    if type(value) is dict:
        return {"dict": [[_encode(key), _encode(each)] for key, each in value.items()]}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    kind = type(value).__name__
    if _records.get(kind) is type(value):
        parts = value if isinstance(value, tuple) else (getattr(value, field.name) for field in fields(value))
        return {"record": [kind, [_encode(each) for each in parts]]}
    raise TypeError(
        f"ranks tell each other None, bool, int, float, str, bytes, and lists, tuples and dicts of them, not {kind}"
    )


def _checked(record: Any) -> Any:
    """Returns the record. Raises TypeError if a field of a plain type has a value of another type."""
    for name, annotation in type(record).__annotations__.items():
        value, wanted = getattr(record, name), getattr(annotation, "__forward_arg__", annotation)
        if wanted in _SCALARS and type(value) not in _SCALARS[wanted]:
            raise TypeError(f"{name} of a {type(record).__name__} is {value!r:.80}, must be of type {wanted}")
    return record


def _decode(found: Any) -> Any:
    if isinstance(found, list):
        return [_decode(each) for each in found]
    if not isinstance(found, dict):
        return found
    ((kind, content),) = found.items()
    if kind == "tuple":
        return tuple(_decode(each) for each in content)
    if kind == "dict":
        return {_decode(key): _decode(each) for key, each in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "record":
        name, parts = content
        return _checked(_records[name](*(_decode(each) for each in parts)))
    raise ValueError(f"no such type: {kind!r}")
