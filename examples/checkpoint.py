"""Checkpoints of a pipeline that any number of ranks can read, written so that a crash never leaves a broken one.

A checkpoint is one folder of torch.distributed.checkpoint (DCP), of what ``seq1f1b.PipelineState`` names: every rank
adds its own stage under the parameter names of the unsplit model, and its share of the optimizer's state under the same
names, so a reader asks for what it needs and never learns how the model was cut. ``run.json`` beside it holds step,
arguments, and the size and checksum of every file. The folder is written as ``.unfinished``, synced, then renamed: one
that has its final name is complete.
"""

import errno
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from seq1f1b import PipelineState

KEPT = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the remedy."""


def save(folder: Path, state: PipelineState, *, step: int, run: Mapping[str, Any]) -> Path:
    """Writes ``folder/step-<step>``; every rank calls it. Keeps the last two."""
    rank = ranks.rank()
    unfinished, final = folder / ".unfinished", folder / f"step-{step:06d}"
    values: dict[str, Any] = {}
    free = 0  # bytes, before anything is written

    def begin() -> None:
        nonlocal free
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            free = shutil.disk_usage(folder).free

    def write() -> None:
        values.update(state.state_dict())
        _dcp(dcp.save, {**values, f"rng.{rank}": torch.get_rng_state()}, unfinished)

    def finish() -> None:
        if rank == 0:
            files = {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(unfinished.iterdir())}
            manifest = {"step": step, "num_ranks": ranks.num_ranks(), "run": dict(run), "files": files}
            with open(unfinished / "run.json", "w", encoding="utf-8") as out:
                json.dump(manifest, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            _sync(unfinished)
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            _sync(folder)

    for action in (begin, write, finish):
        errors = [error for error in ranks.gather(_failure(action)) if error]
        if errors:
            needed, free = _num_bytes(values), ranks.gather(free)[0]  # of rank 0
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            kept = newest(folder)
            reason = next((error for error in errors if any(f"[Errno {number}]" in error for number in NO_ROOM)), None)
            raise CheckpointError(
                f"cannot write checkpoint {final}: "
                + (
                    f"saving to {folder} needs about {_gib(needed)}, {_gib(free)} were free ({reason})"
                    if reason
                    else errors[0]
                )
                + ". Make room or choose another --out. Earlier checkpoint: "
                + (f"{kept}, intact, --resume goes on from it" if kept else "none")
            )
    if rank == 0:
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load(checkpoint: Path, state: PipelineState | Mapping[str, Tensor]) -> None:
    """Fills `state`, this rank's part, from a checkpoint that any number of ranks wrote; every rank calls it.

    The random state is restored where as many ranks as wrote it go on.
    """
    wanted = dict(state if isinstance(state, Mapping) else state.state_dict())
    random = torch.get_rng_state()
    if read_manifest(checkpoint)["num_ranks"] == ranks.num_ranks():
        wanted[f"rng.{ranks.rank()}"] = random

    def read() -> None:
        _dcp(dcp.load, wanted, checkpoint)
        if isinstance(state, PipelineState):
            state.load_state_dict(wanted)

    errors = [error for error in ranks.gather(_failure(read)) if error]
    if errors:
        raise CheckpointError(f"cannot read checkpoint {checkpoint}: {errors[0]}")
    torch.set_rng_state(random)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of a folder whose files are whole; a damaged one is passed over with a warning."""
    for checkpoint in sorted(folder.glob("step-*"), reverse=True):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            warnings.warn(f"{error}", stacklevel=2)
        else:
            return checkpoint
    return None


def verify(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError naming the file that is missing, truncated or changed."""
    manifest = read_manifest(checkpoint)
    remedy = f"delete {checkpoint} and resume from an earlier one (--resume finds it)"
    for name, (size, checksum) in manifest["files"].items():
        file = checkpoint / name
        have = file.stat().st_size if file.exists() else None
        if have != size:
            raise CheckpointError(f"{file} is damaged: {have or 'no'} bytes of {size}; {remedy}")
        if _checksum(file) != checksum:
            raise CheckpointError(f"{file} is damaged: its contents changed since it was written; {remedy}")
    return manifest


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """step, num_ranks, run (what `save` was given), files."""
    file = checkpoint / "run.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {checkpoint} is no complete checkpoint") from None


def _num_bytes(values: Mapping[str, Any]) -> int:
    """Bytes of the tensors of all ranks; one that several have is written once. Every rank calls it."""
    everyones: dict[str, int] = {}
    for part in ("model", "optimizer"):
        own = {name: value.nbytes for name, value in values.get(part, {}).items() if isinstance(value, Tensor)}
        for theirs in ranks.gather(own):
            everyones |= {f"{part}.{name}": number for name, number in theirs.items()}
    return sum(everyones.values())


def _gib(number: int) -> str:
    return f"{number / 2**30:.3g} GiB"


def _checksum(file: Path) -> int:
    value = 0
    with open(file, "rb") as data:
        while block := data.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def _sync(folder: Path) -> None:
    """A rename survives a power cut only once its folder is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dcp(action: Callable[..., Any], state: dict[str, Any], checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: meant so
        action(state, checkpoint_id=checkpoint, no_dist=ranks.num_ranks() == 1)


def _failure(action: Callable[[], None]) -> str | None:
    """Returns the cause of a failure in words. DCP packs the errors of all ranks into one, which hides the causes."""
    try:
        action()
    except dcp.CheckpointException as error:
        return _root(next(failure[0] for failure in error.failures.values()))
    except (OSError, RuntimeError, ValueError) as error:
        return _root(error)
    return None


def _root(error: BaseException) -> str:
    while inner := error.__cause__ or error.__context__:
        error = inner
    return f"{error}"
