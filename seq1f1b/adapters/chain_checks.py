"""Properties of a traced forward's values: constants, sizes, effects, and numbers of tokens."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import inplace_methods

from seq1f1b.attention import carry as context

__all__ = ["check_lengths", "constants_of", "has_effect", "is_size"]

_DRAWS = ("normal", "bernoulli", "multinomial", "poisson", "dropout", "alpha_dropout", "feature_dropout", "rrelu")


def constants_of(model: nn.Module, graph: fx.Graph) -> set[fx.Node]:
    """Returns the values that depend on constants and buffers alone: every stage computes a copy."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    changed = set[fx.Node]()  # values changed in place, and all inputs of these values
    for node in reversed(graph.nodes):
        if has_effect(node) or node in changed:
            changed.update(node.all_input_nodes)
    found = set[fx.Node]()
    for node in graph.nodes:
        name = _name(node)
        draws = name.startswith("rand") or name.rstrip("_") in _DRAWS
        if node.op == "get_attr":
            is_constant = node.target not in parameters
        else:
            is_constant = node.op in ("call_function", "call_method") and not draws
        if is_constant and not has_effect(node) and node not in changed and set(node.all_input_nodes) <= found:
            found.add(node)
    return found


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


_TAKE_ROWS = ("getitem", "narrow", "narrow_copy", "split", "tensor_split")

# -- numbers of tokens -------------------------------------------------------------------------------------------------


def check_lengths(model: nn.Module, graph: fx.Graph) -> None:
    """Raises ValueError if forward counts tokens from zero: in a step, the count would restart in each segment."""
    whose = type(model).__name__
    of_model = {node for node in graph.nodes if node.op == "get_attr"}
    numbers = set[fx.Node]()  # sizes, arguments (possibly numbers), and arithmetic on both
    for node in graph.nodes:
        inputs = node.all_input_nodes
        sizes = [n for n in inputs if is_size(n) and _counts_tokens(n)]
        name = _name(node)
        of_numbers = getattr(node.target, "__module__", "") in ("_operator", "math") and name != "getitem"
        if node.op == "placeholder" or is_size(node) or (of_numbers and numbers.issuperset(inputs)):
            numbers.add(node)
        known = {n for n in inputs if n in of_model or is_size(n)}
        if name in _TAKE_ROWS:  # start and length are numbers; source and index may be tensors
            index = node.args[1] if name == "getitem" else ()
            tensors = (*node.args[:1], *(index if isinstance(index, tuple) else (index,)))
            known |= {n for n in numbers if not any(n is tensor for tensor in tensors)}
        if known.issuperset(inputs) and any(n in of_model for n in inputs):
            of_model.add(node)
            if sizes and name in _TAKE_ROWS:
                table = next(n for n in inputs if n in of_model)
                raise ValueError(
                    f"forward of {whose} takes rows of {table} by the number of tokens, and in a step "
                    "each segment would begin anew: take them by position, as self.table[seq1f1b.positions(x)]"
                )
        if sizes and node.op == "call_function" and node.target in (torch.arange, torch.linspace, torch.range):
            raise ValueError(
                f"forward of {whose} counts its tokens by torch.{node.target.__name__}, and in a step "
                "each segment would count from zero: use seq1f1b.positions(x), the positions of x's tokens"
            )


def _counts_tokens(node: fx.Node) -> bool:
    """Returns whether a size depends on dimension 1 or -2 of a tensor, or on the last of an argument."""
    name = _name(node)
    index: Any = None
    if name == "size" and (len(node.args) > 1 or "dim" in node.kwargs):
        source, index = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
    elif name == "getitem" and isinstance(node.args[0], fx.Node) and _is_shape(node.args[0]):
        source, index = node.args[0].args[0], node.args[1]
    if index is not None:
        is_argument = isinstance(source, fx.Node) and source.op == "placeholder"
        return index in (1, -2) or (index == -1 and is_argument)
    return any(is_size(n) and _counts_tokens(n) for n in node.all_input_nodes)


def _is_shape(node: fx.Node) -> bool:
    is_call = node.op == "call_method" and node.target == "size" and len(node.args) == 1 and not node.kwargs
    return is_call or (node.target is getattr and node.args[1] == "shape")


# -- values of a trace -------------------------------------------------------------------------------------------------


def is_size(node: fx.Node) -> bool:
    """Returns whether a value is surely not a tensor."""
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "stride", "item", "tolist")
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
    parents = [parent for parent in node.all_input_nodes if parent.op != "placeholder"]
    of_numbers = getattr(node.target, "__module__", "") in ("_operator", "operator", "math")
    return of_numbers and any(map(is_size, parents))


def has_effect(node: fx.Node) -> bool:
    """Returns whether a node changes a tensor in place or state outside of the graph: unused nodes must stay, too."""
    name = _name(node)
    if node.op == "call_method":
        return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "backward")
    is_in_place = node.target in (*_IN_PLACE, operator.setitem, context.carry_out, context.add_loss)
    is_in_place |= "out" in node.kwargs or bool(node.kwargs.get("inplace"))
    return node.op == "call_function" and (is_in_place or (name.endswith("_") and not name.endswith("__")))


_IN_PLACE = [getattr(operator, name) for name in inplace_methods]
