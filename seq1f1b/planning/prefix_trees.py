"""Rows that begin alike, as trees: a prompt once, and every response after it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.step_rows import MOST_TOKENS, Rates, Tree, TreeShape, lay_out

__all__ = ["PrefixTrees"]

Ragged: TypeAlias = "Tensor | Sequence[Tensor]"
"""Something for each token of each row: (rows, longest), padded, or a one-dimensional tensor for each row."""

_OWN = ("labels", "weights")  # of a target, beside what the caller names
_NO_LABEL = -100


class PrefixTrees:
    """Rows of tokens as trees: what rows begin with alike is in a tree once, so that a step computes it once.

    A row of n tokens has n - 1 targets: each token but the first is the target of the one before it. The last token
    is no input, since nothing follows it. A node of a tree is a run of inputs that some rows share. It ends before the
    last token that they share, which is repeated at the head of every branch. So each token of a tree has one target:
    the next token of its own path. A shared target stands for all its rows: its weight is the sum of theirs. Where the
    named values of two rows differ at a target that both supervise, their sharing ends before it.

    Args:
        input_ids: token ids of every row: (rows, longest), or a list of one-dimensional tensors.
        loss_mask: for every token, how much it counts as a target, any finite number; 0: not at all. None: 1 each.
        groups: one value for each row; rows share within a group only. Prompts' ids, for instance.
        share_key: one value for each row; rows whose keys differ share nothing, even where their tokens agree: for
            what else their hidden states depend on, such as an image, an adapter or expert routes.
        min_shared: tokens that a node must have to be worth a unit of its own, where others follow it. A shorter one is
            repeated in its branches, which follow its parent.
        attention_mask: of padded rows, 1 for their tokens, which lie side by side, padded left or right. None: all are
            tokens.
        cost: of the model on a machine. Rows whose tree would take no less time than they do stay as they are, each a
            tree of its own. None: all that can be shared is.
        per_token: anything else that tokens have as targets, by name: advantages, old log-probabilities. (rows,
            longest, ...) or a list, as ``input_ids``. The value at a token belongs to that token as a target; that of
            the first one counts for nothing.
    Raises:
        TypeError, ValueError: an empty row, something of another length than its row, padding within a row, no row with
            a target, or a number out of range. The message names the row.

    Attributes:
        shapes: of each tree: what ``plan_step`` takes.
        tokens: ids of each tree's tokens, node after node, (tokens,).
        targets: of each tree, by name: "labels", ids of the next tokens, -100 where the weight is 0; "weights"; and
            each of ``per_token``, 0 where no row supervises the target. (tokens, ...) each.
        tree_of_row: the tree in which each row lies; -1: it has no target, or it lies in a tree that was not taken.
        row_tokens, tree_tokens: inputs of all rows that lie in these trees, and of the trees.
        told_apart: what ended sharing although the tokens agreed, in a sentence; "": nothing.
        unshared: rows that stayed as they are because sharing does not pay by ``cost``.
    """

    def __init__(
        self,
        input_ids: Ragged,
        loss_mask: Ragged | None = None,
        groups: Iterable[Hashable] | None = None,
        share_key: Iterable[Hashable] | None = None,
        min_shared: int = 16,
        *,
        attention_mask: Tensor | None = None,
        cost: CostModel | None = None,
        **per_token: Ragged,
    ) -> None:
        self._rows = rows = _Rows(input_ids, attention_mask)
        for name in _OWN:
            if name in per_token:
                raise ValueError(f"per_token may not be named {name!r}: targets have one of their own")
        weights = None if loss_mask is None else _weights(rows, loss_mask)
        named = {name: rows.flat(name, given) for name, given in per_token.items()}
        labels = _labels(rows.num_rows, groups=groups, share_key=share_key)
        grown = _grow(rows, weights, named, labels, min_shared)
        self.unshared: tuple[int, ...] = ()
        if cost is not None:
            self.unshared = tuple(_that_pay_alone(rows, grown, cost))
        if self.unshared:
            for row in self.unshared:
                labels[row] = -1 - row  # of its own
            grown = _grow(rows, weights, named, labels, min_shared)
        self.shapes = grown.shapes
        self._place, self.told_apart = grown.place, grown.told_apart
        sizes = [shape.tokens for shape in self.shapes]
        self._begins, self._most = list(accumulate(sizes[:-1], initial=0)), sum(sizes)  # of all trees, in one row
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
        """How many trees."""
        return len(self.shapes)

    @property
    def segment_sizes(self) -> list[list[int]]:
        """For each tree the tokens of its nodes."""
        return [list(shape.sizes) for shape in self.shapes]

    @property
    def parents(self) -> list[list[int]]:
        """For each tree and node the number of the node that it follows, -1 for the root."""
        return [list(shape.parents) for shape in self.shapes]

    @property
    def positions(self) -> list[Tensor]:
        """Positions of each tree's tokens, counted along their path from 0, (tokens,)."""
        spans = [span for shape in self.shapes for span in zip(shape.begins, shape.sizes, strict=True)]
        begins, sizes = torch.tensor(spans, device="cpu").T
        offsets = sizes.cumsum(0) - sizes
        flat = torch.arange(self.tree_tokens, device="cpu") + (begins - offsets).repeat_interleave(sizes)
        return list(torch.split(flat.to(self._rows.device), [shape.tokens for shape in self.shapes]))

    @property
    def tree_token_ratio(self) -> float:
        """Tokens that a step of rows computes, over those that a step of trees does, so at least 1."""
        return self.row_tokens / self.tree_tokens

    def take(self, trees: Sequence[int]) -> PrefixTrees:
        """Some of the trees, in this order: a replica's share, for instance.

        Args:
            trees: their numbers, no one twice.
        Raises:
            ValueError: there is no such tree, or one is named twice.
        """
        if len(set(trees)) != len(trees) or any(not 0 <= tree < len(self) for tree in trees):
            raise ValueError(f"trees are {list(trees)}: must be numbers of 0..{len(self) - 1}, no one twice")
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
        """Gives what a step found for the targets back to the rows, in their order and shape.

        The value of a target stands at its token, as in ``per_token``; so log-probabilities of one step may be given
        with the next.

        Args:
            values: of each tree's tokens, (tokens, ...), one dtype.
            fill: at tokens that are no target: padding, the first token of a row, and rows of other trees.
        Returns:
            (rows, longest, ...) where the rows came so, or a list of (tokens, ...).
        Raises:
            ValueError: these are not the trees' tokens.
        """
        found = [tuple(value.shape[:1]) for value in values]
        if found != [(shape.tokens,) for shape in self.shapes]:
            raise ValueError("values are not as many or not as long as the trees: give (tokens, ...) for each tree")
        joined = values[0].new_full((self._most + 1, *values[0].shape[1:]), fill)  # its last one is at -1
        for begin, value in zip(self._begins, values, strict=True):
            joined[begin : begin + len(value)] = value
        return self._rows.shaped(joined[self._place.to(joined.device)], fill)


