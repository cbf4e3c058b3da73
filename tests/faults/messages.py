"""Messages that are not what was sent: changed in their places, as a peer that has gone wrong would."""

from __future__ import annotations

import ctypes
import random
import struct
import time
from pathlib import Path

from seq1f1b import _C

_MAGIC = 0x31463153
_HEAD = struct.Struct("<IIQqq6i4q2i")  # s1f_message in csrc/run/p2p.h, up to its tensors
_TENSOR_BYTES = 96
_SEALED_FROM = 16  # magic, version and checksum come first
_PAGE = 65536  # of arena.c
# By position in the header: what a forger may change to another value of its range.
_FORGED = {"step": 3, "destination stage": 6, "micro-batch": 8, "segment": 9, "training": 10}


def _mapping_of(address: int) -> tuple[int, int]:
    """The mapping of shared memory that holds an address; nothing where it holds none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last and "memfd:seq1f1b" in line:
            return first, last
    return 0, 0


def _header(address: int) -> tuple[int, ...]:
    return _HEAD.unpack(ctypes.string_at(address, _HEAD.size))


def _seal(header: bytes) -> int:
    total = 0xCBF29CE484222325
    for (word,) in struct.iter_unpack("<Q", header[_SEALED_FROM:]):
        total = ((total ^ word) * 0x100000001B3) % (1 << 64)
    return total


def find_next(payload: int, patience_s: float) -> int:
    """The place of the message after the one whose payload is at an address, once it has come; else 0."""
    here = payload - _C.HEADER_BYTES
    first, last = _mapping_of(here)
    if not first:
        return 0
    magic, _, _, step, sequence, *_ = _header(here)
    assert magic == _MAGIC, f"no message at {here:#x}"
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        for place in _places(first, last):
            if _header(place)[0] == _MAGIC and _header(place)[3:5] == (step, sequence + 1):
                return place
        time.sleep(0.005)
    return 0


def _places(first: int, last: int) -> set[int]:
    """Places of a message in an arena, which has one page of control, then equal places, at most 16 of them here."""
    pages = (last - first) // _PAGE - 1
    return {first + _PAGE * (1 + i * (pages // count)) for count in range(1, 17) for i in range(count)}


def _header_bytes(place: int) -> int:
    return _HEAD.size + _TENSOR_BYTES * _header(place)[-2]


def corrupt(place: int, rng: random.Random) -> None:
    """Changes one byte of the header."""
    at = place + rng.randrange(_header_bytes(place))
    byte = ctypes.string_at(at, 1)[0] ^ rng.randrange(1, 256)
    ctypes.memset(at, byte, 1)


def forge(place: int, rng: random.Random) -> None:
    """A sound header of another unit, or of another step."""
    size = _header_bytes(place)
    fields = list(_header(place))
    what = rng.choice(sorted(_FORGED))
    fields[_FORGED[what]] += 1 if what != "training" else 1 - 2 * fields[_FORGED[what]]
    data = _HEAD.pack(*fields) + ctypes.string_at(place + _HEAD.size, size - _HEAD.size)
    ctypes.memmove(place, data, size)
    ctypes.memmove(place + 8, struct.pack("<Q", _seal(data)), 8)


def repeat(place: int, payload: int) -> None:
    """The message whose payload is at an address once more."""
    here = payload - _C.HEADER_BYTES
    ctypes.memmove(place, here, _C.HEADER_BYTES + max(0, _header(here)[14]))
