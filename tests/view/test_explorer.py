"""Does the schedule explorer tell what the package tells, and does it work in a real browser that has no network?

Its page is built here, by the command that builds it for a release. Where a browser, or clang for WebAssembly, is
absent the tests skip, or fail if the environment says SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Timelines, absent, open_browser, share

from seq1f1b import Costs, Links, Schedule, Simulation, build_schedule
from seq1f1b.cli import explorer, main
from seq1f1b.schedule import Family, StepMemory, families

ROOT = Path(__file__).parents[2]
BUILD = [sys.executable, str(ROOT / "docs/explorer/build.py")]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"
COMPUTE = """
const plain = (_, x) => ArrayBuffer.isView(x) ? Array.from(x) : x
const found = arguments[0].map((design) => explorer.laboratory.compute(explorer.make(design)))
return JSON.stringify(found, plain)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    done = subprocess.run([*BUILD, str(path)], capture_output=True, text=True)
    if "apt-get install" in done.stderr:
        absent(done.stderr)
    assert done.returncode == 0, done.stderr
    return path.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from open_browser(width=1280, height=1000)


@pytest.fixture
def page(browser: Any, url: str) -> Timelines:
    return opened(browser, url)


def opened(browser: Any, url: str) -> Timelines:
    shown = Timelines(browser, url, "explorer.timelines")
    browser.execute_async_script("Explorer.then((made) => { window.explorer = made; arguments[0]() })")
    return shown


def show(page: Timelines, *designs: dict[str, Any]) -> None:
    page.run("explorer.open(arguments[0].map(explorer.make))", designs)


