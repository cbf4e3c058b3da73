"""Does a run that torchrun restarts end as if nothing had happened? Ranks of examples/train_gpt.py are killed.

In each run ranks drawn by seed get SIGKILL, every other one at a moment of its start, the others shortly after a step:
so also while the text is tokenised, while a pipeline is made, in a step, and while a checkpoint is written. What must
hold: the run ends by itself, with the losses of a run that nobody disturbed, bit for bit.

    python benchmarks/restarts.py --runs 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import header

ROOT = Path(__file__).parents[1]
RANKS, STEPS = 2, 24
MOST_KILLS = 2  # in a run; torchrun may restart three times
ARGUMENTS = f"""--steps {STEPS} --save-every 5 --eval-every 10 --eval-batches 2 --seq-len 96 --hidden 32 --layers 3
    --heads 4 --kv-heads 2 --ffn 64 --vocab 320 --microbatches 3 --batch 6 --segments 3 --lr 0.003
    --max-bytes 200000 --resume""".split()


def start(folder: Path) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, "--max-restarts", "3", str(ROOT / "examples/train_gpt.py"), *ARGUMENTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of the ranks that are there."""
    found = {}
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text(encoding="utf-8").split():
            with contextlib.suppress(OSError):
                variables = dict(
                    v.partition("=")[::2]
                    for v in Path(f"/proc/{child}/environ").read_text(encoding="utf-8").split("\0")
                )
                if "RANK" in variables:
                    found[int(variables["RANK"])] = int(child)
    return found


def rows(folder: Path) -> list[float]:
    file = folder / "runs/gpt/log.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def disturb(folder: Path, moments: list[tuple[int, float]], draw: random.Random) -> tuple[int, float, list[str]]:
    """Exit code and seconds of a run, and whom it lost.

    Args:
        moments: a rank is killed once so many steps are in the log, and so many seconds have passed.
    """
    process, began, lost = start(folder), time.monotonic(), []
    log = folder / "runs/gpt/log.jsonl"

    def steps() -> int:
        return log.read_text(encoding="utf-8").count("\n") if log.exists() else 0

    for least, seconds in moments:
        while process.poll() is None and (len(there := ranks_of(process.pid)) < RANKS or steps() < least):
            time.sleep(0.001)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.poll() is not None:
            break
        rank, pid = draw.choice(sorted(there.items()))
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            lost.append(f"rank {rank} after step {steps()}, {time.monotonic() - began:.1f} s")
        while set(ranks_of(process.pid).values()) & set(there.values()) and process.poll() is None:
            time.sleep(0.01)
    code = process.wait()
    return code, time.monotonic() - began, lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    draw = random.Random(0)
    print(header("Runs of examples/train_gpt.py whose ranks are killed at random"))
    with tempfile.TemporaryDirectory() as name:
        (whole := Path(name) / "whole").mkdir()
        process, began = start(whole), time.monotonic()
        process.wait()
        took = time.monotonic() - began
        wanted = rows(whole)
        assert process.returncode == 0 and len(wanted) == STEPS, (whole / "output").read_text(encoding="utf-8")[-3000:]
        print(f"\nundisturbed: {took:.0f} s, loss {wanted[0]:.4f} to {wanted[-1]:.4f}\n")
        print(f"{'run':>3} {'seconds':>7} {'losses':>7}  killed")
        well = 0
        for run in range(options.runs):
            (folder := Path(name) / f"{run}").mkdir()
            count = draw.randint(1, MOST_KILLS)
            kinds = [(0, draw.uniform(0.0, 0.6 * took)), (draw.randrange(1, STEPS + 1), draw.uniform(0.0, 0.2))]
            moments = [kinds[(run + nth) % 2] for nth in range(count)]
            code, seconds, lost = disturb(folder, moments, draw)
            same = code == 0 and rows(folder) == wanted
            well += same
            print(f"{run + 1:3} {seconds:7.0f} {'equal' if same else 'DIFFER':>7}  {'; '.join(lost)}", flush=True)
            if not same:
                sys.stderr.write((folder / "output").read_text(encoding="utf-8")[-5000:])
        print(f"\n{well} of {options.runs} runs ended with the losses of the undisturbed one, bit for bit")
    raise SystemExit(0 if well == options.runs else 1)


if __name__ == "__main__":
    main()
