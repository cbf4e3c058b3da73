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

from seq1f1b import _C
from seq1f1b.families import families
from seq1f1b.view import style

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = "clang lld wasi-libc libclang-rt-dev-wasm32"
MISSING = 3  # exit status


class NoCompiler(Exception):
    """No C compiler that links for WebAssembly."""


def core() -> bytes:
    """Compiles csrc/core, csrc/schedules and csrc/model with exports.c.

    Raises:
        NoCompiler: there is no clang, or it has failed.
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
            raise NoCompiler(text) from error
        return wasm.read_bytes()


def build(path: Path) -> None:
    """Writes the page with all that it needs. Raises NoCompiler before writing anything."""
    wasm = base64.b64encode(core()).decode()
    facts = {
        "families": list(map(asdict, families())),
        "options": [name for name, *_ in _C.FAMILY_OPTIONS],  # in the core's order
        "holdings": [name for name, *_ in _C.HOLDINGS],
        "style": style.page_facts(),
    }
    scripts = {"facts": json.dumps(facts, separators=(",", ":")), "wasm": wasm}
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
