"""Trees from rows with common prefixes: one copy of a prompt, followed by every response."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from seq1f1b.flat import whole
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.step_rows import Rates, Tree, TreeShape, lay_out

__all__ = ["PrefixTrees"]

Ragged: TypeAlias = "Tensor | Sequence[Tensor]"
"""Something for each token of each row: (rows, longest), padded, or a one-dimensional tensor for each row."""

_OWN = ("labels", "weights")  # values of every target, beside the caller's named values
_NO_LABEL = -100


class PrefixTrees:
    """Rows of tokens as trees: a tree has one copy of a prefix common to several rows, so a step computes it once.

    A row of n tokens has n - 1 targets: each token but the first is the target of the token before. The last token is
    no input, since no token follows. A node of a tree is a run of inputs shared by some rows. A node ends before the
    last shared token, which is repeated at the head of every branch. So each token of a tree has one target: the next
    token on the token's own path. A shared target stands for all rows of the node; the weight is the sum over the rows.
    If named values of two rows differ at a target that both rows supervise, sharing ends before the target.

    Args:
        input_ids: token ids of every row: (rows, longest), or a list of one-dimensional tensors.
        loss_mask: weight of every token as a target, any finite number; 0: no target. None: 1 for all tokens.
        groups: one value for each row, such as a prompt's id; rows share within a group only, even if tokens agree. If
            hidden states have further inputs, such as an image, an adapter or expert routes, a value names these, too.
        min_shared: least tokens of a node with children, to be worth a unit. A shorter node is repeated in all
            branches, which follow the node's parent.
        attention_mask: for padded rows, 1 at tokens. A row's tokens lie side by side, with padding left or right. None:
            no padding.
        cost: the model on a machine. Rows stay unshared, each a tree of its own, if the shared tree would take no less
            time. None: all common prefixes are shared.
        per_token: further values of tokens as targets, by name: advantages, old log-probabilities. (rows, longest, ...)
            or a list, in the form of ``input_ids``. The value at a token belongs to the token as a target; a row's
            first value is ignored.
    Raises:
        TypeError, ValueError: an empty row, values of another length than the row, padding within a row, no row with a
            target, or a number out of range. The message names the row.

    Attributes:
        shapes: shape of each tree, for ``plan_step``.
        tokens: ids of each tree's tokens, node after node, (tokens,).
        targets: values of each tree's targets, by name, (tokens, ...) each: "labels", ids of the next tokens, -100
            where the weight is 0; "weights"; and each name of ``per_token``, 0 where no row supervises the target.
        tree_of_row: the tree of each row; -1: the row has no target, or lies in a tree that was not taken.
        row_tokens, tree_tokens: number of inputs of all rows in the trees, and of the trees.
        told_apart: a sentence with the reason why sharing ended although tokens agreed; "": no such reason.
        unshared: rows left unshared, because sharing takes no less time by ``cost``.
    """

    def __init__(
        self,
        input_ids: Ragged,
        loss_mask: Ragged | None = None,
        groups: Iterable[Hashable] | None = None,
        min_shared: int = 16,
        *,
        attention_mask: Tensor | None = None,
        cost: CostModel | None = None,
        **per_token: Ragged,
    ) -> None:
        whole("min_shared", min_shared, 1)
        for name in _OWN:
            if name in per_token:
                raise ValueError(f"per_token may not be named {name!r}: targets have one of their own")
        self._rows = rows = _Rows(input_ids, attention_mask)
        weights = None if loss_mask is None else rows.flat("loss_mask", loss_mask)
        if weights is not None:
            weights = weights if weights.dtype == torch.float64 else weights.float()
            if not weights.sum(dtype=torch.float64).isfinite():
                token = int((~weights.isfinite()).nonzero()[0, 0])
                row = bisect_right(rows.begin, token) - 1
                raise ValueError(f"loss_mask of row {row} holds {weights[token].item()}, must hold finite numbers")
        named = {name: rows.flat(name, given) for name, given in per_token.items()}
        labels = _numbers_of(groups, rows.num_rows)
        grown = _GrownTrees(rows, weights, named, labels, min_shared)
        self.unshared = () if cost is None else tuple(_that_pay_alone(rows, grown, cost))
        if self.unshared:
            for row in self.unshared:
                labels[row] = -1 - row  # a group of a single row
            grown = _GrownTrees(rows, weights, named, labels, min_shared)
        self.shapes = grown.shapes
        self._place, self.told_apart = grown.place, grown.told_apart
        sizes = [shape.tokens for shape in self.shapes]
        self._begins, self._most = list(accumulate(sizes[:-1], initial=0)), sum(sizes)  # places with all trees in a row
        is_supervised = grown.target >= 0
        source = torch.where(is_supervised, grown.target, -1 - grown.target)
        weight = grown.weight.to(torch.float32 if weights is None else weights.dtype)
        values = {"labels": rows.tokens[source].masked_fill_(weight == 0, _NO_LABEL), "weights": weight}
        for name, flat in named.items():
            mask = is_supervised.view(-1, *[1] * (flat.dim() - 1))
            values[name] = flat[source].where(mask, flat.new_zeros(()))

        def by_tree(flat: Tensor) -> list[Tensor]:
            return list(torch.split(flat.to(rows.device), sizes))

        self.tokens = by_tree(rows.tokens[source - 1])
        parts = {name: by_tree(flat) for name, flat in values.items()}
        self.targets = [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]
        self.tree_of_row = grown.tree_of_row
        self.row_tokens, self.tree_tokens = rows.total - rows.num_rows, sum(sizes)

    def __len__(self) -> int:
        """Returns the number of trees."""
        return len(self.shapes)

    @property
    def tree_token_ratio(self) -> float:
        """Tokens of a step of rows over tokens of a step of trees, at least 1."""
        return self.row_tokens / self.tree_tokens

    def take(self, trees: Sequence[int]) -> PrefixTrees:
        """Returns some of the trees, in the given order: a replica's share, for instance.

        Args:
            trees: numbers of trees, without repetition.
        Raises:
            ValueError: a number is out of range or repeated.
        """
        if len(set(trees)) != len(trees) or any(not 0 <= tree < len(self) for tree in trees):
            raise ValueError(f"trees are {list(trees)}: must be numbers of 0..{len(self) - 1}, each at most once")
        other = copy.copy(self)
        other.shapes = tuple(self.shapes[tree] for tree in trees)
        other.tokens, other.targets = [self.tokens[tree] for tree in trees], [self.targets[tree] for tree in trees]
        other._begins = [self._begins[tree] for tree in trees]
        number = {tree: i for i, tree in enumerate(trees)}
        other.tree_of_row = [number.get(tree, -1) for tree in self.tree_of_row]
        in_trees = zip(self._rows.lengths, other.tree_of_row, strict=True)
        other.row_tokens = sum(length - 1 for length, tree in in_trees if tree >= 0)
        other.tree_tokens = sum(shape.tokens for shape in other.shapes)
        return other

    def rows(self, values: Sequence[Tensor], *, fill: float = 0.0) -> Tensor | list[Tensor]:
        """Returns a step's results for targets in the order and shape of the rows.

        A target's value stands at the target's token, as in ``per_token``: log-probabilities of one step can be passed
        to the next step.

        Args:
            values: a tensor (tokens, ...) for each tree, all of one dtype.
            fill: value at tokens that are no target: padding, the first token of a row, and rows outside of the trees.
        Returns:
            (rows, longest, ...) for padded rows, or a list of (tokens, ...).
        Raises:
            ValueError: number or lengths of the values differ from the trees.
        """
        found = [tuple(value.shape[:1]) for value in values]
        if found != [(shape.tokens,) for shape in self.shapes]:
            raise ValueError("values are not as many or not as long as the trees: give (tokens, ...) for each tree")
        joined = values[0].new_full((self._most + 1, *values[0].shape[1:]), fill)  # place -1 holds the fill
        for begin, value in zip(self._begins, values, strict=True):
            joined[begin : begin + len(value)] = value
        return self._rows.shaped(joined[self._place.to(joined.device)], fill)


class _Rows:
    """Tokens of rows, one row after another, and the form of the caller's rows: padded, or a list."""

    def __init__(self, input_ids: Ragged, attention_mask: Tensor | None) -> None:
        self.shape: torch.Size | None = None  # shape of padded rows
        self.lengths: list[int]
        self.index = torch.empty(0, dtype=torch.int64, device="cpu")  # places of tokens in padded rows
        if isinstance(input_ids, Tensor):
            if input_ids.dim() != 2:
                raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, must be (rows, tokens), or a list")
            self.shape, self.device = input_ids.shape, input_ids.device
            mask = torch.ones(self.shape, dtype=torch.bool, device="cpu")
            if attention_mask is not None:
                if attention_mask.shape != self.shape:
                    shapes = f"{tuple(attention_mask.shape)}, input_ids is {tuple(self.shape)}"
                    raise ValueError(f"attention_mask is {shapes}: must be alike")
                mask = attention_mask.detach().cpu().ne(0)
            begins = mask.diff(dim=1, prepend=mask.new_zeros(len(mask), 1)) & mask
            if len(parted := begins.sum(1).gt(1).nonzero()):
                raise ValueError(f"attention_mask of row {int(parted[0, 0])} has padding between tokens: remove it")
            self.lengths, self.index = mask.sum(1).tolist(), mask.flatten().nonzero()[:, 0]
        else:
            if attention_mask is not None:
                raise ValueError("attention_mask is for padded rows: input_ids is a list, whose rows have no padding")
            for row, ids in enumerate(input_ids):
                if not isinstance(ids, Tensor) or ids.dim() != 1:
                    raise TypeError(f"input_ids of row {row} must be a one-dimensional tensor")
            self.lengths = list(map(len, input_ids))
            self.device = input_ids[0].device if len(input_ids) else torch.device("cpu")
        self.num_rows, self.total = len(self.lengths), sum(self.lengths)
        if 0 in self.lengths:
            raise ValueError(f"row {self.lengths.index(0)} is empty: leave it out")
        if max(self.lengths, default=0) < 2:
            raise ValueError("no row has a target: each has fewer than 2 tokens")
        tokens = self.flat("input_ids", input_ids)
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"input_ids are {tokens.dtype}, must be whole numbers")
        self.tokens = tokens.to(torch.int64)
        self.begin = [0, *accumulate(self.lengths)]

    def flat(self, name: str, given: Ragged) -> Tensor:
        """Returns the values of all tokens, row after row, on the CPU."""
        if self.shape is not None:
            if not isinstance(given, Tensor) or given.shape[:2] != self.shape:
                shape = tuple(given.shape) if isinstance(given, Tensor) else "a list"
                raise ValueError(
                    f"{name} is {shape}, input_ids is {tuple(self.shape)}: must have a value for each token; one "
                    "for each row becomes that by [:, None].expand_as(input_ids)"
                )
            return given.detach().cpu().flatten(0, 1)[self.index]
        if len(given) != self.num_rows:
            raise ValueError(f"{name} has {len(given)} rows, input_ids has {self.num_rows}")
        for row, (values, length) in enumerate(zip(given, self.lengths, strict=True)):
            if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != length:
                count = len(values) if isinstance(values, Tensor) and values.dim() else "no"
                raise ValueError(f"{name} of row {row} has {count} values, must have one for each of {length} tokens")
        return torch.cat([values.detach().cpu() for values in given])

    def shaped(self, flat: Tensor, fill: float) -> Tensor | list[Tensor]:
        """Returns the values of all tokens, in the form of the caller's rows."""
        if self.shape is None:
            return list(torch.split(flat, self.lengths))
        out = flat.new_full((self.shape.numel(), *flat.shape[1:]), fill)
        out[self.index.to(flat.device)] = flat
        return out.view(*self.shape, *flat.shape[1:])


