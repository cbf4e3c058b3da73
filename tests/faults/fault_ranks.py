"""One rank of a pipeline into which faults are injected: it does what the harness says, and tells what came of it."""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny_model import batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor
from traps import CONFIG, K, M, P, Trapped, trap_weights

import seq1f1b
from seq1f1b import Limits, PipelineEngine
from seq1f1b.transport import descriptors
from seq1f1b.transport.meeting import Meeting

LENGTHS = (8, 12, 8)  # of the batches
TIMEOUT = 1.5
SLEEP = TIMEOUT + 1.0  # of a rank that is stopped
# Calls that failing_calls.c can make fail, with their numbers there, and the errors that they may give.
CALLS = {"mmap": 1, "memfd_create": 2, "socket": 4, "pthread_create": 8, "open": 16, "write": 32}
ERRORS = {"mmap": "ENOMEM", "memfd_create": "EMFILE", "socket": "EMFILE", "pthread_create": "EAGAIN"}
MEMORY, GATHER = descriptors.memory, Meeting.gather
ROUNDS = 3  # of a meeting
CALLS_OF = {
    "make": ("mmap", "memfd_create", "socket", "pthread_create", "open"),
    "step": ("mmap", "open"),
    "eval": ("mmap", "open"),
    "save": ("open", "write", "write", "mmap"),
}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and where.

    Attributes:
        place: "step", "between" (before a step), "eval", "make" (set-up) or "save".
        unit: in which it happens, where the place has units.
        choice: a random number, of which a kind makes what it needs.
    """

    kind: str
    place: str
    rank: int
    unit: str
    batch: int
    choice: int


@dataclass
class Outcome:
    """How a command ended on one rank. Times are of the machine's monotonic clock.

    Attributes:
        error: "" or the error's kind and text. named: the rank that the error gives, as an attribute.
        wrong: "" or in what the result differs from the whole model's.
        missed: True: the fault found nothing to happen to, as a call that was to fail was not made.
    """

    began: float
    ended: float = 0.0
    error: str = ""
    named: int | None = None
    wrong: str = ""
    value: Any = None
    missed: bool = False


class TrappedWriter(dcp.FileSystemWriter):
    """Writes a checkpoint, and calls ``trap`` first."""

    def __init__(self, folder: str, trap: Callable[[], None]) -> None:
        super().__init__(folder, sync_files=False)
        self._trap = trap

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._trap()
        return super().write_data(plan, planner)


class Rank:
    """A process of the group. Every method ``do_...`` is a command of the harness."""

    def __init__(self, rank: int, pipe: Connection, **options: str) -> None:
        self.rank, self.pipe, self.options = rank, pipe, options
        self.engine: Any = None  # a PipelineEngine, between make and close
        self.batches = [batch(CONFIG, M, length, size=1, seed=i + 1) for i, length in enumerate(LENGTHS)]
        self.truth = [run_whole(whole_model(CONFIG), tokens, target, M) for tokens, target in self.batches]
        self.base = stage_of(whole_model(CONFIG), CONFIG, rank, P).state_dict()
        self._interruptible = self._struck = False
        self._striking: threading.Thread | None = None
        self._changed_relays: list[Any] = []

    def interrupt(self, *_: Any) -> None:
        if self._interruptible:  # else the signal has come too late for what it was to interrupt
            self._struck = True
            raise KeyboardInterrupt

    def run(self, command: str, fault: Fault | None, argument: Any) -> Outcome:
        mine = fault if fault is not None and fault.rank == self.rank else None
        result = Outcome(began=time.monotonic())
        self._struck, self._striking = False, None
        try:
            self._interruptible = True
            try:
                result.value = getattr(self, f"do_{command}")(mine, argument, result)
            finally:
                self._interruptible = False
        except BaseException as error:
            if command in ("step", "eval"):  # told already, unless the error came before the engine's step
                self.engine.fail(f"{type(error).__name__}: {error}")
            result.error = f"{type(error).__name__}: {error}"
            result.named = getattr(error, "rank", None)
        result.ended = time.monotonic()
        if mine is not None:
            result.missed = self.heal(mine)
        return result

    def heal(self, fault: Fault) -> bool:
        """Takes the trap away. Returns whether the fault has found nothing to happen to."""
        if self.engine is not None:
            self.stage.at = ""
            for relay in self._changed_relays:
                del relay.send
            self._changed_relays.clear()
        if fault.kind == "call fails":
            return not ctypes.CDLL(None).failing_calls_disarm()
        if self._striking is not None and fault.kind == "interrupt":
            self._striking.join()  # else it would interrupt the next command
        return not self._struck and fault.kind in ("interrupt", "slow set-up")

    # -- faults

    def strike(self, fault: Fault) -> None:
        """Tells the harness, and does it."""
        self.pipe.send(("trap", time.monotonic()))
        if fault.kind == "left well":
            time.sleep(0.2)  # so long the others have nothing left to do in this step
        if fault.kind in ("module raises", "hook raises", "raises", "left well"):
            raise ValueError("injected")
        if fault.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # the interrupt ends it
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def change_relay(self, fault: Fault) -> None:
        """One of the messages that this rank sends over the process group will be lost or late."""
        relays = [relay for relay in self.engine._group._relays.values() if not relay._is_receiver]
        relay = relays[fault.choice % len(relays)]
        lost, send = fault.choice % (M * K), relay.send

        def send_wrongly(sequence: int, place: int, payload_bytes: int) -> None:
            if sequence == lost:
                self.pipe.send(("trap", time.monotonic()))
                if fault.kind == "message lost":
                    return
                time.sleep(TIMEOUT / 3)
            send(sequence, place, payload_bytes)

        relay.send = send_wrongly
        self._changed_relays.append(relay)

    def make_a_call_fail(self, fault: Fault) -> None:
        """One of the next of its kind that Python or the extension make."""
        calls = CALLS_OF[fault.place]
        call = calls[fault.choice % len(calls)]
        error = ERRORS.get(call) or ("EIO" if fault.choice % 2 else "ENOSPC" if call == "write" else "EMFILE")
        number = fault.choice // 7 % (2 if fault.place in ("step", "eval") else 6)  # a step makes few calls
        ctypes.CDLL(None).failing_calls_arm(
            ctypes.c_int(CALLS[call]), ctypes.c_long(number), ctypes.c_int(getattr(errno, error))
        )

    def slow_down(self, fault: Fault) -> None:
        """One of the next memories that this rank makes for the pipeline takes long, as on a machine that swaps."""
        left = [fault.choice % 5]

        def memory(size: int) -> descriptors.Descriptor:
            left[0] -= 1
            if left[0] == -1:
                self.pipe.send(("trap", time.monotonic()))
                time.sleep(TIMEOUT * (0.6 + fault.choice % 7 * 0.2))
                self._struck = True
            return MEMORY(size)

        descriptors.memory = memory

    def strike_in_a_round(self, fault: Fault) -> None:
        """Strikes as this rank comes to one of the rounds of its meeting."""

        def gather(meeting: Meeting, value: Any) -> list[Any]:
            if meeting._round == fault.choice % ROUNDS:
                self.strike(fault)
            return GATHER(meeting, value)

        Meeting.gather = gather  # type: ignore[method-assign]  # put back by do_make

    def strike_soon(self, fault: Fault) -> None:
        """Strikes from another thread a few milliseconds later, whatever this rank does then."""

        def later() -> None:
            time.sleep(fault.choice % 1000 * 2e-5)
            if fault.kind == "interrupt":
                self.pipe.send(("trap", time.monotonic()))
                os.kill(os.getpid(), signal.SIGINT)
            else:
                self.strike(fault)

        self._striking = threading.Thread(target=later, daemon=True)
        self._striking.start()

    def arm(self, fault: Fault) -> None:
        """Sets the trap in a unit of the stage or of its loss."""
        if fault.kind == "call fails":
            self.make_a_call_fail(fault)
        elif fault.kind in ("message lost", "message late"):
            self.change_relay(fault)
        elif fault.unit == "any":
            self.strike_soon(fault)
        else:
            self.stage.at = fault.unit
            self.stage.trap = lambda: self.strike(fault)

    # -- commands

    def do_make(self, mine: Fault | None, _: Any, __: Outcome) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
        self.state = {}
        gc.collect()
        self.stage = Trapped(self.rank)
        counts: dict[str, Any] = {"num_microbatches": M, "num_segments": K, "limits": Limits(TIMEOUT, TIMEOUT)}
        if mine is not None and mine.kind == "call fails":
            self.make_a_call_fail(mine)
        elif mine is not None and mine.kind == "slow set-up":
            self.slow_down(mine)
        elif mine is not None and (mine.kind == "raises" or mine.unit[-1] == "0"):
            self.strike_in_a_round(mine)
        elif mine is not None:
            self.strike_soon(mine)
        try:
            self.engine = PipelineEngine(self.stage, loss_fn=cross_entropy, **counts, **self.options)
        finally:
            descriptors.memory, Meeting.gather = MEMORY, GATHER  # type: ignore[method-assign]  # as they were
        trap_weights(self.engine, self.stage)
        # Made here: a rank that fails between a collective of the engine and one of torch would leave the others alone.
        self.optimizer = torch.optim.SGD(self.engine.parameters(), lr=0.0, momentum=0.9)
        self.state = {"train": seq1f1b.PipelineState(self.engine, self.optimizer)}

    def do_step(self, mine: Fault | None, which: int, result: Outcome) -> None:
        tokens, target = self.batches[which]
        self.stage.calls = 0
        self.stage.zero_grad()
        if mine is not None and mine.kind == "evaluates":
            self.engine.eval(tokens, target=target)
            result.wrong = "it evaluated while others trained"
            return
        if mine is not None and mine.kind == "other length":
            tokens, target = batch(CONFIG, M, LENGTHS[which] + 1 + mine.choice % 4, size=1)
        elif mine is not None and mine.place == "between":
            self.strike(mine)
        elif mine is not None:
            self.arm(mine)
        losses = self.engine.step(tokens, target=target)
        result.wrong = self._difference(which, losses)

    def _difference(self, which: int, losses: Any) -> str:
        true_losses, true_gradients = self.truth[which]
        found = {name.removeprefix("stage."): p.grad for name, p in self.engine.named_parameters()}
        missing = [name for name, gradient in found.items() if gradient is None]
        if missing:
            return f"no gradient of {missing[0]}"
        error = gradient_error(found, {name: true_gradients[name] for name in found})
        if not error <= 1e-10:
            return f"gradients differ by {error:.1e}"
        return self._loss_difference(true_losses, losses)

    def _loss_difference(self, truth: list[Tensor], losses: Any) -> str:
        if self.rank < P - 1:
            return ""
        error = max(abs(float(loss - true)) for loss, true in zip(losses, truth, strict=True))
        return "" if error <= 1e-10 else f"losses differ by {error:.1e}"

    def do_eval(self, mine: Fault | None, which: int, result: Outcome) -> None:
        tokens, target = self.batches[which]
        self.stage.calls = 0
        if mine is not None:
            self.arm(mine)
        losses = self.engine.eval(tokens, target=target)
        result.wrong = self._loss_difference(self.truth[which][0], losses)

    def do_save(self, mine: Fault | None, folder: str, _: Outcome) -> None:
        try:
            self.optimizer.param_groups[0]["lr"] = float(Path(folder).name)
            dcp.save(self.state, storage_writer=TrappedWriter(folder, lambda: self._trap_in_saving(mine)))
        except BaseException as error:
            self.engine.fail(f"{type(error).__name__} in saving a checkpoint")
            raise

    def _trap_in_saving(self, mine: Fault | None) -> None:
        if mine is not None and mine.kind == "call fails":
            self.make_a_call_fail(mine)
        elif mine is not None:
            self.strike(mine)

    def do_load(self, _: Fault | None, folder: str, result: Outcome) -> None:
        """Into zeros; afterwards the parameters are what they were, whatever happens."""
        parameters = dict(self.stage.stage.state_dict())
        try:
            for parameter in parameters.values():
                parameter.zero_()
            self.optimizer.param_groups[0]["lr"] = 0.0
            dcp.load(self.state, checkpoint_id=folder)
            if any(not torch.equal(parameters[name], value) for name, value in self.base.items()):
                result.wrong = "the checkpoint's parameters are not those that were saved"
            if self.optimizer.param_groups[0]["lr"] != float(Path(folder).name):
                result.wrong = "the checkpoint's optimizer is not what was saved"
        finally:
            self.stage.stage.load_state_dict(self.base)

    def do_counts(self, _: Fault | None, __: Any, ___: Outcome) -> dict[str, Any]:
        """Descriptors by what they are, threads, and mappings of the pipeline's shared memory."""
        gc.collect()
        paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        links = [os.readlink(path) for path in paths if os.path.islink(path)]  # the folder itself is closed by now
        kinds = [link.split(":")[0].split("_")[0] for link in links]
        mapped = Path("/proc/self/maps").read_text().count("memfd:seq1f1b")
        return {
            "descriptors": len(kinds),
            "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": mapped,
            "names": os.listdir(tempfile.gettempdir()),
        }

    def do_close(self, _: Fault | None, __: Any, ___: Outcome) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None
        self.state = {}
        gc.collect()


def serve(rank: int, pipe: Connection, port: int, run: str, lane: tuple[str, str], folder: Path) -> None:
    """Runs in a process of its own until the harness, which holds the store at the port, says "quit", or is gone."""
    torch.set_num_threads(1)
    own = folder / f"temporary-{rank}"
    own.mkdir(exist_ok=True)
    tempfile.tempdir = str(own)
    stacks = open(folder / f"stacks-{rank}.txt", "a")  # noqa: SIM115 - for the whole life
    faulthandler.register(signal.SIGUSR1, file=stacks)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.CRITICAL)  # of checkpoints that are torn
    here = Rank(rank, pipe, transport=lane[0], schedule=lane[1])
    signal.signal(signal.SIGINT, here.interrupt)
    store = dist.PrefixStore(run, dist.TCPStore("127.0.0.1", port, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=P)
    pipe.send(("done", Outcome(time.monotonic(), time.monotonic())))
    while True:
        try:
            command, fault, argument = pipe.recv()
        except EOFError:
            return
        if command == "quit":
            dist.destroy_process_group()
            return
        pipe.send(("done", here.run(command, fault, argument)))
