"""Counts pronouns, and docstrings of functions that open with a preposition: words that often leave a noun out.

    python .ci/english.py [--check]    prints the counts of each room; --check fails above a room's limits

Counts follow from good sentences. A sentence bent to please a count is a defect.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from rings import ROOMS, ROOT

PRONOUNS = re.compile(
    r"\b(its?|they|them|their|these|those|this|that|which|what(ever)?|who(se|m)?|ones?|else|such|same|others?)\b"
)
PREPOSITIONS = re.compile(
    r"[`'\"(]*(in|by|for|after|within|around|as|with|without|before|of|at|on|over|under|behind|beside|from|to|until|while|"
    r"where|if|one|nothing|none)\b"
)
# The most pronouns per 100 words, and openings with a preposition in %; () stands for rooms without a row.
LIMITS = {(): (5.0, 1.0), "docs": (4.5, 0.0), "README.md": (4.5, 0.0), "seq1f1b/__init__.py": (7.0, 0.0)}


def words_of(file: Path) -> tuple[str, list[str]]:
    """Returns the docstrings of a file, and those of its functions alone; of a page, its prose without code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text)), []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(node, ast.get_docstring(node)) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    functions = [doc for node, doc in found if doc and isinstance(node, kinds[2:])]
    return "\n\n".join(doc for _, doc in found if doc), functions


def room_of(file: Path) -> str:
    """Returns the longest room that a file's path begins with."""
    path = file.relative_to(ROOT).as_posix()
    return max((room for room in (*ROOMS, "docs", "README.md") if f"{path}/".startswith(f"{room}/")), key=len)


def main() -> None:
    texts: dict[str, list[tuple[str, list[str]]]] = {}
    files = [*(ROOT / "seq1f1b").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    for file in sorted(files):
        texts.setdefault(room_of(file), []).append(words_of(file))
    above = []
    for room, found in texts.items():
        text, functions = "\n".join(each for each, _ in found), [doc for _, docs in found for doc in docs]
        words = len(re.findall(r"[A-Za-z']+", text))
        pronouns = 100 * len(PRONOUNS.findall(text.lower())) / max(1, words)
        openings = 100 * sum(bool(PREPOSITIONS.match(doc.lower())) for doc in functions) / max(1, len(functions))
        limits = LIMITS.get(room, LIMITS[()])
        print(f"{room:20}{words:7} words{pronouns:6.1f} pronouns per 100 words{openings:6.1f} % prepositions")
        if round(pronouns, 1) > limits[0] or round(openings, 1) > limits[1]:
            above.append(f"{room}: the limits are {limits[0]} and {limits[1]}")
    if "--check" in sys.argv and above:
        raise SystemExit("\n".join(above))


if __name__ == "__main__":
    main()
