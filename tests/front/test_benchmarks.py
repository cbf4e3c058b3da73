"""Do the benchmarks run, compare like with like, and judge only what they measured?

Each script of ``benchmarks/README.md`` runs here in a shortest form: its arms are what they are called, and its steps
count. Its figures are no matter of a test.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripts import Script, environment

from seq1f1b.plan import Plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASE = "S64 M2 P2 hidden 64 blocks 4"
FORKED = Path(__file__).parents[1] / "support" / "forked_benchmark.py"


def run(folder: Path, script: str, *arguments: str) -> str:
    """What a benchmark prints."""
    code, out, err = Script(FORKED, [str(FOLDER / script), *arguments], folder, environment()).finish(240)
    assert code == 0, f"{out[-2000:]}{err[-4000:]}"
    return out


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """The groups of each match, as numbers."""
    return [tuple(map(float, match.groups())) for match in re.finditer(pattern, text, re.MULTILINE)]


# -- each script in its shortest form ----------------------------------------------------------------------------------


def of_tuning(out: str, _: Path) -> None:
    """The order was found before the rounds; the script itself fails if the engine searches in them."""
    assert "1 rounds, 0 discarded\ntuned for 96 tokens in " in out
    arms = ("one process, two threads", "DDP, two processes", "as it began", "tuned", "torch 1F1B", "torch ZBV")
    errors = re.search("errors of gradients: (.*)", out)
    assert errors is not None and len(re.findall("[0-9.]+e-0[67]", errors[1])) == len(arms)
    assert [name for name in arms if re.search(rf"^  {name} +[0-9.]+ s", out, re.MULTILINE)] == list(arms)


def of_train(out: str, _: Path) -> None:
    """The script compares the losses, and looks which attention each arm runs."""
    assert all(name in out for name in ("ours", "two calls", "explicit mask", "causal_lower_right", "eager"))
    assert "1 pairs, 0 discarded" in out and len(re.findall("attention [1-9]", out)) == 2


def of_attention_ranges(out: str, _: Path) -> None:
    """The script compares the results of all ranges to the bit."""
    assert len(re.findall(r"^(?:float32|bfloat16) .*(?:one piece| of )", out, re.MULTILINE)) == 2 * 2 * 2 * 5


def of_engine(out: str, _: Path) -> None:
    """The script compares gradients, and by which transport messages go."""
    assert out.count("1 rounds counted") == 4 and out.count(", 0 discarded") == 4
    steps = numbers(r"^ +2 (?:torch|seq1f1b).* +2 +[12] +([0-9.]+) +([0-9.]+) .* 15$", out)
    assert len(steps) == 5 and all(seconds > 0.9 * ideal for seconds, ideal in steps)


def of_p2p(out: str, _: Path) -> None:
    rows = numbers(r"^ *(\d+) +([0-9.]+) \(.*\) +([0-9.]+) \(.*\) +([0-9.]+)$", out)
    assert [row[0] for row in rows] == [2**20, 3 * 2**20]
    assert all(ratio == pytest.approx(gloo / ours, rel=0.02, abs=0.06) for _, ours, gloo, ratio in rows)


def of_tree_steps(out: str, _: Path) -> None:
    """The script compares the gradients of the three arms."""
    assert [name for name in ("trees", "rows", "packed") if f"2 trees: {name} " in out] == ["trees", "rows", "packed"]
    assert len(numbers(r"takes ([0-9.]+) \[", out)) == 2


def of_timeline(out: str, folder: Path) -> None:
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    assert re.search("^1F1B: .*, 15 steps counted, of 4, 4 units$", out, re.MULTILINE)
    assert re.search("^Seq1F1B, 2 segments: .*, 15 steps counted, of 8, 8 units$", out, re.MULTILINE)


def of_memory(out: str, folder: Path) -> None:
    """The arms, before any is measured: `moves` and `caps` measure times and peaks as it does, the full test all."""
    assert (folder / "memory.txt").read_text() == out
    records = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    torchs, plain, recomputed = [r["fields"] for r in records if r["what"] == "arm"]
    assert (torchs["schedule"], torchs["checkpoint"]) == ("1F1B", False) and plain["name"] == "ours, no cap"
    assert Plan.from_json(plain["plan"]).units == () and recomputed == plain | {
        "name": "ours, all recomputed",
        "recomputed": 1.0,
    }
    assert out.count(": unmeasured\n") == 2


def of_moves(out: str, folder: Path) -> None:
    assert (folder / "moves.txt").read_text() == out
    records = [json.loads(line) for line in (folder / "moves.jsonl").read_text().splitlines()]
    assert [r["arm"] for r in records if r["what"] == "checked"] == ["ours, no cap", "ours, a half moved"]
    assert "1 pairs" in out and out.endswith(": unmeasured\n")  # a single pair is no result


def of_vocabulary(out: str, _: Path) -> None:
    losses = re.findall("losses (.*)", out)
    assert len(losses) == 3 and len(set(losses)) == 1 and losses[0].count(".") == 2
    assert numbers("below the head in the last stage: the largest rank falls by ([0-9.]+)", out)[0] > (0.05,)


def of_predict(out: str, _: Path) -> None:
    told, measured = out.split("predictions, made before any step")[1].split("measured ms")
    assert "h256 fp32 gpipe P2 M4 k1 S128 layers 2+2" in told
    assert len(numbers(r"^ +(\d) +([0-9.]+) +([0-9.]+) +([0-9.]+) +\d+ .*(?:inside|OUTSIDE)$", measured)) == 1
    assert " of 1 measured ones inside at the profile's speed, of 1," in measured


def of_caps(out: str, folder: Path) -> None:
    assert (folder / "caps.txt").read_text() == out
    records = [json.loads(line) for line in (folder / "caps.jsonl").read_text().splitlines()]
    [ran] = [r for r in records if r["what"] == "ran"]
    [plan] = [Plan.from_json(r["text"]) for r in records if r["what"] == "plan"]
    assert (
        len(ran["steps"]) == 3 and sum(ran["units"]) == plan.num_microbatches * plan.num_segments * plan.stages_per_rank
    )
    assert all(total > shared > 0 for total, shared in zip(ran["total"], ran["shared"], strict=True))


def of_paper(out: str, _: Path) -> None:
    """No time is in it: all cells are fitted, predicted, or told to be out of memory."""
    assert out.count(", fit\n") == 12 and out.count(" GB: out of memory\n") == 3 and "WRONG" not in out
    assert [n for (n,) in numbers(r": n (\d+), mean error: model [0-9.]+%", out)] == [4, 3, 9, 5]


def of_simulate(out: str, _: Path) -> None:
    rows = numbers(r"^.{34} +(\d+) +[0-9.]+ +([0-9.]+)  .* 1 runs$", out)
    assert [units for units, _ in rows] == [4096] * 5 + [6144, 4096] and all(rate > 0 for _, rate in rows)
    assert len(numbers(r"^auto, (\d) stages per rank: bubble ([0-9.]+)%", out)) == 3


def of_endurance(out: str, _: Path) -> None:
    assert out.count("nothing grew") == 2 and "GREW" not in out


FOREIGN = "--foreign=inf"  # whatever else runs here
SHORT: dict[str, tuple[list[str], Callable[[str, Path], None]]] = {
    "tuning": (["--case", "96", "2", "--rounds=1", FOREIGN], of_tuning),
    "train": (["--length=64", "--pairs=1", "--only=float32", FOREIGN], of_train),
    "attention_ranges": (["--tokens=1024", "--rounds=2"], of_attention_ranges),
    "engine": (
        [FOREIGN, "--rounds=1", "--round-steps=2", "--ranks=2", "--microbatches=2", "--segments=2", "--unit-ms=1"],
        of_engine,
    ),
    "p2p": (["--repeats=1", "--bytes", str(2**20), str(3 * 2**20)], of_p2p),
    "tree_steps": (["--prompt=64", "--responses=4", "--response=16", "--steps=1"], of_tree_steps),
    "timeline": (["step.png", "--limit=inf", "--length=128", "--segments=2"], of_timeline),
    "memory": (["--quick", "--minutes=0", "--output=."], of_memory),
    "moves": (["--quick", FOREIGN, "--output=."], of_moves),
    "vocabulary": (["--ranks=2", "--vocab=4096", "--hidden=64", "--tokens=64", "--steps=2"], of_vocabulary),
    "predict": (["--quick", "--first=1"], of_predict),
    "caps": (["--quick", FOREIGN, "--output=."], of_caps),
    "paper": ([], of_paper),
    "simulate": (["--quick", "--runs=1"], of_simulate),
    "endurance": (["--steps=101", "--transports=shm"], of_endurance),
}
ELSEWHERE = {  # in the other tests of this file; gpu in test_gpu_benchmark.py
    *("pipeline", "split", "attention", "lengths", "restarts", "gpu"),
}


@pytest.mark.parametrize("script", SHORT)
def test_a_script_measures_what_it_is_called_after(script: str, tmp_path: Path) -> None:
    arguments, check = SHORT[script]
    check(run(tmp_path, f"{script}.py", *arguments), tmp_path)


def test_every_script_of_the_index_has_a_test() -> None:
    named = set(re.findall(r"^\|.*\]\((\w+)\.py\)", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert named == SHORT.keys() | ELSEWHERE


def test_every_form_of_attention_is_checked_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one ends the script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import attention

    for name, value in (("REPETITION_SECONDS", 0.0), ("SLOWED", 0.0)):
        monkeypatch.setattr(attention, name, value)
    case = attention.Case(torch.float32, 64, 2, 2, 32, 96, v_dim=64)
    measured = attention.Measured(case, [1])
    peaks = {1: attention.Peak(1)}
    for _ in range(attention.ROUNDS):
        measured.add(1.0, peaks)
    [row] = measured.rows
    assert set(row.times) == {"ours", "two calls"} and set(measured.errors) > {"ours", "two calls", "explicit mask"}
    assert all(len(times) == len(row.peaks) >= attention.MIN_REPETITIONS for times in row.times.values())
    assert not row.discarded and attention.rate(case, row, "ours", attention.BACKWARD)[0] > 0


LAUNCHER = r"""
import os, pathlib, subprocess
log = pathlib.Path("runs/gpt/log.jsonl")
log.parent.mkdir(parents=True)
ranks = lambda seconds: [subprocess.Popen(["sleep", seconds], env=os.environ | {"RANK": r}) for r in "01"]
log.write_text('{"loss": 2.0}\n')
first = ranks("60")
os.wait()
for rank in first:
    rank.kill()
    rank.wait()
