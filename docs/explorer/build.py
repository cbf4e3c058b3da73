"""Builds the schedule explorer: one HTML file with scripts, and the C core as WebAssembly.

    python docs/explorer/build.py explorer.html

Needs clang, lld, wasi-libc and compiler-rt for wasm32; Debian: apt-get install clang lld
wasi-libc libclang-rt-dev-wasm32. Where they are missing the command ends with 3.
`seq1f1b explorer` finds the page that is seq1f1b/view/explorer.html: .ci/wheels.py builds it
there, for the sdist and the wheels; docs/conf.py builds it beside the pages of the site.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from seq1f1b import _C
from seq1f1b.families import families
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.view import style

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"
MISSING = 3  # exit status

# -- the core --------------------------------------------------------------------------------


class NoCompiler(Exception):
    """What is missing of a C compiler for WebAssembly."""


def build_core(path: Path) -> None:
    """Compiles csrc/core, csrc/schedules and csrc/model with exports.c.

    Raises:
        NoCompiler: there is no clang, or it has failed.
    """
    sources = [str(HERE / "exports.c")]
    for room in ("core", "schedules", "model"):
        sources += sorted(map(str, (ROOT / "csrc" / room).glob("*.c")))
    flags = ["--target=wasm32-wasi", "-mexec-model=reactor", "-std=c11", "-O2", "-Wall"]
    flags += ["-Wextra", "-Werror", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    flags += ["-Wl,--strip-all", "-Wl,-z,stack-size=262144", "-o", str(path)]
    try:
        subprocess.run(["clang", *flags, *sources], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        text = f"no clang that links for wasm32-wasi; Debian: apt-get install {PACKAGES}"
        raise NoCompiler(text) from error


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
        "options": [name for name, *_ in _C.FAMILY_OPTIONS],  # in the core's order
        "holdings": [row.name for row in style.HOLDINGS],
        "style": style.page_facts(),
        "presets": {name: preset(*given) for name, given in PRESETS.items()},
    }


def preset(model: str, num_ranks: int, seq_len: int, layout: Layout) -> dict[str, Any]:
    """Costs of a model on H100s, for each number of stages and segments."""
    hardware = load_hardware("h100")
    tables = {}
    for stages in STAGES:
        cost = CostModel.balanced(
            load_model(model),
            hardware,
            num_ranks=num_ranks,
            stages_per_rank=stages,
            seq_len=seq_len,
            layout=layout,
        )
        there, back = list(range(num_ranks)), list(reversed(range(num_ranks)))
        orders = [there] if stages == 1 else [there + there, there + back]  # a loop, a V
        for segments in SEGMENTS:
            even = [seq_len // segments] * segments
            for split, sizes in (("even", even), ("equal", cost.split(segments))):
                tables[f"{stages}/{segments}/{split}"] = costs_of(cost, sizes, orders)
    devices = layout.tensor * layout.context * num_ranks
    return {
        "title": f"{model}, {f'{seq_len >> 10}k' if seq_len < 2**20 else '1M'} tokens",
        "about": f"{model} on {devices} H100s: pipeline {num_ranks}, tensor {layout.tensor}, "
        f"context {layout.context}; {seq_len} tokens a micro-batch; memory of one GPU",
        "P": num_ranks,
        "v": STAGES,
        "k": SEGMENTS,
        "memory": hardware.memory,
        "tables": tables,
    }


def costs_of(cost: CostModel, sizes: list[int], orders: list[list[int]]) -> dict[str, Any]:
    """Seconds and bytes of units, as a step's price has them, for stages in these places."""
    price = cost.price(sizes)
    seconds = {**price.seconds._asdict(), **price.moving_seconds()}
    return {
        "passes": {name: rows_of(table.tolist()) for name, table in seconds.items()},
        "message": price.message_bytes.tolist(),
        "places": [placement(cost, price, rank_of_stage) for rank_of_stage in orders],
    }


def placement(cost: CostModel, price: Price, rank_of_stage: list[int]) -> dict[str, Any]:
    """What depends on where stages lie, and bytes."""
    latency, bandwidth, _ = cost.links(rank_of_stage)
    held = asdict(price.step_memory(rank_of_stage))
    memory = {name: np.asarray(table).tolist() for name, table in held.items()}
    memory["activations"] = [
        [whole - kept for whole, kept in zip(*rows, strict=True)]
        for rows in zip(memory["activations"], memory["kept_activations"], strict=True)
    ]
    memory["logits"] = [0] * (cost.num_stages - 1) + [memory["logits"]]
    constant = {}
    for name in ("weights", "optimizer", "logits"):
        constant[name] = [0] * (max(rank_of_stage) + 1)
        for rank, held in zip(rank_of_stage, memory[name], strict=True):
            constant[name][rank] += held
    held = {row.name: memory[row.name] for row in style.HOLDINGS}
    return {
        "rank_of_stage": rank_of_stage,
        "latency": latency,
        "bandwidth": bandwidth,
        "bytes": {name: rows_of(of) for name, of in held.items() if isinstance(of, list)},
        "constant": constant,
    }


def rows_of(table: list[Any]) -> dict[str, Any]:
    """The different rows of a table, and the row of each stage; a number is a row, too."""
    given = [tuple(row) if isinstance(row, list) else (row,) for row in table]
    rows = list(dict.fromkeys(given))
    return {"rows": rows, "of": [rows.index(row) for row in given]}


# -- the page --------------------------------------------------------------------------------


def build(path: Path) -> None:
    """Writes the page with all that it needs.

    Raises:
        NoCompiler: nothing is written.
    """
    with tempfile.TemporaryDirectory() as folder:
        core = Path(folder, "core.wasm")
        build_core(core)
        wasm = base64.b64encode(core.read_bytes()).decode()
    scripts = {"facts": json.dumps(facts(), separators=(",", ":")), "wasm": wasm}
    scripts["timeline"] = style.part("timeline.js")
    for name in ("lab", "design", "explorer"):
        scripts[name] = (HERE / f"{name}.js").read_text(encoding="utf-8")
    parts = {name: text.replace("</", "<\\/") for name, text in scripts.items()}
    parts["timeline_style"] = style.part("timeline.css")
    parts["explorer_style"] = (HERE / "explorer.css").read_text(encoding="utf-8")
    html = (HERE / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        marker = f"/* {name} */"
        assert html.count(marker) == 1, marker
        html = html.replace(marker, text)
    path.write_text(html, encoding="utf-8")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    path = Path(sys.argv[1])
    try:
        build(path)
    except NoCompiler as error:
        print(f"explorer: {error}", file=sys.stderr)
        return MISSING
    print(f"{path}: {path.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
