"""A pipeline under ``seq1f1b.launch``, in a process of its own: what comes of it once that one, or a rank, is ended.

    python tests/faults/launched.py FOLDER TRANSPORT SCHEDULE KIND PLACE RANK

runs one; the harness starts it, strikes, and reads what the ranks have left in the folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

RANKS, TIMEOUT = 3, 5.0  # longer than in a group that has begun: here four interpreters do
SIGNALS = {
    "launcher killed": signal.SIGKILL,
    "launcher terminated": signal.SIGTERM,
    "launcher interrupted": signal.SIGINT,
}
KINDS = (*SIGNALS, "grandchild")
MEETING = 8.0  # seconds that ranks have to come to the engine's construction
STARTS = 120.0  # seconds in which all ranks begin, on a busy machine; stacks are written shortly before
ENDS = 15.0  # seconds in which the launching process ends after a fault: launch gives ranks ten of them


class Heard(NamedTuple):
    """How one rank ended. Times are of the machine's monotonic clock."""

    struck: float
    at: float
    error: str
    named: int | None


def train(folder: str, transport: str, schedule: str, kind: str, place: str, faulty: int) -> None:
    """What a rank does: it makes an engine and steps until something ends it."""
    import torch.distributed as dist
    from fault_ranks import CONFIG, K, M, batches
    from tiny_model import cross_entropy, stage_of, whole_model

    from seq1f1b import Limits, PipelineEngine

    rank = dist.get_rank()
    faulthandler.dump_traceback_later(STARTS - 10.0, file=(Path(folder) / f"stacks-{rank}").open("w"))
    say(folder, f"pid-{rank}", os.getpid())
    strikes = kind == "grandchild" and rank == faulty
    try:
        if strikes and place == "make":
            leave_a_child(folder)
        stage, limits = stage_of(whole_model(CONFIG), CONFIG, rank, RANKS), Limits(TIMEOUT, MEETING)
        options: dict[str, Any] = {"transport": transport, "schedule": schedule, "limits": limits}
        engine = PipelineEngine(stage, num_microbatches=M, num_segments=K, loss_fn=cross_entropy, **options)
        tokens, target = batches()[0]
        end = time.monotonic() + 2 * STARTS
        for number in range(1 << 30):
            if strikes and number == 3:
                leave_a_child(folder)
            engine.step(tokens, target=target)
            if number == 1:
                say(folder, f"steps-{rank}", number)
            assert time.monotonic() < end, "nothing has ended this rank"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        say(folder, f"heard-{rank}", [time.monotonic(), text, getattr(error, "rank", None)])
        raise


def leave_a_child(folder: str) -> None:
    """Ends this rank by SIGKILL, once a child of it holds all of its descriptors."""
    if os.fork() == 0:
        time.sleep(4 * STARTS)
        os._exit(0)
    say(folder, "struck", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def say(folder: str, name: str, value: Any) -> None:
    part = Path(folder) / f"{name}.part"
    part.write_text(json.dumps(value))
    part.rename(Path(folder) / name)


def processes_of(folder: Path) -> dict[int, str]:
    """Processes that live, and have the folder among their environment: ranks, and what they have started."""
    mark, found = f"FAULT_FOLDER={folder}".encode(), {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:80]
        except OSError:  # it has just ended, or is another user's
            continue
    return found


class Launched:
    """One pipeline under launch, and one fault of it."""

    def __init__(self, folder: Path, lane: tuple[str, str], kind: str, place: str, rank: int, forks: bool) -> None:
        self.folder, self.kind, self.place, self.rank = folder, kind, place, rank
        folder.mkdir()
        arguments = [str(folder), *lane, kind, place, str(rank)]
        # As in a notebook, whose ranks are forked; else as of a script, which every rank imports.
        command = ["-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); import launched; launched.main()"]
        self._process = subprocess.Popen(
            [sys.executable, *(command if forks else [str(HERE / "launched.py")]), *arguments],
            env={**os.environ, "FAULT_FOLDER": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(folder / "stderr").open("w"),
        )

    def run(self, delay_s: float) -> tuple[list[str], dict[int, Heard]]:
        """Strikes. Returns what is wrong, and what the ranks have heard that lived on."""
        try:
            if not self._has_begun():
                return [f"the ranks do not begin: {self._stderr()}{self._stacks()}"], {}
            struck = time.monotonic()
            if self.kind in SIGNALS:
                time.sleep(delay_s)
                struck = time.monotonic()
                self._process.send_signal(SIGNALS[self.kind])
            try:
                self._process.wait(ENDS)
            except subprocess.TimeoutExpired:
                return [f"the launching process has not ended after {ENDS} s: {processes_of(self.folder)}"], {}
            return self._judge(), self._heard(struck)
        finally:
            for pid in processes_of(self.folder):
                os.kill(pid, signal.SIGKILL)
            self._process.wait()

    def _has_begun(self) -> bool:
        """Waits until every rank is where the fault is to strike."""
        names = ["struck"] if self.kind == "grandchild" else []
        names = names or [f"{'pid' if self.place == 'make' else 'steps'}-{rank}" for rank in range(RANKS)]
        end = time.monotonic() + STARTS
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > end or (self._process.poll() is not None and self.kind in SIGNALS):
                return False
            time.sleep(0.02)
        return True

    def _judge(self) -> list[str]:
        found = []
        expected = 1 if self.kind == "grandchild" else -SIGNALS[self.kind]
        if self._process.returncode != expected:
            found.append(
                f"the launching process ends with {self._process.returncode}, not {expected}: {self._stderr()}"
            )
        if self.kind == "grandchild" and f"rank {self.rank} ended with exit code -9 (SIGKILL)" not in self._stderr():
            found.append(f"the launching process does not name the rank that was killed: {self._stderr()}")
        if "terminate called" in self._stderr() or "SIGABRT" in self._stderr():
            found.append(f"a rank aborts: {self._stderr()}")
        end = time.monotonic() + 2.0  # the kernel ends ranks after the process that launched them
        while (left := processes_of(self.folder)) and time.monotonic() < end:
            time.sleep(0.05)
        return [*found, f"these live on: {left}"] if left else found

    def _heard(self, struck: float) -> dict[int, Heard]:
        if self.kind == "grandchild":
            struck = json.loads((self.folder / "struck").read_text())
        files = {rank: self.folder / f"heard-{rank}" for rank in range(RANKS)}
        return {rank: Heard(struck, *json.loads(file.read_text())) for rank, file in files.items() if file.exists()}

    def _stacks(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(self.folder.glob("stacks-*")))

    def _stderr(self) -> str:
        return (self.folder / "stderr").read_text()[-2000:]


def main() -> None:
    import seq1f1b

    folder, transport, schedule, kind, place, rank = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    seq1f1b.launch(train, RANKS, folder, transport, schedule, kind, place, int(rank))


if __name__ == "__main__":
    main()
