"""Is every causal language model of transformers what docs/reference/models.md says, and its config left as it was?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import decoders  # noqa: E402
from slices import full_only, is_in_slice  # noqa: E402

import seq1f1b.transformers  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402

PAGE = decoders.read_page()
ON_PAGE = {name: row.what[decoders.RELEASE] for name, row in PAGE.items() if decoders.RELEASE in row.what}
RIGHT = [name for name, what in ON_PAGE.items() if what == decoders.RIGHT]


def test_the_page_has_every_type():
    assert sorted(ON_PAGE) == decoders.NAMES, f"run tests/hf/decoders.py with transformers {decoders.RELEASE}"
    assert all(what in decoders.KINDS for what in ON_PAGE.values())
    assert all(PAGE[name].why for name, what in ON_PAGE.items() if what != decoders.RIGHT)


ALL = [(name, False) for name in decoders.NAMES]
OWN = ("bloom", "falcon", "gpt_neo", "mpt", "deepseek_v32", "mamba2")  # that are replaced in ways of their own
QUICK = [(name, True) for name in decoders.NAMES if is_in_slice(5, name) or name in OWN]


@pytest.mark.parametrize(("name", "is_quick"), [*QUICK, *full_only(*ALL)])
def test_a_type_is_as_the_page_says(name, is_quick):
    found = decoders.examine(name, is_quick)
    if decoders.UNBUILT in (found.what, ON_PAGE[name]):
        pytest.skip(f"{name} cannot be built, now or for the page: {found.why}")  # it may need another package
    assert found.what == ON_PAGE[name], found.why


# -- the config of its user --------------------------------------------------------------------------------------------

PLAIN = ["llama", "falcon", "gpt_neo", "dbrx"]  # two look modules up by the attention's name, one holds other configs
TYPES = [pytest.param(name, marks=() if name in PLAIN else pytest.mark.full) for name in RIGHT]


def inside(config: Any) -> dict[str, Any]:
    """All that a config holds, private attributes and other configs included."""
    kind = transformers.PreTrainedConfig
    found = {key: inside(value) if isinstance(value, kind) else value for key, value in vars(config).items()}
    return copy.deepcopy(found)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_a_cut_writes_nothing_to_its_user_s_config(name, meta):
    kind, config = type(built := decoders.build(name)), built.config
    before = inside(config)
    for rank in range(2):  # the second model is made from the config after the first one was cut
        with torch.device("meta" if meta else "cpu"):
            model = kind(config)
        stage = pipeline_stage(model, rank, 2)
        if meta and name not in decoders.NEED_MEMORY:
            stage.materialize()
        assert inside(config) == before
        assert stage.config.to_dict() == config.to_dict() and stage.config is model.config


def test_a_release_that_is_not_tested_is_told(monkeypatch):
    monkeypatch.setattr(seq1f1b.transformers, "requires", lambda package: ["transformers<5.0,>=4.9; extra == 'x'"])
    monkeypatch.delitem(vars(seq1f1b.transformers), "pipeline_stage")
    with pytest.raises(ImportError, match=r"transformers<5\.0,>=4\.9 is required .* found transformers==5.*\nRun: pip"):
        _ = seq1f1b.transformers.pipeline_stage
