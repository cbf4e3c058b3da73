"""The shape of a tree of segments: tokens of its nodes, and which follows which."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TreeShape"]


class TreeShape(NamedTuple):
    """A tree of nodes, each a run of tokens.

    Attributes:
        sizes: tokens of each node.
        parents: the node that each follows, which has a smaller number; -1: node 0, the root.
    """

    sizes: tuple[int, ...]
    parents: tuple[int, ...]

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
