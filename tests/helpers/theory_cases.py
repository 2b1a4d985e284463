"""Shared by the tests of torch_occ.theory: random data, MDPs built by hand, and `check`."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import torch_occ as occ
from experiments.statements import draw_mapping, draw_policy

F64 = torch.float64


def batch_of_mdps(count, horizon, width, actions, seed, concentration=1.0):
    """Random MDPs of one layout as one batch; the same seed makes the same MDPs."""
    seeds = range(seed, seed + count)
    options = {"concentration": concentration}
    return occ.tuning.stack(
        [occ.LayeredMDP.random(horizon, width, actions, seed=s, **options) for s in seeds]
    )


class Case(NamedTuple):
    mdp: occ.LayeredMDP  # a batch of two
    q: Tensor  # (2, S, A)
    policy: Tensor
    mapping: Tensor
    other: Tensor
    alpha: float
    generator: torch.Generator


@st.composite
def cases(draw, smallest_horizon: int = 1) -> Case:
    """Random and nearly deterministic MDPs and policies, alpha from 0.03 to 30."""
    horizon, width = draw(st.integers(smallest_horizon, 4)), draw(st.integers(1, 3))
    actions = draw(st.integers(2, 4))
    seed = draw(st.integers(0, 10**6))
    mdp = batch_of_mdps(2, horizon, width, actions, seed, draw(st.sampled_from([1.0, 0.05])))
    generator = torch.Generator().manual_seed(seed)
    policy = draw_policy(mdp, generator)
    alpha = 10 ** draw(st.floats(-1.5, 1.5))
    return Case(
        mdp,
        occ.occupancy(mdp, policy),
        policy,
        draw_mapping(mdp, generator),
        draw_mapping(mdp, generator),
        alpha,
        generator,
    )


def check(*statements: occ.theory.Statement) -> None:
    """Every one holds for every element, up to rounding."""
    for found in statements:
        assert found.left.numel(), f"{found.label}: nothing was checked"
        assert bool(found.holds.all()), (
            f"{found.label}: left {found.left}, right {found.right}, rounding {found.rounding}"
        )


def tightest(found: occ.theory.Statement) -> float:
    """The largest left / right; 1 is tight."""
    return float(found.ratio.max())


def bandit(actions: int) -> occ.LayeredMDP:
    return occ.LayeredMDP([torch.ones(1, actions, 1, dtype=F64)])


def fan(horizon: int, width: int) -> occ.LayeredMDP:
    """Action 0 of the start leads to a corridor, action 1 spreads over `width` states.

    Later actions change nothing.
    """
    first = torch.zeros(1, 2, width + 1, dtype=F64)
    first[0, 0, 0], first[0, 1, 1:] = 1.0, 1 / width
    later = torch.eye(width + 1, dtype=F64).unsqueeze(1).expand(-1, 2, -1).contiguous()
    last = torch.ones(width + 1, 2, 1, dtype=F64)
    return occ.LayeredMDP([first, *[later] * (horizon - 2), last])


def masked() -> occ.LayeredMDP:
    """Two start states, masks, a state of one action, zero probabilities; three layers."""
    first = torch.tensor(
        [[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.3, 0.7], [0.0, 0.0]]], dtype=F64
    )
    second = torch.tensor(
        [[[0.1, 0.9], [0.6, 0.4], [0.5, 0.5]], [[0.2, 0.8], [0.0, 0.0], [0.0, 0.0]]], dtype=F64
    )
    actions = torch.tensor(
        [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool
    )
    return occ.LayeredMDP(
        [first, second, torch.ones(2, 3, 1, dtype=F64)],
        actions=actions,
        initial=torch.tensor([0.6, 0.4], dtype=F64),
    )


def one_hot(mdp: occ.LayeredMDP, action: int) -> Tensor:
    """The mapping that takes the same action everywhere."""
    return torch.nn.functional.one_hot(torch.full((mdp.num_states,), action), mdp.num_actions).to(
        F64
    )
