"""Work beside attention where there is a prefix: keys and values are written to the cache, results over ranges of keys
are merged, and their gradients added up.

All tensors are (batch, heads, rows, head_dim). What these functions return lies in token-major memory: (batch, rows,
heads, head_dim). Sums are taken in float32 and rounded once.

Each function is one kernel of this package's library (kernels/cuda/sm80_attention_parts.cu), or several of torch's ops
where that was not built or has no kernel for the call. A kernel proves itself at its first use on a device (proof.py);
one that fails ends the use of all of them there. ``SEQ1F1B_CUDA_KERNELS=library`` takes torch's ops alone; ``own``, for
tests and benchmarks, takes the kernels without that check.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from seq1f1b import _C, proof
from seq1f1b.device import kernel_library
from seq1f1b.proof import DTYPES, Use

__all__: list[str] = []

MOST_PARTS = 8
"""Most tensors whose total one launch computes."""


def copy(k: Tensor, v: Tensor, to_k: Tensor, to_v: Tensor) -> None:
    """Writes k and v to rows of slabs of their dtype. A zero loses its sign by the kernel, which adds it to another."""
    library = _library("finish", k.dtype, k.shape[3], v.shape[3], k.device)
    if library is not None and _launch(library, "finish", True, k, v, (k, v), (), (to_k, to_v)):
        return
    to_k.copy_(k)
    to_v.copy_(v)


def merge(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        own, before: (batch, heads, rows, head_dim); zeros in rows that see no key.
        own_lse, before_lse: (batch, heads, rows), logarithms of the sums; -inf in rows that see no key.
    Returns:
        out of own's dtype, in token-major memory, and lse, contiguous.
    """
    dtype, head_dim = own.dtype, own.shape[3]
    library = _library("merge", dtype, head_dim, head_dim, own.device)
    if library is not None and _are_results(own, own_lse, before, before_lse):
        own_lse, before_lse = own_lse.contiguous(), before_lse.contiguous()
        out, lse = _token_major_empty(own), torch.empty_like(own_lse)
        addresses = own_lse.data_ptr(), before_lse.data_ptr(), lse.data_ptr()
        if _launch(library, "merge", False, own, own, (own, before), (), (out,), addresses):
            return out, lse
    return _merge_by_torch(own, own_lse, before, before_lse)


def add(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0) -> None:
    """Adds the parts to rows of the slabs dk and dv, from row ``begin`` on; with ``store`` writes them there, and reads
    nothing."""
    library = _library("add", part_k.dtype, part_k.shape[3], part_v.shape[3], part_k.device)
    fits = library is not None and _are_slabs(dk, dv, part_k, part_v, begin)
    if fits and _launch(library, "add", store, part_k, part_v, (part_k, part_v), (dk, dv), (), begin=begin):
        return
    _add_by_torch(*_rows_from(begin, dk, dv, part_k), part_k, part_v, store)


def finish(
    dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool, begin: int = 0
) -> tuple[Tensor, Tensor]:
    """Sums of part_k and as many rows of dk, from row ``begin`` on, and of part_v and those of dv, in the parts' dtype
    and token-major memory; dk and dv stay as they are. With ``store`` these hold nothing yet, and the parts are the
    sums: parts that lie so are returned themselves.
    """
    if store and _is_token_major(part_k) and _is_token_major(part_v):
        return part_k, part_v
    library = _library("finish", part_k.dtype, part_k.shape[3], part_v.shape[3], part_k.device)
    if library is not None and _are_slabs(dk, dv, part_k, part_v, begin):
        parts, own = (part_k, part_v), (_token_major_empty(part_k), _token_major_empty(part_v))
        if _launch(library, "finish", store, part_k, part_v, parts, (dk, dv), own, begin=begin):
            return own
    return _finish_by_torch(*_rows_from(begin, dk, dv, part_k), part_k, part_v, store)


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum in their dtype and token-major memory; of one part that lies so, the part itself."""
    first = parts[0]
    if len(parts) == 1 and _is_token_major(first):
        return first
    library = _library("total", first.dtype, first.shape[3], first.shape[3], first.device)
    if library is not None and len(parts) <= MOST_PARTS and _are_alike(parts):
        out = _token_major_empty(first)
        if _launch(library, "total", False, first, first, tuple(parts), (), (out,)):
            return out
    return _total_by_torch(parts)


def _is_token_major(t: Tensor) -> bool:
    return t.transpose(1, 2).is_contiguous()


def _token_major_empty(like: Tensor) -> Tensor:
    _, heads, rows, head_dim = like.shape
    row = heads * head_dim
    return like.new_empty_strided(like.shape, (rows * row, head_dim, row, 1))


# -- by kernels ------------------------------------------------------------------------------------------------------

_proofs = proof.Proofs(
    kernel_library.PARTS, "Torch's ops, which are slower, take the place of all kernels of that family there.",
    ends_all=True,
)  # fmt: skip


def _library(what: str, dtype: torch.dtype, head_dim: int, v_head_dim: int, device: torch.device) -> object | None:
    """The library whose kernel is to be launched; None: torch's ops are."""
    if dtype not in DTYPES:
        return None
    wish = kernel_library.preferred
    if not wish and _proofs.results.get((what, dtype, head_dim, v_head_dim, device)):  # nearly always, on a GPU
        return _built_library(str(kernel_library.LIBRARY))
    wish = kernel_library.preference()
    if wish == "library" or (wish == "" and device.type != "cuda"):
        return None
    if wish == "own":
        return _own_library(str(kernel_library.LIBRARY))
    return _proven_library(what, dtype, head_dim, v_head_dim, device)


