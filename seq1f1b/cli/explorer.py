"""``seq1f1b explorer``."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

PAGE = Path(__file__).parents[1] / "view" / "explorer.html"
"""Wheels and the sdist of a release hold it; git does not."""


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("--open", action="store_true", help="open the page in this machine's browser")


def run(options: argparse.Namespace) -> int:
    if not PAGE.is_file():
        raise FileNotFoundError(
            f"there is no {PAGE}: releases hold the explorer's page, a clone does not until it is built. Install a "
            "wheel, or run in the clone: python docs/explorer/build.py seq1f1b/view/explorer.html (Debian, Ubuntu: "
            "after apt-get install clang lld wasi-libc libclang-rt-dev-wasm32)"
        )
    print(PAGE)
    if options.open and not webbrowser.open(PAGE.as_uri()):
        raise OSError(f"no browser was found here; open {PAGE} in one, here or on another machine")
    return 0
