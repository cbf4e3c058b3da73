"""What Python reads from files and peers, held to sentences: any input at all ends in a value or in a documented error.

Each target takes the bytes of one input. Anything that it raises is a finding.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from flat_costs import simulation_of

from seq1f1b import Schedule, build_schedule, partition_sequence
from seq1f1b.partition import ModelShape, make_model
from seq1f1b.plan import Plan
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.planning.profile import Profile
from seq1f1b.report.report import PipelineReport
from seq1f1b.schedule import StepMemory
from seq1f1b.transformers.weight_files import weight_paths
from seq1f1b.transport.values import pack, unpack

MOST_UNITS = 512  # of an order that is built: a longer one takes longer by right
_folder = tempfile.TemporaryDirectory(prefix="seq1f1b-fuzz-")
_FILE = os.path.join(_folder.name, "input.json")


def _file_of(data: bytes) -> str:
    with open(_FILE, "wb") as file:
        file.write(data)
    return _FILE


@contextlib.contextmanager
def _refusing(*others: type[Exception], begins: str = "") -> Iterator[None]:
    """ValueError is documented everywhere. Its message says something, and begins with the file's name."""
    try:
        yield
    except (ValueError, *others) as error:
        assert str(error).startswith(begins), f"{str(error)!r} does not begin with {begins!r}"
        assert str(error) or others


def _require_no_nan(text: str) -> None:
    assert "nan" not in text.replace("nanosecond", ""), text


# -- files -------------------------------------------------------------------------------------------------------------


def profile(data: bytes) -> None:
    """A profile file is read as it is written again, and its numbers are numbers."""
    with _refusing(begins=_FILE):
        found = Profile.load(_file_of(data))
        assert Profile.from_json(found.to_json()) == found
        if all(character.isprintable() for character in found.machine + found.torch + found.dtype):
            _require_no_nan(found.to_text().removeprefix(found.machine))
        for passes in ("forward", "backward", "input", "weight", "recompute", "ends", "runs"):
            assert found.spread(passes) >= 0
        assert found.move_spread("move_out") >= 0 and found.move_spread("move_in") >= 0
        with _refusing():  # costs may add up to more than a double holds
            sizes = partition_sequence(64, 4, strategy="profiled", profile=found)
            assert sum(sizes) == 64


def plan(data: bytes) -> None:
    """A plan file is read as it is written again, and its numbers are numbers."""
    if _is_long(_first_value(data)):
        return
    with _refusing(begins=_FILE):
        found = Plan.load(_file_of(data))
        assert Plan.from_json(found.to_json()) == found
        numbers = (found.seconds, found.low, found.high, found.bubble, found.tokens_per_second, found.mix)
        for number in (*numbers, *found.peak, *found.peak_high, found.cap, *found.margin):
            assert type(number) in (int, float) and math.isfinite(number), number
        for each in found.lengths:
            for number in (each.share, each.tokens, each.seconds, each.tokens_per_second, *each.peak):
                assert type(number) in (int, float) and math.isfinite(number), number
        assert len(found.segment_sizes) == found.num_segments
        with _refusing():
            assert found.engine_arguments()["schedule"].num_ranks == found.num_ranks


def machine(data: bytes) -> None:
    """A file of a machine or of a model gives finite numbers."""
    name = _file_of(data)
    with _refusing(begins=name):
        assert load_model(name).flops(0, 1) >= 0
    with _refusing(begins=name):
        found = load_hardware(name)
        assert all(0 <= low < high < math.inf for low, high in found.spread.values())
        assert math.isfinite(found.peak) and found.peak > 0


def report(data: bytes) -> None:
    """A log of steps is printed as ``seq1f1b report`` prints it."""
    if any(_is_long(_first_value(line)) for line in data.splitlines()):
        return
    with _refusing(begins=_FILE):
        for each in PipelineReport.load_all(_file_of(data)):
            _require_no_nan(str(each))
            assert math.isfinite(each.makespan) and math.isfinite(each.bubble)
            assert all(math.isfinite(x) for x in each.segment_seconds)


