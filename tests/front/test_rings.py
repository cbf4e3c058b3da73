"""Which ring, and which room, imports which: arrows point inwards, to the core, and down. ``.ci/rings.py`` has both."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / ".ci"))
import rings  # noqa: E402


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# csrc/binding is one extension over all of C.
MAY_ASK_ALL = ("csrc/binding/",)


def modules_named(path: Path) -> Iterator[str]:
    """Modules of this package that a Python file imports anywhere, also lazily, and by name in a text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"seq1f1b(\.\w+)+", str(node.value)):
            yield str(node.value)  # for import_module


def files_named(path: Path) -> Iterator[str]:
    """The files that a file of the product imports or includes, from the root of the repository."""
    if path.suffix == ".py":
        for module in modules_named(path):
            place = Path(*module.split("."))
            yield from (str(f) for f in (place.with_suffix(".py"), place / "__init__.py") if (ROOT / f).exists())
    else:
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
            included = [folder / name for folder in (path.parent, ROOT / "csrc", ROOT / "kernels", ROOT)]
            yield from (str(f.resolve().relative_to(ROOT)) for f in included if f.exists())


def product() -> list[Path]:
    suffixes = {".py", ".c", ".h", ".cu", ".cuh"}
    return [f for room in ("csrc", "kernels", "seq1f1b") for f in (ROOT / room).rglob("*") if f.suffix in suffixes]


def test_arrows_point_to_the_core() -> None:
    files, wrong = product(), list[str]()
    assert len(files) > 300
    for path in files:
        ring = rings.ring_of(name_of(path))
        for other in sorted(set(files_named(path))):
            target = rings.ring_of(other)
            if target not in (ring, *rings.MAY_IMPORT[ring]) and not name_of(path).startswith(MAY_ASK_ALL):
                wrong.append(f"{name_of(path)} ({ring}) imports {other} ({target})")
    assert wrong == []


def test_every_ring_has_files_and_tests() -> None:
    held = {rings.ring_of(str(path.relative_to(ROOT))) for path in product()}
    assert held == set(rings.MAY_IMPORT)
    for ring in held:
        assert set(rings.SMOKE) < set(rings.tests_of(ring))
    assert [place for place in (*rings.PLACES, *rings.SMOKE) if not (ROOT / place).exists()] == []


def test_stages_of_a_ring_are_those_of_ci() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for stages in rings.STAGES.values():
        assert [stage for stage in stages if f"\nstage_{stage}()" not in run] == []


MOST_FOR_TYPES = 9  # imports under TYPE_CHECKING, beside the names of the package


def arrows(files: list[Path]) -> set[tuple[str, str]]:
    """(file, file that it imports or includes), imports inside of functions too, those for types alone left out.

    The package's ``__init__`` and that of a file's own room are no arrow: whoever imports a file has loaded them.
    """
    found = set()
    for path in files:
        named = set(files_named(path)) - {"seq1f1b/__init__.py", f"{name_of(path.parent)}/__init__.py"}
        found |= {(name_of(path), other) for other in named - for_types(path)}
    return found


def for_types(path: Path) -> set[str]:
    """Files that a Python file imports for a checker of types alone."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.suffix == ".py" else ():
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            modules = [str(each.module) for each in node.body if isinstance(each, ast.ImportFrom)]
            found |= {f"{module.replace('.', '/')}.py" for module in modules if module.startswith("seq1f1b")}
    return found


def test_no_import_goes_up() -> None:
    place = {room: number for number, room in enumerate(rings.ROOMS)}
    found = sorted(arrows(product()))
    assert [pair for pair in found if place[rings.room_of(pair[1])] > place[rings.room_of(pair[0])]] == []


def test_files_import_each_other_in_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for file, other in arrows([path for path in product() if path.suffix == ".py"]):
        below.setdefault(file, set()).add(other)
    below.pop("seq1f1b/__init__.py")  # whose names are imported at the first use
    list(TopologicalSorter(below).static_order())  # raises CycleError, which names them


def test_few_imports_are_for_types() -> None:
    found = [(path, other) for path in product() if path.name != "__init__.py" for other in for_types(path)]
    assert len(found) <= MOST_FOR_TYPES


def test_the_picture_in_contributing_is_drawn_from_the_imports() -> None:
    found = {(rings.room_of(file), rings.room_of(other)) for file, other in arrows(product())}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{rings.picture(found)}```\n" in page
