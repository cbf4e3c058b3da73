"""Starts the processes of ranks, ends those that hang, and keeps what they have left.

On one host one supervisor has all ranks. Under torchrun each of its processes is the supervisor of one rank; they meet
in torchrun's store, and all come to the same results.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import multiprocessing
import os
import re
import secrets
import signal
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # from C by a star: no export

from seq1f1b.first_contact.cases import Rank
from seq1f1b.first_contact.facts import first_line, namespaces
from seq1f1b.first_contact.parts import Group, Part, cases_of
from seq1f1b.first_contact.rank import Spec, gathered, start

__all__: list[str] = []

FORKS = multiprocessing.get_context("forkserver")  # its server imports torch once, for all ranks of all groups
# None of these may use CUDA as it is imported.
PRELOADED = ["torch.distributed.fsdp", *(f"seq1f1b.first_contact.{name}" for name in ("computing", "drills", "rank"))]
START = 120.0  # seconds until the first case begins: torch is imported, CUDA's context made
GRACE = 30.0  # for the other ranks, once one has ended before its time
LOOK = 0.05
STOP_LOOKS = 10  # looks between two questions whether another supervisor has stopped
MOST_EVIDENCE = 8 << 20  # bytes of what all hosts keep of failures, compressed
TIME_UP = "the time was up"

Record = dict[str, Any]


@dataclass
class Place:
    """A supervisor's ranks among all.

    Attributes:
        index, count: of this supervisor.
        ranks: its own.
        hosts: for each rank, the number of its host.
        gpus: for each rank, its GPU as torch counts there; -1: none.
        cards: for each rank, what tells its GPU from others.
        store: in which supervisors and ranks meet, at host and port under a prefix.
    """

    index: int
    count: int
    ranks: list[int]
    hosts: list[int]
    gpus: list[int]
    cards: list[str]
    store: Any
    host: str
    port: int
    prefix: str

    @property
    def world(self) -> int:
        return len(self.hosts)

    def share(self, world: int) -> int:
        """How many of the first ranks use one GPU, at most; 1 without GPUs."""
        cards = self.cards[:world]
        return max(cards.count(card) for card in cards) if self.gpus[0] >= 0 else 1

    def gather(self, key: str, value: Any, seconds: float) -> list[Any]:
        """Every supervisor's value. Raises RuntimeError if one does not come."""
        return gathered(self.store, key, self.index, self.count, value, seconds)


