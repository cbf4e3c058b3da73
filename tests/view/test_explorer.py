"""Does the schedule explorer tell what the package tells, and does it work in a real browser that has no network?

Its page is built here, by the command that builds it for the site. Where a browser, or clang for WebAssembly, is absent
the tests skip, or fail if the environment says SEQ1F1B_REQUIRE_BROWSER=1, as CI does.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Timelines, absent, open_browser

from seq1f1b import Costs, Links, Schedule, Simulation, build_schedule
from seq1f1b.cli import explorer, main
from seq1f1b.schedule import Family, StepMemory, families

ROOT = Path(__file__).parents[2]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"
FORM = {"costs": "seconds", "attention": 0, "split": "even", "order": "", "options": {}}
COMPUTE = """
const [designs, done] = arguments
const bench = new Explorer.Bench(), found = []
const plain = (x) => ArrayBuffer.isView(x) ? Array.from(x) : x
;(async () => {
  for (const design of designs) {
    const result = await bench.compute({...Explorer.panels[0].design, options: {}, ...design})
    found.push(Object.fromEntries(Object.entries(result).map(([name, value]) => [name, plain(value)])))
  }
  done(JSON.stringify(found))
})()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "docs/explorer/build.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 3:
        absent(done.stderr)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    yield from open_browser(width=1280, height=1000)


@pytest.fixture(scope="module")
def page(browser: Any, site: Path) -> Timelines:
    return opened(browser, site)


def opened(browser: Any, site: Path, link: str = "") -> Timelines:
    """The page of a link, once its designs are drawn."""
    browser.get("about:blank")
    shown = Timelines(browser, site / "index.html", "Explorer.timelines")
    if link:
        browser.get("about:blank")
        browser.get((site / "index.html").as_uri() + link)
    idle(shown)
    return shown


def idle(page: Timelines) -> None:
    page.wait("return !Explorer.isBusy() && Explorer.panels.every(p => p.result !== null)")


def compute(page: Timelines, designs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the laboratory finds for designs, one after another, in its worker."""
    page.browser.set_script_timeout(120)
    return json.loads(page.browser.execute_async_script(COMPUTE, designs))


def test_without_a_compiler_the_page_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/explorer/build.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 3 and "apt-get install clang lld wasi-libc" in done.stderr
    assert "was not built with these pages: no clang" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "core.wasm").exists()


def test_without_a_compiler_no_file_pretends_to_be_the_explorer(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "docs/explorer/build.py"), str(tmp_path / "explorer.html")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": str(tmp_path)})
    assert done.returncode == 3 and "apt-get install clang lld wasi-libc" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def alone(site: Path, tmp_path: Path) -> Path:
    """The page as one file, as a release holds it."""
    build = runpy.run_path(str(ROOT / "docs/explorer/build.py"))
    path = tmp_path / "explorer.html"
    path.write_text(build["page"]((site / "core.wasm").read_bytes(), home="seq1f1b"), encoding="utf-8")
    return path


def test_the_page_of_a_release_stands_alone(browser: Any, site: Path, alone: Path) -> None:
    shown = Timelines(browser, alone, "Explorer.timelines")
    idle(shown)
    assert shown.run("return Explorer.panels[1].result.makespan") == 16.5
    assert browser.execute_script("return [...document.querySelectorAll('[href]')].map(link => link.href)") == []
    assert "the C core of seq1f1b, which runs here" in browser.find_element("css selector", "header").text
    beside = (site / "index.html").read_text(encoding="utf-8")
    assert beside.replace('<a href="../index.html">seq1f1b</a>', "seq1f1b") == alone.read_text(encoding="utf-8")


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


def test_the_place_of_the_page_is_packed_and_never_committed() -> None:
    """The command looks at what the sdist and wheels take from the package's folder."""
    name = explorer.PAGE.relative_to(ROOT / "seq1f1b").as_posix()
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (packed,) = re.findall(r"^seq1f1b = (\[.*\])$", text, re.MULTILINE)
    assert name in json.loads(packed)
    assert f"seq1f1b/{name}" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


# -- the same numbers --------------------------------------------------------------------------------------------------


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
        "weights": rng.choice(("planned", "planned", "fill")),
        **dict(zip(("recompute", "offload"), rng.choice(WAYS), strict=True)),
    }
    if rng.random() < 0.5:
        design["W"] = design["B"] * rng.random()
    choices = {
        "extra_warmup": range(3),
        "cap": range(4, 40),
        "group": (1, 2, 3),
        "rounds": ("microbatches", "segments"),
        "placement": ("loop", "v"),
        "backward": ("split", "whole"),
    }
    given = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    return {**FORM, **design, "options": {name: given[name] for name in given if name in family.options}}


