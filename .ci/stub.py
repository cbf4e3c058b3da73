"""Writes seq1f1b/_C.pyi: functions of the extension as csrc/binding has them, constants as the built one has them.

    python .ci/stub.py [--check]

With ``--check`` it ends with an error if the file says something else.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from seq1f1b import _C

ROOT = Path(__file__).resolve().parents[1]
STUB = ROOT / "seq1f1b" / "_C.pyi"
HEAD = '''"""The extension, by .ci/stub.py: csrc/binding says what each function does. Handles are capsules."""

from array import array
from typing import Any

_Ints = array[int]  # of 64 bits, or of 32
_Unit = tuple[int, int, int, int]  # pass, stage, micro-batch, segment

class ScheduleError(ValueError): ...

class PipelineError(RuntimeError):
    rank: int | None
    unit: str | None
    edge: str | None

'''
MAY_BE_LEFT_OUT = {"s1f_int32s": "_Ints | None", "s1f_int64s": "_Ints | None", "s1f_doubles": "array[float] | None"}
MAY_BE_LEFT_OUT |= {"s1f_bytes": "bytes | None", "s1f_path": "str | None", "bool": "bool", "PyObject *": "Any"}
TYPES = {"int32_t": "int", "int64_t": "int", "uint64_t": "int", "double": "float", "const char *": "str"}
TYPES |= {"void *": "int", "void": "None", "s1f_status": "None", **MAY_BE_LEFT_OUT}
METHOD = re.compile(r"^S1F_(?:METHOD|CORE\w*)\(([^)]*)\)", re.MULTILINE)
ROW = re.compile(r'S1F_ROW\(\s*(\w+),\s*"-> ([^:]*)')


def type_of(constant: object) -> str:
    if not isinstance(constant, tuple):
        return type(constant).__name__
    kinds = {type(item) for item in constant}
    return f"tuple[{'str' if kinds == {str} else 'Any'}, ...]"


def functions(text: str) -> Iterator[str]:
    """A line for each function that a C file defines."""
    results = dict(ROW.findall(re.sub(r'"\s*\n\s*"', "", text)))
    for inside in METHOD.findall(text):
        result, name, *pairs = (" ".join(word.split()) for word in inside.split(","))
        parameters: list[str] = []
        can_end = True
        for parameter, of_c in zip(pairs[::-2], pairs[-2::-2], strict=True):  # from the last one on
            can_end = can_end and of_c in MAY_BE_LEFT_OUT
            parameters.insert(0, f"{parameter}: {TYPES.get(of_c, 'Any')}{' = ...' if can_end else ''}, ")
        slash = "/" if parameters else ""
        yield f"def {name}({''.join(parameters)}{slash}) -> {results.get(name, TYPES.get(result, 'Any'))}: ...\n"


def stub() -> str:
    constants = [f"{name}: {type_of(getattr(_C, name))}\n" for name in dir(_C) if name.isupper()]
    files = sorted((ROOT / "csrc" / "binding").glob("*.c"))
    return HEAD + "".join(
        [*constants, "\n", *(line for path in files for line in functions(path.read_text(encoding="utf-8")))]
    )


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        STUB.write_text(stub(), encoding="utf-8")
    elif STUB.read_text(encoding="utf-8") != stub():
        sys.exit("seq1f1b/_C.pyi says something else than csrc/binding: python .ci/stub.py")
