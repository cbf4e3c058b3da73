"""Work beside attention where there is a prefix: keys and values are written to the cache, results over ranges of keys
are merged, and their gradients added up.

All tensors are (batch, heads, rows, head_dim). What these functions return lies in token-major memory: (batch, rows,
heads, head_dim). Sums are taken in float32 and rounded once.

Each function is one kernel of this package's library (kernels/cuda/sm80_attention_parts.cu), or several of torch's ops
where that was not built or has no kernel for the call. A kernel proves itself at its first use on a device (proof.py).
``SEQ1F1B_CUDA_KERNELS=library`` takes torch's ops alone; ``own``, for tests and benchmarks, takes the kernels without
that check.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from seq1f1b import proof
from seq1f1b.device import kernel_library, kernel_tables
from seq1f1b.device.kernel_tables import Operation
from seq1f1b.proof import Use

__all__: list[str] = []

WHATS = "merge", "add", "finish", "total"  # as attention_parts_arguments.h numbers them

MOST_PARTS = 8
"""Most tensors whose total one launch computes."""

Tensors = tuple[Tensor, ...]


def copy(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> None:
    """Writes k and v to rows of slabs of their dtype. A zero loses its sign by the kernel, which adds it to another."""
    _run("finish", True, (k, v), (), (to_k, to_v))


def merge(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        own, before: (batch, heads, rows, head_dim); zeros in rows that see no key.
        own_lse, before_lse: (batch, heads, rows), logarithms of the sums; -inf in rows that see no key.
    Returns:
        out of own's dtype, in token-major memory, and lse, contiguous.
    """
    own_lse, before_lse = own_lse.contiguous(), before_lse.contiguous()
    out, lse = _token_major_empty(own), torch.empty_like(own_lse)
    _run("merge", False, (own, before), (), (out,), (own_lse, before_lse, lse))
    return out, lse


def add(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0) -> None:
    """Adds the parts to rows of the slabs dk and dv, from row ``begin`` on; with ``store`` writes them there, and reads
    nothing."""
    _run("add", store, (part_k, part_v), (dk, dv), (), begin=begin)


def finish(
    dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Sums of part_k and as many rows of dk, from row ``begin`` on, and of part_v and those of dv, in the parts' dtype
    and token-major memory; dk and dv stay as they are. With ``store`` these hold nothing yet, and the parts are the
    sums: parts that lie so are returned themselves.
    """
    if store and _is_token_major(part_k) and _is_token_major(part_v):
        return part_k, part_v
    own = _token_major_empty(part_k), _token_major_empty(part_v)
    _run("finish", store, (part_k, part_v), (dk, dv), own, begin=begin)
    return own


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum in their dtype and token-major memory; of one part that lies so, the part itself."""
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
    """One of the operations of attention_parts_arguments.h; the slabs' rows are meant from ``begin`` on."""
    operation = _operation(what, parts[0], parts[-1])
    if operation is None or not _launch(operation, what, store, parts, slabs, outs, lses, begin):
        _by_torch(what, store, parts, slabs, outs, lses, begin)


# -- by kernels ------------------------------------------------------------------------------------------------------

_proofs = proof.Proofs(
    f"Torch's ops, which are slower, take its place there. {proof.REBUILD}", "the CUDA kernel attention_parts "
)


def _operation(what: str, of_k: Tensor, of_v: Tensor) -> Operation | None:
    """The operation whose kernel is to be launched; None: torch's ops are."""
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
    """Launches on the current stream of the tensors' device; False: there is no kernel for tensors that lie so."""
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
    """For each tensor the address of row ``begin``, and its strides of batch, head and row; zeros up to ``most``
    tensors. The launcher takes no address of 0, as of tensors whose heads do not lie in one piece."""
    found = []
    for t in tensors:
        *strides, last = t.stride()
        found += [t.data_ptr() + begin * strides[2] * t.element_size() if last == 1 else 0, *strides]
    return found + [0] * (4 * (most - len(tensors)))


# -- by torch's ops --------------------------------------------------------------------------------------------------


def _by_torch(
    what: str, store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = (), begin: int = 0
) -> None:
    if what == "merge":
        own_lse, before_lse, lse = lses
        # The least finite number in place of -inf: the difference of two -inf is no number.
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
    """Runs the kernel on small cases, and torch's ops in float64: few rows, of which some see no key, within memory
    that must stay as it is.

    Raises:
        AssertionError, RuntimeError, ...: it is wrong, or does not run.
    """
    batch, heads, rows, behind, numbers = 2, 3, 37, 3, proof.numbers()

    def part(head_dim: int, dtype: torch.dtype, token_major: bool = False) -> Tensor:
        """Rows within memory that is longer."""
        sizes = (batch, rows + 2 * behind, heads) if token_major else (batch, heads, rows + 2 * behind)
        memory = numbers(*sizes, head_dim).to(use.device, dtype)
        return (memory.transpose(1, 2) if token_major else memory)[:, :, behind:-behind]

    def lse(none: slice) -> Tensor:
        found = numbers(batch, heads, rows).to(use.device) * 3
        found[:, 1:, none] = float("-inf")
        return found

    def run(store: bool, parts: Tensors, slabs: Tensors, outs: Tensors, lses: Tensors = ()) -> None:
        for t in (*outs, *lses[2:], *(slabs if store else ())):
            t.fill_(float("nan"))  # what is not to be read
        given = parts, slabs, outs, lses
        wide = [tuple([_memory(t).double().as_strided(t.shape, t.stride(), t.storage_offset()) for t in tensors])
                for tensors in given]  # fmt: skip
        if not _launch(operation, use.kernel, store, *given):
            raise AssertionError("its launcher does not take a case that it must")
        _by_torch(use.kernel, store, wide[0], wide[1], wide[2], wide[3])
        for name, got, truth in zip(("parts", "slabs", "outs", "lse"), given, wide, strict=True):
            for i, (t, true) in enumerate(zip(got, truth, strict=True)):
                _hold(f"{name}[{i}]{' that is stored' * store}", _memory(t), _memory(true))

    with proof.apart(use.device):
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
    """All of its storage."""
    return t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def _hold(what: str, got: Tensor, truth: Tensor) -> None:
    """Raises where ``got`` is not ``truth`` (float64), rounded once to its dtype from a sum in float32."""
    allowed = torch.finfo(got.dtype).eps * (0.6 * truth.abs() + 0.01) + 1e-6
    is_same = (got.double() == truth) | (got.isnan() & truth.isnan())  # for infinities, and what is not to be written
    count = int((~(((got.double() - truth).abs() <= allowed) | is_same)).sum())
    if count:
        raise AssertionError(f"{count} of {got.numel()} elements of {what} are wrong")
