"""Does `seq1f1b.launch` run ranks as processes, from a script and from a notebook, and raise what failed?"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slices import full_only

RANKS = """
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

import seq1f1b

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it


def helper():
    time.sleep(280)


def make_engine(transport="auto"):
    stage, loss_fn = torch.nn.Linear(4, 4), torch.nn.functional.mse_loss
    return seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=loss_fn, transport=transport)


def step(engine):
    return engine.step(torch.ones(2, 6, 4), target=torch.zeros(2, 6, 4))


def losses(group=None):  # as many zeros
    found = step(make_engine())
    return dist.get_rank(), torch.zeros_like(torch.stack(found)) if found else None


def explode():
    raise ValueError("on this rank alone")


def raises():
    engine = make_engine()
    step(engine)
    explode() if dist.get_rank() == 1 else step(engine)


def killed_with_a_helper():  # which holds all that the rank had open, and is ended too
    engine = make_engine()
    step(engine)
    if dist.get_rank() == 1:
        multiprocessing.get_context("fork").Process(target=helper, daemon=True).start()
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step(engine)
    except seq1f1b.PipelineError as error:
        with open(os.environ["HEARD"], "w") as file:
            file.write(str(error))
        raise


def leaves(code):
    if dist.get_rank() == 1:
        sys.exit(code)
    return "result"


def interrupted():
    if dist.get_rank() == 1:
        raise KeyboardInterrupt


def returns_a_function():
    return helper if dist.get_rank() == 0 else lambda: 0


def fails_second():
    if dist.get_rank() == 0:
        dist.barrier()  # ends by an error of gloo's, once rank 1 has left
    time.sleep(0.2)
    raise ZeroDivisionError("on rank 1 first")


def prints():
    rank = dist.get_rank()
    logging.basicConfig(format="%(message)s")
    for number in range(200):
        print(f"line {number} of {rank}")
    sys.stdout.write("50 %\\r")
    logging.warning("warned")
    os.write(1, b"by the descriptor\\n")
    subprocess.run(["echo", "by a process of its own"])
    sys.stdout.write("without an end")


def variables():
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR TORCHELASTIC_RESTART_COUNT"
    found = {name: os.environ[name] for name in names.split()}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return found, store.add("ranks", 1) in (1, 2), torch.get_num_threads()


def trains(folder, transport):  # writes its pid after the first step
    engine, rank, end = make_engine(transport), dist.get_rank(), time.monotonic() + 60
    while time.monotonic() < end:
        step(engine)
        if not os.path.exists(f"{folder}/{rank}"):
            with open(f"{folder}/part{rank}", "w") as file:
                file.write(str(os.getpid()))
            os.rename(file.name, f"{folder}/{rank}")


def told(fn, *arguments):
    began = time.monotonic()
    try:
        return seq1f1b.launch(fn, 2, *arguments)
    except BaseException as error:
        assert time.monotonic() - began < 140, "the helper was waited for"
        place = f"{error.__cause__}"
        where = ", in explode" if "rank 1:" in place and "in explode" in place else ""
        return f"{type(error).__name__}: {error}{where}"

"""

ANSWERS = """
for call in [(killed_with_a_helper,), (leaves, 0), (leaves, None), (leaves, 3), (leaves, "no data"), (interrupted,),
             (returns_a_function,), (fails_second,), (losses,), (raises,), (variables,)]:
    print(told(*call))
"""

SCRIPT = """
if __name__ == "__main__":
    for call in (raises,), (lambda: None,), (losses, seq1f1b.LoopbackGroup(1)):
        print(told(*call))
