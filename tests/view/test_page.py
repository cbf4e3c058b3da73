"""Does the HTML page tell the truth of a schedule, and does it work in a real browser that has no network?

The browser is Debian's (chromium, chromium-driver). Where it is absent its tests skip, or fail if the environment says
SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from orders import small_schedule

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


def test_what_a_page_refuses(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason='the HTML page needs the optional bokeh: pip install "seq1f1b[plot]"')
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
    pytest.importorskip("bokeh", reason='the HTML page needs the optional bokeh: pip install "seq1f1b[plot]"')
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        reason = "no browser; Debian: apt-get install chromium chromium-driver"
        if os.environ.get("SEQ1F1B_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for switch in (
        "--headless=new",
        "--no-sandbox",  # as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
        "--force-device-scale-factor=1",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
    ):
        options.add_argument(switch)
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield session
    session.quit()


def simulate(name: str, **counts: Any) -> Simulation:
    return build_schedule(name, **counts).simulate(Costs(0.5, 1.0))


class Page:
    """The page of a file, once it is drawn."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser = browser
        browser.get(path.as_uri())
        self.wait("return window.Bokeh !== undefined && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")

    def wait(self, script: str, *arguments: Any, seconds: float = 60) -> Any:
        """What a script returns once that is true."""
        give_up = time.monotonic() + seconds
        while not (found := self.browser.execute_script(script, *arguments)):
            assert time.monotonic() < give_up, script
            time.sleep(0.02)
        return found

    def plot(self, index: int, script: str, *arguments: Any) -> Any:
        """What a script returns of the plot with that number from above, as `plot` and its `view`."""
        find = (
            "const plot = Bokeh.documents[0].roots()[0].children[1 + arguments[0]], view = Bokeh.index.find_one(plot);"
        )
        return self.browser.execute_script(find + script, index, *arguments)

    def locate(self, index: int, moment: float, row: float) -> tuple[int, int]:
        """Pixels of the window where a plot has that time and row."""
        x, y = self.plot(
            index,
            "const box = view.canvas_view.el.getBoundingClientRect();"
            "return [box.left + view.frame.x_scale.compute(arguments[1]),"
            " box.top + view.frame.y_scale.compute(arguments[2])]",
            moment,
            row,
        )
        return round(x), round(y)

    def hover(self, index: int, moment: float, row: float) -> str:
        """Text of the tooltip there."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        actions = ActionBuilder(self.browser)
        x, y = self.locate(index, moment, row)
        for near in (x + 2, x):  # a move, not a jump to where the pointer may be already
            actions.pointer_action.move_to_location(near, y)
        actions.perform()
        return self.wait(
            "function text(root) {"
            "  for (const element of root.querySelectorAll('*')) {"
            "    if (element.classList.contains('bk-Tooltip') && element.style.display !== 'none')"
            "      return element.shadowRoot.querySelector('.bk-tooltip-content').innerText;"
            "    const found = element.shadowRoot ? text(element.shadowRoot) : null;"
            "    if (found) return found;"
            "  }"
            "  return null;"
            "}"
            "return text(document)",
            seconds=10,
        )

    def zoom(self, index: int, moment: float, notches: int) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        origin = ScrollOrigin.from_viewport(*self.locate(index, moment, 0.3))
        for _ in range(notches):
            ActionChains(self.browser).scroll_from_origin(origin, 0, -200).perform()

    def times(self, index: int) -> tuple[float, float]:
        return tuple(self.plot(index, "return [plot.x_range.start, plot.x_range.end]"))


@pytest.fixture(scope="module")
def two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """1F1B above Seq1F1B, both over two segments."""
    path = tmp_path_factory.mktemp("page") / "two.html"
    runs = {name: simulate(name, num_ranks=4, num_microbatches=4, num_segments=2) for name in ("1f1b", "seq1f1b")}
    timeline_html(path, {name: run.timeline for name, run in runs.items()}, title="1F1B and Seq1F1B")
    return Page(browser, path)


def test_the_page_needs_nothing_but_itself(two: Page) -> None:
    assert two.browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)") == []
    assert [entry for entry in two.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


def test_both_schedules_are_drawn(two: Page, tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    titles = [two.plot(i, "return plot.title.text") for i in (0, 1)]
    assert titles == ["1f1b: 16.5 s, bubble 27.3%", "seq1f1b: 16.5 s, bubble 27.3%"]  # 3 M + 3 (P - 1) / k
    two.browser.save_screenshot(str(tmp_path / "page.png"))
    pixels = image.imread(tmp_path / "page.png")[:, :, :3].reshape(-1, 3)
    for red, green, blue in ((0x1F, 0x77, 0xB4), (0xE6, 0x86, 0x2D), (0x2C, 0x9A, 0x45), (0xCC, 0x3B, 0x3B)):
        for strength in (1.0, 0.38):  # backward, forward
            color = [1 - strength * (1 - channel / 255) for channel in (red, green, blue)]
            assert (abs(pixels - color).max(axis=1) < 0.01).mean() > 0.003
    memory = [channel / 255 for channel in (0xA9, 0xB4, 0xC0)]
    assert (abs(pixels - memory).max(axis=1) < 0.01).mean() > 0.01


def test_hovering_over_a_unit_tells_times_and_dependencies(two: Page) -> None:
    """Seq1F1B, rank 1, half a second per forward: F0.1 runs from 1 s, after F0.0 here and F0.1 of rank 0."""
    text = two.hover(1, 1.25, 1.3)
    assert "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert "F0.1 on rank 0, ended at 1 s" in text and "F0.0 on rank 1, ended at 1 s" in text
    assert "F0.1 on rank 2, from 1.5 s" in text
    assert "B0.1 on rank 1, from" in text


def test_hovering_over_the_memory_curve_tells_live_units(two: Page) -> None:
    """1F1B of micro-batches of two segments, rank 0: before the first backward all eight units are live."""
    text = two.hover(0, 5.0, 0.9)
    assert "8 units of at most 8" in text


def test_the_wheel_zooms_both(two: Page) -> None:
    before = two.times(0)
    two.zoom(1, 6.0, 3)
    after = two.times(0)
    assert after == two.times(1)
    assert before[0] < after[0] < 6.0 < after[1] < before[1]


@pytest.fixture(scope="module")
def bytes_of_two(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
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
    page = Page(browser, path)
    page.runs = runs
    return page


def test_hovering_tells_slack_and_the_critical_path(bytes_of_two: Page) -> None:
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


def test_the_critical_path_is_drawn_and_hides_on_a_click(bytes_of_two: Page) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    page = bytes_of_two
    run = page.runs["seq1f1b"]
    line = "const line = plot.renderers.find(r => r.glyph.type === 'Line');"
    xs, ys, shown = page.plot(
        0, line + "const {x, y} = line.data_source.data; return [Array.from(x), Array.from(y), line.visible]"
    )
    placed = {unit: (rank, start, end) for rank, track in enumerate(run.timeline) for unit, start, end in track}
    expected = [placed[unit] for unit in run.critical_path]
    assert list(zip(xs[::2], xs[1::2], strict=True)) == [(start, end) for _, start, end in expected]
    assert [int(y) for y in ys[::2]] == [rank for rank, *_ in expected] and shown
    x, y = page.plot(
        0,
        "const box = Bokeh.index.find_one(plot.above.find(m => m.type === 'Legend')).el.getBoundingClientRect();"
        "return [box.left + box.width / 2, box.top + box.height / 2]",
    )
    actions = ActionChains(page.browser)
    actions.w3c_actions.pointer_action.move_to_location(round(x), round(y))
    actions.w3c_actions.pointer_action.click()
    actions.perform()
    page.wait(
        "const plot = Bokeh.documents[0].roots()[0].children[1];"
        "return !plot.renderers.find(r => r.glyph.type === 'Line').visible",
        seconds=10,
    )


def test_memory_in_bytes_by_kind(bytes_of_two: Page) -> None:
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
        row = 1 + 0.98 - 0.36 * (below + held / 2) / tallest
        text = page.hover(0, moment, row)
        below += held
        assert said in text
        assert f"{below / 2**30:.4g} GiB of at most {peak / 2**30:.4g} GiB" in text


def test_thousands_of_units(browser: Any, tmp_path: Path) -> None:
    """20480 units: labels come with the zoom, and a zoom is drawn in under a second (generous: machines are shared)."""
    path = tmp_path / "large.html"
    run = simulate("seq1f1b", num_ranks=8, num_microbatches=160, num_segments=8)
    timeline_html(path, run.timeline)
    assert path.stat().st_size < 5e6
    page = Page(browser, path)
    assert page.plot(0, "return plot.renderers[0].data_source.get_length()") == 20480
    labels = "return plot.renderers.find(r => r.glyph.type === 'Text').data_source.get_length()"
    edges = "return plot.renderers[0].glyph.line_alpha.value"
    assert page.plot(0, labels) == page.plot(0, edges) == 0
    page.zoom(0, 600.0, 1)
    began = time.monotonic()
    page.zoom(0, 600.0, 1)
    page.wait("return Bokeh.documents[0].is_idle")
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert time.monotonic() - began < 1.0
    page.plot(0, "plot.x_range.setv({start: 60.1, end: 61.9})")
    in_view = sum(end > 60.1 and start < 61.9 for track in run.timeline for _, start, end in track)
    assert page.plot(0, labels) == in_view and page.plot(0, edges) == 1
    touched = sum(end >= 60.1 and start <= 61.9 for track in run.timeline for _, start, end in track)
    drawn = "return Bokeh.index.find_one(plot.renderers[0]).model.view.indices.count"
    assert page.plot(0, drawn) == touched
    page.plot(0, "plot.x_range.setv({start: -1, end: 2000})")
    assert page.plot(0, drawn) == 20480
    page.plot(0, "plot.x_range.setv({start: 1000, end: 1010})")
    (unit, start, end) = next(entry for entry in run.timeline[5] if entry[1] > 1004)
    assert f"{unit}, " in page.hover(0, (start + end) / 2, 5.3)
