"""Is a page written as UTF-8, whatever the locale? `.ci/run` has ruff ask each call that opens a text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_page_is_alike_under_every_locale(tmp_path: Path) -> None:
    counts = ["--ranks", "2", "--microbatches", "2", "--segments", "2"]
    pages = []
    for locale in ("C", "C.UTF-8"):
        environment = os.environ | {"LC_ALL": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        command = [sys.executable, "-m", "seq1f1b", "draw", "seq1f1b", *counts, "--html", str(tmp_path / "page.html")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        pages.append((tmp_path / "page.html").read_bytes())
    assert pages[0] == pages[1] and not pages[0].isascii()
