"""Do the code blocks of the README and of docs/ run, and print what the page says they print?

Each page runs in a process of its own, in an empty folder: its ``python`` blocks in order in one namespace, and the
lines of its ``console`` blocks that begin with ``$``. What a block prints must be the ``output`` block that follows it,
or the rest of the console block, where ``...`` stands for any text. Not run are ``bash`` blocks, but for the README's
commands that only read and draw, and ``{code-block} python``, which must be Python.

    python tests/front/test_docs.py docs/tutorial.md --write

puts in what was printed where the page says otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from processes import start_processes

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(```+)([^\n]*)\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
COMMANDS = {"seq1f1b": ["-m", "seq1f1b"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
# Without 10^8 units, which take a while, and a profile, which would have to be measured.
READS_ONLY = re.compile(r"seq1f1b (compare|draw|simulate|plan|doctor) (?!.*(--ranks 1024|--profile))")
FORM = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# What the README's blocks take as given: a tiny model, its data, and a process group of one rank.
README = """
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.nn.functional import cross_entropy as of_tokens
import model as tiny
def cross_entropy(logits, target):
    return of_tokens(logits.flatten(0, 1), target.flatten())
loss_fn = cross_entropy
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, num_ranks, device, losses = 0, 1, torch.device("cpu"), []
config = tiny.Config(vocab=64, hidden=16, layers=2, heads=2, ffn=32)
stage, module, shape = tiny.build_stage(config), tiny.build_stage(config), config.shape
tokens = target = labels = torch.randint(64, (8, 64))
batches = [(tokens, target)]
optimizer = torch.optim.AdamW(stage.parameters())
path, folder = "pretrained", "finetuned"
"""
README_TRANSFORMERS = """
from transformers import AutoModelForCausalLM, LlamaConfig
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(path)
"""


class Block(NamedTuple):
    kind: str
    body: str
    line: int  # of the body
    start: int  # of the body in the page, in characters
    end: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(fence[2].strip(), fence[3], text.count("\n", 0, fence.start(3)) + 1, fence.start(3), fence.end(3))
        for fence in FENCE.finditer(text)
    ]


def run_page(page: Path) -> Iterator[tuple[Block, str, str]]:
    """Runs the blocks; gives those that say what is printed, with the wanted and the printed text."""
    scripts = page.with_suffix("")
    sys.path.insert(0, str(ROOT / "examples"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    has_transformers = importlib.util.find_spec("transformers") is not None
    if page.name == "README.md":
        exec(README + (README_TRANSFORMERS if has_transformers else ""), namespace)
        Path("order.txt").write_text("F0.0 F0.1 B0.1 B0.0\n")
    printed: str | None = None
    for block in blocks_of(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.kind == "output":
            assert printed is not None, f"{where}: no code stands before this output"
            yield block, block.body, printed
        printed = None
        if block.kind == "python":
            if "seq1f1b.transformers" in block.body and not has_transformers:
                continue  # .ci/run comes back with the extra
            printed = run_python(block, where, namespace)
        elif block.kind == "{code-block} python":
            ast.parse(block.body)
        elif block.kind == "console":
            assert block.body.startswith("$ "), f"{where}: a console block begins with a prompt"
            wanted, found = "", ""
            for part in re.split(r"^(?=\$ )", block.body, flags=re.MULTILINE)[1:]:
                command = re.match(r"\$ ((?:[^\n]*\\\n)*[^\n]*)\n", part)
                assert command is not None
                output = part[command.end() :]
                result = run_command(command[1].replace("\\\n", " "), where, scripts)
                wanted += part
                found += command[0] + (result if output else "")
            yield block, wanted, found
        elif block.kind == "bash" and page.name == "README.md":
            for line in filter(READS_ONLY.match, block.body.splitlines()):
                run_command(line.partition("  #")[0], where, scripts)


def run_python(block: Block, where: str, namespace: dict[str, Any]) -> str:
    code = compile("\n" * (block.line - 1) + block.body, where, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue()


def run_command(command: str, where: str, scripts: Path) -> str:
    """Standard output. A page's scripts lie in a folder of its name."""
    program, *arguments = shlex.split(command)
    assert program in COMMANDS, f"{where}: {command}"
    arguments = [str(scripts / a) if (scripts / a).is_file() else a for a in arguments]
    run = subprocess.run([sys.executable, *COMMANDS[program], *arguments], capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, f"{where}: {command}\n{run.stdout}{run.stderr}"
    return run.stdout.rstrip("\n") + "\n"


def is_as_wanted(wanted: str, found: str) -> bool:
    return doctest.OutputChecker().check_output(wanted, found, FORM)


def check(page: Path) -> None:
    for block, wanted, found in run_page(page):
        if not is_as_wanted(wanted, found):
            text = doctest.OutputChecker().output_difference(doctest.Example("", wanted), found, FORM)
            raise AssertionError(f"{page.relative_to(ROOT)}:{block.line}\n{text}")


def write(page: Path) -> None:
    text = page.read_text()
    for block, wanted, found in reversed(list(run_page(page))):
        if not is_as_wanted(wanted, found):
            text = text[: block.start] + found + text[block.end :]
    page.write_text(text)


RUN = [page for page in PAGES if any(block.kind in ("python", "console") for block in blocks_of(page))]


def check_in(rank: int, page: Path, folder: Path) -> None:
    """In a process that has imported torch already, unlike those of the page's own commands."""
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    torch.set_num_threads(1)
    os.chdir(folder)
    check(page)


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path) -> None:
    if page.stem == "hugging-face":
        pytest.importorskip("transformers", reason="the page is about it; .ci/run comes back with the extra")
    processes = start_processes(1, check_in, page, tmp_path)
    try:
        assert processes.join(280), f"{page.name} takes more than 280 s"
    finally:
        for process in processes.processes:
            process.kill()


if __name__ == "__main__":
    (write if "--write" in sys.argv else check)(Path(sys.argv[1]).resolve())