def csv(data: bytes) -> None:
    """Any CSV, behind a line with its number of segments, is an order that is written as it is read, or an error."""
    number, _, text = data.decode("utf-8", "replace").partition("\n")
    with _refusing():
        num_segments = int(number)
        order = Schedule.from_csv(text, num_segments=num_segments)
        assert order.num_segments == num_segments
        assert Schedule.from_csv(order.to_csv(), num_segments=num_segments) == order
        order.check()


# -- messages ----------------------------------------------------------------------------------------------------------


def weight_index(data: bytes) -> None:
    """Any index of weights names files of its folder, or is an error; the file outside is never read."""
    model = os.path.join(_folder.name, "model")
    os.makedirs(os.path.join(model, "part"), exist_ok=True)
    index = os.path.join(model, "model.safetensors.index.json")
    for name in ("a.safetensors", "model/a.safetensors", "model/part/b.safetensors"):
        header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
        with open(os.path.join(_folder.name, name), "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header + b"\0")
    with open(index, "wb") as out:
        out.write(data)
    with _refusing(begins=index):
        found = {os.path.relpath(path, _folder.name) for path in weight_paths(model)}
        assert found <= {"model/a.safetensors", "model/part/b.safetensors"}


def values(data: bytes) -> None:
    """A value of a peer is data, and is packed again to what it was."""
    with _refusing():
        found = unpack(data)
        again = unpack(pack(found))
        if found == found:  # a nan may be part of a value
            assert again == found or "nan" in repr(found)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _model_of(given: Any) -> ModelShape | None:
    return None if given is None else make_model(given, "model")


def _partition(model: Any = None, **given: Any) -> None:
    sizes = partition_sequence(model=_model_of(model), **given)
    assert sum(sizes) == given["seq_len"] and min(sizes) >= 1 and len(sizes) == given["num_segments"]


def _build(**given: Any) -> Schedule:
    schedule = build_schedule(**given)
    schedule.check()
    assert Schedule.from_text(schedule.to_text()) == schedule
    return schedule


def _simulate(memory: Any = None, prefetch: Any = 1, **given: Any) -> None:
    schedule = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2, prefetch=prefetch)
    held = None if memory is None else StepMemory(**memory)
    found = schedule.simulate(memory=held, **simulation_of(given))
    assert math.isfinite(found.makespan) and found.makespan >= max(found.busy)
    assert all(math.isfinite(x) for x in (*found.busy, *found.wait, *found.bubble, *found.span))
    assert found.memory is None or min(found.memory.total) >= 0


def arguments(data: bytes) -> None:
    """Arguments of partitions, builders and simulations, as JSON: [name of the call, its keywords]."""
    calls: dict[str, Callable[..., Any]] = {"partition": _partition, "build": _build, "simulate": _simulate}
    try:
        call, given = json.loads(data)
        run = calls[call]
    except (ValueError, TypeError, LookupError, RecursionError):
        return
    if not isinstance(given, dict) or _is_long(given):
        return
    steps = given.get("steps")
    if isinstance(steps, int) and steps > 8:
        return
    with _refusing(TypeError):  # a wrong type is the caller's mistake, too
        run(**given)


def _first_value(data: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


def _is_long(given: Any) -> bool:
    """Whether an order would have very many units, or a sequence very many segments."""
    if not isinstance(given, dict):
        return False
    counts = [given.get(name) for name in ("num_ranks", "num_microbatches", "num_segments", "stages_per_rank")]
    numbers = [count for count in counts if isinstance(count, int) and count > 0]
    most = 4 if given.get("name", given.get("schedule")) == "auto" else MOST_UNITS
    return math.prod(numbers) > most


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (profile, plan, machine, report, csv, weight_index, values, arguments)
}
