"""Does the HTML page tell the truth of a schedule, and does it work in a real browser that has no network?

The browser is Debian's (chromium, chromium-driver). Where it is absent its tests skip, or fail if the environment says
SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Timelines, open_browser
from orders import small_schedule
from trees import random_tree_order

from seq1f1b import Costs, Links, Simulation, build_schedule, schedules
from seq1f1b.schedule import StepMemory
from seq1f1b.view.page import live_units, memory_curves, predecessors, timeline_html
from seq1f1b.view.style import MOST_UNITS

# -- without a browser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_memory_curves_have_the_peaks_of_the_lowered_program(name: str) -> None:
    for P, M, k in ((1, 2, 1), (2, 4, 1), (3, 6, 3), (4, 8, 4)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        for recompute in ("none", "all", lambda unit: unit.microbatch % 2 == 0, "moves"):
            order = schedule.offload() if recompute == "moves" else schedule.recompute(recompute)
            run = order.simulate()
            curves = [live_units(track) for track in run.timeline]
            assert tuple(max(live for _, live in curve) for curve in curves) == run.peak
            for curve, track in zip(curves, run.timeline, strict=True):
                assert curve[0][1] == 1 and curve[-1] == (track[-1][2], 0)
                assert recompute not in ("none", "moves") or curve[0][0] == track[0][1]
                assert [moment for moment, _ in curve] == sorted({moment for moment, _ in curve})


def test_a_memory_curve_by_hand() -> None:
    """F 1, B 2: two forwards, then each backward frees one; forward only, a unit is live while it runs."""
    schedule = build_schedule("gpipe", num_ranks=1, num_microbatches=2)
    assert live_units(schedule.simulate().timeline[0]) == [(0, 1), (1, 2), (4, 1), (6, 0)]
    assert live_units(schedule.forward_only().simulate().timeline[0]) == [(0, 1), (2, 0)]


@pytest.mark.parametrize("name", schedules())
def test_a_unit_starts_when_the_last_of_its_predecessors_ends(name: str) -> None:
    """Without transfers, and with a place for every message: so none is missing, and none is too many."""
    for P, M, k in ((2, 4, 1), (3, 6, 3)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        for order in (schedule, schedule.recompute(lambda unit: unit.segment != 1), schedule.offload()):
            timeline = order.replace(prefetch=M * k).simulate(Costs(0.75, 2.0, 0.5)).timeline
            ends = {unit: end for track in timeline for unit, _, end in track}
            after = predecessors(timeline)
            for track in timeline:
                for unit, start, _ in track:
                    assert start == max((ends[other] for other in after[unit]), default=0.0), (name, unit)


def test_a_unit_of_a_tree_starts_when_the_last_of_its_predecessors_ends() -> None:
    rng = random.Random(8)
    for _ in range(20):
        order, trees = random_tree_order(rng)
        run = order.replace(prefetch=100).simulate(Costs(0.75, 2.0, 0.5))
        ends = {unit: end for track in run.timeline for unit, _, end in track}
        after = predecessors(run.timeline, order.parents)
        for track in run.timeline:
            for unit, start, _ in track:
                assert start == max((ends[other] for other in after[unit]), default=0.0), (trees, unit)
                if unit.kind == "F" and trees[unit.microbatch][unit.segment] >= 0:
                    assert unit._replace(segment=trees[unit.microbatch][unit.segment]) in after[unit]


def random_memory(rng: random.Random, num_stages: int, num_segments: int) -> StepMemory:
    def table(most: int) -> list[list[int]]:
        return [[rng.randrange(1, most) for _ in range(num_segments)] for _ in range(num_stages)]

    def row() -> list[int]:
        return [rng.randrange(1, 1000) for _ in range(num_stages)]

    kept = table(500)
    return StepMemory(
        activations=[[a + b for a, b in zip(*rows, strict=True)] for rows in zip(kept, table(500), strict=True)],
        kept_activations=kept,
        output_gradients=table(300),
        kv=row(),
        kv_gradients=row(),
        weights=row(),
        optimizer=row(),
        logits=rng.randrange(1000),
        inputs=table(200),
        kv_rows=table(100),
        kv_gradient_rows=table(100),
    )


@pytest.mark.parametrize("name", schedules())
def test_curves_in_bytes_have_the_peaks_of_every_kind_and_of_all(name: str) -> None:
    """The core adds up by the order, the curves by the times."""
    rng = random.Random(name)
    for P, M, k in ((1, 2, 1), (2, 4, 1), (3, 6, 3), (4, 8, 4)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        for order in (schedule, schedule.forward_only(), schedule.recompute(lambda unit: unit.microbatch > 0)):
            memory = random_memory(rng, order.num_stages, order.num_segments)
            run = order.simulate(Costs(1.0, 2.0, 0.75, links=Links(message_bytes=7)), memory=memory)
            assert run.memory is not None
            for rank, curves in enumerate(memory_curves(run)):
                for kind, curve in curves.items():
                    held = max((held for _, held in curve), default=0)
                    assert held == getattr(run.memory, kind)[rank], (kind, rank)
                moments = {moment for curve in curves.values() for moment, _ in curve}
                total = {
                    moment: sum(max((at, held) for at, held in [(-1.0, 0), *curve] if at <= moment)[1]
                                for curve in curves.values())
                    for moment in moments
                }  # fmt: skip
                assert max(total.values()) == run.memory.total[rank]
                assert total[max(moments)] == 0


def test_no_name_ends_or_hides_a_script(tmp_path: Path) -> None:
    run = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2).simulate()
    timeline_html(tmp_path / "plain.html", {"name": run}, title="name")
    name = "<!--<script></script>]]><b onload='x'>\u2028"
    timeline_html(tmp_path / "page.html", {name: run}, title=name)
    plain, page = ((tmp_path / file).read_text(encoding="utf-8") for file in ("plain.html", "page.html"))
    for tag in ("<script", "</script", "<!--", "<b"):
        assert page.count(tag) == plain.count(tag), tag
    (shown,) = re.findall(r"show\(Timelines.unpack\((.*)\)\)", page)
    assert json.loads(shown)[0]["heading"] == name


def test_what_a_page_refuses(tmp_path: Path) -> None:
    path = tmp_path / "none.html"
    with pytest.raises(ValueError, match=f"a page of {MOST_UNITS + 2} units, more than the {MOST_UNITS} that it shows"):
        timeline_html(path, simulate("gpipe", num_ranks=1, num_microbatches=MOST_UNITS // 2 + 1))
    with pytest.raises(ValueError, match="the timeline holds no unit"):
        timeline_html(path, [[]])
    with pytest.raises(ValueError, match=r"need simulate\(memory=StepMemory"):
        memory_curves(simulate("gpipe", num_ranks=2, num_microbatches=2))
    assert not path.exists()


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from open_browser()


def simulate(name: str, **counts: Any) -> Simulation:
    return build_schedule(name, **counts).simulate(Costs(0.5, 1.0))


@pytest.fixture(scope="module")
def two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Timelines:
    """1F1B above Seq1F1B, both over two segments."""
    path = tmp_path_factory.mktemp("page") / "two.html"
    runs = {name: simulate(name, num_ranks=4, num_microbatches=4, num_segments=2) for name in ("1f1b", "seq1f1b")}
    timeline_html(path, {name: run.timeline for name, run in runs.items()}, title="1F1B and <Seq1F1B>")
    return Timelines(browser, path)


def test_the_page_needs_nothing_but_itself(two: Timelines) -> None:
    assert two.browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert two.problems() == []
    assert two.browser.title == "1F1B and <Seq1F1B>"


def test_the_hint_is_of_what_the_device_has(two: Timelines) -> None:
    hint = two.browser.find_element("css selector", "p")
    assert hint.text.startswith("The wheel zooms") and "Tap" not in hint.text
    two.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        assert hint.text == "Two fingers zoom, one moves. Tap a unit for its times and what it waits for."
    finally:
        two.browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_both_schedules_are_drawn(two: Timelines, tmp_path: Path) -> None:
    headings = two.run("return all.frames.map(({heading}) => heading.textContent)")
    assert headings == ["1f1b: 16.5 s, bubble 27.3%", "seq1f1b: 16.5 s, bubble 27.3%"]  # 3 M + 3 (P - 1) / k
    pixels = two.pixels(tmp_path / "page.png")
    for red, green, blue in ((0x1F, 0x77, 0xB4), (0xE6, 0x86, 0x2D), (0x2C, 0x9A, 0x45), (0xCC, 0x3B, 0x3B)):
        for strength in (1.0, 0.38):  # backward, forward
            color = [1 - strength * (1 - channel / 255) for channel in (red, green, blue)]
            assert (abs(pixels - color).max(axis=1) < 0.01).mean() > 0.003
    memory = [channel / 255 for channel in (0xF0, 0x94, 0x4D)]
    assert (abs(pixels - memory).max(axis=1) < 0.01).mean() > 0.01


def test_every_unit_with_room_has_its_name(two: Timelines) -> None:
    """As SVG, which holds its texts: with their pass where all have room for that, none where they are too narrow."""

    def names(width: int) -> list[str]:
        drawn = two.run("return all.svg(0, arguments[0])", width)
        return re.findall(r">([FB]?\d\.\d)<", drawn)

    units = [
        unit
        for track in simulate("1f1b", num_ranks=4, num_microbatches=4, num_segments=2).timeline
        for unit, *_ in track
    ]
    assert sorted(names(2400)) == sorted(map(str, units))
    assert sorted(names(1000)) == sorted(str(unit)[1:] for unit in units)
    assert names(260) == []


def test_hovering_over_a_unit_tells_times_and_dependencies(two: Timelines) -> None:
    """Seq1F1B, rank 1, half a second per forward: F0.1 runs from 1 s, after F0.0 here and F0.1 of rank 0."""
    text = two.hover(1, 1.25, 1.3)
    assert "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert "F0.1 on rank 0, ended at 1 s" in text and "F0.0 on rank 1, ended at 1 s" in text
    assert "F0.1 on rank 2, from 1.5 s" in text
    assert "B0.1 on rank 1, from" in text


def test_keys_go_from_unit_to_unit(two: Timelines) -> None:
    from selenium.webdriver.common.keys import Keys

    canvas = two.browser.find_elements("css selector", "canvas")[1]
    for key, unit in (
        (Keys.ARROW_RIGHT, "F0.0"),
        (Keys.ARROW_RIGHT, "F0.1"),
        (Keys.ARROW_DOWN, "F0.0"),
        (Keys.END, "B3.0"),
    ):
        canvas.send_keys(key)
        assert two.run("return all.said.textContent").startswith(f"unit: {unit}, ")
    assert "rank: 1, stage 1" in two.run("return all.said.textContent")
    canvas.send_keys("+")
    assert two.run("return all.to - all.from < all.whole[1] - all.whole[0]")
    canvas.send_keys("0")
    assert two.run("return all.from === all.whole[0] && all.selected === null")


def test_hovering_over_the_memory_curve_tells_live_units(two: Timelines) -> None:
    """1F1B of micro-batches of two segments, rank 0: before the first backward all eight units are live."""
    text = two.hover(0, 5.0, 0.9)
    assert "8 units of at most 8" in text


def test_the_wheel_zooms_both(two: Timelines) -> None:
    before = two.run("return [all.from, all.to]")
    two.zoom(1, 6.0, 3)
    after = two.run("return [all.from, all.to]")
    assert before[0] < after[0] < 6.0 < after[1] < before[1]
    two.run("all.reset()")


@pytest.fixture(scope="module")
def bytes_of_two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Timelines:
    """Two ranks, two micro-batches of two segments: F 1 s, B 2 s, bytes of everything, causes kept; zbv below."""
    path = tmp_path_factory.mktemp("page") / "bytes.html"
    memory = StepMemory(activations=2**30, kv=2**30, kv_gradients=2**29, weights=2**31, optimizer=2**31, logits=2**30)
    runs = {
        name: build_schedule(
            name, num_ranks=2, num_microbatches=4, num_segments=segments, stages_per_rank=stages
        ).simulate(Costs(links=Links(message_bytes=2**28)), memory=memory, critical=True)
        for name, segments, stages in (("seq1f1b", 2, 1), ("dualpipev", 1, 2))
    }
    timeline_html(path, runs)
    page = Timelines(browser, path)
    page.runs = runs
    return page


def test_hovering_tells_slack_and_the_critical_path(bytes_of_two: Timelines) -> None:
    page = bytes_of_two
    for index, run in enumerate(page.runs.values()):
        path = set(run.critical_path)
        told = {True: 0, False: 0}
        for rank, (track, slack) in enumerate(zip(run.timeline, run.slack, strict=True)):
            for (unit, start, end), seconds in list(zip(track, slack, strict=True))[::3]:
                text = page.hover(index, (start + end) / 2, rank + 0.15)
                assert f"{unit}, " in text
                if unit in path:
                    assert "on the critical path" in text
                else:
                    assert f"may take {seconds:g} s longer" in text, (unit, text)
                told[unit in path] += 1
        assert min(told.values()) > 0


def test_the_critical_path_is_drawn_and_hides_on_a_click(bytes_of_two: Timelines) -> None:
    """As SVG, which holds its line: from unit to unit, each from its start to its end, below its rank."""
    page = bytes_of_two
    run = page.runs["seq1f1b"]
    placed = {unit: (rank, start, end) for rank, track in enumerate(run.timeline) for unit, start, end in track}

    def drawn() -> list[list[tuple[str, str]]]:
        lines = re.findall(r'<path d="([^"]*)" fill="none" stroke="#111111"', page.run("return all.svg(0)"))
        return [re.findall(r"[ML]([\d.]+) ([\d.]+)", line) for line in lines]

    [line] = drawn()
    left, right, span = 92, 1190, 1.02 * run.makespan
    for i, unit in enumerate(run.critical_path):
        rank, start, end = placed[unit]
        for (x, y), moment in zip(line[2 * i : 2 * i + 2], (start, end), strict=True):
            assert abs(float(x) - (left + (moment + 0.01 * run.makespan) / span * (right - left))) < 0.02
            assert int(float(y) // 56) == rank
    page.browser.find_element("css selector", ".timeline-tools label").click()
    assert drawn() == []
    page.browser.find_element("css selector", ".timeline-tools label").click()


def test_memory_in_bytes_by_kind(bytes_of_two: Timelines) -> None:
    """seq1f1b, rank 1, from F0.1 on at 2 s: two activations of 1 GiB; below them one KV slot and what is constant."""
    page = bytes_of_two
    run = page.runs["seq1f1b"]
    peak = run.memory.total[1]
    curves = memory_curves(run)[1]

    def at(kind: str, moment: float) -> int:
        return max((start, held) for start, held in [(-1.0, 0), *curves[kind]] if start <= moment)[1]

    moment, below = 2.5, 0
    tallest = max(max(other.memory.total) for other in page.runs.values())
    for kind, said in (
        ("weights", "weights: 2 GiB"),
        ("optimizer", "optimizer state: 2 GiB"),
        ("logits", "logits: 1 GiB"),
        ("receive", "receive places: "),
        ("kv", "KV cache: 1 GiB"),
        ("activations", "activations: 2 GiB"),
    ):
        held = at(kind, moment)
        row = 1 + 0.98 - 0.33 * (below + held / 2) / tallest
        text = page.hover(0, moment, row)
        below += held
        assert said in text
        assert f"{below / 2**30:.4g} GiB of at most {peak / 2**30:.4g} GiB" in text


def test_units_that_move_to_a_tier_are_drawn(browser: Any, tmp_path: Path) -> None:
    """O, A and L take none of a rank's time: a mark each, and a tooltip."""
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=4, num_segments=2, offload_units="all")
    run = order.simulate(Costs(tier=0.5))
    timeline_html(tmp_path / "moved.html", run)
    page = Timelines(browser, tmp_path / "moved.html")
    assert all(start == end for track in run.timeline for unit, start, end in track if unit.kind in "OAL")
    assert "move out" in page.run("return all.legend.innerText")
    x = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="2"', page.run("return all.svg(0)"))
    assert len(x) == sum(kind in "OAL" for track in run.timeline for (kind, *_), *_ in track)
    assert "critical path" not in page.browser.find_element("css selector", "body").text


