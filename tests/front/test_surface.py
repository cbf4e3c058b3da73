"""What users write against: every name of docs/reference with its signature, as surface.txt holds it.

    python tests/front/test_surface.py --write

writes that file after a change that is meant. docs/reference/stability.md says which changes a version may bring.
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
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@cache
def source(module: str) -> tuple[list[bytes], ast.Module]:
    """The lines of a module, and its syntax tree."""
    place = ROOT.joinpath(*module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py", place.with_suffix(".pyi"))
    text = next(file for file in files if file.exists()).read_bytes()
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
    given, parts = node.args, []
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    for place, (argument, default) in enumerate(zip(plain, defaults, strict=True)):
        parts.append(text_of(module, argument) + default_of(module, default))
        if given.posonlyargs and place == len(given.posonlyargs) - 1:
            parts.append("/")
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if plain and plain[0].arg in ("self", "cls") and "staticmethod" not in decorators:
        del parts[0]
    if given.vararg or given.kwonlyargs:
        parts.append("*" + (text_of(module, given.vararg) if given.vararg else ""))
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        parts.append(text_of(module, argument) + default_of(module, default))
    if given.kwarg:
        parts.append("**" + text_of(module, given.kwarg))
    returned = f" -> {text_of(module, node.returns)}" if node.returns and node.name != "__init__" else ""
    if any(decorator.split(".")[-1] in ("property", "cached_property") for decorator in decorators):
        return returned
    kind = {"classmethod": " of the class", "staticmethod": " without an object"}
    said = "".join(kind.get(decorator, "") for decorator in decorators)
    return f"({', '.join(parts)}){returned}{',' if said else ''}{said}"


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
    """Module and name of all that the pages of docs/reference describe, and of what is used in torchtitan."""
    names = {("seq1f1b.torchtitan", name): Shown() for name in exported("seq1f1b.torchtitan")}
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


def surface() -> str:
    found = sorted(documented().items(), key=lambda item: item[0])
    return "".join(f"{line}\n" for (module, name), shown in found for line in described(module, name, shown))


def test_every_public_name_is_described() -> None:
    missing = {("seq1f1b", name) for name in exported("seq1f1b")} - documented().keys()
    assert not missing, "docs/reference does not describe them"


def test_the_surface_is_the_one_that_is_written_down() -> None:
    changed = list(difflib.unified_diff(SURFACE.read_text().splitlines(), surface().splitlines(), lineterm="", n=0))
    assert not changed, "\n".join(
        ["what users write against has changed: python tests/front/test_surface.py --write, and CHANGELOG.md", *changed]
    )


def test_options_of_the_engine_and_its_groups_are_in_it() -> None:
    text = SURFACE.read_text()
    for name in ("PipelineEngine", "Loss", "Limits", "Memory", "ScheduleSeq1F1B", "PipelineState"):
        assert f"class seq1f1b.{name}" in text
    for line in ("seq1f1b.transformers.pipeline_stage(", "class seq1f1b.data.DocumentBatches", "    offload: Offload"):
        assert line in text


if __name__ == "__main__":
    if "--write" in sys.argv:
        SURFACE.write_text(surface())
    else:
        print(surface(), end="")