def _numbers_of(groups: Iterable[Hashable] | None, num_rows: int) -> list[int]:
    """Returns a number for each row; rows with equal numbers may share."""
    if groups is None:
        return [0] * num_rows
    listed = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    if len(listed) != num_rows:
        raise ValueError(f"groups has {len(listed)} values, must have one for each of {num_rows} rows")
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(tuple(value) if isinstance(value, list) else value, len(numbers)) for value in listed]


class _GrownTrees:
    """Trees grown from rows: the rows of a group are followed while their tokens agree, make a node, and part into
    branches.

    Nodes are in preorder. Trees, and children of a node, are in the order of first rows. A row that ends on the path of
    another row needs no node. ``place`` has, by token of the rows, the token of the trees with the token as target, or
    -1 for the first token of a row; ``target``, by token of the trees, the target t, a token of a row that supervises
    t, or -1 - t if no row supervises t; ``weight`` the sums of the rows' weights.
    """

    def __init__(
        self, rows: _Rows, weights: Tensor | None, named: dict[str, Tensor], labels: Sequence[int], min_shared: int
    ) -> None:
        self._begin, self._num_targets = rows.begin, [length - 1 for length in rows.lengths]
        self._is_supervised = np.ones(rows.total, bool) if weights is None else weights.numpy() != 0
        self._tokens, self._labels, self._names = rows.tokens.numpy(), labels, list(named)
        self._columns = [flat.unsqueeze(-1).flatten(1).view(torch.uint8).numpy() for flat in named.values()]
        self._num_apart, self._first_apart = 0, ""
        runs = self._grow(min_shared)
        self.told_apart = bool(self._num_apart) * (
            f"{self._num_apart} branches begin where tokens agree and {self._first_apart}; a loss_mask of 0 on prompts "
            "lets them share"
        )
        row, begins, counts, places = np.array(runs).T
        before = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        token = np.repeat(np.array(rows.begin)[row] + 1 + begins, counts) + before
        taken = np.repeat(places, counts) + before
        total = sum(shape.tokens for shape in self.shapes)
        place, target = np.full(rows.total, -1), np.empty(total, np.int64)
        place[token] = taken
        is_supervised = self._is_supervised[token]
        target[taken[~is_supervised]] = -1 - token[~is_supervised]
        target[taken[is_supervised]] = token[is_supervised]
        counted = None if weights is None else weights.numpy()[token]
        weight = np.bincount(taken, counted, total).astype(np.float64)
        self.place, self.target, self.weight = map(torch.from_numpy, (place, target, weight))

    def _grow(self, min_shared: int) -> list[tuple[int, int, int, int]]:
        """Makes the shapes. Returns runs of targets: row, first target in a node, number of targets, place in the
        trees."""
        num_targets, total = self._num_targets, 0
        trees: list[tuple[list[int], list[int]]] = []  # sizes and parents of the nodes of each tree
        self.tree_of_row, runs = [-1] * len(num_targets), list[tuple[int, int, int, int]]()
        stack = [(group, 0, 0, -1) for group in self._branches([i for i, n in enumerate(num_targets) if n > 0], -1)]
        stack.reverse()
        while stack:
            group, begin, known, parent = stack.pop()  # rows, begin of the next node, number of agreed targets, parent
            end = self._agreed(group, known)
            branches = self._branches([row for row in group if num_targets[row] > end], end)
            if branches and end - begin < min_shared:  # each branch repeats these tokens
                ended = [row for row in group if num_targets[row] <= end]
                branches[0] = sorted(ended + branches[0])
                stack += [(branch, begin, end, parent) for branch in reversed(branches)]
                continue
            if parent < 0:
                trees.append(([], []))
            sizes, parents = trees[-1]
            sizes.append(end - begin)
            parents.append(parent)
            for row in group:
                self.tree_of_row[row] = len(trees) - 1
                runs.append((row, begin, min(end, num_targets[row]) - begin, total))
            total += end - begin
            stack += [(branch, end, end, len(sizes) - 1) for branch in reversed(branches)]
        self.shapes = tuple(TreeShape(tuple(sizes), tuple(parents)) for sizes, parents in trees)
        return runs

    def _agreed(self, group: Sequence[int], known: int) -> int:
        """Returns the number of targets on which all rows of the group agree, each row as far as its end."""
        longest = max(group, key=self._num_targets.__getitem__)
        end = self._num_targets[longest]
        if len(group) == 1:
            return end
        path = self._tokens[self._begin[longest] + 1 :]
        for row in group:
            most, first = min(end, self._num_targets[row]), self._begin[row] + 1
            differs = (self._tokens[first + known : first + most] != path[known:most]).tobytes()
            end = known + at if (at := differs.find(1)) >= 0 else end
        if not self._columns or end == known:
            return end
        targets = np.arange(known, end)
        begins, counts = (np.array([each[row] for row in group])[:, None] for each in (self._begin, self._num_targets))
        tokens = begins + 1 + np.minimum(targets, counts - 1)
        counted = self._is_supervised[tokens] & (targets < counts)
        if not counted.any():
            return end
        first_of = np.take_along_axis(tokens, counted.argmax(0)[None], 0)  # a row that supervises each target
        for values in self._columns:
            is_apart = ((values[tokens] != values[first_of]).any(-1) & counted).any(0).tobytes()
            end = known + at if (at := is_apart.find(1, 0, end - known)) >= 0 else end
        return end

    def _branches(self, group: Sequence[int], at: int) -> list[list[int]]:
        """Returns groups of rows that agree at a target, in the order of first rows. At target -1, rows of a group have
        equal labels and first tokens. Rows that do not supervise the target join rows of an equal token."""
        if len(group) < 2:
            return [list(group)] if group else []
        found: dict[Any, dict[bytes, list[int]]] = {}
        tokens = [self._begin[row] + 1 + at for row in group]
        for row, token, key in zip(group, tokens, self._tokens[tokens].tolist(), strict=True):
            values = b""  # not supervised
            if at >= 0 and self._columns and self._is_supervised[token]:
                values = b"".join(column[token].tobytes() for column in self._columns)
            found.setdefault((self._labels[row], key), {}).setdefault(values, []).append(row)
        branches = []
        for kinds in found.values():
            unsupervised = kinds.pop(b"", [])
            own = [kinds[values] for values in sorted(kinds)] or [[]]
            if len(own) > 1 and not self._num_apart:
                rows = own[0][-1], own[1][0]
                one, other = (self._begin[row] + 1 + at for row in rows)
                columns = zip(self._names, self._columns, strict=True)
                name = next(name for name, values in columns if (values[one] != values[other]).any())
                self._first_apart = f"{name} differs, the first at token {at + 1} of rows {min(rows)} and {max(rows)}"
            self._num_apart += len(own) - 1
            branches += [sorted(unsupervised + own[0]), *own[1:]]
        return sorted(branches)


def _that_pay_alone(rows: _Rows, grown: _GrownTrees, cost: CostModel) -> list[int]:
    """Returns the rows of trees that would take no less time than separate rows, with units of the rows' best time."""
    rates, found = Rates.from_cost(cost), list[int]()
    alone: list[list[int]] = [[] for _ in grown.shapes]
    for row, tree in enumerate(grown.tree_of_row):
        if tree >= 0:
            alone[tree].append(row)
    seconds = [sum(rates.of(rows.lengths[row] - 1) for row in own) for own in alone]
    unit = rates.best_unit(sum(seconds), cost.num_ranks)
    for shape, own, of_rows in zip(grown.shapes, alone, seconds, strict=True):
        if len(own) > 1:
            shared = Tree(shape, rates)
            units = len(lay_out(shared, unit, rates, True).sizes)
            if sum(shared.seconds) + units * rates.unit >= of_rows + of_rows / unit * rates.unit:
                found += own
    return found