def _proven_library(
    what: str, dtype: torch.dtype, head_dim: int, v_head_dim: int, device: torch.device
) -> object | None:
    library = _built_library(str(kernel_library.LIBRARY))
    if library is None:
        return None
    found = _proofs.results.get((what, dtype, head_dim, v_head_dim, device))
    if found is None:
        use = Use(what, dtype, head_dim, v_head_dim, device)
        found = _can_run(use) and _proofs.holds(use, functools.partial(prove, library, use))
    return library if found else None


def _can_run(use: Use) -> bool:
    if use.head_dim % 8 or use.v_head_dim % 8:
        return False
    return use.device.type != "cuda" or torch.cuda.get_device_capability(use.device) >= (8, 0)


@functools.cache
def _built_library(path: str) -> object | None:
    """The library of that path, None if it was not built or cannot be used; the latter is said."""
    if not Path(path).exists():
        return None
    try:
        return _own_library(path)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"torch's ops take the place of the CUDA kernels {kernel_library.PARTS}: {error}. Install seq1f1b again to "
            "build them anew, or set SEQ1F1B_CUDA_KERNELS=library to do without them",
            stacklevel=2,
        )
        return None


@functools.cache
def _own_library(path: str) -> object:
    """As ``SEQ1F1B_CUDA_KERNELS=own`` asks for it.

    Raises:
        RuntimeError: there is none.
        OSError, ValueError: it cannot be used.
    """
    if not Path(path).exists():
        raise RuntimeError(
            f"SEQ1F1B_CUDA_KERNELS=own, but there is no {path}: install again with nvcc and SEQ1F1B_CUDA=1"
        )
    library = _C.cuda_library_open(path)
    _C.cuda_operation(library, kernel_library.PARTS)
    return library


def _are_alike(parts: Sequence[Tensor]) -> bool:
    dtype, shape = parts[0].dtype, parts[0].shape
    return all(part.dtype == dtype and part.shape == shape for part in parts)


