"""What users write against: every name of docs/reference with its signature, as surface.txt holds it.

    python tests/front/test_surface.py --write

writes that file after a change that is meant. docs/reference/stability.md says which changes a version may bring.
The file is written by ring, the counts of each at the top of its part.
All is read from the sources, so that neither torch nor what an extra brings must be there.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SURFACE = Path(__file__).with_name("surface.txt")
sys.path.append(str(ROOT / ".ci"))
import rings  # noqa: E402

RINGS = ("core", "planner", "hf", "gpu")
WHOLE = (
    "seq1f1b",
    "seq1f1b.plan",
    "seq1f1b.attention.packing",
    "seq1f1b.report.report",
    "seq1f1b.testing",
    "seq1f1b.data",
    "seq1f1b.transformers",
)
"""Modules of which every name is promised; of others the names that a page describes."""
ARGUMENTS = {"Costs", "Limits", "Links", "Loss", "Memory", "Noise", "StepMemory"}
"""Classes whose fields a user writes, and which count; fields of plans, reports and simulations do not."""
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def file_of(module: str) -> Path:
    place = ROOT.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py", place.with_suffix(".pyi"))
    return next(file for file in files if file.exists())


@cache
def source(module: str) -> tuple[list[bytes], ast.Module]:
    """The lines of a module, and its syntax tree."""
    text = file_of(module).read_bytes()
    return text.splitlines(keepends=True), ast.parse(text)


def exported(module: str) -> list[str]:
    for node in source(module)[1].body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{module} has no __all__")


def find(module: str, name: str) -> tuple[str, Definition] | None:
    """The module that defines a name, and the definition; None if that is not in this package."""
    tree = source(module)[1]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if name in map(ast.unparse, targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            return module, node
    for other in ast.walk(tree):  # imports for type checkers stand inside an if
        if isinstance(other, ast.ImportFrom) and name in (alias.asname or alias.name for alias in other.names):
            home = str(other.module)
            return find(home, name) if home.startswith("seq1f1b") else None
    return None


def text_of(module: str, node: ast.expr | ast.arg) -> str:
    """As the source has it, on one line: what ast.unparse writes depends on the version of Python."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = source(module)[0][node.lineno - 1 : node.end_lineno]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    return " ".join(b"".join(lines).decode().split())


