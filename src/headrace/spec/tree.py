"""Token trees: candidates for the next tokens, with common beginnings only once, the likeliest kept.

A node's value is how likely it is believed to be accepted, its ancestors included. So a tree of n nodes is expected to
bring the sum of its values in accepted drafts, and the best n nodes are those of the greatest values (EAGLE-2, Li et
al. 2024, section 4.2): a node is never worth more than its parent, so they hang together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from headrace.spec.base import Drafts

ROOT = -1  # the last known token


class TokenTree:
    """Nodes in the order in which they were added: parents before children."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.values: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, value: float) -> int:
        """The node of `token` behind `parent`; one that is there already gets the greater value."""
        node = self._children.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(value)
        else:
            self.values[node] = max(self.values[node], value)
        return node

    def add_path(self, tokens: Iterable[int], values: Iterable[float]) -> None:
        """A chain from the last known token on."""
        node = ROOT
        for token, value in zip(tokens, values, strict=True):
            node = self.add(node, token, value)

    def merge(self, tokens: Sequence[int], parents: Sequence[int], values: Sequence[float]) -> None:
        """Another tree's nodes."""
        places: list[int] = []
        for token, parent, value in zip(tokens, parents, values, strict=True):
            places.append(self.add(ROOT if parent < 0 else places[parent], token, value))

    def best(self, most: int) -> tuple[list[int], list[int], list[float]]:
        """(tokens, parents, values) of the `most` nodes of the greatest values, greatest first. Any number of them from
        the first one on is a tree, too."""
        values: list[float] = []
        for parent, value in zip(self.parents, self.values, strict=True):
            values.append(value if parent < 0 else min(value, values[parent]))
        order = sorted(range(len(values)), key=lambda node: -values[node])[:most]  # equals stay in order
        places = {node: place for place, node in enumerate(order)}
        parents = [places.get(self.parents[node], ROOT) for node in order]
        return [self.tokens[node] for node in order], parents, [values[node] for node in order]


def product_tree(tokens: np.ndarray, probs: np.ndarray, most: int) -> TokenTree:
    """The `most` likeliest paths through candidates [K, C] of K positions, best first, with `probs` [K, C].

    Positions do not depend on each other: it is the tree of Medusa's heads (Cai et al. 2024, section 2.3), whose shape
    follows this text's probabilities in place of fixed ranks.
    """
    tree = TokenTree()
    depths, ranks = tokens.shape
    # (-value, depth, rank, parent's value, parent): the best of what may come next; each brings its own next ones
    heap = [(-float(probs[0, 0]), 0, 0, 1.0, ROOT)] if depths and ranks else []
    while heap and len(tree.tokens) < most:
        value, depth, rank, above, parent = heapq.heappop(heap)
        if value >= 0.0:
            break  # impossible
        node = tree.add(parent, int(tokens[depth, rank]), -value)
        if depth + 1 < depths:
            heapq.heappush(heap, (value * float(probs[depth + 1, 0]), depth + 1, 0, -value, node))
        if rank + 1 < ranks:
            heapq.heappush(heap, (-above * float(probs[depth, rank + 1]), depth, rank + 1, above, parent))
    return tree


def static_tree(tokens: np.ndarray, probs: np.ndarray, paths: Sequence[Sequence[int]]) -> TokenTree:
    """The tree of a fixed shape: each of `paths` names a node by the ranks of the tokens on the way to it, among the
    candidates [K, C] of K positions, best first, with `probs` [K, C] (Cai et al. 2024, section 2.1.2, whose code calls
    such paths choices). The beginnings of a path are nodes too. Nodes beyond the candidates, and impossible ones, are
    left out."""
    tree = TokenTree()
    depths, ranks = tokens.shape
    for path in paths:
        node, value = ROOT, 1.0
        for depth, rank in enumerate(path[:depths]):
            if rank >= ranks or not probs[depth, rank] > 0:
                break
            value *= float(probs[depth, rank])
            node = tree.add(node, int(tokens[depth, rank]), value)
    return tree


def ladder_tree(columns: Iterable[tuple[np.ndarray, np.ndarray]]) -> TokenTree:
    """The chain of the best candidate of each position, and beside each of its tokens the others: `columns` are
    (tokens [C], probs [C]) of each position, best first. Impossible ones are left out, and what would follow them."""
    tree, node, value = TokenTree(), ROOT, 1.0
    for tokens, probs in columns:
        pairs = zip(tokens.tolist(), probs.tolist(), strict=True)
        nodes = [tree.add(node, token, value * prob) for token, prob in pairs if prob > 0]
        if not nodes:
            break
        node, value = nodes[0], value * float(probs[0])
    return tree


def packed(trees: Sequence[TokenTree], most: int) -> Drafts | None:
    """The best `most` nodes of each row's tree; None if all are empty."""
    found = [tree.best(most) for tree in trees]
    width = max((len(tokens) for tokens, _, _ in found), default=0)
    if not width:
        return None
    tokens = np.full((len(found), width), -1, np.int32)
    parents = np.full((len(found), width), ROOT, np.int32)
    values = np.zeros((len(found), width), np.float32)
    for row, (own, above, worth) in enumerate(found):
        tokens[row, : len(own)], parents[row, : len(own)], values[row, : len(own)] = own, above, worth
    return Drafts(tokens, tree=parents, values=values)