WAYS = (*[("none", "none")] * 3, ("all", "none"), ("none", "all"), ("fit", "none"), ("none", "fit"), ("fit", "fit"))


def simulated(design: dict[str, Any], family: Family) -> Simulation:
    """The design by the package's own calls."""
    parts = design["k"] * design["v"]
    costs = Costs(
        design["F"] / parts,
        design["B"] / parts,
        None if design["W"] is None else design["W"] / parts,
        links=Links(design["message"]),
        tier=design["tier"] / parts if design["offload"] != "none" else 0.0,
    )
    options = dict(design["options"])
    if "costs" in family.options:
        weight = 0.5 * costs.backward if costs.weight is None else costs.weight
        options["costs"] = (costs.forward, costs.backward - weight, weight)
    if "transfer" in family.options:
        options["transfer"] = design["message"]
    counts = {"num_ranks": design["P"], "num_microbatches": design["M"], "num_segments": design["k"]}
    order = build_schedule(family.name, **counts, stages_per_rank=design["v"], options=options)
    if design["weights"] == "fill":
        order = (order.defer_weights() if "B" in order.kinds else order).replace(weights="fill")
    order = order.recompute("all" if design["recompute"] == "all" else "none")
    order = order.offload("all" if design["offload"] == "all" else "none")
    memory = StepMemory(activations=1)
    if by := [way for way in ("recompute", "offload") if design[way] == "fit"]:
        order = order.fit(memory, int(design["cap"] * parts), by=by, costs=costs)
    return order.simulate(costs, memory=memory, critical="O" not in order.kinds and not order.fills)


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
            assert found["refused"] is not None and found["refused"]["text"] == run, design
            continue
        assert found["refused"] is None, (design, found["refused"])
        assert found["text"] == run.schedule.to_text(), design
        assert found["makespan"] == run.makespan, design
        for name in ("span", "busy", "wait"):
            assert tuple(found[name]) == getattr(run, name), (design, name)
        for name in ("start", "end", "slack"):
            rows = getattr(run, name)
            assert found[name] == (None if rows is None else [x for row in rows for x in row]), (design, name)
        units = [unit for rank in run.schedule.ranks for unit in rank]
        if run.critical_path is not None:
            assert tuple(units[i] for i in found["path"]) == run.critical_path
        memory = found["memory"]
        assert tuple(memory["units"]) == run.peak and run.memory is not None
        assert tuple(memory["total"]) == run.memory.total, design
        assert abs(found["limits"]["bubble"] - run.bubble_ratio) < 1e-12


