"""The library of the package's own CUDA kernels, and the choice of a kernel for attention.

Each kernel is checked on its device at the first use (attention_proof.py). Kernels of attention run the calls with
documents or a soft cap on every GPU of Ampere or later. The alternative for a soft cap is matrix products, up to 200
times slower. In torch's deterministic mode our backward is not used, because the order of its sums of dQ varies.
``SEQ1F1B_CUDA_KERNELS=own``, for tests and benchmarks, uses our kernels for every possible call, without the check;
``library`` uses none. The environment is read once, at the import of this module.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from seq1f1b.device import attention_proof, kernel_tables
from seq1f1b.device.attention_proof import DTYPES, REBUILD, Proofs, Use
from seq1f1b.device.kernel_tables import Operation

__all__: list[str] = []

LIBRARY = Path(__file__).parents[1] / "libseq1f1b_cuda.so"
ATTENTION = ("attention_forward", "attention_backward")
PARTS = "attention_parts"  # merges and sums of results over ranges of keys; see attention_parts.py
USES = {
    **dict.fromkeys(ATTENTION, "for documents and soft caps, heads of 64 and 128"),
    PARTS: "for results over ranges of keys, which are merged and added up, heads of a multiple of 8",
}
OPERATIONS = tuple(USES)
HEADS = (64, 128)  # head sizes of the kernels of attention
CODES = {getattr(torch, name): code for code, name in kernel_tables.DTYPES.items()}


def operations() -> dict[str, Operation]:
    """Returns the library's operations by name; empty if the library was not built.

    Raises:
        OSError, ValueError: the library exists and cannot be used.
    """
    return _operations_of(LIBRARY)


@functools.cache
def _operations_of(path: Path) -> dict[str, Operation]:
    if not path.exists():
        return {}
    return {name: kernel_tables.find(path, name) for name in OPERATIONS}


preferred = os.environ.get("SEQ1F1B_CUDA_KERNELS", "")
"""The preference that was asked for, which tests and benchmarks change; read it by ``preference()``."""


def preference() -> str:
    """Returns 'own', 'library' or ''; with '', the check at the first use decides.

    Raises:
        ValueError: the environment variable has another value.
    """
    if preferred not in ("", "own", "library"):
        raise ValueError(f"SEQ1F1B_CUDA_KERNELS is {preferred!r}, must be 'own', 'library' or unset")
    return preferred


_proofs = Proofs(
    f"Matrix products, up to 200 times slower, take its place there. {REBUILD}",
    "the CUDA kernel ",
)


def choose(name: str, q: Tensor) -> Operation | None:
    """Returns our operation to launch for the queries; None: use torch's ops.

    Raises:
        RuntimeError: the environment asks for our kernels, and their library was not built.
    """
    found = wanted(name, q.device)
    adds_in_order = name == ATTENTION[0] or not torch.are_deterministic_algorithms_enabled()
    if found is None or q.dtype not in DTYPES or q.shape[3] not in HEADS or not adds_in_order:
        return None
    if preference():
        return found
    use = Use(name, q.dtype, q.shape[3], q.shape[3], q.device)
    prove = functools.partial(attention_proof.prove, functools.partial(launch_attention, found), use)
    return found if _proofs.holds(use, prove) else None


def wanted(name: str, device: torch.device) -> Operation | None:
    """Returns our operation, unchecked; None if it is not built, not for the device, or ruled out by the environment.

    Raises:
        RuntimeError: the environment asks for our kernels, and their library was not built.
        OSError, ValueError: the library exists and cannot be used.
    """
    wish = preference()
    if wish == "library" or not (wish or can_run(device)):
        return None
    found = operations()
    if wish and not found:
        raise RuntimeError(
            f"SEQ1F1B_CUDA_KERNELS=own, but there is no {LIBRARY}: install again with nvcc and SEQ1F1B_CUDA=1"
        )
    return found.get(name)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability; (0, 0) for a device other than CUDA."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def can_run(device: torch.device) -> bool:
    """Returns whether the device can run our kernels: Ampere or later."""
    return capability(device) >= (8, 0)


def warn_of_products(name: str, q: Tensor, v_head_dim: int) -> None:
    """Warns once if matrix products run a call for lack of a kernel, although the device could run our kernels."""
    found, sizes = wanted(name, q.device), (q.shape[3], v_head_dim)
    has_none = not LIBRARY.exists() if found is None else sizes not in ((size, size) for size in HEADS)
    if not preference() and can_run(q.device) and has_none:
        _warn_of_products(found is not None, DTYPES[q.dtype], " and ".join(map(str, sorted({*sizes}))))


@functools.cache
def _warn_of_products(is_built: bool, dtype: str, heads: str) -> None:
    why = (
        f"which are for heads of 64 or 128 in bfloat16 or float16, not for heads of {heads} in {dtype}: choose such"
        if is_built
        else "which were not built: install seq1f1b again with nvcc and SEQ1F1B_CUDA=1"
    )
    warnings.warn(
        "attention with a soft cap goes by matrix products, up to 200 times slower than by this package's CUDA "
        f"kernels, {why}, or set SEQ1F1B_CUDA_KERNELS=library to do without this warning",
        stacklevel=2,
    )


# The functions behind torch.cuda's wrappers save microseconds in each launch; torch's build for CPUs lacks them.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def on(index: int) -> AbstractContextManager[object]:
    """Makes the CUDA device of an index current for a launch; index -1 stands for the CPU and changes nothing."""
    return nullcontext() if index < 0 or index == _current_device() else torch.cuda.device(index)


def raw_stream(index: int) -> int:
    """Returns the address of the current stream of a CUDA device; 0 for the CPU's index -1."""
    if index < 0:
        return 0
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


