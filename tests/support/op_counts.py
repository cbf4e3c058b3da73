"""What torch's profiler has seen, counted as work for a device: what computes or copies, each op once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["ancestors", "is_launch", "launches"]

NO_WORK = {  # views, allocations, and ops that call others for their work
    f"aten::{name}"
    for name in (
        "_has_compatible_shallow_copy_type", "_to_copy", "alias", "as_strided", "clone", "constant_pad_nd",
        "contiguous", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten", "narrow",
        "new_empty", "new_empty_strided", "new_zeros", "pad", "permute", "reshape", "resize_", "result_type",
        "select", "slice", "split", "split_with_sizes", "squeeze", "t", "to", "transpose", "unbind",
        "unflatten", "unsqueeze", "view", "view_as", "zeros",
    )
}  # fmt: skip


def ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def is_launch(event: Any) -> bool:
    return works(event.name) and not any(works(each.name) for each in ancestors(event.cpu_parent))


def works(name: str) -> bool:
    return name.startswith("aten::") and name not in NO_WORK


def launches(run: Callable[[], Any]) -> Counter[str]:
    """How many a call makes, by the op's name."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    return Counter(event.name.removeprefix("aten::") for event in profiled.events() if is_launch(event))