again = ranks("0.1")
log.write_text('{"loss": 2.0}\n{"loss": 1.0}\n')
for rank in again:
    rank.wait()
"""


def test_a_rank_is_killed_after_the_step_that_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the place of torchrun stands a launcher that begins again when a rank dies."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import restarts

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", LAUNCHER], cwd=folder)

    monkeypatch.setattr(restarts, "start", start)
    code, _, lost = restarts.disturb(tmp_path, [(1, 0.0)], random.Random(0))
    assert code == 0 and restarts.rows(tmp_path) == [2.0, 1.0]
    assert len(lost) == 1 and re.fullmatch(r"rank [01] after step 1, [0-9.]+ s", lost[0])


# -- what single scripts judge -----------------------------------------------------------------------------------------


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import pipeline

    return pipeline


def test_arms_train_alike_and_what_cannot_run_says_why(tmp_path):
    arguments = ["--length=64", "--microbatches=2", "--hidden=64", "--segments=2", "--split=flops", "--rounds=2"]
    schedules = ["--schedules", "1F1B", "ZBVZeroBubble", "DualPipeV", "runtime", "seq1f1b", "seq1f1b-interleaved"]
    path = tmp_path / "results"
    out = run(tmp_path, "pipeline.py", *arguments, *schedules, FOREIGN, "--results", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    arms = [r for r in records if r["what"] == "arm"]
    assert len(arms) == 12 and all(r["case"] == CASE for r in arms)
    for r in arms:
        if r["spec"]["schedule"] == "DualPipeV":
            assert "DualPipeV requires at least as many microbatches as stages" in r["refused"]
        else:
            assert r["loss_error"] < 1e-6 and r["gradient_error"] < 1e-5, r
    rounds = [r for r in records if r["what"] == "round"]
    assert [len(r["steps"]) for r in rounds] == [10, 10]
    assert all(
        seconds > 0 and 0 <= least <= bubble < 1 for r in rounds for seconds, _, bubble, least in r["steps"].values()
    )
    assert "refuses: DualPipeV requires" in out and "unmeasured (2)" in out
    bars = out.partition("## What must hold\n")[2].splitlines()
    assert len(bars) > 15 and all(line.endswith(": unmeasured") for line in bars)


def test_a_schedule_that_torch_lacks_is_named(pipeline):
    from arms import Unavailable, torch_schedule

    assert torch_schedule("ZBVZeroBubble").__name__ == "ScheduleZBVZeroBubble"
    with pytest.raises(Unavailable, match=f"torch {torch.__version__} has no schedule 'Missing'".replace("+", r"\+")):
        torch_schedule("Missing")


@pytest.mark.parametrize(
    ("seconds", "counted", "verdict"),
    [(1.0, 15, "passed"), (1.3, 15, "FAILED"), (1.0, 14, "unmeasured"), (1.0, 0, "unmeasured")],
)
def test_a_ratio_is_judged_over_counted_pairs_only(pipeline, tmp_path, seconds, counted, verdict):
    results = pipeline.Results(str(tmp_path / "results"))
    bar = next(bar for bar in pipeline.bars() if bar.wanted == 1.16)
    for i in range(20):  # a step that others disturbed is far too slow, and does not count
        ours = [seconds, 0.02, 0.1] if i < counted else [100.0, 0.5, 0.1]
        steps = {bar.theirs.label: [1.4, 0.02, 0.2], bar.ours[0].label: ours}
        results.add(what="round", case=str(bar.case), steps=steps)
    assert bar.judge(pipeline.Results(results.path)).endswith(verdict)


def test_memory_is_judged_by_the_worst_rank(pipeline, tmp_path):
    results = pipeline.Results(str(tmp_path / "results"))
    bar = next(bar for bar in pipeline.bars() if bar.memory and bar.wanted == 0.6)
    assert bar.judge(results) == "unmeasured"
    for spec, growth in ((bar.theirs, [100, 60]), (bar.ours[1], [50, 61])):
        fields = pipeline.dataclasses.asdict(spec)
        results.add(what="peak", case=str(bar.case), spec=fields, growth=growth, total=growth)
    assert "0.610" in bar.judge(results) and bar.judge(results).endswith("FAILED")
    results.add(what="peak", case=str(bar.case), spec=fields, growth=[50, 55], total=[50, 55])
    assert bar.judge(results).endswith("passed")


def test_results_of_another_commit_are_not_mixed_in(pipeline, tmp_path):
    results = pipeline.Results(str(tmp_path / "results"))
    results.add(what="header", lines=["# another", "# commit 0", "# machine"])
    with pytest.raises(SystemExit, match="holds results of\n# another"):
        results.begin("Pipeline")


def test_the_examples_model_has_one_gradient_under_every_attention(pipeline):
    from arms import OurArm, Spec
    from torch_attention import FORMS
    from train import ExampleCase

    case, found = ExampleCase(96, 2, ranks=1), {}
    for form in ("ours", *FORMS):
        arm = OurArm(case, Spec("seq1f1b", "ours" if form == "ours" else "torch", 3), 0, form=form)
        loss = arm.step()
        found[form] = loss, {name: grad.clone() for name, grad in arm.gradients().items()}
        arm.engine.close()
    loss, truth = found.pop("ours")
    for form, (other_loss, gradients) in found.items():
        assert abs(other_loss - loss) < 1e-6 * loss, form
        for name, grad in gradients.items():
            torch.testing.assert_close(grad, truth[name], rtol=0, atol=5e-6 * float(truth[name].abs().max()), msg=name)


def test_the_split_backward_is_measured_beside_torchs(monkeypatch, tmp_path):
    """That it runs, and that what I leaves to W is less than torch's split keeps: times are no matter of a test."""
    for name, value in (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", str(2**40))):  # else it begins anew
        monkeypatch.setenv(name, value)
    out = run(tmp_path, "split.py", "--quick")
    rows = [line.split() for line in out.splitlines() if line.startswith(("float32  ", "bfloat16  "))]
    cells = [row for row in rows if row[1] == "256"]
    assert len(cells) == 2
    for *_, ours, theirs in cells:
        assert 0 < float(ours) < float(theirs)


@pytest.mark.timeout(600)  # many processes, one after the other, on a machine that may be busy
@pytest.mark.full  # starts 18 processes one after another, about 100 seconds of a core
def test_time_over_memory_is_measured(tmp_path):
    """Small, and under any load: what is written, not how fast it is."""
    run = subprocess.run(
        [sys.executable, str(FOLDER / "memory.py"), "--quick", "--foreign=inf", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert run.returncode == 0, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.jsonl", "memory.png", "memory.txt"]
    assert (tmp_path / "memory.txt").read_text() == run.stdout
    records = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    names = [r["arm"] for r in records if r["what"] == "checked"]
    assert {"torch 1F1B", "ours, no cap", "ours, all recomputed"} <= set(names)
    peaks = {r["arm"]: r for r in records if r["what"] == "peak"}
    assert sorted(peaks) == sorted(names) and all(min(r["growth"]) > 0 for r in peaks.values())
    for kept, recomputed, moved in peaks["ours, all recomputed"]["units"]:
        assert (kept, moved) == (0, 0) and recomputed > 0
    assert max(peaks["ours, all recomputed"]["planned"]) < max(peaks["ours, no cap"]["planned"])
    [steps] = [r["steps"] for r in records if r["what"] == "round"]
    assert sorted(steps) == sorted(names)
    for r in records:
        if r["what"] == "attempt":
            assert r["fits"] == (max(r["growth"]) <= 16 * 2**20)
    [trained], [whole] = ([r for r in records if r["what"] == what] for what in ("trained", "whole"))
    assert trained["losses"] == pytest.approx(whole["losses"], rel=1e-4)
    assert "losses of these steps equal one process's" in run.stdout


def test_the_longest_sequence_is_found_from_growth(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import memory
    from arms import Case

    for longest in (1024, 13 * 1024, 8192, 60 * 1024 + 5, 100):
        results = memory.Results(str(tmp_path / f"{longest}"), 1.0)
        results.add(what="case", fields=dataclasses.asdict(Case(8192, 2)), cap=1000 + longest)

        def attempt(case, results=results, longest=longest):
            growth = [1000 + case.length, 1000 + case.length // 2]
            results.add(what="attempt", arm="one", tokens=case.length, growth=growth, fits=case.length <= longest)

        memory.find_longest(results, "one", 1024, math.inf, attempt)
        assert results.longest("one") == longest // 1024 * 1024
        assert len(results.of("attempt")) <= 6


def test_our_curve_is_judged_at_each_size(monkeypatch, tmp_path):
    """By the arms that are within the time, or within the size of torch's schedule."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import memory

    results = memory.Results(str(tmp_path / "results"), 0.08)
    arms = {"fast": (1.0, 500), "small": (1.05, 390), "tiny": (1.3, 240), "torch": (1.2, 1000)}
    for name, (seconds, growth) in arms.items():
        arm = memory.PEERS[0] if name == "torch" else memory.Ours(f"ours, {name}", "")
        arms[name] = arm.name, seconds, growth
        results.add(what="arm", fields=dataclasses.asdict(arm))
        results.add(what="peak", arm=arm.name, growth=[growth // 2, growth])
    assert all(line.endswith("unmeasured") for line in memory.verdicts(results))
    for _ in range(16):
        results.add(what="round", steps={name: (seconds, 0.02) for name, seconds, _ in arms.values()})
        results.add(what="round", steps={name: (9.0, 0.5) for name, *_ in arms.values()})  # others use the cores
    first, second, third = memory.verdicts(results)
    assert first.endswith("0.390, ours, small, 1.050 times: passed")
    assert second.endswith("0.240, ours, tiny, 1.300 times: passed")
    assert third.endswith("1.200 [1.200, 1.200] times by ours, fast, 16 pairs: passed")
    results.add(what="peak", arm="ours, small", growth=[410, 10])
    results.add(what="peak", arm=memory.BASE, growth=[200, 230])
    first, _, third = memory.verdicts(results)
    assert first.endswith("1.783, ours, small, 1.050 times: FAILED")
    assert third.endswith("no arm of ours needs as little: FAILED")


def test_plans_under_caps_are_judged(monkeypatch, tmp_path, capsys):
    """A rank's own receive places count, those of its neighbour do not; a step beside others does not either."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import caps
    from arms import Case

    from seq1f1b.planning.hardware import load_hardware
    from seq1f1b.planning.search import search_plans

    case = Case(2048, 2)
    counts = {"seq_len": 2048, "num_ranks": 2, "num_microbatches": 2, "best": 1}
    plan = search_plans(case.shape, load_hardware("cpu-zen5"), **counts).plans[0]
    plan = dataclasses.replace(plan, peak=(1000, 1200), cap=1210, low=1.0, high=2.0)
    results = caps.Results(str(tmp_path / "results"), 0.08)
    results.add(what="header", lines=["# a header"])
    results.add(what="case", fields=dataclasses.asdict(case), cap=0)

    def add(name, total, seconds):
        results.add(what="plan", name=name, text=plan.to_json(), receive=[100, 50])
        steps = [(second, 0.01) for second in seconds]
        ran = {"total": total, "shared": [150, 150], "steps": [*steps, (9.0, 0.5)], "units": [1, 2, 3]}
        results.add(what="ran", name=name, **ran)

    add("good", [1000 + 50, 1200 + 100], [1.4, 1.6])
    caps.show(results)
    assert capsys.readouterr().out.count(": passed") == 3
    add("more than planned", [1060 + 50, 1200 + 100], [1.4, 1.6])
    add("above the cap", [1000 + 50, 1211 + 100], [2.1, 2.2])
    add("never alone", [1000 + 50, 1200 + 100], [1.4])
    caps.show(results)
    *_, near, below, inside = capsys.readouterr().out.splitlines()
    assert near.endswith("the plan's: 3 of 4: FAILED")
    assert below.endswith("no rank above the cap: 3 of 4: FAILED")
    assert inside.endswith("interval: 2 of 3: FAILED")


def run_lengths(tmp_path, part, *options):
    return run(tmp_path, "lengths.py", part, "--quick", "--output", str(tmp_path), *options)


def test_planned_steps_are_faster_on_paper(tmp_path):
    shown = run_lengths(tmp_path, "simulate")
    assert (tmp_path / "lengths-simulate.txt").read_text() == shown
    bars = shown.partition("## What must hold\n")[2].splitlines()
    assert [line.rpartition(": ")[2] for line in bars[:2]] == ["passed"] * 2  # the third is a time


@pytest.mark.full  # four times two processes, one after the other: half a minute
def test_planned_steps_are_measured_beside_others(tmp_path):
    shown = run_lengths(tmp_path, "measure", "--foreign=inf", "--rounds=2")
    records = [json.loads(line) for line in (tmp_path / "lengths-measured.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["what"] == "step"]
    assert len(steps) == 2 and all(r["error"] < 1e-5 for r in steps)
    assert [sorted(r["seconds"]) for r in records if r["what"] == "round"] == [["fixed", "ours", "torchs"]] * 4
    assert [r["arm"] for r in records if r["what"] == "memory"] == ["ours", "fixed", "torchs"]
    assert "fewer than 15 counted" in shown and ": unmeasured" in shown