def test_a_measured_timeline_begins_at_its_first_unit(browser: Any, tmp_path: Path) -> None:
    """Its times are those of a clock; the page's are counted from its first start."""
    run = simulate("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
    measured = [[(unit, 5000 + start, 5000 + end) for unit, start, end in track] for track in run.timeline]
    timeline_html(tmp_path / "measured.html", {"measured": measured, "simulated": run})
    page = Timelines(browser, tmp_path / "measured.html")
    first, second = (page.run("return all.svg(arguments[0])", i) for i in (0, 1))
    assert first.replace("measured", "simulated") == second and ">0 s<" in first
    assert page.hover(0, 5000.25, 0.3) == page.hover(1, 0.25, 0.3)
    assert "F0.0, forward" in page.hover(0, 5000.25, 0.3) and "0 s to 0.5 s" in page.hover(0, 5000.25, 0.3)


def test_thousands_of_units(browser: Any, tmp_path: Path) -> None:
    """20480 units: names come with the zoom, and a zoom is drawn in under a second (generous: machines are shared)."""
    path = tmp_path / "large.html"
    run = simulate("seq1f1b", num_ranks=8, num_microbatches=160, num_segments=8)
    timeline_html(path, run.timeline)
    assert path.stat().st_size < 5e6
    page = Timelines(browser, path)
    assert page.run("return all.pictures[0].timeline.pass.length") == 20480
    names = r">[FB]?\d+\.\d<"
    assert re.findall(names, page.run("return all.svg(0)")) == []
    page.zoom(0, 600.0, 1)
    began = time.monotonic()
    page.zoom(0, 600.0, 1)
    page.run("all.drawNow()")
    assert time.monotonic() - began < 1.0
    page.run("all.set(60.1, 61.9)")
    seen = [min(61.9, end) - max(60.1, start) for track in run.timeline for _, start, end in track]
    seconds_of_a_name = 1.8 * 30 / 1098
    assert len(re.findall(names, page.run("return all.svg(0)"))) == sum(part > seconds_of_a_name for part in seen)
    page.run("all.set(1000, 1010)")
    (unit, start, end) = next(entry for entry in run.timeline[5] if entry[1] > 1004)
    assert f"{unit}, " in page.hover(0, (start + end) / 2, 5.3)
