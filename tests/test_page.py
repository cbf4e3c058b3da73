"""Does the HTML page tell the truth of a schedule, and does it work in a real browser that has no network?

The browser is Debian's (chromium, chromium-driver). Where it is absent its tests skip, or fail if the environment says
SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from orders import small_schedule

from seq1f1b import Simulation, build_schedule, schedules
from seq1f1b.page import live_units, predecessors, timeline_html

# -- without a browser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", schedules())
def test_memory_curves_have_the_peaks_of_the_lowered_program(name: str) -> None:
    for P, M, k in ((1, 2, 1), (2, 4, 1), (3, 6, 3), (4, 8, 4)):
        schedule = small_schedule(name, P, M, k)
        if schedule is None:
            continue
        run = schedule.simulate()
        curves = [live_units(track) for track in run.timeline]
        assert tuple(max(live for _, live in curve) for curve in curves) == run.peak
        for curve, track in zip(curves, run.timeline, strict=True):
            assert curve[0] == (track[0][1], 1) and curve[-1] == (track[-1][2], 0)
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
        timeline = schedule.simulate(0.75, 2.0, 0.5, prefetch=M * k).timeline
        ends = {unit: end for track in timeline for unit, _, end in track}
        after = predecessors(timeline)
        for track in timeline:
            for unit, start, _ in track:
                assert start == max((ends[other] for other in after[unit]), default=0.0), (name, unit)


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
    return build_schedule(name, **counts).simulate(0.5, 1.0)


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
    assert [two.plot(i, "return plot.title.text") for i in (0, 1)] == ["1f1b", "seq1f1b"]
    two.browser.save_screenshot(str(tmp_path / "page.png"))
    pixels = image.imread(tmp_path / "page.png")[:, :, :3].reshape(-1, 3)
    for red, green, blue in ((0x1F, 0x77, 0xB4), (0xE6, 0x86, 0x2D), (0x2C, 0x9A, 0x45), (0xCC, 0x3B, 0x3B)):
        for strength in (1.0, 0.38):  # backward, forward
            color = [1 - strength * (1 - channel / 255) for channel in (red, green, blue)]
            assert (abs(pixels - color).max(axis=1) < 0.01).mean() > 0.003
    memory = [channel / 255 for channel in (0x9A, 0xA7, 0xB4)]
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


def test_thousands_of_units(browser: Any, tmp_path: Path) -> None:
    """20480 units: labels come with the zoom, and a zoom is drawn in under a second (generous: machines are shared)."""
    path = tmp_path / "large.html"
    run = simulate("seq1f1b", num_ranks=8, num_microbatches=160, num_segments=8)
    timeline_html(path, run.timeline)
    assert path.stat().st_size < 20e6
    page = Page(browser, path)
    assert page.plot(0, "return plot.renderers[1].data_source.get_length()") == 20480
    labels = "return plot.renderers[2].visible"
    assert not page.plot(0, labels)
    page.zoom(0, 600.0, 1)
    began = time.monotonic()
    page.zoom(0, 600.0, 1)
    page.wait("return Bokeh.documents[0].is_idle")
    page.browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert time.monotonic() - began < 1.0
    page.plot(0, "plot.x_range.setv({start: 600, end: 610})")
    assert page.plot(0, labels)