def test_trees_have_the_numbers_of_the_package(page: Timelines) -> None:
    """Attention is to the tokens of a segment's path, in a design as in an order as text."""
    trees = [[-1, 0, 0, 1, 0], [-1, 0], [-1, 0, 0, 0, 2]]
    keys = [[1, 3, 3, 5, 3], [1, 3], [1, 3, 3, 3, 5]]  # twice the token in the middle of each, along its path
    parents, F, B, share = " ".join(",".join(map(str, own)) for own in trees), 1.5, 2.5, 0.4
    plain = {**FORM, "P": 2, "M": 3, "k": 2, "v": 1, "F": F, "B": B, "W": None, "message": 0, "attention": share}
    plain |= {"recompute": "none", "offload": "none", "weights": "planned", "parents": parents}

    def seconds(whole: float) -> list[list[list[float]]]:
        rows = [[(1 - share) / len(own) + share * key / sum(own) for key in own] for own in keys]
        return [[[whole * part for part in row] for row in rows]] * 2

    counts = {"num_ranks": 2, "num_microbatches": 3, "num_segments": [len(own) for own in trees], "parents": trees}
    nested = build_schedule("seq1f1b", **counts, options={"trees": "nested"})
    designs = [
        {**plain, "family": "seq1f1b", "options": {"trees": "nested"}},
        {**plain, "family": "text", "order": nested.to_text(), "parents": ""},
        {**plain, "family": "gpipe", "parents": "-1,0,0"},
        {**plain, "family": "seq1f1b", "parents": "-1,0 -"},
        {**plain, "family": "seq1f1b", "parents": "-1,0,,0"},
        {**plain, "family": "seq1f1b", "parents": "-1,1 - -"},
    ]
    found = compute(page, designs)
    run = nested.simulate(Costs(seconds(F), seconds(B)), memory=StepMemory(activations=1))
    for result in found[:2]:
        assert result["text"] == nested.to_text() and result["parents"] == trees
        assert result["makespan"] == pytest.approx(run.makespan) and tuple(result["memory"]["units"]) == run.peak
    counts |= {"num_segments": 3, "parents": [[-1, 0, 0]] * 3}
    assert found[2]["text"] == build_schedule("gpipe", **counts).to_text()
    assert [result["refused"]["text"] for result in found[3:]] == [
        "parents hold 2 words, must hold one for all or for each of 3",
        '"-1,0,,0": parents are written -1,0,0, or - for a chain, with blanks between',
        "parents of micro-batch 0: segment 1 follows segment 1, must follow one of 0..0: a parent comes before its "
        "children",
    ]
    page.run(f"return Explorer.open([{json.dumps(designs[0])}, {json.dumps(designs[1])}])")
    idle(page)
    assert page.run("return Explorer.toCsv(Explorer.panels[0].result)") is None
    first = nested.units_of(0).index(("F", 0, 0, 2))
    inputs = page.run(
        "const {inputs} = Explorer.panels[0].result; return [Array.from(inputs.first), [...inputs.units]]"
    )
    assert nested.units_of(0).index(("F", 0, 0, 0)) in inputs[1][inputs[0][first] : inputs[0][first + 1]]
    page.run("return Explorer.open(Explorer.presets[0].pair)")  # as it was
    idle(page)


MODELS = [
    {"family": "1f1b", "costs": "8b-128k", "P": 4, "M": 6, "k": 1, "v": 1, "split": "equal"},
    {"family": "seq1f1b", "costs": "8b-1m", "P": 8, "M": 8, "k": 16, "v": 1, "recompute": "fit", "cap": 40},
    {"family": "seq-zbv", "costs": "70b-128k", "P": 16, "M": 32, "k": 4, "v": 2, "split": "equal"},
    {"family": "seq1f1b-interleaved", "costs": "70b-1m", "P": 16, "M": 16, "k": 8, "v": 2, "offload": "all"},
]
OTHERS = [
    {"family": "seq1f1b", "P": 4, "M": 4, "k": 4, "v": 1, "attention": 0.6, "split": "equal"},
    {
        "family": "seq1f1b",
        "P": 4,
        "M": 4,
        "k": 3,
        "v": 1,
        "attention": 0.5,
        "split": "3000, 2000, 1000",
        "message": 0.1,
    },
    {"family": "zb-h1", "P": 4, "M": 8, "k": 1, "v": 1, "recompute": "fit", "cap": 2},
    {"family": "text", "order": "F0.0 F0.1 B0.1 B0.0\nF0.0 F0.1 B0.1 B0.0\n", "P": 2, "M": 1, "k": 2, "v": 1},
    {"family": "seq1f1b", "P": 2, "M": 4, "k": 2, "v": 1, "offload": "all", "tier": 0.7},
    {"family": "seq-zb-h1", "P": 2, "M": 3, "k": 2, "v": 1, "parents": "-1,0,0 - -1,0,0,1", "attention": 0.5},
]


@pytest.mark.parametrize("design", MODELS + OTHERS, ids=lambda design: f"{design['family']}-{design.get('costs', '')}")
def test_the_lines_of_python_build_the_design(page: Timelines, design: dict[str, Any], capsys: Any) -> None:
    """Run here, they give the numbers that the page has: costs of models are those of the package."""
    whole = {**page.run("return {...Explorer.presets[0].pair[0]}"), **design}
    [found] = compute(page, [whole])
    assert found["refused"] is None, found["refused"]
    script = "const [design, done] = arguments; new Explorer.Bench().compute(design).then("
    script += "result => done(Explorer.toPython(design, result)))"
    lines = page.browser.execute_async_script(script, whole)
    names: dict[str, Any] = {}
    exec(lines, names)
    run = names["run"]
    capsys.readouterr()
    assert run.makespan == found["makespan"], lines
    assert run.schedule.to_text() == found["text"]
    assert found["end"] == [end for row in run.end for end in row]
    if run.memory is not None:
        assert tuple(found["memory"]["total"]) == run.memory.total
        if whole["costs"] != "seconds":
            held = {name: tuple(values) for name, values in found["memory"]["held"].items()}
            assert held == {name: getattr(run.memory, name) for name in held}


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_first_look_is_1f1b_beside_seq1f1b_without_a_network(page: Timelines) -> None:
    headings = page.run("return all.frames.map(({heading}) => heading.textContent)")
    assert headings == ["A: 1f1b: 21 s, bubble 42.9%", "B: seq1f1b, 2 segments: 16.5 s, bubble 27.3%"]
    bottom = page.run("return all.frames[1].canvas.getBoundingClientRect().bottom <= innerHeight")
    assert bottom, "both are in view"
    assert (
        page.run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('blob:')).length") == 0
    )
    assert page.problems() == []


