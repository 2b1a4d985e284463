"""The noise of the forecast without matrices, by random vectors with the right covariance.

The noise at a node is ⟨D3psi[Pi m], Pi C Pi⟩ (torch_occ.forecasting.mean_path). If z is random with
the covariance C, this is the expectation of D3psi[Pi m](y y') with y = Pi z. So a few random z, the
probes, replace all matrices over pairs. A probe costs one application of Pi per node.

C is a sum of covariances of loss estimates. Such an estimate is (loss - b) / q where a trajectory
goes, and visits along a trajectory form a Markov chain. So a Gaussian chain with the same
covariance can be drawn layer by layer,

    x(s')   = sum_{s, a} P(s' | s, a) n(s, a)  +  e(s'),    e has the covariance of one transition,
    n(s, a) = pi(a | s) x(s)  +  f(s, a),                   f has the covariance of one choice,

where a choice from the distribution p has the covariance diag(p) - p p' = B B' with
B = (I - p 1') diag(sqrt(p)). The numbers are smooth in q, so the noise has gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.forecasting.quadrature import Quadrature
from torch_occ.game.losses import Noise, mean_square
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer, Layer
from torch_occ.mdp.occupancy import policy_of
from torch_occ.step.linearization import Linearization

#: Numbers in a tensor of probes; more probes are computed one after the other.
TOGETHER = 4 * 10**6


class Probed(NamedTuple):
    """What probes say about the noise at K nodes."""

    bend: Tensor  # (R, K, *batch), D3psi[u](y y') of every probe
    square: Tensor  # (K, *batch), E |loss_estimate|^2 in the norm of Pi


def probe_noise(
    mdp: LayeredMDP,
    linear: Linearization,
    grid: Quadrature,
    mean: Tensor,
    noise: Noise,
    baseline: Tensor,
    probes: int,
    seed: int,
) -> Probed:
    """The noise at the nodes of a grid, from `probes` random vectors per node.

    Args:
        linear: the step at q `(K, *batch, S, A)`.
        mean: of the losses at every node, `(K, *batch, S, A)`.
        baseline: of the estimator, the same shape.
        seed: the same seed gives the same numbers for all settings.
    """
    generator = torch.Generator(device=mdp.device).manual_seed(seed)
    u = linear.apply(mean)
    bends, square = [], (mean * u).sum((-2, -1))
    # The weights of sums may be negative, and then the covariance is a difference of two.
    roots = [(sign * grid.before).clamp(min=0).sqrt() for sign in (1.0, -1.0)]
    at_once = max(1, TOGETHER // mean.numel())
    for first in range(0, probes, at_once):
        count = min(at_once, probes - first)
        one = draw_fluctuations(mdp, linear.q, mean, noise, baseline, count, generator)
        sums = [torch.einsum("kj,rj...->rk...", root, one) for root in roots]
        y = linear.apply(torch.stack([*sums, one]))  # (3, count, K, *batch, S, A)
        positive, negative = linear.bend_along(u, y[:2])
        bends.append(positive - negative)
        square = square + (one * y[2]).sum((-2, -1)).sum(0) / probes
    return Probed(torch.cat(bends), square)


def draw_fluctuations(
    mdp: LayeredMDP,
    q: Tensor,
    mean: Tensor,
    noise: Noise,
    baseline: Tensor,
    probes: int,
    generator: torch.Generator,
) -> Tensor:
    """Gaussian vectors with the covariance of the loss estimate of one episode.

    All elements of `batch` share their random numbers.

    Args:
        q: `(K, *batch, S, A)`; the mean and the baseline have the same shape.

    Returns:
        `(probes, K, *batch, S, A)`.
    """

    def normal(*shape: int) -> Tensor:
        shared = (probes, len(q), *(1,) * (q.dim() - 3), *shape)
        return torch.randn(shared, dtype=q.dtype, device=q.device, generator=generator)

    exists, smallest = mdp.actions, torch.finfo(q.dtype).tiny
    initial = mdp.initial.clamp(min=smallest)
    root = initial.sqrt() * normal(initial.shape[-1])
    entering = root - initial * root.sum(-1, keepdim=True)  # (probes, K, *batch, S_0)
    visits = []
    policies, own, here = (mdp.split(x, -2) for x in (policy_of(mdp, q), q, exists))
    for k, policy in enumerate(policies):
        root = torch.where(here[k], _root(own[k], here[k]) * normal(*policy.shape[-2:]), 0.0)
        chosen = root - policy * root.sum(-1, keepdim=True)
        visits.append(policy * entering.unsqueeze(-1) + chosen)
        if k + 1 < mdp.horizon:
            layer, edges = mdp.layers[k], Edges.of(mdp.layers[k])
            root = edges.flow(own[k]).clamp(min=smallest).sqrt()
            root = root * normal(root.shape[-1])
            left = edges.leave(root).unflatten(-1, policy.shape[-2:])
            entering = edges.arrive(root) + layer.arrive(visits[-1] - left)
    variance = torch.where(exists, mean_square(mean, noise) - mean**2, 0.0)
    drawn = variance.clamp(min=smallest).sqrt() * normal(*q.shape[-2:]) / _root(q, exists)
    visited = (mean - baseline) * torch.cat(visits, -2) / torch.where(exists, q, 1.0)
    return torch.where(exists, visited + drawn, 0.0)


class Edges(NamedTuple):
    """The transitions of a layer whose probability is positive, as a list."""

    pair: Tensor  # (E,), s * A + a
    next: Tensor  # (E,)
    probability: Tensor  # (*batch, E)
    sizes: tuple[int, int, int]  # S, A, S'

    @classmethod
    def of(cls, layer: Layer) -> Edges:
        if isinstance(layer, DenseLayer):
            rows = layer.probabilities.flatten(-3, -2)  # (*batch, S * A, S')
            pair, following = (rows > 0).reshape(-1, *rows.shape[-2:]).any(0).nonzero().unbind(-1)
            return cls(pair, following, rows[..., pair, following], layer.sizes)
        pattern = layer.pattern
        return cls(pattern.pair.long(), pattern.next.long(), layer.probabilities, layer.sizes)

    def flow(self, q: Tensor) -> Tensor:
        """q(s, a) P(s' | s, a): `(*batch, S, A)` -> `(*batch, E)`."""
        return q.flatten(-2).index_select(-1, self.pair) * self.probability

    def arrive(self, x: Tensor) -> Tensor:
        """The sum over the edges into each state: `(*batch, E)` -> `(*batch, S')`."""
        return x.new_zeros(*x.shape[:-1], self.sizes[2]).index_add(-1, self.next, x)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the edges out of each pair: `(*batch, E)` -> `(*batch, S * A)`."""
        return x.new_zeros(*x.shape[:-1], self.sizes[0] * self.sizes[1]).index_add(-1, self.pair, x)


def _root(q: Tensor, exists: Tensor) -> Tensor:
    """sqrt(q), and 1 on pairs that do not exist."""
    return torch.where(exists, q, 1.0).sqrt()
