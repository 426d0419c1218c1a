"""Two binary trees over the same nodes: inner nodes of one are leaves of the other.

Source: Sanders, Speck and Träff 2009.
"""

from collections.abc import Sequence


def tree_parents(k: int) -> list[int]:
    """Return the parent of each of k nodes, -1 for the root: odd nodes are leaves.

    k = 8:   0 ── 4 ─┬─ 2 ─┬─ 1
                     │     └─ 3          [-1, 2, 4, 2, 0, 6, 4, 6]
                     └─ 6 ─┬─ 5
                           └─ 7
    """
    parents = [-1]
    for node in range(1, k):
        bit = node & -node
        parent = (node ^ bit) | 2 * bit
        parents.append(parent if parent < k else node ^ bit)
    return parents


def other_tree(parents: Sequence[int]) -> list[int]:
    """Return the tree whose inner nodes are leaves of the first: mirrored, for odd k shifted."""
    k = len(parents)
    other = [-1] * k
    for node, parent in enumerate(parents):
        if parent >= 0:
            new, above = (k - 1 - node, k - 1 - parent) if k % 2 == 0 else (node + 1, parent + 1)
            other[new % k] = above % k
    return other


def depth(parents: Sequence[int], node: int) -> int:
    """Return how many steps a node is away from the root."""
    return 0 if parents[node] < 0 else 1 + depth(parents, parents[node])
