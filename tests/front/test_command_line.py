"""Does the command line draw, simulate and diagnose, and refuse in one line?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import seq1f1b
from seq1f1b import Costs, build_schedule
from seq1f1b.__main__ import main, make_parser
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware, load_model

SIMULATED = {  # P 4, M 8, F 1, B 2 unless told otherwise; k is shown where a schedule has segments
    "1f1b": [["1f1b", "33.000", "27.3%", "4", "4.00"]],  # 3 M + 3 (P - 1) / k seconds, (P - 1 + k) / k micro-batches
    "1f1b seq1f1b": [["1f1b", "1", "33.000", "27.3%", "4", "4.00"], ["seq1f1b", "4", "26.250", "8.6%", "7", "1.75"]],
    "seq1f1b --segments 2": [["seq1f1b", "2", "28.500", "15.8%", "5", "2.50"]],
    "interleaved-1f1b": [["interleaved-1f1b", "28.500", "15.8%", "11", "5.50"]],
    "interleaved-1f1b --stages 4": [["interleaved-1f1b", "26.250", "8.6%", "19", "4.75"]],
    "kfkb --option group=2": [["kfkb", "33.000", "27.3%", "8", "8.00"]],
    "order.csv --segments 2": [["order.csv", "2", "3.000", "0.0%", "2", "1.00"]],
    "order.txt": [["order.txt", "6.000", "50.0%", "1", "1.00"]],
}


@pytest.mark.parametrize("line", SIMULATED)
def test_simulate_prints_the_known_figures(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("order.csv").write_text("0F0,0F1,0B1,0B0\n")
    Path("order.txt").write_text("F0.0 B0.0\nF0.0 B0.0\n")
    assert main(["simulate", *line.split()]) == 0
    assert [row.split() for row in capsys.readouterr().out.splitlines()[1:]] == SIMULATED[line]


def test_trees(tmp_path, capsys):
    trees = "--parents=-1,0,0 -1,0,1,1,0 -"
    counts = ["--ranks", "2", "--segments", "2"]
    assert main(["draw", "seq1f1b", trees, *counts, "--option", "trees=nested", "--width", "60"]) == 0
    assert "forward" in capsys.readouterr().out
    options = {"trees": "nested"}
    parents = [[-1, 0, 0], [-1, 0, 1, 1, 0], None]
    order = build_schedule(
        "seq1f1b", num_ranks=2, num_microbatches=3, num_segments=[3, 5, 2], parents=parents, options=options
    )
    file = tmp_path / "order.txt"
    file.write_text(order.to_text())
    for source in (["seq1f1b", trees, *counts, "--option", "trees=nested"], [str(file)]):
        assert main(["simulate", *source, "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)
        assert found["makespan"] == pytest.approx(order.simulate(Costs(1 / 5, 2 / 5)).makespan)
        assert found["peak"] == list(order.simulate().peak)
    assert main(["draw", "seq1f1b", "--parents=-1,0,0", *counts, "--width", "200"]) == 0  # one word, for all
    assert "0.2==" in capsys.readouterr().out
    pytest.importorskip("matplotlib", reason="PNG timelines need the optional matplotlib")
    page, trace, png, svg = (tmp_path / name for name in ("page.html", "trace.json", "t.png", "t.svg"))
    files = ["--html", str(page), "--trace", str(trace), "--png", str(png), "--svg", str(svg)]
    assert main(["draw", str(file), *files]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text() and page.exists()
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"}
    assert {"F1.4", "B1.4"} <= names and len(names) == 2 * 10


def test_simulate_with_the_costs_of_a_model(capsys):
    """As the cost model says, with the split and the layers of equal time; JSON has what the table rounds."""
    line = ["simulate", "seq1f1b", "zb-h1", "--model", "llama3-8b", "--hardware", "h200", "--seq", "16384"]
    counts = {"num_ranks": 4, "num_microbatches": 8}
    assert main([*line, "--steps", "3", "--inside", "full", "--json", "--segments", "1"]) == 0
    cost = CostModel.balanced(
        load_model("llama3-8b"), load_hardware("h200"), num_ranks=4, seq_len=16384, layout=Layout(inside="full")
    )
    makespans = []
    for found, name in zip(json.loads(capsys.readouterr().out), ("seq1f1b", "zb-h1"), strict=True):
        options = {"costs": tuple(cost.price([16384]).seconds[:3])} if name == "zb-h1" else {}
        order = seq1f1b.build_schedule(name, **counts, options=options)
        memory = cost.price([16384]).step_memory(order.rank_of_stage)
        run = order.simulate(cost.price([16384]).costs(order), memory=memory, steps=3, optimizer_sync=False)
        makespans.append(f"{run.makespan:.3g}")
        assert (found["makespan"], found["period"], found["span"]) == (run.makespan, run.period, list(run.span))
        assert found["memory"]["total"] == list(run.memory.total) and min(run.memory.total) > 0
        assert found["peak_microbatches"] == max(run.peak)
    assert main([*line, "--segments", "1", "--inside", "full"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[-1] == "GiB" and len(table) == 3
    assert [line.split()[1] for line in table[1:]] == makespans  # what the rates of a machine are good for


def test_compare_prints_a_table(capsys):
    assert main(["compare", "1f1b", "gpipe", "seq1f1b", "--segments", "2", "--cap", "3"]) == 0
    assert capsys.readouterr().out == (
        "family   v  k  makespan  bubble  units  held  sends\n"
        "seq1f1b  1  2      28.5   15.8%      5  2.50     96\n"
        "\n"
        "v: stages per rank; k: segments; held: activations in micro-batches;\n"
        "units to held: the most that a rank holds at once\n"
        "\n"
        "left out:\n"
        "1f1b   holds 4.00 micro-batches, the cap is 3\n"
        "gpipe  holds 8.00 micro-batches, the cap is 3\n"
    )
    asked = ["--model", "gpt-7b", "--hardware", "a100", "--seq", "32k", "--cap", "200GiB"]
    assert main(["compare", "1f1b", "seq1f1b", *asked]) == 0
    head, first, *_, units, above = capsys.readouterr().out.splitlines()
    row = dict(zip(head.split(), first.split(), strict=False))
    assert head.endswith("GiB  sends  sent GiB") and 80 < float(row["GiB"]) < 200 and row["family"] == "seq1f1b"
    assert units.startswith("units to GiB") and above == "2 of 2 hold more than the 80.0 GiB of a100"


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "why a measured step is slow" in capsys.readouterr().err


PAGES = {
    "1f1b seq1f1b --microbatches 8 --segments 4": [
        "<title>1f1b and seq1f1b, 4 segments</title>",
        '"path":[',
        '"heading":"1f1b","makespan":33.0,"bubble":0.2727',
        '"heading":"seq1f1b, 4 segments","makespan":26.25,"bubble":0.0857',
    ],
    "seq1f1b --segments 2 --model qwen3-4b --seq 8192": ["optimizer state", "KV gradients", '"whole":null'],
    "seq1f1b --tier 0.5": ['"slack":null,"path":null'],  # the critical path, which is not known there
}


@pytest.mark.parametrize("line", PAGES)
def test_pages(line, tmp_path):
    path = tmp_path / "page.html"
    assert main(["draw", *line.split(), "--html", str(path)]) == 0
    page = path.read_text()
    assert all(text in page for text in PAGES[line])


TREES = "plan --model llama3-8b --ranks 8 --microbatches 4"
MISTAKES = {  # many more are the core's, whose sentences are told in the same way
    "draw nonsense": "there is no schedule and no file named 'nonsense'; there are seq1f1b, 1f1b, ",
    "draw seq1f1": "there is no schedule and no file named 'seq1f1'; did you mean 'seq1f1b'?",
    "compare ZBV v-hlaf": "there is no schedule named 'ZBV'; did you mean 'zbv'?",
    "draw gpipe --microbatches 2000000000": "gpipe: 16000000000 units, more than the 10000000",
    "compare --ranks 1000000 --microbatches 1000000": "units, more than the 10000000 that the command line takes",
    "simulate gpipe --forward nan": "the duration of a unit is nan, must be finite and at least 0",
    "compare --weight -0.5": "costs hold -0.5, must be finite and at least 0",
    "simulate 1f1b --jitter 2": "jitter is 2, must be in 0..1: a share of a unit's seconds",
    "draw 1f1b --model llama3-8b": "--model needs --seq, the tokens of a micro-batch",
    "draw 1f1b --model llama3-8b --seq 64 --backward 2": "--backward and --model: the model has costs of its own",
    "draw 1f1b --model llama3 --seq 64": "there is no preset 'llama3' among models; did you mean 'llama3-8b'?",
    "draw seq1f1b --model llama3-8b --sizes 4,5 --segments 3": "--sizes holds 2 numbers, the order has 3 segments",
    "draw 1f1b --model llama3-8b --sizes 4 --seq 5": "--sizes holds 4 tokens, --seq is 5",
    "draw 1f1b --model llama3-8b --seq 64 --profile no.json": "No such file or directory: 'no.json'",
    "simulate uneven.txt --model llama3-8b --seq 64": "a model needs as many stages on every rank",
    "draw 1f1b --png=": "Is a directory: ",
    "draw 1f1b --forward 1e308 --backward 1e308": "the costs sum to more than a double holds",
    "draw gpipe --ranks 500 --microbatches 101 --png t.png": "a picture of 101000 units, more than the 100000",
    "draw gpipe --ranks 500 --microbatches 101 --html t.html": "a page of 101000 units, more than the 100000",
    "draw gpipe --ranks 5 --microbatches 100001 --trace t.json": "a trace of 1000010 units, more than the 1000000",
    "draw auto --option costs=1": "--option costs=1: costs come from --forward, --backward and --weight",
    "draw seq1f1b --parents=": "--parents holds no word",
    "simulate seq1f1b --parents=-1,0 --model llama3-8b --seq 64": "--parents goes with seconds of F and B, not with",
    "draw kfkb --option group=\u0662": "an option is written NAME=NUMBER",
    "simulate 1f1b --sizes 3": "--sizes says nothing without --model",
    "compare 1f1b --tensor 2": "--tensor says nothing without --model",
    "draw 1f1b --model bytes.json --seq 4": "bytes.json: 'utf-8' codec can't decode byte 0xff",
    f"{TREES} --seq 64 --lengths 8:1": "plan needs --seq, --lengths (sequences that differ) or --prompt",
    f"{TREES} --lengths garbage.txt --output plan.json": "garbage.txt, line 1: 'F0.0 B0.0' must be a length, or a",
    f"{TREES} --lengths minus.txt": "line 2: '8 -1' must be a length, or a length and a count",
    f"{TREES} --lengths none.txt": "none.txt: there is no length",
    "profile --model gpt-2.7b --seq 128 --output p.json --processes 0": "processes is 0, must be at least 1",
    "profile --model qwen3-30b-a3b --seq 128 --output p.json": "the model has 128 experts",
    "plan --model llama3-8b --seq 64 --ranks 2 --microbatches 2 --memory 96": "less than any device has: 96GiB?",
    "compare --microbatches 8 --cap 24": "--cap 24 is in micro-batches, of which a step has 8: 24GiB?",
    "compare --cap 0.5": "no family fits the cap; the least possible is 1.00 micro-batches, of auto",
    "compare --seq 2": "--seq says nothing without --model",
    f"{TREES} --prompt 2k": "--prompt and --responses go together, as --prompt 2048 --responses 8x256",
    f"{TREES} --prompt 2k --responses 8x9 --segments 4": "--segments is for steps of sequences: leave it out with",
    f"{TREES} --prompt 2k --responses 8x9 --context 2": "--context is for steps of sequences: leave it out with",
    f"{TREES} --prompt 2k --responses 8x9 --stages 1,2": "--stages names several values: give one with --prompt",
    f"{TREES} --prompt 0 --responses 8x9": "--prompt is 0, must be at least 1",
    f"{TREES} --prompt 2k --responses 9999x9": "a step of more than 20000 responses takes long to plan",
    "draw rule.txt": "rule.txt: a segment goes back after its own forward: ",
    "simulate garbage.csv": "garbage.csv: line 1, unit 2, '0SEND_F0': a cell is written 2F3",
    "simulate bytes.txt": "bytes.txt: 'utf-8' codec can't decode byte 0xff",
    "draw 1f1b --png none/t.png": "No such file or directory: 'none/t.png'",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_one_line_and_exit_2(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rule.txt").write_text("B0.0 F0.0\n")
    Path("garbage.txt").write_text("F0.0 B0.0\nwhat?\n")
    Path("garbage.csv").write_text("0F0,0SEND_F0\n")
    Path("uneven.txt").write_text("[0]F0.0 [2]F0.0 [2]B0.0 [0]B0.0\n[1]F0.0 [1]B0.0\n")
    Path("minus.txt").write_text("2048\n8 -1\n")
    Path("none.txt").write_text("# none\n")
    Path("bytes.json").write_bytes(b"\xff")
    Path("bytes.txt").write_bytes(b"F0.0 \xff")
    files = sorted(Path().iterdir())
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("seq1f1b: ") and err.count("\n") == 1
    assert MISTAKES[line] in err
    assert sorted(Path().iterdir()) == files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("draw 1f1b --width many", "argument --width: invalid int value: 'many'"),
        ("plan --model llama3-8b --seq 64 --ranks 2 --microbatches 2 --memory x", "'x' is no number of bytes from 1"),
        ("compare --cap 4.x", "'4.x': a cap is written 4 (micro-batches) or 4GiB"),
        ("compare --sizes 1,-2", "argument --sizes: '1,-2': tokens are written 256,1024 or 8x256"),
        (f"{TREES} --prompt 2048 --responses 8x", "'8x': tokens are written 256,1024 or 8x256, eight times 256, or 4x"),
        ("draw seq1f1b --parents=-1,x", "argument --parents: '-1,x': whole numbers are written 1,2,4"),
        ("draw 1f1b --model llama3-8b --seq 64 --documents a,b", "'a,b': whole numbers are written 1,2,4"),
        ("plan --model llama3-8b --seq 64 --ranks 2 --microbatches 2 --segments 4,", "whole numbers are written 1,2,4"),
    ],
)
def test_words_that_are_no_numbers_are_refused_with_what_is_written(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_plan_of_shared_prompts(capsys):
    """Tokens by hand; in less memory units run again; rows that do not fit are no error."""

    def plan(more=""):
        assert main(f"{TREES} --prompt 2048 --responses 7x256,1k {more} --json".split()) == 0
        return json.loads(capsys.readouterr().out)

    found = plan()
    assert found["row_tokens"] == 4 * (7 * 2304 + 3072) and found["tree_tokens"] == 4 * (2048 + 7 * 256 + 1024)
    assert found["tree_token_ratio"] == pytest.approx(19200 / 4864)
    assert 2 < found["speedup"] == pytest.approx(found["rows"]["seconds"] / found["trees"]["seconds"])
    assert sum(sum(size) if isinstance(size, list) else size for size in found["segment_sizes"]) == 4864
    assert found["trees"]["siblings"] == max(len(size) for size in found["segment_sizes"] if isinstance(size, list)) > 1
    assert found["trees"]["remedied"] == 0
    less = max(found["trees"]["rank_bytes"]) - 2**30
    found = plan(f"--memory {less}")
    assert max(found["trees"]["rank_bytes"]) <= less and found["trees"]["remedied"] > 0
    line = "plan --model llama3-8b --ranks 1 --microbatches 1 --prompt 4k --responses 32x16 --memory 150e9"
    assert main(line.split()) == 0
    text = capsys.readouterr().out
    assert "131,584 tokens in rows, 4,608 in trees: 28.56 times fewer" in text
    assert "rows: no order of these documents fits in 150,000,000,000 bytes" in text and "times as fast" not in text


def test_output_that_nobody_reads_or_that_has_no_room(tmp_path):
    """A reader that leaves, as `head` does, is no error; a full disk is."""
    line = [sys.executable, "-m", "seq1f1b", "draw", "gpipe", "--ranks", "200", "--width", "10000"]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.read(6) == b"rank 0"
    child.stdout.close()
    assert (child.stderr.read(), child.wait(timeout=60)) == (b"", 0)
    with open("/dev/full", "w") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "seq1f1b: [Errno 28] No space left on device\n")


def test_the_gain_of_segments_shows(capsys):
    """A schedule without segments runs whole micro-batches beside one that has them, drawn to the same scale."""
    counts = ["--microbatches", "8", "--segments", "4"]
    assert main(["draw", "1f1b", "seq1f1b", *counts, "--width", "80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b" and lines[7] == "seq1f1b, 4 segments"
    plain, segmented = (max(len(line) for line in lines[i : i + 4]) - len("rank 0  ") for i in (1, 8))
    assert (plain, segmented) == (66, 53)  # columns of half a second: 33 s, and 26.25 s
    assert all("one column is 500 ms" in line for line in (lines[5], lines[12]))


def test_the_help_is_plain_and_lines_up(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "`" not in text
    examples = text.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    assert all(
        re.fullmatch(r"  [a-z0-9].*:" if i % 2 == 0 else r"    seq1f1b .*", line) for i, line in enumerate(examples)
    )
    assert max(map(len, text.splitlines()[5:])) <= 80
    for line in examples[1::2]:
        assert vars(make_parser().parse_args(line.split()[1:]))["command"] in text


def test_doctor_in_a_process_of_its_own():
    command, columns = [sys.executable, "-m", "seq1f1b", "doctor"], {"COLUMNS": "80"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **columns}).stdout
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "bound" in words and "kernels" in words and "\nown CUDA kernel" in out
    assert "attention on CUDA: torch's ops, or our kernels where they pass a check" in words
