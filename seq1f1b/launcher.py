"""Starts ranks as processes of this machine, from a script or a notebook."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined] # has no types
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b._C import PipelineError

__all__ = ["launch"]

_GRACE_S = 10.0  # wait for ranks to end, after a failure or a signal, before killing them
_LOOK_S = 0.05  # poll interval for ended ranks
_ALL = "all"  # name of a file that appears once all ranks are started
_UNGUARDED = 97  # exit code of a rank whose import of the script calls launch
_SET_PDEATHSIG = 1  # option of prctl, in linux/prctl.h


def launch(fn: Callable[..., Any], num_ranks: int, *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Runs ``fn(*arguments)`` in ``num_ranks`` new processes of this machine, like ``torchrun``, until all have ended.

    Each process has the default process group and torchrun's environment variables; ``torch.distributed.get_rank()``
    counts from 0. The processes share the cores, unless ``OMP_NUM_THREADS`` is set. The launching process prints the
    ranks' output, each line behind the rank: ``[rank 1] ...``. The ranks end with the launching process, and receive
    SIGTERM and Ctrl-C from there.

    A script must call ``launch`` under ``if __name__ == "__main__":``, because the ranks import the script. A notebook
    forks the ranks, with one thread each: call ``launch`` before the notebook's process has run any backward, since
    torch cannot run another backward in a fork.

    Args:
        fn: a function at the top level of a module or script; any function in a notebook.
        arguments: copied to every process.
        backend: of the process group.
    Returns:
        picklable results of ``fn``, by rank; None for a rank that called ``sys.exit()``.
    Raises:
        ValueError: num_ranks is below 1, or fn cannot be sent to another process.
        Exception: the first error of a rank, with the rank's traceback; ``launch`` ends the remaining processes.
        RuntimeError: a process was killed, left with an exit code other than 0, or returned an unpicklable value; or a
            script calls ``launch`` without the guard above.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, must be at least 1")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # this rank imports the script
        raise SystemExit(_UNGUARDED)
    forks = not hasattr(sys.modules["__main__"], "__file__")  # a rank cannot import a notebook
    call: Any = (fn, arguments)
    if not forks:
        try:
            call = pickle.dumps(call)
        except Exception as error:  # __reduce__ of an object may raise anything
            raise ValueError(
                f"launch cannot send {getattr(fn, '__qualname__', fn)} or its arguments to another process ({error}): "
                "define functions and classes at the top level of a module or script, and make engines in fn"
            ) from error
    # The ranks meet in a store of this process, which outlives every rank, like torchrun's.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = 1 if forks else max(1, len(os.sched_getaffinity(0)) // num_ranks)
    if not forks and "OMP_NUM_THREADS" in os.environ:
        threads = 0
    ranks = _Ranks(multiprocessing.get_context("fork" if forks else "spawn"))
    with _sigterm_passed_on(ranks), tempfile.TemporaryDirectory(prefix="seq1f1b-") as folder:
        try:
            variables = _variables(num_ranks, store.port)
            for rank in range(num_ranks):
                ranks.start(rank, call, variables, folder, backend, threads, os.getpid())
            open(f"{folder}/{_ALL}", "wb").close()
            ranks.print()
            return _results(ranks, folder)
        except KeyboardInterrupt:
            ranks.signal(signal.SIGINT)
            ranks.watch(_GRACE_S)
            raise
        finally:
            ranks.end()
            del store  # explicitly: a raised error keeps this frame and all variables alive


def _variables(num_ranks: int, port: int) -> dict[str, str]:
    """Returns torchrun's environment variables that are equal on all ranks of one machine."""
    return {
        "WORLD_SIZE": f"{num_ranks}",
        "LOCAL_WORLD_SIZE": f"{num_ranks}",
        "ROLE_WORLD_SIZE": f"{num_ranks}",
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "TORCHELASTIC_RUN_ID": f"launch-{socket.gethostname()}-{secrets.token_hex(8)}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_DIST_INIT_BARRIER": "1",  # a rank that leaves before all have joined breaks gloo's rendezvous
        # Any user of the machine can write to the store: a value without this secret's digest ends the pipeline.
        "SEQ1F1B_SECRET": os.environ.get("SEQ1F1B_SECRET") or secrets.token_hex(32),
    }


