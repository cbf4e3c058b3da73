"""Operations around attention with a prefix: copies of keys and values to the cache, merges of results over ranges of
keys, and sums of gradients.

All tensors are (batch, heads, rows, head_dim). Results lie in token-major memory: (batch, rows, heads, head_dim). Sums
are taken in float32 and rounded once.

Each function launches one kernel of this package's library (kernels/cuda/sm80_attention_parts.cu), or several torch ops
if the library was not built or lacks a kernel for the call. A kernel is checked at its first use on a device
(proofs.py). ``SEQ1F1B_CUDA_KERNELS=library`` uses torch's ops only; ``own``, for tests and benchmarks, uses
the kernels without the check.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b.device import kernel_library, proofs
from seq1f1b.device.kernel_library import Operation
from seq1f1b.device.proofs import Use, apart, memory_of, numbers
from seq1f1b.placement import stream_of

__all__: list[str] = []

WHATS = "merge", "add", "finish", "total"  # as attention_parts_arguments.h numbers them

MOST_PARTS = 8
"""Most tensors whose total one launch computes."""

Tensors = tuple[Tensor, ...]


class Work(NamedTuple):
    """An operation of attention_parts_arguments.h, on the slabs' rows from ``begin`` on."""

    what: str
    parts: Tensors
    slabs: Tensors = ()
    outs: Tensors = ()
    lses: Tensors = ()
    store: bool = False
    begin: int = 0


