"""Do the pages of docs/ and the README hold what `docs/fill.py` puts there, and do their code blocks run?

Each page runs in a process of its own, in an empty folder: its ``python`` blocks in order in one namespace, and the
lines of its ``console`` blocks that begin with ``$``. What a block prints must be the ``output`` block that follows it,
or the rest of the console block, where ``...`` stands for any text. Commands of ``bash`` blocks that only read and draw
run as well. Blocks of ``py`` must be Python and do not run, nor does what `docs/fill.py` copied from a file.

    python tests/front/test_docs.py docs/tutorial.md --write

puts in what was printed where the page says otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pytest does
from processes import start_processes
from scripts import Script, environment, start_ranks

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
FILLED = re.compile(r"^<!-- fill: .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
COMMANDS = {"seq1f1b": ["-m", "seq1f1b"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
# Without a profile, which would have to be measured, and without files that only the reader has.
READS_ONLY = re.compile(r"seq1f1b (compare|draw|simulate|plan|doctor)\b(?!.*(--profile|\.txt|\.json))")
C_SOURCES = (".c", ".h", ".cpp", ".cu", ".cuh")
FORM = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    kind: str
    body: str
    line: int  # of the body
    start: int  # of the body in the page, in characters
    end: int


def blocks_of(page: Path) -> list[Block]:
    text = FILLED.sub(lambda place: re.sub(r"[^\n]", " ", place[0]), page.read_text())
    return [
        Block(fence[2].strip(), fence[3], text.count("\n", 0, fence.start(3)) + 1, fence.start(3), fence.end(3))
        for fence in FENCE.finditer(text)
    ]


def commands_of(block: Block, where: str) -> Iterator[tuple[str, str, str]]:
    """Prompts of a console block: the lines, the command, and the output that the page gives, if it does."""
    assert block.body.startswith("$ "), f"{where}: a console block begins with a prompt"
    for part in re.split(r"^(?=\$ )", block.body, flags=re.MULTILINE)[1:]:
        lines = re.match(r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n", part)
        assert lines is not None
        yield lines[0], lines[1].replace("\\\n", " "), part[lines.end() :]


def run_page(page: Path, ran: Mapping[str, str] = MappingProxyType({})) -> Iterator[tuple[Block, str, str]]:
    """Runs the blocks, but for commands whose output is given; gives those that say what is printed, with the wanted
    and the printed text.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.kind == "output":
            assert printed is not None, f"{where}: no code stands before this output"
            yield block, block.body, printed
        printed = None
        if block.kind == "python":
            printed = run_python(block, where, namespace)
        elif block.kind == "py":
            ast.parse(block.body)
        elif block.kind == "console":
            found = ""
            for prompt, command, output in commands_of(block, where):
                what = f"{where}: {command}"
                result = ran[what] if what in ran else run_command(command, what, page)
                found += prompt + (result if output else "")
            yield block, block.body, found
        elif block.kind == "bash":
            for line in filter(READS_ONLY.match, block.body.splitlines()):
                command = line.partition("  #")[0]
                run_command(command, f"{where}: {command}", page)


def runs(block: Block) -> bool:
    read_only = block.kind == "bash" and any(map(READS_ONLY.match, block.body.splitlines()))
    return read_only or block.kind in ("python", "console")


