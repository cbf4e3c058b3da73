"""Builds the schedule explorer: one HTML file with scripts, and the C core as WebAssembly.

    python docs/explorer/build.py explorer.html

Needs clang, lld, wasi-libc and compiler-rt for wasm32; Debian: apt-get install clang lld
wasi-libc libclang-rt-dev-wasm32.
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

from seq1f1b import _C
from seq1f1b.families import families
from seq1f1b.view import style

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"


def core() -> bytes:
    """Compiles csrc/core, csrc/schedules and csrc/model with exports.c.

    Raises:
        OSError: there is no clang that links for WebAssembly.
    """
    sources = [HERE / "exports.c"]
    for room in ("core", "schedules", "model"):
        sources += sorted((ROOT / "csrc" / room).glob("*.c"))
    flags = ["--target=wasm32-wasi", "-mexec-model=reactor", "-std=c11", "-O2", "-Wall"]
    flags += ["-Wextra", "-Werror", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    flags += ["-Wl,--strip-all", "-Wl,-z,stack-size=262144"]
    with tempfile.TemporaryDirectory() as folder:
        wasm = Path(folder, "core.wasm")
        try:
            subprocess.run(["clang", *flags, "-o", wasm, *sources], check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            text = f"no clang that links for wasm32-wasi; Debian: apt-get install {PACKAGES}"
            raise OSError(text) from error
        return wasm.read_bytes()


def build(path: Path) -> None:
    """Writes the page with all that it needs. Raises the errors of core before writing."""
    facts = {
        "families": list(map(asdict, families())),
        "options": [  # in the core's order
            {"name": name, "words": list(filter(None, words))}
            for name, _, _, words in _C.FAMILY_OPTIONS
        ],
        "style": style.page_facts(),
    }
    parts = {
        "style": style.part("timeline.css") + text_of("explorer.css"),
        "facts": json.dumps(facts, separators=(",", ":")),
        "wasm": base64.b64encode(core()).decode(),
        "scripts": style.part("timeline.js") + text_of("lab.js") + text_of("explorer.js"),
    }
    html = text_of("page.html")
    for name, text in parts.items():
        html = html.replace(f"/* {name} */", text.replace("</", "<\\/"))
    path.write_text(html, encoding="utf-8")


def text_of(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        build(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(f"explorer: {error}")
