"""Is every causal language model of transformers what docs/reference/models.md says?"""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import decoders  # noqa: E402
from slices import full_only, is_in_slice  # noqa: E402

from seq1f1b.transformers import pipeline_stage  # noqa: E402

PAGE = decoders.read_page()
ON_PAGE = {name: row.what[decoders.RELEASE] for name, row in PAGE.items() if decoders.RELEASE in row.what}


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


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, what in ON_PAGE.items() if what == decoders.RIGHT])
def test_a_supported_model_without_memory_is_cut(name):
    model = decoders.build(name)
    with torch.device("meta"):
        model = type(model)(model.config)  # the config may be of a part that has no model by its name
    assert all(pipeline_stage(model, rank, 2) is not None for rank in range(2))
