"""Visit counts of transitions, the empirical transitions, and doubling epochs.

    m(s, a, s')    how often s' followed the pair (s, a);    m(s, a) = sum over s'

A table over transitions is a tuple with one tensor `(*batch, S_k, A, S_{k+1})` per layer, as
`mdp.transitions`. The last layer leads to the terminal state, so its tensor is
`(*batch, S_{L-1}, A, 1)`. Learners keep such a table in one flat tensor `(N, M)` with
M = sum_k S_k A S_{k+1}, layer after layer; `split_transitions` returns its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.mdp.layered import LayeredMDP

Table = tuple[Tensor, ...]  # one tensor (*batch, S_k, A, S_{k+1}) per layer


def transition_shapes(mdp: LayeredMDP) -> list[tuple[int, int, int]]:
    """(S_k, A, S_{k+1}) of every layer; the last S_{k+1} is 1."""
    return [(n, mdp.num_actions, after) for n, after in pairwise((*mdp.layer_sizes, 1))]


def num_transitions(mdp: LayeredMDP) -> int:
    """M, the number of entries of a table over transitions."""
    return sum(n * a * after for n, a, after in transition_shapes(mdp))


def split_transitions(mdp: LayeredMDP, flat: Tensor) -> Table:
    """The layers `(*batch, S_k, A, S_{k+1})` of a flat table `(*batch, M)`, as views."""
    shapes = transition_shapes(mdp)
    parts = flat.split([n * a * after for n, a, after in shapes], -1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))


def join_transitions(layers: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_transitions`: a flat table `(*batch, M)`."""
    return torch.cat([layer.flatten(-3) for layer in layers], -1)


def visited_transitions(mdp: LayeredMDP, feedback: Feedback) -> Tensor:
    """The places `(N, L)` of an episode's transitions in a flat table."""
    shapes = transition_shapes(mdp)
    starts = torch.tensor([here.start for here in mdp.layer_slices], device=mdp.device)
    first = [0, *accumulate(n * a * after for n, a, after in shapes)][:-1]
    offsets = torch.tensor(first, device=mdp.device)
    widths = torch.tensor([after for _, _, after in shapes], device=mdp.device)
    local = feedback.states - starts  # (N, L), numbered within the layer
    after = torch.nn.functional.pad(local[:, 1:], (0, 1))  # the terminal state has number 0
    return offsets + (local * mdp.num_actions + feedback.actions) * widths + after


def visits_of(mdp: LayeredMDP, counts: Sequence[Tensor]) -> Tensor:
    """m(s, a) = sum over s' of m(s, a, s'), `(*batch, S, A)`."""
    return torch.cat([layer.sum(-1) for layer in counts], -2)


def empirical_transitions(
    mdp: LayeredMDP, counts: Sequence[Tensor], pseudo_count: float = 1.0
) -> Table:
    """The empirical transitions of visit counts, with pseudo-counts.

        P(s' | s, a) = (m(s, a, s') + kappa / n) / (m(s, a) + kappa)

    where n is the number of states of the next layer. Without pseudo-counts some states could have
    probability zero from every pair, and then the occupancy measures would have no interior. One
    pseudo-count moves P by at most 1 / (m + 1). With kappa = 0, rows that were never seen are
    uniform.

    Args:
        mdp: the layout; its probabilities are not used.
        counts: m, one tensor `(*batch, S_k, A, S_{k+1})` per layer.
        pseudo_count: kappa, at least 0.

    Returns:
        One tensor `(*batch, S_k, A, S_{k+1})` per layer. Rows of pairs that do not exist are zero.

    Raises:
        ValueError: if a shape does not fit the layout, or if `pseudo_count` is negative.
    """
    check_table("counts", mdp, counts)
    if not pseudo_count >= 0:
        raise ValueError(f"pseudo_count: expected a number of at least 0, got {pseudo_count}")
    found = []
    for m, mask in zip(counts, mdp.split(mdp.actions, 0), strict=True):
        n, total = m.shape[-1], m.sum(-1, keepdim=True) + pseudo_count
        rows = torch.where(total > 0, (m + pseudo_count / n) / total.clamp(min=1e-300), 1.0 / n)
        found.append(torch.where(mask.unsqueeze(-1), rows, 0.0))
    return tuple(found)


def begins_epoch(visits: Tensor, epoch_visits: Tensor, feedback: Feedback) -> Tensor:
    """Whether an episode ends its epoch: some visited pair has doubled its count, `(N,)`.

    A new epoch begins if m(s_k, a_k) >= max(1, 2 m_i(s_k, a_k)) in some layer k, where m_i are the
    counts at the beginning of epoch i (Jin, Jin, Luo, Sra and Yu, 2020; Jin, Huang and Luo, 2021).
    There are at most S A (1 + log2 T) epochs.

    Args:
        visits: m after the episode, `(N, S, A)`.
        epoch_visits: m_i, `(N, S, A)`.
        feedback: the episode.
    """
    now, before = feedback.gather(visits), feedback.gather(epoch_visits)
    return (now >= (2 * before).clamp(min=1)).any(-1)


def check_table(name: str, mdp: LayeredMDP, table: Sequence[Tensor]) -> None:
    """Raise a ValueError unless a table over transitions fits the layout."""
    shapes = transition_shapes(mdp)
    if len(table) != len(shapes):
        raise ValueError(f"{name}: expected one tensor per layer, {len(shapes)}, got {len(table)}")
    for k, (layer, shape) in enumerate(zip(table, shapes, strict=True)):
        if tuple(layer.shape[-3:]) != shape:
            raise ValueError(
                f"{name}[{k}]: expected shape (*batch, {', '.join(map(str, shape))}), got "
                f"{tuple(layer.shape)}"
            )
