"""Regularized (quantal response) equilibria as a layer: Newton's method over both treeplexes.

    q_i = argmin over q of ⟨q, loss_i(q_other)⟩ + tau psi_i(q)        for both players

In zero-sum games this is min over x max over y of ⟨x, A y⟩ + tau (psi(x) - psi(y)), and the
solution is unique. The unknowns are g = log q and the multipliers v of the flow, of both players:

    loss + tau grad psi(q) - v(s) + sum_{s'} P(s'|s,a) v(s') = 0,        sum_a q(s,a) = inflow(s).

For entropies of closed form (`ConditionalEntropy`, `dilated_entropy`) tau grad psi is
tau w(s) log pi(a|s), and the flow is log sum_a pi(a|s) = 0; there q may underflow, but not g. tau
falls in stages to its value, because g is nearly linear in 1 / tau. Policies are normalized after
each step. Two more steps with a constant Jacobian, in differentiable operations, leave the value
and give the first two derivatives.

The duality gap says nothing about information sets that a player hardly reaches. So the certificate
also has the largest change of a log-probability in one more Newton step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torch_occ._support.choices import extra
from torch_occ.games.tree import ExtensiveGame, Treeplex
from torch_occ.mdp.occupancy import flow_adjoint, flow_residual, occupancy
from torch_occ.reference import flow_constraints
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.entropic import entropy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting


class Equilibrium(NamedTuple):
    """The strategies of both players, `(S, A)` each, and the certificate."""

    log_policies: tuple[Tensor, Tensor]  # minus infinity on masked pairs
    qs: tuple[Tensor, Tensor]
    payoff: Tensor  # (2,), expected, without the regularizer
    gap: float  # what both could gain by best responses, regularizer included
    policy_residual: float
    steps: int  # of Newton's method


class _Solve(torch.autograd.Function):
    """J^-1 x for a constant factorization of J; J'^-1 x for the mode "T"."""

    @staticmethod
    def forward(ctx: Any, factors: Any, x: Tensor, mode: str) -> Tensor:
        ctx.factors, ctx.mode = factors, mode
        return torch.from_numpy(factors.solve(x.detach().numpy(), mode))

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, Tensor, None]:
        return None, _Solve.apply(ctx.factors, bar, "T" if ctx.mode == "N" else "N"), None