class _Termination(BaseException):
    """The exception that replaces the immediate end of the process by SIGTERM."""


@contextmanager
def _sigterm_passed_on(ranks: _Ranks) -> Iterator[None]:
    """Passes SIGTERM on to the ranks before the signal takes effect on this process.

    Only the main thread can handle signals. Ranks started by another thread are killed with this process.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        if callable(before):
            ranks.signal(number)
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_IGN)
            raise _Termination  # the finally clause of launch ends the ranks

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    except _Termination:
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


# -- in the process that launches --------------------------------------------------------------------------------------


class _Ranks:
    """The processes of the ranks, and their output."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.processes: list[Any] = []
        self._printers: list[threading.Thread] = []

    def start(self, rank: int, *arguments: Any) -> None:
        pipes = {stream: self._context.Pipe(duplex=False) for stream in ("stdout", "stderr")}
        theirs = tuple(writer for _, writer in pipes.values())
        process = self._context.Process(target=_run, args=(rank, *arguments, *theirs), name=f"rank {rank}")
        process.start()
        for stream, (reader, writer) in pipes.items():
            writer.close()
            self._printers.append(threading.Thread(target=_print_lines, args=(rank, stream, reader), daemon=True))
        self.processes.append(process)

    def print(self) -> None:
        """Begins to print the ranks' output. No rank may start afterwards: a fork would inherit the threads' locks."""
        for printer in self._printers:
            printer.start()

    def exit_code(self, rank: int) -> int | None:
        """Returns a rank's exit code, None if running. Kills the processes left behind by a killed rank."""
        process = self.processes[rank]
        with suppress(ChildProcessError):  # already waited for
            found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None and found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        code: int | None = process.exitcode
        return code

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and None in [self.exit_code(rank) for rank in range(len(self.processes))]:
            time.sleep(_LOOK_S)

    def signal(self, number: int) -> None:
        """Sends a signal to all running ranks and to their children. A rank leads a new session once started."""
        for rank, process in enumerate(self.processes):
            if self.exit_code(rank) is None:
                try:
                    os.killpg(process.pid, number)
                except OSError:
                    with suppress(OSError):
                        os.kill(process.pid, number)

    def end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.signal(number)
            self.watch(_GRACE_S)
        for process in self.processes:
            process.join()
        end = time.monotonic() + 1.0  # a process left by a rank may hold a pipe for ever
        for printer in filter(threading.Thread.is_alive, self._printers):
            printer.join(max(0.0, end - time.monotonic()))


def _print_lines(rank: int, name: str, pipe: Connection) -> None:
    """Prints the output of a rank. A rank that prints more after an error here gets an error."""
    with pipe, open(pipe.fileno(), encoding="utf-8", errors="replace", newline="", closefd=False) as lines:
        for line in lines:
            if (stream := getattr(sys, name)) is not None:
                stream.write(f"[rank {rank}] {line}" + "\n" * (line[-1] not in "\r\n"))
                stream.flush()


def _results(ranks: _Ranks, folder: str) -> list[Any]:
    """Returns each rank's result, or raises the first error; PipelineErrors, often effects of another, come last."""
    results: dict[int, Any] = {}
    errors: list[tuple[float, int, BaseException, str]] = []
    waiting, give_up = set(range(len(ranks.processes))), float("inf")
    while waiting and time.monotonic() < give_up:
        looked = time.monotonic()
        time.sleep(_LOOK_S)
        # Exit codes before results: a rank may write the result and end between the two reads.
        codes = {rank: ranks.exit_code(rank) for rank in waiting}
        for rank, code in codes.items():
            said = _said(folder, rank)
            if said is None and code is None:
                continue
            waiting.remove(rank)
            seconds, value, text = said or (looked, RuntimeError(_ended(rank, code)), "")
            if isinstance(value, BaseException):
                errors.append((seconds, rank, value, text))
            else:
                results[rank] = value[0]
            if errors and give_up == float("inf"):
                give_up = time.monotonic() + _GRACE_S
    if errors:
        _, rank, error, text = min(errors, key=lambda each: (isinstance(each[2], PipelineError), each[0]))
        raise error from (RemoteTraceback(f"\nrank {rank}:\n{text}") if text else None)
    ranks.watch(_GRACE_S)
    return [results[rank] for rank in sorted(results)]


