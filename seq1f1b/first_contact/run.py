"""A first contact from its options to its page."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seq1f1b.first_contact import page
from seq1f1b.first_contact.parts import PARTS
from seq1f1b.first_contact.supervisor import Contact, Outcome, find_place, matches

__all__: list[str] = []

SECONDS, SECONDS_OF_ONE_GPU = 600.0, 240.0
NO_GPU = (
    "torch sees no GPU here, and doctor --gpus asks GPUs and what is between them; --rehearse runs all that a CPU can"
)


def first_contact(
    output: Path,
    *,
    rehearse: bool = False,
    num_ranks: int = 0,
    only: Sequence[str] = (),
    cases: str = "",
    seconds: float = 0.0,
) -> Outcome:
    """Runs all parts, writes the page and its results, and prints the page. Collective under torchrun.

    Args:
        output: the page; beside it, results as JSON (.json), and what failed cases have left (.tar.gz).
        rehearse: on CPUs, whether or not there are GPUs.
        num_ranks: on one host; 0: one for each GPU, and four at least.
        only: names of parts; all if empty.
        cases: a regular expression that a case's "part: group: case" must hold.
        seconds: for everything; 0: ten minutes, four on one GPU.
    Raises:
        ValueError: there is no GPU, or an option is wrong.
        OSError: output cannot be written.
    """
    unknown = sorted(set(only) - PARTS.keys())
    if unknown:
        raise ValueError(f"--only: there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    wanted = matches(cases)
    gpus = 0 if rehearse else torch.cuda.device_count()
    if gpus == 0 and not rehearse:
        raise ValueError(NO_GPU)
    if num_ranks and num_ranks < 2:
        raise ValueError(f"--ranks is {num_ranks}: a pipeline's edges are between two ranks at least")
    output.touch()  # before minutes have passed
    place = find_place(num_ranks, gpus)
    all_gpus = len(set(place.cards))
    limit = seconds or (SECONDS_OF_ONE_GPU if all_gpus == 1 and gpus else SECONDS)
    is_first = place.index == 0

    def tell(line: str) -> None:
        if is_first:
            print(f"seq1f1b: {line}", file=sys.stderr, flush=True)

    parts = {name: part for name, part in PARTS.items() if not only or name in only}
    tell(f"{place.world} ranks, {'no GPU' if not gpus else f'{all_gpus} GPUs'}, at most {limit:.0f} s")
    with tempfile.TemporaryDirectory(prefix="seq1f1b-contact-") as folder:
        contact = Contact(place, Path(folder), wanted, limit, tell)
        outcome = contact.run(parts)
        results = json.dumps({"records": outcome.records, "seconds": outcome.seconds}, indent=1, default=str)
        archive = contact.archive(output.with_suffix(".tar.gz"), {"results.json": results})
    outcome = replace(outcome, archive=archive)
    if is_first:
        output.with_suffix(".json").write_text(results, encoding="utf-8")
        hosts = len(set(place.hosts))
        device = "CPUs (a rehearsal)" if not gpus else f"{all_gpus} x {torch.cuda.get_device_name(0)}"
        what = device if hosts == 1 else f"{device} of {hosts} hosts"
        command = shlex.join(["seq1f1b", *sys.argv[1:]])
        written = page.make(outcome, what, place.share(place.world), command)
        output.write_text(written, encoding="utf-8")
        print(written, flush=True)
        tell(f"the page is {output}{f', and {archive} has what failed cases left' if archive else ''}")
    place.gather("left", time.time(), limit)
    if place.count > 1 and is_first:
        time.sleep(1.0)  # others read that, perhaps from a store that is this process's
    return outcome


def has_failed(outcome: Outcome) -> bool:
    return any(record["state"] == "failed" for records in outcome.records.values() for record in records)
