"""Sees what a trace does not record, while a forward is traced, and names the line of the model."""

from __future__ import annotations

import datetime
import dis
import gc
import linecache
import os
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from seq1f1b.adapters.chain_frozen import Frozen
from seq1f1b.ops import attention, context, packing, ulysses
from seq1f1b.runtime.model_state import RandomState

__all__ = ["OURS", "Refused", "Watch", "check_entered", "is_of_user", "place_of", "reason_of_bool", "users_frame"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_NOT_THE_USERS = (_TORCH, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_DEVICES = tuple(
    device for device in ("cpu", "cuda", "xpu", "mps", "hpu", "mtia") if torch.amp.is_autocast_available(device)
)
_HOOKS = [
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
]
_GLOBAL_HOOKS = [name for name in vars(torch_module) if name.startswith("_global_") and name.endswith("_hooks")]
_CLOCKS = (time.time, time.time_ns, time.monotonic, time.monotonic_ns, time.perf_counter, time.perf_counter_ns)


class Refused(ValueError):
    """Something that no stage would do as the model does. Its text is a whole sentence."""


# -- lines of the model ------------------------------------------------------------------------------------------------


def is_of_user(frame: FrameType) -> bool:
    """Whether code of the model runs there, and not torch's or ours."""
    file = frame.f_code.co_filename
    if file.startswith(_NOT_THE_USERS) or file.startswith("<frozen "):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the model's code within the forward that is traced."""
    while frame is not None:
        if is_of_user(frame):
            return frame
        if frame.f_code is Watch.run.__code__:  # beyond it nothing is traced
            return None
        frame = frame.f_back
    return None


def _is_import(frame: FrameType | None) -> bool:
    """Whether it runs because a module is imported, as torch imports some at their first use."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        if frame.f_code is Watch.run.__code__:
            return False
        frame = frame.f_back
    return False


def place_of(frame: FrameType | None) -> str:
    """Names a line, as ``, at FILE:LINE: "TEXT"``; nothing for None."""
    if frame is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f", at {frame.f_code.co_filename}:{frame.f_lineno}" + (f": {text!r}" if text else "")


def reason_of_bool(frame: FrameType | None) -> str:
    """Why a value is asked for its truth, and the remedy."""
    if frame is not None:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
        following = [i for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti][:4]
        if text.startswith("assert") or any(
            i.opname == "LOAD_ASSERTION_ERROR" or "AssertionError" in str(i.argval) for i in following
        ):
            return "an assert asks for a value that a trace does not have: leave it out, or move it into a block"
    return (
        "its control flow depends on a value that a trace does not have (of a tensor, a size or an argument): what "
        "depends on values or sizes must lie in a module of its own"
    )


# -- modules -----------------------------------------------------------------------------------------------------------


def check_entered(module: nn.Module, where: str) -> None:
    """Raises for what torch would do around or in place of the forward of a module that the trace enters."""
    hooks = [name for name in _HOOKS if getattr(module, name, None)]
    if hooks:
        shown = ", ".join(name.strip("_").replace("_", " ") for name in hooks)
        raise Refused(f"{where} has hooks, which no stage would run ({shown}): put them on its blocks")
    if "forward" in vars(module):
        function = getattr(module.forward, "__func__", module.forward)
        code = getattr(function, "__code__", None)
        line = "" if code is None else f", at {code.co_filename}:{code.co_firstlineno}"
        raise Refused(
            f"{where} has a forward that was set on the instance{line}, which a trace does not see: define it in the "
            "class"
        )
    for name in ("__call__", "_call_impl"):
        if getattr(type(module), name) is not getattr(nn.Module, name):
            raise Refused(f"{where} defines {name} in place of torch's, which no stage would run: define forward alone")
    if "token_offset" in getattr(type(module).forward, "__code__", check_entered.__code__).co_names:
        raise Refused(f"forward of {where} uses token_offset(), a number of the segment: use positions(x)")


def check_global_hooks() -> None:
    hooks = [name for name in _GLOBAL_HOOKS if getattr(torch_module, name) and "registration" not in name]
    if hooks:
        raise Refused(
            f"torch has {hooks[0].strip('_').replace('_', ' ')} for all modules, which run for the model and not for "
            "its stages: remove them before split, and put hooks on its blocks"
        )


# -- what surrounds an operation ---------------------------------------------------------------------------------------


def _ambient(own_modes: tuple[Any, ...]) -> dict[str, Any]:
    """The state that operations run under, by what may change it."""
    modes = [mode for mode in _function_modes() if mode not in own_modes]
    return {
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.no_grad, torch.enable_grad or torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.autocast": (
            torch.is_autocast_cache_enabled(),
            [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES],
        ),
        _DEFAULT_DTYPE: torch.get_default_dtype(),
        "torch.use_deterministic_algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "a mode of torch's functions, as torch.device(...)": [id(mode) for mode in modes],
        "a mode of torch's operations (TorchDispatchMode)": [
            id(mode) for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        ],
        "torch.autograd.graph.saved_tensors_hooks": _saved_tensors_hooks(),
        "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled(),
        "torch.set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.nn.attention.sdpa_kernel": (
            _sdp.flash_sdp_enabled(),
            _sdp.mem_efficient_sdp_enabled(),
            _sdp.math_sdp_enabled(),
            _sdp.cudnn_sdp_enabled(),
        ),
        "torch.backends.cudnn.flags": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "torch.backends.mkldnn.flags": torch.backends.mkldnn.enabled,
    }


_DEFAULT_DTYPE = "another default dtype (torch.set_default_dtype)"
_sdp: Any = torch.backends.cuda  # whose functions have no types
_function_modes: Any = torch.overrides._get_current_function_mode_stack


def _saved_tensors_hooks() -> Any:
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if top is None else tuple(map(id, top))


def _codes(*functions: Any) -> dict[Any, str]:
    """Names of functions by their code, without decorators."""
    found = {}
    for function in functions:
        name = f"{function.__module__}.{function.__name__}"
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        found[function.__code__] = name
    return found


_GENERATORS_CHANGED = _codes(torch.random.fork_rng, torch.manual_seed, torch.random.seed, torch.set_rng_state)
_CHECKPOINT_FILE = os.path.join(_TORCH, "utils", "checkpoint.py")
_FUNCTION_FILE = os.path.join(_TORCH, "autograd", "function.py")


class Watch:
    """Sees, while a forward is traced, what its graph will not hold.

    Args:
        whose: the model, in words.
        frozen: takes what forward reads of Python.
        modes: of ours, which are there throughout.
    """

    def __init__(self, whose: str, frozen: Frozen, modes: tuple[Any, ...]) -> None:
        self._whose, self._frozen, self._modes = whose, frozen, modes
        self._finding: Refused | None = None  # told once forward has returned: it may catch what is raised in it
        self._start: dict[str, Any] = {}
        self._random_states: Any = None

    def refuse(self, what: str, frame: FrameType | None = None) -> Refused:
        """Makes an error to be raised. It stands although forward may catch it."""
        found = Refused(f"forward of {self._whose} cannot be cut{place_of(frame)}: {what}")
        self._finding = self._finding or found
        return found

    def look(self) -> FrameType | None:
        """At each operation of the trace: raises where it runs in another state than forward began in."""
        frame = users_frame(sys._getframe(1))
        with torch._C.DisableTorchFunction():
            now = _ambient(self._modes)
            if now != self._start:
                changed = next(name for name, value in now.items() if value != self._start[name])
                raise self.refuse(*self._context(changed, frame))
            if self._finding is None and self._generators() != self._random_states:
                self.refuse(_MOVED, frame)
        return frame

    def _context(self, changed: str, frame: FrameType | None) -> tuple[str, FrameType | None]:
        above: FrameType | None = sys._getframe(1)
        while above is not None and above.f_code is not Watch.run.__code__:
            file = above.f_code.co_filename
            if file == _CHECKPOINT_FILE:
                what = (
                    "torch.utils.checkpoint around a part of it is lost in a trace: call it within the forward of a "
                    "block, or leave it out and give the engine memory=Memory(blocks=...) or Memory(recompute=...)"
                )
                return what, users_frame(above)
            if file == _FUNCTION_FILE:
                what = (
                    "a torch.autograd.Function outside of the blocks loses its backward in a trace: put it into a block"
                )
                return what, users_frame(above)
            above = above.f_back
        return f"what runs there under {changed} would run without it in a stage: move it into a block, whole", frame

    def _generators(self) -> Any:
        numpy = sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_state()
        shown = None if of_numpy is None else (of_numpy[1].tobytes(), *of_numpy[2:])
        return random.getstate(), torch.get_rng_state().numpy().tobytes(), shown

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls what traces."""
        collects = gc.isenabled()
        gc.disable()  # a collection runs callbacks and finalizers of others above whatever forward calls
        state, self._start = RandomState(torch.device("cpu")), _ambient(self._modes)
        self._random_states = self._generators()
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            return function()
        except Exception as error:
            if self._finding is not None and self._finding is not error:  # it came first
                raise self._finding from error
            raise
        finally:
            sys.setprofile(before)
            if self._finding is None and self._generators() != self._random_states:
                self.refuse(_MOVED)
            state.restore()
            self._restore()
            if collects:
                gc.enable()

    def check(self) -> None:
        """After :meth:`run`: raises for what it saw in passing."""
        if self._finding is not None:
            raise self._finding

    def _restore(self) -> None:
        """Undoes what a forward that was stopped has set for the whole process."""
        start = self._start
        torch.set_default_dtype(start[_DEFAULT_DTYPE])
        is_on, warns = start["torch.use_deterministic_algorithms"]
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        for device, (enabled, dtype) in zip(_DEVICES, start["torch.autocast"][1], strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_float32_matmul_precision(start["torch.set_float32_matmul_precision"])

    # Each call within the trace comes here. An error raised here would be the forward's, which may catch it.
    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            if is_of_user(frame):
                if not self._frozen.knows_code(frame) and not _is_import(frame):
                    self._frozen.note_code(frame)
            elif frame.f_code in _GENERATORS_CHANGED:
                self._find(f"{_GENERATORS_CHANGED[frame.f_code]} changes the state of a generator", frame)
            elif frame.f_code in _OUR_CODES:
                self._find(_UNRECORDED.format(_OUR_CODES[frame.f_code]), frame)
            elif frame.f_code is _ENVIRONMENT and frame.f_back is not None:
                self._frozen.note_environment(frame.f_locals.get("key"))
        elif event == "c_call":
            is_drawn = isinstance(getattr(function, "__self__", None), random.Random)
            if is_drawn and function.__name__ != "getstate":
                self._find(_MOVED, frame)
            elif function in _CLOCKS or getattr(function, "__self__", None) is datetime.datetime:
                if is_of_user(frame):
                    self._find("it reads a clock, once for all calls: move that into a block", frame)
            elif function is torch.get_default_dtype and is_of_user(frame):
                self._frozen.note_call("torch.get_default_dtype()", torch.get_default_dtype)

    def _find(self, what: str, frame: FrameType) -> None:
        user = users_frame(frame)
        if self._finding is None and user is not None and not _is_import(frame):
            self.refuse(what, user)


# Functions of ours that a trace records, where forward itself calls them.
OURS = (
    attention.positions,
    attention.causal_attention,
    packing.document_starts,
    context.carry_in,
    context.carry_out,
    context.add_loss,
    ulysses.ulysses_attention,
)
_OUR_CODES = {code: name.rpartition(".")[2] for code, name in _codes(*OURS, attention.token_offset).items()}
_UNRECORDED = (
    "{0}() is called where a trace does not record it: call seq1f1b.{0} in forward itself, or move what calls it into "
    "a block"
)
_MOVED = (
    "it draws random numbers in Python, once for all calls: draw them in a block, or by torch's functions of a tensor, "
    "as torch.rand_like(x)"
)
_ENVIRONMENT = type(os.environ).__getitem__.__code__
