"""Scripts run as ``python SCRIPT ARGUMENTS`` would run them, but forked from a process that has imported torch already.

Importing what an example needs takes longer than what it does in a test.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import context

ROOT = Path(__file__).resolve().parents[2]


def environment(rank: int | None = None, num_ranks: int = 1, port: int = 0) -> dict[str, str]:
    """That of a plain process, or as torchrun would set it for a rank."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if rank is not None:
        variables |= {"RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}", "LOCAL_RANK": f"{rank}"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    return variables


def free_port() -> int:
    """Not of those that the kernel gives out: another process would be given it before rank 0 listens there."""
    given_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, max(given_out, 20_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(script: Path, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], written: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{written}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # lines come as on a terminal
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path[:0] = [str(script.parent), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    runpy.run_path(str(script), run_name="__main__")


class Script:
    """A process that runs the script.

    Args:
        folder: where it runs. variables: its whole environment. beside: writes into the same texts as this one.
    """

    def __init__(
        self,
        script: Path,
        arguments: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        beside: Script | None = None,
    ) -> None:
        self._written = beside._written if beside else tempfile.TemporaryDirectory()
        self._process = context.Process(target=_run, args=(script, arguments, folder, variables, self._written.name))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, once there is one; minus the signal that ended it."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def finish(self, timeout: float = 200.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; a script that takes longer is killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        assert self._process.exitcode is not None
        out, err = (Path(self._written.name, name).read_text() for name in ("out", "err"))
        return self._process.exitcode, out, err


def start_ranks(num_ranks: int, script: Path, arguments: Sequence[str], folder: Path) -> list[Script]:
    """Starts the script on every rank, as torchrun would. They write into one text, each line when it comes."""
    port = free_port()
    started: list[Script] = []
    for rank in range(num_ranks):
        variables = environment(rank, num_ranks, port)
        started.append(Script(script, arguments, folder, variables, started[0] if started else None))
    return started