def _are_results(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> bool:
    return (
        own_lse.dtype == before_lse.dtype == torch.float32
        and own_lse.shape == before_lse.shape == own.shape[:3]
        and before.dtype == own.dtype
        and before.shape == own.shape
    )


def _are_slabs(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, begin: int) -> bool:
    """Whether the parts are alike, and find their rows in the slabs from ``begin`` on."""
    batch, heads, rows, head_dim = part_k.shape
    v_head_dim, end = part_v.shape[3], begin + rows
    of_dk, of_dv = dk.shape, dv.shape
    return (
        dk.dtype == dv.dtype == torch.float32
        and part_k.dtype == part_v.dtype
        and part_v.shape == (batch, heads, rows, v_head_dim)
        and of_dk == (batch, heads, of_dk[2], head_dim)
        and of_dv == (batch, heads, of_dk[2], v_head_dim)
        and 0 <= begin <= end <= of_dk[2]
    )


def _launch(
    library: object, what: str, store: bool, like: Tensor, like_v: Tensor, parts: tuple[Tensor, ...],
    slabs: tuple[Tensor, ...], outs: tuple[Tensor, ...], lse: tuple[int, int, int] = (0, 0, 0), begin: int = 0,
) -> bool:  # fmt: skip
    """Launches on the current stream of the tensors' device; False: there is no kernel for tensors that lie so.

    The slabs' rows are meant from row ``begin`` on.
    """
    batch, heads, rows, head_dim = like.shape
    index = like.get_device()
    if not kernel_library.is_current(index):
        with torch.cuda.device(index):
            return _launch(library, what, store, like, like_v, parts, slabs, outs, lse, begin)
    return _C.cuda_attention_parts(
        library, what, DTYPES[like.dtype], store, batch, heads, rows, head_dim, like_v.shape[3],
        tuple([(t.data_ptr(), *t.stride()) for t in parts]),
        tuple([(t.data_ptr() + begin * t.stride(2) * 4, *t.stride()) for t in slabs]) if slabs else (),
        tuple([(t.data_ptr(), *t.stride()) for t in outs]) if outs else (),
        lse, kernel_library.raw_stream(index),
    )  # fmt: skip


# -- the check at the first use --------------------------------------------------------------------------------------


class _Case:
    """A small case of a use: few rows, of which some see no key, within slabs that are longer, on the use's device."""

    BATCH, HEADS, ROWS, BEFORE, BEHIND = 2, 3, 37, 3, 2

    def __init__(self, use: Use) -> None:
        self.use, self.random = use, proof.Numbers()

    def numbers(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        return self.random(*sizes).to(self.use.device, dtype)

    def part(self, head_dim: int, token_major: bool = True) -> Tensor:
        if token_major:
            return self.numbers(self.BATCH, self.ROWS, self.HEADS, head_dim, dtype=self.use.dtype).transpose(1, 2)
        return self.numbers(self.BATCH, self.HEADS, self.ROWS, head_dim, dtype=self.use.dtype)

    def slab(self, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Memory, and the rows of it that the parts are for."""
        memory = self.numbers(self.BATCH, self.HEADS, self.BEFORE + self.ROWS + self.BEHIND, head_dim, dtype=dtype)
        return memory, memory[:, :, self.BEFORE : self.BEFORE + self.ROWS]

    def lse(self, none: slice) -> Tensor:
        lse = self.numbers(self.BATCH, self.HEADS, self.ROWS, dtype=torch.float32) * 3
        lse[:, 1:, none] = float("-inf")
        return lse


def prove(library: object, use: Use) -> None:
    """Runs the kernel on a small case, and holds it to float64.

    Raises:
        AssertionError, RuntimeError, ...: it is wrong, or does not run.
    """
    proofs = {"merge": _prove_merge, "add": _prove_slabs, "finish": _prove_slabs, "total": _prove_total}
    with proof.apart(use.device):
        proofs[use.kernel](library, use, _Case(use))


def _hold(what: str, got: Tensor, truth: Tensor) -> None:
    """Raises where ``got`` is not ``truth`` (float64), rounded once to its dtype from a sum in float32."""
    allowed = torch.finfo(got.dtype).eps * (0.6 * truth.abs() + 0.01) + 1e-6
    wrong = ~(((got.double() - truth).abs() <= allowed) | (got.double() == truth))  # the latter for infinities
    count = int(wrong.sum())
    if count:
        raise AssertionError(f"{count} of {got.numel()} elements of {what} are wrong")


def _hold_launched(is_launched: bool) -> None:
    if not is_launched:
        raise AssertionError("its launcher does not take a case that it must")


def _prove_merge(library: object, use: Use, case: _Case) -> None:
    own, before = case.part(use.head_dim), case.part(use.head_dim, token_major=False)
    own_lse, before_lse = case.lse(slice(3, 6)), case.lse(slice(5, 9))
    for part, lse in ((own, own_lse), (before, before_lse)):
        part[lse == float("-inf")] = 0.0
    out, lse = torch.full_like(own, float("nan")), torch.full_like(own_lse, float("nan"))
    addresses = own_lse.data_ptr(), before_lse.data_ptr(), lse.data_ptr()
    _hold_launched(_launch(library, "merge", False, own, own, (own, before), (), (out,), addresses))
    sums = torch.exp(own_lse.double())[..., None], torch.exp(before_lse.double())[..., None]
    truth = (own.double() * sums[0] + before.double() * sums[1]) / (sums[0] + sums[1]).clamp_min(1e-300)
    _hold("out", out, truth)
    _hold("lse", lse, (sums[0] + sums[1]).log()[..., 0])


def _prove_slabs(library: object, use: Use, case: _Case) -> None:
    for store in (False, True):
        parts = case.part(use.head_dim), case.part(use.v_head_dim, token_major=store)
        memories, slabs = zip(*(case.slab(part.shape[3]) for part in parts), strict=True)
        if store:
            for slab in slabs:
                slab.fill_(float("nan"))
        kept = [memory.clone() for memory in memories]
        outs = tuple(_token_major_empty(part).fill_(float("nan")) for part in parts) if use.kernel == "finish" else ()
        _hold_launched(_launch(library, use.kernel, store, *parts, parts, slabs, outs))
        rows = slice(case.BEFORE, case.BEFORE + case.ROWS)
        for i, (part, memory, before) in enumerate(zip(parts, memories, kept, strict=True)):
            truth = part.double() if store else part.double() + before[:, :, rows].double()
            name = f"d{'kv'[i]}{' that is stored' if store else ''}"
            _hold(name, outs[i] if outs else memory[:, :, rows], truth)
            if not outs:
                before[:, :, rows] = memory[:, :, rows]
            if not torch.equal(memory.nan_to_num(7.0), before.nan_to_num(7.0)):
                raise AssertionError(f"rows of {name} that it must not write have changed")
    if use.kernel == "finish":
        _prove_copy(library, case)


def _prove_copy(library: object, case: _Case) -> None:
    parts = case.part(case.use.head_dim), case.part(case.use.v_head_dim)
    memories, rows = zip(*(case.slab(part.shape[3], case.use.dtype) for part in parts), strict=True)
    wanted = [memory.clone() for memory in memories]
    _hold_launched(_launch(library, "finish", True, *parts, parts, (), rows))
    for name, part, memory, whole in zip("kv", parts, memories, wanted, strict=True):
        whole[:, :, case.BEFORE : case.BEFORE + case.ROWS] = part
        if not torch.equal(memory, whole):
            raise AssertionError(f"a copy of {name} is wrong")


def _prove_total(library: object, use: Use, case: _Case) -> None:
    for count in (2, MOST_PARTS):
        parts = tuple(case.part(use.head_dim, token_major=i != 1) for i in range(count))
        out = _token_major_empty(parts[0]).fill_(float("nan"))
        _hold_launched(_launch(library, "total", False, out, out, parts, (), (out,)))
        _hold(f"the total of {count}", out, torch.stack([part.double() for part in parts]).sum(0))


# -- by torch's ops --------------------------------------------------------------------------------------------------


def _token_major(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)  # no copy where it lies so


def _merge_by_torch(own: Tensor, own_lse: Tensor, before: Tensor, before_lse: Tensor) -> tuple[Tensor, Tensor]:
    # The least finite number in place of -inf: the difference of two -inf is no number.
    share = torch.sigmoid(own_lse - before_lse.clamp_min(torch.finfo(before_lse.dtype).min))[..., None]
    out = _token_major_empty(own)
    torch.addcmul(own * share, before, 1.0 - share, out=out)
    return out, torch.logaddexp(own_lse, before_lse).contiguous()


def _rows_from(begin: int, dk: Tensor, dv: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """As many rows as the part has."""
    rows = part.shape[2]
    return (dk, dv) if rows == dk.shape[2] else (dk.narrow(2, begin, rows), dv.narrow(2, begin, rows))


def _add_by_torch(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> None:
    if store:
        dk.copy_(part_k)
        dv.copy_(part_v)
    else:
        dk.add_(part_k)
        dv.add_(part_v)


def _finish_by_torch(dk: Tensor, dv: Tensor, part_k: Tensor, part_v: Tensor, store: bool) -> tuple[Tensor, Tensor]:
    if store:
        return _token_major(part_k), _token_major(part_v)
    own_dk, own_dv = _token_major_empty(part_k), _token_major_empty(part_v)
    torch.add(dk, part_k, out=own_dk)
    torch.add(dv, part_v, out=own_dv)
    return own_dk, own_dv


def _total_by_torch(parts: Sequence[Tensor]) -> Tensor:
    first, *others = parts
    if not others:
        return _token_major(first)
    out = _token_major_empty(first)
    *middle, last = others
    if middle and first.dtype != torch.float64:
        first = first.float()
    for part in middle:
        first = first + part
    return torch.add(first, last, out=out)