NAMES = {  # families whose units have no segment, several stages on a rank, or both
    "1f1b": {"k": 1},
    "zbv": {"k": 1, "v": 2},
    "seq-zbv": {"k": 2, "v": 2},
    "seq1f1b-interleaved": {"k": 2, "v": 2},
    "gpipe": {"k": 1, "P": 1},
}


@pytest.mark.parametrize("family", NAMES)
def test_units_are_named_as_the_box_of_an_order_reads_them(page: Timelines, family: str) -> None:
    """In the picture where there is room, and in what is told of each; what is told can be pasted into the box."""
    page.run("Explorer.open([Explorer.make({M: 4, P: 2, ...arguments[0]})])", {"family": family, **NAMES[family]})
    idle(page)
    order = page.run("return Explorer.panels[1].result.text")
    assert order == Schedule.from_text(order).to_text()
    drawn = re.findall(r">(\[?\d*\]?[A-Z]?\d+\.?\d*)<", page.run("return all.svg(1, 4000)"))
    assert sorted(drawn) == sorted(order.split())
    told = "const {timeline} = all.pictures[1], {first} = timeline;"
    told += "const names = Array.from(timeline.pass, (_, i) => all.pictures[1].tellUnit(i)[0][1].split(',')[0]);"
    told += "return Array.from(first).slice(1).map((end, rank) => names.slice(first[rank], end).join(' '))"
    pasted = "\n".join(page.run(told))
    page.run("Explorer.open([Explorer.make({family: 'text', order: arguments[0]})])", pasted)
    idle(page)
    assert page.run("return Explorer.panels.map(({result}) => [result.refused, result.text])") == [[None, order]] * 2


def test_the_first_look_names_units_of_whole_microbatches_with_their_segment(page: Timelines) -> None:
    page.run("Explorer.open(Explorer.presets[0].pair)")
    idle(page)
    drawn = page.run("return all.svg(0, all.frames[0].canvas.clientWidth)")
    assert sorted(re.findall(r">([FB]\d\.?\d*)<", drawn)) == sorted(
        [f"{kind}{m}.0" for kind in "FB" for m in range(4)] * 4
    )


def test_units_tell_what_they_wait_for(page: Timelines) -> None:
    text = page.hover(1, 1.25, 1.3)
    assert "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert "F0.1 on rank 0, ended at 1 s" in text and "on the critical path" not in text
    assert "2.5 micro-batches of at most 2.5" in page.hover(1, 4.0, 0.9)


def test_a_link_holds_the_designs(browser: Any, site: Path, page: Timelines) -> None:
    """Every preset, written as a link and read again; and one opened anew."""
    same = "return Explorer.presets.filter(({pair}) => {"
    same += " const back = Explorer.fromLink(Explorer.toLink(pair));"
    same += " return JSON.stringify(back) !== JSON.stringify(pair) }).map(({name}) => name)"
    assert page.run(same) == []
    pairs = page.run("return Explorer.presets.map(({name, pair}) => [name, pair])")
    found = compute(page, [design for _, pair in pairs for design in pair])
    assert [result["refused"] for result in found] == [None] * len(found), "every preset can be built"
    order = "F0.0 B0.0\nF0.0 B0.0\n"
    script = "Explorer.open([Explorer.make({family: 'zb-h1', k: 1, M: 6, options: {cap: 5}, W: 0.5}),"
    script += " Explorer.make({family: 'text', order: arguments[0]})])"
    page.run(script, order)
    idle(page)
    before = page.run("return Explorer.panels.map(({result, design}) => [design, result.makespan, result.text])")
    link = browser.execute_script("return location.hash")
    again = opened(browser, site, link)
    assert (
        again.run("return Explorer.panels.map(({result, design}) => [design, result.makespan, result.text])") == before
    )
    assert before[1][2] == order
    odd = "return Explorer.fromLink(arguments[0])"
    assert again.run(odd, "x.y=1&c.family=zbv&#&=&a") is None
    found = again.run(odd, "a.family=nonsense&a.costs=gpt&a.P=many&a.k=&a.M=6&a.wrong=1&a.split=%3Cb%3E")
    assert [{**found[0], "M": 4, "split": "even"}] == again.run("return [Explorer.make({})]")


