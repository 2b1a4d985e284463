"""The zoo: regularizers, problems and exact answers.

A new case is one entry of REGULARIZERS or has one decorator, and is then tested everywhere.

REGULARIZERS    mdp -> Regularizer
@problem        () -> Problem
@exact          () -> Exact, a problem and its regularizer with the answer in closed form
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

import torch_occ as occ
from torch_occ.step.ways import why_not_game as why_not

F = TypeVar("F", bound=Callable)


class Problem(NamedTuple):
    mdp: occ.LayeredMDP
    loss: Tensor  # (S, A)
    t: float


PROBLEMS: dict[str, Callable[[], Problem]] = {}


def mdps(**more: Callable[[], occ.LayeredMDP]) -> Any:
    """A test gets `build`, which makes each MDP of the zoo, and these."""
    every = {name: (lambda make=make: make().mdp) for name, make in PROBLEMS.items()} | more
    return pytest.mark.parametrize("build", every.values(), ids=every)


def joins(registry: dict[str, F]) -> Callable[[F], F]:
    def add(build: F) -> F:
        return registry.setdefault(build.__name__, build)

    return add


problem = joins(PROBLEMS)


def tensor(*values: object) -> Tensor:
    return torch.tensor(*values, dtype=torch.float64)


def random_loss(
    mdp: occ.LayeredMDP, scale: float = 1.0, seed: int = 0, batch: tuple[int, ...] = ()
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.rand(
        *batch, mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator
    )


def random_policy(mdp: occ.LayeredMDP, *batch: int, seed: int = 0) -> Tensor:
    weights = (random_loss(mdp, seed=seed, batch=batch) + 0.05) * mdp.actions
    return weights / weights.sum(-1, keepdim=True)


def random_point(mdp: occ.LayeredMDP, *batch: int, seed: int = 0) -> Tensor:
    """Interior occupancy measures."""
    return occ.occupancy(mdp, random_policy(mdp, *batch, seed=seed))


def expect(*fragments: str, error: type[Exception] = ValueError) -> Any:
    """An error whose message has every fragment, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, fragments)))


def random_problem(
    seed: int = 0, shape: tuple[int, int, int] = (2, 2, 2)
) -> tuple[occ.LayeredMDP, Tensor]:
    """A random MDP (horizon, width, actions), and mean losses in [0, 1]."""
    mdp = occ.LayeredMDP.random(*shape, seed=seed)
    return mdp, random_loss(mdp, seed=seed)


def played_regrets(mdp, psi, losses, episodes, seeds, estimator=None):
    """The final regret of FTRL for every seed; means stand for Bernoulli losses."""
    losses = occ.BernoulliLosses(losses) if isinstance(losses, Tensor) else losses
    learner = occ.FTRL(mdp, psi, estimator)
    return occ.simulate(mdp, learner, losses, episodes, seeds, checkpoints=[episodes]).regret[:, -1]


