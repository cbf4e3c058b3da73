"""Does the HTML page tell the truth of a schedule, and does it work in a real browser that has no network?

The browser is Debian's (chromium, chromium-driver). Where it is absent its tests skip, or fail if the environment says
SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from browser import Timelines, open_browser, share
from orders import small_schedule
from trees import random_tree_order

from seq1f1b import Costs, Links, Schedule, Simulation, build_schedule, schedules
from seq1f1b.schedule import StepMemory
from seq1f1b.unit import inputs_of
from seq1f1b.view.page import live_changes, timeline_html
from seq1f1b.view.style import MOST_UNITS

# -- without a browser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_live_units_have_the_peaks_of_the_lowered_program(name: str) -> None:
    for P, M, k in ((1, 2, 1), (2, 4, 1), (3, 6, 3), (4, 8, 4)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        some = schedule.recompute(lambda unit: unit.microbatch % 2 == 0)
        for order in (schedule, schedule.offload(), some, schedule.forward_only()):
            run = order.simulate()
            changes = [live_changes(track) for track in run.timeline]
            assert tuple(max(accumulate(by for _, by, _ in rank)) for rank in changes) == run.peak
            for rank, track in zip(changes, run.timeline, strict=True):
                assert sum(by for _, by, _ in rank) == 0 and rank[-1][0] == track[-1][2]


def check_inputs(order: Schedule) -> None:
    """Without transfers, and with a place for every message: so none is missing, and none is too many."""
    run = order.replace(prefetch=100).simulate(Costs(0.75, 2.0, 0.5))
    ends = {unit: end for track in run.timeline for unit, _, end in track}
    inputs = inputs_of(ends, order.parents)
    for track in run.timeline:
        last = 0.0
        for unit, start, end in track:
            assert start == max([last, *(ends[other] for other in inputs[unit])]), unit
            last = end


@pytest.mark.parametrize("name", [*schedules(), "trees"])
def test_a_unit_starts_when_its_last_input_and_the_unit_before_it_end(name: str) -> None:
    rng = random.Random(8)
    for P, M, k in ((2, 4, 1), (3, 6, 3)):
        order = random_tree_order(rng)[0] if name == "trees" else small_schedule(name, P, M, k)
        if order is not None:
            for each in (order, order.recompute(lambda unit: unit.segment != 1), order.offload()):
                check_inputs(each)


def test_no_name_ends_or_hides_a_script(tmp_path: Path) -> None:
    run = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2).simulate()
    timeline_html(tmp_path / "plain.html", {"name": run}, title="name")
    name = "<!--<script></script>]]><b onload='x'>\u2028"
    timeline_html(tmp_path / "page.html", {name: run}, title=name)
    plain, page = ((tmp_path / file).read_text(encoding="utf-8") for file in ("plain.html", "page.html"))
    for tag in ("<script", "</script", "<!--", "<b"):
        assert page.count(tag) == plain.count(tag), tag
    (shown,) = re.findall(r"timelines\.show\((.*)\)", page)
    assert json.loads(shown)[0]["heading"] == name


def test_what_a_page_refuses(tmp_path: Path) -> None:
    path = tmp_path / "none.html"
    with pytest.raises(ValueError, match=f"a page of {MOST_UNITS + 2} units, more than the {MOST_UNITS} that it shows"):
        timeline_html(path, simulate("gpipe", num_ranks=1, num_microbatches=MOST_UNITS // 2 + 1))
    with pytest.raises(ValueError, match="the timeline holds no unit"):
        timeline_html(path, [[]])
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
    return Timelines(browser, path.as_uri())


def test_both_schedules_are_drawn_by_a_page_that_needs_nothing_but_itself(two: Timelines, tmp_path: Path) -> None:
    assert two.browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert two.problems() == []
    assert two.browser.title == "1F1B and <Seq1F1B>"
    assert two.headings() == ["1f1b: 16.5 s, bubble 27.3%", "seq1f1b: 16.5 s, bubble 27.3%"]  # 3 M + 3 (P - 1) / k
    pixels = two.pixels(tmp_path / "page.png")
    for color in ((0x1F, 0x77, 0xB4), (0xE6, 0x86, 0x2D), (0x2C, 0x9A, 0x45), (0xCC, 0x3B, 0x3B)):
        for strength in (1.0, 0.38):  # backward, forward
            red, green, blue = (round(255 - strength * (255 - channel)) for channel in color)
            assert share(pixels, (red, green, blue)) > 0.003
    assert share(pixels, (0xF0, 0x94, 0x4D)) > 0.01, "memory"


def test_every_unit_with_room_has_its_name(two: Timelines) -> None:
    """With their pass where all have room for that, none where they are too narrow."""

    def names(width: int) -> list[str]:
        return re.findall(r">([FB]?\d\.\d)<", two.run("return all.svg(0, arguments[0], 56)", width))

    tracks = simulate("1f1b", num_ranks=4, num_microbatches=4, num_segments=2).timeline
    units = sorted(str(unit) for track in tracks for unit, *_ in track)
    assert sorted(names(2400)) == units
    assert sorted(names(900)) == sorted(unit[1:] for unit in units)
    assert names(300) == []


def test_hovering_tells_times_dependencies_and_memory(two: Timelines) -> None:
    """Seq1F1B, rank 1, half a second per forward: F0.1 runs from 1 s, after F0.0 here and F0.1 of rank 0."""
    text = two.hover(1, 1.25, 1.3)
    assert "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert "F0.1 on rank 0, ended at 1 s" in text and "F0.0 on rank 1, ended at 1 s" in text
    assert "F0.1 on rank 2, from 1.5 s" in text
    assert "B0.1 on rank 1, from" in text
    # 1F1B of micro-batches of two segments, rank 0: before the first backward all eight units are live.
    assert "4 micro-batches of at most 4" in two.hover(0, 5.0, 0.9)


def test_keys_and_the_wheel(two: Timelines) -> None:
    """Arrows go from unit to unit; plus, the wheel and 0 zoom all timelines."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    from selenium.webdriver.common.keys import Keys

    plot = two.browser.find_elements("css selector", ".timeline-plot")[1]
    for key, unit in ((Keys.ARROW_RIGHT, "F0.0"), (Keys.ARROW_RIGHT, "F0.1"), (Keys.ARROW_DOWN, "F0.0")):
        plot.send_keys(key)
        assert two.run("return all.said.textContent").startswith(f"unit: {unit}, ")
    assert "rank: 1, stage 1" in two.run("return all.said.textContent")
    whole = two.run("return all.whole")
    origin = ScrollOrigin.from_viewport(*two.locate(1, 6.0, 0.3))
    for zoom in (lambda: plot.send_keys("+"), ActionChains(two.browser).scroll_from_origin(origin, 0, -400).perform):
        zoom()
        begin, end = two.run("return [all.from, all.to]")
        assert whole[0] < begin < 6.0 < end < whole[1]
        plot.send_keys("0")
        assert two.run("return all.from === all.whole[0] && all.selected === null")


