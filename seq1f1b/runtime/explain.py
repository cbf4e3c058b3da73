"""Errors of a step, told with the unit at which they arose and what they are likely to mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from seq1f1b import _C
from seq1f1b.runtime.stage import Stage
from seq1f1b.unit import Unit, unit_of

__all__: list[str] = []

_TARGET = re.compile(r"^Target -?[0-9]+ is out of bounds")  # of cross_entropy
_LIKELY = {
    "leaf Variable that requires grad is being used in an in-place operation": " If it is an input of the stage, the "
    "stage must work on a copy: x = x * 2 in place of x *= 2",
    "could not create a primitive": ". oneDNN often says so where no memory is left: see ulimit -v, or the limit of "
    "the job",
    "support saved tensor hooks": " A checkpoint has such hooks, and so has each block of Memory.blocks: use "
    "Memory(recompute=...) for a stage that calls torch.func",
    "does not require grad and does not have a grad_fn": ". Under Memory.recompute F runs without a graph: take the "
    "gradient by torch.func.grad, or leave the stage's units out of Memory.recompute",
}
"""Explains error texts of torch and oneDNN that have a likely cause."""

# What torch and Python say where a module that wants tokens, (batch, tokens), gets hidden states.
_TOKENS_WANTED = (
    "for argument #1 'indices'",
    "used as indices must be",
    "values to unpack",
    "one_hot is only applicable",
)


def unit_text(executor: Any) -> str:
    """The unit at which the executor left the step, with its stage; "" where the step did not begin."""
    unit = _last_unit(executor)
    return "" if unit is None else f"[{unit.stage}]{unit}"


def explained(error: BaseException, executor: Any, stages: Mapping[int, Stage]) -> BaseException:
    """The error with its unit in front, and a hint behind it.

    An op of ours that failed raises RuntimeError by way of torch: gives back the kind it failed with.
    """
    unit = unit_text(executor)
    failure = _C.take_op_failure()
    if failure is not None and isinstance(error, RuntimeError) and str(failure) in str(error):
        error = failure
    for words, meaning in _LIKELY.items():
        if type(error) is RuntimeError and words in str(error):
            error.args = (f"{error}{meaning}",)
    if type(error) in (ValueError, TypeError, RuntimeError, IndexError) and unit not in str(error):
        error.args = (f"{unit}: {error}{_hint(error, executor, stages)}",)
    return error


def _last_unit(executor: Any) -> Unit | None:
    return None if executor is None else unit_of(_C.executor_last_unit(executor))


def _hint(error: BaseException, executor: Any, stages: Mapping[int, Stage]) -> str:
    """Explains an error in a forward where its cause is likely known, else returns ""."""
    unit = _last_unit(executor)
    if unit is None or unit.kind != "F":
        return ""
    if isinstance(error, IndexError) and _TARGET.search(str(error)):
        return (
            ". A target of this segment is no class of the loss: targets lie below the size of the output's last "
            "dimension, and those of -100 are not counted"
        )
    embeddings = {
        name: part.num_embeddings
        for module in stages[unit.stage].modules
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding)
    }
    if not embeddings:
        return ""
    if "index out of range in self" in str(error):
        rows = ", ".join(f"{name or 'the embedding'} has {count} rows" for name, count in embeddings.items())
        return f". An id of this segment is no row of its embedding: in stage {unit.stage}, {rows}"
    if unit.stage == 0 or not any(text in str(error) for text in _TOKENS_WANTED):
        return ""
    return (
        f". Stage {unit.stage} received hidden states from stage {unit.stage - 1} and treats them as tokens: did every "
        "rank build the whole model? Give each rank the layers of its own stages"
    )
