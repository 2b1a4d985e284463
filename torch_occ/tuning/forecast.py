"""The regret without playing: along the mean path, by quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import readable
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.history import comparator
from torch_occ.game.losses import (
    Corrupted,
    LossProcess,
    Noise,
    Stationary,
    StochasticallyConstrained,
    SwitchingLosses,
    check_unit_interval,
    mean_square,
    size_of_change,
)
from torch_occ.mdp.checks import check_table, check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy, policy_of, reachability
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Linearization

# -- Sums over very many episodes from few evaluations ---------------------------------------------
#
# A function that changes smoothly on the scale of t is summed exactly over the first episodes of
# every phase, and from there on by Gauss quadrature over panels that are evenly spaced in log t: by
# Euler and Maclaurin, sum_{a < t <= b} f(t) is the integral of f from a + 1/2 to b + 1/2 minus
# (f'(b + 1/2) - f'(a + 1/2)) / 24, up to terms in the third derivative.

#: Gauss nodes per panel, and episodes at the beginning of a phase that are summed one by one.
NODES, HEAD = 3, 8


@dataclass(frozen=True)
class Quadrature:
    """The nodes at which a function of the episode is evaluated, and its sums as matrices."""

    t: Tensor  # (K,), nodes
    phase: Tensor  # (K,), the phase of each node
    before: Tensor  # (K, K): row k maps f(t) to the sum over all episodes before node k
    ends: Tensor  # (C,), episodes at which curves have a point
    upto: Tensor  # (C, K): row c maps f(t) to the sum over the first ends[c] episodes

    @classmethod
    def over(
        cls, starts: Sequence[int], episodes: int, per_decade: float, like: Tensor
    ) -> Quadrature:
        """Nodes for phases that begin after the episodes `starts`, of which the first is 0."""
        # Gauss quadrature on [0, 1]: nodes, integrals up to each, weights, and slopes at the ends.
        x, w = np.polynomial.legendre.leggauss(NODES)
        nodes, powers = (x + 1) / 2, np.arange(NODES)
        basis = np.linalg.inv(nodes[:, None] ** powers)  # values at the nodes -> coefficients
        partial = nodes[:, None] ** (powers + 1) / (powers + 1) @ basis
        slopes = np.stack([(powers == 1).astype(float), powers.astype(float)]) @ basis
        t, phase, ends = list[float](), list[int](), list[int]()
        before, upto = list[list[float]](), list[list[float]]()
        total = list[float]()  # the sum so far, as the weights of the nodes
        for p, (start, stop) in enumerate(pairwise([*starts, episodes])):
            for episode in range(start + 1, min(start + HEAD, stop) + 1):
                before.append([*total])
                total.append(1.0)
                t.append(float(episode))
                phase.append(p)
                ends.append(episode)
                upto.append([*total])
            if stop - start <= HEAD:
                continue
            count = max(1, int(np.ceil(per_decade * np.log10((stop - start + 0.5) / (HEAD + 0.5)))))
            edges = np.unique(
                np.round(np.geomspace(HEAD + 0.5, stop - start + 0.5, count + 1) - 0.5) + 0.5
            )
            for low, high in pairwise(edges):
                width = np.log(high / low)
                local = low * np.exp(width * nodes)
                # Up to the middle of each node, minus the half of its own episode before it.
                before += [[*total, *own] for own in width * partial * local - 0.5 * np.eye(NODES)]
                t += [*(start + local)]
                phase += [p] * NODES
                slope = slopes[1] / (width * high) - slopes[0] / (width * low)
                total += [*(width * w / 2 * local - slope / 24)]
                ends.append(start + int(high))
                upto.append([*total])
        return cls(
            torch.tensor(t, dtype=like.dtype, device=like.device),
            torch.tensor(phase, device=like.device),
            _matrix(before, len(t), like),
            torch.tensor(ends, device=like.device),
            _matrix(upto, len(t), like),
        )

    def sums(self, f: Tensor) -> Tensor:
        """sum_{tau <= end} f(tau) at every end: `(K, *event)` -> `(C, *event)`."""
        return torch.tensordot(self.upto, f, 1)


def _matrix(rows: list[list[float]], columns: int, like: Tensor) -> Tensor:
    dense = np.zeros((len(rows), columns))
    for i, row in enumerate(rows):
        dense[i, : len(row)] = row
    return torch.tensor(dense, dtype=like.dtype, device=like.device)


# -- Loss processes as phases: stretches of episodes with constant means ---------------------------
#
# An adversary that reacts to the learner, or a random walk, has to be simulated.

#: A forecast takes a fixed number of solves per phase. With more phases, simulation is better.
MOST_PHASES = 256


class Phases(NamedTuple):
    """P phases: each has the episodes after its start, up to the start of the next one."""

    starts: Sequence[int]  # the first is 0
    means: Tensor  # (P, *batch, S, A)
    noise: Noise

    def at(self, episodes: Tensor) -> Tensor:
        """The phase of each of these episodes."""
        return torch.bucketize(episodes, episodes.new_tensor(self.starts)) - 1

    def totals(self, values: Tensor, episodes: Tensor, phase: Tensor) -> Tensor:
        """Sums of values over the first `episodes` `(K,)`, in `phase`: `(P, ...)` -> `(K, ...)`."""
        begun, ones = episodes.new_tensor(self.starts), (1,) * (values.dim() - 1)
        lengths = torch.diff(begun).reshape(-1, *ones)
        finished = torch.cat([torch.zeros_like(values[:1]), (lengths * values[:-1]).cumsum(0)])
        return finished[phase] + (episodes - begun[phase]).reshape(-1, *ones) * values[phase]


def phases_of(mdp: LayeredMDP, losses: Tensor | LossProcess, episodes: int) -> Phases:
    """The phases of the first episodes; means `(*batch, S, A)` stand for Bernoulli losses."""
    fine = isinstance(episodes, int | float) and 1 <= episodes <= 10**12
    check_that(fine, "episodes", "a number from 1 to 1e12", episodes)
    episodes = int(episodes)
    if isinstance(losses, Tensor):
        check_unit_interval("losses", losses)
        return Phases([0], check_table("losses", losses, mdp)[None], "bernoulli")
    if isinstance(losses, Stationary):
        return Phases([0], losses.mean[None], losses.noise)
    if isinstance(losses, Corrupted) and isinstance(losses.base, Stationary):
        return _corrupted(mdp, losses, losses.base.mean, episodes)
    starts: Sequence[int]
    if isinstance(losses, SwitchingLosses):
        starts = range(0, episodes, losses.period)
    elif isinstance(losses, StochasticallyConstrained):
        starts = [0, *(end for end in losses._phase_ends(episodes).tolist() if end < episodes)]
    else:
        raise TypeError(
            f"losses: {type(losses).__name__} cannot be forecast, because its means are not fixed "
            "beforehand in few phases; simulate it, or give means, BernoulliLosses, UniformLosses, "
            "SwitchingLosses, StochasticallyConstrained, or Corrupted around a fixed mean"
        )
    if len(starts) > MOST_PHASES:
        raise ValueError(
            f"losses: {type(losses).__name__} has {len(starts)} phases, more than {MOST_PHASES}; "
            "forecast fewer episodes, or simulate"
        )
    means = torch.stack([_first_mean(mdp, losses, start) for start in starts])
    return Phases(starts, means, losses.noise)


def _corrupted(mdp: LayeredMDP, losses: Corrupted, clean: Tensor, episodes: int) -> Phases:
    """Full corruption while the budget lasts, one episode with the remainder, then none."""
    attacked = _first_mean(mdp, losses, 0)
    cost = float(size_of_change(mdp, attacked - clean))
    whole = math.floor(losses.budget / cost * (1 + 1e-12)) if cost else 0
    left = (losses.budget - whole * cost) / cost if cost else 0.0
    found = {0: attacked} if whole else {}
    if left > 1e-9 and losses.strategy != "uniform":
        found[whole] = clean + left * (attacked - clean)
        whole += 1
    found = {start: mean for start, mean in (found | {whole: clean}).items() if start < episodes}
    return Phases([*found], torch.stack([*found.values()]), losses.noise)


def _first_mean(mdp: LayeredMDP, losses: LossProcess, start: int) -> Tensor:
    """The mean of the episode after `start`, from the process itself."""
    means, _ = losses.means(mdp, losses.start(mdp, [0]), start + 1, 1, torch.empty(0))
    return means[0, 0]


# -- A forecast of the regret of FTRL with bandit feedback, smooth and differentiable --------------
#
# The loss estimate, (loss - b) / q on the visited pairs plus a baseline b, is unbiased for every
# regularizer. So the cumulative estimate fluctuates around the mean path Lbar_t = sum of means.
# Expanding q_t = q(t, Lhat_{t-1}) to second order around it,
#
#     E <q_t, mean_t> = <q(t, Lbar), mean_t>  -  1/2 <d/ds Pi(Lbar + s mean_t), C_{t-1}>,
#                           drift                             noise
#
# where Pi is the response of q to the loss (torch_occ.step.implicit) and C_t = sum of
# Cov(loss_estimate) along the path, which contains the joint probabilities of visiting two pairs in
# one episode. Everything is smooth on the scale of t, so few values of t are enough. All of them
# are solved as one batch.
#
# Summed by parts over t, the noise is the stability term of the FTRL analysis, 1/2 sum_t
# E |loss_estimate_t|^2 in the norm of Pi_t, minus the fluctuations that are left at the end and
# those that the growth of psi_t removes. `stability` is that term.
#
# The expansion is in the relative fluctuations of q. It fails where a single visit changes q many
# times over; `noise_share` shows this, and leaping works there. With a baseline b, a visit without
# loss may do so even where the noise is small: it lowers the estimate by b / q, and with a
# log-barrier whose beta is below about b this removes the whole lead. Only leaping shows that.

#: Panels of three solves per tenfold of episodes.
PER_DECADE = 3.0

#: Noise above this share of a forecast is no small correction; docs/tuning.md measures it.
SMALL_NOISE = 1 / 3

#: The largest size of a matrix over pairs at all nodes.
MOST_BYTES = 4 * 10**9


class Forecast(NamedTuple):
    """Predicted pseudo-regret at C episodes; NaN if a step could not be certified."""

    episodes: Tensor  # (C,)
    drift: Tensor  # (*batch, C), the regret of the mean path
    noise: Tensor  # (*batch, C), the contribution of fluctuations of the loss estimates
    stability: Tensor  # (*batch, C), 1/2 sum_t E |loss_estimate_t|^2_{Pi_t}, for comparison
    certified: Tensor  # (*batch,), whether every step on the path was certified

    @property
    def regret(self) -> Tensor:
        """The predicted regret, drift + noise, `(*batch, C)`."""
        return self.drift + self.noise

    @property
    def final(self) -> Tensor:
        """The regret after the last episode, `(*batch,)`, differentiable; `float` does not warn."""
        return readable(self.regret[..., -1])

    @property
    def noise_share(self) -> Tensor:
        """|noise| / (|drift| + |noise|) at the end, `(*batch,)`."""
        drift, noise = self.drift[..., -1].abs(), self.noise[..., -1].abs()
        return noise / (drift + noise)

    @property
    def reliable(self) -> Tensor:
        """Whether it is certified, with little noise, `(*batch,)`; elsewhere use `leap`."""
        return self.certified & (self.noise_share <= SMALL_NOISE)


def forecast(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    per_decade: float = PER_DECADE,
) -> Forecast:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    All batch shapes broadcast. The result is differentiable in the regularizer's parameters and in
    the means.

    Args:
        mdp: may have a batch shape.
        regularizer: psi_t; its parameters may have a batch shape.
        losses: means `(*batch, S, A)` of Bernoulli losses, differentiable; or a loss process whose
            means are fixed in advance.
        episodes: T.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other
            `CentredEstimator`.
        per_decade: panels of three solves per tenfold of episodes.

    Returns:
        The curves of drift, noise and stability.

    Raises:
        ValueError: if `episodes` is out of range, a loss is not in [0, 1], the losses have too many
            phases, or a matrix over pairs would need more than 4 GB.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    estimate, phases = centred(estimator), phases_of(mdp, losses, episodes)
    step = FTRLStep(mdp, regularizer)
    grid = Quadrature.over(phases.starts, int(episodes), per_decade, mdp.transitions[0])
    batch = torch.broadcast_shapes(
        phases.means.shape[1:-2], mdp.batch_shape, *regularizer.batched()
    )
    missing = (1,) * (len(batch) + 3 - phases.means.dim())
    mean = phases.means.reshape(len(phases.starts), *missing, *phases.means.shape[1:])
    mean = mean.expand(-1, *batch, -1, -1)  # (P, *batch, S, A)
    t = grid.t.reshape(-1, *(1,) * len(batch)).expand(-1, *batch)  # (K, *batch)
    solution = step.solve(phases.totals(mean, grid.t - 1, grid.phase), t, check=False)
    certified = solution.converged.all(0)
    q = floored(mdp, solution.q)
    gaps = optimal_policy(mdp, mean).gaps  # (P, *batch, S, A)
    # Gaps instead of losses: the loss that every policy pays drops out, without cancellation.
    ends = grid.ends.to(mdp.dtype)
    best = comparator(mdp, phases.totals(gaps, ends, phases.at(ends)))
    drift = grid.sums((q * gaps[grid.phase]).sum((-2, -1))) - best

    linear = Linearization(step, q, t)
    baseline = torch.where(mdp.actions, estimate.baseline_like(q, t), 0.0)
    bend, square = _noise(linear, grid, mean[grid.phase], phases.noise, baseline)
    curves = torch.stack([drift, grid.sums(-0.5 * bend), grid.sums(0.5 * square)])
    drift, noise, stability = torch.where(certified, curves, torch.nan).movedim(1, -1)
    return Forecast(grid.ends, drift, noise, stability, certified)


def _noise(
    linear: Linearization, grid: Quadrature, mean: Tensor, noise: Noise, baseline: Tensor
) -> tuple[Tensor, Tensor]:
    """D3psi[Pi m](Pi C Pi) and E |loss_estimate|^2_Pi at every node, `(K, *batch)`, by matrices."""
    q = linear.q
    nodes, pairs = q.shape[:-2].numel(), q.shape[-2:].numel()
    size = nodes * pairs**2 * q.element_size()
    if size > MOST_BYTES:
        raise ValueError(
            f"mdp: the noise needs matrices of {size / 1e9:.1f} GB, for {pairs:,} pairs at "
            f"{nodes:,} nodes; use occ.leap"
        )
    Pi = linear.dense()  # (K, *batch, S * A, S * A)
    flat, visited = mean.flatten(-2), second_moment(linear.mdp, q, mean, noise, baseline)
    b = baseline.flatten(-2)
    C = torch.tensordot(grid.before, visited - outer(flat - b), 1)
    u = (Pi @ flat.unsqueeze(-1)).squeeze(-1).unflatten(-1, q.shape[-2:])
    mixed = (b.unsqueeze(-2) @ Pi @ (2 * flat - b).unsqueeze(-1))[..., 0, 0]
    return linear.bend(u, Pi @ C @ Pi), (Pi * visited).sum((-2, -1)) + mixed


def second_moment(
    mdp: LayeredMDP, q: Tensor, mean: Tensor, noise: Noise, baseline: Tensor
) -> Tensor:
    """E[x x'] of one episode, `(*batch, S * A, S * A)`, with x = (loss - b) / q where visited.

    x is the loss estimate minus b. With m = mean - b, the entry of pairs i before j is
    m_i m_j P(i and j are visited) / (q_i q_j) = m_i m_j P(s_j is visited | i) / q(s_j). The
    diagonal is E[(loss_i - b_i)^2] / q_i. Two pairs of one layer are never both visited.
    """
    exists = mdp.actions
    reached = reachability(mdp, policy_of(mdp, q))
    ahead = mdp.joint_transitions @ reached.unsqueeze(-3)  # (*batch, S, A, S)
    later = (ahead / q.sum(-1)[..., None, None, :]).flatten(-3, -2)  # (*batch, S * A, S)
    later = later.repeat_interleave(mdp.num_actions, -1)  # (*batch, S * A, S * A)
    flat, b = (torch.where(exists, x, 0.0).flatten(-2) for x in (mean, baseline))
    joint = outer(flat - b) * later
    own = (mean_square(flat, noise) - 2 * b * flat + b**2) / torch.where(exists, q, 1.0).flatten(-2)
    return joint + joint.mT + torch.diag_embed(own)


def floored(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """q, raised where 1/q^3 would overflow; the formulas are continuous near q = 0."""
    return torch.where(mdp.actions, q.clamp(min=torch.finfo(q.dtype).tiny ** 0.3), 0.0)


def outer(x: Tensor) -> Tensor:
    """x x', `(..., n)` -> `(..., n, n)`."""
    return x.unsqueeze(-1) * x.unsqueeze(-2)
