"""Builds the schedule explorer: the C core as WebAssembly, and one HTML file with scripts.

    python docs/explorer/build.py explorer.html  # one file that needs nothing beside it
    python docs/explorer/build.py site/explorer  # a folder beside the pages of the site

Needs clang, lld, wasi-libc and compiler-rt for wasm32; Debian: apt-get install clang lld
wasi-libc libclang-rt-dev-wasm32. Where they are missing the command ends with 3, and the page
of the site says so. `seq1f1b explorer` finds the page that is seq1f1b/view/explorer.html:
.ci/wheels.py builds it there, for the sdist and the wheels.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seq1f1b import _C
from seq1f1b.families import families
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.view import style

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"
TARGET = ["--target=wasm32-wasi", "-mexec-model=reactor"]
MISSING = 3  # exit status
HOME = '<a href="../index.html">seq1f1b</a>'  # where the page stands beside those of the site

# -- the core --------------------------------------------------------------------------------


class NoCompiler(Exception):
    """What is missing of a C compiler for WebAssembly."""


def find_clang() -> str:
    """A clang that links for WebAssembly."""
    for name in ("clang", *(f"clang-{version}" for version in range(22, 13, -1))):
        clang = shutil.which(name)
        if clang is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "a.c")
            source.write_text("#include <stdlib.h>\n", encoding="utf-8")
            command = [clang, *TARGET, "-o", f"{folder}/a.wasm", str(source)]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return clang
    raise NoCompiler(
        f"no clang that links for wasm32-wasi; Debian: apt-get install {PACKAGES}"
    )


def build_core(path: Path) -> None:
    """Compiles csrc/core, csrc/schedules and csrc/model with exports.c."""
    sources = [str(HERE / "exports.c")]
    for room in ("core", "schedules", "model"):
        sources += sorted(map(str, (ROOT / "csrc" / room).glob("*.c")))
    flags = [*TARGET, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    flags += [f"-I{ROOT / 'csrc'}", "-Wl,--strip-all", "-Wl,-z,stack-size=262144"]
    subprocess.run([find_clang(), *flags, "-o", str(path), *sources], check=True)


# -- what the page knows of the package ------------------------------------------------------

SEGMENTS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2)
PRESETS = {  # model, ranks, sequence, degrees
    "8b-128k": ("llama3-8b", 4, 2**17, Layout(tensor=8)),
    "8b-1m": ("llama3-8b", 8, 2**20, Layout(tensor=8, context=4)),
    "70b-128k": ("llama3-70b", 16, 2**17, Layout(tensor=8)),
    "70b-1m": ("llama3-70b", 16, 2**20, Layout(tensor=8, context=8)),
}


def facts() -> dict[str, Any]:
    """Names, rules, colours, and the costs of models on a machine."""
    return {
        "families": list(map(asdict, families())),
        "options": [name for name, _ in _C.FAMILY_OPTIONS],  # in the core's order
        "holdings": [
            {"name": row.name, "counts_with": row.counts_with} for row in _C.HOLDINGS
        ],
        "style": style.page_facts(),
        "presets": {name: preset(*given) for name, given in PRESETS.items()},
    }


def preset(model: str, num_ranks: int, seq_len: int, layout: Layout) -> dict[str, Any]:
    """Costs of a model on H100s, for each number of stages and segments."""
    hardware = load_hardware("h100")
    tables, placements = {}, []
    for stages in STAGES:
        cost = CostModel.balanced(
            load_model(model),
            hardware,
            num_ranks=num_ranks,
            stages_per_rank=stages,
            seq_len=seq_len,
            layout=layout,
        )
        for segments in SEGMENTS:
            even = [seq_len // segments] * segments
            for split, sizes in (("even", even), ("equal", cost.split(segments))):
                tables[f"{stages}/{segments}/{split}"] = costs_of(cost, sizes)
        there, back = list(range(num_ranks)), list(reversed(range(num_ranks)))
        orders = [there] if stages == 1 else [there + there, there + back]  # a loop, a V
        placements += [placement(cost, rank_of_stage) for rank_of_stage in orders]
    devices = layout.tensor * layout.context * num_ranks
    return {
        "title": f"{model}, {f'{seq_len >> 10}k' if seq_len < 2**20 else '1M'} tokens",
        "about": f"{model} on {devices} H100s: pipeline {num_ranks}, tensor {layout.tensor}, "
        f"context {layout.context}; {seq_len} tokens a micro-batch; memory of one GPU",
        "model": model,
        "layout": {"tensor": layout.tensor, "context": layout.context},
        "P": num_ranks,
        "v": STAGES,
        "k": SEGMENTS,
        "tokens": seq_len,
        "memory": hardware.memory,
        "tables": tables,
        "placements": placements,
    }


def costs_of(cost: CostModel, sizes: list[int]) -> dict[str, Any]:
    """Seconds and bytes of units, as the price of a step gives them."""
    price = cost.price(sizes)
    memory = price.step_memory(range(cost.num_stages))
    per_unit = {**price.seconds._asdict(), **price.moving_seconds()}
    for name in ("activations", "kept_activations", "output_gradients"):
        per_unit[name] = getattr(memory, name)
    found = {name: rows_of(table) for name, table in per_unit.items()}
    for name in ("kv", "kv_gradients", "weights", "optimizer", "logits"):
        found[name] = getattr(memory, name)
    return {**found, "sizes": sizes, "message_bytes": price.message_bytes}


def rows_of(table: list[list[Any]]) -> dict[str, Any]:
    """The different rows of a table, and the row of each stage."""
    rows = list(dict.fromkeys(map(tuple, table)))
    return {"rows": rows, "of": [rows.index(tuple(row)) for row in table]}


def placement(cost: CostModel, rank_of_stage: list[int]) -> dict[str, Any]:
    """What depends on where stages lie; stays: messages that a unit of each stage keeps."""
    latency, bandwidth = cost.links(rank_of_stage)
    whole = cost.price([cost.seq_len])
    staying, [message] = whole.step_memory(rank_of_stage).staying, whole.message_bytes
    return {
        "rank_of_stage": rank_of_stage,
        "latency": latency,
        "bandwidth": bandwidth,
        "stays": [row[0] // message for row in staying],
    }


# -- the page --------------------------------------------------------------------------------


def page(wasm: bytes, home: str = HOME) -> str:
    """The page with all that it needs; home: HTML that names the package."""
    scripts = {
        "laboratory": (HERE / "lab.js").read_text(encoding="utf-8"),
        "facts": json.dumps(facts(), separators=(",", ":")),
        "wasm": base64.b64encode(wasm).decode(),
        "timeline": style.scripts(),
    }
    for name in ("saved", "design", "bench", "explorer"):
        scripts[name] = (HERE / f"{name}.js").read_text(encoding="utf-8")
    parts = {name: text.replace("</", "<\\/") for name, text in scripts.items()}
    parts["timeline_style"] = style.stylesheet()
    parts["style"] = (HERE / "explorer.css").read_text(encoding="utf-8")
    html = (HERE / "page.html").read_text(encoding="utf-8")
    html = html.replace("<!-- home -->", home)
    for name, text in parts.items():
        marker = f"/* {name} */"
        assert html.count(marker) == 1, marker
        html = html.replace(marker, text)
    return html


def build_file(path: Path) -> None:
    """Writes one page that stands alone.

    Raises:
        NoCompiler: nothing is written.
    """
    with tempfile.TemporaryDirectory() as folder:
        core = Path(folder, "core.wasm")
        build_core(core)
        path.write_text(page(core.read_bytes(), home="seq1f1b"), encoding="utf-8")


def build(folder: Path) -> None:
    """Writes index.html and core.wasm.

    Raises:
        NoCompiler: the page says what is missing, and there is no core.wasm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        build_core(folder / "core.wasm")
    except NoCompiler as error:
        text = "<!doctype html><meta charset=utf-8><title>Schedule explorer</title>"
        text += f"<p>The schedule explorer was not built with these pages: {error}.</p>"
        (folder / "index.html").write_text(text, encoding="utf-8")
        raise
    (folder / "index.html").write_text(
        page((folder / "core.wasm").read_bytes()), encoding="utf-8"
    )


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    is_file = target.suffix == ".html"
    try:
        build_file(target) if is_file else build(target)
    except NoCompiler as error:
        print(f"explorer: {error}", file=sys.stderr)
        return MISSING
    for path in [target] if is_file else [target / "index.html", target / "core.wasm"]:
        print(f"{path}: {path.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
