"""Runs one target of python_targets.py under atheris, libFuzzer for Python (pip install atheris).

    python tests/fuzz/fuzz_python.py TARGET [libFuzzer's options and folders]

Half of the new inputs are bytes that libFuzzer changes. The other half are changed as JSON: a value becomes an odd one,
goes, or comes twice. So they stay texts that a reader looks into.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["seq1f1b"]):
    import python_targets

ODD = [
    *(0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63, -(2**63), 10**400, -(10**400)),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf")),
    *(None, True, False, "", "1", "nan", "\ud800", "\0", [], {}, [[]], [1], "F0.0"),
    *("seq1f1b", "gpipe", "zb-h1", "seq-zbv", "interleaved-1f1b", {"cap": 1}, {"tuple": []}, {"bytes": "00"}),
    *({"dict": [[1, 2]]}, {"record": ["Unit", ["F", 0, 0, 0]]}, [0.5, 0.25], [[1.0, 2.0], [1.0, 2.0]]),
]


def places_of(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in it."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def edit(tree: Any, draw: random.Random) -> None:
    places = places_of(tree)
    if not places:
        return
    node, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind < 4:
        node[key] = copy.deepcopy(draw.choice(ODD))
    elif kind == 4:
        del node[key]
    elif kind == 5 and isinstance(node, list):
        node.insert(key, node[key])
    elif kind == 6:
        other, of = draw.choice(places)
        node[key] = json.loads(json.dumps(other[of]))
    elif type(node[key]) is int:
        node[key] += draw.choice((-1, 1))
    elif type(node[key]) is float:
        node[key] *= draw.choice((-1, 0.5, 2, 1e300))


def mutate(data: bytes, most: int, seed: int) -> bytes:
    draw = random.Random(seed)
    if draw.random() < 0.5:
        try:
            tree = [json.loads(data)]
            for _ in range(draw.choice((1, 1, 2, 4))):
                edit(tree, draw)
            changed = json.dumps(tree[0]).encode()
        except (ValueError, RecursionError, IndexError):
            changed = b""
        if 0 < len(changed) <= most:
            return changed
    return bytes(atheris.Mutate(data, most))


def main() -> None:
    target = python_targets.TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target, custom_mutator=mutate, internal_libfuzzer=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