class _Rows:
    """Rows of tokens, one after another, and the form in which they came."""

    def __init__(self, input_ids: Ragged, attention_mask: Tensor | None) -> None:
        self.shape: torch.Size | None = None  # of padded rows
        self.index: Tensor | None = None  # of their tokens, where not all are
        if isinstance(input_ids, Tensor):
            if input_ids.dim() != 2:
                raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, must be (rows, tokens), or a list")
            self.shape, self.device = input_ids.shape, input_ids.device
            self.lengths = [self.shape[1]] * self.shape[0]
            if attention_mask is not None:
                mask = _mask_of(attention_mask, input_ids)
                self.lengths = mask.sum(1).tolist()
                self.index = mask.flatten().nonzero()[:, 0]
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
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool or tokens.dim() != 1:
            raise TypeError(f"input_ids are {tokens.dtype} in {tokens.dim()} dimensions, must be whole numbers")
        self.tokens = tokens.to(torch.int64)
        lengths = torch.tensor(self.lengths, device="cpu")
        self.begin = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), lengths.cumsum(0)])

    def flat(self, name: str, given: Ragged) -> Tensor:
        """Values of all tokens, row after row, on the CPU."""
        if self.shape is not None:
            if not isinstance(given, Tensor) or given.shape[:2] != self.shape:
                shape = tuple(given.shape) if isinstance(given, Tensor) else "a list"
                raise ValueError(
                    f"{name} is {shape}, input_ids is {tuple(self.shape)}: must have a value for each token; one "
                    "for each row becomes that by [:, None].expand_as(input_ids)"
                )
            flat = given.detach().cpu().flatten(0, 1)
            return flat.contiguous() if self.index is None else flat[self.index]
        if len(given) != self.num_rows:
            raise ValueError(f"{name} has {len(given)} rows, input_ids has {self.num_rows}")
        for row, (values, length) in enumerate(zip(given, self.lengths, strict=True)):
            if not isinstance(values, Tensor) or values.dim() == 0 or len(values) != length:
                count = len(values) if isinstance(values, Tensor) and values.dim() else "no"
                raise ValueError(f"{name} of row {row} has {count} values, the row has {length} tokens: each has one")
        return torch.cat([values.detach().cpu() for values in given]).contiguous()

    def shaped(self, flat: Tensor, fill: float) -> Tensor | list[Tensor]:
        """Values of all tokens, in the form in which the rows came."""
        if self.shape is None:
            return list(torch.split(flat, self.lengths))
        if self.index is not None:
            out = flat.new_full((self.shape.numel(), *flat.shape[1:]), fill)
            out[self.index.to(flat.device)] = flat
            flat = out
        return flat.view(*self.shape, *flat.shape[1:])


