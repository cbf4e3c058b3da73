"""Makes a model's runs comparable: without dropout, without compiled code, and in one floating dtype throughout."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__: list[str] = []

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = {"float": torch.float32, "bfloat16": torch.bfloat16, "half": torch.float16}
_DROPOUTS = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


_lock = threading.Lock()
_uncompiled = 0  # threads inside `uncompiled`: more than one only where ranks are threads
_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, compiled functions run as they were written: dynamo would trace what a mode does."""
    global _uncompiled, _stance
    with _lock:
        _uncompiled += 1
        if _uncompiled == 1 and "torch._dynamo" in sys.modules:  # whoever compiled has imported it
            _stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _lock:
            _uncompiled -= 1
            if _uncompiled == 0 and _stance is not None:
                _stance.__exit__(None, None, None)  # back to the caller's
                _stance = None


class Steady(TorchFunctionMode):
    """Within, dropout returns its input and compiled functions run as they were written.

    Args:
        dtype: the dtype in which the model runs, if that is not its own. What a model casts to a narrower one for its
            norms or its softmax, and what it makes in torch's default dtype, is in this one as well; no autocast.
    Attributes:
        dropout: whether the model called any.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._others = ExitStack()
        self.dropout = False

    def __enter__(self) -> Steady:
        for device in ("cpu", "cuda") if self._dtype is not None else ():
            if torch.is_autocast_enabled(device):
                self._others.enter_context(torch.autocast(device, enabled=False))
        self._others.enter_context(uncompiled())
        super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._others.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name in _DROPOUTS and args:
            self._note(args[1] if len(args) > 1 else kwargs.get("p", 0.5), kwargs, args)
            return args[0]
        if name == "scaled_dot_product_attention":
            args, kwargs = self._without_dropout(args, kwargs)
        if self._dtype is None or _is_ours():
            return func(*args, **kwargs)
        return self._run_wide(func, name, args, kwargs)

    def _note(self, p: Any, kwargs: Any, args: Any) -> None:
        is_training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        self.dropout = self.dropout or bool(is_training and p)

    def _without_dropout(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        self.dropout = self.dropout or bool(p)
        if len(args) > 4:
            return (*args[:4], 0.0, *args[5:]), kwargs
        return args, ({**kwargs, "dropout_p": 0.0} if p else kwargs)

    def _run_wide(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        if given and given[0].dtype == self._dtype:
            if name in _CASTS:
                return given[0]
            args = tuple(self._dtype if isinstance(a, torch.dtype) and a in _NARROW else a for a in args)
        if isinstance(kwargs.get("dtype"), torch.dtype) and kwargs["dtype"] in _NARROW:
            kwargs = {**kwargs, "dtype": self._dtype}
        result = func(*args, **kwargs)
        is_new = isinstance(result, Tensor) and result.dtype in _NARROW and not given
        return result.to(self._dtype) if is_new else result


def _is_ours() -> bool:
    """Whether an operation of this package called: attention casts its slopes to what its kernels take."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "seq1f1b.runtime.mixing" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("seq1f1b.ops")
