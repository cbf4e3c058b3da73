"""The shape of a tree of segments: tokens of its nodes, and which follows which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["TreeShape"]


class TreeShape(NamedTuple):
    """A tree of nodes, each a run of tokens, whose data lie node after node.

    Attributes:
        sizes: tokens of each node.
        parents: the node that each follows, which has a smaller number; -1: node 0, the root.
    """

    sizes: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of_prompt(cls, prompt: int, responses: Sequence[int]) -> TreeShape:
        """A prompt of so many tokens, and its responses."""
        return cls((prompt, *responses), (-1, *[0] * len(responses)))

    @property
    def tokens(self) -> int:
        """Total over all nodes."""
        return sum(self.sizes)

    @property
    def begins(self) -> list[int]:
        """The position of each node's first token along its path."""
        begins: list[int] = []
        for parent in self.parents:
            begins.append(0 if parent < 0 else begins[parent] + self.sizes[parent])
        return begins

    @property
    def paths(self) -> list[int]:
        """The tokens of each path from the root to a leaf, which are those of the rows that make the tree."""
        inner, ends = set(self.parents), map(sum, zip(self.begins, self.sizes, strict=True))
        return [end for node, end in enumerate(ends) if node not in inner]

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def check(self, name: str) -> None:
        """Raises ``ValueError``, which begins with ``name``, unless this is a tree."""
        if not self.sizes or len(self.sizes) != len(self.parents):
            raise ValueError(f"{name} has {len(self.sizes)} nodes and {len(self.parents)} parents: each node has one")
        for node, (size, parent) in enumerate(zip(self.sizes, self.parents, strict=True)):
            if size < 1:
                raise ValueError(f"{name}: node {node} has {size} tokens, must have at least 1")
            if node == 0 and parent != -1:
                raise ValueError(f"{name}: node 0 follows {parent}, must follow nothing (-1): it is the root")
            if node > 0 and not 0 <= parent < node:
                raise ValueError(
                    f"{name}: node {node} follows {parent}, must follow one of 0..{node - 1}: a parent comes before "
                    "its children, and only node 0 is a root"
                )


def tokens_of(documents: Sequence[int | TreeShape]) -> list[int]:
    """Tokens of each document, or of all nodes of a tree."""
    return [document.tokens if isinstance(document, TreeShape) else document for document in documents]