def _said(folder: str, rank: int) -> tuple[float, Any, str] | None:
    """Returns a rank's message, None before it is written: end time of fn on the machine's monotonic clock, the result
    in a tuple of one or the error, and the error's traceback.

    The message is a file, not a pipe: a process started by the rank may hold a pipe open after the rank has died.
    """
    try:
        with open(f"{folder}/{rank}", "rb") as file:
            seconds, data, text = pickle.load(file)
    except FileNotFoundError:
        return None
    try:
        return seconds, pickle.loads(data), text
    except Exception as error:
        return seconds, RuntimeError(f"rank {rank} has sent a value that cannot be loaded here: {error}"), text


def _ended(rank: int, code: int | None) -> str:
    if code == _UNGUARDED:
        script = getattr(sys.modules["__main__"], "__file__", "the script")
        return (
            f"the ranks import {script}, and found seq1f1b.launch called there again: put the call, and all that is to "
            'run once, under if __name__ == "__main__":'
        )
    name = ""
    if code is not None and code < 0:
        with suppress(ValueError):
            name = f" ({signal.Signals(-code).name})"
    return f"rank {rank} ended with exit code {code}{name}"


# -- in the process of a rank ------------------------------------------------------------------------------------------


def _run(
    rank: int,
    call: Any,
    variables: Mapping[str, str],
    folder: str,
    backend: str,
    threads: int,
    launcher: int,
    out: Connection,
    err: Connection,
) -> None:
    """Runs one rank.

    Args:
        folder: for results. threads: number of threads, 0: by the environment. launcher: process id.
    """
    if not isinstance(call, bytes):  # forked: garbage of the launching process must not be collected here: a
        gc.freeze()  # store's destructor waits for a thread that the fork lacks
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # the launching process has ended already
        os._exit(1)
    os.setsid()  # Ctrl-C in a terminal reaches the launching process alone, which passes SIGINT on once
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked rank has the launching process's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A fork made while the store's thread answers a rank would inherit that thread's locks, held for ever.
    while not os.path.exists(f"{folder}/{_ALL}"):
        time.sleep(1e-3)
    _print_into(out, err)
    os.environ |= variables
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), f"{rank}")
    if threads:
        os.environ["OMP_NUM_THREADS"] = f"{threads}"  # for processes started by the rank
        torch.set_num_threads(threads)
    said = _outcome(call, rank, backend)
    path = f"{folder}/{rank}"
    with open(f"{path}.part", "wb") as file:
        pickle.dump(said, file)
    os.replace(f"{path}.part", path)
    if dist.is_initialized():
        dist.destroy_process_group()


def _outcome(call: Any, rank: int, backend: str) -> tuple[float, bytes, str]:
    value: Any = None
    error: BaseException | None = None
    try:
        dist.init_process_group(backend)
        fn, arguments = pickle.loads(call) if isinstance(call, bytes) else call
        value = fn(*arguments)
    except SystemExit as left:
        code, more = (left.code, "") if isinstance(left.code, int) else (1, f": {left.code}")
        if left.code:
            error = RuntimeError(f"rank {rank} ended with exit code {code}, by sys.exit(){more}")
    except Exception as raised:
        error = raised
    except BaseException as raised:  # raised again, a KeyboardInterrupt or exit would end the launching process
        error = RuntimeError(f"rank {rank} ended by {type(raised).__name__}")
    seconds = time.monotonic()
    if error is None:
        try:
            return seconds, pickle.dumps((value,)), ""
        except Exception as refused:
            error = RuntimeError(
                f"fn returned a {type(value).__name__} on rank {rank}, which cannot be sent to the launching "
                f"process ({refused}): return numbers, text, tensors or a state_dict"
            )
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # send the text of an error that cannot be pickled
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return seconds, data, text


def _print_into(out: Connection, err: Connection) -> None:
    for number, (name, pipe) in enumerate({"stdout": out, "stderr": err}.items(), 1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
        stream = os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        old = getattr(sys, name)
        if hasattr(old, "reconfigure"):  # loggers may hold the old stream and keep writing there
            old.reconfigure(line_buffering=True)
        setattr(sys, name, stream)