def launch_attention(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int,
    softcap: float, docs: Tensor, dout: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, own_dk: Tensor | None = None, own_dv: Tensor | None = None,
    store: bool = False,
) -> None:  # fmt: skip
    """Launches on the current stream of q's device. Rows of the tensors begin at multiples of 16 bytes.

    Args:
        q, out, dout, dq: (batch, heads, tokens, head_dim). The last query is token N - 1.
        k, v, dk, dv: (batch, kv_heads, N, head_dim); k and v have equal strides, and so do dk and dv, in float32.
        own_dk, own_dv: (batch, kv_heads, tokens, head_dim), in q's dtype, with equal strides: the sums of the last rows
            of dk and dv, whose own values are undefined after the launch.
        store: whether to overwrite dk and dv instead of adding to them.
        lse: (batch, heads, tokens), contiguous, float32.
        docs: (batch, N), int32; empty: no documents.
    """
    batch, heads, tokens, head_dim = q.shape
    docs, of_keys = docs if docs.stride(-1) == 1 else docs.contiguous(), _rows(k, v)
    pack = functools.partial(
        kernel_tables.ATTENTION.pack, CODES[q.dtype], batch, heads, k.shape[1], tokens, head_dim, k.shape[2] - tokens,
        q.data_ptr(), *of_keys[:2], *q.stride()[:3], *of_keys[2:], *_rows(out), lse.data_ptr(),
        scale, window, softcap,
        docs.data_ptr() if docs.numel() else 0, docs.stride(0) if docs.numel() else 0,
        *_rows(dout), *_rows(dq), *_rows(dk, dv), store, *_rows(own_dk, own_dv),
    )  # fmt: skip
    index = q.get_device()
    with on(index):  # the launcher queries the current device
        size = operation.scratch_bytes(pack(0, 0))
        operation.check(max(0, -size))
        scratch = q.new_empty(size, dtype=torch.uint8)  # returns to the stream's pool after the launch
        operation.launch(pack(scratch.data_ptr(), size), raw_stream(index))


def _rows(*tensors: Tensor | None) -> tuple[int, ...]:
    """Returns the addresses of tensors, and the strides of batch, head and row common to all; zeros for None."""
    found = [t for t in tensors if t is not None]
    if not found:
        return (0,) * (len(tensors) + 3)
    assert all(t.stride() == found[0].stride() for t in found)
    return *[t.data_ptr() for t in found], *found[0].stride()[:3]


def describe() -> list[str]:
    """Returns lines for ``seq1f1b doctor``: the kernels, or the effect of their absence."""
    try:
        found = operations()
    except (OSError, ValueError) as error:
        return [f"own CUDA kernels: unusable, torch's ops instead: {error}"]
    if not found:
        return ["own CUDA kernels: not built (no nvcc at installation, or SEQ1F1B_CUDA=0): torch's ops only"]
    return [
        f"own CUDA kernels {operation.name}: {operation.architectures}, nvcc {operation.compiler}; "
        f"{USES[operation.name]}, on each GPU of Ampere or later that passes a check at the first use"
        for operation in found.values()
    ]
