"""Does a name of 1.0.0rc1 that has gone say what there is now? docs/from-rc1.md lists them for a reader."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import seq1f1b
from seq1f1b.cli import main
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.search import search_plans
from seq1f1b.renamed import GONE, MOVED

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-rc1.md").read_text(encoding="utf-8")
NAMES = [(owner, name) for owner, names in GONE.items() for name in names]
OBJECTS: dict[str, Any] = {
    "PipelineEngine": seq1f1b.PipelineEngine,
    "Schedule": seq1f1b.Schedule,
    "Layout": Layout,
    "search_plans": search_plans,
    "CostModel": CostModel,
}


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_an_old_name_tells_the_new_one(owner: str, name: str) -> None:
    told: pytest.ExceptionInfo[Exception]
    if "." in owner or owner == "seq1f1b":
        pytest.importorskip("torchtitan" if "titan" in owner else "torch")
        with pytest.raises(ImportError) as told:
            getattr(import_module(owner), name)
    elif name.endswith("="):
        kind = OBJECTS[owner]
        assert name[:-1] not in inspect.signature(kind).parameters
        with pytest.raises(TypeError) as told:
            kind(**{name[:-1]: None})
    else:
        assert not hasattr(OBJECTS[owner], name)
        with pytest.raises(AttributeError) as told:
            getattr(object.__new__(OBJECTS[owner]), name)
    assert name in str(told.value) and str(told.value).endswith(f", and now there is {GONE[owner][name]}")
    assert any(f"{before}{name}" in PAGE for before in "`.(")


def test_torchs_schedules_tell_the_engines_new_argument() -> None:
    with pytest.raises(TypeError, match=r'^ScheduleSeq1F1B takes no unchecked=: .* attention="own"'):
        seq1f1b.ScheduleSeq1F1B(None, 1, unchecked=True)


def test_a_name_that_never_was_tells_no_other() -> None:
    order = seq1f1b.build_schedule("1f1b", num_ranks=1, num_microbatches=1)
    with pytest.raises(AttributeError, match=r"^'Schedule' object has no attribute 'uints_of'$"):
        order.uints_of  # noqa: B018
    with pytest.raises(TypeError, match="unexpected keyword argument 'uncheked'"):
        seq1f1b.PipelineEngine(nn.Identity(), uncheked=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", MOVED)
def test_an_old_path_tells_the_new_one(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^seq1f1b.adapters.{name} of 1.0.0rc1 is seq1f1b.transformers.") as told:
        import_module(f"seq1f1b.adapters.{name}")
    module = str(told.value).split()[-2]
    assert Path(seq1f1b.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").exists()


def test_an_old_option_tells_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "gpipe", "--offload", "3"])
    assert "there is no --offload: 1.0.0rc1 had it, and now there is --tier" in capsys.readouterr().err