def find_place(num_ranks: int, gpus: int) -> Place:
    """The place of this process: under torchrun, or what sets its variables, one rank; else all ranks of this host.

    Args:
        num_ranks: asked for on one host; 0: one for each GPU, and four at least.
        gpus: of this host; 0: a rehearsal.
    """
    variables = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = num_ranks or max(gpus, 4)
        own = [rank % gpus if gpus else -1 for rank in range(world)]
        prefix, cards = f"contact {secrets.token_hex(4)}", [f"{gpu}" for gpu in own]
        part = PrefixStore(prefix, store)
        return Place(0, 1, list(range(world)), [0] * world, own, cards, part, "127.0.0.1", store.port, prefix)
    rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if num_ranks not in (0, world):
        raise ValueError(f"--ranks is {num_ranks}, and {world} ranks were started: leave --ranks out")
    if world < 2:
        raise ValueError("WORLD_SIZE is 1: start two ranks at least, or leave the launcher out")
    host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    is_master = rank == 0 and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, is_master=is_master, wait_for_workers=False)
    run, start = (variables.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    prefix = f"contact {run} {start}"
    part = PrefixStore(prefix, store)
    place = Place(rank, world, [rank], [0] * world, [-1] * world, [""] * world, part, host, port, prefix)
    gpu = int(variables.get("LOCAL_RANK", rank)) % gpus if gpus else -1
    card = (
        str(torch.cuda.get_device_properties(gpu).uuid) if gpus else ""
    )  # a launcher may show each rank its own alone
    machine = f"{first_line('/proc/sys/kernel/random/boot_id')} {namespaces()['net']}"  # where edges of one host can be
    everyones = place.gather("places", (machine, gpu, card), START)
    machines, place.gpus, cards = (list(column) for column in zip(*everyones, strict=True))
    without = [rank for rank, gpu in enumerate(place.gpus) if gpu < 0]
    if 0 < len(without) < world:
        raise ValueError(f"torch sees no GPU on ranks {without}, and one on others: start as many as there are GPUs")
    place.hosts = [list(dict.fromkeys(machines)).index(machine) for machine in machines]
    place.cards = [f"{machine} {card}" for machine, card in zip(machines, cards, strict=True)]
    return place


# -- one group of processes ------------------------------------------------------------------------------------------


class Attempt:
    """This supervisor's processes of a group, and the cases that they run."""

    def __init__(self, place: Place, part: Part, group: Group, cases: Sequence[str], folder: Path, number: int) -> None:
        self._place, self._cases = place, list(cases)
        self._seconds = part.seconds
        self._stop_key = f"stop {number}"
        self.folder = folder
        self.ranks = [rank for rank in place.ranks if rank < group.world]
        self.specs: dict[int, Spec] = {}
        self._processes: dict[int, Any] = {}  # multiprocessing's; of no public class
        self.hung = ""  # why the processes were ended, "" if they were not
        self.ends: dict[int, int] = {}  # their exit codes
        folder.mkdir(parents=True, exist_ok=True)
        for rank in self.ranks:
            spec = Spec(
                part.source, self._cases, rank, group.world, place.hosts[: group.world], place.gpus[rank],
                place.share(group.world), place.host, place.port, f"{place.prefix}/{number}", str(folder), group.dies,
                {**group.environment},
            )  # fmt: skip
            spec.environment |= _environment(spec)
            spec.write(spec.path("spec"))
            self.specs[rank] = spec
            self._processes[rank] = FORKS.Process(target=start, args=(str(spec.path("spec")),), daemon=True)
        for process in self._processes.values():
            process.start()

    def records(self) -> list[Record]:
        """Lines that the ranks have written, in order of time."""
        found = []
        for spec in self.specs.values():
            path = spec.path("results")
            for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:  # its process ended within it
                    continue
        return sorted(found, key=lambda record: record["at"])

    def last_words(self) -> str:
        """The last line that a rank which failed has printed."""
        for rank, code in self.ends.items():
            path = self.specs[rank].path("output")
            if (
                code != 0
                and path.exists()
                and (lines := path.read_text(encoding="utf-8", errors="replace").split("\n"))
            ):
                return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]
        return ""

    def watch(self, deadline: float) -> None:
        """Until all have ended, or must be: a case is too long, a rank died, another host stopped, the time is up."""
        begin, death, looks = time.monotonic(), float("inf"), 0
        while any(process.exitcode is None for process in self._processes.values()):
            time.sleep(LOOK)
            looks += 1
            now = time.monotonic()
            codes = [process.exitcode for process in self._processes.values()]
            if death == float("inf") and any(code not in (None, 0) for code in codes):
                death = now + GRACE
            if looks % STOP_LOOKS == 0:
                self.hung = self._why_stop(now, begin, deadline)
            if now > death:
                self.hung = self.hung or f"a rank ended, and others did not within {GRACE:.0f} s"
            if self.hung:
                self._end()
                return
        self.ends = {rank: process.exitcode for rank, process in self._processes.items()}

    def _why_stop(self, now: float, begin: float, deadline: float) -> str:
        if now > deadline:
            return TIME_UP
        if self._place.count > 1 and self._place.store.check([self._stop_key]):
            return str(self._place.store.get(self._stop_key), "utf-8")
        records = self.records()
        if not records and now - begin > START:
            return f"no case began within {START:.0f} s"
        last = {record["rank"]: record for record in records}
        for rank, record in last.items():
            age = time.time() - record["at"]
            if age > self._seconds:
                where = "has been in it" if record["state"] == "begun" else f"has not come out of {record['case']}"
                return f"rank {rank} {where} for {age:.0f} s"
        return ""

    def _end(self) -> None:
        """Asks every process where it is, then kills it."""
        self._place.store.set(self._stop_key, self.hung)
        alive = [process for process in self._processes.values() if process.exitcode is None]
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # in which faulthandler writes
        for process in alive:
            process.kill()
        for process in self._processes.values():
            process.join()
        self.ends = {rank: process.exitcode for rank, process in self._processes.items()}


