"""Cuts a module of one's own into stages: its forward is traced by torch.fx and divided between two of its blocks."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

import seq1f1b
from seq1f1b.ops import attention, packing
from seq1f1b.runtime.tied_copies import carried, check_hooks, held

__all__ = ["ChainStage", "split"]

_one_at_a_time = threading.Lock()  # fx changes nn.Module while it traces
_WRAPPED: Any = (math, seq1f1b)
_OURS = (attention.positions, attention.causal_attention, packing.document_starts)
for _function in _OURS:
    getattr(seq1f1b, _function.__name__)  # is there once it was used, and only then does fx see it


class ChainStage(fx.GraphModule):
    """What :func:`split` makes; parameters and state have the names of the unsplit model.

    Attributes:
        tied_parameters: parameters of this stage of which other stages hold copies, by their first name in the model.
    """

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return held(self, self.meta.get("seq1f1b_tied", {}))

    def __reduce__(self) -> Any:
        """Raises TypeError: fx would make a module of it that has forgotten its tied parameters."""
        raise TypeError(
            "a stage of seq1f1b.split is not pickled: save its state_dict, and split the model in each process"
        )


def split(
    model: nn.Module, num_stages: int | None = None, *, at: Sequence[str | int] | None = None
) -> list[ChainStage]:
    """Cuts a model of your own into pipeline stages. Give each rank's engine its own, and keep no other reference.

    The forward of the model is divided where a block begins: an ``nn.Sequential``, or any forward that runs embedding,
    blocks and head in this order. It is traced with the blocks left whole, so what blocks do is free. Every tensor that
    a later stage needs is handed on, so residual streams may be several tensors. A parameter that two stages use is
    tied: each stage gets a copy, and the engine keeps the copies equal. The stages share all else with the model, which
    may be on the meta device.

    Args:
        model: its first stage takes the arguments of forward that have no default. Those that have one are keyword
            arguments of every stage: the engine's ``kwargs``.
        num_stages: the longest list of modules (``nn.Sequential`` or ``nn.ModuleList``) is spread evenly, and the first
            stages take the rest.
        at: in place of it, names of the modules with which the second and later stages begin, as ``"blocks.6"``.
    Raises:
        ValueError: forward cannot be traced, or be cut there; the message names the module or the value.
    """
    names = _names(model, num_stages, at)
    with _one_at_a_time:
        graph = _trace(model, names)
    stage_of = _stages(model, graph, names)
    parts = [_part(model, graph, stage_of, stage, len(names) + 1) for stage in range(len(names) + 1)]
    _check_owned(model, parts)
    _copy_tied(model, parts)
    return parts


def _names(model: nn.Module, num_stages: int | None, at: Sequence[str | int] | None) -> list[str]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if (num_stages is None) == (at is None):
        raise ValueError("split takes num_stages= or at=, one of the two")
    if at is not None:
        if isinstance(at, str):
            raise ValueError(f"at is {at!r}, must be a list of names, as [{at!r}]")
        names = [str(name) for name in at]
        known = {name for name, _ in model.named_modules(remove_duplicate=False)} - {""}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(
                f"at names {unknown}, which {type(model).__name__} does not have; it has {sorted(known)[:9]}"
            )
        return names
    assert num_stages is not None
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Sequential, nn.ModuleList)) and len(m)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no nn.Sequential or nn.ModuleList: say by at= where to cut")
    path, blocks = max(lists, key=lambda named: len(named[1]))
    if not 1 <= num_stages <= len(blocks):
        raise ValueError(
            f"num_stages is {num_stages}, must be from 1 to the {len(blocks)} modules of {path or 'model'!r}"
        )
    each, rest = divmod(len(blocks), num_stages)
    children = [name for name, _ in blocks.named_children()]
    starts = [stage * each + min(stage, rest) for stage in range(1, num_stages)]
    return [f"{path}.{children[start]}".lstrip(".") for start in starts]


# -- the graph ---------------------------------------------------------------------------------------------------------


class _Tracer(fx.Tracer):
    """Enters only the modules that hold a block at which the model is cut."""

    def __init__(self, inside: set[str]) -> None:
        super().__init__(autowrap_modules=_WRAPPED, autowrap_functions=_OURS)
        self._inside = inside

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return name not in self._inside


def _trace(model: nn.Module, names: Sequence[str]) -> fx.Graph:
    inside = {""}
    for name in names:
        path = name.split(".")
        inside |= {".".join(path[:i]) for i in range(1, len(path))}
    for name in sorted(inside):
        module = model.get_submodule(name)
        where = f"{name!r} ({type(module).__name__})" if name else type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise ValueError(f"{where} has hooks, which no stage would run: put them on its blocks")
        if "token_offset" in type(module).forward.__code__.co_names:
            raise ValueError(f"forward of {where} uses token_offset(), a number of the segment: use positions(x)")
    modes = {module: module.training for module in model.modules()}
    try:
        traced = [_trace_once(model, inside, mode, {}) for mode in (True, False)]
        defaults = {n.target: n.args[0] for n in traced[0].nodes if n.op == "placeholder" and n.args}
        plain = _trace_once(model, inside, True, defaults) if defaults else None
    finally:
        for module, mode in modes.items():
            module.training = mode
    if _text(traced[0], {}) != _text(traced[1], {}):
        raise ValueError(
            f"forward of {type(model).__name__} is another one in training than in evaluation (self.training, or "
            "F.dropout): put that into a module of its own, as nn.Dropout"
        )
    if plain is not None and _text(traced[0], defaults) != _text(plain, defaults):
        raise ValueError(
            f"forward of {type(model).__name__} depends on whether {', '.join(map(str, defaults))} are given: put that "
            "into a module of its own"
        )
    return traced[0]


def _trace_once(model: nn.Module, inside: set[str], training: bool, defaults: dict[str, Any]) -> fx.Graph:
    for module in model.modules():
        module.training = training
    try:
        return _Tracer(inside).trace(model, concrete_args=defaults or None)
    except Exception as error:  # whatever forward does with a value that it does not have yet
        raise ValueError(
            f"forward of {type(model).__name__} cannot be traced: {error}. What depends on values or sizes must lie "
            "in a module of its own"
        ) from error


def _text(graph: fx.Graph, defaults: dict[str, Any]) -> list[str]:
    """What a graph computes, for a comparison; ``defaults`` are the values of optional arguments."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("output", "call_module") or any(user in live for user in node.users):
            live.add(node)
    names: dict[fx.Node, Any] = {}
    lines: list[str] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = defaults.get(node.target, node.target)
        elif node in live:
            names[node] = f"%{len(lines)}"
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: names[n])
            lines.append(f"{node.op} {node.target} {arguments}")
    return lines


