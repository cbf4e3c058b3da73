"""Counts words that leave their noun out: pronouns, and docstrings of functions that open with a preposition.

    python .ci/english.py            prints pronouns per 100 words, and openings in %, of each room
    python .ci/english.py --check    fails where a room is above its limit

The counts follow from good sentences. A sentence that is bent to please a count is a defect.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
from rings import ROOMS  # noqa: E402

PRONOUNS = set(
    re.findall(
        r"\w+",
        """
    it its they them their these those this that which what whatever whose whom who one ones else such same other others
""",
    )
)
PREPOSITIONS = set(
    re.findall(
        r"\w+",
        """
    in by for after within around as with without before of at on over under behind beside from to until while where if
    one nothing none
""",
    )
)
# Pronouns per 100 words, and openings with a preposition in %. Limits of rooms only fall.
LIMITS = {"README.md": (4.5, 0.0), "docs": (4.5, 0.0)}
DEFAULT = (5.0, 1.0)


class Counts(NamedTuple):
    words: int
    pronouns: float  # per 100 words
    openings: float  # % of the functions' docstrings


def docstrings(file: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yields each docstring of a file with the node that has it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node, text


def prose(page: Path) -> str:
    """Returns a page without its code blocks and the targets of its links; inline code becomes one word."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))


def count(texts: list[str], openings: list[str]) -> Counts:
    """Counts pronouns in all texts, and prepositions in the first words of docstrings."""
    words = re.findall(r"[A-Za-z']+", "\n".join(texts))
    pronouns = sum(word.lower() in PRONOUNS for word in words)
    first = [match[1].lower() for text in openings if (match := re.match(r"[`'\"(]*([A-Za-z]+)", text))]
    prepositions = sum(word in PREPOSITIONS for word in first)
    return Counts(len(words), 100 * pronouns / max(1, len(words)), 100 * prepositions / max(1, len(first)))


def rooms() -> dict[str, Counts]:
    """Returns the counts of each Python room, of all docstrings, of docs and of the README."""
    found: dict[str, list[tuple[ast.AST, str]]] = {}
    for file in sorted((ROOT / "seq1f1b").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        room = max((room for room in ROOMS if f"{path}/".startswith(f"{room}/")), key=len)
        for name in (room, "all docstrings"):
            found.setdefault(name, []).extend(docstrings(file))
    counts = {
        room: count(
            [text for _, text in held], [t for node, t in held if not isinstance(node, ast.Module | ast.ClassDef)]
        )
        for room, held in sorted(found.items())
    }
    counts["docs"] = count([prose(page) for page in sorted((ROOT / "docs").rglob("*.md"))], [])
    return counts | {"README.md": count([prose(ROOT / "README.md")], [])}


def main() -> None:
    above = []
    for room, counts in rooms().items():
        limits = LIMITS.get(room, DEFAULT)
        shown = f"{room:24}{counts.words:7} words {counts.pronouns:5.1f} pronouns {counts.openings:5.1f} % openings"
        print(shown)
        if round(counts.pronouns, 1) > limits[0] or round(counts.openings, 1) > limits[1]:
            above.append(f"{shown.strip()}; the limits are {limits[0]} and {limits[1]}")
    if "--check" in sys.argv and above:
        raise SystemExit("above the limits:\n" + "\n".join(above))


if __name__ == "__main__":
    main()
