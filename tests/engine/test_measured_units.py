"""Do measured units tell the seconds of others, and follow another source where nothing was measured?"""

from __future__ import annotations

import numpy as np
import pytest

from seq1f1b.seconds import Fit, MeasuredUnits, PassSeconds, Span, pairs_of, spans_of, terms_of

SPAN = Span(*(np.array([x]) for x in (10.0, 55.0, 10.0)))


class Known:
    """Two stages: F 1, I 3, W 5, B 7, R 0.5 for each token."""

    layers = (1, 1)

    def seconds(self, span: Span) -> tuple[PassSeconds, dict[str, object]]:
        return PassSeconds(*(np.array([each * span.tokens] * 2) for each in (1.0, 3.0, 5.0, 7.0, 0.5))), {}


def fits(**floors: float) -> dict[tuple[str, int], Fit]:
    """Units of these passes, of stage 0, that take so long whatever their length."""
    return {(letter, 0): Fit(floor, 0.0, 0.0, 0.0) for letter, floor in floors.items()}


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({"F": 2.0, "I": 4.0, "W": 6.0, "B": 9.0, "R": 1.0}, (2.0, 4.0, 6.0, 9.0, 1.0)),
        ({"F": 2.0, "I": 4.0, "W": 6.0}, (2.0, 4.0, 6.0, 10.0, 1.0)),  # B is their sum, R half of F
        ({"F": 2.0, "B": 14.0}, (2.0, 6.0, 10.0, 14.0, 1.0)),  # I and W, 3 / 7 and 5 / 7 of B
        ({}, (10.0, 30.0, 50.0, 70.0, 5.0)),
    ],
)
def test_what_was_not_measured_follows_the_other_source(
    measured: dict[str, float], expected: tuple[float, ...]
) -> None:
    found = np.array(MeasuredUnits(fits(**measured), Known()).seconds(SPAN)[0])[:, :, 0]
    assert found[:, 0] == pytest.approx(expected) and (found[:, 1] == np.array(Known().seconds(SPAN)[0])[:, 1, 0]).all()


def test_without_another_source_i_and_w_are_halves_of_b() -> None:
    units = MeasuredUnits(fits(F=2.0, B=14.0))
    assert np.array(units.seconds(SPAN)[0])[:, 0, 0].tolist() == [2.0, 7.0, 7.0, 14.0, 2.0] and not units.splits
    assert units.balance == 0.0
    assert MeasuredUnits(fits(F=2.0, B=14.0, I=8.0, W=7.0)).splits


def test_fitted_units_tell_those_of_another_length() -> None:
    """Floor 1, 2 for a token, 3 for a pair; shards take what the mean rank does."""
    found: list[tuple[str, int, float, float, float]] = []
    spans = spans_of([8, 4, 2, 1, 9])
    for tokens, pairs in zip(spans.tokens, spans.pairs, strict=True):
        for stage in (0, 1):
            found.append(("F", stage, tokens, pairs, 1.0 + 2.0 * tokens + 3.0 * pairs))
            found.append(("S", stage, tokens, pairs, (1.0 + stage) * tokens))
    units, spans = MeasuredUnits(terms_of(found)), spans_of([5, 7], [3, 9])
    assert spans.pairs.tolist() == [6 + 3, 42] == [pairs_of([3, 9], 0, 5), pairs_of([3, 9], 5, 12)]
    assert units.seconds(spans)[0].forward.tolist() == [pytest.approx([1 + 10 + 27, 1 + 14 + 126])] * 2
    _, shards = units.seconds(spans)
    assert shards["statistics"].tolist() == [pytest.approx([7.5, 10.5])] * 2
    assert shards["embed"].tolist() == [[0.0, 0.0]] * 2