def _environment(spec: Spec) -> dict[str, str | None]:
    """The variables of a rank that differ from this process's."""
    found: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith(("TORCHELASTIC_", "ROLE_"))
    }  # it has no agent
    found |= {
        "RANK": f"{spec.rank}", "WORLD_SIZE": f"{spec.world}",
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{spec.folder}/nccl-%h-%p",
    }  # fmt: skip
    if spec.share > 1:  # NCCL takes ranks of one GPU for several hosts
        found["NCCL_HOSTID"] = f"rank {spec.rank}"
        if len(set(spec.hosts)) == 1:
            found["NCCL_SOCKET_IFNAME"] = "lo"
    return found


def merged(records: Sequence[Record], group: Group, case: str, hung: Sequence[str], ends: Mapping[int, int]) -> Record:
    """One case over its ranks; {} if it has not begun."""
    own = [record for record in records if record["case"] == case]
    if not own:
        return {}
    last = {record["rank"]: record for record in own}
    states = {rank: record["state"] for rank, record in last.items()}
    found: Record = {"case": case, "world": group.world, "figures": {}}
    found["seconds"] = max(record.get("seconds", 0.0) for record in last.values())
    failures = [record for record in own if record["state"] == "failed"]
    silent = [rank for rank in range(group.world) if states.get(rank, "begun") == "begun"]
    killed = [rank for rank in silent if ends.get(rank) == -signal.SIGKILL]
    if group.dies and silent == killed and len(silent) == 1 and not any(hung):
        silent = []
    told = not silent or not any(hung) or not all(record.get("caused") for record in failures)
    if failures and told:  # else another host ended the rank that hung before this one saw that it did
        first = min(failures, key=lambda record: (record.get("caused", False), record["at"]))
        found |= {"state": "failed", "why": f"rank {first['rank']}: {first['why']}"}
    elif silent:
        ended = {rank: ends[rank] for rank in silent if ends.get(rank) is not None}
        why = next((text for text in hung if text), f"ranks {silent} ended within it, by exit codes {ended}")
        state = "unmeasured" if why == TIME_UP else "failed"
        found |= {"state": state, "why": why, "hung": state == "failed"}
    elif all(state == "unmeasured" for state in states.values()):
        found |= {"state": "unmeasured", "why": own[-1].get("why", "")}
    else:
        found["state"] = "passed"
    for record in own:
        for name, value in record.get("figures", {}).items():
            before = found["figures"].get(name)
            if isinstance(value, list):
                value = list(dict.fromkeys([*(before or []), *value]))
                before = None
            is_more = isinstance(value, (int, float)) and isinstance(before, (int, float)) and not value <= before
            if before is None or is_more:
                found["figures"][name] = value
        if "warnings" in record:
            found["warnings"] = sorted({*found.get("warnings", []), *record["warnings"]})
    return found


