"""Does doctor --gpus find what is wrong between ranks, survive what its cases do, and say so on one page?

Without a GPU: edges between GPUs over stand-ins for them, in threads; processes on the CPU. A whole rehearsal takes
minutes: ``python -m seq1f1b doctor --gpus --rehearse``.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from slices import full_only
from stand_in_engine import StandInEngine
from stand_in_library import stand_in

from seq1f1b.__main__ import main
from seq1f1b.first_contact import drills, facts, messages, page, supervisor
from seq1f1b.first_contact.cases import Figures, Rank
from seq1f1b.first_contact.parts import PARTS, Group, Part
from seq1f1b.first_contact.supervisor import TIME_UP, Contact, Outcome, find_place, merged
from seq1f1b.testing import run_ranks
from seq1f1b.transport.table import TRANSPORTS

BETWEEN_GPUS = [name for name, row in TRANSPORTS.items() if row.between_gpus]


def on_stand_ins(source: Callable[[Rank], Any], case: str, monkeypatch: pytest.MonkeyPatch) -> list[Figures]:
    """A case by two ranks, each with a GPU that is a stand-in."""
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()  # what an engine of the last test still holds goes before the stand-ins forget it
    stand_in().reset(1, foreign_memory=1)

    def run(group: Any) -> Figures:
        rank = Rank(group.rank, 2, torch.device("cpu"), group=group, engine=StandInEngine)
        return dict(source(rank))[case]()

    found = run_ranks(2, run)
    assert stand_in().complaints() == []
    return found


@pytest.mark.parametrize("transport", BETWEEN_GPUS)
def test_an_edge_carries_what_was_sent(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = on_stand_ins(messages.messages, f"{transport}, edges 0-1", monkeypatch)
    assert [figures["by 0-1"] for figures in found] == [transport] * 2
    assert all(figures[f"{name} 0-1"] > 0 for figures in found for name in (messages.RATE, messages.PROOF))


def test_a_message_that_is_another_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of the first step comes twice: as an edge would whose place was not written."""
    before = messages.numbers
    sent: list[int] = []

    def stale(count: int, device: torch.device, turn: int) -> torch.Tensor:
        sent.append(turn)
        return before(count, device, 2 if turn == 3 and sent.count(3) == 1 else turn)

    monkeypatch.setattr(messages, "numbers", stale)
    with pytest.raises(AssertionError, match=r"\d+ elements of messages that came by copy are not those"):
        on_stand_ins(messages.messages, "copy, edges 0-1", monkeypatch)