def _mask_of(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """Whether each is a token, on the CPU."""
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, input_ids is {tuple(input_ids.shape)}: must be alike"
        )
    mask = attention_mask.detach().cpu().ne(0)
    begins = mask[:, 1:] & ~mask[:, :-1]
    parted = (begins.sum(1) + mask[:, :1].sum(1)).gt(1).nonzero()
    if len(parted):
        raise ValueError(
            f"attention_mask of row {int(parted[0, 0])} has padding between tokens: a row's tokens lie side by side"
        )
    return mask


def _weights(rows: _Rows, loss_mask: Ragged) -> Tensor:
    weights = rows.flat("loss_mask", loss_mask)
    weights = weights if weights.dtype == torch.float64 else weights.to(torch.float32)  # exact sums of many rows
    if not weights.sum(dtype=torch.float64).isfinite():
        token = int((~weights.isfinite()).nonzero()[0, 0])
        row = int(torch.bucketize(token, rows.begin[1:], right=True))
        raise ValueError(f"loss_mask of row {row} holds {weights[token].item()}, must hold finite numbers")
    return weights


def _labels(num_rows: int, **given: Iterable[Hashable] | None) -> list[int]:
    """A number for each row; rows may share where it is the same."""
    keys: list[list[Hashable]] = []
    for name, values in given.items():
        if values is None:
            continue
        listed = values.tolist() if isinstance(values, Tensor) else list(values)
        if len(listed) != num_rows:
            raise ValueError(f"{name} has {len(listed)} values, must have one for each of {num_rows} rows")
        keys.append([tuple(value) if isinstance(value, list) else value for value in listed])
    numbers: dict[Hashable, int] = {}
    try:
        found = [numbers.setdefault(key, len(numbers)) for key in zip(*keys, strict=True)]
    except TypeError as error:
        raise TypeError(
            f"groups and share_key must hold values that can be compared, such as numbers: {error}"
        ) from None
    return found if keys else [0] * num_rows