"""

ANSWERED = [
    "RuntimeError: rank 1 ended with exit code -9 (SIGKILL)",
    "['result', None]",
    "['result', None]",
    "RuntimeError: rank 1 ended with exit code 3, by sys.exit()",
    "RuntimeError: rank 1 ended with exit code 1, by sys.exit(): no data",
    "RuntimeError: rank 1 ended by KeyboardInterrupt",
    "RuntimeError: fn returned a function on rank 1, which cannot be sent to the launching process (",
    "ZeroDivisionError: on rank 1 first",
    "[(0, None), (1, tensor([0., 0.]",
    "ValueError: on this rank alone, in explode",
    "[({'RANK': '0', 'LOCAL_RANK': '0', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '2', 'GROUP_RANK': '0', "
    "'ROLE_RANK': '0', 'MASTER_ADDR': '127.0.0.1', 'TORCHELASTIC_RESTART_COUNT': '0'}, True, 1), ({'RANK': '1', ",
]

WAYS = {
    "main thread": "seq1f1b.launch(trains, 2, FOLDER, TRANSPORT)",
    "a notebook's thread": "threading.Thread(target=seq1f1b.launch, args=(trains, 2, FOLDER, TRANSPORT)).start()\n"
    "time.sleep(60)",
}


def run_python(*arguments: str) -> str:
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_notebook_trains() -> None:
    notebook = json.loads((Path(__file__).parents[2] / "examples/notebook.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    first, last = re.search(r"loss (\S+), after 30 steps (\S+)", run_python("-c", "\n".join(code))).groups()
    assert float(last) < float(first) / 2


def test_ranks_of_a_script_import_it_and_what_they_cannot_be_given_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS + SCRIPT)
    text = run_python(str(tmp_path / "train.py"))
    assert text.startswith("ValueError: on this rank alone, in explode\n")
    for part in ("define functions and classes at the top level", "copy engine.stages", "make engines in fn"):
        assert part in text


def test_ends_of_ranks_are_told_by_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a notebook, whose ranks are forked: of a script every one of 22 ranks would import torch."""
    monkeypatch.setenv("HEARD", str(tmp_path / "heard"))
    lines = run_python("-c", RANKS + ANSWERS).splitlines()
    assert len(lines) == len(ANSWERED), lines
    for line, begins in zip(lines, ANSWERED, strict=True):
        assert line.startswith(begins)
    assert (tmp_path / "heard").read_text().startswith("rank 1 is gone, last seen in "), "of the rank that was killed"


def test_what_ranks_print_carries_their_rank() -> None:
    code = RANKS + "seq1f1b.launch(prints, 2)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    for rank in (0, 1):
        mark = f"[rank {rank}] ".encode()
        lines = [line.removeprefix(mark) for line in re.split(b"[\r\n]", run.stdout) if line.startswith(mark)]
        assert lines[:200] == [f"line {number} of {rank}".encode() for number in range(200)]
        assert lines[200:] == [b"50 %", b"by the descriptor", b"by a process of its own", b"without an end"]
        assert mark + b"warned\n" in run.stderr
    assert run.stdout.count(b"\n") == 2 * 203


def test_a_script_without_its_main_guard_is_one_error_that_names_it(tmp_path: Path) -> None:
    """A launch of one rank: the second one would import torch to say nothing, too."""
    (tmp_path / "bare.py").write_text("import seq1f1b\ndef train(): print('trained')\nseq1f1b.launch(train, 1)\n")
    run = subprocess.run([sys.executable, str(tmp_path / "bare.py")], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "trained" not in run.stdout
    assert run.stderr.count("Traceback (most recent call last)") == 1  # nothing of the ranks
    assert run.stderr.rstrip().endswith('under if __name__ == "__main__":')


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("kind", "way", "number"),
    [
        ("script", "main thread", signal.SIGKILL),
        ("notebook", "main thread", signal.SIGINT),
        ("notebook", "main thread", signal.SIGTERM),
        ("notebook", "a notebook's thread", signal.SIGTERM),
        *full_only(
            ("script", "main thread", signal.SIGTERM),
            ("script", "main thread", signal.SIGINT),
            ("script", "a notebook's thread", signal.SIGKILL),
            ("notebook", "main thread", signal.SIGKILL),
        ),
    ],
)
def test_ranks_end_with_the_process_that_launched_them(
    kind: str, way: str, number: signal.Signals, tmp_path: Path
) -> None:
    """In the middle of steps; nobody aborts."""
    transport = "c10d" if number == signal.SIGTERM else "auto"
    call = WAYS[way].replace("FOLDER", repr(str(tmp_path))).replace("TRANSPORT", repr(transport))
    if kind == "script":
        call = "if __name__ == '__main__':\n    " + call.replace("\n", "\n    ")
    (tmp_path / "train.py").write_text(RANKS + call)
    arguments = ["-c", RANKS + call] if kind == "notebook" else [str(tmp_path / "train.py")]
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE)
    files = [tmp_path / str(rank) for rank in range(2)]
    end = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    pids = [int(file.read_text()) for file in files]
    try:
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert b"terminate called" not in said and b"SIGABRT" not in said, said
        end = time.monotonic() + 5
        while any(map(is_alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
        if way == "main thread":
            assert process.returncode == -number
    finally:
        process.kill()
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