def _stages(model: nn.Module, graph: fx.Graph, names: Sequence[str]) -> dict[fx.Node, int]:
    """The stage of each value."""
    begins = {name: stage for stage, name in enumerate(names, 1)}
    if len(begins) < len(names):
        raise ValueError(f"at is {list(names)}: each stage must begin with a module of its own")
    stage, found = 0, {}
    for node in graph.nodes:
        if node.op == "call_module" and node.target in begins:
            if begins[node.target] != stage + 1:
                order = "again" if begins[node.target] <= stage else f"before {names[stage]!r}"
                raise ValueError(
                    f"forward of {type(model).__name__} runs {node.target!r} {order}: no stage begins there"
                )
            stage += 1
        found[node] = stage
    if stage < len(names):
        raise ValueError(f"forward of {type(model).__name__} does not run {names[stage]!r}, so no stage begins there")
    return found


def _part(model: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int, count: int) -> ChainStage:
    new, made = fx.Graph(), dict[fx.Node, fx.Node]()
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    given = _handed_on(model, graph, stage_of, stage - 1) if stage else [node for node in arguments if not node.args]
    for node in given:
        made[node] = new.placeholder(node.name)
    for node in arguments:
        if node.args:
            made[node] = new.node_copy(node)

    def own(node: fx.Node) -> fx.Node:
        if node.op == "get_attr" and node not in made:
            made[node] = new.node_copy(node)
        return made[node]

    for node in graph.nodes:
        if stage_of[node] == stage and node.op not in ("placeholder", "get_attr", "output"):
            made[node] = new.node_copy(node, own)
    if stage == count - 1:
        output = next(node for node in reversed(graph.nodes) if node.op == "output")
        new.output(fx.node.map_arg(output.args[0], own))
    else:
        outputs = tuple(made[node] for node in _handed_on(model, graph, stage_of, stage))
        new.output(outputs[0] if len(outputs) == 1 else outputs)
    part = ChainStage(model, new, type(model).__name__)
    for node in new.nodes:
        if node.op == "get_attr":  # fx makes every such tensor a part of the state
            owner, _, name = node.target.rpartition(".")
            theirs = model.get_submodule(owner)
            if name not in theirs._parameters and (
                name not in theirs._buffers or name in theirs._non_persistent_buffers_set
            ):
                part.get_submodule(owner)._non_persistent_buffers_set.add(name)
    return part