class _Grown(NamedTuple):
    """The trees of rows, and how their tokens lie in one another.

    Attributes:
        tree_of_row: the tree of each row; -1: it has no target.
        place: for each token of the rows, the token of all trees whose target it is; -1: the first one of its row.
        target: for each token of the trees its target, a token of a row that supervises it; where none does, -1 less
            such a token.
        weight: for each token of the trees the sum of its rows' weights.
        told_apart: as of ``PrefixTrees``.
    """

    shapes: tuple[TreeShape, ...]
    tree_of_row: list[int]
    place: Tensor
    target: Tensor
    weight: Tensor
    told_apart: str


def _that_pay_alone(rows: _Rows, grown: _Grown, cost: CostModel) -> list[int]:
    """The rows of trees that would take no less time than their rows, in units of the time that rows prefer."""
    rates, shapes = Rates.from_cost(cost), grown.shapes
    alone: list[list[int]] = [[] for _ in shapes]
    for row, tree in enumerate(grown.tree_of_row):
        if tree >= 0:
            alone[tree].append(row)
    seconds = [sum(rates.of(rows.lengths[row] - 1) for row in own) for own in alone]
    unit = rates.best_unit(sum(seconds), cost.num_ranks)
    found: list[int] = []
    for shape, own, of_rows in zip(shapes, alone, seconds, strict=True):
        if len(own) == 1:
            continue
        shared = Tree(shape, rates)
        units = len(lay_out(shared, unit, MOST_TOKENS, rates, True).parts)
        if sum(shared.seconds) + units * rates.unit >= of_rows + of_rows / unit * rates.unit:
            found += own
    return found


def _grow(
    rows: _Rows, weights: Tensor | None, named: dict[str, Tensor], labels: Sequence[int], min_shared: int
) -> _Grown:
    """Follows the rows of a group while they agree, makes a node of that, and goes on with each of their branches.

    Nodes are in preorder. Trees, and children of a node, are in the order of their first rows. Rows that end on the
    path of others need no node.
    """
    if not isinstance(min_shared, int):
        raise TypeError(f"min_shared is {min_shared!r}, must be a whole number")
    if min_shared < 1:
        raise ValueError(f"min_shared is {min_shared}, must be at least 1: a node shares so many tokens or more")
    compared = _Compared(rows, weights, named, labels)
    num_targets = compared.num_targets
    trees: list[tuple[list[int], list[int]]] = []  # sizes and parents of their nodes
    tree_of_row, total = [-1] * rows.num_rows, 0
    runs: list[tuple[int, int, int, int]] = []  # row, the first of its targets in a node, their number, their place
    stack = [(group, 0, 0, -1) for group in compared.branches([i for i, n in enumerate(num_targets) if n > 0], -1)]
    stack.reverse()
    while stack:
        group, begin, known, parent = stack.pop()  # rows, where their next node begins, targets they agree on, a node
        end = compared.agreed(group, known)
        branches = compared.branches([row for row in group if num_targets[row] > end], end)
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
            tree_of_row[row] = len(trees) - 1
            runs.append((row, begin, min(end, num_targets[row]) - begin, total))
        total += end - begin
        stack += [(branch, end, end, len(sizes) - 1) for branch in reversed(branches)]
    shapes = tuple(TreeShape(tuple(sizes), tuple(parents)) for sizes, parents in trees)
    row, begins, counts, places = np.array(runs).T
    before = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    token = np.repeat(rows.begin.numpy()[row] + 1 + begins, counts) + before
    taken = np.repeat(places, counts) + before
    place = np.full(rows.total, -1)
    place[token] = taken
    target = np.empty(total, np.int64)
    is_supervised = compared.is_supervised[token]
    target[taken[~is_supervised]] = -1 - token[~is_supervised]
    target[taken[is_supervised]] = token[is_supervised]
    counted = None if weights is None else weights.numpy()[token]
    weight = np.bincount(taken, counted, total).astype(np.float64)
    return _Grown(
        shapes,
        tree_of_row,
        torch.from_numpy(place),
        torch.from_numpy(target),
        torch.from_numpy(weight),
        compared.told_apart,
    )


