"""Options of commands, and how their values are written: bytes, lists of numbers and names, histograms of lengths."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, _ActionsContainer
from collections.abc import Mapping
from typing import Any


def add_options(command: _ActionsContainer, rows: Mapping[str, tuple[Any, Any, str]]) -> dict[str, Any]:
    """Adds an option for each row: name and metavar; reader of a value, tuple of allowed words, or ``bool`` for a flag;
    default, ``...`` for a required option; help. Returns the defaults by name."""
    defaults = {}
    for words, (read, default, text) in rows.items():
        name, *metavar = words.split()
        how: dict[str, Any] = {"required": True} if default is ... else {"default": default}
        if read is bool:
            how["action"] = "store_true"
        else:
            how["metavar"] = metavar[0] if metavar else None
            how |= {"choices": read, "type": type(read[0])} if isinstance(read, tuple) else {"type": read}
        defaults[command.add_argument(name, help=text, **how).dest] = default
    return defaults


def read_bytes(text: str) -> int:
    """Reads bytes: 4096, 1.5e9, 80GiB or 25GB."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = 0.0
    if match is not None:
        number, prefix, binary = match.groups()
        size = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if not 1 <= size < 1 << 60:
        raise ArgumentTypeError(f"{text!r} is no number of bytes from 1 to 2^60; write 4096, 80GiB or 25GB")
    return int(size)


def read_cap(text: str) -> dict[str, Any]:
    """Reads a cap in micro-batches, 4, or in bytes, 4GiB: an argument of ``compare``."""
    if text.endswith("B"):
        return {"cap_bytes": read_bytes(text)}
    try:
        return {"cap_microbatches": float(text)}
    except ValueError:
        raise ArgumentTypeError(f"{text!r}: a cap is written 4 (micro-batches) or 4GiB") from None


def read_tokens(text: str) -> int:
    """Reads a count of tokens: 131072 or 128k, 1048576 or 1M, with k and M as powers of two."""
    match = re.fullmatch(r"(-?[0-9]+)([kKM]?)", text.strip())
    if match is None:
        raise ArgumentTypeError(
            f"{text!r} is no number of tokens; write 131072, 128k (times 1024) or 1M (times 1024 x 1024)"
        )
    number, unit = match.groups()
    factors = {"": 1, "K": 1024, "M": 1024 * 1024}
    return int(number) * factors[unit.upper()]


def read_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def read_counts(text: str) -> list[int]:
    if not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", text):
        raise ArgumentTypeError(f"{text!r}: whole numbers are written 1,2,4")
    return [int(count) for count in text.split(",")]


def read_sizes(text: str) -> list[int]:
    """Reads the tokens of each response, or segment: 10880,8448 or 8x256 or 4x256,4x1024."""
    found: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(?:([0-9]{1,6})x)?([0-9]+[kKM]?)", word)
        count, tokens = (int(match[1] or 1), read_tokens(match[2])) if match else (0, 0)
        if count < 1 or tokens < 1:
            raise ArgumentTypeError(f"{text!r}: tokens are written 256,1024 or 8x256, eight times 256, or 4x256,4x1024")
        found += [tokens] * count
    return found


def read_parents(text: str) -> list[list[int] | None]:
    """Reads trees, written as in the text of an order: a word for each micro-batch, ``-`` (None) for a chain."""
    return [None if word == "-" else read_counts(word) for word in text.split()]


def read_lengths(text: str) -> dict[int, int]:
    """Reads the number of sequences of each length: from a histogram 4096:7,512:90 or from a file."""
    if re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        where, lines = "--lengths", text.replace(":", " ").split(",")
    else:
        with open(text, encoding="utf-8") as file:
            where, lines = text, [line.partition("#")[0].strip() for line in file]
    lengths: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"(\d+(\s+\d+)?)?", line, re.ASCII):
            raise ValueError(f"{where}, line {number}: {line[:40]!r} must be a length, or a length and a count")
        if line:
            length, count = (*map(int, line.split()), 1)[:2]
            lengths[length] = lengths.get(length, 0) + count
    if not lengths:
        raise ValueError(f"{where}: there is no length")
    return lengths
