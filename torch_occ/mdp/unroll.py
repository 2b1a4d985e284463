"""Unrolling: from an ordinary finite MDP to layers.

The layered MDP has one copy of a state for every step at which the state can be occupied. The
finite MDP is a list of outcomes (state, action, next state, probability), and so is every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_occ.mdp.checks import Table, check_rows, check_that, integers, whole

#: Instead of a state: the episode is over. It is the `origin` of the absorbing end, and the next
#: state of an outcome that ends the episode.
ABSORBING = -1

#: Dense transitions of more bytes than this are refused before memory is allocated.
MAX_BYTES = 4 << 30

#: An MDP that may be stored either way is dense if it has at most this many entries in all layers.
#: The engine can read both.
DENSE_ENTRIES = 1 << 22


@dataclass(frozen=True)
class Outcomes:
    """The transitions of a finite MDP as a list of outcomes; equal ones add up."""

    state: Tensor  # (n,)
    action: Tensor  # (n,)
    next: Tensor  # (n,), a state or ABSORBING
    probability: Tensor  # (n,)
    actions: Tensor  # (S, A), which pairs exist

    def sums(self, values: Tensor) -> Tensor:
        """Sum a number `(n,)` per outcome over the outcomes of each pair, `(S, A)`."""
        index = self.state * self.actions.shape[1] + self.action
        found = values.new_zeros(self.actions.numel()).index_add(0, index, values)
        return found.reshape(self.actions.shape)

    def check(self, name: str) -> None:
        """Raise a ValueError that names the first pair without a distribution."""
        given, places = self.probability.detach(), (self.state, self.action, self.next)
        words, sums = ("state", "action"), self.sums(given)
        check_rows(name, given, words, sums=sums, used=self.actions, places=places)

    def select(self, keep: Tensor) -> Outcomes:
        """The outcomes under a mask `(n,)`."""
        state, action, after = self.state[keep], self.action[keep], self.next[keep]
        return Outcomes(state, action, after, self.probability[keep], self.actions)


def finish(outcomes: Outcomes, terminal: Any, actions: Tensor | None = None) -> Outcomes:
    """Check outcomes, without pairs outside `actions`; terminal states end the episode."""
    shape, device = tuple(outcomes.actions.shape), outcomes.actions.device
    terminal = integers("terminal", terminal)
    if strange := {*terminal} - {*range(shape[0])}:
        raise ValueError(f"terminal: state {min(strange)} is not one of the {shape[0]} states")
    actions = outcomes.actions if actions is None else actions
    given = f"{actions.dtype} {tuple(actions.shape)}"
    fine = given == f"{torch.bool} {shape}"
    check_that(fine, "actions", f"a boolean mask of shape {shape}", given)
    ends = torch.zeros(shape[0], dtype=torch.bool, device=device)
    ends[list(terminal)] = True
    for state in (~actions.any(-1) & ~ends).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"actions: state {state} has no action; give every state at least one, or name it in "
            "terminal"
        )
    exist = actions & ~ends.unsqueeze(-1)
    found = replace(outcomes, actions=exist).select(exist[outcomes.state, outcomes.action])
    kind = found.probability.dtype
    check_that(kind.is_floating_point, "transition", "floating-point probabilities", kind)
    found.check("transition")
    return replace(found, next=torch.where(ends[found.next], ABSORBING, found.next))


def outcomes_of(transition: Any) -> Outcomes:
    """The outcomes of a dense or sparse tensor `(S, A, S)`, or a sparse matrix `(S * A, S)`."""
    shape = tuple(transition.shape) if hasattr(transition, "shape") else ()
    if isinstance(transition, Tensor) and transition.layout == torch.strided:
        check_that(len(shape) == 3 and shape[0] == shape[2], "transition", "shape (S, A, S)", shape)
        # With gradients every entry is kept, so that zeros have a gradient too.
        index = ((transition != 0) | transition.requires_grad).nonzero(as_tuple=True)
        values = transition[index]
    elif isinstance(transition, Tensor):
        transition = transition.to_sparse_coo().coalesce()
        index, values = transition.indices().unbind(), transition.values()
    elif hasattr(transition, "tocoo"):
        matrix = transition.tocoo()
        index = tuple(torch.as_tensor(x, dtype=torch.long) for x in (matrix.row, matrix.col))
        values = torch.as_tensor(matrix.data)
    else:
        raise TypeError(
            f"transition: expected a tensor or a sparse matrix, got {type(transition).__name__}; "
            "torch.as_tensor converts an array"
        )
    if len(shape) == 2 and 0 not in shape and shape[0] % shape[1] == 0:
        num_actions = shape[0] // shape[1]
        index = (index[0] // num_actions, index[0] % num_actions, index[1])
        shape = (shape[1], num_actions, shape[1])
    fine = len(shape) == 3 and shape[0] == shape[2]
    check_that(fine, "transition", "a sparse table of shape (S, A, S) or (S * A, S)", shape)
    everything = torch.ones(shape[:2], dtype=torch.bool, device=values.device)
    return Outcomes(index[0], index[1], index[2], values, everything)


def unroll(
    outcomes: Outcomes, horizon: int, initial: Table | int, *, sparse: bool | None = None
) -> dict[str, Any]:
    """The arguments of `LayeredMDP` for `horizon` steps; None lets the size decide on `sparse`."""
    horizon = whole("horizon", horizon)
    num_states, num_actions = outcomes.actions.shape
    dtype, device = outcomes.probability.dtype, outcomes.probability.device
    if isinstance(initial, Integral):
        if not 0 <= initial < num_states:
            raise ValueError(f"initial: state {initial} is not one of the {num_states} states")
        initial = torch.arange(num_states) == int(initial)
    initial = torch.as_tensor(initial, dtype=dtype, device=device)
    fine = initial.shape == (num_states,)
    check_that(fine, "initial", f"shape ({num_states},)", tuple(initial.shape))
    check_rows("initial", initial.detach())

    # One more state, the absorbing end, has one action and leads to itself. States without an
    # action are there from the start.
    end = num_states
    alive = outcomes.actions.any(-1)
    first = torch.arange(num_actions, device=device).eq(0).unsqueeze(0)
    mask = torch.cat([outcomes.actions, first])
    ended = torch.where(alive, 0.0, initial).sum().unsqueeze(0)
    start = torch.cat([torch.where(alive, initial, 0.0), ended])
    state, action = pad(outcomes.state, (0, 1), value=end), pad(outcomes.action, (0, 1))
    after = pad(torch.where(outcomes.next == ABSORBING, end, outcomes.next), (0, 1), value=end)
    probability = pad(outcomes.probability, (0, 1), value=1)

    layers, place = [start.nonzero().squeeze(-1)], []
    possible = probability > 0
    for _ in range(horizon):
        position = torch.full((num_states + 1,), -1, device=device)
        position[layers[-1]] = torch.arange(len(layers[-1]), device=device)
        place.append(position)  # the index of each state in its layer, or -1
        reached = torch.zeros(num_states + 1, dtype=torch.bool, device=device)
        reached[after[possible & (position[state] >= 0)]] = True
        layers.append(reached.nonzero().squeeze(-1))
    shapes = [(len(here), num_actions, len(there)) for here, there in pairwise(layers[:-1])]
    size = sum(here * num_actions * there for here, _, there in shapes)
    sparse = size > DENSE_ENTRIES if sparse is None else sparse
    if not sparse and size * probability.element_size() > MAX_BYTES:
        raise ValueError(
            f"horizon: {horizon} steps of this MDP make layers of up to {max(map(len, layers)):,} "
            "states; their dense transitions would take "
            f"{size * probability.element_size() / 2**30:,.3g} GiB (the limit is "
            f"{MAX_BYTES / 2**30:g}); pass a sparse table"
        )
    transitions: list[Tensor] = []
    for k, shape in enumerate(shapes):
        if k and torch.equal(layers[k - 1], layers[k]) and torch.equal(layers[k], layers[k + 1]):
            transitions.append(transitions[-1])  # the same states again
            continue
        here, there = place[k][state], place[k + 1][after]
        kept = ((here >= 0) & (there >= 0)).nonzero().squeeze(-1)
        index = here[kept], action[kept], there[kept]
        transitions.append(layer_tensor(index, probability[kept], shape, sparse))
    transitions.append(probability.new_ones(len(layers[horizon - 1]), num_actions, 1))
    states = torch.cat(layers[:horizon])
    return {
        "transitions": transitions,
        "actions": mask[states],
        "initial": start[layers[0]],
        "origin": torch.where(states == end, ABSORBING, states),
    }


def layer_tensor(
    index: tuple[Tensor, Tensor, Tensor],
    probability: Tensor,
    shape: tuple[int, int, int],
    sparse: bool,
) -> Tensor:
    """The transitions of a layer, `(S_k, A, S_{k+1})`, or sparse `(S_k * A, S_{k+1})`."""
    if not sparse:
        return probability.new_zeros(shape).index_put(index, probability, accumulate=True)
    rows = torch.stack([index[0] * shape[1] + index[1], index[2]])
    size = (shape[0] * shape[1], shape[2])
    return torch.sparse_coo_tensor(rows, probability, size, check_invariants=False)