def compute(page: Timelines, designs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    page.browser.set_script_timeout(120)
    return json.loads(page.run(COMPUTE, designs))


def test_without_a_compiler_no_file_pretends_to_be_the_explorer(tmp_path: Path) -> None:
    command = [*BUILD, str(tmp_path / "explorer.html")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 1 and "apt-get install clang lld wasi-libc" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_where_the_page_is(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    page, asked = tmp_path / "explorer.html", []
    monkeypatch.setattr(explorer, "PAGE", page)
    monkeypatch.setattr(explorer.webbrowser, "open", lambda url: asked.append(url) or len(asked) == 1)
    assert main(["explorer"]) == 2
    text = capsys.readouterr().err
    assert f"there is no {page}" in text and "Install a wheel" in text
    assert "python docs/explorer/build.py seq1f1b/view/explorer.html" in text and PACKAGES in text
    page.touch()
    assert main(["explorer"]) == 0 and capsys.readouterr().out == f"{page}\n" and asked == []
    assert main(["explorer", "--open"]) == 0 and asked == [page.as_uri()]
    assert main(["explorer", "--open"]) == 2 and "no browser was found here" in capsys.readouterr().err


# -- the same numbers --------------------------------------------------------------------------------------------------

WAYS = (*[("none", "none")] * 3, ("all", "none"), ("none", "all"), ("fit", "none"), ("none", "fit"), ("fit", "fit"))


def random_design(rng: random.Random, family: Family) -> dict[str, Any]:
    small = family.name == "auto"  # whose search takes its time
    design = {
        "family": family.name,
        "P": rng.randint(1, 3 if small else 6),
        "M": rng.randint(1, 4 if small else 12),
        "k": rng.randint(1, 3 if small else 5) if family.has_segments else 1,
        "v": family.stages_per_rank + rng.choice((0, 0, 0, 1, 2)),
        "F": rng.choice((0.5, 1, rng.uniform(0.1, 3))),
        "B": rng.choice((1, 2, rng.uniform(0.1, 3))),
        "W": None,
        "message": rng.choice((0, 0, 0.125, rng.random())),
        "tier": rng.choice((0, 0.3, 1.7)),
        "cap": rng.uniform(0.3, 3),
        **dict(zip(("recompute", "offload"), rng.choice(WAYS), strict=True)),
    }
    if rng.random() < 0.5:
        design["W"] = design["B"] * rng.random()
    choices = {
        "extra_warmup": range(1, 3),
        "cap": range(4, 40),
        "group": (1, 2, 3),
        "rounds": ("microbatches", "segments"),
        "placement": ("loop", "v"),
        "backward": ("split", "whole"),
    }
    given = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    return {**design, "options": {name: given[name] for name in given if name in family.options}}


def simulated(design: dict[str, Any], family: Family) -> Simulation:
    """The design by the package's own calls."""
    parts = design["k"] * design["v"]
    weight = None if design["W"] is None else design["W"] / parts
    costs = Costs(
        design["F"] / parts, design["B"] / parts, weight, links=Links(design["message"]), tier=design["tier"] / parts
    )
    options = dict(design["options"])
    if "costs" in family.options:
        weight = 0.5 * costs.backward if costs.weight is None else costs.weight
        options["costs"] = (costs.forward, costs.backward - weight, weight)
    if "transfer" in family.options:
        options["transfer"] = design["message"]
    counts = {"num_ranks": design["P"], "num_microbatches": design["M"], "num_segments": design["k"]}
    order = build_schedule(family.name, **counts, stages_per_rank=design["v"], options=options)
    order = order.recompute("all" if design["recompute"] == "all" else "none")
    order = order.offload("all" if design["offload"] == "all" else "none")
    memory = StepMemory(activations=1)
    if by := [way for way in ("recompute", "offload") if design[way] == "fit"]:
        order = order.fit(memory, int(design["cap"] * parts), by=by, costs=costs)
    moves = "O" in order.kinds
    return order.simulate(costs if moves else replace(costs, tier=0.0), memory=memory, critical=not moves)


def test_200_random_designs_have_the_numbers_of_the_package(page: Timelines) -> None:
    """To the last digit: times of every unit, slack, the critical path, peaks; and the sentence of what is refused."""
    rng = random.Random(45)
    designs, expected, refused = [], [], 0
    while len(designs) < 200:
        family = families()[len(designs) % len(families())]
        design = random_design(rng, family)
        try:
            run: Simulation | str = simulated(design, family)
        except ValueError as error:
            refused += 1
            if refused % 4:
                continue
            run = str(error)
        designs.append(design)
        expected.append(run)
    assert sum(isinstance(run, Simulation) for run in expected) > 120
    for design, run, found in zip(designs, expected, compute(page, designs), strict=True):
        if isinstance(run, str):
            assert found["refused"] == run, design
            continue
        assert found["refused"] is None, (design, found["refused"])
        assert found["text"] == run.schedule.to_text(), design
        assert found["makespan"] == run.makespan, design
        for name in ("span", "busy"):
            assert tuple(found[name]) == getattr(run, name), (design, name)
        for name in ("start", "end", "slack"):
            rows = getattr(run, name)
            assert found[name] == (None if rows is None else [x for row in rows for x in row]), (design, name)
        units = [unit for rank in run.schedule.ranks for unit in rank]
        if run.critical_path is not None:
            assert tuple(units[int(i)] for i in found["path"]) == run.critical_path
        assert tuple(found["memory"]["total"]) == run.peak == run.memory.total, design
        assert abs(found["bubble"] - run.bubble_ratio) < 1e-12


def test_attention_makes_later_segments_longer(page: Timelines) -> None:
    """A segment's share is that of its tokens, and of pairs of a token and one that it attends to: 1 and 3 of 4."""
    plain = {"P": 1, "M": 1, "attention": 0.4}
    even, equal = compute(page, [plain, {**plain, "split": "equal"}])
    assert even["end"][:2] == pytest.approx([0.3 + 0.1, 1]) and equal["end"][:2] == pytest.approx([0.5, 1], abs=1e-4)


MISTAKES = {
    "P is 2.5, must be a whole number": {"P": 2.5},
    "a design of 16000000000 units, more than the 200000 that this page takes": {"M": 1e9},
    "the duration of a unit is -0.25, must be finite and at least 0": {"F": -0.5},
    "the share of attention is 2, must be in 0..1": {"attention": 2, "split": "equal"},
    "line 1, unit 2, 'X1.0'": {"family": "text", "order": "F0.0 X1.0"},
    "micro-batches of trees, or of unequal segments, are for seq1f1b draw FILE": {
        "family": "text",
        "order": build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=[1, 2]).to_text(),
    },
}


def test_mistakes_are_told_and_the_next_design_is_computed(page: Timelines) -> None:
    found = compute(page, [*MISTAKES.values(), {}])
    for text, result in zip(MISTAKES, found, strict=False):
        assert text in (result["refused"] or ""), (text, result["refused"])
    assert found[-1]["makespan"] == 16.5


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_first_look_is_1f1b_beside_seq1f1b_without_a_network(page: Timelines) -> None:
    assert page.headings() == ["A: 1f1b: 21 s, bubble 42.9%", "B: seq1f1b, 2 segments: 16.5 s, bubble 27.3%"]
    assert page.run("return all.frames[1].plot.getBoundingClientRect().bottom <= innerHeight"), "both are in view"
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.problems() == []
    table = page.browser.find_element("id", "compared").text
    assert "step 21 s 16.5 s 0.79" in table and "bubble 42.9% 27.3% 0.64" in table
    note = page.browser.find_element("css selector", ".timeline-note").text
    assert note.startswith("Limited by rank 3, which works 12 s of 21 s. It waits 9 s (43%) before its first unit")


def test_a_link_holds_the_designs(browser: Any, url: str, page: Timelines) -> None:
    order = "F0.0 B0.0\nF0.0 B0.0\n"
    show(page, {"family": "zb-h1", "k": 1, "M": 6, "options": {"cap": 5}, "W": 0.5}, {"family": "text", "order": order})
    state = "return explorer.panels.map(({result, design}) => [design, result.makespan, result.text])"
    before, link = page.run(state), page.run("return location.hash")
    assert opened(browser, url + link).run(state) == before and before[1][2] == order
    odd = "return explorer.fromLink(arguments[0])"
    assert [page.run(odd, text) for text in ("", "x=1", "%5B", "7")] == [None] * 4
    assert page.run(odd, json.dumps([{"M": 6}])) == page.run("return [explorer.make({M: 6})]") * 2


def test_a_wrong_order_names_its_rule_and_both_units(page: Timelines) -> None:
    area = page.browser.find_elements("css selector", "textarea")[1]
    page.browser.execute_script("arguments[0].closest('details').open = true", area)
    area.clear()
    area.send_keys("F0.0 F0.1 B0.0 B0.1\nF0.0 F0.1 B0.1 B0.0")
    panel = page.browser.find_elements("css selector", ".panel")[1]
    said = panel.find_element("css selector", ".refused").text
    with pytest.raises(ValueError) as refused:
        Schedule.from_text(area.get_property("value")).check()
    assert str(refused.value) in said and "on rank 0 B0.0 comes before B0.1" in said
    assert page.run("return all.pictures.length") == 1, "the other design stays"


def test_keys_alone_change_a_design(page: Timelines) -> None:
    """From field to field with Tab, counts with arrows."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    keys = ActionChains(page.browser, duration=0)
    page.run("document.querySelectorAll('.panel')[1].querySelector('[data-name=family]').focus()")
    keys.send_keys(Keys.TAB, Keys.TAB, Keys.ARROW_UP, Keys.ARROW_UP, Keys.TAB, Keys.ARROW_UP, Keys.TAB).perform()
    assert page.run("const {M, k} = explorer.panels[1].result; return [M, k]") == [6, 3]
    nameless = "return [...document.querySelectorAll('input, select, textarea, button, .timeline-plot')].filter("
    nameless += "(e) => !e.textContent && !e.title && !e.ariaLabel && !e.closest('label')?.textContent).length"
    assert page.run(nameless) == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(browser: Any, url: str, tmp_path: Path, scheme: str) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        shown = opened(browser, url)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        browser.execute_script("document.querySelector('#timelines').scrollIntoView()")
        pixels = shown.pixels(tmp_path / "phone.png")
        assert share(pixels, (255, 255, 255) if scheme == "light" else (0x15, 0x18, 0x1C)) > 0.3
        assert share(pixels, (0x1F, 0x77, 0xB4)) > 0.003, "units are in view"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def touch(browser: Any) -> Iterator[Callable[..., None]]:
    """Fingers on a device without a mouse: touch(kind, (x, y), ...)."""

    def touch(kind: str, *places: tuple[int, int]) -> None:
        points = [{"x": px, "y": py, "id": i} for i, (px, py) in enumerate(places)]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    yield touch
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_tap_tells_of_a_unit_until_the_next_touch(page: Timelines, touch: Any) -> None:
    def tap(moment: float, row: float) -> None:
        touch("touchStart", page.locate(1, moment, row))
        touch("touchEnd")

    tap(1.25, 1.3)
    text = page.wait("return all.selected && all.tip.innerText")
    assert "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert page.run("return all.pictures[1].name(all.selected.unit)") == "F0.1"
    tap(4.0, 0.9)
    assert "2.5 micro-batches of at most 2.5" in page.wait("return !all.selected && all.tip.innerText")
    tap(10.0, 4.3)
    assert page.wait("return all.tip.hidden"), "below the last rank"


def test_fingers_move_and_zoom(page: Timelines, touch: Any) -> None:
    """One finger moves the time axis, two zoom it."""
    x, y = page.locate(1, 8.0, 1.2)
    touch("touchStart", (x - 50, y), (x + 50, y))
    for apart in (80, 120, 160):
        touch("touchMove", (x - apart, y), (x + apart, y))
    touch("touchEnd")
    begin, end = page.run("return [all.from, all.to]")
    assert end - begin < 0.6 * page.run("return all.whole[1] - all.whole[0]")
    touch("touchStart", (x, y))
    for px in (x - 40, x - 90):
        touch("touchMove", (px, y))
    touch("touchEnd")
    moved = page.run("return [all.from, all.to]")
    assert moved[0] > begin and abs((moved[1] - moved[0]) - (end - begin)) < 1e-9
    assert page.run("return all.tip.hidden"), "a drag tells nothing"


def test_a_drawing_stays_small_whatever_the_units(page: Timelines) -> None:
    """Units share pixels: a rank of 6,256 units takes at most three times the text of a rank of 1,024."""
    lengths = []
    for counts, units in (({"P": 8, "M": 64, "k": 8}, 8192), ({"P": 16, "M": 391, "k": 8}, 100_096)):
        show(page, counts)
        assert page.run("return explorer.panels[0].result.pass.length") == units
        lengths.append(page.run("return all.svg(0, 1200, 56).length") / counts["P"])
    assert lengths[1] < 3 * lengths[0]