# -- all parts -------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The result of a first contact.

    Attributes:
        records: by part; each case of each group once.
        seconds: that a part took.
        archive: of what hung or died; None if nothing did.
    """

    records: dict[str, list[Record]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    archive: Path | None = None


class Contact:
    """Runs parts over a place.

    Args:
        wanted: of a case with its part and group, whether it is run.
        seconds: for everything.
        tell: is given a line of progress.
    """

    def __init__(
        self, place: Place, folder: Path, wanted: Callable[[str], bool], seconds: float, tell: Callable[[str], None]
    ) -> None:
        self._place, self._folder, self._wanted, self._tell = place, folder, wanted, tell
        self._deadline = time.monotonic() + seconds
        self._attempts = 0
        self._evidence: list[Path] = []

    def run(self, parts: Mapping[str, Part]) -> Outcome:
        FORKS.set_forkserver_preload(PRELOADED)
        outcome, place = Outcome(), self._place
        share = place.share(place.world)
        for name, part in parts.items():
            start = time.monotonic()
            outcome.records[name] = [
                record for group in part.groups(place.world, share) for record in self._run_group(name, part, group)
            ]
            outcome.seconds[name] = time.monotonic() - start
            states = [record["state"] for record in outcome.records[name]]
            counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            self._tell(f"{part.title}: {counts or 'no case'}, {outcome.seconds[name]:.0f} s")
        return outcome

    def _run_group(self, name: str, part: Part, group: Group) -> list[Record]:
        """All cases of a group, by as many groups of processes as it takes."""
        device = torch.device("cuda" if self._place.gpus[0] >= 0 else "cpu")
        rank = Rank(0, group.world, device, hosts=self._place.hosts[: group.world])
        label = f"{group.name}: " if group.name else ""
        names = [case for case, _ in cases_of(part.source, rank) if self._wanted(f"{name}: {label}{case}")]
        found: dict[str, Record] = {}
        while left := [case for case in names if case not in found]:
            found |= self._attempt(name, part, group, left) or {
                left[0]: {"case": left[0], "world": group.world, "state": "failed", "figures": {}, "why": "nobody came"}
            }
        return [found[case] | {"group": group.name} for case in names]

    def _attempt(self, name: str, part: Part, group: Group, cases: list[str]) -> dict[str, Record]:
        if time.monotonic() > self._deadline - LOOK:
            late = {"world": group.world, "state": "unmeasured", "why": TIME_UP, "figures": {}}
            return {case: {"case": case, **late} for case in cases}
        self._attempts += 1
        folder = self._folder / f"{self._attempts}-{name}"
        attempt = Attempt(self._place, part, group, cases, folder, self._attempts)
        attempt.watch(self._deadline)
        mine = {"records": attempt.records(), "hung": attempt.hung, "ends": attempt.ends}
        mine["last words"] = attempt.last_words()
        wait = max(0.0, self._deadline - time.monotonic()) + START
        everyones = self._place.gather(f"results {self._attempts}", mine, wait)
        records = sorted((r for own in everyones for r in own["records"]), key=lambda record: record["at"])
        ends = {int(rank): code for own in everyones for rank, code in own["ends"].items()}
        hung = [own["hung"] for own in everyones]
        found = {case: record for case in cases if (record := merged(records, group, case, hung, ends))}
        if not records:  # nor would others come to a case
            words = next((own["last words"] for own in everyones if own["last words"]), "nothing")
            why = f"the ranks ended with {ends} before the first case, and said: {words}"
            why = next((text for text in hung if text), why)
            none = {"world": group.world, "state": "unmeasured" if why == TIME_UP else "failed", "why": why}
            found = {case: {"case": case, "figures": {}, **none} for case in cases}
        if len(found) == len(cases) and any(text not in ("", TIME_UP) for text in hung):  # as they left
            found[cases[-1]] |= {"state": "failed", "why": next(text for text in hung if text), "hung": True}
        if any(record["state"] == "failed" for record in found.values()):
            self._evidence.append(folder)
        return found

    def archive(self, path: Path, more: Mapping[str, str]) -> Path | None:
        """Packs what the failed groups of all hosts have left into one file; None if none failed. Collective."""
        place = self._place
        own = packed(self._folder, self._evidence, MOST_EVIDENCE // place.count)
        everyones = place.gather("archives", base64.b64encode(own).decode(), START)
        if place.index != 0 or not self._evidence:
            return None
        with tarfile.open(path, "w:gz") as archive:
            for index, text in enumerate(everyones):
                with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as theirs:
                    for entry in theirs:
                        content = theirs.extractfile(entry)
                        entry.name = f"{entry.name}" if place.count == 1 else f"rank {index}/{entry.name}"
                        archive.addfile(entry, content)
            for name, written in more.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime = len(written.encode()), int(time.time())
                archive.addfile(entry, io.BytesIO(written.encode()))
        return path


def packed(root: Path, folders: Sequence[Path], most: int) -> bytes:
    """The files of the folders, those of the newest first and NCCL's logs last, as far as there is room."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for folder in reversed(folders):
            for path in sorted(folder.iterdir(), key=lambda path: path.name.startswith("nccl")):
                if buffer.tell() < most and path.is_file():
                    archive.add(path, str(path.relative_to(root)))
    return buffer.getvalue()


def matches(pattern: str) -> Callable[[str], bool]:
    """Raises ValueError if it is no regular expression."""
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--cases {pattern!r} is no regular expression: {error}") from None
    return lambda name: found.search(name) is not None
