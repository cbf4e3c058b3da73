"""Operations around attention with a prefix: copies of keys and values to the cache, merges of results over ranges of
keys, and sums of gradients.

All tensors are (batch, heads, rows, head_dim). Results lie in token-major memory: (batch, rows, heads, head_dim). Sums
are taken in float32 and rounded once.

Each function launches one kernel of this package's library (kernels/cuda/sm80_attention_parts.cu), or several torch ops
if the library was not built or lacks a kernel for the call. A kernel is checked at its first use on a device
(attention_proof.py). ``SEQ1F1B_CUDA_KERNELS=library`` uses torch's ops only; ``own``, for tests and benchmarks, uses
the kernels without the check.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from seq1f1b.device import kernel_library, kernel_tables
from seq1f1b.device.attention_proof import REBUILD, Proofs, Use, apart, numbers
from seq1f1b.device.kernel_tables import Operation

__all__: list[str] = []

WHATS = "merge", "add", "finish", "total"  # as attention_parts_arguments.h numbers them

MOST_PARTS = 8
"""Most tensors whose total one launch computes."""

Tensors = tuple[Tensor, ...]


def copy(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> None:
    """Writes k and v to rows of slabs of the same dtype."""
    _run("finish", True, (k, v), (), (to_k, to_v))  # the kernel adds 0, so -0 becomes 0


def merge(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention over two disjoint sets of keys.

    Args:
        own, before: (batch, heads, rows, head_dim); zeros in rows without a visible key.
        own_lse, before_lse: (batch, heads, rows), logarithms of the sums; -inf in rows without a visible key.
    Returns:
        out in own's dtype and token-major memory, and a contiguous lse.
    """
    own_lse, before_lse = own_lse.contiguous(), before_lse.contiguous()
    out, lse = _token_major_empty(own), torch.empty_like(own_lse)
    _run("merge", False, (own, before), (), (out,), (own_lse, before_lse, lse))
    return out, lse


def add(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0) -> None:
    """Adds the parts to rows of the slabs dk and dv, from row ``begin`` on; with ``store``, overwrites the rows."""
    _run("add", store, (part_k, part_v), (dk, dv), (), begin=begin)


