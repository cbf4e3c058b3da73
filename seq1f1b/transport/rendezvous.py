"""How the ranks of a process group come together, before they share anything."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from seq1f1b import _C
from seq1f1b.transport.incarnation import Incarnation
from seq1f1b.transport.processes import first_line, within
from seq1f1b.transport.store_client import SharedStore, StoreClient
from seq1f1b.transport.values import pack, unpack

SETUP_TIMEOUT = 120.0  # seconds for each part of set-up, where the caller says nothing

_ANSWER = 2.0  # seconds in which a store answers, else nobody is told by way of it
_LINGER = 5.0  # seconds in which others may come after a rank has failed, and still hear why

_SILENCE = "_seq1f1b_silence"  # of an error: the store does not answer

_T = TypeVar("_T")
_PREFIX = "seq1f1b"
_last_attempt = 0  # of this process, in any process group
_attempt_lock = threading.Lock()


class Rendezvous:
    """Small values among the ranks of a process group, by way of the group's store.

    Ranks meet in an attempt, a number that all of them agree on, however often each of them has tried. Every wait ends
    with everybody's values, or with an error on all ranks that says which rank failed and why, or which has not come.

    Args:
        arrival_s: seconds for all ranks to come to the first :meth:`gather`. timeout_s: for each later one.
    """

    def __init__(self, process_group: Any, rank: int, size: int, arrival_s: float, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._arrival_s, self._timeout_s = arrival_s, timeout_s
        self._round = 0
        self.attempt = 0
        self._group_store = process_group.get_group_store()
        self._incarnation = Incarnation.of(process_group, rank, size)
        try:
            self.client = StoreClient(SharedStore(self._incarnation.connection(self._group_store, timeout_s), _PREFIX))
        except (OSError, RuntimeError) as error:  # no descriptor is left, perhaps, here or where the store is
            text = f"rank {rank} has no connection to the launcher's store: {first_line(error)}"
            if isinstance(error, TimeoutError):
                raise _silent(rank, text) from error
            is_gone = isinstance(error, (ConnectionError, dist.DistNetworkError))
            own = _error_of_store(rank, text) if is_gone else _error_of(rank, text)
            raise (self._fail_directly(own) or own) from error
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        """Begins an attempt."""
        name = self._incarnation.name(self._arrival_s, self._look_whether_store_answers)
        if name is None:
            late = f"rank 0 has not come to the pipeline's set-up for {self._arrival_s:.0f} s"
            raise _error_of(*self._incarnation.lost or (0, late))
        self.client.store = self.client.store.part(name)
        self._ask(lambda store: store.set(_here(self.rank), b""))
        self.attempt = self._ask(_begin)
        if self._incarnation.lost is not None:  # as rank 0 found out
            error = _error_of(*self._incarnation.lost)
            raise self.fail(error) or error
        self._ask(self._check_failure)  # of this attempt, which the others have left

    def gather(self, value: Any) -> list[Any]:
        """Everyone's values (of :mod:`seq1f1b.transport.values`), by rank. Collective.

        Raises:
            PipelineError: another rank ended this attempt, or did not come.
        """
        limit_s = self._timeout_s if self._round else self._arrival_s
        data, start, pause = pack(value), time.monotonic(), 1e-4
        self._ask(lambda store: store.set(self._key(self.rank), data))
        while (found := self._ask(self._look)) is None:
            if self._round == 0 and (newest := self._ask(lambda store: store.number("attempt"))) > self.attempt:
                self.attempt = _note_attempt(newest)  # a rank has tried more often
                self._ask(lambda store: store.set(self._key(self.rank), data))
            if time.monotonic() - start > limit_s:
                raise self._name_the_missing(limit_s)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if self._round > 0:  # who has come to this round has read the one before
            read = self._key(self.rank, self._round - 1)
            self._ask(lambda store: store.delete(read))
        self._round += 1
        return [unpack(each) for each in found]

    def fail(self, error: BaseException) -> _C.PipelineError | None:
        """Ends this attempt on every rank. Returns the failure of another rank that came first."""
        if _is_silence(error):  # nor would it answer now
            return None
        try:
            rank, text = self._ask(lambda store: _fail(store, self.attempt, self.rank, error))
        except _C.PipelineError:
            return None if self.client.lost is None else self._fail_directly(error)
        return None if rank == self.rank else _error_of(rank, text)

    def _fail_directly(self, error: BaseException) -> _C.PipelineError | None:
        """Ends this attempt over the group's own connection, if this rank's is gone."""

        def fail() -> tuple[int, str]:
            store = _part_of(self._incarnation, self._group_store, self.rank, error)
            if store is None:
                return self.rank, ""
            found = _fail(store, self.attempt or _begin(store), self.rank, error)
            _linger(store, self.rank, self.size)
            return found

        try:
            rank, text = _directly(self._group_store, fail)
        except Exception:
            return None
        return None if rank == self.rank else _error_of(rank, text)

    def close(self) -> None:
        self.client.close()

    def _key(self, rank: int, turn: int | None = None) -> str:
        return f"{self.attempt}/{self._round if turn is None else turn}/{rank}"

    def _ask(self, do: Callable[[SharedStore], _T]) -> _T:
        try:
            return self.client.ask(lambda: do(self.client.store), self._timeout_s)
        except TimeoutError as error:
            raise _silent(self.rank, f"the pipeline's set-up: {error}") from error
        except ConnectionError as error:
            text = f"the pipeline's set-up: the launcher's store is lost ({error})"
            raise _error_of_store(self.rank, text) from error

    def _look(self, store: SharedStore) -> list[bytes] | None:
        keys = [self._key(rank) for rank in range(self.size)]
        if store.has(*keys):  # a failure that came later is one of the next round
            return store.get_all(keys)
        self._check_failure(store)
        return None

    def _look_whether_store_answers(self) -> None:
        self._ask(lambda store: store.has("attempt"))

    def _check_failure(self, store: SharedStore) -> None:
        key = _failed(self.attempt)
        if store.has(key):
            raise _error_of(*unpack(store.get(key)))

    def _name_the_missing(self, waited_s: float) -> _C.PipelineError:
        """Ends the attempt in the name of the ranks that have not come; or with the failure that came first."""
        keys = [self._key(rank) for rank in range(self.size)]
        there = self._ask(lambda store: [store.has(key) for key in keys])
        missing = [rank for rank, is_there in enumerate(there) if not is_there] or [self.rank]
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        what = "come to" if self._round == 0 else "gone on with"
        error = _error_of(missing[0], f"{who} not {what} the pipeline's set-up for {waited_s:.0f} s")
        return self.fail(error) or error


def last_attempt() -> int:
    """The latest attempt of this rank, in any process group."""
    return _last_attempt


def refuse(process_group: Any, rank: int, size: int, error: BaseException, since: int) -> None:
    """Tells the other ranks, which may wait for this one, that it will not come and why.

    Ends this rank's latest attempt, if it has begun one since that one; else a new one. Nobody hears it if rank 0 comes
    much later than this rank: until then, what they share has no name.
    """
    group_store, incarnation = process_group.get_group_store(), Incarnation.of(process_group, rank, size)

    def tell() -> None:
        store = _part_of(incarnation, group_store, rank, error)
        if store is not None:
            _fail(store, _last_attempt if _last_attempt > since else _begin(store), rank, error)
            if not isinstance(error, _C.PipelineError):
                _linger(store, rank, size)

    if not _is_silence(error):
        with suppress(Exception):  # the store may be gone, and the error is what this rank has to say
            _directly(group_store, tell)


def _directly(group_store: Any, do: Callable[[], _T]) -> _T:
    """Does something over the group's own connection to its store, whose calls may wait for ever (torch 2.13).

    Raises:
        TimeoutError: the store does not answer.
    """
    within(_ANSWER, lambda: group_store.check([_PREFIX]), "the launcher's store")
    return within(3 * _LINGER, do, "the launcher's store")


def _error_of_store(rank: int, text: str) -> _C.PipelineError:
    """The error of a rank that has no store, and so hears nothing of the others: who holds it is to blame."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _error_of(rank, f"{text}: torchrun, which holds it, has ended, is stopped or cannot be reached")
    who = "rank 0, which holds it unless a launcher does"
    return _error_of(0, f"{text}: {who}, has ended, is stopped or cannot be reached")


