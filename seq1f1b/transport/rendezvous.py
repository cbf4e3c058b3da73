"""How the ranks of a process group come together, before they share anything."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from seq1f1b import _C
from seq1f1b.transport.descriptors import uninterrupted
from seq1f1b.transport.group import error_of
from seq1f1b.transport.shared_store import SharedStore, own_connection
from seq1f1b.transport.values import pack, unpack
from seq1f1b.transport.workers import Worker, first_line

SETUP_TIMEOUT = 120.0  # seconds for each part of set-up, where the caller says nothing

_WORKER = "seq1f1b the launcher's store"
_ANSWER = 2.0  # seconds in which a store answers, else nobody is told by way of it
_TAG = (1 << 31) - 1  # no edge of any generation has it, nor have exchanges

_T = TypeVar("_T")
_Gone = tuple[int, str]  # a rank, and why nobody can meet it
_last_attempt = 0  # of this process, in any process group
_greetings: weakref.WeakKeyDictionary[Any, tuple[list[Any], _Gone | None]] = weakref.WeakKeyDictionary()
_connections: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # to stores, one for all pipelines
_lock = threading.Lock()


class Rendezvous:
    """Small values among the ranks of a process group, by way of the group's store.

    Ranks meet in an attempt, a number that all of them agree on, however often each of them has tried. Every wait ends
    with everybody's values, or with an error on all ranks that says which rank failed and why, or which has not come.
    What is in the store is from the ranks of this process group: where torchrun may restart them,
    :func:`seq1f1b.init_process_group` sees to that, for gloo as well.

    Args:
        arrival_s: seconds for all ranks to come to the first :meth:`gather`. timeout_s: for each later one.
    """

    def __init__(self, process_group: Any, rank: int, size: int, arrival_s: float, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._arrival_s, self._timeout_s = arrival_s, timeout_s
        self._round = 0
        self.attempt = 0
        self._process_group = process_group
        gone = _find_gone(process_group, rank, size)
        try:
            if (connection := _connections.get(process_group)) is None:
                connection = own_connection(process_group.get_group_store(), timeout_s)
                _connections[process_group] = connection
        except (OSError, RuntimeError) as error:  # no descriptor is left, perhaps, here or where the store is
            text = f"rank {rank} has no connection to the launcher's store: {first_line(error)}"
            is_gone = isinstance(error, (ConnectionError, TimeoutError, dist.DistNetworkError))
            own = _error_of_store(rank, text, error) if is_gone else error_of(rank, text)
            raise (refuse(process_group, rank, own, 0) or own) from error
        self.store, self.worker = _shared(process_group, connection), Worker(_WORKER, breaks=True)
        try:
            self.attempt = self._ask(lambda: _begin(self.store))
            if gone is not None:
                lost = error_of(*gone)
                raise self.fail(lost) or lost
            self._ask(self._check_failure)  # of this attempt, which the others have left
        except BaseException:
            self.worker.close(1.0)
            raise

    def gather(self, value: Any) -> list[Any]:
        """Everyone's values (of :mod:`seq1f1b.transport.values`), by rank. Collective.

        Raises:
            PipelineError: another rank ended this attempt, or did not come.
        """
        limit_s = self._timeout_s if self._round else self._arrival_s
        data, start, pause = pack(value), time.monotonic(), 1e-4
        self._ask(lambda: self.store.set(self._keys()[self.rank], data))
        while (found := self._ask(self._look)) is None:
            if self._round == 0 and (newest := self._ask(lambda: self.store.raise_number("attempt", 0))) > self.attempt:
                self.attempt = _note_attempt(newest)  # a rank has tried more often
                self._ask(lambda: self.store.set(self._keys()[self.rank], data))
            if time.monotonic() - start > limit_s:
                raise self._name_the_missing(limit_s)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if self._round > 0:  # who has come to this round has read the one before
            read = self._keys(self._round - 1)[self.rank]
            self._ask(lambda: self.store.delete(read))
        self._round += 1
        return [unpack(each) for each in found]

    def fail(self, error: BaseException) -> _C.PipelineError | None:
        """Ends this attempt on every rank. Returns the failure of another rank that came first."""
        if _is_silence(error):
            return None
        try:
            return self._ask(lambda: _fail(self.store, self.attempt, self.rank, error))
        except _C.PipelineError:
            is_lost = self.worker.lost is not None
            return refuse(self._process_group, self.rank, error, self.attempt) if is_lost else None

    def _keys(self, turn: int | None = None) -> list[str]:
        turn = self._round if turn is None else turn
        return [f"{self.attempt}/{turn}/{rank}" for rank in range(self.size)]

    def _ask(self, do: Callable[[], _T]) -> _T:
        try:
            return self.worker.ask(do, self._timeout_s)
        except (TimeoutError, ConnectionError) as error:
            lost = f"the launcher's store is lost ({error})"
            text = f"the pipeline's set-up: {error if isinstance(error, TimeoutError) else lost}"
            raise _error_of_store(self.rank, text, error) from error

    def _look(self) -> list[bytes] | None:
        if (found := self.store.get_all(self._keys())) is None:  # a failure that came later is one of the next round
            self._check_failure()
        return found

    def _check_failure(self) -> None:
        if (failure := self.store.get(f"{self.attempt}/failed")) is not None:
            raise error_of(*unpack(failure))

    def _name_the_missing(self, waited_s: float) -> _C.PipelineError:
        """Ends the attempt in the name of the ranks that have not come; or with the failure that came first."""
        there = self._ask(lambda: [self.store.has(key) for key in self._keys()])
        missing = [rank for rank, is_there in enumerate(there) if not is_there] or [self.rank]
        who = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
        what = "come to" if self._round == 0 else "gone on with"
        error = error_of(missing[0], f"{who} not {what} the pipeline's set-up for {waited_s:.0f} s")
        return self.fail(error) or error


def last_attempt() -> int:
    """The latest attempt of this rank, in any process group."""
    return _last_attempt


def refuse(process_group: Any, rank: int, error: BaseException, attempt: int) -> _C.PipelineError | None:
    """Tells the other ranks, over the group's own connection to its store, that this one will not come and why.

    Args:
        attempt: the one that it ends; 0: a new one.
    Returns:
        The failure of another rank that came first, as far as the store answers.
    """

    def tell() -> _C.PipelineError | None:
        store = _shared(process_group, process_group.get_group_store())
        return _fail(store, attempt or _begin(store), rank, error)

    if not _is_silence(error):
        with suppress(Exception):  # the store may be gone, and the error is what this rank has to say
            return Worker(_WORKER).ask(tell, _ANSWER)
    return None


def _shared(process_group: Any, store: Any) -> SharedStore:
    return SharedStore(store, f"seq1f1b/{process_group.group_name}")


def _find_gone(process_group: Any, rank: int, size: int) -> _Gone | None:
    """The first rank that was gone before the set-up: later ones may have left because of it. None if there is none.

    The store cannot tell, so rank 0 begins to send each rank a message of the group. Nobody waits for these: a thread
    that waits in gloo as the interpreter goes would end the process (torch 2.13).
    """
    with _lock, uninterrupted():
        if process_group not in _greetings:
            kept: list[Any] = [data := torch.zeros(1, device="cpu")]  # as long as it is under way
            gone: _Gone | None = None
            for peer in range(1, size) if rank == 0 else [0]:
                try:
                    begin, end = (dist.isend, {"group_dst": peer}) if rank == 0 else (dist.irecv, {"group_src": peer})
                    kept.append(begin(data, group=process_group, tag=_TAG, **end))
                except RuntimeError as error:
                    gone = gone or (peer, f"rank {peer} is gone (the pipeline's set-up): {first_line(error)}")
            _greetings[process_group] = kept, gone
        return _greetings[process_group][1]


def _error_of_store(rank: int, text: str, cause: BaseException) -> _C.PipelineError:
    """The error of a rank that has no store, and so hears nothing of the others: who holds it is to blame."""
    is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    who = "torchrun, which holds it" if is_launchers else "rank 0, which holds it unless a launcher does"
    error = error_of(rank if is_launchers else 0, f"{text}: {who}, has ended, is stopped or cannot be reached")
    error.__cause__ = cause
    return error


def _is_silence(error: BaseException) -> bool:
    """Whether an error says that the store has not answered in time: nor would it answer now."""
    return isinstance(error, _C.PipelineError) and isinstance(error.__cause__, TimeoutError)


def _begin(store: SharedStore) -> int:
    """A new attempt of this rank: the newest of all, if this rank has made fewer. Such a one may have failed."""
    return _note_attempt(store.raise_number("attempt", _last_attempt + 1))


def _note_attempt(attempt: int) -> int:
    global _last_attempt
    with _lock:
        _last_attempt = max(_last_attempt, attempt)
    return attempt


def _fail(store: SharedStore, attempt: int, rank: int, error: BaseException) -> _C.PipelineError | None:
    """Ends an attempt, unless somebody has. Returns the failure that stands, if it is another rank's."""
    if isinstance(error, _C.PipelineError):  # which says it all
        own = getattr(error, "rank", rank), first_line(error)
    else:
        own = rank, f"rank {rank} ended the pipeline's set-up: {type(error).__name__}: {first_line(error)}"
    failed, text = unpack(store.set_first(f"{attempt}/failed", pack(own)))
    return None if failed == rank else error_of(failed, text)
