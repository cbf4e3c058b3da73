"""Is a file of ours written whole or not at all, and does an error in reading it name the file?"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seq1f1b import ScheduleError
from seq1f1b.files import json_fields, read, write_whole


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
