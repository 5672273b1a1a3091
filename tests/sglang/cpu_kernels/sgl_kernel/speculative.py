"""The kernel that turns the mask of a tree of drafts into links and positions: see the README of the folder above."""

from __future__ import annotations

from typing import Any

import torch


def reconstruct_indices_from_tree_mask(
    mask: Any, lengths: Any, positions: Any, indices: Any, children: Any, siblings: Any, requests: int, width: int
) -> None:
    """`mask[i, j]`: node j is i, or above it. First child and next sibling of each node; -1 where there is none."""
    trees = mask[: requests * width * width].view(requests, width, width).bool().tolist()
    indices.copy_(torch.arange(requests * width).view(requests, width))
    for row, tree in enumerate(trees):
        above = [[j for j in range(i) if tree[i][j]] for i in range(width)]
        parents = [max(nodes, default=-1) for nodes in above]
        for i in range(width):
            below = [j for j in range(i + 1, width) if parents[j] == i]
            beside = [j for j in range(i + 1, width) if parents[j] == parents[i]]
            children[row, i] = min(below, default=-1)
            siblings[row, i] = min(beside, default=-1) if i else -1
            positions[row * width + i] = int(lengths[row]) + len(above[i])
