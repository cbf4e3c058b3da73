"""What can be seen of modules and of the process, so that a test can tell whether all was left as it was."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# What torch's own first calls change: a filter of warnings (sympy's), a variable of the environment (Inductor's).
torch.autograd.backward(checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False), torch.ones(2))


def modules_of(module: nn.Module) -> dict[str, Any]:
    """All that can be seen of a module and its parts; tensors by identity, place, version and value."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in part.__dict__.items():
            place = f"{name}.{key}"
            if isinstance(value, dict):
                found[place] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, (list, set, str, int, float)):
                found[place] = repr(value)
            else:
                found[place] = id(value)
        found[f"{name} itself"] = (type(part), sorted(part.__dict__))
        tensors = {k: v for k, v in vars(part).items() if isinstance(v, Tensor)}
        for key, tensor in {**part._parameters, **part._buffers, **tensors}.items():
            if tensor is not None:
                found[f"{name}.{key}"] = tensor_facts(tensor)
    return found


def tensor_facts(tensor: Tensor) -> tuple[Any, ...]:
    hooks = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    return (
        id(tensor), type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr(), tensor.requires_grad,
        tensor.is_leaf, tensor.grad_dtype if tensor.is_leaf else None, tensor.detach().double().tolist(),
        [None if own is None else list(own.items()) for own in hooks], sorted(tensor.__dict__),
    )  # fmt: skip


def thread_names(prefix: str = "") -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefix))


def process() -> dict[str, Any]:
    """What belongs to the process or the thread."""
    return {
        "random numbers": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "threads": [name for name in thread_names() if not name.startswith("seq1f1b offload")],
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "hooks of Python": (sys.excepthook, threading.excepthook, sys.getswitchinterval(), sys.getrecursionlimit()),
        "folder": os.getcwd(),
    }  # fmt: skip


def facts(modules: tuple[nn.Module, ...], is_put_back: bool) -> dict[str, Any]:
    found = process()
    for i, module in enumerate(modules):
        found |= {f"module {i}: {name}": value for name, value in modules_of(module).items()}
        for name, t in module.state_dict(keep_vars=True).items():
            gradient = None if t.grad is None else (id(t.grad), t.grad.tolist())
            found[f"module {i}: {name} meanwhile"] = gradient if is_put_back else t._version
    return found


@contextmanager
def as_found(what: str, *modules: nn.Module, is_put_back: bool = False) -> Iterator[None]:
    """Asserts that the process and the modules are as they were.

    Args:
        is_put_back: tensors may change meanwhile, but gradients must not; else gradients alone may change.
    """
    before = facts(modules, is_put_back)
    yield
    after = facts(modules, is_put_back)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, f"{what}: {changed}"
