"""The order of test files, and the slow suites: what takes longest begins first, so that none is left at the end."""

import pytest
import slices

# Suites that start many processes, compile, inject faults, drive a browser or wait for limits: `.ci/run slow` runs
# them, plain pytest does not. A row is a file, or one test of a file.
SLOW = (
    *("front/test_examples.py", "transport/test_meeting.py", "front/test_docs.py::test_page"),
    *("transport/test_restarts.py", "front/test_benchmarks.py", "transport/test_machines.py"),
    *("engine/test_engine_compile.py", "front/test_gpu_benchmark.py", "view/test_explorer.py", "view/test_page.py"),
    *("transport/test_launch.py", "engine/test_exit.py", "device/test_edge_proof.py"),
    "fuzz/test_fuzz_corpus.py::test_inputs_of_the_targets_in_c",
    "faults/test_faults.py::test_faults",
    "engine/test_offload.py::test_killed_at_any_moment_nothing_is_left",
    "attention/test_ulysses.py::test_a_compiled_stage_of_two_ranks",
    "attention/test_ulysses.py::test_a_rank_lost_before_its_all_to_all_ends_the_step_on_the_others",
    "attention/test_packing.py::test_compiled_stages_need_no_graph_per_segment_or_packing",
    "attention/test_ops.py::test_every_option_compiles",
    "adapters/test_checkpoint.py::test_every_layout_goes_on_from_every_other",
    "planning/test_profile.py::test_profile_then_plan_on_the_command_line",
    "planning/test_documents.py::test_an_interrupt_while_a_plan_is_made_is_clean",
    "planning/test_documents.py::test_steps_go_through_a_loader_and_its_workers",
    "checks/test_verify.py::test_compiled_code_runs_as_it_was_written",
    "engine/test_tensor_parallel.py::test_each_length_is_compiled_once",
    "engine/test_offload.py::test_compiled_blocks",
    "engine/test_recompute.py::test_dropout_in_compiled_code",
    "engine/test_recompute.py::test_compiled_blocks_have_one_more_kind_of_graph",
)
LONGEST_FIRST = (
    *(name.partition("::")[0] for name in SLOW),
    *("engine/test_random_steps.py", "engine/test_failures.py", "checks/test_verify.py"),
)


def pytest_configure(config: pytest.Config) -> None:
    slices.takes_full = "not full" not in config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For ``--dist loadfile --no-loadscope-reorder``; without the latter the files with most tests come first."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    for item in items:
        name = "/".join(item.path.parts[-2:])
        if name in SLOW or f"{name}::{item.name.partition('[')[0]}" in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: places.get("/".join(item.path.parts[-2:]), len(places)))
