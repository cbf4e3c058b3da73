"""One rank's process: forked for a supervisor, or ``python -m seq1f1b.first_contact.rank SPEC``.

Each case is two lines of JSON in the rank's file, one as it begins and one as it ends. After a case that failed on any
rank all of them leave, as nothing may be left of it in the next one; the supervisor starts others for what remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b._C import PipelineError
from seq1f1b.first_contact.cases import Rank, Unmeasured
from seq1f1b.first_contact.parts import cases_of

__all__: list[str] = []

MET = 20.0  # seconds in which ranks that have ended a case hear of the others
LOOK = 0.5  # between two looks of the watcher
_SET_PDEATHSIG = 1  # of prctl
FAILED = 3  # exit code after a case that failed here or on another rank


@dataclass
class Spec:
    """The orders of a rank's process, which it reads from a file.

    Attributes:
        source: of the cases, see :class:`seq1f1b.first_contact.parts.Part`.
        host, port, prefix: of the store in which its ranks meet.
        hosts: for each rank, the number of its host.
        gpu: its number; -1: none, everything on the CPU.
        share: how many ranks use one GPU.
        cases: names of those to run, in order.
        folder: for what it writes.
        dies: a case that passes has killed a rank, and no other one follows.
        environment: what of it is changed; None: it is taken out.
    """

    source: str
    cases: list[str]
    rank: int
    world: int
    hosts: list[int]
    gpu: int
    share: int
    host: str
    port: int
    prefix: str
    folder: str
    dies: bool
    environment: dict[str, str | None]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Spec:
        return Spec(**json.loads(path.read_text(encoding="utf-8")))

    def path(self, name: str) -> Path:
        """A file of this rank."""
        return Path(self.folder) / f"{name}-{self.rank}"


class Watcher(threading.Thread):
    """Writes now and then what the pipeline's ranks do, as the supervisor may end this process at any time."""

    def __init__(self, spec: Spec, rank: Rank) -> None:
        super().__init__(name="watcher", daemon=True)
        self.case = "set-up"
        self._path, self._rank = spec.path("state"), rank

    def run(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # it reads what the rank may be changing
                self.write()
            time.sleep(LOOK)

    def write(self) -> None:
        rank = self._rank
        state = {"rank": rank.rank, "case": self.case, "ranks of its pipeline": rank.progress()}
        state["edges"] = rank.edge_states()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(state, indent=1), encoding="utf-8")
        os.replace(part, self._path)


class Results:
    def __init__(self, path: Path, rank: int) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 # as long as the process
        self._rank = rank

    def add(self, case: str, state: str, **more: Any) -> None:
        record = {"case": case, "rank": self._rank, "state": state, "at": time.time(), **more}
        self._file.write(json.dumps(record, default=str) + "\n")
        self._file.flush()


def run_case(results: Results, name: str, run: Any) -> str:
    results.add(name, "begun")
    start, more = time.monotonic(), {}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            more = {"figures": run()}
        state = "passed"
        told = {
            str(w.message).splitlines()[0][:300]
            for w in caught
            if issubclass(w.category, (UserWarning, RuntimeWarning))
        }
        if told:
            more["warnings"] = sorted(told)
    except Unmeasured as reason:
        state, more = "unmeasured", {"why": str(reason)}
    except Exception as error:
        traceback.print_exc()
        state, more = "failed", {"why": f"{type(error).__name__}: {error}"[:1500]}
        more["caused"] = isinstance(error, PipelineError)  # by what another rank has met, most likely
    results.add(name, state, seconds=round(time.monotonic() - start, 2), **more)
    return state


def all_fine(store: Any, key: str, spec: Spec, state: str) -> bool:
    """Whether the case has failed on no rank, as far as is heard in time."""
    keys = [f"{key}/{rank}" for rank in range(spec.world)]
    store.set(keys[spec.rank], state)
    try:
        store.wait(keys, datetime.timedelta(seconds=MET))
    except RuntimeError:
        return False
    return all(store.get(other) != b"failed" for other in keys)


def gathered(store: Any, key: str, own: int, count: int, value: Any, seconds: float) -> list[Any]:
    """Everyone's value of JSON. Raises RuntimeError if one does not come."""
    keys = [f"{key}/{each}" for each in range(count)]
    store.set(keys[own], json.dumps(value, default=str))
    store.wait(keys, datetime.timedelta(seconds=seconds))
    return [json.loads(store.get(each)) for each in keys]


def join(spec: Spec) -> tuple[Any, Rank]:
    """Into the process group; messages and gradients of replicas go over NCCL where there are GPUs."""
    device, backend = torch.device("cpu"), "gloo"
    if spec.gpu >= 0:
        device, backend = torch.device("cuda", spec.gpu), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=60)
    store = PrefixStore(spec.prefix, TCPStore(spec.host, spec.port, is_master=False, timeout=limit))
    dist.init_process_group(
        backend, store=PrefixStore("torch", store), rank=spec.rank, world_size=spec.world, timeout=limit
    )
    turns = itertools.count()

    def gather(value: Any) -> list[Any]:
        return gathered(store, f"gather {next(turns)}", spec.rank, spec.world, value, MET)

    return store, Rank(spec.rank, spec.world, device, hosts=spec.hosts, share=spec.share, gather=gather)


def start(path: str) -> None:
    """Runs a rank in a process that was forked from one that has imported torch, and has never used CUDA."""
    spec = Spec.read(Path(path))
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # the server of forks ends with the supervisor
    for name, value in spec.environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    output = os.open(spec.path("output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    torch.set_num_threads(1)
    if spec.gpu >= 0:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except RuntimeError:  # something has used CUDA there after all
            traceback.print_exc()
            os.execv(sys.executable, [sys.executable, "-m", "seq1f1b.first_contact.rank", path])
    sys.exit(main(spec))


def main(spec: Spec) -> int:
    """Returns the exit code."""
    stacks = open(spec.path("stacks"), "w", encoding="utf-8")  # noqa: SIM115 # as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    store, rank = join(spec)
    watcher, results = Watcher(spec, rank), Results(spec.path("results"), spec.rank)
    watcher.start()
    cases = dict(cases_of(spec.source, rank))
    for number, name in enumerate(spec.cases):
        watcher.case = name
        state = run_case(results, name, cases[name])
        is_last = number == len(spec.cases) - 1 or (spec.dies and state == "passed")
        if state == "failed" or not (is_last or all_fine(store, f"case {number}", spec, state)):
            store.set(f"case {number}/{spec.rank}", state)
            return FAILED
        if is_last:
            break
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Spec.read(Path(sys.argv[1]))))
