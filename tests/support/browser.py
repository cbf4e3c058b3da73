"""A real browser without a network, for the tests of pages: Debian's chromium and chromium-driver, by selenium."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def absent(reason: str) -> None:
    """Skips, or fails where the environment says SEQ1F1B_REQUIRE_BROWSER=1."""
    if os.environ.get("SEQ1F1B_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


def open_browser(*, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """A session; a fixture yields from it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        absent("no browser; Debian: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven by selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for switch in (
        "--headless=new",
        "--no-sandbox",  # as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
        "--force-device-scale-factor=1",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
        # A mouse, which a machine without a screen lacks: it hovers, and is fine. Blink's numbers of these types.
        "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
    ):
        options.add_argument(switch)
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield session
    session.quit()


class Timelines:
    """The timelines of a page that holds them under a name, drawn by ``timeline.js``."""

    def __init__(self, browser: Any, url: str, name: str = "timelines") -> None:
        self.browser, self.name = browser, name
        browser.get("about:blank")  # a link that differs in its hash alone would not be opened anew
        browser.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns, in which ``all`` are the timelines."""
        return self.browser.execute_script(f"const all = {self.name}; {script}", *arguments)

    def wait(self, script: str) -> Any:
        """What a script returns once that is true."""
        give_up = time.monotonic() + 20
        while not (found := self.run(script)):
            assert time.monotonic() < give_up, script
            time.sleep(0.02)
        return found

    def locate(self, index: int, moment: float, row: float) -> tuple[int, int]:
        """Pixels of the window where a timeline has that time and row, once it is in view."""
        x, y = self.run(
            "const [index, moment, row] = arguments, {plot} = all.frames[index];"
            "let box = plot.getBoundingClientRect();"
            "if (box.top < 0 || box.bottom > innerHeight)"
            "  { plot.scrollIntoView({block: 'center'}); box = plot.getBoundingClientRect() }"
            "const share = (moment - all.pictures[index].begin - all.from) / (all.to - all.from);"
            "return [box.left + 92 + share * (all.width() - 102), box.top + row * all.row()]",
            index,
            moment,
            row,
        )
        return round(x), round(y)

    def hover(self, index: int, moment: float, row: float) -> str:
        """Text of the tooltip there."""
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        actions = ActionBuilder(self.browser, duration=0)
        x, y = self.locate(index, moment, row)
        self.run("all.tip.hidden = true")
        for near in (x + 2, x):  # a move, not a jump to where the pointer may be already
            actions.pointer_action.move_to_location(near, y)
        actions.perform()
        return self.wait("return all.tip.hidden ? null : all.tip.innerText")

    def headings(self) -> list[str]:
        return self.run("return all.frames.map(({heading}) => heading.textContent)")

    def pixels(self, path: Path) -> Any:
        """The colours of a screenshot, one row for each pixel."""
        image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
        self.browser.save_screenshot(str(path))
        return image.imread(path)[:, :, :3].reshape(-1, 3)

    def problems(self) -> list[Any]:
        return [entry for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def share(pixels: Any, color: tuple[int, int, int]) -> float:
    """Share of the pixels that have this colour."""
    return float((abs(pixels - [channel / 255 for channel in color]).max(axis=1) < 0.01).mean())
