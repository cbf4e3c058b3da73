"""Is what a peer, or a stranger in its place, sends ever more than data?"""

from __future__ import annotations

import ast
import math
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest

import seq1f1b
from seq1f1b.report.report import EdgeReport
from seq1f1b.transport.values import pack, unpack

PACKAGE = Path(seq1f1b.__file__).parent


class Pair(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**70), 0.1, math.inf, "", "text, \u00e4\n\ud800", b"\x00\xff", [], (), {}, [1, (2, [None])],
        {(0, 1): b"x", "a": {"tuple": [1]}, 3: ({},)}, {"dict": {"bytes": "00"}},
        seq1f1b.Unit("F", 0, 1, 2), EdgeReport(0, 1, 1, "shm"), (seq1f1b.Unit("W", 0, 1, 2), 0.5),
    ],
)  # fmt: skip
def test_a_value_comes_back_as_it_was(value):
    found = unpack(pack(value))
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value)  # of the parts, too: a tuple is no list


def test_not_a_number_comes_back():
    assert math.isnan(unpack(pack(math.nan)))


@pytest.mark.parametrize("value", [object(), {1, 2}, Pair(1, 2), [lambda: 0], {"a": (3, 1j)}, pickle])
def test_what_is_no_value_is_refused(value):
    with pytest.raises(TypeError, match="ranks tell each other None, bool, int, float, str, bytes"):
        pack(value)


class Payload:
    def __reduce__(self):
        return (pytest.fail, ("code of a peer was run",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Payload()), b"", b"[", b"\xff", b'{"tuple": 3}', b'{"a": 1}', b'{"record": ["Path", ["/"]]}',
        b'{"record": ["Unit", [1]]}', b'{"bytes": "x"}', b'{"tuple": [], "dict": []}', b"{}", b'{"dict": [[1]]}',
        b"[" * 100_000, b'{"dict": [[[1], 2]]}',
    ],
)  # fmt: skip
def test_what_is_no_packed_value_is_a_value_error(data):
    with pytest.raises(ValueError):
        unpack(data)


def test_nothing_in_the_package_reads_pickles():
    """Nor asks torch to do so on what peers or files give: that would run their code."""
    unsafe = {"pickle", "cPickle", "dill", "shelve", "marshal", "cloudpickle"}
    torchs = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list"}
    for file in PACKAGE.rglob("*.py"):
        if file.name == "launcher.py":  # it and the processes that it started itself, in a folder of its user's
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not unsafe & {name.partition(".")[0] for name in names}, file
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert not (node.value.id in ("dist", "distributed") and node.attr in torchs), f"{file}:{node.lineno}"
                assert (node.value.id, node.attr) != ("torch", "load"), f"{file}:{node.lineno}"
