"""Adds the failed unit, and a hint at the likely cause, to errors of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from seq1f1b import _C
from seq1f1b.engine.stage import Stage
from seq1f1b.unit import Unit, unit_of

__all__: list[str] = []

_HINTS = {
    "leaf Variable that requires grad is being used in an in-place operation": " If it is an input of the stage, the "
    "stage must work on a copy: x = x * 2 in place of x *= 2",
    "could not create a primitive": ". oneDNN often says so where no memory is left: see ulimit -v, or the limit of "
    "the job",
    "support saved tensor hooks": " A checkpoint has such hooks, and so has each block of Memory.blocks: use "
    "Memory(recompute=...) for a stage that calls torch.func",
    "does not require grad and does not have a grad_fn": ". Under Memory.recompute F runs without a graph: take the "
    "gradient by torch.func.grad, or leave the stage's units out of Memory.recompute",
    "^Target -?[0-9]+ is out of bounds": ". A target of this segment is no class of the loss: targets lie below the "
    "size of the output's last dimension, and those of -100 are not counted",
    "index out of range in self": ". An id of this segment is no row of its embedding: in stage {stage}, {rows}",
    # Errors of torch and Python if a module for tokens, (batch, tokens), gets hidden states.
    "for argument #1 'indices'|used as indices must be|values to unpack|one_hot is only applicable": ". Stage {stage} "
    "received hidden states from stage {before} and treats them as tokens: did every rank build the whole model? Give "
    "each rank the layers of its own stages",
}
"""Patterns of error texts of torch, Python and oneDNN, and the hint that is added to each."""


def unit_text(executor: Any) -> str:
    """Returns the last unit that the executor began, with its stage; "" before the first unit."""
    unit = _last_unit(executor)
    return "" if unit is None else f"[{unit.stage}]{unit}"


def _last_unit(executor: Any) -> Unit | None:
    return None if executor is None else unit_of(_C.executor_last_unit(executor))


def explained(error: BaseException, executor: Any, stages: Mapping[int, Stage]) -> BaseException:
    """Returns the error with the unit in front of its text, and a hint behind the text.

    torch turns each failure of our ops into a RuntimeError: the returned error has the original type.
    """
    place, failure = unit_text(executor), _C.take_op_failure()
    if failure is not None and isinstance(error, RuntimeError) and str(failure) in str(error):
        error = failure
    if type(error) in (ValueError, TypeError, RuntimeError, IndexError):
        before = "" if place in str(error) else f"{place}: "
        error.args = (f"{before}{error}{_hint(str(error), _last_unit(executor), stages)}",)
    return error


def _hint(text: str, unit: Unit | None, stages: Mapping[int, Stage]) -> str:
    hint = next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")
    if "{stage}" not in hint:
        return hint
    if unit is None or unit.kind != "F" or ("{before}" in hint and unit.stage == 0):
        return ""
    parts = [named for module in stages[unit.stage].modules for named in module.named_modules()]
    rows = [f"{n or 'the embedding'} has {m.num_embeddings} rows" for n, m in parts if isinstance(m, nn.Embedding)]
    return hint.format(stage=unit.stage, before=unit.stage - 1, rows=", ".join(rows)) if rows else ""