@pytest.mark.parametrize(
    ("name", "transport"),
    [("interleaved", "copy"), ("split backward", "nccl"), *full_only(("V", "nccl"), ("Seq1F1B", "copy"))],
)
def test_a_drill_is_right(name: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for figures in on_stand_ins(drills.drills, f"{name}, {transport}", monkeypatch):
        assert 0 < figures["error"] < 1e-3


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_drill_sees_a_unit_that_is_a_little_off(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one unit's result, as what a place that was overwritten might hold."""
    units = 0

    def late(rank: Rank) -> Callable[[torch.Tensor], torch.Tensor]:
        def spoil(x: torch.Tensor) -> torch.Tensor:
            nonlocal units
            units += rank.rank == 0
            if rank.rank == 1 or units != 40:
                return x
            spoilt = torch.zeros_like(x)
            spoilt[0, 0, 0] = change
            return x + spoilt

        return spoil

    monkeypatch.setattr(drills, "delays", late)
    with pytest.raises(AssertionError, match=r"gradients are .* off float64"):
        on_stand_ins(drills.drills, "Seq1F1B, copy", monkeypatch)


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_server_of_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PRELOADED", [*supervisor.PRELOADED, *processes.PRELOADED])


def contact(parts: dict[str, Part], tmp_path: Path, seconds: float = 60.0) -> tuple[Outcome, Path | None]:
    runner = Contact(find_place(2, 0), tmp_path / "work", lambda name: True, seconds, lambda line: None)
    outcome = runner.run(parts)
    return outcome, runner.archive(tmp_path / "evidence.tar.gz", {"results.json": "{}"})


def test_a_case_that_hangs_is_told_and_stops_no_other(tmp_path: Path) -> None:
    part = Part("Test", "contact_cases:cases", 5.0, lambda world, share: [Group("", 2)])
    outcome, archive = contact({"messages": part}, tmp_path)
    well, hung, after = outcome.records["messages"]
    assert (well["state"], well["figures"]["of rank 0"], well["figures"]["of rank 1"]) == ("passed", 1, 1)
    assert well["figures"]["ms"] == 2, "the slowest rank's"
    assert (hung["state"], hung["hung"], after["state"]) == ("failed", True, "passed")
    assert "has been in it for" in hung["why"]
    assert archive is not None
    with tarfile.open(archive) as found:
        names = {name.partition("/")[2]: name for name in found.getnames()}
        stacks, state = (found.extractfile(names[f"{what}-1"]).read().decode() for what in ("stacks", "state"))  # type: ignore[union-attr]
        assert "contact_cases.py" in stacks and "in forward" in stacks
        told = json.loads(state)
        assert told["ranks of its pipeline"][1]["in"] == "F2.0"
        sent = {tuple(edge["stages"]): (edge["by"], edge["sent (step, messages)"]) for edge in told["edges"]}
        assert sent == {(0, 1): ("shm", [1, 4]), (1, 0): ("shm", [1, 2])}, "rank 0 is ahead by what it may be"
        assert {"output-0", "output-1", "results-0", "results-1"} <= names.keys()


def test_ranks_that_cannot_begin_are_tried_once(tmp_path: Path) -> None:
    broken = Part("Test", "contact_cases:broken", 2.0, lambda world, share: [Group("", 2)])
    outcome, _ = contact({"machine": broken}, tmp_path)
    assert [record["state"] for record in outcome.records["machine"]] == ["failed"] * 2
    assert all("said: RuntimeError: no GPU for rank" in record["why"] for record in outcome.records["machine"])


def test_a_rehearsal_takes_the_way_of_each_part(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    cases = (
        "machine|messages: (auto|copy)|drills: 2 ranks: (1F1B|split backward), |killed: |"
        "training: P 2: (torch|1F1B)|blocks: 2 "
    )
    arguments = ["doctor", "--gpus", "--rehearse", "--ranks", "2", "--output", str(path), "--cases", cases]
    assert main(arguments) == 0
    written = path.read_text()
    assert written in capfd.readouterr().out
    count = len(BETWEEN_GPUS)
    rows = [line.split(" | ")[:2] for line in written.splitlines() if line.startswith("| ")]
    assert rows[2:8] == [
        ["| Machine", "passed: 3 of 6 (not measured: 3)"],
        ["| Messages", "passed: 1 of 2 (not measured: 1)"],
        ["| Drills", f"passed: 2 of {2 + 2 * count} (not measured: {2 * count})"],
        ["| A killed rank", f"passed: 1 of {1 + count} (not measured: {count})"],
        ["| Training", "passed: 2 of 2"],
        ["| NCCL's thread blocks beside computing", "not measured: no GPU"],
    ]
    for transport in BETWEEN_GPUS:
        assert f"| 2 ranks, {transport} | - (no GPU) |" in written
    assert "rank 0 says rank 1 is gone" in written
    assert set(json.loads(path.with_suffix(".json").read_text())["records"]) == set(PARTS)
    assert not path.with_suffix(".tar.gz").exists()


@pytest.mark.full
@pytest.mark.parametrize("starter", [["-m"], ["-m", "torch.distributed.run", "--nproc-per-node", "4", "-m"]])
def test_the_whole_rehearsal(starter: list[str], tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    command = [sys.executable, *starter, "seq1f1b", "doctor", "--gpus", "--rehearse", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = [line for line in path.read_text().splitlines() if line.startswith("| ")][2 : 2 + len(PARTS)]
    assert [line.split("|")[2].strip().partition(":")[0] for line in table] == ["passed"] * 5 + ["not measured"]


# -- what came of it -------------------------------------------------------------------------------------------------


def record(rank: int, state: str, **more: Any) -> dict[str, Any]:
    return {"case": "a", "rank": rank, "state": state, "at": time.time(), **more}


def test_one_case_over_its_ranks() -> None:
    pair, nobody = Group("", 2), ["", ""]
    begun = [record(0, "begun"), record(1, "begun")]
    assert merged([], pair, "a", nobody, {}) == {}
    passed = merged([*begun, record(0, "passed"), record(1, "unmeasured", why="no")], pair, "a", nobody, {})
    assert passed["state"] == "passed", "one rank has no part in it"
    nothing = merged([record(0, "unmeasured", why="no"), record(1, "unmeasured", why="no")], pair, "a", nobody, {})
    assert (nothing["state"], nothing["why"]) == ("unmeasured", "no")
    caused = record(0, "failed", why="rank 1 ended", caused=True), record(1, "failed", why="wrong", caused=False)
    assert merged(caused, pair, "a", nobody, {})["why"] == "rank 1: wrong", "the cause, and not what it caused"
    late = merged([*begun, caused[0]], pair, "a", ["", "rank 1 has been in it for 60 s"], {0: 3, 1: -9})
    assert (late["hung"], late["why"]) == (True, "rank 1 has been in it for 60 s"), "its end is not the cause"
    died = merged([*begun, record(0, "passed")], pair, "a", nobody, {1: -11})
    assert died["state"] == "failed" and "[1] ended within it, by exit codes {1: -11}" in died["why"]
    late = merged(begun, pair, "a", [TIME_UP], {0: -9, 1: -9})
    assert (late["state"], late["why"]) == ("unmeasured", TIME_UP)


def test_a_killed_rank_is_expected_where_it_is_planned() -> None:
    own = [record(0, "begun"), record(1, "begun"), record(0, "passed")]
    doomed = Group("", 2, dies=True)
    assert merged(own, doomed, "a", [""], {0: 0, 1: -9})["state"] == "passed"
    assert merged(own, doomed, "a", [""], {0: 0, 1: 0})["state"] == "failed", "it was not killed"
    assert merged(own, doomed, "a", ["a rank ended, and others did not"], {0: -9, 1: -9})["state"] == "failed"


def of(case: str, state: str, group: str = "", **more: Any) -> dict[str, Any]:
    return {"case": case, "state": state, "group": group, "figures": {}, "why": "it broke", **more}


def test_the_page_has_verdicts_and_remedies() -> None:
    outcome = Outcome(
        {
            "messages": [
                of("auto, edges 0-1", "passed", figures={"GB/s 0-1": 3.1, "by 0-1": "copy", "GB/s alone 0-1": 9.2}),
                of("nccl, edges 0-1", "failed"),
            ],
            "drills": [of("V, auto", "passed", "2 ranks", figures={"error": 2e-6}), of("V, copy", "unmeasured")],
            "killed": [of("nccl", "failed", hung=True)],
        },
        {"messages": 1.0, "drills": 2.0, "killed": 3.0},
        Path("first-contact.tar.gz"),
    )
    written = page.make(outcome, "2 x GPU", 1, "seq1f1b doctor --gpus")
    assert '| Messages | **failed**: 1 of 2 | 1 | use transport="auto"; ' in written
    assert "| Drills | passed: 1 of 2 (not measured: 1) | 2 |  |" in written
    assert "the archive has the stacks" in next(line for line in written.splitlines() if "A killed rank |" in line)
    assert "- A killed rank, nccl: it broke" in written and "Attach `first-contact.tar.gz`" in written
    assert "| auto | 3.1 (copy, 9.2 alone) |" in written and "floors" not in written
    assert "2 ranks share a GPU" in page.make(outcome, "1 x GPU", 2, "")


@pytest.mark.parametrize("held", [1.0, 2.0])
def test_memory_of_another_process_is_read(held: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's calls for CUDA IPC stand in: the neighbour's memory holds its rank, or something else."""
    monkeypatch.setattr(Rank, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    shared = (0, b"handle", 4 << 20, 0, b"counter", 0, b"event", False)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: shared)

    def opened(*fields: Any) -> torch.UntypedStorage:
        assert fields == shared
        return torch.full((1 << 20,), held).untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    gather = lambda value: json.loads(json.dumps([value] * 2))  # noqa: E731
    rank = Rank(0, 2, torch.device("cpu"), gather=gather)
    if held == 1:
        assert facts.ipc(rank)["opened"]
    else:
        with pytest.raises(AssertionError, match="rank 0 cannot read memory of rank 1: it holds 2"):
            facts.ipc(rank)


def test_what_of_the_environment_is_in_the_way() -> None:
    bad = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_P2P_DISABLE": "1", "PATH": "/bin", "NCCL_DEBUG_FILE": "ours",
    }  # fmt: skip
    found = facts.warnings_of(bad, 64 << 20)
    assert [text.split()[0] for text in found] == [*list(bad)[:3], "/dev/shm"]
    assert facts.warnings_of({"NCCL_P2P_DISABLE": "0"}, 1 << 33) == []
    assert list(facts.environment(bad)) == sorted(list(bad)[:3])


def test_a_launcher_starts_two_ranks_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE is 1: start two ranks at least"):
        find_place(0, 0)
    with pytest.raises(ValueError, match="--ranks is 2, and 1 ranks were started"):
        find_place(2, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus"], "torch sees no GPU here"),
        (["--gpus", "--rehearse", "--ranks", "1"], "--ranks is 1: a pipeline's edges are between two ranks at least"),
        (["--gpus", "--rehearse", "--only", "drill"], "there is no part drill; there are machine, messages"),
        (["--gpus", "--rehearse", "--cases", "("], "is no regular expression"),
        (["--gpus", "--rehearse", "--output", "/no/such/folder/page.md"], "/no/such/folder/page.md"),
        (["--rehearse", "--cases", "a"], "--cases, --rehearse: of doctor --gpus, which was not asked for"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and arguments == ["--gpus"]:
        pytest.skip("there is a GPU")
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