def copy(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> None:
    """Writes k and v to rows of slabs of the same dtype."""
    _run(Work("finish", (k, v), outs=(to_k, to_v), store=True))  # the kernel adds 0, so -0 becomes 0


def merge(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention over two disjoint sets of keys.

    Args:
        own, before: (batch, heads, rows, head_dim); zeros in rows without a visible key.
        own_lse, before_lse: (batch, heads, rows), logarithms of the sums; -inf in rows without a visible key.
    Returns:
        out in own's dtype and token-major memory, and a contiguous lse.
    """
    own_lse, before_lse = own_lse.contiguous(), before_lse.contiguous()
    out, lse = token_major_empty(own), torch.empty_like(own_lse)
    _run(Work("merge", (own, before), outs=(out,), lses=(own_lse, before_lse, lse)))
    return out, lse


def add(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0) -> None:
    """Adds the parts to rows of the slabs dk and dv, from row ``begin`` on; with ``store``, overwrites the rows."""
    _run(Work("add", (part_k, part_v), (dk, dv), store=store, begin=begin))


def finish(
    dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the sums of the parts and the rows of dk and dv from row ``begin`` on, in token-major memory.

    The sums have the parts' dtype; dk and dv do not change. With ``store``, dk and dv hold no values yet: the parts
    are the sums, and token-major parts are returned without a copy.
    """
    if store and _is_token_major(part_k) and _is_token_major(part_v):
        return part_k, part_v
    own = token_major_empty(part_k), token_major_empty(part_v)
    _run(Work("finish", (part_k, part_v), (dk, dv), own, store=store, begin=begin))
    return own


def total(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the parts in token-major memory; a single token-major part is returned without a copy."""
    if len(parts) == 1 and _is_token_major(parts[0]):
        return parts[0]
    out = token_major_empty(parts[0])
    _run(Work("total", tuple(parts), outs=(out,)))
    return out


def _is_token_major(t: Tensor) -> bool:
    return t.transpose(1, 2).is_contiguous()


def token_major_empty(like: Tensor) -> Tensor:
    _, heads, rows, head_dim = like.shape
    row = heads * head_dim
    return like.new_empty_strided(like.shape, (rows * row, head_dim, row, 1))


def _run(work: Work) -> None:
    operation = _operation(work.parts[0], work.parts[-1])
    if operation is None or not _launch(operation, work):
        _by_torch(work)


# -- by kernels ------------------------------------------------------------------------------------------------------


def _operation(of_k: Tensor, of_v: Tensor) -> Operation | None:
    """Returns the operation to launch; None: use torch's ops."""
    if of_k.dtype not in kernel_library.CODES:
        return None
    found = kernel_library.wanted(kernel_library.PARTS, of_k.device)
    if found is None or kernel_library.preferred:
        return found
    use = Use(kernel_library.PARTS, of_k.dtype, of_k.shape[3], of_v.shape[3], of_k.device)
    if use.head_dim % 8 or use.v_head_dim % 8:
        return None
    is_right = proofs.holds(use, functools.partial(prove, found, use), "Torch's ops, which are slower,")
    return found if is_right else None


def _launch(operation: Operation, work: Work) -> bool:
    """Launches on the current stream of the tensors' device; returns False if no kernel takes the tensors' layout."""
    first, index = work.parts[0], work.parts[0].get_device()
    arguments = kernel_library.PARTS_ARGUMENTS.pack(
        WHATS.index(work.what), kernel_library.CODES[first.dtype], work.store, len(work.parts),
        *first.shape, work.parts[-1].shape[3],
        *_rows(work.parts, MOST_PARTS), *_rows(work.slabs, 2, work.begin), *_rows(work.outs, 2),
        *([t.data_ptr() for t in work.lses] or (0, 0, 0)),
    )  # fmt: skip
    with torch.cuda.device(index):
        try:
            operation.launch(arguments, stream_of(index))
        except ValueError:
            return False
    return True


def _rows(tensors: Tensors, most: int, begin: int = 0) -> list[int]:
    """Returns, for each tensor, the address of row ``begin`` and the strides of batch, head and row; then zeros."""
    found = []
    for t in tensors:
        *strides, last = t.stride()  # heads that are not contiguous get address 0, which the launcher refuses
        found += [t.data_ptr() + begin * strides[2] * t.element_size() if last == 1 else 0, *strides]
    return found + [0] * (4 * (most - len(tensors)))


# -- by torch's ops --------------------------------------------------------------------------------------------------


def _by_torch(work: Work) -> None:
    parts, outs = work.parts, work.outs
    if work.what == "merge":
        own_lse, before_lse, lse = work.lses
        # The least finite number replaces -inf, because the difference of two -inf is NaN.
        share = torch.sigmoid(own_lse - before_lse.clamp_min(torch.finfo(before_lse.dtype).min))[..., None]
        torch.addcmul(parts[0] * share, parts[1], 1.0 - share, out=outs[0])
        torch.logaddexp(own_lse, before_lse, out=lse)
    elif work.what == "total":
        *first, last = parts
        if not first:
            outs[0].copy_(last)
            return
        wide = first[0] if len(first) == 1 or last.dtype == torch.float64 else first[0].float()
        torch.add(functools.reduce(torch.add, first[1:], wide), last, out=outs[0])
    else:
        slabs = tuple([t.narrow(2, work.begin, parts[0].shape[2]) for t in work.slabs])
        for i, part in enumerate(parts):
            to = outs[i] if outs else slabs[i]
            to.copy_(part) if work.store else torch.add(slabs[i], part, out=to)


# -- the check at the first use --------------------------------------------------------------------------------------


def prove(operation: Operation, use: Use) -> None:
    """Compares the kernels with torch's ops in float64 on small cases, some rows without a visible key.

    Memory around the rows must not change.

    Raises:
        AssertionError, RuntimeError, ...: a kernel is wrong, or does not run.
    """
    batch, heads, rows, behind, drawn, dtype = 2, 3, 37, 3, numbers(), use.dtype

    def part(head_dim: int, dtype: torch.dtype, token_major: bool = False) -> Tensor:
        """Returns rows within a longer tensor."""
        sizes = (batch, rows + 2 * behind, heads) if token_major else (batch, heads, rows + 2 * behind)
        memory = drawn(*sizes, head_dim).to(use.device, dtype)
        return (memory.transpose(1, 2) if token_major else memory)[:, :, behind:-behind]

    def pair(dtype: torch.dtype, token_major: bool = False) -> Tensors:
        return tuple(part(head_dim, dtype, token_major) for head_dim in (use.head_dim, use.v_head_dim))

    def lse(none: slice) -> Tensor:
        found = drawn(batch, heads, rows).to(use.device) * 3
        found[:, 1:, none] = float("-inf")
        return found

    def run(work: Work) -> None:
        for t in (*work.outs, *work.lses[2:], *(work.slabs if work.store else ())):
            t.fill_(float("nan"))  # shows in the results if the kernel reads it
        given = {name: getattr(work, name) for name in ("parts", "slabs", "outs", "lses")}
        wide: dict[str, Any] = {name: tuple(map(_widened, tensors)) for name, tensors in given.items()}
        if not _launch(operation, work):
            raise AssertionError("its launcher does not take a case that it must")
        _by_torch(work._replace(**wide))
        for name, tensors in given.items():
            for i, (t, true) in enumerate(zip(tensors, wide[name], strict=True)):
                _hold(f"{name}[{i}] of {work.what}{', stored' * work.store}", memory_of(t), memory_of(true))

    with apart(use.device):
        parts, lses = (part(use.head_dim, dtype, True), part(use.head_dim, dtype)), (lse(slice(3, 6)), lse(slice(5, 9)))
        for t, of_part in zip(parts, lses, strict=True):
            t[of_part == float("-inf")] = 0.0
        run(Work("merge", parts, outs=(part(use.head_dim, dtype, True),), lses=(*lses, lse(slice(0)))))
        for count in (2, MOST_PARTS):
            alike = tuple(part(use.head_dim, dtype, i != 1) for i in range(count))
            run(Work("total", alike, outs=(part(use.head_dim, dtype, True),)))
        for store in (False, True):
            slabs = pair(torch.float32)
            run(Work("add", pair(dtype, store), slabs, store=store))
            run(Work("finish", pair(dtype, store), slabs, pair(dtype, True), store=store))
        run(Work("finish", pair(dtype), outs=pair(dtype), store=True))  # a copy


def _widened(t: Tensor) -> Tensor:
    """Returns the tensor, with all of its memory, in float64."""
    return memory_of(t).double().as_strided(t.shape, t.stride(), t.storage_offset())


def _hold(name: str, got: Tensor, truth: Tensor) -> None:
    """Raises AssertionError if ``got`` is not ``truth`` (float64) up to a sum in float32 and one rounding."""
    allowed = torch.finfo(got.dtype).eps * (0.6 * truth.abs() + 0.01) + 1e-6
    is_same = (got.double() == truth) | (got.isnan() & truth.isnan())  # infinities, and memory left as NaN
    count = int((~(((got.double() - truth).abs() <= allowed) | is_same)).sum())
    if count:
        raise AssertionError(f"{count} of {got.numel()} elements of {name} are wrong")
