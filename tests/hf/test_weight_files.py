"""Is a folder of somebody else's weights read by its own files alone, and refused by sentence where they are wrong?"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason='needs the extra: pip install "seq1f1b[transformers]"')

from seq1f1b.transformers.weight_files import WeightFiles

SHARD = "model-00001-of-00001.safetensors"


def write(file: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in one shard, and a file beside its folder that is none of its business."""
    (tmp_path / "model" / "part").mkdir(parents=True)
    write(tmp_path / "private.safetensors", {"s": entry([2], 0, 8)}, struct.pack("<2f", 1.5, 2.5))
    for name in (SHARD, f"part/{SHARD}"):
        write(tmp_path / "model" / name, {"w": entry([2], 0, 8)}, struct.pack("<2f", 3.5, 4.5))
    return tmp_path / "model"


def put_index(folder: Path, index: Any) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


NAMES = {
    "a parent": "../private.safetensors",
    "a parent further in": "part/../../private.safetensors",
    "its own parent": "../model/" + SHARD,
    "an absolute path": "/etc/passwd",
    "backslashes": "..\\private.safetensors",
    "a byte that ends texts in C": SHARD + "\0",
    "nothing": "",
    "the folder": ".",
    "a folder": "part/",
    "a number": 5,
    "null": None,
    "true": True,
    "a list": [SHARD],
    "an object": {"name": SHARD},
}
INDEXES = {
    "a list": [],
    "a number": 1,
    "null": None,
    "no map": {"metadata": {}},
    "a map that is a list": {"weight_map": [SHARD]},
    "a map that is null": {"weight_map": None},
    "nested too deep": '{"weight_map":' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number of many digits": '{"weight_map": {"w": ' + "9" * 10_000 + "}}",
    "half a text": '{"weight_map": {"w": "mod',
} | {f"a file that is {what}": {"weight_map": {"w": name}} for what, name in NAMES.items()}


@pytest.mark.parametrize("what", INDEXES)
def test_an_index_names_files_of_its_folder(folder, what):
    put_index(folder, INDEXES[what])
    with pytest.raises(ValueError, match=r"index\.json is no index of weights: "):
        WeightFiles(str(folder))


@pytest.mark.parametrize("name", ["absent.safetensors", "part", "\ud800.safetensors", "²", "9" * 5000])
def test_a_file_that_is_not_there_is_named(folder, name):
    put_index(folder, {"weight_map": {"w": name}})
    with pytest.raises(ValueError, match=r"index\.json names .* does not hold: copy or download"):
        WeightFiles(str(folder))


def test_files_in_the_folder_and_links_of_a_cache_are_read(folder):
    os.symlink("../private.safetensors", folder / "model-00002-of-00002.safetensors")  # as in the hub's cache
    index = {"w": f"part/{SHARD}", "s": "model-00002-of-00002.safetensors"}
    put_index(folder, {"weight_map": index})
    files = WeightFiles(str(folder))
    assert files.read("w").tolist() == [3.5, 4.5] and files.read("s").tolist() == [1.5, 2.5]


def test_a_link_to_nothing_is_named(folder):
    os.remove(folder / SHARD)
    os.symlink("../blobs/gone", folder / SHARD)
    with pytest.raises(ValueError, match=f"has links to {SHARD}, which .* does not hold: copy or download"):
        WeightFiles(str(folder))


def test_tensors_without_elements_beside_others_are_read(folder):
    header = {"none": entry([0, 3], 0, 0), "w": entry([2], 0, 8), "last": entry([5, 0], 8, 8), "one": entry([], 8, 12)}
    write(folder / "model.safetensors", header, struct.pack("<3f", 1, 2, 3))
    files = WeightFiles(str(folder))
    assert {name: files.read(name).tolist() for name in header} == {"none": [], "w": [1, 2], "last": [[]] * 5, "one": 3}
    assert files.read("none").shape == (0, 3) and files.dtype("w") == torch.float32
