"""Do the benchmarks run, compare like with like, and judge only what they measured?

Each script of ``benchmarks/README.md`` runs here in a shortest form: its arms are what they are called, and its steps
count. Its figures are no matter of a test.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scripts import Script, environment

from seq1f1b.plan import Plan

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASE = "S64 M2 P2 hidden 64 blocks 4"
FORKED = Path(__file__).parents[1] / "support" / "forked_benchmark.py"


@pytest.fixture(autouse=True)
def scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def run(folder: Path, script: str, *arguments: str) -> str:
    """What a benchmark prints."""
    code, out, err = Script(FORKED, [str(FOLDER / script), *arguments], folder, environment()).finish(240)
    assert code == 0, f"{out[-2000:]}{err[-4000:]}"
    return out


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """The groups of each match, as numbers."""
    return [tuple(map(float, match.groups())) for match in re.finditer(pattern, text, re.MULTILINE)]


# -- each script in its shortest form ----------------------------------------------------------------------------------


def says(*patterns: str) -> Callable[[str, Path], None]:
    """A check that the output has these lines. Scripts compare losses and gradients of their arms themselves."""

    def check(out: str, _: Path) -> None:
        assert [pattern for pattern in patterns if not re.search(pattern, out, re.MULTILINE)] == []

    return check


def of_memory(out: str, folder: Path) -> None:
    """The arms, before any is measured: `moves` and `caps` measure times and peaks as it does."""
    assert (folder / "memory.txt").read_text() == out
    records = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    torchs, ours = [r["fields"] for r in records if r["what"] == "arm"]
    assert (torchs["schedule"], torchs["checkpoint"]) == ("1F1B", False) and ours["name"] == "ours, no cap"
    assert Plan.from_json(ours["plan"]).units == ()


def of_vocabulary(out: str, _: Path) -> None:
    losses = re.findall("losses (.*)", out)
    assert len(losses) == 3 and len(set(losses)) == 1 and losses[0].count(".") == 2
    (in_stage,), _, (spread,) = numbers("^largest rank ([0-9.]+) MiB", out)
    assert spread < 0.95 * in_stage


def of_paper(out: str, _: Path) -> None:
    """No time is in it: all cells are fitted, predicted, or told to be out of memory."""
    assert out.count(", fit\n") == 12 and out.count(" GB: out of memory\n") == 3 and "WRONG" not in out
    assert [n for (n,) in numbers(r": n (\d+), mean error [0-9.]+%", out)] == [4, 9]


FOREIGN = "--foreign=inf"  # whatever else runs here
SHORT: dict[str, tuple[list[str], Callable[[str, Path], None]]] = {
    "tuning": (["--case", "96", "2", "--rounds=1", FOREIGN],
               says("tuned for 96 tokens in ", "errors of gradients:(.*e-0[67]){6}$", "^  tuned .* s, 1 steps")),
    "train": (["--length=64", "--pairs=1", "--only=float32", FOREIGN],
              says("two calls against ours: ", "1 pairs, 0 discarded")),
    "engine": ([FOREIGN, "--rounds=1", "--round-steps=2"], says("1 rounds counted", ", 0 discarded")),
    "p2p": (["--repeats=1", "--bytes", str(2**20), str(3 * 2**20)],
            says(f"^ *{2**20} +[0-9.]+ ", f"^ *{3 * 2**20} +[0-9.]+ ")),
    "tree_steps": (["--prompt=64", "--responses=4", "--response=16", "--steps=1", FOREIGN],
                   says("2 trees: trees ", "2 trees: rows ", "2 trees: packed ", "over trees: ")),
    "timeline": (["step.png", FOREIGN, "--length=128", "--segments=2"],
                 says("^1F1B: .*, of 4, 4 units$", "^Seq1F1B, 2 segments: .*, of 8, 8 units$")),
    "memory": (["--quick", "--minutes=0", "--output=."], of_memory),
    "moves": (["--quick", FOREIGN, "--output=."], says("1 pairs", "UNMEASURED")),  # a single pair is no result
    "vocabulary": (["--ranks=2", "--vocab=4096", "--hidden=64", "--tokens=64", "--steps=2"], of_vocabulary),
    "predict": (["--quick", "--first=1"], says("h256 fp32 gpipe P2", "(inside|OUTSIDE)$", " of 1 measured ones")),
    "restarts": (["--runs=1"], says("1 of 1 runs ended with the losses of the undisturbed one")),
    "caps": (["--quick", FOREIGN, "--output=."], says("^no rank above the cap: . of 1$")),
    "paper": ([], of_paper),
    "kinds": (["--tokens=16", "--passes=1", "--only=experts"], says("^dense  .*%$", "^experts  .*%$")),
    "simulate": (["--quick", "--runs=1"], says("^.{34} +4096 +[0-9.]+ +[0-9.]+  .* 1 runs$")),
    "endurance": (["--steps=101", "--transports=shm"], says("nothing grew")),
}  # fmt: skip
ELSEWHERE = {"pipeline", "split", "attention", "lengths", "gpu"}  # other tests of this file; test_gpu_benchmark.py
SHARED = {"arms", "common", "decoder", "torch_attention"}


@pytest.mark.parametrize("script", SHORT)
def test_a_script_measures_what_it_is_called_after(script: str, tmp_path: Path) -> None:
    arguments, check = SHORT[script]
    if script == "kinds":
        pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')
    check(run(tmp_path, f"{script}.py", *arguments), tmp_path)


def test_every_script_of_the_index_has_a_test() -> None:
    named = set(re.findall(r"\]\((\w+)\.py\)", (FOLDER / "README.md").read_text()))
    assert named == {file.stem for file in FOLDER.glob("*.py") if not file.name.startswith("gpu_")}
    assert named - SHARED == SHORT.keys() | ELSEWHERE


def test_every_form_of_attention_is_checked_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one ends the script."""
    import attention

    for name in ("REPETITION_SECONDS", "SLOWED"):
        monkeypatch.setattr(attention, name, 0.0)
    case = attention.Case(torch.float32, 64, 2, 2, 32, 96, v_dim=64)
    measured = attention.Measured(case, [1])
    peaks = {1: attention.Peak(1)}
    for _ in range(attention.ROUNDS):
        measured.add(peaks)
    [row] = measured.rows
    assert set(row.times) == {"ours", "two calls"} and set(measured.errors) > {"ours", "two calls", "explicit mask"}
    assert all(len(times) == len(row.peaks) == attention.ROUNDS * attention.REPETITIONS for times in row.times.values())
    assert not row.discarded and attention.rate(case, row, "ours", attention.BACKWARD)[0] > 0


