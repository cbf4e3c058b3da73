"""The walks of CONTRIBUTING.md: each hop is where the page says, and an earlier hop leads to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from test_rings import files_named

ROOT = Path(__file__).resolve().parents[2]
MOST_HOPS = 8


class Hop(NamedTuple):
    file: str
    name: str


def walks() -> dict[str, list[Hop]]:
    """The tables of the section "Walks", by the heading of each."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Walks\n")[1].split("\n## ")[0]
    found = {}
    for part in section.split("\n### ")[1:]:
        rows = re.findall(r"^\| \d+ \| `([\w./]+)` \| `([\w.]+)` \|", part, re.MULTILINE)
        found[part.splitlines()[0]] = [Hop(*row) for row in rows]
    return found


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []


def defines(hop: Hop) -> bool:
    """Whether the file has the function, method or class."""
    text = (ROOT / hop.file).read_text(encoding="utf-8")
    if not hop.file.endswith(".py"):
        return re.search(rf"^\w[^;{{]*\b{hop.name}\(", text, re.MULTILINE) is not None
    body = ast.parse(text).body
    for name in hop.name.split("."):
        held = [node for node in body if name in names_of(node)]
        if not held:
            return False
        body = getattr(held[0], "body", [])
    return True


def leads_to(before: Hop, hop: Hop) -> bool:
    """Whether a hop's file imports the other's and speaks of its name; of C, whether it calls that name."""
    if before.file == hop.file:
        return True
    text = (ROOT / before.file).read_text(encoding="utf-8")
    last = hop.name.split(".")[-1].removeprefix("s1f_op_").removeprefix("s1f_")
    is_called = re.search(rf"\b(s1f_|op_)*{last}\b", text) is not None
    return is_called and (not hop.file.endswith(".py") or hop.file in files_named(ROOT / before.file))


def test_the_page_has_the_four_walks() -> None:
    assert list(walks()) == ["A step", "An option", "A plan request", "A model from a folder"]


@pytest.mark.parametrize("name", walks())
def test_hops_are_where_the_page_says(name: str) -> None:
    hops = walks()[name]
    assert 3 <= len(hops) <= MOST_HOPS
    assert [hop for hop in hops if not defines(hop)] == []
    lost = [hop for place, hop in enumerate(hops) if place and not any(leads_to(b, hop) for b in hops[:place])]
    assert lost == []