def _silent(rank: int, text: str) -> _C.PipelineError:
    """The error of a rank that gets no answer from the store."""
    error = _error_of_store(rank, text)
    setattr(error, _SILENCE, True)
    return error


def _is_silence(error: BaseException) -> bool:
    return hasattr(error, _SILENCE)


def _linger(store: SharedStore, rank: int, size: int) -> None:
    """Rank 0 waits a little for those who have not come: what it is sending them by the group goes with its process."""
    end = time.monotonic() + _LINGER
    others = [_here(other) for other in range(1, size)]
    while rank == 0 and not store.has(*others) and time.monotonic() < end:
        time.sleep(0.02)


def _part_of(incarnation: Incarnation, group_store: Any, rank: int, error: BaseException) -> SharedStore | None:
    """The part of the store that the ranks share; None if rank 0 has not come.

    A rank that fails by itself waits a little for rank 0.
    """
    name = incarnation.name(0.0 if isinstance(error, _C.PipelineError) else _LINGER)
    if name is None:
        return None
    store = SharedStore(group_store, _PREFIX).part(name)
    store.set(_here(rank), b"")
    return store


def _begin(store: SharedStore) -> int:
    """A new attempt of this rank: the newest of all, if this rank has made fewer. Such a one may have failed."""
    with _attempt_lock:
        return _note_attempt(store.raise_number("attempt", _last_attempt + 1))


def _note_attempt(attempt: int) -> int:
    global _last_attempt
    _last_attempt = max(_last_attempt, attempt)
    return attempt


def _here(rank: int) -> str:
    """Set once a rank knows the name of what the ranks share."""
    return f"here/{rank}"


def _failed(attempt: int) -> str:
    return f"{attempt}/failed"


def _fail(store: SharedStore, attempt: int, rank: int, error: BaseException) -> tuple[int, str]:
    """Ends an attempt, unless somebody has. Returns whose failure it was, and its text."""
    if isinstance(error, _C.PipelineError):  # which says it all
        rank, text = getattr(error, "rank", rank), first_line(error)
    else:
        text = f"rank {rank} ended the pipeline's set-up: {type(error).__name__}: {first_line(error)}"
    return unpack(store.set_first(_failed(attempt), pack((rank, text))))  # type: ignore[no-any-return]


def _error_of(rank: int, text: str) -> _C.PipelineError:
    error = _C.PipelineError(text)
    error.rank = rank
    return error
