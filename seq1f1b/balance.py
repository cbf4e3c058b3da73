"""How many layers each stage gets, by what the layers and the head cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

__all__: list[str] = []


def balanced(work: Sequence[float], head: float, num_stages: int) -> list[int]:
    """Layers of each stage, at least one, so that the stage with most work, the last one with the head, has least."""
    total = [0.0, *accumulate(work)]

    def split(measure: Callable[[float, float], float], limit: float) -> tuple[float, tuple[int, ...]]:
        """The least measure of stages that are each below a limit, and their layers."""

        @cache
        def best(stages: int, stop: int) -> tuple[float, tuple[int, ...]]:
            """Measure and layers of the first stages, which hold the layers before ``stop``."""
            if not stages:
                return (0.0, ()) if not stop else (math.inf, ())
            options: list[tuple[float, int, tuple[int, ...]]] = [(math.inf, 0, ())]
            for start in range(stages - 1, stop):
                cost = total[stop] - total[start] + (head if stages == num_stages else 0.0)
                if cost <= limit:
                    before, counts = best(stages - 1, start)
                    options.append((measure(before, cost), stop - start, counts))
            found, last, counts = min(options)
            return found, (*counts, last)

        return best(num_stages, len(work))

    slowest, _ = split(max, math.inf)
    # Among the splits as good as that, the most even one.
    return list(split(lambda before, cost: before + cost * cost, slowest * (1 + 1e-9))[1])