MISTAKES = {
    "P is 2.5, must be a whole number": {"P": 2.5},
    "num_microbatches is 0, must be at least 1": {"M": 0},
    "a design of 16000000000 units, more than the 1000000 that this page takes": {"M": 1e9},
    "the duration of a unit is -0.5, must be finite and at least 0": {"F": -1},
    "the share of attention is 2, must be in 0..1": {"attention": 2, "split": "equal"},
    "the split holds 3 lengths, there are 2 segments": {"split": "5 5 5"},
    "weight is more than backward, of which it is a part": {"W": 3},
    "zb-h1 needs k = 1 (seq-zb-h1 takes segments)": {"family": "zb-h1"},
    "llama3-8b, 128k tokens has costs for P = 4": {"costs": "8b-128k", "P": 5},
    "llama3-8b, 128k tokens has costs for v = 1, 2, k = 1, 2, 4, 8, 16, 32": {"costs": "8b-128k", "k": 3},
    "line 1, unit 2, 'X1.0'": {"family": "text", "order": "F0.0 X1.0"},
}


def test_mistakes_are_told_and_the_next_design_is_computed(page: Timelines) -> None:
    design = {**FORM, "family": "seq1f1b", "P": 4, "M": 4, "k": 2, "v": 1, "F": 1, "B": 2, "W": None}
    found = compute(page, [*({**design, **wrong} for wrong in MISTAKES.values()), design])
    for text, result in zip(MISTAKES, found, strict=False):
        assert text in (result["refused"] or {}).get("text", ""), (text, result["refused"])
    assert found[-1]["makespan"] == 16.5


def test_a_long_search_gives_way_to_the_next_design(page: Timelines) -> None:
    """The order of many units is searched for; meanwhile a form has changed."""
    script = """
    const done = arguments[0], bench = new Explorer.Bench(), began = performance.now()
    const [design] = Explorer.presets[0].pair
    const costs = {F: 1.3, B: 2.1, W: 0.3, message: 0.17, attention: 0.5, options: {cap: 30}}
    const long = bench.compute({...design, ...costs, family: "auto", P: 8, M: 128, k: 16})
    setTimeout(async () => {
      const result = await bench.compute(design)
      done([await long, result.makespan, performance.now() - began])
    }, 100)
    """
    ended, makespan, milliseconds = page.browser.execute_async_script(script)
    assert ended is None and makespan == 21 and milliseconds < 5000


def test_both_forms_changed_at_once_are_shown(browser: Any, site: Path) -> None:
    """A's design takes longer than B's, which was changed after it."""
    shown = opened(browser, site)
    script = """
    const [a, b] = Explorer.panels, done = arguments[0]
    a.design = {...a.design, family: "auto", M: 64, k: 8, B: 2.1, W: 0.3, message: 0.17}
    b.design = {...b.design, M: 6}
    Promise.all([Explorer.update([a], true), Explorer.update([b], true)]).then(() => done())
    """
    browser.execute_async_script(script)
    assert not shown.run("return Explorer.isBusy()")
    first, second = shown.run("return all.frames.map(({heading}) => heading.textContent)")
    assert first.startswith("A: auto, 8 segments: ") and second == "B: seq1f1b, 2 segments: 22.5 s, bubble 20.0%"


def test_a_wrong_order_names_its_rule_and_marks_both_units(browser: Any, site: Path) -> None:
    shown = opened(browser, site)
    area = shown.browser.find_elements("css selector", "textarea")[1]
    shown.browser.execute_script("arguments[0].closest('details').open = true", area)
    area.clear()
    area.send_keys("F0.0 F0.1 B0.0 B0.1\nF0.0 F0.1 B0.1 B0.0")
    idle(shown)
    shown.wait("return Explorer.panels[1].result.refused?.where === 'order'")
    panel = shown.browser.find_elements("css selector", ".panel")[1]
    said = panel.find_element("css selector", ".refused").text
    with pytest.raises(ValueError) as refused:
        Schedule.from_text(area.get_property("value")).check()
    assert str(refused.value) in said and "on rank 0 B0.0 comes before B0.1" in said
    marks = [mark.get_property("textContent") for mark in panel.find_elements("css selector", ".editor mark")]
    assert marks == ["B0.0", "B0.1"]
    assert shown.run("return all.pictures.length") == 1, "the other design stays"