def run_python(block: Block, where: str, namespace: dict[str, Any]) -> str:
    code = compile("\n" * (block.line - 1) + block.body, where, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def split_command(command: str, what: str, page: Path) -> tuple[str, list[str]]:
    """Program and arguments. A page's scripts lie in a folder of its name."""
    program, *arguments = shlex.split(command)
    assert program in COMMANDS, what
    scripts = page.with_suffix("")
    return program, [str(scripts / a) if (scripts / a).is_file() else a for a in arguments]


def run_command(command: str, what: str, page: Path) -> str:
    """Standard output."""
    program, arguments = split_command(command, what, page)
    run = subprocess.run([sys.executable, *COMMANDS[program], *arguments], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, f"{what}\n{run.stdout}{run.stderr}"
    return run.stdout.rstrip("\n") + "\n"


def run_scripts(page: Path, folder: Path) -> dict[str, str]:
    """Outputs of the console blocks' scripts, which need nothing that other blocks leave.

    They run as ``python`` and ``torchrun`` would run them, but forked from a process that has imported torch already.
    """
    outputs = {}
    for block in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        for _, command, _ in commands_of(block, where) if block.kind == "console" else ():
            what = f"{where}: {command}"
            program, arguments = split_command(command, what, page)
            if program == "torchrun":
                assert arguments[:2] == ["--standalone", "--nproc-per-node"], what
                started = start_ranks(int(arguments[2]), Path(arguments[3]), arguments[4:], folder)
            elif program == "python":
                started = [Script(Path(arguments[0]), arguments[1:], folder, environment())]
            else:
                continue
            ended = [script.finish() for script in started]
            assert all(code == 0 for code, _, _ in ended), f"{what}\n{ended}"
            outputs[what] = ended[-1][1].rstrip("\n") + "\n"  # of all ranks
    return outputs


def is_as_wanted(wanted: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(wanted, found, FORM)


def check(page: Path, ran: Mapping[str, str] = MappingProxyType({})) -> None:
    for block, wanted, found in run_page(page, ran):
        if not is_as_wanted(wanted, found):
            text = doctest.OutputChecker().output_difference(doctest.Example("", wanted), found, FORM)
            raise AssertionError(f"{page.relative_to(ROOT)}:{block.line}\n{text}")


def write(page: Path) -> None:
    text = page.read_text()
    for block, wanted, found in reversed(list(run_page(page))):
        if not is_as_wanted(wanted, found):
            text = text[: block.start] + found + text[block.end :]
    page.write_text(text)


RUN = [page for page in PAGES if any(map(runs, blocks_of(page)))]


def test_the_pages_hold_what_is_made_for_them() -> None:
    """If this fails, run `python docs/fill.py` and look at what it changed."""
    command = [sys.executable, ROOT / "docs/fill.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_lines_of_c_are_no_longer_than_those_of_python() -> None:
    """clang-format breaks code, but neither comments nor texts."""
    folders = ("csrc", "kernels", "tests")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.suffix in C_SOURCES]
    assert len(files) > 150
    long = [
        f"{file.relative_to(ROOT)}:{number}: {len(line)} columns"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not long, "\n".join(long)


def test_contributing_names_files_that_are_there() -> None:
    folders = (".ci", "seq1f1b", "csrc", "kernels", "tests", "benchmarks", "docs", "examples")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    there = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths]
    named = set(re.findall(r"`([\w./]+(?:/|\.(?:pyi?|c|h|cuh?|json|md)))`", (ROOT / "CONTRIBUTING.md").read_text()))
    assert len(named) > 60
    named.remove("Python.h")
    assert not [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in there)]


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in (*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", FENCE.sub("", page.read_text())):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"


def check_in(rank: int, page: Path, folder: Path, ran: Mapping[str, str]) -> None:
    """In a process that has imported torch already."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    os.chdir(folder)
    check(page, ran)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in ("hugging-face", "choose", "trl"):
        for name in ("transformers", "accelerate", "peft"):
            pytest.importorskip(name, reason="the page is about it; .ci/run comes back with the extra")
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran = run_scripts(page, tmp_path)
    if all(block.kind != "python" for block in blocks_of(page)):
        monkeypatch.chdir(tmp_path)
        check(page, ran)
        return
    processes = start_processes(1, check_in, page, tmp_path, ran)
    try:
        assert processes.join(280), f"{page.name} takes more than 280 s"
    finally:
        for process in processes.processes:
            process.kill()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    (write if "--write" in sys.argv else check)(Path(sys.argv[1]).resolve())
