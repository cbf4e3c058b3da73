"""Do an order's receive places and what it does in waits stay with it, and count in its times and bytes?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from seq1f1b import Schedule, build_schedule
from seq1f1b.schedule import StepMemory

COUNTS = {"num_ranks": 3, "num_microbatches": 4, "num_segments": 2}
CHANGES: dict[str, Callable[[Schedule], Schedule]] = {
    "forward_only": Schedule.forward_only,
    "defer_weights": Schedule.defer_weights,
    "recompute": Schedule.recompute,
    "recompute nothing": lambda order: order.recompute("none"),
    "offload": Schedule.offload,
    "spread_vocabulary": lambda order: order.spread_vocabulary(embedding=True),
    "with_cell_kinds": lambda order: order.with_cell_kinds(["R. .. L. .."] * 3),
    "fit": lambda order: order.fit(StepMemory(activations=10, inputs=1), 21),
    "replace prefetch": lambda order: order.replace(prefetch=order.prefetch),
    "replace weights": lambda order: order.replace(weights="fill" if order.fills else "planned"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("prefetch", "weights"), [(None, "planned"), (0, "fill"), (5, "planned")])
def test_they_survive_each_change(change: Callable[[Schedule], Schedule], prefetch: int | None, weights: str) -> None:
    order = build_schedule("seq1f1b", **COUNTS, prefetch=prefetch, weights=weights)
    changed = change(order)
    assert (changed.prefetch, changed.fills) == (prefetch, weights == "fill")
    assert changed.ranks == change(build_schedule("seq1f1b", **COUNTS).replace(prefetch=prefetch)).ranks


def test_orders_that_differ_in_them_are_not_equal() -> None:
    build = partial(build_schedule, "seq1f1b", **COUNTS)
    order = build()
    assert (order.prefetch, order.fills) == (None, False)
    others = [build(prefetch=2), build(weights="fill"), build(prefetch=2, weights="fill")]
    assert len({order, *others}) == 4
    assert order == build() == others[2].replace(prefetch=None, weights="planned")
    assert order.to_text() == others[2].to_text()  # which does not hold them
    assert Schedule.from_text(order.to_text()) == order


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"prefetch": -1}, ValueError, "prefetch is -1, must be at least 0"),
        ({"prefetch": 1.0}, TypeError, "prefetch must be an int, got float"),
        ({"prefetch": True}, TypeError, "prefetch must be an int, got bool"),
        ({"weights": "early"}, ValueError, "weights is 'early', must be 'planned' or 'fill'"),
    ],
)
def test_what_is_refused(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        build_schedule("seq1f1b", **COUNTS, **options)  # type: ignore[arg-type] # what is refused
    with pytest.raises(error, match=text):
        build_schedule("seq1f1b", **COUNTS).replace(**options)  # type: ignore[arg-type] # what is refused
