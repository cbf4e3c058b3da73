"""The package's own CUDA kernels: the library that holds them, and when attention takes one.

Each kernel proves itself where it runs, at its first use (proof.py). Those of attention then take the calls with a
soft cap on every GPU of Ampere or later: matrix products, the only other way, are up to 200 times slower. On the
architectures of ``TIMED`` they take calls with documents, too, and of those that torch's flash ops take as well what
was faster there. Elsewhere calls with documents go to ours where torch's flash ops have failed their check for these
(attention_documents.py): over documents nobody has measured them yet, and a kernel that was timed is known to be nearly
as fast, and asks nothing of the host. ``SEQ1F1B_CUDA_KERNELS=own``, for tests and benchmarks, takes our kernels
wherever there is one for the call, unproven; ``library`` never. The environment is read once, when this module is
imported; ``use_kernels`` changes the choice later.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seq1f1b import _C, proof
from seq1f1b.device import attention_proof

__all__: list[str] = []

LIBRARY = Path(__file__).parents[1] / "libseq1f1b_cuda.so"
ATTENTION = ("attention_forward", "attention_backward")
PARTS = "attention_parts"  # the work around attention over ranges of keys; see attention_parts.py
OPERATIONS = (*ATTENTION, PARTS)
TIMED: dict[str, set[tuple[str, str, int]]] = {"sm_90": {("attention_forward", "bfloat16", 128)}}
"""By architecture on which benchmarks/gpu.py has timed our attention (an H200): what is faster than torch's flash op
there, by operation, dtype and head size."""


class Operation(NamedTuple):
    name: str
    source: str  # sha256 of the code that it was compiled from, comments left out
    compiler: str
    architectures: str  # "sm_80 sm_90 compute_80"
    kernels: tuple[_C.CudaKernel, ...]
    library: object


@functools.cache
def operations(path: Path | None = None) -> dict[str, Operation]:
    """The library's operations by name; none if it was not built. An older one lacks ``PARTS``.

    Raises:
        OSError, ValueError: there is one, and it cannot be used.
    """
    path = path or LIBRARY
    if not path.exists():
        return {}
    library = _C.cuda_library_open(str(path))
    found = {}
    for name in OPERATIONS:
        try:
            found[name] = Operation(name, *_C.cuda_operation(library, name), library)
        except ValueError:
            if name != PARTS:
                raise
    return found


preferred = os.environ.get("SEQ1F1B_CUDA_KERNELS", "")
"""The preference that was asked for; read it by ``preference()``, and set it by ``use_kernels()``."""


def preference() -> str:
    """'own', 'library' or '': the check and the records decide.

    Raises:
        ValueError: the environment asks for something else.
    """
    if preferred not in ("", "own", "library"):
        raise ValueError(f"SEQ1F1B_CUDA_KERNELS is {preferred!r}, must be 'own', 'library' or unset")
    return preferred


def use_kernels(wish: str) -> None:
    """As if SEQ1F1B_CUDA_KERNELS had been ``wish`` from the start. For tests and benchmarks; processes that are started
    later take the variable of the environment."""
    global preferred
    preferred = wish


_proofs = proof.Proofs(
    "",
    "Torch's ops take its place there: with a soft cap, and with documents that torch's flash ops do not take, matrix "
    "products, up to 200 times slower.",
)
_choices: dict[tuple[Any, ...], Operation | None] = {}  # by the arguments of _decide


def choose(name: str, q: Tensor) -> Operation | None:
    """The operation of ours that is to be launched for such queries; None: torch's ops are.

    None can also mean that nothing is known yet, while a CUDA graph is captured or another thread's check takes long: a
    later call may get another answer (``is_final``).

    Raises:
        RuntimeError: ours are asked for by the environment, and there is no library of them.
    """
    wish = preference()
    if wish == "library":
        return None
    if wish == "own":
        found = operations()
        if not found:
            raise RuntimeError(
                f"SEQ1F1B_CUDA_KERNELS=own, but there is no {LIBRARY}: install again with nvcc and SEQ1F1B_CUDA=1"
            )
        return _for_heads(found.get(name), q.dtype, q.shape[3])
    key = name, q.dtype, q.shape[3], q.device
    try:
        return _choices[key]
    except KeyError:
        return _decide(*key)


def is_final(name: str, q: Tensor) -> bool:
    """Whether ``choose``, which was asked the same before, will not answer otherwise later."""
    return bool(preference()) or (name, q.dtype, q.shape[3], q.device) in _choices


def is_timed(name: str, q: Tensor) -> bool:
    """Whether the library has the operation for such queries, on an architecture where it was timed."""
    try:
        operation = _for_heads(operations().get(name), q.dtype, q.shape[3])
    except (OSError, ValueError):
        return False
    return operation is not None and architecture(q.device) in TIMED


def is_faster(name: str, q: Tensor) -> bool:
    """Whether it was faster there than torch's flash op."""
    return is_timed(name, q) and (name, _name_of(q.dtype), q.shape[3]) in TIMED[architecture(q.device)]


