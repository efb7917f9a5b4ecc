"""Rows in which each token stands once: the prefixes that rollouts share, merged into trees and packed. Needs torch.

The tokens of a tree stand in preorder: behind each token, in one run, stand those that follow it in any rollout. So one
number for each token, the end of that run, is the whole mask: a token attends to those before it whose runs reach
beyond it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from rollout_client.results import UNKNOWN_VERSION
from rollout_client.tensors.rollouts import Integers, boundaries

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class MergedRows:
    """The trained tokens of rollouts and what comes before them, in R packed rows, padded on the right to N tokens.

    Two rollouts of a group share a token if they agree up to it in token ids, and in which of them were generated, by
    which versions and with which log-probabilities.
    """

    input_ids: Tensor
    """int64 [R, N]."""
    position_ids: Tensor
    """int64 [R, N]: number of tokens before it in its rollout; 0 for padding."""
    sequence_ids: Tensor
    """int64 [R, N]: number of its tree in the row, from 0; -1 for padding. Tokens of different trees have nothing in
    common. A tree is a single sequence where nothing branches."""
    parents: Tensor
    """int64 [R, N]: place in the row of the token before it, whose logits predict it; the own place for the first token
    of a tree and for padding."""
    subtree_ends: Tensor
    """int64 [R, N]: the place in the row after the last token that follows it in any rollout. These are the tokens that
    attend to it, and it does itself. Padding attends to itself alone."""
    loss_mask: Tensor
    """int64 [R, N]: 1 for a token that the policy generated."""
    generation_logprobs: Tensor
    """float32 [R, N], as those of the rollouts."""
    weight_versions: Tensor
    """int64 [R, N], as those of the rollouts; -1 for padding."""
    advantages: Tensor
    """float32 [R, N]: the mean of the token's advantages in the rollouts that share it; 0 where `loss_mask` is 0."""
    row_counts: Tensor
    """int64 [R, N]: number of rollouts that share the token; 0 where `loss_mask` is 0. A sum over the tokens of all
    rollouts is the sum here with these as weights; without them each token counts once."""
    lengths: Tensor
    """int64 [R]: number of tokens, without padding."""
    is_branched: Tensor
    """bool [R]: whether anything branches in the row. Otherwise it is a list of whole sequences."""
    row_tokens: Tensor
    """int64 [S, T]: where each token of the S rollouts and branches stands, as an index into the R * N places of all
    rows. -1 for padding, and for rollouts of which nothing is trained: they are in no row."""

    def to(self, device: torch.device | str) -> "MergedRows":
        return MergedRows(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def split(self) -> Iterator["MergedRows"]:
        """Each row alone. In its `row_tokens` the rollouts that stand in other rows are -1."""
        count, width = self.input_ids.shape
        for number in range(count):
            one = {field.name: getattr(self, field.name)[number : number + 1] for field in fields(self)}
            place = self.row_tokens - number * width
            yield MergedRows(**one | {"row_tokens": torch.where((place >= 0) & (place < width), place, -1)})

    @property
    def mask_mod(self) -> MaskMod:
        """The mask as a function for `create_block_mask` and `flex_attention`, over the places of all rows."""
        ends = self.subtree_ends

        def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            return (key <= query) & (query < ends[batch, key])

        return attends

    def block_mask(self) -> BlockMask:
        """The mask for `flex_attention`, which skips blocks of tokens that do not attend to each other."""
        rows, width = self.input_ids.shape
        return create_block_mask(self.mask_mod, rows, None, width, width, device=str(self.input_ids.device))

    def dense_mask(self) -> Tensor:
        """bool [R, 1, N, N]: True where the token of the third dimension attends to that of the fourth."""
        places = torch.arange(self.input_ids.shape[1], device=self.input_ids.device)
        is_before = places <= places[:, None]
        return (is_before & (places[:, None] < self.subtree_ends[:, None, :]))[:, None]

    def cu_seqlens(self, row: int) -> Tensor:
        """int32: the places at which the sequences of a row begin, then the end of the last one.

        Raises:
            ValueError: something branches in the row, so that it is not a list of sequences.
        """
        if self.is_branched[row]:
            raise ValueError(f"Row {row} has branches: it needs the tree's mask (block_mask or dense_mask).")
        sequences = self.sequence_ids[row, : int(self.lengths[row])]
        counts = torch.bincount(sequences)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)

    def token_logprobs(self, logits: Tensor) -> Tensor:
        """[R, N]: the log-probability of each token under logits [R, N, V]; 0 for the first token of a tree."""
        rows = torch.arange(len(self.parents), device=self.parents.device)[:, None]
        picked = logits[rows, self.parents, self.input_ids] - logits.logsumexp(-1).gather(1, self.parents)
        has_parent = self.parents != torch.arange(self.parents.shape[1], device=self.parents.device)
        return torch.where(has_parent, picked, 0)

    def step_advantages(self, returns: Tensor) -> Tensor:
        """Advantages of the steps in trees of forks: [R, N], 0 where `loss_mask` is 0.

        The value of a token is the mean return of the rollouts that share it, the leaves below it. Between two places
        where the tree branches all tokens have one value, and one advantage: their value less that of the tokens before
        the branch, so that what was luck or fault before it is in neither. A tree that `token_budget` has cut is
        several trees.

        Args:
            returns: [S], of the rollouts, such as their `advantages` against their group.
        """
        stands = self.row_tokens >= 0
        places, of_rollout = self.row_tokens[stands], returns[:, None].expand_as(self.row_tokens)[stands]
        zeros = torch.zeros(self.input_ids.numel(), dtype=torch.float64, device=places.device)
        leaves = zeros.index_add(0, places, torch.ones_like(places, dtype=torch.float64))
        values = zeros.index_add(0, places, of_rollout.double()) / leaves.clamp(min=1)
        leaves, values = leaves.view_as(self.parents), values.view_as(self.parents)
        before = values.clone()
        for place in range(self.parents.shape[1]):
            parent = self.parents[:, place : place + 1]
            # A token with fewer leaves than the one before it begins a branch; a place without one is its own parent.
            branches = leaves[:, place : place + 1] < leaves.gather(1, parent)
            before[:, place : place + 1] = torch.where(branches, values.gather(1, parent), before.gather(1, parent))
        return ((values - before) * self.loss_mask).float()

    def unmerged(self, values: Tensor) -> Tensor:
        """[S, T]: the values [R, N] of tokens in the rows of the rollouts; 0 where `row_tokens` is -1."""
        return torch.where(self.row_tokens >= 0, values.flatten()[self.row_tokens.clamp(min=0)], 0)


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """The tokens of S rollouts and branches, concatenated."""

    lengths: Integers
    """[S]: number of tokens of each."""
    token_ids: NDArray[Any]
    is_trained: NDArray[np.bool_]
    generation_logprobs: NDArray[np.float32]
    weight_versions: Integers
    advantages: NDArray[np.float32]

    def keys(self) -> NDArray[np.uint8]:
        """[N, K]: bytes by which tokens are compared; those of lower token ids sort first."""
        fields = [("id", ">i8"), ("is_trained", "?"), ("logprob", ">f4"), ("version", ">i8")]
        keys = np.empty(len(self.token_ids), fields)
        keys["id"], keys["is_trained"] = self.token_ids, self.is_trained
        keys["logprob"], keys["version"] = self.generation_logprobs, self.weight_versions
        return keys.view(np.uint8).reshape(len(keys), keys.itemsize)


