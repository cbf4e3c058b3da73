"""Do look, verify and split say of each model of the table what it records, and is no wrong one lost?"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import verdicts
from as_found import as_found
from slices import one_in
from verdicts import NOT_ASKED, NOTHING, Trial, rows_of, told_of

MODELS, ROWS = verdicts.models(), rows_of()
PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/verify.md"
PLAIN = one_in(4, MODELS)


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_is_judged_as_the_table_says(name):
    trial = Trial(MODELS[name])
    verdict = trial.verdict()
    assert (verdict.truth, verdict.said) == ROWS[name][:2], trial.texts
    assert any(re.search(MODELS[name].says, text) for text in ("", *trial.texts)), trial.texts
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("refused", "cut"))])
def test_a_cut_leaves_the_model_as_it_was(name):
    model, stages = MODELS[name], []
    whole = model.make()
    for parameter in whole.parameters():
        parameter.grad = torch.ones_like(parameter)
    with model.around(), as_found("cut", whole, is_put_back=True), suppress(ValueError):
        stages = model.cut(whole)
    assert not stages or set().union(*(stage.state_dict() for stage in stages)) == set(whole.state_dict())


def test_no_wrong_model_is_lost_and_no_right_one_blamed_that_was_not():
    missing = {
        name for name in ROWS if name not in MODELS and (find_spec("transformers") or "transformers" not in name)
    }
    assert not missing and MODELS.keys() <= ROWS.keys() and sum(not name.marks for name in PLAIN) <= 150
    rows = ROWS.items()
    lost = [name for name, (truth, now, _) in rows if truth == "wrong" and not told_of(now)]
    blamed = [name for name, (truth, now, before) in rows if truth == "right" and told_of(now) and not told_of(before)]
    assert (lost, blamed) == ([], [])
    for way in range(3):
        less = [name for name, (_, now, before) in rows if told_of(before[way : way + 1]) and now[way] == NOTHING]
        assert len(less) <= 13, less


def test_the_page_has_the_table():
    """Rows of wrong models by what is said of them, and the number of right ones, which nothing blames."""
    import mixers

    page = PAGE.read_text(encoding="utf-8")
    rows = {}
    for line in page.splitlines():
        *found, names = [cell.strip() for cell in line.strip("|").split("|")]
        rows |= {name: found for name in names.split("; ") if len(found) == 3}
    for case in mixers.WRONG:
        (look, verify, _), cause = ROWS[f"page: {case.name}"][1], case.cause
        assert cause in look or cause in verify
        engine, found = look.partition(":")[0].replace(NOT_ASKED, NOTHING), NOTHING if verify == NOTHING else "found"
        assert rows[case.name] == [engine, found, cause], "put it on the page"
    right = [ROWS[f"page: {case.name}"] for case in mixers.RIGHT]
    assert all(truth == "right" and not told_of(now) for truth, now, _ in right)
    assert f"blames some {round(len(right) / 5) * 5} right models" in page