class _Half:
    """The equations of one player, over the n existing pairs."""

    def __init__(self, plex: Treeplex, regularizer: Regularizer) -> None:
        from scipy import sparse

        self.sparse, self.plex, self.mdp = sparse, plex, plex.mdp
        self.step, self.one = FTRLStep(plex.mdp, regularizer), torch.ones((), dtype=torch.float64)
        self.pairs = self.mdp.actions.nonzero(as_tuple=True)
        self.owner, n = self.pairs[0], len(self.pairs[0])
        self.E = sparse.csr_matrix(flow_constraints(self.mdp)[0].to_dense().numpy())
        # log pi(a|s) = g(s, a) - log share - g(the pair before s) = D g - log share; 0 at ends
        count = self.mdp.num_actions
        place = pad(self.mdp.actions.flatten().cumsum(0) - 1, (0, 1), value=n)
        self.before = place[plex.parent][self.owner]  # n for none
        above = plex.weights[plex.parent // count].where(plex.parent >= 0, 1.0)
        self.log_share = (plex.weights / above).log()[self.owner]
        up = sparse.csr_matrix((np.ones(n), (np.arange(n), self.before.numpy())), (n, n + 1))
        self.D = (sparse.identity(n) - up[:, :n]).tocsr()

    def table(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Numbers of the existing pairs as a table `(S, A)`."""
        return flat.new_full(self.mdp.actions.shape, fill).index_put(self.pairs, flat)

    def conditional(self, g: Tensor) -> Tensor:
        """log pi as g says, D g - log share; not normalized."""
        return g - self.log_share - pad(g, (0, 1))[self.before]

    def log_policy(self, g: Tensor) -> Tensor:
        """log pi, normalized."""
        y = self.conditional(g) if self.step.closed else g
        return y - self.table(y, -torch.inf).logsumexp(-1)[self.owner]

    def advance(self, g: Tensor, d: Tensor) -> Tensor:
        """g after a step d: normalized; without closed form, q itself moves linearly."""
        if not self.step.closed:
            return g + torch.log1p(min(1.0, 0.9 / max(float(-d.amin()), 1e-300)) * d)
        g = self.log_policy(g + d) + self.log_share
        for here in self.mdp.layer_slices[1:]:
            mine = (self.owner >= here.start) & (self.owner < here.stop)
            g[mine] += pad(g, (0, 1))[self.before[mine]]
        return g

    def psi(self) -> Setting:
        """The regularizer at t = 1."""
        evaluator = self.step.evaluator
        return Setting(self.mdp, evaluator, False, self.one, evaluator.parameters(self.one))

    def rates(self) -> Tensor:
        """w(s) of the closed form, by pairs."""
        composition = self.step.evaluator.composition
        weight = entropy_of(composition, composition.values(self.one)).weight
        return weight.expand(self.mdp.num_states)[self.owner]

    def residual(self, g: Tensor, v: Tensor, loss: Tensor, tau: Tensor | float) -> Tensor:
        """Both equations, of pairs and of states, in differentiable operations."""
        slope = (loss - flow_adjoint(self.mdp, v))[self.pairs]
        if self.step.closed:
            y = self.conditional(g)
            flow = self.table(y, -torch.inf).logsumexp(-1)
            return torch.cat([slope + tau * self.rates() * y, flow])
        q = self.table(g.exp())
        slope = slope + tau * self.psi().gradient(q)[self.pairs]
        return torch.cat([slope, flow_residual(self.mdp, q)])

    def jacobian(self, g: Tensor, tau: float) -> tuple[Any, Any]:
        """d residual / dg, of pairs and of states; d residual / dv is -E' and 0."""
        sparse, owner, states = self.sparse, self.owner.numpy(), self.mdp.num_states
        if self.step.closed:
            policy = self.conditional(g).exp().numpy()
            S = sparse.csr_matrix((policy, (owner, np.arange(len(g)))), self.E.shape)
            return sparse.diags(tau * self.rates().detach().numpy()) @ self.D, S @ self.D
        found: Any = self.psi().deriver(torch.Size())(self.table(g.exp())).hessian
        every, own = np.arange(states + 1), self.mdp.actions.flatten().numpy()
        H = sparse.bsr_matrix((found.to_blocks().blocks.numpy(), every[:-1], every)).tocsr()
        Q = sparse.diags(g.exp().numpy())
        return tau * H[own][:, own] @ Q, self.E @ Q


class QuantalResponse(nn.Module):
    """The regularized equilibrium of a game, differentiable in payoffs, tau and parameters of psi.

    Args:
        game: a game; in one that is not zero-sum, the equilibrium need not be unique.
        regularizer: psi of both players: a function from a treeplex, for example
            `occ.dilated_entropy`, or `lambda plex: occ.LogBarrier()`.
        tolerance: the largest policy residual that counts as solved.

    Raises:
        ImportError: if SciPy is not installed.
    """

    def __init__(self, game: ExtensiveGame, regularizer: Any, tolerance: float = 1e-8) -> None:
        super().__init__()
        with extra("games", "equilibria need SciPy"):
            import scipy.sparse.linalg  # noqa: F401
        self.game, self.tolerance = game, tolerance
        self.halves = [_Half(plex, regularizer(plex)) for plex in game.treeplexes]
        self.steps = nn.ModuleList(half.step for half in self.halves)

    def forward(self, tau: Tensor | float, game: ExtensiveGame | None = None) -> Equilibrium:
        """Solve for a positive tau; `game` is the same game with other payoffs.

        Raises:
            ValueError: if tau is not a positive number.
            ArithmeticError: if Newton's method does not converge.
        """
        game, tau = self.game if game is None else game, torch.as_tensor(tau).double()
        if not (tau.dim() == 0 and 0 < tau.item() < np.inf):
            raise ValueError(f"tau: expected a positive number, got {tau}")
        plain = game.with_payoffs(game.payoffs.detach())
        with torch.no_grad():
            gs, steps = self._solve(plain, tau.item())
            factors, step = self._linearize(plain, gs, tau.item())
            moved = self._moved(
                gs, [g + d for g, (d, _) in zip(gs, self._split(step), strict=True)]
            )
            z = self._join(gs, [v for _, v in self._split(step)])
        if not moved <= self.tolerance:
            raise ArithmeticError(
                f"equilibrium: policies are known to {moved:.1e} only, at tau = {tau.item()}"
            )
        for _ in range(2):
            z = z - _Solve.apply(factors, self._residual(game, z, tau), "N")
        logs, qs, gap = [], [], 0.0
        for half, (g, _) in zip(self.halves, self._split(z), strict=True):
            logs.append(half.table(half.log_policy(g), -torch.inf))
            qs.append(occupancy(half.mdp, logs[-1].exp()))
        for i, half in enumerate(self.halves):
            loss, psi = plain.loss(i, qs[1 - i].detach()), half.step.regularizer
            for sign, q in ((1, qs[i]), (-1, half.step.solve(loss / tau.item(), 1.0).q)):
                gap += sign * float((q * loss).sum() + tau * psi(q, 1.0, half.mdp))
        return Equilibrium((logs[0], logs[1]), (qs[0], qs[1]), game.value(*qs), gap, moved, steps)

    def _join(self, gs: Sequence[Tensor], vs: Sequence[Tensor]) -> Tensor:
        return torch.cat([gs[0], vs[0], gs[1], vs[1]])

    def _split(self, z: Tensor) -> list[tuple[Tensor, Tensor]]:
        g0, v0, g1, v1 = z.split([k for half in self.halves for k in half.E.shape[::-1]])
        return [(g0, v0), (g1, v1)]

    def _residual(self, game: ExtensiveGame, z: Tensor, tau: Tensor | float) -> Tensor:
        parts, each = self._split(z), enumerate(self.halves)
        qs = [half.table(parts[i][0].exp()) for i, half in each]
        each = enumerate(self.halves)
        return torch.cat([x.residual(*parts[i], game.loss(i, qs[1 - i]), tau) for i, x in each])

    def _linearize(
        self, game: ExtensiveGame, gs: Sequence[Tensor], tau: float
    ) -> tuple[Any, Tensor]:
        """The factors of the Jacobian at g, and the Newton step of (g, v) from v = 0."""
        from scipy.sparse import bmat
        from scipy.sparse.linalg import splu

        (J0, F0), (J1, F1) = (
            half.jacobian(g, tau) for half, g in zip(self.halves, gs, strict=True)
        )
        C0, C1 = (self._coupling(game, i, gs[1 - i]) for i in (0, 1))
        T0, T1 = (-half.E.T for half in self.halves)
        rows = (
            [J0, T0, C0, None],
            [F0, None, None, None],
            [C1, None, J1, T1],
            [None, None, F1, None],
        )
        factors = splu(bmat(rows, format="csc"))
        return factors, _Solve.apply(factors, -self._residual(game, self._at(gs), tau), "N")

    def _at(self, gs: Sequence[Tensor]) -> Tensor:
        """(g, v) with v = 0."""
        return self._join(gs, [gs[0].new_zeros(half.mdp.num_states) for half in self.halves])

    def _coupling(self, game: ExtensiveGame, i: int, g: Tensor) -> Any:
        """d loss of player i / d g of the other, by pairs."""
        own, other = self.halves[i], self.halves[1 - i]
        both, flow = (game.tree.pair >= 0).all(0), game.tree.chance * game.payoffs[:, i].numpy()
        rows, columns = game.tree.pair[i, both], game.tree.pair[1 - i, both]
        scale, factor = (x.plex.weights.numpy().repeat(x.mdp.num_actions) for x in (own, other))
        values = -flow[both] / (scale[rows] * factor[columns])
        C = own.sparse.csr_matrix((values, (rows, columns)), (len(scale), len(factor)))
        known = [x.mdp.actions.flatten().numpy() for x in (own, other)]
        return C[known[0]][:, known[1]] @ own.sparse.diags(g.exp().numpy())

    def _moved(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
        """The largest change of a log-probability."""
        each = zip(self.halves, before, after, strict=True)
        return max(float((x.log_policy(b) - x.log_policy(a)).abs().amax()) for x, a, b in each)

    def _advance(self, gs: Sequence[Tensor], z: Tensor) -> list[Tensor]:
        each = zip(self.halves, gs, self._split(z), strict=True)
        return [half.advance(g, d) for half, g, (d, _) in each]

    def _solve(self, game: ExtensiveGame, tau: float) -> tuple[Sequence[Tensor], int]:
        """log q of both players, and the number of Newton steps; from large tau to this one."""
        gs: Sequence[Tensor] = [half.step.interior[half.pairs].log() for half in self.halves]
        slope = torch.zeros_like(self._at(gs))
        first, level, ratio, steps = 10.0, np.inf, 0.5, 0
        while level > tau and ratio < 0.999:
            lower, before = max(tau, min(level * ratio, first)), np.inf
            ahead = 0.0 if level == np.inf else (1 / lower - 1 / level) * level**2
            now = self._advance(gs, ahead * slope)
            first, ratio = first * 4, ratio**0.5  # unless it converges
            for count in range(1, 13):
                steps += 1
                try:
                    factors, step = self._linearize(game, now, lower)
                except RuntimeError:  # a singular matrix
                    break
                last, now = now, self._advance(now, step)
                moved = self._moved(last, now)
                if moved < (1e-9 if lower == tau else 0.1):
                    gs, level, ratio = now, lower, ratio ** (3 if count <= 3 else 2)
                    z = self._at(gs)
                    change = self._residual(game, z, lower + 1) - self._residual(game, z, lower)
                    slope = _Solve.apply(factors, change, "N")
                    break
                change = max(float((b.exp() - a.exp()).abs().amax()) for a, b in zip(last, now))
                if not change < np.inf or (count > 3 and change > max(0.5 * before, 1e-3)):
                    break
                before = change
        return gs, steps
