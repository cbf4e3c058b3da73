"""What is built and how it is put together: it loads and links nothing it must not, and says what it offers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import seq1f1b
from seq1f1b import _C

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "seq1f1b"
LIBRARIES = re.compile(r"lib(c|m|dl|pthread)\.so\.\d+|ld-linux.*\.so\.\d+")
FORBIDDEN = re.compile(r"torch|aoti|c10|_ZN|cuda|nccl", re.IGNORECASE)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def output_of(tool: str, *arguments: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} (binutils) is not installed")
    return subprocess.run([tool, *arguments, _C.__file__], capture_output=True, text=True, check=True).stdout


def modules_after(*statements: str) -> list[set[str]]:
    """What an interpreter of its own has loaded after each of these statements, one after another."""
    printed = run_python("import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements))
    return [set(line.split()) for line in printed.splitlines()]


def parts(modules: set[str], package: str) -> list[str]:
    return sorted(name for name in modules if name == package or name.startswith(f"{package}."))


def test_the_package_alone_needs_no_torch_no_planner_and_no_drawing() -> None:
    [modules] = modules_after("import seq1f1b; seq1f1b.partition_sequence(8, 2, strategy='even')")
    for package in ("torch", "numpy", "seq1f1b.planning", "seq1f1b.view", "seq1f1b.engine", "seq1f1b.plan"):
        assert parts(modules, package) == []


def test_what_trains_loads_no_compiler_no_planner_and_no_drawing() -> None:
    """Torch's compiler takes longer to import than torch itself; torch's own schedules and checkpoints load it."""
    engine, ours, torchs = modules_after(
        "import seq1f1b; seq1f1b.PipelineEngine",
        "seq1f1b.carry_in, seq1f1b.causal_attention",
        "seq1f1b.ScheduleSeq1F1B, seq1f1b.PipelineState",
    )
    assert parts(engine, "seq1f1b.engine.engine")
    for package in (
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
    ):
        assert parts(engine | ours, package) == []
    for package in ("seq1f1b.planning", "seq1f1b.view"):
        assert parts(engine | ours | torchs, package) == []


def test_a_plan_is_read_without_the_planner() -> None:
    [modules] = modules_after("from seq1f1b.plan import Plan")
    assert parts(modules, "seq1f1b.planning") == [] and parts(modules, "torch") == []


def test_neither_import_nor_a_step_asks_the_network() -> None:
    """A run over several hosts without a way out is in tests/transport/test_machines.py."""
    code = """
import importlib, pkgutil, sys

asked = []
sys.addaudithook(lambda event, given: asked.append((event, given)) if event.startswith("socket.") else None)
import seq1f1b

for module in pkgutil.walk_packages(seq1f1b.__path__, "seq1f1b."):
    if not module.name.endswith(("__main__", "libseq1f1b_cuda")):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert "pip install" in str(error) or error.name in OF_EXTRAS, error
import torch

stage = torch.nn.Linear(4, 4)
engine = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=torch.nn.functional.mse_loss)
engine.step(torch.ones(2, 8, 4), target=torch.ones(2, 8, 4))
engine.close()
print(asked)
"""
    extras = ("transformers", "accelerate", "safetensors", "matplotlib", "ortools", "peft")
    assert run_python(code.replace("OF_EXTRAS", repr(extras))) == "[]"


def test_names_that_need_torch_say_so() -> None:
    code = """
import sys
sys.modules["torch"] = None  # makes `import torch` a ModuleNotFoundError
import seq1f1b
seq1f1b._NEEDS_TORCH["probe"] = "torch"
for name in seq1f1b._NEEDS_TORCH:
    try:
        getattr(seq1f1b, name)
    except ImportError as error:
        assert f"seq1f1b.{name} needs torch" in str(error), error
        assert "pip install" in str(error), error
    else:
        raise AssertionError(name)
"""
    run_python(code)


@pytest.mark.parametrize("arguments", [["report", "steps.jsonl"], ["profile", "--model", "qwen3-4b", "--seq", "64"]])
def test_commands_that_need_torch_say_so(arguments: list[str]) -> None:
    if arguments[0] == "profile":
        arguments = [*arguments, "--output", os.devnull]
    code = f"""
import sys
sys.modules["torch"] = None
sys.stderr = sys.stdout
from seq1f1b.__main__ import main
print(main({arguments}))
"""
    text, status = run_python(code).splitlines()
    assert re.fullmatch(rf"seq1f1b: {arguments[0]} needs torch, which is not installed; run: pip install .*", text)
    assert status == "2"


@pytest.mark.parametrize("missing", ["transformers", "safetensors"])
def test_what_an_extra_brings_is_named_with_it(missing: str) -> None:
    code = f"""
import sys
sys.modules["{missing}"] = None
try:
    from seq1f1b.transformers import pipeline_stage
except ImportError as error:
    print(error)
"""
    if missing != "transformers":
        for other in ("transformers", missing):
            pytest.importorskip(other, reason="of two packages that are missing the first is named")
    assert run_python(code) == f'{missing} is not installed; run: pip install "seq1f1b[transformers]"'


def test_dir_holds_the_public_names_alone() -> None:
    assert dir(seq1f1b) == sorted([*seq1f1b.__all__, "__version__"])
    assert {"PipelineEngine", "build_schedule"} <= set(dir(seq1f1b))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = seq1f1b.no_such_name


def test_public_names_exist() -> None:
    for name in seq1f1b.__all__:
        assert getattr(seq1f1b, name) is not None
    assert sorted(seq1f1b.__all__, key=lambda name: (not name.isupper(), name)) == seq1f1b.__all__  # constants first
    assert set(seq1f1b._NEEDS_TORCH) <= set(seq1f1b.__all__)


def test_links_the_c_library_only() -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d"))
    assert "libc.so.6" in needed
    assert [name for name in needed if not LIBRARIES.fullmatch(name)] == []


def test_no_symbol_of_torch_cuda_or_nccl() -> None:
    undefined = [line.split()[-1] for line in output_of("nm", "-D", "--undefined-only").splitlines()]
    assert "PyModuleDef_Init" in undefined
    assert [name for name in undefined if FORBIDDEN.search(name)] == []


def test_exports_its_init_function_only() -> None:
    defined = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only").splitlines()]
    assert defined == ["PyInit__C"]


def test_adapters_and_examples_leave_the_extension_alone() -> None:
    """They are what a user could have written: on the package's Python names only."""
    paths = [
        *(PACKAGE / "adapters").rglob("*.py"),
        *(PACKAGE / "transformers").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    assert len(paths) > 5
    assert [path.name for path in paths if re.search(r"(?<!torch\.)\b_C\b", path.read_text())] == []


def test_one_folder_includes_python() -> None:
    sources = [path for folder in ("csrc", "kernels") for path in (ROOT / folder).rglob("*.[ch]")]
    includers = {path.parent for path in sources if "#include <Python.h>" in path.read_text()}
    assert includers == {ROOT / "csrc" / "binding"}


def test_range_of_torch_is_stated_once() -> None:
    stated = [path.name for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("*.py"))
              for _ in re.findall(r"torch *>=", path.read_text())]  # fmt: skip
    assert stated == ["pyproject.toml"]
