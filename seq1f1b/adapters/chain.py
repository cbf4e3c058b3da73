"""Cuts a user's module into stages: torch.fx traces the forward, and the graph is divided between blocks."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import MappingKey, SequenceKey, tree_leaves_with_path, tree_map_with_path

from seq1f1b.adapters.chain_compare import NoTensor, compare
from seq1f1b.adapters.chain_trace import Tracer, constants_of, is_size, trace
from seq1f1b.engine.ties import carried, check_hooks, held

__all__ = ["ChainStage", "split"]

_one_at_a_time = threading.Lock()  # tracing patches nn.Module, and the comparison sets the random generators


class ChainStage(fx.GraphModule):
    """A stage made by :func:`split`; parameters and state have the names of the unsplit model.

    Attributes:
        pipeline_place: (stage index, number of stages).
        tied_parameters: parameters with copies on other stages, keyed by the first name in the model.
    """

    @property
    def pipeline_place(self) -> tuple[int, int]:
        place: tuple[int, int] = self.meta["seq1f1b_place"]
        return place

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return held(self, self.meta.get("seq1f1b_tied", {}))

    def __reduce__(self) -> Any:
        """Raises TypeError: a module unpickled by fx would lack the tied parameters."""
        raise TypeError(
            "a stage of seq1f1b.split is not pickled: save its state_dict, and split the model in each process"
        )


def split(
    model: nn.Module,
    num_stages: int | None = None,
    *,
    at: Sequence[str | int] | None = None,
    sample: Any = None,
    check: bool = True,
) -> list[ChainStage]:
    """Cuts your model into pipeline stages. Give each rank's engine one stage, and keep no other reference.

    The model is an ``nn.Sequential``, or has a forward that runs embedding, blocks and head in this order; stages begin
    at blocks. The trace of forward leaves the blocks whole, so a block may run any code. Each stage hands on every
    tensor that a later stage needs, so a residual stream may be several tensors. A parameter used by two stages is
    tied: each stage gets a copy, and the engine keeps the copies equal. The stages share everything else with the
    model. The model may be on the meta device.

    ``split`` refuses code that a trace does not record: checkpoints, hooks, Python's random numbers, control flow on
    values. Stages keep the Python values that forward read at the cut, like ``self.scale``. ``split`` then runs the
    stages in a row and compares them with the model: outputs, gradients and buffers, in training, in evaluation and
    under autocast, with the random numbers of one seed; and each stage in two segments with the stage on all tokens.
    The comparison finds contexts like ``torch.no_grad`` around a block, and leaves the model unchanged. A context that
    changes no value has no effect in the stages.

    Args:
        model: the first stage takes the arguments of forward without a default. Arguments with a default are keyword
            arguments of every stage: the engine's ``kwargs``. If forward returns (logits, loss), the stages leave out
            the loss and arguments for the loss alone, like ``targets=None``: give the engine a ``loss_fn`` instead.
        num_stages: spreads the longest list of modules (``nn.Sequential`` or ``nn.ModuleList``) evenly; the first
            stages take the remainder.
        at: replaces ``num_stages``: names of the modules at which the second and later stages begin: ``"blocks.6"``.
        sample: arguments of a small call of forward for the comparison: a tensor, a tuple, or a dict by name. None:
            token ids of shape (2, 8), if forward needs one argument and feeds it to an ``nn.Embedding``; otherwise a
            warning says that nothing was compared. A model on the meta device is not compared.
        check: False skips the comparison of the stages with the model.
    Raises:
        ValueError: forward cannot be traced or cut at the given places, or the stages compute other values than the
            model. The message names the module or the value.
    """
    names = _names(model, num_stages, at)
    with _one_at_a_time:
        return _split(model, names, sample, check)


def _split(model: nn.Module, names: Sequence[str], sample: Any, check: bool) -> list[ChainStage]:
    traced = trace(model, names)
    while True:
        stage_of = _stages(model, traced.graph, names)
        cut = _Cut(model, traced, stage_of, len(names) + 1)
        parts = [cut.part(stage) for stage in range(cut.count)]
        owned = {id(tensor) for part in parts for tensor in part.state_dict(keep_vars=True).values()}
        state = nn.Module.state_dict(model, keep_vars=True)
        left = ", ".join([name for name, tensor in state.items() if id(tensor) not in owned][:5])
        if left:
            raise ValueError(
                f"forward of {type(model).__name__} does not use {left}, which no stage would own: remove it from the "
                "model"
            )
        _copy_tied(model, parts)
        try:
            if check and not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
                handed_on = [[node.name for node in cut.handed_on(stage)] for stage in range(cut.count - 1)]
                compare(model, traced.graph, parts, [*handed_on, []], sample)
            return parts
        except NoTensor as found:
            node = next(node for node in traced.graph.nodes if node.name == found.name)
            if not _take_apart(traced.graph, node, found.value):
                raise


def _take_apart(graph: fx.Graph, node: fx.Node, value: Any) -> bool:
    """Gives the users of a nested value the single tensors, which stages can hand on. Returns whether possible."""
    users = [user for user in node.users if not (user.target is operator.getitem and user.args[0] is node)]
    leaves, keys = tree_leaves_with_path(value), (MappingKey, SequenceKey)
    are_tensors = value is not None and all(item is None or isinstance(item, torch.Tensor) for _, item in leaves)
    if not users or not are_tensors or not all(isinstance(key, keys) for path, _ in leaves for key in path):
        return False
    last = node

    def taken(path: Any, item: Any) -> fx.Node | None:
        nonlocal last
        source = node
        for key in path if item is not None else ():
            with graph.inserting_after(last):
                at = key.key if isinstance(key, MappingKey) else key.idx
                last = source = graph.call_function(operator.getitem, (source, at))
            last.meta.update(node.meta)
        return None if item is None else source

    structure = tree_map_with_path(taken, value)
    for user in users:
        user.args, user.kwargs = fx.node.map_arg(
            (user.args, user.kwargs), lambda used: structure if used is node else used
        )
    return True


def _names(model: nn.Module, num_stages: int | None, at: Sequence[str | int] | None) -> list[str]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        raise ValueError(f"split takes the model itself, got {type(model).__name__}: wrap and compile its stages")
    if (num_stages is None) == (at is None):
        raise ValueError("split takes num_stages= or at=, one of the two")
    if at is not None:
        names = [str(name) for name in ([at] if isinstance(at, str) else at)]
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
    children = list(blocks._modules)  # named_children skips a module that occurs twice
    starts = [stage * each + min(stage, rest) for stage in range(1, num_stages)]
    return [f"{path}.{children[start]}".lstrip(".") for start in starts]


# -- the graph ---------------------------------------------------------------------------------------------------------


def _stages(model: nn.Module, graph: fx.Graph, names: Sequence[str]) -> dict[fx.Node, int]:
    """Returns the stage of each value. A stage begins with the first call of the module named in ``at``."""
    begins = {name: stage for stage, name in enumerate(names, 1)}
    if len(begins) < len(names):
        raise ValueError(f"at is {list(names)}: each stage must begin with a module of its own")
    stage, found = 0, {}
    for node in graph.nodes:
        if node.op == "call_module" and begins.get(node.target, 0) > stage:
            if begins[node.target] != stage + 1:
                raise ValueError(
                    f"forward of {type(model).__name__} runs {node.target!r} before {names[stage]!r}: no stage begins "
                    "there"
                )
            stage += 1
        found[node] = stage
        if node.target is operator.getitem and isinstance(node.args[1], (int, str)):
            made = node.args[0]  # the block's stage takes apart the block's output
            if made.op == "call_module" or (made.target is operator.getitem and found[made] < stage):
                found[node] = found[made]
    if stage < len(names):
        raise ValueError(f"forward of {type(model).__name__} does not run {names[stage]!r}, so no stage begins there")
    return found


class _Cut:
    """A trace divided into the graphs of the stages."""

    def __init__(self, model: nn.Module, traced: Tracer, stage_of: dict[fx.Node, int], count: int) -> None:
        self.model, self.traced, self.graph, self.stage_of, self.count = model, traced, traced.graph, stage_of, count
        self._free = constants_of(model, traced.graph)
        self._state = nn.Module.state_dict(model, keep_vars=True).keys()

    def part(self, stage: int) -> ChainStage:
        new, made = fx.Graph(), dict[fx.Node, fx.Node]()
        arguments = [node for node in self.graph.nodes if node.op == "placeholder"]
        given = self.handed_on(stage - 1) if stage else [node for node in arguments if not node.args]
        for node in given:
            made[node] = new.placeholder(node.name)
        for node in arguments:
            if node.args:
                made[node] = new.node_copy(node)

        def own(node: fx.Node) -> fx.Node:
            if node not in made and (node.op == "get_attr" or node in self._free or self._is_taken_again(node)):
                made[node] = new.node_copy(node, own)
            return made[node]

        for node in self.graph.nodes:
            is_made_here = self.stage_of[node] == stage and node.op not in ("placeholder", "get_attr", "output")
            if is_made_here and node not in made:
                made[node] = new.node_copy(node, own)
        if stage == self.count - 1:
            new.output(fx.node.map_arg(self.graph.output_node().args[0], own))
        else:
            outputs = tuple(made[node] for node in self.handed_on(stage))
            new.output(outputs[0] if len(outputs) == 1 else outputs)
        for node in new.nodes:
            node.meta.clear()  # a copy of a stage would copy the objects in meta
        root = nn.Module()
        vars(root).update(vars(self.model) | self.traced.constants)
        part = ChainStage(root, new, type(self.model).__name__)
        part.meta["seq1f1b_place"] = (stage, self.count)
        for node in new.nodes:
            if node.op == "get_attr" and node.target not in self._state:
                owner, _, name = str(node.target).rpartition(".")
                part.get_submodule(owner)._non_persistent_buffers_set.add(name)  # fx would save the buffer in the state
        return part

    def handed_on(self, stage: int) -> list[fx.Node]:
        """Returns the values that a stage passes on: made in the stage or earlier, used later."""
        needed = dict[fx.Node, fx.Node]()  # value passed on -> first later value that depends on it
        for node in self.graph.nodes:
            if self.stage_of[node] > stage:
                for source in node.all_input_nodes:
                    for tensor in self._tensors_behind(source, self.stage_of[node]):
                        needed.setdefault(tensor, node)
        found = [node for node in self.graph.nodes if self.stage_of[node] <= stage and node in needed]
        for node in found:
            if is_size(node):
                raise ValueError(
                    f"forward of {type(self.model).__name__} uses {node} behind the cut, in {needed[node]}: "
                    f"{node} is a number, which no stage hands on; compute the number there"
                )
        return found

    def _tensors_behind(self, node: fx.Node, stage: int) -> list[fx.Node]:
        """Returns the tensors that give a stage this value. A stage reads sizes from the tensor again."""
        if node.op == "get_attr" or node in self._free or (node.op == "placeholder" and node.args):
            return []
        if self._is_taken_again(node) and self.stage_of[node] < stage:
            return [tensor for source in node.all_input_nodes for tensor in self._tensors_behind(source, stage)]
        return [node]

    def _is_taken_again(self, node: fx.Node) -> bool:
        return is_size(node) and node.target not in ("item", "tolist")


# -- tied parameters ---------------------------------------------------------------------------------------------------


def _copy_tied(model: nn.Module, parts: Sequence[ChainStage]) -> None:
    """Copies parameters used by several stages, once for each stage after the first; lists the copies in ``meta``."""
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
