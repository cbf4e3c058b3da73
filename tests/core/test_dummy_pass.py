"""A new pass is one edit of unit.c and a callback: a core built with a pass X checks, simulates, draws and runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# After each of these lines of unit.c, the lines that X needs.
EDIT = {
    "#define W BIT(S1F_PASS_BACKWARD_WEIGHT)\n": """
#define X BIT(8)
#define SHARE 7
#define CHANNEL_OUTPUT 2
#define CHANNEL_SHARE 3
""",
    "    [S1F_PASS_LOAD] = {'L', BIT(COMING)},\n": """
    [8] = {'X', BIT(SHARE)},
""",
    "    STAGE_BEFORE,\n": """
    LAST_STAGE,              /* from another one */
    LAST_STAGE_ITSELF,
    ALL_STAGES_FOR_LAST,     /* all others */
""",
    '"a weight gradient comes after its input gradient"},\n': """
    {X, OUTPUT, LAST_STAGE, S1F_COMES_FROM_STAGE, CHANNEL_OUTPUT, SHARE, "a share comes after the output"},
    {X, OUTPUT, LAST_STAGE_ITSELF, S1F_COMES_SAVED, 0, 0, "a share comes after the output"},
    {B | I, SHARE, ALL_STAGES_FOR_LAST, S1F_COMES_FROM_STAGE, CHANNEL_SHARE, WEIGHT_GRADIENT,
     "the last stage goes back after every share of its output"},
    {B | I, SHARE, LAST_STAGE_ITSELF, S1F_COMES_SAVED, 0, 0,
     "the last stage goes back after every share of its output"},
""",
    "    int is_last = shape->num_segments > 1 && unit->segment == shape->num_segments - 1;\n": """
    int32_t last_stage = shape->num_stages - 1;
""",
    "    case SAME_CELL: return i == 0;\n": """
    case LAST_STAGE_ITSELF: return i == 0 && unit->stage == last_stage;
    case LAST_STAGE: return i == 0 && unit->stage < last_stage && (unit->stage = last_stage, 1);
    case ALL_STAGES_FOR_LAST: return i < last_stage && unit->stage == last_stage && (unit->stage = i, 1);
""",
}


def test_a_pass_is_one_edit_of_unit_c(tmp_path: Path) -> None:
    for name in ("csrc", "kernels", "seq1f1b"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    unit = tmp_path / "csrc/core/unit.c"
    text = unit.read_text()
    for line, added in EDIT.items():
        assert text.count(line) == 1, line
        text = text.replace(line, line + added.lstrip("\n"))
    unit.write_text(text)

    def run(*command: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=tmp_path,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    run("setup.py", "-q", "build_ext", "--inplace", "-j2", SEQ1F1B_DEBUG="1", SEQ1F1B_CUDA="0", SEQ1F1B_SANITIZE="0")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests/support")])
    assert "a pass X was checked" in run(str(ROOT / "tests/support/dummy_pass.py"), str(tmp_path), PYTHONPATH=path)