def _decide(name: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> Operation | None:
    operation = _wanted(name, dtype, head_dim) if _can_run(device) else None
    if operation is not None:
        use = proof.Use(name, dtype, head_dim, head_dim, device)
        launch = functools.partial(launch_attention, operation)
        holds = _proofs.holds(use, functools.partial(attention_proof.prove, launch, use))
        if holds is None:
            return None
        operation = operation if holds else None
    _choices[name, dtype, head_dim, device] = operation
    return operation


def _wanted(name: str, dtype: torch.dtype, head_dim: int) -> Operation | None:
    """The operation that is to be used if it proves itself."""
    try:
        found = operations()
    except (OSError, ValueError) as error:
        _warn_of_library(str(error))
        return None
    operation = _for_heads(found.get(name), dtype, head_dim)
    if operation is None:
        _warn_of_products(bool(found), _name_of(dtype), head_dim)
    return operation


def _can_run(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _for_heads(operation: Operation | None, dtype: torch.dtype, head_dim: int) -> Operation | None:
    """The operation if it has a kernel for such heads."""
    wanted = _name_of(dtype), head_dim
    has_one = operation is not None and any((k.dtype, k.head_dim) == wanted for k in operation.kernels)
    return operation if has_one else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _warn_of_library(error: str) -> None:
    warnings.warn(
        f"torch's ops take the place of this package's CUDA kernels of attention, and matrix products, up to 200 times "
        f"slower, where there are documents or a soft cap: {error}. Install seq1f1b again to build them anew, or set "
        "SEQ1F1B_CUDA_KERNELS=library to do without them",
        stacklevel=2,
    )


@functools.cache
def _warn_of_products(is_built: bool, dtype: str, head_dim: int) -> None:
    why = (
        f"which are for heads of 64 or 128 in bfloat16 or float16, not for heads of {head_dim} in {dtype}: choose such"
        if is_built
        else "which were not built: install seq1f1b again with nvcc and SEQ1F1B_CUDA=1"
    )
    warnings.warn(
        "attention with documents or a soft cap goes by matrix products, up to 200 times slower than by this package's "
        f"CUDA kernels, {why}, or set SEQ1F1B_CUDA_KERNELS=library to do without this warning",
        stacklevel=2,
    )


def architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "emulated"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


# The functions behind torch.cuda's, which take microseconds more in each launch; torch's build for CPUs lacks them.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def is_current(index: int) -> bool:
    """Whether the CUDA device of this index is the current one; -1, which stands for the CPU, always is."""
    return index < 0 or index == _current_device()


def raw_stream(index: int) -> int:
    """The address of the current stream of a CUDA device; 0, which no launch reads, for the CPU's index -1."""
    if index < 0:
        return 0
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


def launch_attention(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int,
    softcap: float, docs: Tensor, dout: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, own_dk: Tensor | None = None, own_dv: Tensor | None = None,
    store: bool = False, kernel: int = -1, num_parts: int = 0, deterministic: bool | None = None,
) -> None:  # fmt: skip
    """Launches on the current stream of q's device. Rows of the tensors begin at multiples of 16 bytes.

    Args:
        q, out, dout, dq: (batch, heads, tokens, head_dim); k, v, dk, dv: (batch, kv_heads, N, head_dim), k and v of the
            same strides, dk and dv too, float32. The last query is token N - 1.
        own_dk, own_dv: (batch, kv_heads, tokens, head_dim), of q's dtype and the same strides: the sums of the last
            rows of dk and dv, which then hold nothing of use.
        store: dk and dv hold nothing yet; else they are added to.
        lse: (batch, heads, tokens), contiguous, float32.
        docs: (batch, N), int32; empty: none.
        kernel: index of ``operation.kernels``; -1: the launcher chooses.
        num_parts: of the keys; 0: the launcher chooses.
        deterministic: None: as torch is set.
    """
    batch, heads, tokens, head_dim = q.shape

    def rows(t: Tensor | None) -> tuple[int, int, int, int] | None:
        return None if t is None else (t.data_ptr(), t.stride(0), t.stride(1), t.stride(2))

    docs = docs if docs.stride(-1) == 1 else docs.contiguous()
    arguments = (
        _name_of(q.dtype), batch, heads, k.shape[1], tokens, head_dim, k.shape[2] - tokens,
        scale, window, softcap, docs.data_ptr() if docs.numel() else 0, docs.stride(0) if docs.numel() else 0,
        rows(q), rows(k), rows(v), rows(out), lse.data_ptr(),
        rows(dout), rows(dq), rows(dk), rows(dv), rows(own_dk), rows(own_dv),
        store, torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic, num_parts,
    )  # fmt: skip
    index = q.get_device()
    with nullcontext() if is_current(index) else torch.cuda.device(index):  # the launcher asks what the current one can
        scratch_bytes = _C.cuda_attention_scratch(operation.library, operation.name, kernel, arguments)
        scratch = q.new_empty(scratch_bytes, dtype=torch.uint8)  # given back to the stream's pool behind the launch
        _C.cuda_attention(
            operation.library, operation.name, kernel, arguments, scratch.data_ptr(), scratch_bytes, raw_stream(index)
        )


CHECKED = "of Ampere or later that passes a check at the first use"


def describe() -> list[str]:
    """Lines for ``seq1f1b doctor``: what there is, and what its absence costs."""
    try:
        found = operations()
    except (OSError, ValueError) as error:
        return [f"own CUDA kernels: unusable, torch's ops instead: {error}"]
    if not found:
        return ["own CUDA kernels: not built (no nvcc at installation, or SEQ1F1B_CUDA=0): torch's ops only"]
    lines = []
    for operation in found.values():
        if operation.name == PARTS:
            lines.append(_describe_parts(operation))
            continue
        shapes = sorted({f"{kernel.dtype} d{kernel.head_dim}" for kernel in operation.kernels if kernel.head_dim})
        where = sorted(
            f"{name} {dtype} d{head_dim}"
            for name, faster in TIMED.items()
            for of, dtype, head_dim in faster
            if of == operation.name
        )
        said = f"; on {', '.join(where)} also for calls that torch's flash op takes" if where else ""
        lines.append(
            f"own CUDA kernel {operation.name}: {', '.join(shapes)}; {operation.architectures}, nvcc "
            f"{operation.compiler}; default for soft caps, and for documents that torch's flash ops do "
            f"not take, on each GPU {CHECKED}{said}"
        )
    return lines


def _describe_parts(operation: Operation) -> str:
    dtypes = sorted({kernel.dtype for kernel in operation.kernels})
    return (
        f"own CUDA kernels {operation.name}: results over ranges of keys merged and added up, {', '.join(dtypes)}, "
        f"head_dim a multiple of 8; {operation.architectures}, nvcc {operation.compiler}; default on each GPU {CHECKED}"
    )
