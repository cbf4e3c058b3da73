"""A process's own connection to the store of its process group, and the one thread that talks over it."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import hmac
import math
import os
import queue
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b import _C
from seq1f1b.transport.processes import first_line, start_helper, within

_T = TypeVar("_T")
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

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets it unless somebody has; returns what stands."""
        return self._checked(key, self._store.compare_set(key, "", self._signed(key, value)))

    def raise_number(self, key: str, number: int) -> int:
        """Makes a number at least this one; returns what stands."""
        there = b"" if not self.has(key) else self._store.get(key)
        while (found := int(self._checked(key, there) or b"0")) < number:
            wanted = self._signed(key, str(number).encode())
            there = self._store.compare_set(key, there, wanted)
            if there == wanted:
                return number
        return found

    def number(self, key: str) -> int:
        return int(self.get(key)) if self.has(key) else 0

    def has(self, *keys: str) -> bool:
        """Whether all of them are there."""
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return self._checked(key, self._store.get(key))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are all there."""
        if not keys:  # torch would wait for one
            return []
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
        return within(timeout_s, store.clone, f"the launcher's store{place_of(store)}")
    finally:
        store.set_timeout(before)


class StoreClient:
    """The one thread that talks to the store; all others ask it, and wait as long as they like.

    Torch's calls of a store wait without limit while the connection is down (torch 2.13). The thread ends with the last
    reference to the client: an interrupt may come before there is anyone to close it.
    """

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self._server = _Server()
        weakref.finalize(self, self._server.requests.put, None)
        self._thread = start_helper("seq1f1b store", self._server.run)

    @property
    def lost(self) -> str | None:
        """Why the store does not answer."""
        return self._server.lost

    def watch(self, turn: Callable[[], None], period: float, on_loss: Callable[[str], None]) -> None:
        """From now on the thread takes a turn after each period, in seconds.

        Args:
            turn: a method; its object is not kept alive.
            on_loss: hears, in the thread, why the store does not answer; the thread then ends. The same holds for it.
        """
        begin = functools.partial(self._server.watch, weakref.WeakMethod(turn), period, weakref.WeakMethod(on_loss))
        self.post(begin)

    def post(self, do: Callable[[], Any]) -> queue.SimpleQueue[Any]:
        """Has the thread do something soon. Returns where its result will be."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._server.requests.put((do, answer))
        return answer

    def ask(self, do: Callable[[], _T], limit_s: float, look: Callable[[], None] = lambda: None) -> _T:
        """Has the thread call the store, and returns what that gives.

        Args:
            look: called while the answer is not there; may raise.
        Raises:
            PipelineError: ``do`` raised it.
            TimeoutError: no answer in this many seconds.
            ConnectionError: the store does not answer any more.
        """
        answer = self.post(do)
        deadline = time.monotonic() + limit_s
        while True:
            with contextlib.suppress(queue.Empty):
                found = answer.get(timeout=0.05)
                if isinstance(found, _C.PipelineError):
                    raise found
                return found  # type: ignore[no-any-return]
            look()
            if not self._thread.is_alive() and answer.empty():
                raise ConnectionError(self.lost or "the link to the store is closed")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the launcher's store was asked {limit_s:.0f} s ago and does not answer")

    def close(self) -> None:
        """The thread ends by itself; one that waits for a store that is gone stays: a daemon."""
        self._server.requests.put(None)
        self._thread.join(1.0)


class _Server:
    """State of the thread, which does not hold the client."""

    def __init__(self) -> None:
        self.lost: str | None = None
        self.requests: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._turn: weakref.WeakMethod[Callable[[], None]] | None = None
        self._on_loss: weakref.WeakMethod[Callable[[str], None]] | None = None
        self._period, self._turn_at = math.inf, math.inf

    def watch(
        self,
        turn: weakref.WeakMethod[Callable[[], None]],
        period: float,
        on_loss: weakref.WeakMethod[Callable[[str], None]],
    ) -> None:
        self._turn, self._period, self._on_loss = turn, period, on_loss
        self._turn_at = time.monotonic()

    def run(self) -> None:
        try:
            while self._serve():
                continue
        except Exception as error:
            self._lose(error)

    def _serve(self) -> bool:
        """Does what is asked for next, or takes a turn. Returns whether to go on."""
        try:
            entry = self.requests.get(timeout=min(max(0.0, self._turn_at - time.monotonic()), 3600.0))
        except queue.Empty:
            if self._turn is not None and (turn := self._turn()) is not None:
                self._turn_at = time.monotonic() + self._period
                turn()
            return True
        if entry is None:
            return False
        do, answer = entry
        try:
            answer.put(do())
        except _C.PipelineError as error:  # of the one who asks
            answer.put(error)
        return True

    def _lose(self, error: Exception) -> None:
        self.lost = first_line(error)
        if self._on_loss is not None and (on_loss := self._on_loss()) is not None:
            on_loss(self.lost)