class TreeRow(NamedTuple):
    """One rollout in a tree."""

    row: int
    shared: int
    """Number of its first tokens that the branch before it has too."""


class Tree(NamedTuple):
    branches: list[TreeRow]
    size: int
    """Number of tokens."""
    is_branched: bool


def merged_rows(
    tokens: FlatTokens,
    groups: Sequence[int],
    mask: NDArray[np.bool_],
    *,
    token_budget: int | None,
    pad_token_id: int,
    pad_to_multiple_of: int,
) -> MergedRows:
    """Merges and packs the rollouts of which something is trained.

    Args:
        groups: the group of each rollout; prefixes are merged within one.
        mask: [S, T], True for a token of the padded rollouts.
        token_budget: most tokens of a packed row; by default those of the largest tree.

    Raises:
        ValueError: a rollout is longer than `token_budget`.
    """
    trees = list(trees_of(tokens, groups, token_budget))
    budget = token_budget or max((tree.size for tree in trees), default=0)
    packed = [
        row
        for is_branched in (True, False)
        for row in packed_rows([tree for tree in trees if tree.is_branched == is_branched], budget)
    ]
    lengths = np.array([sum(tree.size for tree in row) for row in packed], np.int64)
    width = -(-int(lengths.max(initial=0)) // pad_to_multiple_of) * pad_to_multiple_of
    layout = Layout.of(packed, tokens, width)
    is_token = layout.source >= 0
    place = layout.place[layout.place >= 0]
    loss_mask = filled(is_token, tokens.is_trained[layout.source[is_token]], False)
    counts = np.bincount(place, minlength=loss_mask.size).reshape(loss_mask.shape) * loss_mask
    sums = np.bincount(place, tokens.advantages[layout.place >= 0], minlength=loss_mask.size).reshape(loss_mask.shape)
    row_tokens = np.full(mask.shape, -1, np.int64)
    row_tokens[mask] = layout.place
    columns: dict[str, NDArray[Any]] = {
        "input_ids": filled(is_token, tokens.token_ids[layout.source[is_token]].astype(np.int64), pad_token_id),
        "position_ids": layout.position_ids,
        "sequence_ids": layout.sequence_ids,
        "parents": layout.parents,
        "subtree_ends": layout.subtree_ends,
        "loss_mask": loss_mask.astype(np.int64),
        "generation_logprobs": filled(is_token, tokens.generation_logprobs[layout.source[is_token]], 0),
        "weight_versions": filled(is_token, tokens.weight_versions[layout.source[is_token]], UNKNOWN_VERSION),
        "advantages": (sums / np.maximum(counts, 1)).astype(np.float32),
        "row_counts": counts,
        "lengths": lengths,
        "is_branched": np.array([any(tree.is_branched for tree in row) for row in packed], np.bool_),
        "row_tokens": row_tokens,
    }
    return MergedRows(**{name: torch.from_numpy(column) for name, column in columns.items()})


def trees_of(tokens: FlatTokens, groups: Sequence[int], token_budget: int | None) -> Iterator[Tree]:
    """The trees of each group. One that is larger than the budget is cut, and its parts begin with the same prefix."""
    keys, begins = tokens.keys(), boundaries(tokens.lengths)
    trained = np.diff(boundaries(tokens.is_trained.astype(np.int64))[begins]) > 0
    members: dict[int, list[int]] = defaultdict(list)
    for row in np.flatnonzero(trained).tolist():
        members[groups[row]].append(row)
        if token_budget is not None and tokens.lengths[row] > token_budget:
            raise ValueError(f"A rollout has {tokens.lengths[row]} tokens, and token_budget is {token_budget}.")
    for rows in members.values():
        keys_of = {row: keys[begins[row] : begins[row + 1]] for row in rows}
        # Rows with a common prefix are adjacent in the order of their bytes.
        rows.sort(key=lambda row: keys_of[row].tobytes())
        yield from cut_into_trees(rows, [keys_of[row] for row in rows], token_budget)


def cut_into_trees(rows: Sequence[int], keys: Sequence[NDArray[np.uint8]], token_budget: int | None) -> Iterator[Tree]:
    branches: list[TreeRow] = []
    size, is_branched = 0, False
    for place, row in enumerate(rows):
        shared = common_prefix(keys[place - 1], keys[place]) if branches else 0
        added = len(keys[place]) - shared
        if branches and (not shared or (token_budget is not None and size + added > token_budget)):
            yield Tree(branches, size, is_branched)
            branches, size, is_branched, shared, added = [], 0, False, 0, len(keys[place])
        is_branched = is_branched or bool(branches and added and shared < len(keys[place - 1]))
        branches.append(TreeRow(row, shared))
        size += added
    if branches:
        yield Tree(branches, size, is_branched)


def common_prefix(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> int:
    length = min(len(left), len(right))
    differs = (left[:length] != right[:length]).any(axis=1)
    return int(differs.argmax()) if differs.any() else length


def packed_rows(trees: Sequence[Tree], budget: int) -> list[list[Tree]]:
    """The trees in rows of at most `budget` tokens: each in the first row that has room for it, large ones first."""
    rows: list[list[Tree]] = []
    rooms: list[int] = []
    for tree in sorted(trees, key=lambda tree: -tree.size):
        row = next((row for row, room in enumerate(rooms) if room >= tree.size), None)
        if row is None:
            rows.append([tree])
            rooms.append(budget - tree.size)
        else:
            rows[row].append(tree)
            rooms[row] -= tree.size
    return rows


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tokens stand in R rows of N places."""

    source: Integers
    """[R, N]: the token, as an index into the tokens of all rollouts; -1 for padding."""
    position_ids: Integers
    sequence_ids: Integers
    parents: Integers
    subtree_ends: Integers
    place: Integers
    """[tokens of all rollouts]: the place of the token among the R * N; -1 for one that is in no row."""

    @classmethod
    def of(cls, packed: Sequence[Sequence[Tree]], tokens: FlatTokens, width: int) -> "Layout":
        shape = len(packed), width
        places = np.broadcast_to(np.arange(width), shape)
        layout = cls(
            source=np.full(shape, -1, np.int64),
            position_ids=np.zeros(shape, np.int64),
            sequence_ids=np.full(shape, -1, np.int64),
            parents=places.copy(),
            subtree_ends=places + 1,
            place=np.full(len(tokens.token_ids), -1, np.int64),
        )
        begins = boundaries(tokens.lengths)
        for row, trees in enumerate(packed):
            begin = 0
            for number, tree in enumerate(trees):
                layout.sequence_ids[row, begin : begin + tree.size] = number
                layout.add(row, begin, tree, begins)
                begin += tree.size
        return layout

    def add(self, row: int, begin: int, tree: Tree, begins: Integers) -> None:
        path = np.empty(0, np.int64)  # the places of the branch's tokens
        for branch in tree.branches:
            start, end = int(begins[branch.row]), int(begins[branch.row + 1])
            # What the branch does not share has no further tokens after it.
            self.subtree_ends[row, path[branch.shared :]] = begin
            added = np.arange(begin, begin + end - start - branch.shared)
            path = np.concatenate([path[: branch.shared], added])
            self.source[row, added] = np.arange(start + branch.shared, end)
            self.position_ids[row, added] = np.arange(branch.shared, end - start)
            self.parents[row, path[1:]] = path[:-1]
            self.place[start:end] = row * self.source.shape[1] + path
            begin += len(added)
        self.subtree_ends[row, path] = begin


def filled(where: NDArray[np.bool_], values: NDArray[Any], fill: float) -> NDArray[Any]:
    """`values` where `where` is True, `fill` elsewhere."""
    result = np.full(where.shape, fill, values.dtype)
    result[where] = values
    return result
