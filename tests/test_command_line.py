"""Does the command line draw, simulate and diagnose, and refuse in one line?"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from seq1f1b.__main__ import main


def test_simulate_prints_the_known_figures(capsys):
    """P 4, M 8, F 1, B 2: 3 M + 3 (P - 1) / k seconds and (P - 1 + k) / k micro-batches, k 1 and 4."""
    assert main(["simulate", "1f1b", "seq1f1b", "--ranks", "4", "--microbatches", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1f1b", "33.000", "27.3%", "4", "4.00"]
    assert main(["simulate", "seq1f1b", "--ranks", "4", "--microbatches", "8", "--segments", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["seq1f1b", "26.250", "8.6%", "7", "1.75"]


def test_simulate_takes_stages_and_options(capsys):
    """P 4, M 8: peaks of 2 and 4 stages per rank, and of a group of two."""
    assert main(["simulate", "interleaved-1f1b", "--ranks", "4", "--microbatches", "8"]) == 0
    assert main(["simulate", "interleaved-1f1b", "--ranks", "4", "--microbatches", "8", "--stages", "4"]) == 0
    assert main(["simulate", "kfkb", "--ranks", "4", "--microbatches", "8", "--option", "group=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[3:] == ["11", "5.50"]
    assert lines[3].split()[3:] == ["19", "4.75"]
    assert lines[5].split()[3:] == ["8", "8.00"]
    assert main(["simulate", "kfkb", "--option", "group"]) == 2
    assert capsys.readouterr().err == "seq1f1b: --option group: an option is written NAME=NUMBER\n"
    assert main(["simulate", "kfkb", "--option", "group=0"]) == 2
    assert main(["simulate", "interleaved-1f1b", "--microbatches", "2"]) == 2
    assert "needs M >= P: here P = 4 ranks" in capsys.readouterr().err


def test_draw_text_png_trace_and_a_file(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="PNG timelines need the optional matplotlib")
    assert main(["draw", "seq1f1b", "--ranks", "2", "--microbatches", "2", "--segments", "2"]) == 0
    drawn = capsys.readouterr().out
    assert [line.split()[:2] for line in drawn.splitlines()[:2]] == [["rank", "0"], ["rank", "1"]]
    png, trace, text = tmp_path / "t.png", tmp_path / "t.json", tmp_path / "order.txt"
    assert main(["draw", "gpipe", "--png", str(png), "--trace", str(trace)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 4 * 8 * 2
    text.write_text("F0.0 B0.0\nF0.0 B0.0\n")
    assert main(["simulate", str(text)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[1] == "6.000"


def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys):
    assert main(["draw", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("seq1f1b: there is no schedule named 'nonsense'")
    assert main(["simulate", "seq1f1b", "--ranks", "0"]) == 2
    assert main(["draw", "1f1b", "--png", str(tmp_path / "none" / "t.png")]) == 2


def test_doctor_in_a_process_of_its_own():
    out = subprocess.run([sys.executable, "-m", "seq1f1b", "doctor"], capture_output=True, text=True, check=True).stdout
    assert "bound" in out and "kernels" in out and "CUDA: no kernels" in out
