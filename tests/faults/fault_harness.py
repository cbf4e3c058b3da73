"""Does a pipeline survive what goes wrong? Random faults in real processes, drawn by a seed, and what came of each.

Four groups of three processes run side by side, one for each transport and kind of backward. After every fault that all
ranks survive the group goes on, and its next step must have the gradients of the model run whole. After one that kills
a rank a new group starts, and loads the newest complete checkpoint of the one before.

    python tests/faults/fault_harness.py --faults 1000 --seed 1

Messages that are not what was sent: tests/fuzz/fuzz_message.c and tests/c/test_p2p.c. Many errors in a row, between
steps too: tests/transport/test_pairing.py. A rank that is lost with the store that it holds: tests/engine/test_exit.py.

Exits with 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import torch.distributed as dist
from common import header
from fault_ranks import LENGTHS, SLEEP, TIMEOUT, Fault, Outcome, serve
from processes import PipedProcesses, context, shared_memory_names
from traps import K, M, P

from seq1f1b.table import table_text

GRACE = 2.0  # seconds beyond the time-out in which a survivor hears of a fault
DEADLINE = 25.0  # of one command: who has not answered then never will
ATTEMPTS = 8  # steps in which ranks must have met again
LANES = [(kind, schedule) for kind in ("shm", "c10d") for schedule in ("seq1f1b", "seq-zb-h1")]
# Kinds, with how often each is drawn: those that wait for a time-out cost seconds, those that kill a new group.
PLACES: dict[str, tuple[float, tuple[str, ...]]] = {
    "module raises": (4, ("step", "step", "eval")),
    "hook raises": (4, ("step",)),
    "raises": (3, ("between", "save", "make")),
    "left well": (4, ("step", "step", "eval")),
    "evaluates": (2, ("step",)),
    "other length": (3, ("step",)),
    "interrupt": (5, ("step", "step", "eval", "make", "save")),
    "stop": (1, ("step", "step", "between", "eval", "make")),
    "kill": (1, ("step", "step", "between", "eval", "make", "save")),
    "slow set-up": (1, ("make",)),
    "call fails": (6, ("step", "eval", "make", "make", "save")),
    "message lost": (2, ("step", "eval")),
    "message late": (1, ("step", "eval")),
}
# In shared memory a message is a counter: only its sender can be late.
ONLY_OVER_C10D = ("message lost", "message late")
PLACE = r"\branks? \d|\bstages? \d|\[\d+\][FBIW]\d"  # what an error must name: a rank, or an edge or stage and its unit
COLUMNS = ("hangs", "wrong", "leftovers", "errors", "checkpoints", "not recovered", "aborts")


def draw(rng: random.Random, schedule: str, kind: str) -> Fault:
    place = rng.choice(PLACES[kind][1])
    rank = rng.randrange(P)
    split = schedule == "seq-zb-h1"
    passes = {"hook raises": "I" if split else "B", "module raises": "FW" if split and place == "step" else "F"}.get(
        kind, "F"
    )
    if kind in ("interrupt", "stop", "kill") and place == "step":
        passes = "FIW" if split else "FB"
    unit = f"{rng.choice(passes)}{rng.randrange(M)}.{rng.randrange(K)}"
    if kind == "left well":  # in the step's last unit
        rank, unit = (P - 1, f"F{M - 1}.{K - 1}") if place == "eval" else (0, f"{'W' if split else 'B'}{M - 1}.0")
    if kind == "interrupt" and place in ("step", "eval") and rng.random() < 0.5:
        unit = "any"
    return Fault(kind, place, rank, unit, rng.randrange(len(LENGTHS)), rng.randrange(1 << 20))


def plan(count: int, seed: int) -> list[list[Fault]]:
    """The faults of each lane. Every kind comes once before any is drawn again."""
    rng, lanes = random.Random(seed), []
    for i, (transport, schedule) in enumerate(LANES):
        kinds = [kind for kind in PLACES if transport == "c10d" or kind not in ONLY_OVER_C10D]
        drawn = rng.sample(kinds, len(kinds)) + rng.choices(kinds, [PLACES[kind][0] for kind in kinds], k=count)
        lanes.append([draw(rng, schedule, kind) for kind in drawn[: len(range(i, count, len(LANES)))]])
    return lanes


class Found:
    """Counts by kind and transport, and a line for each defect."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, str], Any] = defaultdict(Counter)  # of events, and of seconds
        self.lines: list[str] = []
        self._lock = threading.Lock()

    def add(self, column: str, fault: Fault | None, lane: tuple[str, str], count: float = 1) -> None:
        with self._lock:
            self.counts[fault.kind if fault else "none", lane[0]][column] += count

    def defect(self, column: str, fault: Fault | None, lane: tuple[str, str], text: str) -> None:
        self.add(column, fault, lane)
        with self._lock:
            self.lines.append(f"{column}: {lane[0]} {lane[1]} {fault}: {text}")
            print(self.lines[-1], flush=True)

    def total(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())

    def table(self) -> str:
        head = ["injected", "missed", *COLUMNS, "seconds"]
        rows = [*sorted(self.counts.items()), (("all", ""), self.total())]
        cells = ([*key, *(f"{round(counts[name])}" for name in head)] for key, counts in rows)
        return table_text([["kind", "transport", *head], *cells])


