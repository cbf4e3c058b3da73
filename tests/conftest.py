"""The order of test files: those that take longest begin first, so that no worker is left alone with one at the end."""

import pytest
import slices

LONGEST_FIRST = (
    *("front/test_examples.py", "transport/test_meeting.py", "front/test_docs.py"),
    *("transport/test_restarts.py", "engine/test_failures.py", "front/test_benchmarks.py", "checks/test_verify.py"),
    *("transport/test_machines.py", "engine/test_engine_compile.py", "front/test_gpu_benchmark.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    slices.takes_full = "not full" not in config.option.markexpr


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``--dist loadfile --no-loadscope-reorder``; without the latter the files with most tests come first."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places)))
