"""Are the private names of transformers that we lean on those of a table, whose check names the version?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torch import nn

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import seq1f1b.transformers  # noqa: E402
from seq1f1b.transformers import library, state  # noqa: E402

SOURCES = sorted(Path(library.__file__).parent.glob("*.py"))
LISTED = {name.rpartition(".")[2].rpartition(":")[2] for name in library.MODELS | library.TRAINER}


def private_names(file: Path) -> set[str]:
    """Attributes that are read, set or overridden, and whose names begin with an underscore."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.stem)
def test_what_is_private_in_transformers_is_listed(file):
    kinds = [transformers.PreTrainedModel, transformers.PreTrainedConfig]
    if file.stem.startswith("trainer"):
        kinds.append(transformers.Trainer)
    theirs = {name for name in private_names(file) for kind in kinds if hasattr(kind, name)}
    assert {name for name in theirs if not hasattr(nn.Module, name)} <= LISTED


def test_all_that_ask_a_cache_for_a_state_are_listed():
    """A mixer that is not in the table would run without its state."""
    asking = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for text in re.split(r"^class ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            if re.search(r"\.get_(conv_state|recurrent_state|linear_cache)\(", text):
                asking.add(text[: text.index("(")])
    assert len(asking) > 20 and asking <= state._MIXERS.keys()


def test_a_name_that_is_gone_is_told_with_the_version(monkeypatch):
    monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan")
    monkeypatch.delitem(vars(seq1f1b.transformers), "pipeline_stage", raising=False)
    told = rf"transformers {transformers.__version__} has no transformers:PreTrainedModel._get_dtype_plan, which"
    with pytest.raises(ImportError, match=rf"{told} .* \(which weights stay in float32\); run: pip install"):
        _ = seq1f1b.transformers.pipeline_stage
