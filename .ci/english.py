"""Counts pronouns, and finds docstrings that open with a preposition or point at a sentence before.

    python .ci/english.py [--check]    prints the counts of each room; --check fails above a limit, and for an opening

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
POINTING = re.compile(r"(what|its|those|the same)\b")  # a reader of ``help`` or of a tooltip has no sentence before
# The most pronouns per 100 words; () stands for rooms without a row.
LIMITS = {(): 5.0, "docs": 4.5, "README.md": 4.5, "seq1f1b/__init__.py": 7.0}


def words_of(file: Path) -> tuple[str, list[str]]:
    """Returns the docstrings of a file, and their openings that leave a noun out; of a page, its prose without code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text)), []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(node, ast.get_docstring(node)) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    openings = [doc for node, doc in found if doc and isinstance(node, kinds[2:]) and PREPOSITIONS.match(doc.lower())]
    openings += [
        str(each.value)
        for each in texts
        if isinstance(each, ast.Constant) and POINTING.match(str(each.value).strip().lower())
    ]
    return "\n\n".join(doc for _, doc in found if doc), openings


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
        text, openings = "\n".join(each for each, _ in found), [opening for _, those in found for opening in those]
        words = len(re.findall(r"[A-Za-z']+", text))
        pronouns = 100 * len(PRONOUNS.findall(text.lower())) / max(1, words)
        limit = LIMITS.get(room, LIMITS[()])
        print(f"{room:20}{words:7} words{pronouns:6.1f} pronouns per 100 words")
        if round(pronouns, 1) > limit:
            above.append(f"{room}: the limit is {limit}")
        above += [f"{room}: a docstring begins with {opening.splitlines()[0]!r}" for opening in openings]
    if "--check" in sys.argv and above:
        raise SystemExit("\n".join(above))


if __name__ == "__main__":
    main()
