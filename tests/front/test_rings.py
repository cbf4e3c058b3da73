"""Which ring imports which: arrows point inwards, to the core. ``.ci/rings.py`` has the rings."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / ".ci"))
import rings  # noqa: E402

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


def wrong_arrows(files: list[Path]) -> list[str]:
    found = []
    for path in files:
        file = str(path.relative_to(ROOT))
        ring = rings.ring_of(file)
        for other in sorted(set(files_named(path))):
            target = rings.ring_of(other)
            if target not in (ring, *rings.MAY_IMPORT[ring]) and not file.startswith(MAY_ASK_ALL):
                found.append(f"{file} ({ring}) imports {other} ({target})")
    return found


def test_arrows_point_to_the_core() -> None:
    files = product()
    assert len(files) > 300
    assert not wrong_arrows(files)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("engine/planted.py", "from seq1f1b.planning.cost import CostModel"),
        ("engine/planted.py", "def f():\n    from seq1f1b.view import page"),
        ("attention/planted.py", "import_module('seq1f1b.device.cuda_attention')"),
        ("planning/planted.py", "import seq1f1b.transformers.cut"),
        ("transformers/planted.py", "from seq1f1b import planning"),
    ],
)
def test_an_arrow_outwards_is_seen(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "seq1f1b" / name
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **given: text if self == path else real(self, **given))
    assert wrong_arrows([path])


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
