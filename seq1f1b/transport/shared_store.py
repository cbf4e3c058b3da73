"""Values that ranks write for each other into the store of their process group."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
from collections.abc import Sequence
from typing import Any

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b import _C
from seq1f1b.transport.workers import Worker

_DIGEST_BYTES = hashlib.sha256().digest_size


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def place_of(store: Any) -> str:
    """Place of a store, to be put behind it in a text; "" for a file."""
    base = _base(store)
    return f" at {base.host}:{base.port}" if hasattr(base, "host") else ""


class SharedStore:
    """A part of a process group's store: bytes by name. None of its calls waits for a key.

    Whoever reaches the store may write to it. Where the launcher gives every rank the same ``SEQ1F1B_SECRET`` in the
    environment, values carry a keyed digest (HMAC-SHA256 of name and value), and one without it ends the pipeline.

    Args:
        store: torch's. prefix: names the part.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store: Any = PrefixStore(prefix, store)
        self.prefix = prefix
        self.place = place_of(store)
        self._secret = os.environ.get("SEQ1F1B_SECRET", "").encode()

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._signed(key, value))

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Sets it if this is there, ``b""`` for nothing; returns what stands."""
        there = self._signed(key, expected) if expected else b""
        return self._checked(key, self._store.compare_set(key, there, self._signed(key, value)))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets it unless somebody has; returns what stands."""
        return self.swap(key, b"", value)

    def raise_number(self, key: str, number: int) -> int:
        """Makes a number at least this one; returns what stands."""
        there = self.get(key) or b""
        while int(there or b"0") < number:
            there = self.swap(key, there, str(number).encode())
        return int(there or b"0")

    def has(self, *keys: str) -> bool:
        """Whether all of them are there."""
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> bytes | None:
        """The value; None if there is none."""
        return self._checked(key, self._store.get(key)) if self.has(key) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values; None unless all are there."""
        if not keys or not self.has(*keys):  # torch would wait for one
            return None if keys else []
        return [self._checked(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _signed(self, key: str, value: bytes) -> bytes:
        if not self._secret:
            return value
        return hmac.digest(self._secret, f"{self.prefix}/{key}".encode() + b"\0" + value, "sha256") + value

    def _checked(self, key: str, value: bytes) -> bytes:
        value = bytes(value)
        plain = value[_DIGEST_BYTES:] if self._secret else value
        if value and not hmac.compare_digest(value, self._signed(key, plain)):
            raise _C.PipelineError(
                f"{key!r} in the launcher's store is not signed with SEQ1F1B_SECRET: a rank has another secret, or "
                "somebody else writes to the store"
            )
        return plain


def own_connection(store: Any, timeout_s: float) -> Any:
    """A connection of this process alone to torch's store: a call in another thread may block a shared one for long.

    A file has none, and its clone would count as one more user, the last of whom removes it.

    Raises:
        OSError, RuntimeError: there is none within this many seconds, as where the store's process is stopped.
    """
    if isinstance(_base(store), FileStore):
        return store
    socket.socket().close()  # torch tries again and again where no descriptor is left
    before = store.timeout
    store.set_timeout(datetime.timedelta(seconds=timeout_s / 2))  # for the connection, and once more for an answer
    try:
        return Worker(f"seq1f1b the launcher's store{place_of(store)}").ask(store.clone, timeout_s)
    finally:
        store.set_timeout(before)