class Hang(Exception):
    """A rank has not answered in time."""


class Group:
    """Three processes, and what they say. After a fault that kills one of them the others are told to end."""

    def __init__(self, lane: tuple[str, str], port: int, run: str, folder: Path) -> None:
        self.folder = folder
        self.ranks = PipedProcesses(P, serve, port, run, lane, folder)
        self.alive = set(range(P))
        self.trapped_at: float | None = None
        self.collect(set(range(P)))

    def tell(self, command: str, fault: Fault | None = None, argument: Any = None) -> dict[int, Outcome]:
        """One command on all living ranks. Returns how it ended on each that is still alive.

        Raises:
            Hang: not all ended in time.
        """
        self.trapped_at = None
        for rank in self.alive:
            with contextlib.suppress(BrokenPipeError):  # it has died: that is seen below
                self.ranks.pipes[rank].send((command, fault, argument))
        return self.collect(set(self.alive), fault)

    def collect(self, missing: set[int], fault: Fault | None = None) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + DEADLINE
        resume_at = float("inf")
        while missing:
            now = time.monotonic()
            if now >= resume_at and fault is not None:
                os.kill(self.ranks.processes[fault.rank].pid, signal.SIGCONT)
                resume_at = float("inf")
            if now > deadline:
                raise Hang(f"ranks {sorted(missing)} do not answer; the others: {found}")
            pipes = {self.ranks.pipes[rank]: rank for rank in missing}
            for pipe in wait(list(pipes), max(0.0, min(deadline, resume_at) - now)):
                rank = pipes[pipe]
                try:
                    what, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self.alive.discard(rank)
                    missing.discard(rank)
                    continue
                if what == "trap":
                    self.trapped_at = value
                    if fault is not None and fault.kind == "stop":
                        resume_at = value + SLEEP
                else:
                    found[rank] = value
                    missing.discard(rank)
        if resume_at < float("inf") and fault is not None:  # it has been stopped after its command had ended
            time.sleep(max(0.0, resume_at - time.monotonic()))
            os.kill(self.ranks.processes[fault.rank].pid, signal.SIGCONT)
        return found

    def stacks(self) -> str:
        """Python's stacks of the living ranks."""
        for rank in self.alive:
            process = self.ranks.processes[rank]
            os.kill(process.pid, signal.SIGCONT)
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{(self.folder / f'stacks-{rank}.txt').read_text()}" for rank in self.alive)

    def end(self) -> tuple[list[int], dict[int, int]]:
        """Ends all. Returns the ranks that did not end by themselves, and the exit codes of those that were alive."""
        for rank in self.alive:
            with contextlib.suppress(BrokenPipeError):
                self.ranks.pipes[rank].send(("quit", None, None))
        deadline = time.monotonic() + 10.0
        left = []
        for rank, process in enumerate(self.ranks.processes):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                left.append(rank)
                process.kill()
                process.join()
            self.ranks.pipes[rank].close()
        return left, {rank: self.ranks.processes[rank].exitcode for rank in self.alive if rank not in left}

    def kill(self) -> None:
        for process, pipe in zip(self.ranks.processes, self.ranks.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


class Lane:
    """Faults of one transport and one schedule, one after the other."""

    def __init__(self, lane: tuple[str, str], faults: Sequence[Fault], found: Found, port: int, folder: Path) -> None:
        self.lane, self.faults, self.found, self.port, self.folder = lane, faults, found, port, folder
        self.groups = self.saves = 0
        self.fault: Fault | None = None
        self.group: Any = None  # a Group while there is one
        self.bare: dict[int, dict[str, Any]] = {}  # what ranks hold without an engine, and with one
        self.held: dict[int, dict[str, Any]] = {}
        self.saved = folder / "checkpoints"
        self.saved.mkdir(parents=True)

    def defect(self, column: str, text: str) -> None:
        self.found.defect(column, self.fault, self.lane, text)

    def run(self, until: float) -> None:
        for fault in self.faults:
            if time.monotonic() > until:
                break
            began = time.monotonic()
            try:
                if self.group is None:
                    self.start()
                self.fault = fault
                self.inject(fault)
            except Hang as hang:
                self.defect("hangs", f"{hang}\n{self.group.stacks() if self.group else ''}")
                self.drop()
            except AssertionError as error:
                self.defect("not recovered", str(error))
                self.drop()
            self.found.add("injected", fault, self.lane)
            self.found.add("seconds", fault, self.lane, time.monotonic() - began)
        self.finish()

    def drop(self) -> None:
        if self.group is not None:
            self.group.kill()
        self.group = None

    def finish(self) -> None:
        """What the last fault left; a group is started for that, if need be."""
        try:
            if self.group is None:
                self.start()
            self.leave()
        except (Hang, AssertionError) as error:
            self.defect("hangs", str(error))
            self.drop()

    # -- a group

    def start(self) -> None:
        """A group that has done everything once, so that what it holds is known."""
        self.groups += 1
        self.fault = None
        self.group = Group(self.lane, self.port, f"{self.lane} {self.groups}", self.folder)
        self.recover("make")
        self.recover()
        self.recover("eval")
        self.load()
        self.save()
        self.load()
        self.recover("close")
        self.bare = self.counts()
        self.recover("make")
        self.recover()
        self.held = self.counts()

    def leave(self) -> None:
        """Ends a group, or what a fault has left of it, and looks at what stays behind."""
        self.group.tell("close")
        self.compare("after close", self.counts(), self.bare)
        left, codes = self.group.end()
        if left:
            self.defect("leftovers", f"the processes of ranks {left} do not end")
        if any(codes.values()):
            self.defect("aborts", f"exit codes {codes}")
        self.group = None

    def counts(self) -> dict[int, dict[str, Any]]:
        return {rank: outcome.value for rank, outcome in self.group.tell("counts").items()}

    def compare(self, when: str, now: dict[int, dict[str, Any]], before: dict[int, dict[str, Any]]) -> None:
        for rank, counts in now.items():
            more = [name for name in ("descriptors", "threads", "mappings") if counts[name] > before[rank][name]]
            was = before[rank]
            files = sorted(set(counts["names"]) - set(was["names"]))  # torch makes a folder that is empty
            if more or files:
                kinds = {k: (was["kinds"].get(k, 0), n) for k, n in counts["kinds"].items() if was["kinds"].get(k) != n}
                text = ", ".join(f"{name} {was[name]} -> {counts[name]}" for name in more)
                self.defect("leftovers", f"{when}, rank {rank}: {text}; {kinds}; temporary files {files}")

    # -- commands that must work

    def recover(self, command: str = "step", argument: Any = 0) -> None:
        """Until it ends well on all ranks at once, with the whole model's numbers."""
        outcomes: dict[int, Outcome] = {}
        for _ in range(ATTEMPTS):
            outcomes = self.group.tell(command, None, argument)
            assert len(outcomes) == P, f"{command}: only {sorted(outcomes)} are alive"
            self.judge_values(outcomes)
            if not any(outcome.error for outcome in outcomes.values()):
                return
            if self.fault is not None and command in ("step", "eval", "make"):
                self.judge_errors(outcomes, set(), allowed=0.0 if self.fault.kind == "left well" else TIMEOUT)
        raise AssertionError(f"{command} fails {ATTEMPTS} times: {outcomes}")

    def save(self) -> None:
        self.saves += 1
        self.recover("save", str(self.saved / str(self.saves)))

    def complete(self) -> list[Path]:
        """Complete checkpoints, the newest first."""
        folders = [path for path in self.saved.iterdir() if (path / ".metadata").exists()]
        return sorted(folders, key=lambda path: -int(path.name))

    def load(self) -> None:
        """The newest complete checkpoint."""
        complete = self.complete()
        for old in complete[2:]:
            shutil.rmtree(old)
        if not complete:
            return
        outcomes = self.group.tell("load", None, str(complete[0]))
        bad = {rank: o.error or o.wrong for rank, o in outcomes.items() if o.error or o.wrong}
        if bad:
            self.defect("checkpoints", f"{complete[0].name} does not load: {bad}")

    # -- a fault

    def inject(self, fault: Fault) -> None:
        self.saves += 1
        command = {"between": "step"}.get(fault.place, fault.place)
        argument = str(self.saved / str(self.saves)) if command == "save" else fault.batch
        outcomes = self.group.tell(command, fault, argument)
        dead = set(range(P)) - self.group.alive
        assert dead <= ({fault.rank} if fault.kind == "kill" else set()), f"ranks {dead} have died: {outcomes}"
        if any(outcome.missed for outcome in outcomes.values()):
            self.found.add("missed", fault, self.lane)
        self.judge_values(outcomes)
        if command != "save":  # torch's own collectives say there what failed
            self.judge_errors(outcomes, {fault.rank}, self.group.trapped_at)
        if fault.kind == "kill":
            self.after_death(fault)
            return
        if fault.place == "make":
            self.recover("make")
        self.recover("step", (fault.batch + 1) % len(LENGTHS))
        if fault.place == "save":
            self.save()
        self.load()
        self.compare("after the fault", self.counts(), self.held)

    def after_death(self, fault: Fault) -> None:
        """Survivors cannot go on, hear why, and leave nothing."""
        if fault.rank in self.group.alive:  # it was killed after its command had ended
            self.group.ranks.processes[fault.rank].join(5.0)
        self.group.alive.discard(fault.rank)
        if fault.place != "make":
            outcomes = self.group.tell("step", None, 0)
            for rank, outcome in outcomes.items():
                if not outcome.error:
                    self.defect("wrong", f"rank {rank} ends a step without rank {fault.rank}")
            self.judge_errors(outcomes, set())
        self.leave()

    # -- judgement

    def judge_values(self, outcomes: dict[int, Outcome]) -> None:
        """A result that all ranks accept is the whole model's."""
        wrong = {rank: outcome.wrong for rank, outcome in outcomes.items() if outcome.wrong}
        if wrong and len(outcomes) == P and not any(outcome.error for outcome in outcomes.values()):
            self.defect("wrong", f"{wrong}")

    def judge_errors(
        self,
        outcomes: dict[int, Outcome],
        faulty: set[int],
        trapped_at: float | None = None,
        allowed: float = TIMEOUT,
    ) -> None:
        """Errors of survivors name a rank, and come in time: within the time-outs that are allowed, and a while."""
        began = max((outcome.began for outcome in outcomes.values()), default=0.0)
        for rank, outcome in outcomes.items():
            if not outcome.error or rank in faulty:
                continue
            if outcome.named is None and not re.search(PLACE, outcome.error):
                self.defect("errors", f"rank {rank} is told of no rank: {outcome.error}")
            late = outcome.ended - max(began, trapped_at or 0.0) - allowed - GRACE
            if late > 0:
                self.defect("errors", f"rank {rank} hears it {late:.1f} s too late: {outcome.error}")


def begin_server() -> None:
    """The server of forks, which imports torch; its children's system calls can be made to fail."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "failing_calls.so"
        source = Path(__file__).with_name("failing_calls.c")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True
        )
        context.set_forkserver_preload(["fault_ranks", "torch.distributed.fsdp"])
        os.environ["LD_PRELOAD"] = str(library)
        try:
            with PipedProcesses(1, nothing):
                pass
        finally:
            del os.environ["LD_PRELOAD"]


def nothing(rank: int, pipe: Any) -> None:
    return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no fault after so long")
    parser.add_argument("--results", default=str(Path(__file__).parents[2] / "benchmarks" / "results" / "faults.txt"))
    options = parser.parse_args()
    begin_server()
    names_before = shared_memory_names()
    launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = Found()
    began = time.monotonic()
    until = began + 60.0 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        lanes = [
            Lane(lane, faults, found, launchers.port, Path(folder) / str(i))
            for i, (lane, faults) in enumerate(zip(LANES, plan(options.faults, options.seed), strict=True))
        ]
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(Lane.run, lanes, [until] * len(lanes)))
    names = shared_memory_names() - names_before
    if names:
        found.defect("leftovers", None, ("shm", ""), f"names of shared memory: {sorted(names)}")
    injected, missed = (found.total()[column] for column in ("injected", "missed"))
    summary = (
        f"{injected} of {options.faults} faults, {missed} of them missed, {time.monotonic() - began:.0f} s, "
        f"{len(found.lines)} defects"
    )
    text = "\n".join([header("Faults"), "", found.table(), summary, *found.lines])
    Path(options.results).write_text(text + "\n")
    print(f"{found.table()}\n{summary}")
    return 1 if found.lines or not injected else 0


if __name__ == "__main__":
    sys.exit(main())
