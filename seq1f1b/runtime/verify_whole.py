"""The whole model on rank 0 as a pipeline of one stage, and its tensors under all their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.device.placement import common_device, free_bytes
from seq1f1b.runtime.arguments import Agreement, Memory
from seq1f1b.runtime.data_parallel import without_wrapper
from seq1f1b.runtime.nested import tensors_of
from seq1f1b.runtime.pipeline import Pipeline
from seq1f1b.runtime.runner import Runner
from seq1f1b.runtime.verify_runs import Pass, one_by_one, plain_name, whole_orders
from seq1f1b.schedule import build_schedule
from seq1f1b.transport import LoopbackGroup
from seq1f1b.transport.values import sendable

__all__: list[str] = []


@sendable
@dataclass(frozen=True)
class Shape:
    """A tensor that another rank holds."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def empty_bytes(self) -> Tensor:
        return torch.empty(prod(self.shape) * self.torch_dtype.itemsize, dtype=torch.uint8, device="cpu")

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@sendable
@dataclass(frozen=True)
class Held:
    """A parameter or a buffer under one of its names.

    Attributes:
        kind: "parameter", "buffer" or, if no checkpoint holds it, "constant".
        key: which tensor of which process it is, so that the names of one are known as such.
    """

    name: str
    place: str
    kind: str
    value: Shape
    is_trained: bool
    key: tuple[int, ...]


class Whole:
    """Rank 0's model, and the pipeline of one stage in which it runs."""

    def __init__(self, runner: Runner, model: Any) -> None:
        self._whole = runner
        first = without_wrapper(next(iter(runner.pipeline.modules.values())))
        of_whole = getattr(first, "of_whole", None)
        bare: Any = without_wrapper(model)
        call: Callable[..., Any] = bare
        self.module: nn.Module = bare
        if of_whole is not None:
            self.module, call = of_whole(bare)
        self.stage = _Whole(self.module, call)
        named = list(named_tensors(self._owners()))
        self.tensors = {prefix + plain_name(name): tensor for prefix, name, _, tensor in named}
        self.held: dict[int, list[Held]] = {}
        for prefix, name, kind, tensor in named:
            of_name = held_as(prefix + plain_name(name), "the model", kind, tensor, 0)
            self.held.setdefault(id(tensor), []).append(of_name)
        self.trained: list[str] = []

    def _owners(self) -> Iterator[tuple[str, str, nn.Module]]:
        yield "", "the model", self.module
        loss_fn = self._whole.options.loss_fn
        if isinstance(loss_fn, nn.Module):
            yield "loss: ", "the loss", without_wrapper(loss_fn)

    def refusal(self) -> str:
        if any(tensor.is_meta for tensor in self.tensors.values()):
            return "the model lies on the meta device: verify needs one with memory"
        self._device = common_device([self.module])
        needed, free = self._bytes(2, None), free_bytes(self._device)
        if needed > free:
            return (
                f"the model does not fit beside the stages: values and gradients need {needed / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB are free; verify a smaller configuration, with fewer layers, or without model="
            )
        return ""

    def _bytes(self, copies: int, itemsize: int | None) -> int:
        tensors = {id(t): t for t in self.tensors.values()}.values()
        return copies * sum(t.numel() * (itemsize or t.element_size()) for t in tensors)

    def told(self) -> Any:
        # Beside the model's copy and gradients, gradients of three runs stay on the ranks.
        return self._bytes(5, 8) < free_bytes(self._device), list(self.held.values())

    def runner(self, rules: Mapping[str, Any]) -> Runner:
        options = replace(
            self._whole.options,
            num_segments=1,
            segment_sizes=None,
            arg_rules=rules,
            transport="auto",
            memory=Memory(),
            attention="any",
        )
        schedule = one_by_one(build_schedule("1f1b", num_ranks=1, num_microbatches=options.num_microbatches))
        group = LoopbackGroup(1)[0]
        pipeline = Pipeline([self.stage], self._device, options, group, schedule, Agreement(group, {}))
        runner = Runner(pipeline, options, schedule, whole_orders(schedule), is_whole=True, tells=False)
        runner.divides = self._whole.divides
        names = {id(tensor): name for name, tensor in reversed(self.tensors.items())}
        self.trained = [names[id(p)] for _, p in pipeline.named_parameters() if p.requires_grad]
        return runner

    def gradients(self, found: Pass) -> dict[str, Tensor]:
        """By the first name of each parameter."""
        first = {held.name: several[0].name for several in self.held.values() for held in several}
        pairs = zip(self.trained, found.gradients, strict=False)
        return {first[name]: gradient for name, gradient in pairs if gradient is not None}


class _Whole(nn.Module):
    """The model as one stage. What surrounds its one tensor, as in transformers, is left out where stages return that.

    Args:
        call: takes what the first stage takes, and every stage's keyword arguments.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.returns_tensor = False
        self.__dict__["call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["call"](*args, **kwargs)
        tensors = tensors_of(output)
        return tensors[0] if self.returns_tensor and len(tensors) == 1 else output


def named_tensors(owners: Iterable[tuple[str, str, nn.Module]]) -> Iterator[tuple[str, str, str, Tensor]]:
    """Every name of every tensor: what stands before it, the name, its kind, the tensor."""
    for prefix, _, module in owners:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield prefix, name, "parameter", parameter
        saved = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield prefix, name, "buffer" if name in saved else "constant", buffer


def held_as(name: str, place: str, kind: str, tensor: Tensor, process: int) -> Held:
    return Held(name, place, kind, Shape.of(tensor), tensor.requires_grad, (process, id(tensor)))
