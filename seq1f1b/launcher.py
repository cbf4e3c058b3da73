"""Ranks as processes of this machine, started from a script or a notebook."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b._C import PipelineError

__all__ = ["launch"]

_GRACE_S = 10.0  # for the others to end by themselves, once a rank has failed


def launch(fn: Callable[..., Any], num_ranks: int, *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Runs ``fn(*arguments)`` in so many new processes of this machine, as ``torchrun`` would, and waits for them.

    In each, the default process group is there, with ``torch.distributed.get_rank()`` from 0 on, and the cores are
    shared out. Calls from a script stand under ``if __name__ == "__main__":``, because the processes import it. In a
    notebook they are forked, with one thread each: call this before a backward has run in the notebook's own process,
    as torch cannot run another one in a fork.

    Args:
        fn: a function at the top level of a module or script; any function in a notebook.
        arguments: copied to every process.
        backend: of the process group.
    Returns:
        what ``fn`` returned, by rank; it must be picklable.
    Raises:
        ValueError: num_ranks is below 1, or fn cannot be sent to another process.
        Exception: the first error of a rank, with its traceback there; the other processes are ended.
        RuntimeError: a process was killed.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}, must be at least 1")
    forks = not hasattr(sys.modules["__main__"], "__file__")  # a notebook, which no process can import
    call: Any = (fn, arguments)
    if not forks:
        try:
            call = pickle.dumps(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"launch cannot send {getattr(fn, '__qualname__', fn)} or its arguments to another process ({error}): "
                "define it at the top level of a module or script"
            ) from error
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    threads = 1 if forks else max(1, len(os.sched_getaffinity(0)) // num_ranks)
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="seq1f1b-") as folder:
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, num_ranks, f"{folder}/store", backend, threads)
                process = context.Process(target=_run, args=(call, place, theirs), name=f"rank {rank}")
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _results(pipes, processes)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(_GRACE_S)
                if process.is_alive():
                    process.kill()
                    process.join()


def _run(call: Any, place: tuple[int, int, str, str, int], pipe: Connection) -> None:
    """Runs one rank."""
    rank, num_ranks, store, backend, threads = place
    torch.set_num_threads(threads)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}"}
    try:
        dist.init_process_group(backend, store=FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
        try:
            fn, arguments = pickle.loads(call) if isinstance(call, bytes) else call
            said = pickle.dumps((True, fn(*arguments)))
        finally:
            dist.destroy_process_group()
    except BaseException as error:
        said = _pickled(error)
    pipe.send_bytes(said)


def _pickled(error: BaseException) -> bytes:
    """The error and its traceback as text; the text alone if the error cannot be sent."""
    text = "".join(traceback.format_exception(error))
    try:
        said = pickle.dumps((False, (error, text)))
        pickle.loads(said)
        return said
    except Exception:
        return pickle.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), text)))


class _Traceback(Exception):
    def __str__(self) -> str:
        return str(self.args[0])


def _results(pipes: Sequence[Connection], processes: Sequence[Any]) -> list[Any]:
    """What each rank returned. An error of a rank's own is raised before those that it caused in others."""
    results: list[Any] = [None] * len(pipes)
    errors: list[tuple[int, BaseException, str]] = []
    open_pipes: list[Any] = list(pipes)
    while open_pipes and (ready := wait(open_pipes, _GRACE_S if errors else None)):
        for pipe in ready:
            open_pipes.remove(pipe)
            rank = pipes.index(pipe)
            try:
                ok, value = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                ok, value = False, (RuntimeError(f"rank {rank} ended with exit code {code}"), "")
            if ok:
                results[rank] = value
            else:
                errors.append((rank, *value))
    if errors:
        rank, error, text = next((each for each in errors if not isinstance(each[1], PipelineError)), errors[0])
        raise error from _Traceback(f"\nrank {rank}:\n{text}" if text else f"rank {rank}")
    return results
