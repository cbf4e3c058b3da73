"""Does an engine load what it needs and no more? Each question is asked of an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys


def modules_after(*statements: str) -> list[set[str]]:
    """What an interpreter has loaded after each of these statements, one after another."""
    code = "import sys\n" + "".join(f"{statement}\nprint(*sys.modules)\n" for statement in statements)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in result.stdout.splitlines()]


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
