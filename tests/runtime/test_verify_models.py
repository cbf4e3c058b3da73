"""Which wrong models are found, by the engine itself and by verify, and is any right one blamed?

    python tests/runtime/test_verify_models.py

prints the table of docs/how-to/verify.md.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import pytest
import torch
from mixers import MICROBATCHES, RIGHT, SEGMENTS, WRONG, Case, batch, cross_entropy

import seq1f1b
from seq1f1b import SegmentWarning, Verification

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/verify.md"
FOUR = ("torch's scaled_dot_product_attention", "position embedding by arange", "LSTM", "BatchNorm")


def engine_of(module: torch.nn.Module, case: Case, **others: Any) -> seq1f1b.PipelineEngine:
    options = {"loss_fn": cross_entropy, **case.options(), **others}
    return seq1f1b.PipelineEngine(
        module, num_microbatches=MICROBATCHES, num_segments=SEGMENTS, group=seq1f1b.LoopbackGroup(1)[0], **options
    )


def looked_at(case: Case) -> list[str]:
    """What two steps tell by themselves: an error, or warnings."""
    engine = engine_of(case.module(), case)
    tokens, target = batch()
    with warnings.catch_warnings(record=True) as caught, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        warnings.simplefilter("always")
        try:
            for _ in range(2):
                engine.step(tokens, target=target, kwargs=case.kwargs())
        except ValueError as error:
            return [str(error)]
    return [str(warning.message) for warning in caught if warning.category is SegmentWarning]


def verified(case: Case, **options: Any) -> Verification:
    engine = engine_of(case.module(), case, **options)
    tokens, target = batch()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        warnings.simplefilter("error", SegmentWarning)  # verify tells by its result
        return engine.verify(tokens, target=target, kwargs=case.kwargs(), show=False)


def test_the_tables_are_long_enough():
    assert len(WRONG) >= 20 and len(RIGHT) >= 20
    assert all(case.seen or case.told for case in WRONG)
    assert all(case.seen and case.told for case in WRONG if case.name in FOUR)
    assert set(FOUR) <= {case.name for case in WRONG}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_wrong_model_is_found(case: Case):
    seen, result = looked_at(case), verified(case)
    assert len(seen) == case.seen, seen  # once, in two steps
    assert all(case.cause in text for text in seen)
    assert result.ok != case.told, str(result)
    if case.told:
        assert any(text.startswith(case.cause) for text in result.causes), str(result)
        assert max(result.loss_error, *result.parameters.values()) > 1e-3
    assert is_on_the_page(wrong_row(case, seen, result)), "run this file and put its tables on the page"


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.name)
def test_a_right_model_is_not_blamed(case: Case):
    seen, result = looked_at(case), verified(case)
    assert seen == []
    assert result.ok and not result.causes, str(result)
    assert case.name in right_models(), "name it on the page"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", RIGHT[:7], ids=lambda case: case.name)
def test_a_right_model_is_not_blamed_in_other_dtypes(case: Case, dtype: torch.dtype):
    module = case.module().to(dtype)
    result = engine_of(module, case).verify(*batch()[:1], target=batch()[1], show=False)
    assert result.ok, str(result)


@pytest.mark.parametrize("case", [case for case in WRONG if case.name in FOUR], ids=lambda case: case.name)
def test_a_wrong_model_is_found_in_16_bits_and_without_float64(case: Case):
    for dtype in (torch.bfloat16, torch.float32):
        engine = engine_of(case.module().to(dtype), case)
        result = engine.verify(
            batch()[0], target=batch()[1], dtype=dtype if dtype is torch.float32 else None, show=False
        )
        assert not result.ok and result.causes[0].startswith(case.cause), str(result)


def wrong_row(case: Case, seen: list[str], result: Verification) -> list[str]:
    """Name, what the engine says by itself, what verify says, and the cause."""
    how = "-" if not seen else "error" if 'attention="any"' in seen[0] else "warning"
    return [case.name, how, "-" if result.ok else "found", case.cause]


def right_models() -> list[str]:
    """Those that the page names, in one sentence."""
    sentence = " ".join(PAGE.read_text().partition("These right models")[2].split())
    return sentence.partition(": ")[2].rstrip(".").split("; ")


def is_on_the_page(row: list[str]) -> bool:
    """In the table, of which a row holds all models that come out alike."""
    name, *verdict = row
    for line in PAGE.read_text().splitlines():
        *found, names = [cell.strip() for cell in line.strip("|").split("|")]
        if found == verdict:
            return name in names.split("; ")
    return False


def main() -> None:
    alike: dict[tuple[str, ...], list[str]] = {}
    for case in WRONG:
        name, *verdict = wrong_row(case, looked_at(case), verified(case))
        alike.setdefault(tuple(verdict), []).append(name)
    print("| the engine itself | `verify` | cause that is named | wrong models |\n|---|---|---|---|")
    for verdict, names in alike.items():
        print(f"| {' | '.join(verdict)} | {'; '.join(names)} |")


if __name__ == "__main__":
    main()
