"""Are the pictures of a timeline right: text, PNG, trace?"""

import json
from pathlib import Path
from typing import Any

import pytest

from seq1f1b import Costs, Schedule, Simulation, Unit, build_schedule
from seq1f1b.view import draw, style

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())


def simulate(name: str, num_segments: int, forward: float, num_microbatches: int = 4) -> Simulation:
    schedule = build_schedule(name, num_ranks=4, num_microbatches=num_microbatches, num_segments=num_segments)
    return schedule.simulate(Costs(forward, 2 * forward))


TEXTS = {
    "1f1b": (
        (simulate("1f1b", 1, 2.0), 92),
        "rank 0  0---1---2---3---                        0=======    1=======    2=======    3=======\n"
        "rank 1      0---1---2---                0=======3---1=======    2=======    3=======\n"
        "rank 2          0---1---        0=======2---1=======3---2=======    3=======\n"
        "rank 3              0---0=======1---1=======2---2=======3---3=======\n"
        "0-- forward, 0== backward of micro-batch 0; one column is 500 ms\n",
    ),
    "seq1f1b": (
        (simulate("seq1f1b", 2, 1.0), 92),
        "rank 0  0a0b1a1b2a            0b==2b0a==3a1b==3b1a==  2b==  2a==  3b==3a==\n"
        "rank 1    0a0b1a1b        0b==2a0a==2b1b==3a1a==3b2b==  2a==  3b==3a==\n"
        "rank 2      0a0b1a    0b==1b0a==2a1b==2b1a==3a2b==3b2a==  3b==3a==\n"
        "rank 3        0a0b0b==1a0a==1b1b==2a1a==2b2b==3a2a==3b3b==3a==\n"
        "0b-- forward, 0b== backward of micro-batch 0, segment 1; one column is 500 ms\n",
    ),
    "split backward": (
        (Schedule.from_text("[0]F0.0 [1]F0.0 [1]I0.0 [0]I0.0 [1]W0.0 [0]W0.0").simulate(), 38),
        "rank 0  0----0----0~~~~0~~~~0++++0++++\n"
        "0-- forward, 0~~ input gradient, 0++\n"
        "weight gradient of micro-batch 0; one\n"
        "column is 200 ms\n",
    ),
    "recomputation": (
        (Schedule.from_text("F0.0 F1.0 R0.0 B0.0 R1.0 B1.0").simulate(), 40),
        "rank 0  0---1---0^^^0=======1^^^1=======\n"
        "0-- forward, 0== backward, 0^^\n"
        "recomputation of micro-batch 0; one\n"
        "column is 250 ms\n",
    ),
    "no time": (
        (Schedule.from_text("F0.0 B0.0").simulate(Costs(0.0, 0.0)), 100),
        "rank 0  \n-- forward, == backward\n",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    (run, width), text = TEXTS[name]
    assert run.to_text(width) == text
    if "1f1b" in name:  # the page shows what is printed, to a time of its own
        assert "\n".join(text.splitlines()[:-1]) in (ROOT / "docs/how-to/slow-step.md").read_text()


def test_labels_shrink_with_the_width() -> None:
    simulation = simulate("seq1f1b", 2, 1.0)
    assert simulation.to_text(140).startswith("rank 0  0.0-0.1-1.0-")
    assert simulation.to_text(80).startswith("rank 0  0a0b1a")
    assert simulation.to_text(50).startswith("rank 0  00112")
    assert simulation.to_text(20).startswith("rank 0  ")
    for width in (10, 20, 50, 80, 140, 1000):
        lines = simulation.to_text(width).splitlines()
        assert max(map(len, lines[:4])) <= max(width, 9)
        assert max(map(len, lines[4:])) <= max(width, 40)


def test_recomputation_has_a_colour_and_a_name(tmp_path: Path) -> None:
    (run, _), _ = TEXTS["recomputation"]
    draw.trace_json(tmp_path / "trace.json", run.timeline)
    assert [(bar["name"], bar["cat"]) for bar in bars_of(tmp_path / "trace.json") if bar["name"][0] == "R"] == [
        ("R0.0", "recomputation"), ("R1.0", "recomputation")
    ]  # fmt: skip
    colors = [style.color_of(Unit(kind, 0, 0, 0)) for kind in "FBIWR"]
    assert len(set(colors)) == 5
    pytest.importorskip("matplotlib")
    draw.timeline_svg(tmp_path / "timeline.svg", run.timeline)
    assert "R: recomputation" in (tmp_path / "timeline.svg").read_text()
    draw.timeline_svg(tmp_path / "many.svg", simulate("seq1f1b", 4, 1e-3, num_microbatches=12).timeline)
    assert "... colours repeat" in (tmp_path / "many.svg").read_text()


def test_a_label_leaves_room_for_the_pass() -> None:
    """Units of F, I and W are equally long: a label without a fill would make them alike."""
    run = build_schedule("zbv", num_ranks=4, num_microbatches=8, stages_per_rank=2).simulate(Costs(0.5, 1.0))
    assert run.busy[0] == run.span[0]  # no blanks
    fills = "".join({"F": "-", "I": "~", "W": "+"}[unit.kind] for unit, _, _ in run.timeline[0])
    assert run.to_text(80).splitlines()[0] == "rank 0  " + fills
    assert run.to_text(120).splitlines()[0].startswith("rank 0  0-1-2-3-4-5-6-0-0~0+1-1~1+")


def test_units_narrower_than_a_column_have_their_shares() -> None:
    """Forwards, backwards and bubble of every rank, within one column, over any stretch from the start."""
    run = build_schedule("seq1f1b", num_ranks=8, num_microbatches=16, num_segments=4).simulate(Costs(0.25, 0.5))
    lines = run.to_text(80).splitlines()
    columns = 72
    second = columns / run.makespan
    assert "one column is 740 ms, units are shorter" in lines[-1]
    for track, line in zip(run.timeline, lines, strict=False):
        drawn = line[8:].ljust(columns)
        for until in range(1, columns + 1):
            for kind, fill in (("F", "-"), ("B", "=")):
                spent = sum(
                    max(0.0, min(end * second, until) - start * second)
                    for unit, start, end in track
                    if unit.kind == kind
                )
                assert abs(drawn[:until].count(fill) - spent) <= 1.0, (line, until)


def bars_of(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_trace(tmp_path: Path) -> None:
    runs = {"planned": simulate("1f1b", 1, 2e-3), "measured": simulate("seq1f1b", 2, 1e-3)}
    path = tmp_path / "trace.json"
    draw.trace_json(path, {name: run.timeline for name, run in runs.items()})
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [*runs]
    threads = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(pid, rank, f"rank {rank}") for pid in range(2) for rank in range(4)]
    fields = ("stage", "microbatch", "segment")
    expected = [
        (pid, rank, str(unit), {"F": "forward", "B": "backward"}[unit.kind], dict(zip(fields, unit[1:], strict=True)))
        for pid, run in enumerate(runs.values())
        for rank, track in enumerate(run.timeline)
        for unit, _, _ in track
    ]
    assert [(e["pid"], e["tid"], e["name"], e["cat"], e["args"]) for e in bars_of(path)] == expected
    times = [entry[1:] for run in runs.values() for track in run.timeline for entry in track]
    found = [(bar["ts"], bar["ts"] + bar["dur"]) for bar in bars_of(path)]
    assert found == [pytest.approx((1e6 * start, 1e6 * end)) for start, end in times]
    several = Schedule.from_text("[0]F0.0 [3]F0.0\n[1]F0.0 [2]F0.0")  # stages of a rank have names
    draw.trace_json(path, several.simulate().timeline)
    assert [bar["name"] for bar in bars_of(path)] == ["[0]F0.0", "[3]F0.0", "[1]F0.0", "[2]F0.0"]


def test_a_timeline_without_units(tmp_path: Path) -> None:
    for draw_it in (draw.trace_json, draw.timeline_png):
        with pytest.raises(ValueError, match="the timeline holds no unit"):
            draw_it(tmp_path / "nothing", [[], []])
    with pytest.raises(ValueError, match="the timeline holds no unit"):
        draw.timeline_text([])


def test_a_measured_timeline_starts_at_its_own_zero(tmp_path: Path) -> None:
    """A clock's zero is anywhere; pictures begin at the first start."""
    planned = simulate("1f1b", 1, 2.0).timeline
    measured = [[(unit, start + 12345.0, end + 12345.0) for unit, start, end in track] for track in planned]
    assert draw.timeline_text(measured, width=92) == draw.timeline_text(planned, width=92)
    draw.trace_json(tmp_path / "a.json", planned)
    draw.trace_json(tmp_path / "b.json", measured)
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((tmp_path / "b.json").read_text())


def test_png_shows_every_microbatch_forward_and_backward(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "timeline.png"
    timelines = {"1F1B": simulate("1f1b", 1, 2.0).timeline, "Seq1F1B": simulate("seq1f1b", 2, 1.0).timeline}
    draw.timeline_png(path, timelines, title="4 ranks")
    pixels = image.imread(path)
    assert pixels.shape[1] > 1200 and pixels.shape[0] > 400
    bars = pixels[:, 60:-60, :3].reshape(-1, 3)
    for red, green, blue in ((0x1F, 0x77, 0xB4), (0xE6, 0x86, 0x2D), (0x2C, 0x9A, 0x45), (0xCC, 0x3B, 0x3B)):
        for strength in (1.0, 0.38):  # backward, forward
            color = [1 - strength * (1 - channel / 255) for channel in (red, green, blue)]
            assert (abs(bars - color).max(axis=1) < 0.01).mean() > 0.01


def test_png_hatches_later_stages(tmp_path: Path) -> None:
    """A rank that has run nothing yet is an empty row; the other's second stage shows white lines."""
    image = pytest.importorskip("matplotlib.image")
    pixels = {}
    for name, text in {"plain": "F0.0 F1.0", "hatched": "[0]F0.0 [1]F0.0"}.items():
        timeline = [*Schedule.from_text(text).simulate().timeline, ()]
        draw.timeline_png(tmp_path / "timeline.png", timeline)
        pixels[name] = image.imread(tmp_path / "timeline.png")[:, :, :3]
    row = {name: picture[20, picture.shape[1] * 3 // 5 : -40] for name, picture in pixels.items()}
    assert not (row["plain"].min(axis=1) > 0.95).any()
    assert (row["hatched"].min(axis=1) > 0.95).any()


def test_parts_in_waits_are_told_apart(tmp_path: Path) -> None:
    """A unit that comes again later in its track is drawn as parts in waits before that."""
    track = (
        (Unit("F", 0, 0, 0), 0.0, 2.0),
        (Unit("I", 0, 0, 0), 2.0, 4.0),
        (Unit("W", 0, 0, 0), 4.0, 6.0),  # a part, in a wait
        (Unit("I", 0, 1, 0), 8.0, 10.0),
        (Unit("W", 0, 0, 0), 10.0, 12.0),
    )
    text = draw.timeline_text([track], width=20)
    assert text.splitlines()[0] == "rank 0  0-0~::  1~0+"
    assert ":: weight gradient in a wait" in text.replace("\n", " ")
    draw.trace_json(tmp_path / "trace.json", [track])
    categories = [bar["cat"] for bar in bars_of(tmp_path / "trace.json")]
    assert categories == ["forward", "input gradient", "weight gradient in a wait", "input gradient", "weight gradient"]
    draw.timeline_png(tmp_path / "waits.png", [track])
    assert (tmp_path / "waits.png").stat().st_size > 0