SENTENCES = {
    "F0.0 F0.0 B0.0\nF0.0 B0.0": [["F0.0", 0], ["F0.0", 5]],  # twice
    "F0.0 F0.1 B0.1 B0.0\nF0.0 F0.1 B0.1 X0.0": [["X0.0", 35]],
    "[0]F0.0 [1]F0.0 [1]B0.0 [0]B0.0 [0]B0.0": [["[0]B0.0", 24], ["[0]B0.0", 32]],
    "F0.0 B0.0 F1.0 B1.0\nF1.0 F0.0 B1.0 B0.0": [["B0.0", 5], ["F1.0", 20]],  # a cycle
    "parents -1,0,0\nF0.0 F0.1 F0.2 B0.0 B0.1 B0.2": [["B0.0", 30], ["B0.1", 35]],  # the first line is no rank's
    "parents -1,0,x\nF0.0 F0.1 F0.2 B0.2 B0.1 B0.0": [["-1,0,x", 8]],
}


def test_marks_are_the_places_that_a_sentence_means(page: Timelines) -> None:
    script = "const [sentence, order] = arguments;"
    script += "return Explorer.marks(sentence, order).map(({name, begin}) => [name, begin])"
    for order, expected in SENTENCES.items():
        with pytest.raises(ValueError) as refused:
            Schedule.from_text(order).check()
        found = page.run(script, str(refused.value), order)
        assert expected == [mark for mark in found if mark in expected], (str(refused.value), found)


def test_saved_forms(page: Timelines) -> None:
    page.run("Explorer.open(Explorer.presets[0].pair)")
    idle(page)
    order = build_schedule("seq1f1b", num_ranks=4, num_microbatches=4, num_segments=2)
    assert page.run("return Explorer.toCsv(Explorer.panels[1].result)") == order.to_csv()
    svg = page.run("return all.svg(1)")
    assert svg.startswith("<svg xmlns=") and svg.count("<rect") > 64 and "rank 3" in svg
    assert page.run("return all.canvas(1).toDataURL('image/png').length") > 10_000


