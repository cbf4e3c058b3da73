"""Do files import those of their own room and of lower ones alone? ``.ci/rings.py`` has the rooms, lowest first."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from test_rings import ROOT, files_named, product, rings

MOST_FOR_TYPES = 9  # imports under TYPE_CHECKING, beside the names of the package


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def arrows(files: list[Path]) -> set[tuple[str, str]]:
    """(file, file that it imports or includes), imports inside of functions too, those for types alone left out.

    The package's ``__init__`` and that of a file's own room are no arrow: whoever imports a file has loaded them.
    """
    found = set()
    for path in files:
        named = set(files_named(path)) - {"seq1f1b/__init__.py", f"{name_of(path.parent)}/__init__.py"}
        found |= {(name_of(path), other) for other in named - for_types(path)}
    return found


def going_up(files: list[Path]) -> list[str]:
    place = {room: number for number, room in enumerate(rings.ROOMS)}
    return [
        f"{file} imports {other}"
        for file, other in sorted(arrows(files))
        if place[rings.room_of(other)] > place[rings.room_of(file)]
    ]


def for_types(path: Path) -> set[str]:
    """Files that a Python file imports for a checker of types alone."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else ():
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            modules = [str(each.module) for each in node.body if isinstance(each, ast.ImportFrom)]
            found |= {f"{module.replace('.', '/')}.py" for module in modules if module.startswith("seq1f1b")}
    return found


def test_no_import_goes_up() -> None:
    assert going_up(product()) == []


def test_files_import_each_other_in_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for file, other in arrows([path for path in product() if path.suffix == ".py"]):
        below.setdefault(file, set()).add(other)
    below.pop("seq1f1b/__init__.py")  # whose names are imported at the first use
    list(TopologicalSorter(below).static_order())  # raises CycleError, which names them


def test_few_imports_are_for_types() -> None:
    found = [(path, other) for path in product() if path.name != "__init__.py" for other in for_types(path)]
    assert len(found) <= MOST_FOR_TYPES


def test_an_arrow_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = ROOT / "seq1f1b" / "engine" / "planted.py", Path.read_text
    text = "def f():\n    from seq1f1b.checks import verify"
    monkeypatch.setattr(Path, "read_text", lambda self, **given: text if self == path else real(self, **given))
    assert going_up([path]) == [
        f"seq1f1b/engine/planted.py imports seq1f1b/checks/{name}.py" for name in ("__init__", "verify")
    ]


def test_the_picture_in_contributing_is_drawn_from_the_imports() -> None:
    found = {(rings.room_of(file), rings.room_of(other)) for file, other in arrows(product())}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{rings.picture(found)}```\n" in page
