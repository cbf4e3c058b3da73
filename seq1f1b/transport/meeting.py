"""Meetings of the ranks of a process group: exchanges of small values in the group's store."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b import _C
from seq1f1b.transport.descriptors import uninterrupted
from seq1f1b.transport.failure import error_of
from seq1f1b.transport.values import pack, unpack
from seq1f1b.transport.workers import Worker, first_line

_DIGEST_BYTES = hashlib.sha256().digest_size
_ANSWER = 5.0  # seconds for the store's answer to a rank that ends a meeting; without an answer, no rank is told
_TAG = (1 << 31) - 1  # unused by edges of any generation and by exchanges

_T = TypeVar("_T")


def poll(look: Callable[[], _T | None], longest_pause: float) -> _T:
    """Calls ``look`` with growing pauses until its result is not None. Returns the result."""
    pause = 1e-4
    while (found := look()) is None:
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)
    return found


class SharedStore:
    """A part of a process group's store: bytes by name. No call waits for a key.

    Every host with access to the store may write there. If the launcher gives every rank an equal ``SEQ1F1B_SECRET`` in
    the environment, values carry a keyed digest (HMAC-SHA256 of name and value); a value without a valid digest ends
    the pipeline.

    Args:
        store: torch's store. prefix: name of the part.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._base = store
        self._store: Any = PrefixStore(prefix, store)
        self.prefix = prefix
        self._secret = os.environ.get("SEQ1F1B_SECRET", "").encode()

    def part(self, name: str) -> SharedStore:
        """Returns a part of this part."""
        return SharedStore(self._base, f"{self.prefix}/{name}")

    @property
    def place(self) -> str:
        """Returns the address of the store as the end of a text; "" for a file."""
        base = self._base
        while hasattr(base, "underlying_store"):
            base = base.underlying_store
        return f" at {base.host}:{base.port}" if hasattr(base, "host") else ""

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._signed(key, value))

    def swap(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Sets a value if the store holds ``expected`` (``b""``: no value); returns the standing value."""
        there = self._signed(key, expected) if expected else b""
        return self._checked(key, self._store.compare_set(key, there, self._signed(key, value)))

    def has(self, *keys: str) -> bool:
        """Returns whether the store has all keys."""
        return bool(self._store.check(list(keys)))

    def get(self, key: str) -> bytes | None:
        """Returns the value; None without a value."""
        return self._checked(key, self._store.get(key)) if self.has(key) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Returns the values; None unless the store has all keys."""
        if not keys or not self.has(*keys):  # torch would wait for a missing key
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


# By process group: a peer, the data of a message to or from the peer, and the message under way or the error's text.
_first_messages: weakref.WeakKeyDictionary[Any, list[tuple[int, Any, Any]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_last_attempt = 0  # in any group of this process: a new group over an old store may have the name of an earlier group


class Meeting:
    """One attempt of the ranks of a process group to come together, over the group's store.

    All ranks agree on the attempt's number, even after different numbers of tries. Every wait ends with all ranks'
    values, or with an error on all ranks. The error names the failed rank with the reason, or the missing rank. All
    values in the store must come from ranks of this process group: for jobs restarted by torchrun,
    :func:`seq1f1b.init_process_group` ensures the origin of values, also for gloo.

    Attributes:
        attempt: number of the attempt; 0 until the rank has come, or has ended the attempt.
        worker: thread for calls of the store, out of reach of interrupts.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.store = SharedStore(process_group.get_group_store(), f"seq1f1b/{process_group.group_name}")
        self.attempt = self._round = 0
        self._arrival_s = self._timeout_s = _ANSWER
        self._is_over = False  # whether all ranks hear of the end, or no rank can be told
        self._worker: Worker | None = None

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(f"seq1f1b the launcher's store{self.store.place}")
        return self._worker

    def begin(self, arrival_s: float, timeout_s: float) -> None:
        """Comes to the newest attempt of all ranks, at least the rank's next one.

        Args:
            arrival_s: seconds for all ranks to come to the first :meth:`gather`. timeout_s: seconds for later calls.
        """
        self._arrival_s, self._timeout_s = arrival_s, timeout_s
        gone = self._find_gone()
        self.ask(self._come)
        if gone is not None:
            raise self.fail(gone) or gone
        self.ask(self._check_failure)  # raises if the ranks have left this attempt by an error

    def gather(self, value: Any) -> list[Any]:
        """Returns the values (of :mod:`seq1f1b.transport.values`) of all ranks, by rank. Collective.

        Raises:
            PipelineError: a rank ended this attempt, or did not come.
        """
        limit_s = self._timeout_s if self._round else self._arrival_s
        data, start = pack(value), time.monotonic()

        def come() -> list[bytes] | None:
            if (found := self.ask(self._look)) is not None:
                return found
            if self._round == 0 and self.ask(self._come):  # a rank has tried more often
                self.ask(lambda: self.store.set(self._keys()[self.rank], data))
            if time.monotonic() - start > limit_s:
                raise self._name_the_missing(limit_s)
            return None

        self.ask(lambda: self.store.set(self._keys()[self.rank], data))
        found = poll(come, 0.05)
        if self._round > 0:  # all ranks are in this round, so all have read the round before
            read = self._keys(self._round - 1)[self.rank]
            self.ask(lambda: self.store.delete(read))
        self._round += 1
        return [unpack(each) for each in found]

    def fail(self, error: BaseException) -> _C.PipelineError | None:
        """Ends this attempt on every rank, or the rank's next attempt if the rank has come to none.

        Returns:
            An earlier failure of a peer, or the loss of the store, which explains an error of a connection; else None.
        """

        def tell() -> _C.PipelineError | None:
            if self.attempt == 0:
                self._come()
            first = unpack(self.store.swap(f"{self.attempt}/failed", b"", pack(own)))
            return None if first == own else error_of(*first)

        if self._is_over:
            return None
        own = self.rank, f"rank {self.rank} ended the pipeline's set-up: {type(error).__name__}: {first_line(error)}"
        if isinstance(error, _C.PipelineError):  # has a rank and a full text
            own = getattr(error, "rank", self.rank), first_line(error)
        try:
            first = self.ask(tell, _ANSWER)
        except _C.PipelineError as lost:
            first = lost if isinstance(error, OSError) else None
        self._is_over = True
        if self.rank == 0:  # the store may end with this process: the ranks get time to read the reason
            time.sleep(0.2)
        return first

    def ask(self, do: Callable[[], _T], limit_s: float = math.inf) -> _T:
        """Returns the result of a call of the store. Raises PipelineError if the store is lost or silent."""
        try:
            return self.worker.ask(do, min(self._timeout_s, limit_s))
        except _C.PipelineError:
            raise
        except Exception as error:
            self._is_over = self._is_over or isinstance(error, TimeoutError)  # a silent store cannot take a failure
            is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            who = "torchrun, which holds it" if is_launchers else "rank 0, which holds it unless a launcher does"
            text = (
                f"the pipeline's set-up: the launcher's store is lost{self.store.place} ({first_line(error)}): {who}, "
                "has ended, is stopped or cannot be reached"
            )
            raise error_of(self.rank if is_launchers else 0, text) from error

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close(1.0)

    # -- in the store's thread

    def _come(self) -> bool:
        """Comes to the newest attempt of all ranks, at least the rank's next one. Returns whether the number grew."""
        global _last_attempt
        least, there = self.attempt or _last_attempt + 1, self.store.get("attempt") or b""
        while int(there or b"0") < least:
            there = self.store.swap("attempt", there, str(least).encode())
        before, self.attempt = self.attempt, int(there)
        with _lock:
            _last_attempt = max(_last_attempt, self.attempt)
        return self.attempt > before

    def _look(self) -> list[bytes] | None:
        if (found := self.store.get_all(self._keys())) is None:  # a full round ends well; a later failure ends the next
            self._check_failure()
        return found

    def _check_failure(self) -> None:
        if (failure := self.store.get(f"{self.attempt}/failed")) is not None:
            self._is_over = True
            raise error_of(*unpack(failure))

    # -- in the main thread

    def _keys(self, turn: int | None = None) -> list[str]:
        turn = self._round if turn is None else turn
        return [f"{self.attempt}/{turn}/{rank}" for rank in range(self.size)]

    def _find_gone(self) -> _C.PipelineError | None:
        """Returns an error for the first rank gone before the set-up; later ranks may have left as a result.

        The store does not know dead ranks, so rank 0 begins to send each rank a message of the group, once. No rank
        waits for a message: a thread inside gloo's wait at the interpreter's end would end the process (torch 2.13).
        """
        with _lock, uninterrupted():
            begun = _first_messages.setdefault(self.process_group, [])
            peers = range(0) if begun else range(1, self.size) if self.rank == 0 else [0]
            data = torch.zeros(1, device="cpu")
            for peer in peers:
                begin, end = (dist.isend, "group_dst") if self.rank == 0 else (dist.irecv, "group_src")
                try:
                    begun.append((peer, data, begin(data, group=self.process_group, tag=_TAG, **{end: peer})))
                except RuntimeError as error:
                    begun.append((peer, data, first_line(error)))
        gone = ((peer, why) for peer, _, why in begun if isinstance(why, str))
        return next((error_of(peer, f"rank {peer} is gone (the pipeline's set-up): {why}") for peer, why in gone), None)

    def _name_the_missing(self, waited_s: float) -> _C.PipelineError:
        """Ends the attempt in the name of the missing ranks. Returns the error, or an earlier failure."""
        there = self.ask(lambda: [self.store.has(key) for key in self._keys()])
        missing = [rank for rank, is_there in enumerate(there) if not is_there] or [self.rank]
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        what = "come to" if self._round == 0 else "gone on with"
        error = error_of(missing[0], f"{who} not {what} the pipeline's set-up for {waited_s:.0f} s")
        return self.fail(error) or error