@pytest.fixture(scope="module")
def bytes_of_two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Timelines:
    """Two ranks, four micro-batches of two segments: F 1 s, B 2 s, bytes of everything, causes; dualpipev below."""
    path = tmp_path_factory.mktemp("page") / "bytes.html"
    memory = StepMemory(activations=2**30, kv=2**30, kv_gradients=2**29, weights=2**31, optimizer=2**31, logits=2**30)
    runs = {
        name: build_schedule(
            name, num_ranks=2, num_microbatches=4, num_segments=segments, stages_per_rank=stages
        ).simulate(Costs(links=Links(message_bytes=2**28)), memory=memory, critical=True)
        for name, segments, stages in (("seq1f1b", 2, 1), ("dualpipev", 1, 2))
    }
    timeline_html(path, runs)
    page = Timelines(browser, path.as_uri())
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
                expected = "on the critical path" if unit in path else f"may take {seconds:g} s longer"
                assert expected in text, (unit, text)
                told[unit in path] += 1
        assert min(told.values()) > 0


def test_the_critical_path_is_drawn(bytes_of_two: Timelines) -> None:
    """A line from unit to unit, each from its start to its end, below its rank."""
    run = bytes_of_two.runs["seq1f1b"]
    placed = {unit: (rank, start, end) for rank, track in enumerate(run.timeline) for unit, start, end in track}
    svg = bytes_of_two.run("return all.svg(0, 1200, 56)")
    (line,) = re.findall(r'<path d="([^"]*)" fill="none" stroke="var\(--ink\)"', svg)
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", line)
    for i, unit in enumerate(run.critical_path):
        rank, start, end = placed[unit]
        for (x, y), moment in zip(points[2 * i : 2 * i + 2], (start, end), strict=True):
            assert abs(float(x) - (moment + 0.01 * run.makespan) / (1.02 * run.makespan) * 1098) < 0.02
            assert int(float(y) // 56) == rank


def test_units_of_several_stages_have_the_names_of_an_order(bytes_of_two: Timelines) -> None:
    drawn = re.findall(r">(\[\d\][A-Z]\d\.\d)<", bytes_of_two.run("return all.svg(1, 4000, 56)"))
    assert sorted(drawn) == sorted(bytes_of_two.runs["dualpipev"].schedule.to_text().split())


def test_memory_in_bytes_by_kind(bytes_of_two: Timelines) -> None:
    """seq1f1b, rank 1, from F0.1 on at 2 s: two activations of 1 GiB, one KV slot and what is held throughout."""
    run = bytes_of_two.runs["seq1f1b"]
    text = bytes_of_two.hover(0, 2.5, 1.9)
    peak = f"of at most {run.memory.total[1] / 2**30:.4g} GiB"
    said = ["activations\n2 GiB", "KV cache\n1 GiB", "logits\n1 GiB", "optimizer state\n2 GiB", "weights\n2 GiB"]
    assert peak in text and "KV gradients" not in text and "receive places\n" in text
    assert [text.index(kind) for kind in said] == sorted(text.index(kind) for kind in said)


def test_units_that_move_to_a_tier_are_drawn(browser: Any, tmp_path: Path) -> None:
    """O, A and L take none of a rank's time: a mark each, and a name in the legend."""
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=4, num_segments=2, offload_units="all")
    run = order.simulate(Costs(tier=0.5))
    timeline_html(tmp_path / "moved.html", run)
    page = Timelines(browser, (tmp_path / "moved.html").as_uri())
    assert all(start == end for track in run.timeline for unit, start, end in track if unit.kind in "OAL")
    legend = page.run("return all.legend.innerText")
    assert "move out" in legend and "critical path" not in legend
    svg = page.run("return all.svg(0, 1200, 56)")
    marks = re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="2" height="19.99"', svg)
    assert len(marks) == sum(kind in "OAL" for track in run.timeline for (kind, *_), *_ in track)


def test_a_measured_timeline_begins_at_its_first_unit(browser: Any, tmp_path: Path) -> None:
    """Its times are those of a clock; the page's are counted from its first start."""
    run = simulate("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
    measured = [[(unit, 5000 + start, 5000 + end) for unit, start, end in track] for track in run.timeline]
    timeline_html(tmp_path / "measured.html", {"measured": measured, "simulated": run})
    page = Timelines(browser, (tmp_path / "measured.html").as_uri())
    first, second = (page.run("return all.svg(arguments[0], 1200, 56)", i) for i in (0, 1))
    assert first == second and ">0 s<" in first
    assert page.hover(0, 5000.25, 0.3) == page.hover(1, 0.25, 0.3)
    assert "F0.0, forward" in page.hover(0, 5000.25, 0.3) and "0 s to 0.5 s" in page.hover(0, 5000.25, 0.3)
