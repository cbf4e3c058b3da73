"""Is a warm step still one that somebody reads in an hour?"""

from __future__ import annotations

from step_trace import lines_of, trace


def test_a_warm_plain_step_is_small() -> None:
    found = trace()
    files, functions, calls, _ = found.figures()
    assert files <= 15 and functions <= 60 and calls <= 300, found.figures()
    assert max(map(lines_of, found.calls)) <= 60