class _Compared:
    """Rows beside each other: how far they agree, and in which branches they part."""

    def __init__(self, rows: _Rows, weights: Tensor | None, named: dict[str, Tensor], labels: Sequence[int]) -> None:
        self.begin, self.num_targets = rows.begin.tolist(), [length - 1 for length in rows.lengths]
        self.is_supervised = np.ones(rows.total, bool) if weights is None else weights.numpy() != 0
        self._tokens, self._labels, self._names = rows.tokens.numpy(), labels, list(named)
        self._columns = [flat.unsqueeze(-1).flatten(1).view(torch.uint8).numpy() for flat in named.values()]
        self._num_apart, self._first_apart = 0, ""

    @property
    def told_apart(self) -> str:
        """The reason why sharing ended although the tokens agreed; "": no such reason."""
        if not self._num_apart:
            return ""
        return (
            f"{self._num_apart} branches begin where tokens agree and {self._first_apart}; a loss_mask of 0 on prompts "
            "lets them share"
        )

    def agreed(self, group: Sequence[int], known: int) -> int:
        """How many targets all rows of the group agree on, as far as each goes."""
        longest = max(group, key=self.num_targets.__getitem__)
        end = self.num_targets[longest]
        if len(group) == 1:
            return end
        path = self._tokens[self.begin[longest] + 1 :]
        for row in group:
            most, first = min(end, self.num_targets[row]), self.begin[row] + 1
            differs = (self._tokens[first + known : first + most] != path[known:most]).tobytes()
            end = known + at if (at := differs.find(1)) >= 0 else end
        if not self._columns or end == known:
            return end
        targets = np.arange(known, end)
        begins, counts = (np.array([each[row] for row in group])[:, None] for each in (self.begin, self.num_targets))
        tokens = begins + 1 + np.minimum(targets, counts - 1)
        counted = self.is_supervised[tokens] & (targets < counts)
        if not counted.any():
            return end
        first_of = np.take_along_axis(tokens, counted.argmax(0)[None], 0)  # a row that supervises each target
        for values in self._columns:
            is_apart = ((values[tokens] != values[first_of]).any(-1) & counted).any(0).tobytes()
            end = known + at if (at := is_apart.find(1, 0, end - known)) >= 0 else end
        return end

    def branches(self, group: Sequence[int], at: int) -> list[list[int]]:
        """The rows by what they have at this target, -1: their label and first token; in the order of their first rows.

        Rows that do not supervise the target go with others of its token.
        """
        if len(group) < 2:
            return [list(group)] if group else []
        found: dict[Any, dict[bytes, list[int]]] = {}
        tokens = [self.begin[row] + 1 + at for row in group]
        for row, token, key in zip(group, tokens, self._tokens[tokens].tolist(), strict=True):
            values = b""  # not supervised
            if at >= 0 and self._columns and self.is_supervised[token]:
                values = b"".join(column[token].tobytes() for column in self._columns)
            found.setdefault((self._labels[row], key), {}).setdefault(values, []).append(row)
        branches = []
        for kinds in found.values():
            unsupervised = kinds.pop(b"", [])
            own = [kinds[values] for values in sorted(kinds)] or [[]]
            if len(own) > 1 and not self._num_apart:
                self._first_apart = self._difference(own[0][-1], own[1][0], at)
            self._num_apart += len(own) - 1
            branches += [sorted(unsupervised + own[0]), *own[1:]]
        return sorted(branches)

    def _difference(self, one: int, other: int, at: int) -> str:
        first, second = self.begin[one] + 1 + at, self.begin[other] + 1 + at
        columns = zip(self._names, self._columns, strict=True)
        name = next(name for name, values in columns if (values[first] != values[second]).any())
        return f"{name} differs, the first at token {at + 1} of rows {min(one, other)} and {max(one, other)}"