def default_of(module: str, node: ast.expr | None) -> str:
    """How a default is shown; that of a dataclass's field stands in its call of ``field``."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        node = named.get("default", named.get("default_factory"))
    return f" = {text_of(module, node)}" if node is not None else ""


def signature(module: str, node: ast.FunctionDef) -> str:
    """The arguments without self and what comes back, as they stand in the source but on one line."""
    lines = source(module)[0][node.lineno - 1 : max(node.lineno, node.body[0].lineno - 1)]
    head = " ".join(b" ".join(line.partition(b"#")[0] for line in lines).decode().split())
    found = re.fullmatch(r"def \w+\( ?(.*?),? ?\)( -> .*?)?:( \.\.\.)?", head)
    assert found is not None, head
    arguments, returned = found[1], found[2] or ""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if any(decorator.split(".")[-1] in ("property", "cached_property") for decorator in decorators):
        return returned
    kind = {"classmethod": " of the class", "staticmethod": " without an object"}
    said = "".join(kind.get(decorator, "") for decorator in decorators)
    if "staticmethod" not in decorators:
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    returned = "" if node.name == "__init__" else returned
    return f"({arguments}){returned}{',' if said else ''}{said}"


def members(module: str, node: ast.ClassDef) -> tuple[dict[str, str], dict[str, str]]:
    """Fields in their order, which is that of arguments, and methods and properties that have a docstring.

    Those of base classes in this package are included.
    """
    fields: dict[str, str] = {}
    methods: dict[str, str] = {}
    for base in node.bases:
        home = find(module, ast.unparse(base).partition("[")[0])
        if home is not None and isinstance(home[1], ast.ClassDef):
            inherited = members(home[0], home[1])
            fields |= inherited[0]
            methods |= inherited[1]
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    has_fields = any("dataclass" in name for name in decorators) or "NamedTuple" in map(ast.unparse, node.bases)
    for item in node.body:
        if isinstance(item, ast.FunctionDef):
            shown = item.name == "__init__" or (not item.name.startswith("_") and ast.get_docstring(item))
            if shown:
                methods[item.name] = signature(module, item)
        elif isinstance(item, ast.AnnAssign) and has_fields and not ast.unparse(item.target).startswith("_"):
            said = f": {text_of(module, item.annotation)}{default_of(module, item.value)}"
            fields[ast.unparse(item.target)] = said
    return fields, methods


@dataclass(frozen=True)
class Shown:
    """What a page shows of a name. members: all if empty, none if None. arguments: in place of those of the source."""

    members: tuple[str, ...] | None = ()
    arguments: str | None = None


def described(module: str, name: str, shown: Shown) -> Iterator[str]:
    home = find(module, name)
    assert home is not None, f"{module}.{name} is defined outside this package"
    where, node = home
    if isinstance(node, ast.FunctionDef):
        yield f"{module}.{name}{signature(where, node)}"
    elif isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases if not ast.unparse(base).startswith("_")]
        yield f"class {module}.{name}" + (f"({', '.join(bases)})" if bases else "")
        fields, methods = members(where, node)
        made = methods.pop("__init__", None) if shown.arguments is None else shown.arguments
        yield from (f"    {field}{said}" for field, said in fields.items())
        yield from [f"    __init__{made}"] if made is not None else []
        listed = sorted(methods) if shown.members == () else [one for one in shown.members or () if one not in fields]
        yield from (f"    {member}{methods[member]}" for member in listed)
    else:
        assert node.value is not None
        yield f"{module}.{name} = {text_of(where, node.value)}"


def documented() -> dict[tuple[str, str], Shown]:
    """Module and name of all that the pages of docs/reference describe."""
    names: dict[tuple[str, str], Shown] = {}
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            module = ""
            directives = re.findall(r"^\.\. (\w+):: ([\w.]+)(\(.*\))?\n((?: +:.*\n)*)", block, re.MULTILINE)
            for directive, name, arguments, options in directives:
                chosen = re.search(r":members:(.*)", options)
                listed = tuple(re.findall(r"\w+", chosen[1])) if chosen else None
                home, _, last = name.rpartition(".")
                if directive == "currentmodule":
                    module = name
                elif directive == "automodule":
                    names |= {(name, member): Shown() for member in exported(name)}
                else:
                    names[home or module, last] = Shown(listed, arguments or None)
    return names


def names_of(ring: str) -> list[tuple[str, str]]:
    """All that a page describes, and the ``__all__`` of modules that are promised whole: where and under which name."""
    found = {*documented(), *((module, name) for module in WHOLE for name in exported(module))}
    return sorted(one for one in found if rings.ring_of(str(file_of(one[0]).relative_to(ROOT))) == ring)


def members_of(module: str, node: ast.ClassDef) -> set[str]:
    """Public methods, properties and attributes of a class and its bases here; fields only where they are arguments."""
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for place in ast.walk(node):
        if isinstance(place, ast.Attribute) and isinstance(place.ctx, ast.Store) and ast.unparse(place.value) == "self":
            found.add(place.attr)
    for base in node.bases:
        home = find(module, ast.unparse(base).partition("[")[0])
        if home is not None and isinstance(home[1], ast.ClassDef):
            found |= members_of(home[0], home[1])
    if node.name in ARGUMENTS:
        found |= members(module, node)[0].keys()
    return {name for name in found if not name.startswith("_")}


def counts_of(ring: str) -> tuple[int, int]:
    """Names that a ring promises, each object once, and their members."""
    homes = [home for home in (find(module, name) for module, name in names_of(ring)) if home is not None]
    objects = {(module, id(node)): node for module, node in homes}
    classes = [(module, node) for (module, _), node in objects.items() if isinstance(node, ast.ClassDef)]
    return len(objects), sum(len(members_of(module, node)) for module, node in classes)


def surface() -> str:
    shown = documented()
    parts = []
    for ring in RINGS:
        found = [one for one in names_of(ring) if one in shown]
        names, inside = counts_of(ring)
        parts.append(f"# {ring}: {names} names, {inside} members\n")
        parts += [f"{line}\n" for module, name in found for line in described(module, name, shown[module, name])]
    return "".join(parts)


def test_every_public_name_is_described() -> None:
    missing = {("seq1f1b", name) for name in exported("seq1f1b")} - documented().keys()
    assert not missing, "docs/reference does not describe them"


def test_the_surface_is_the_one_that_is_written_down() -> None:
    changed = list(difflib.unified_diff(SURFACE.read_text().splitlines(), surface().splitlines(), lineterm="", n=0))
    assert not changed, "\n".join(
        ["what users write against has changed: python tests/front/test_surface.py --write, and CHANGELOG.md", *changed]
    )


def test_the_core_stays_small() -> None:
    names, inside = counts_of("core")
    assert names <= 55 and inside <= 200, "docs/reference/stability.md promises them for 1.0: leave others private"
    assert counts_of("gpu") == (0, 0), "what is behind the core's names is not promised"


if __name__ == "__main__":
    if "--write" in sys.argv:
        SURFACE.write_text(surface())
    else:
        print(surface(), end="")
