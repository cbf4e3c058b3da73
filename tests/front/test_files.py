"""Is a file of ours written whole or not at all, and does an error in reading it name the file?"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seq1f1b import ScheduleError
from seq1f1b.files import json_fields, load, read, write_whole


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.json"
    write_whole(file, b"before")

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match=r"No space left on device: '.*/plan.json'"):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before" and os.listdir(tmp_path) == ["plan.json"]


def test_a_file_that_is_replaced_keeps_its_mode_and_a_new_one_has_that_of_any_other(tmp_path: Path) -> None:
    file, other = tmp_path / "plan.json", tmp_path / "other"
    write_whole(file, b"new")
    other.touch()
    assert file.stat().st_mode == other.stat().st_mode
    for mode in (0o640, 0o600, 0o666):
        file.chmod(mode)
        write_whole(file, b"again")
        assert file.stat().st_mode & 0o777 == mode and file.read_bytes() == b"again"


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    file.write_bytes(b"before")
    link.symlink_to(file)
    write_whole(link, b"after")
    assert link.is_symlink() and file.read_bytes() == b"after"

    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert os.read(reader, 20) == b"through" and pipe.is_fifo()
    os.close(reader)


def test_errors_of_what_a_file_says_begin_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("7")
    assert read(file, int) == 7

    def parse(text: str) -> None:
        raise ScheduleError("F0.1 runs before F0.0")

    with pytest.raises(ScheduleError, match=r"^/.*/order.txt: F0.1 runs before F0.0$"):
        read(file, parse)
    with pytest.raises(OSError, match=r"none\.txt"):
        read(tmp_path / "none.txt", int)


def test_a_file_says_which_format_it_has() -> None:
    assert json_fields('{"format": "seq1f1b plan 1", "mix": 1}', "plan", "seq1f1b plan 1") == {"mix": 1}
    with pytest.raises(ValueError, match=r"a plan must be JSON: .*line 1 column 2"):
        json_fields("{", "plan", "seq1f1b plan 1")
    for text in ("[]", "{}", json.dumps({"format": "seq1f1b profile 1"})):
        with pytest.raises(ValueError, match=r'"format" is .seq1f1b plan 1.; seq1f1b plan writes one'):
            json_fields(text, "plan", "seq1f1b plan 1")


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass(frozen=True)
class Shape:
    name: str
    points: tuple[Point, ...]
    center: Point | None = None
    sizes: tuple[int, ...] | None = None
    closed: bool = False
    notes: Mapping[str, Any] = field(default_factory=dict)


def test_a_class_is_read_by_the_types_of_its_fields() -> None:
    assert load(Shape, {"name": "dot", "points": []}, "shape") == Shape("dot", ())
    data = {"name": "line", "points": [{"x": 1}, [2, 3]], "center": [1, 0.5], "sizes": [4], "notes": {"of": [None]}}
    found = load(Shape, data, "shape")
    assert found == Shape("line", (Point(1), Point(2, 3.0)), Point(1, 0.5), (4,), False, {"of": [None]})
    assert type(found.points[1].y) is float and type(found.center) is Point
    assert load(Shape, {**data, "center": None, "sizes": None}, "shape").center is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nam": 1}, r"unknown fields \['nam'\], missing fields \[\]; did you mean 'name'\?$"),
        ({"name": 1}, "name is 1, must be a text$"),
        ({"points": {}}, "points is {}, must be a list$"),
        ({"points": [3]}, r"points\[0\] is 3, must be an object$"),
        ({"points": [[1]]}, r"points\[0\] is \[1\], must be \['x', 'y'\]$"),
        ({"points": [{"y": 1}]}, r"points\[0\]: unknown fields \[\], missing fields \['x'\]$"),
        ({"points": [[1, -1]]}, r"points\[0\]: y is -1, must be a finite number of at least 0$"),
        ({"center": [True, 1]}, "center: x is True, must be a whole number of at least 0$"),
        ({"center": [1, float("nan")]}, "center: y is nan, must be a finite number"),
        ({"sizes": ["a"]}, r"sizes\[0\] is 'a', must be a whole number"),
        ({"closed": 1}, "closed is 1, must be true or false$"),
        ({"notes": []}, r"notes is \[\], must be an object$"),
    ],
)
def test_what_is_wrong_in_a_class_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^shape: {message}"):
        load(Shape, {"name": "dot", "points": [], **change}, "shape", least=0)
