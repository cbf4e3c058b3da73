"""Scripts run as ``python SCRIPT ARGUMENTS`` would run them, but forked from a process that has imported torch already.

Importing what an example needs takes longer than what it does in a test.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import context


def _run(script: Path, arguments: Sequence[str], folder: Path, variables: Mapping[str, str], written: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{written}/{name}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


class Script:
    """A process that runs the script.

    Args:
        folder: where it runs. variables: its whole environment.
    """

    def __init__(self, script: Path, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._written = tempfile.TemporaryDirectory()
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