def trajectories(mdp: occ.LayeredMDP, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All trajectories: states `(n, L)`, actions `(n, L)`, and their probabilities `(n,)`."""
    policy = occ.policy_of(mdp, q)
    found = [([], [], s, p) for s, p in enumerate(mdp.initial.tolist()) if p > 0]
    for layer, P in zip(mdp.layer_slices, mdp.transitions, strict=True):
        found = [
            ([*states, layer.start + s], [*actions, a], after, p * chosen * moved)
            for states, actions, s, p in found
            for a, chosen in enumerate(policy[layer.start + s].tolist())
            for after, moved in enumerate(P[s, a].tolist())
            if chosen * moved > 0
        ]
    states, actions, _, probabilities = zip(*found, strict=True)
    return torch.tensor(states), torch.tensor(actions), tensor(probabilities)


# -- regularizers ------------------------------------------------------------------------------


class SmoothedHybrid(occ.SeparableRegularizer):
    """A user's separable regularizer that reads all four arguments."""

    arg_constraints: ClassVar = {"weight": constraints.positive}

    def __init__(self, weight: float) -> None:
        super().__init__(weight=weight)

    def pair(self, x: Tensor) -> Tensor:
        return x * x.log() - x.sqrt()

    def rest(self, x: Tensor) -> Tensor:
        return -self.weight * (x + 0.1).log()

    def state(self, x: Tensor) -> Tensor:
        return self.weight * x**2

    def complement(self, x: Tensor) -> Tensor:
        return 1 / (0.5 + x)


class Centred(occ.StatewiseRegularizer):
    """Entropy, and a penalty on the spread of a state's actions: a dense block per state."""

    arg_constraints: ClassVar = {"weight": constraints.nonnegative}

    def __init__(self, weight: float) -> None:
        super().__init__(weight=weight)

    def per_state(self, q_s: Tensor) -> Tensor:
        centred = q_s - q_s.mean(-1, keepdim=True)
        return (
            (q_s * q_s.log()).sum(-1)
            + (self.weight * centred.square()).sum(-1)
            + (1 + q_s).prod(-1).log() ** 2
        )


class Coupled(occ.JointRegularizer):
    """Entropy, and a penalty that couples every pair with every other one."""

    arg_constraints: ClassVar = {"weight": constraints.nonnegative}

    def __init__(self, weight: float) -> None:
        super().__init__(weight=weight)

    def joint(self, q: Tensor) -> Tensor:
        positive = torch.where(q > 0, q, 1.0)  # masked pairs must not matter
        rank = 1 + torch.arange(q.shape[-2] * q.shape[-1], dtype=q.dtype).reshape(q.shape[-2:])
        squared = (q / rank).sum((-2, -1), keepdim=True) ** 2
        return (positive * positive.log()).sum((-2, -1)) + (self.weight * squared).sum((-2, -1))


def per_place(mdp: occ.LayeredMDP) -> occ.Regularizer:
    """Parameters with one value per layer, state and pair."""
    states = torch.arange(mdp.num_states, dtype=mdp.dtype)
    actions = torch.arange(mdp.num_actions, dtype=mdp.dtype)
    alpha = occ.PerState(mdp, 0.3 + 0.1 * states)
    gamma = occ.PerPair(mdp, 1 + 0.2 * torch.sin(states[:, None] + 2 * actions))
    beta = occ.PerLayer(mdp, 0.5 + 0.3 * torch.arange(mdp.horizon, dtype=mdp.dtype))
    return occ.HybridTsallis(alpha) / occ.InverseSqrt(gamma) + occ.LogBarrier(beta)


def long_sum(mdp: occ.LayeredMDP) -> occ.Regularizer:
    """Sums of sums, a schedule that multiplies, and one schedule shared by two terms."""
    eta = occ.InverseSqrt(0.9)
    return (
        (occ.Tsallis(0.4) + occ.ConditionalEntropy()) / eta
        + occ.HybridComplement(0.2) / eta
        + occ.LogBarrier(0.1) * occ.Polynomial(2.0, 0.1)
    )


REGULARIZERS: dict[str, Callable[[occ.LayeredMDP], occ.Regularizer]] = {
    "tsallis": lambda mdp: occ.Tsallis() / occ.InverseSqrt(0.7),
    "tsallis_power": lambda mdp: 1.5 * occ.Tsallis(0.3),
    "hybrid": lambda mdp: occ.HybridTsallis(0.6) / occ.Polynomial(0.8, exponent=0.4),
    "hybrid_complement": lambda mdp: occ.HybridComplement(0.9) / occ.InverseSqrt(),
    "shannon": lambda mdp: occ.Shannon() / occ.Constant(0.8),
    "conditional_entropy": lambda mdp: occ.ConditionalEntropy() / occ.InverseSqrt(1.3),
    "log_barrier": lambda mdp: occ.LogBarrier(0.4),
    "jin_luo": lambda mdp: occ.jin_luo(mdp, beta=0.3),
    "custom_separable": lambda mdp: SmoothedHybrid(0.5) / occ.InverseSqrt(),
    "custom_statewise": lambda mdp: Centred(0.7) / occ.InverseSqrt() + occ.LogBarrier(0.1),
    "custom_joint": lambda mdp: Coupled(0.5) / occ.InverseSqrt(),
    "all_levels": lambda mdp: Coupled(0.5) + Centred(0.3) / occ.InverseSqrt() + SmoothedHybrid(0.4),
    "per_place": per_place,
    "long_sum": long_sum,
}


# -- problems ----------------------------------------------------------------------------------


@problem
def bandit() -> Problem:
    """L = 1, one state."""
    return Problem(
        occ.LayeredMDP([torch.ones(1, 4, 1, dtype=torch.float64)]),
        tensor([[3.0, 1.0, 4.0, 1.5]]),
        5.0,
    )


@problem
def contexts() -> Problem:
    """L = 1, several states that the initial distribution chooses among, one of them rare."""
    mdp = occ.LayeredMDP(
        [torch.ones(3, 3, 1, dtype=torch.float64)], initial=tensor([0.5, 0.4999, 0.0001])
    )
    return Problem(mdp, random_loss(mdp, 10.0), 20.0)


@problem
def masked() -> Problem:
    """Two start states, masks, states with one action, zero probabilities."""
    first = tensor([[[0.25, 0.75], [1.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]])
    actions = torch.tensor([[True, True], [True, False], [True, True], [False, True]])
    mdp = occ.LayeredMDP(
        [first, torch.ones(2, 2, 1, dtype=torch.float64)],
        actions=actions,
        initial=tensor([0.7, 0.3]),
    )
    return Problem(mdp, tensor([[1.0, 2.0], [0.5, 9.0], [0.3, 1.7], [9.0, 1.0]]), 3.0)


@problem
def layers() -> Problem:
    mdp = occ.LayeredMDP.random(horizon=4, width=3, num_actions=3, seed=1)
    return Problem(mdp, random_loss(mdp, 30.0, seed=1), 100.0)


@problem
def nearly_deterministic() -> Problem:
    mdp = occ.LayeredMDP.random(horizon=4, width=3, num_actions=2, seed=2, concentration=0.05)
    return Problem(mdp, random_loss(mdp, 30.0, seed=2), 1000.0)


@problem
def no_choice() -> Problem:
    """One action everywhere: Omega is a single point."""
    mdp = occ.LayeredMDP([tensor([[[0.2, 0.8]]]), torch.ones(2, 1, 1, dtype=torch.float64)])
    return Problem(mdp, random_loss(mdp), 1.0)


@problem
def corridor() -> Problem:
    """Many layers of one state; the loss is so large that one action has nearly all mass."""
    mdp = occ.LayeredMDP.random(horizon=10, width=1, num_actions=2)
    return Problem(mdp, random_loss(mdp, 200.0, seed=3), 1e3)


def refused_by_the_engine(mdp, psi):
    """Whether the engine cannot solve this; if so, it must say why."""
    reason = why_not(mdp, psi)
    if reason is not None:
        with pytest.raises(
            ValueError, match=rf"^backend: {re.escape(reason)}; use backend='torch'$"
        ):
            occ.FTRLStep(mdp, psi, backend="engine")
    return reason is not None


class Kept(occ.Callback):
    """Keeps the learner that a run played, a copy of the caller's."""

    learner: occ.Learner

    def on_end(self, run, history):
        self.learner = run.learner