def test_keys_alone_change_a_design(browser: Any, site: Path) -> None:
    """From field to field with Tab, counts with arrows; then along a timeline."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    shown = opened(browser, site)
    keys = ActionChains(browser, duration=0)
    shown.run("document.querySelectorAll('.panel')[1].querySelector('[data-name=family]').focus()")
    keys.send_keys(Keys.TAB, Keys.TAB, Keys.ARROW_UP, Keys.ARROW_UP, Keys.TAB, Keys.ARROW_UP).perform()
    idle(shown)
    shown.wait("return Explorer.panels[1].result.M === 6 && Explorer.panels[1].result.k === 3")
    idle(shown)
    shown.run("all.frames[1].canvas.focus()")
    keys.reset_actions()
    keys.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
    assert shown.run("return all.said.textContent").startswith("unit: F0.1, forward. rank: 0, stage 0. ")
    for control in ("input", "select", "textarea", "button", "canvas"):
        nameless = "return [...document.querySelectorAll(arguments[0])].filter(e => !e.textContent && !e.title"
        nameless += " && !e.ariaLabel && !e.closest('label')?.textContent).length"
        assert shown.run(nameless, control) == 0, control


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(browser: Any, site: Path, tmp_path: Path, scheme: str) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    try:
        shown = opened(browser, site)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
        forms, table, timelines = (
            browser.execute_script(
                "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", place
            )
            for place in ("#panels", "#compared", "#timelines")
        )
        assert forms["bottom"] <= table["top"] < table["bottom"] <= timelines["top"], "forms come first"
        browser.execute_script("document.querySelector('#timelines').scrollIntoView()")
        ground = 1.0 if scheme == "light" else 0x15 / 255
        pixels = shown.pixels(tmp_path / "phone.png")
        assert (abs(pixels - [ground, 1.0, 1.0] if scheme == "light" else pixels[:, :1] - ground) < 0.01).mean() > 0.3
        blue = [channel / 255 for channel in (0x1F, 0x77, 0xB4)]
        assert (abs(pixels - blue).max(axis=1) < 0.01).mean() > 0.003, "units are in view"
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


def hints(page: Timelines) -> list[str]:
    return [hint.text for hint in page.browser.find_elements("css selector", ".hint") if hint.is_displayed()]


def test_hints_name_what_a_mouse_does_where_there_is_one(browser: Any, site: Path) -> None:
    [hint] = hints(opened(browser, site))
    assert "Hover" in hint and "arrow keys" in hint and "Tap" not in hint


def test_hints_name_what_fingers_do_where_there_is_no_mouse(browser: Any, site: Path, touch: Any) -> None:
    [hint] = hints(opened(browser, site))
    assert hint.startswith("Tap a unit") and "two zoom" in hint
    assert not any(word in hint for word in ("Hover", "wheel", "arrow", "Ctrl"))


def test_a_tap_tells_of_a_unit_until_the_next_touch(browser: Any, site: Path, touch: Any) -> None:
    shown = opened(browser, site)

    def tap(moment: float, row: float) -> str | None:
        touch("touchStart", shown.locate(1, moment, row))
        touch("touchEnd")
        return shown.run("return all.tip.hidden ? null : all.tip.innerText")

    text = tap(1.25, 1.3)
    assert text is not None and "F0.1, forward" in text and "1 s to 1.5 s, 0.5 s long" in text
    assert shown.run("return all.pictures[1].name(all.selected.unit)") == "F0.1"
    assert "2.5 micro-batches of at most 2.5" in (tap(4.0, 0.9) or "")
    whole = shown.run("return [all.from, all.to]")
    assert tap(10.0, 5.0) is None, "below the last rank"
    assert shown.run("return all.selected") is None and shown.run("return [all.from, all.to]") == whole
    assert tap(1.25, 1.3) == text
    x, y = shown.locate(1, 8.0, 1.2)
    touch("touchStart", (x, y))
    touch("touchMove", (x - 60, y))
    touch("touchEnd")
    assert shown.run("return all.tip.hidden"), "a drag tells nothing"
    assert shown.run("return all.from") > whole[0]


def test_fingers_move_and_zoom(browser: Any, site: Path, touch: Any) -> None:
    """One finger moves the time axis, two zoom it."""
    shown = opened(browser, site)
    x, y = shown.locate(1, 8.0, 1.2)
    touch("touchStart", (x - 50, y), (x + 50, y))
    for apart in (80, 120, 160):
        touch("touchMove", (x - apart, y), (x + apart, y))
    touch("touchEnd")
    begin, end = shown.run("return [all.from, all.to]")
    assert end - begin < 0.6 * shown.run("return all.whole[1] - all.whole[0]")
    touch("touchStart", (x, y))
    for px in (x - 40, x - 90):
        touch("touchMove", (px, y))
    touch("touchEnd")
    moved = shown.run("return [all.from, all.to]")
    assert moved[0] > begin and abs((moved[1] - moved[0]) - (end - begin)) < 1e-9


def test_large_designs_are_drawn_at_once(browser: Any, site: Path) -> None:
    """From the change of a design to its pixels: 8,192 units and 100,000. The best of some: machines are shared."""
    opened(browser, site)
    browser.set_script_timeout(60)
    script = """
    const [design, limit, done] = arguments
    const panel = Explorer.panels[1], times = []
    ;(async () => {
      for (let i = 0; i < 8 || (i < 32 && Math.min(...times) >= limit); i++) {
        panel.design = {...panel.design, ...design, F: 1 + i / 32}
        const began = performance.now()
        await Explorer.update([panel], true)
        Explorer.timelines.frames[1].canvas.getContext("2d").getImageData(0, 0, 1, 1) // it has been drawn
        times.push(performance.now() - began)
      }
      done([panel.result.pass.length, Math.min(...times)])
    })()
    """
    for units, seconds, design in (
        (8192, 0.1, {"P": 8, "M": 64, "k": 8}),
        (100_096, 1.0, {"P": 16, "M": 391, "k": 8}),
    ):
        count, milliseconds = browser.execute_async_script(script, design, 1000 * seconds)
        print(f"{count} units: {milliseconds:.0f} ms")
        assert count == units and milliseconds < 1000 * seconds