# -- what single scripts judge -----------------------------------------------------------------------------------------


def test_arms_train_alike_and_what_cannot_run_says_why(tmp_path):
    arguments = ["--length=64", "--microbatches=2", "--hidden=64", "--segments=2", "--split=flops", "--rounds=2"]
    schedules = ["--schedules", "1F1B", "ZBVZeroBubble", "DualPipeV", "seq1f1b", "seq1f1b-interleaved"]
    path = tmp_path / "results"
    out = run(tmp_path, "pipeline.py", *arguments, *schedules, FOREIGN, "--results", str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    arms = [r for r in records if r["what"] == "arm"]
    assert len(arms) == 10 and all(r["case"] == CASE for r in arms)
    for r in arms:
        if r["spec"]["schedule"] == "DualPipeV":
            assert "DualPipeV requires at least as many microbatches as stages" in r["refused"]
        else:
            assert r["loss_error"] < 1e-6 and r["gradient_error"] < 1e-5, r
    rounds = [r for r in records if r["what"] == "round"]
    assert [len(r["steps"]) for r in rounds] == [8, 8]
    assert all(
        seconds > 0 and 0 <= least <= bubble < 1 for r in rounds for seconds, _, bubble, least in r["steps"].values()
    )
    assert "refuses: DualPipeV requires" in out and "unmeasured (2)" in out


def test_a_ratio_is_of_counted_pairs_only(tmp_path):
    """A step that others disturbed is far too slow, and does not count."""
    from common import Records

    results = Records(str(tmp_path / "results"))
    for i in range(20):
        results.add(what="round", case="one", steps={"a": [1.4, 0.02], "b": [1.0, 0.02] if i < 15 else [100.0, 0.5]})
    results.add(what="round", case="two", steps={"a": [9.0, 0.0], "b": [1.0, 0.0]})
    pairs = Records(results.path).pairs("a", "b", case="one")
    assert pairs.measured and pairs.ratio() == (1.4, 1.4, 1.4) and pairs.discarded == 5
    assert results.missing(["a", "b"], 18, case="one") == 3


def test_results_of_another_commit_are_not_mixed_in(tmp_path):
    import pipeline

    results = pipeline.Records(str(tmp_path / "results"))
    results.add(what="header", lines=["# another", "# commit 0", "# machine"])
    with pytest.raises(SystemExit, match="holds results of\n# another"):
        results.begin("Pipeline")


def test_the_split_backward_is_measured_beside_torchs(monkeypatch, tmp_path):
    """That it runs: times are no matter of a test."""
    for name, value in (("MALLOC_MMAP_MAX_", "0"), ("MALLOC_TRIM_THRESHOLD_", str(2**40))):  # else it begins anew
        monkeypatch.setenv(name, value)
    out = run(tmp_path, "split.py", "--quick")
    cells = numbers(r"^(?:float32|bfloat16) +256 +256 +([0-9.]+) +([0-9.]+) \+ +([0-9.]+) ", out)
    assert len(cells) == 2 and all(min(cell) > 0 for cell in cells)


def test_the_longest_sequence_is_found_from_growth(tmp_path):
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


def test_plans_under_caps_are_judged(tmp_path, capsys):
    """A rank's own receive places count, those of its neighbour do not; a step beside others does not either."""
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
    assert re.findall(r": (\d of \d)$", capsys.readouterr().out, re.MULTILINE) == ["1 of 1"] * 3
    add("more than planned", [1060 + 50, 1200 + 100], [1.4, 1.6])
    add("above the cap", [1000 + 50, 1211 + 100], [2.1, 2.2])
    add("never alone", [1000 + 50, 1200 + 100], [1.4])
    caps.show(results)
    assert re.findall(r": (\d of \d)$", capsys.readouterr().out, re.MULTILINE) == ["3 of 4", "3 of 4", "2 of 3"]


def run_lengths(tmp_path, part, *options):
    return run(tmp_path, "lengths.py", part, "--quick", "--output", str(tmp_path), *options)


def test_planned_steps_are_faster_on_paper(tmp_path):
    shown = run_lengths(tmp_path, "simulate")
    assert (tmp_path / "lengths-simulate.txt").read_text() == shown
    [(mean, least)] = numbers(r"^gain over the best of the others: mean ([0-9.]+), least ([0-9.]+)$", shown)
    assert mean >= 1.12 and least >= 1


@pytest.mark.full  # four times two processes, one after the other: half a minute
def test_planned_steps_are_measured_beside_others(tmp_path):
    shown = run_lengths(tmp_path, "measure", "--foreign=inf", "--rounds=2")
    records = [json.loads(line) for line in (tmp_path / "lengths-measured.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["what"] == "step"]
    assert len(steps) == 2 and all(r["error"] < 1e-5 for r in steps)
    assert [sorted(r["seconds"]) for r in records if r["what"] == "round"] == [["fixed", "ours", "torchs"]] * 4
    assert [r["arm"] for r in records if r["what"] == "memory"] == ["ours", "fixed", "torchs"]
    assert "fewer than 15 counted" in shown