def _handed_on(model: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """Values that are made up to a stage, and used behind it."""
    found = [
        node
        for node in graph.nodes
        if stage_of[node] <= stage
        and any(stage_of[user] > stage for user in node.users)
        and node.op != "get_attr"
        and not (node.op == "placeholder" and node.args)
    ]
    for node in found:
        if _is_no_tensor(node):
            users = ", ".join(str(user) for user in node.users if stage_of[user] > stage)
            raise ValueError(
                f"forward of {type(model).__name__} uses {node} behind the cut, in {users}: it is a size, which no "
                "stage hands on; take it there, of what the block before returns"
            )
    return found


def _is_no_tensor(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim")
    parents = [parent for parent in node.all_input_nodes if parent.op != "placeholder"]
    return node.op == "call_function" and "operator" in str(node.target.__module__) and any(map(_is_no_tensor, parents))


# -- what the stages hold ----------------------------------------------------------------------------------------------


def _check_owned(model: nn.Module, parts: Sequence[ChainStage]) -> None:
    owned = {name for part in parts for name in part.state_dict()}
    left = [name for name in model.state_dict() if name not in owned]
    if left:
        raise ValueError(
            f"forward of {type(model).__name__} does not use {', '.join(left[:5])}, which no stage would own: remove "
            "it from the model"
        )


def _copy_tied(model: nn.Module, parts: Sequence[ChainStage]) -> None:
    """Gives each stage but the first a copy of what several use, and lists the copies for the engine."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, list[ChainStage]] = {}
    for part in parts:
        for parameter in part.parameters():
            holders.setdefault(id(parameter), []).append(part)
    for part in parts:
        tied: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, p in part.named_parameters(remove_duplicate=False):
            if len(holders[id(p)]) > 1:
                check_hooks(first_names[id(p)], p)
                tied.setdefault(id(p), []).append((name, p))
        part.meta["seq1f1b_tied"] = {first_names[key]: [name for name, _ in named] for key, named in tied.items()}
        copied = {key: named[0][1] for key, named in tied.items() if holders[key][0] is not part}
        memo: dict[int, Any] = {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())}
        memo |= {key: carried(p) for key, p in copied.items()}
        for node in list(part.graph.nodes) if copied else ():
            owner, _, name = str(node.target).rpartition(".")
            if node.op == "call_module" and any(id(p) in copied for p in part.get_submodule(node.target).parameters()):
                part.get_submodule(owner)._modules[name] = copy.deepcopy(part.get_submodule(node.target), memo)
            elif node.op == "get_attr" and id(getattr(part.get_submodule(owner), name)) in copied:
                held = part.get_submodule(owner)
                held._parameters[name] = memo[id(held._parameters[name])]