def finish(
    dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns the sums of the parts and the rows of dk and dv from row ``begin`` on, in token-major memory.

    The sums have the parts' dtype; dk and dv do not change. With ``store``, dk and dv hold no values yet: the parts
    are the sums, and token-major parts are returned without a copy.
    """
    if store and _is_token_major(part_k) and _is_token_major(part_v):
        return part_k, part_v
    own = _token_major_empty(part_k), _token_major_empty(part_v)
    _run("finish", store, (part_k, part_v), (dk, dv), own, begin=begin)
    return own


def total(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the parts in token-major memory; a single token-major part is returned without a copy."""
    if len(parts) == 1 and _is_token_major(parts[0]):
        return parts[0]
    out = _token_major_empty(parts[0])
    _run("total", False, tuple(parts), (), (out,))
    return out


def _is_token_major(t: Tensor) -> bool:
    return t.transpose(1, 2).is_contiguous()


def _token_major_empty(like: Tensor) -> Tensor:
    _, heads, rows, head_dim = like.shape
    row = heads * head_dim
    return like.new_empty_strided(like.shape, (rows * row, head_dim, row, 1))


def _run(
    what: str, store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = (), begin: int = 0
) -> None:
    """Runs an operation of attention_parts_arguments.h on the slabs' rows from ``begin`` on."""
    operation = _operation(what, parts[0], parts[-1])
    if operation is None or not _launch(operation, what, store, parts, slabs, outs, lses, begin):
        _by_torch(what, store, parts, slabs, outs, lses, begin)


# -- by kernels ------------------------------------------------------------------------------------------------------

_proofs = Proofs(f"Torch's ops, which are slower, take its place there. {REBUILD}", "the CUDA kernel attention_parts ")


def _operation(what: str, of_k: Tensor, of_v: Tensor) -> Operation | None:
    """Returns the operation to launch; None: use torch's ops."""
    if of_k.dtype not in kernel_library.CODES:
        return None
    found = kernel_library.wanted(kernel_library.PARTS, of_k.device)
    if found is None or kernel_library.preferred:
        return found
    use = Use(what, of_k.dtype, of_k.shape[3], of_v.shape[3], of_k.device)
    if use.head_dim % 8 or use.v_head_dim % 8:
        return None
    return found if _proofs.holds(use, functools.partial(prove, found, use)) else None


def _launch(
    operation: Operation, what: str, store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = (),
    begin: int = 0,
) -> bool:  # fmt: skip
    """Launches on the current stream of the tensors' device; returns False if no kernel takes the tensors' layout."""
    batch, heads, rows, head_dim = parts[0].shape
    index = parts[0].get_device()
    arguments = kernel_tables.PARTS.pack(
        WHATS.index(what), kernel_library.CODES[parts[0].dtype], store, len(parts),
        batch, heads, rows, head_dim, parts[-1].shape[3],
        *_rows(parts, MOST_PARTS), *_rows(slabs, 2, begin), *_rows(outs, 2),
        *([t.data_ptr() for t in lses] or (0, 0, 0)),
    )  # fmt: skip
    with kernel_library.on(index):
        try:
            operation.launch(arguments, kernel_library.raw_stream(index))
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


def _by_torch(
    what: str, store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = (), begin: int = 0
) -> None:
    if what == "merge":
        own_lse, before_lse, lse = lses
        # The least finite number replaces -inf, because the difference of two -inf is NaN.
        share = torch.sigmoid(own_lse - before_lse.clamp_min(torch.finfo(before_lse.dtype).min))[..., None]
        torch.addcmul(parts[0] * share, parts[1], 1.0 - share, out=outs[0])
        torch.logaddexp(own_lse, before_lse, out=lse)
    elif what == "total":
        *first, last = parts
        if not first:
            outs[0].copy_(last)
            return
        wide = first[0] if len(first) == 1 or last.dtype == torch.float64 else first[0].float()
        torch.add(functools.reduce(torch.add, first[1:], wide), last, out=outs[0])
    else:
        rows = parts[0].shape[2]
        slabs = tuple([t.narrow(2, begin, rows) for t in slabs])
        for i, part in enumerate(parts):
            to = outs[i] if outs else slabs[i]
            to.copy_(part) if store else torch.add(slabs[i], part, out=to)


# -- the check at the first use --------------------------------------------------------------------------------------


def prove(operation: Operation, use: Use) -> None:
    """Compares the kernel with torch's ops in float64 on small cases, some rows without a visible key.

    Memory around the rows must not change.

    Raises:
        AssertionError, RuntimeError, ...: the kernel is wrong, or does not run.
    """
    batch, heads, rows, behind, drawn = 2, 3, 37, 3, numbers()

    def part(head_dim: int, dtype: torch.dtype, token_major: bool = False) -> Tensor:
        """Returns rows within a longer tensor."""
        sizes = (batch, rows + 2 * behind, heads) if token_major else (batch, heads, rows + 2 * behind)
        memory = drawn(*sizes, head_dim).to(use.device, dtype)
        return (memory.transpose(1, 2) if token_major else memory)[:, :, behind:-behind]

    def lse(none: slice) -> Tensor:
        found = drawn(batch, heads, rows).to(use.device) * 3
        found[:, 1:, none] = float("-inf")
        return found

    def run(store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = ()) -> None:
        for t in (*outs, *lses[2:], *(slabs if store else ())):
            t.fill_(float("nan"))  # shows in the results if the kernel reads it
        given = parts, slabs, outs, lses
        wide = [tuple([_memory(t).double().as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors])
                for tensors in given]  # fmt: skip
        if not _launch(operation, use.kernel, store, *given):
            raise AssertionError("its launcher does not take a case that it must")
        _by_torch(use.kernel, store, wide[0], wide[1], wide[2], wide[3])
        for name, got, truth in zip(("parts", "slabs", "outs", "lse"), given, wide, strict=True):
            for i, (t, true) in enumerate(zip(got, truth, strict=True)):
                _hold(f"{name}[{i}]{' that is stored' * store}", _memory(t), _memory(true))

    with apart(use.device):
        dtype, sizes = use.dtype, (use.head_dim, use.v_head_dim)
        if use.kernel == "merge":
            parts, lses = (part(sizes[0], dtype, True), part(sizes[0], dtype)), (lse(slice(3, 6)), lse(slice(5, 9)))
            for t, of_part in zip(parts, lses, strict=True):
                t[of_part == float("-inf")] = 0.0
            run(False, parts, (), (part(sizes[0], dtype, True),), (*lses, lse(slice(0))))
        elif use.kernel == "total":
            for count in (2, MOST_PARTS):
                alike = tuple(part(sizes[0], dtype, i != 1) for i in range(count))
                run(False, alike, (), (part(sizes[0], dtype, True),))
        else:
            for store in (False, True):
                slabs = tuple(part(size, torch.float32) for size in sizes)
                outs = tuple(part(size, dtype, True) for size in sizes) if use.kernel == "finish" else ()
                run(store, tuple(part(size, dtype, store) for size in sizes), slabs, outs)
            if use.kernel == "finish":  # a copy
                run(True, tuple(part(size, dtype) for size in sizes), (), tuple(part(size, dtype) for size in sizes))


def _memory(t: Tensor) -> Tensor:
    """Returns the tensor's whole storage as one dimension."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def _hold(what: str, got: Tensor, truth: Tensor) -> None:
    """Raises AssertionError if ``got`` is not ``truth`` (float64) up to a sum in float32 and one rounding."""
    allowed = torch.finfo(got.dtype).eps * (0.6 * truth.abs() + 0.01) + 1e-6
    is_same = (got.double() == truth) | (got.isnan() & truth.isnan())  # infinities, and memory left as NaN
    count = int((~(((got.double() - truth).abs() <= allowed) | is_same)).sum())
    if count:
        raise AssertionError(f"{count} of {got.numel()} elements of {what} are wrong")
