"""Does an engine load what it needs and no more? Each question is asked of an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest


def modules_after(statements: str) -> set[str]:
    code = f"{statements}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def parts(modules: set[str], package: str) -> list[str]:
    return sorted(name for name in modules if name == package or name.startswith(f"{package}."))


def test_the_package_alone_needs_no_torch_no_planner_and_no_drawing() -> None:
    modules = modules_after("import seq1f1b")
    for package in ("torch", "numpy", "seq1f1b.planning", "seq1f1b.view", "seq1f1b.runtime", "seq1f1b.plan"):
        assert parts(modules, package) == []


@pytest.mark.parametrize("name", ["PipelineEngine", "ScheduleSeq1F1B", "PipelineState"])
def test_what_trains_loads_no_planner_and_no_drawing(name: str) -> None:
    modules = modules_after(f"import seq1f1b\nseq1f1b.{name}")
    assert parts(modules, "seq1f1b.runtime.engine")
    for package in ("seq1f1b.planning", "seq1f1b.view"):
        assert parts(modules, package) == []


def test_the_engine_loads_no_compiler() -> None:
    """Torch's compiler takes longer to import than torch itself."""
    modules = modules_after("import seq1f1b\nseq1f1b.PipelineEngine, seq1f1b.carry_in, seq1f1b.causal_attention")
    for package in (
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
    ):
        assert parts(modules, package) == []


def test_a_plan_is_read_without_the_planner() -> None:
    assert parts(modules_after("from seq1f1b.plan import Plan"), "seq1f1b.planning") == []
    assert parts(modules_after("from seq1f1b.plan import Plan"), "torch") == []
