"""Is every text read and written as UTF-8, whatever the locale of whoever runs it?"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("seq1f1b", "examples", "docs", "benchmarks", ".ci")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))] + [ROOT / "setup.py"]


def without_encoding(source: str) -> Iterator[str]:
    """Calls that read or write text in the encoding of the locale."""
    if not re.search(r"\bopen\(|read_text|write_text", source):
        return  # before it is parsed
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(given.arg in ("encoding", None) for given in call.keywords):
            continue
        modes = [*call.args[1:2], *(given.value for given in call.keywords if given.arg == "mode")]
        is_binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes)
        if isinstance(call.func, ast.Name) and call.func.id == "open" and not is_binary:
            yield f"line {call.lineno}: {ast.unparse(call)}"
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("read_text", "write_text"):
            yield f"line {call.lineno}: {ast.unparse(call)}"


def test_every_file_of_text_is_opened_with_an_encoding() -> None:
    assert len(FILES) > 150
    found = {f"{path}": [*without_encoding(path.read_text(encoding="utf-8"))] for path in FILES}
    assert not {path: lines for path, lines in found.items() if lines}


def test_what_is_looked_for_is_found() -> None:
    source = (
        "open(x); open(x, 'w'); open(x, 'rb'); open(x, encoding='utf-8'); p.read_text(); p.write_text(a, encoding=b)"
    )
    assert [line.partition(": ")[2] for line in without_encoding(source)] == [
        "open(x)",
        "open(x, 'w')",
        "p.read_text()",
    ]


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
