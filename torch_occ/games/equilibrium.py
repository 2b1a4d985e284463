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
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from torch_occ._support.choices import extra
from torch_occ.games.tree import ExtensiveGame
from torch_occ.mdp.occupancy import flow_adjoint, flow_residual, occupancy
from torch_occ.reference import flow_constraints
from torch_occ.step.entropic import entropy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting


class Equilibrium(NamedTuple):
    """The strategies of both players, `(S, A)` each, and the certificate.

    The gap says nothing about information sets that a player hardly reaches; the residual does.
    """

    log_policies: tuple[Tensor, ...]  # minus infinity on masked pairs
    qs: tuple[Tensor, ...]
    payoff: Tensor  # (2,), expected, without the regularizer
    gap: float  # what both could gain by best responses, regularizer included
    policy_residual: float  # the largest change of a log-probability in one more Newton step
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


class QuantalResponse(nn.Module):
    """The regularized equilibrium of a game, differentiable in payoffs, tau and parameters of psi.

    The arrays hold both players: n existing pairs, and S states.

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
            from scipy import sparse
        self.game, self.tolerance, self.sparse = game, tolerance, sparse
        self.steps = nn.ModuleList(FTRLStep(x.mdp, regularizer(x)) for x in game.treeplexes)
        self.closed = all(step.closed for step in self.steps)
        self.one, plexes = torch.ones((), dtype=torch.float64), game.treeplexes
        flows = [flow_constraints(x.mdp)[0] for x in plexes]
        blocks = [sparse.csr_matrix((E.values(), E.indices().numpy()), E.shape) for E in flows]
        self.E = sparse.block_diag(blocks, format="csr")
        self.masks, width = [x.mdp.actions for x in plexes], max(x.mdp.num_actions for x in plexes)
        mask = torch.cat([pad(x, (0, width - x.shape[1])) for x in self.masks])
        self.shape, self.pairs, n = mask.shape, mask.nonzero(as_tuple=True), int(mask.sum())
        # log pi(a|s) = g(s, a) - log share(s) - g(the pair before s) = D g - log share; 0 at ends
        weights, owner = torch.cat([x.weights for x in plexes]), self.pairs[0]
        self.layer = torch.cat([x.mdp.layer for x in plexes])[owner]
        first, parents = 0, []
        for x in plexes:
            pair = (x.parent // x.mdp.num_actions + first) * width + x.parent % x.mdp.num_actions
            parents.append(pair.where(x.parent >= 0, -1))
            first += x.mdp.num_states
        parent = torch.cat(parents)[owner]
        self.before = pad(mask.flatten().cumsum(0) - 1, (0, 1), value=n)[parent]  # n for none
        above = weights[parent // width].where(parent >= 0, 1.0)
        self.log_share = (weights[owner] / above).log()
        up = sparse.csr_matrix((np.ones(n), (np.arange(n), self.before.numpy())), (n, n + 1))
        self.D = sparse.identity(n, format="csr") - up[:, :-1]

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
            C = self._coupling(plain)
            g, steps = self._solve(plain, C, tau.item())
            factors, step = self._linearize(plain, C, g, tau.item())
            moved = self._moved(g, g + step[: len(g)])
        if not moved <= self.tolerance:
            raise ArithmeticError(
                f"equilibrium: policies are known to {moved:.1e} only, at tau = {tau.item()}"
            )
        z = torch.cat([g, step[len(g) :]])
        for _ in range(2):
            z = z - _Solve.apply(factors, self._residual(game, z, tau), "N")
        logs = self._split(self._log_policy(z[: len(g)]), -torch.inf)
        qs, gap = [occupancy(x.mdp, y.exp()) for x, y in zip(self.steps, logs, strict=True)], 0.0
        for i, one in enumerate(self.steps):
            loss, psi = plain.loss(i, qs[1 - i].detach()), one.regularizer
            for sign, q in (
                (1, qs[i].detach()),
                (-1, one.solve(loss / tau.item(), 1.0).q.detach()),
            ):
                gap += sign * float((q * loss).sum() + tau.item() * psi(q, 1.0, one.mdp).detach())
        return Equilibrium(tuple(logs), tuple(qs), game.value(*qs), gap, moved, steps)

    def _table(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Numbers of the pairs in one table `(S, A)`."""
        return flat.new_full(self.shape, fill).index_put(self.pairs, flat)

    def _split(self, flat: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Numbers of the pairs in a table for each player."""
        tables = self._table(flat, fill).split([len(mask) for mask in self.masks])
        return [x[:, : mask.shape[1]] for x, mask in zip(tables, self.masks, strict=True)]

    def _conditional(self, g: Tensor) -> Tensor:
        """log pi as g says, D g - log share; not normalized."""
        return g - self.log_share - pad(g, (0, 1))[self.before]

    def _log_policy(self, g: Tensor) -> Tensor:
        """log pi, normalized."""
        y = self._conditional(g) if self.closed else g
        return y - self._table(y, -torch.inf).logsumexp(-1)[self.pairs[0]]

    def _moved(self, before: Tensor, after: Tensor) -> float:
        return float((self._log_policy(after) - self._log_policy(before)).abs().amax())

    def _advance(self, g: Tensor, step: Tensor) -> Tensor:
        """g after a step: normalized; without closed form, q itself moves linearly."""
        step = step[: len(g)]
        if not self.closed:
            return g + torch.log1p(min(1.0, 0.9 / max(float(-step.amin()), 1e-300)) * step)
        g = self._log_policy(g + step) + self.log_share
        for k in range(1, int(self.layer.max()) + 1):
            g += pad(g, (0, 1))[self.before].where(self.layer == k, 0.0)
        return g

    def _rates(self) -> Tensor:
        """w(s) of the closed form, by pairs."""
        parts = [x.evaluator.composition for x in self.steps]
        found = [entropy_of(x, x.values(self.one)).weight for x in parts]
        each = zip(found, self.masks, strict=True)
        return torch.cat([x.expand(len(mask)) for x, mask in each])[self.pairs[0]]

    def _psi(self, step: Any) -> Setting:
        """The regularizer of a step at t = 1."""
        given = step.evaluator.parameters(self.one)
        return Setting(step.mdp, step.evaluator, False, self.one, given)

    def _residual(self, game: ExtensiveGame, z: Tensor, tau: Tensor | float) -> Tensor:
        """Both equations, of pairs and of states, in differentiable operations."""
        sizes = [len(mask) for mask in self.masks]
        g, *values = z.split([len(z) - sum(sizes), *sizes])
        tables, slopes, flows = self._split(g.exp()), [], []
        for i, (step, mask) in enumerate(zip(self.steps, self.masks, strict=True)):
            slope = game.loss(i, tables[1 - i]) - flow_adjoint(step.mdp, values[i])
            if not self.closed:
                slope = slope + tau * self._psi(step).gradient(tables[i])
                flows.append(flow_residual(step.mdp, tables[i]))
            slopes.append(slope[mask])
        if not self.closed:
            return torch.cat(slopes + flows)
        y = self._conditional(g)
        flow = self._table(y, -torch.inf).logsumexp(-1)
        return torch.cat([torch.cat(slopes) + tau * self._rates() * y, flow])

    def _coupling(self, game: ExtensiveGame) -> Any:
        """d loss / d q, by pairs of both players."""
        pairs = torch.stack(game.last_pairs)
        pairs, flow = pairs[:, (pairs >= 0).all(0)], -game.chance * game.payoffs.T
        flow, places, count = flow[:, (torch.stack(game.last_pairs) >= 0).all(0)], [], 0
        for plex, pair in zip(game.treeplexes, pairs, strict=True):
            flow = flow / plex.weights[pair // plex.mdp.num_actions]
            places.append((plex.mdp.actions.flatten().cumsum(0) - 1)[pair] + count)
            count += int(plex.mdp.actions.sum())
        entries = torch.cat(places).numpy(), torch.cat(places[::-1]).numpy()
        return self.sparse.csr_matrix((flow.flatten().numpy(), entries), self.D.shape)

    def _linearize(self, game: ExtensiveGame, C: Any, g: Tensor, tau: float) -> tuple[Any, Tensor]:
        """The factors of the Jacobian at g, and the Newton step of (g, v) from v = 0."""
        from scipy.sparse.linalg import splu

        sparse, Q = self.sparse, self.sparse.diags(g.exp().numpy())
        if self.closed:
            owner, policy = self.pairs[0].numpy(), self._conditional(g).exp().numpy()
            own = sparse.csr_matrix((policy, (owner, np.arange(len(g)))), self.E.shape)
            H, F = sparse.diags(tau * self._rates().detach().numpy()) @ self.D, own @ self.D
        else:
            blocks = []
            for step, mask, table in zip(self.steps, self.masks, self._split(g.exp()), strict=True):
                found: Any = self._psi(step).deriver(torch.Size())(table).hessian
                every, own = np.arange(len(mask) + 1), mask.flatten().numpy()
                parts = found.to_blocks().blocks.numpy(), every[:-1], every
                blocks.append(sparse.bsr_matrix(parts).tocsr()[own][:, own])
            H, F = tau * sparse.block_diag(blocks, format="csr") @ Q, self.E @ Q
        factors = splu(sparse.bmat([[H + C @ Q, -self.E.T], [F, None]], format="csc"))
        return factors, -_Solve.apply(factors, self._residual(game, self._at(g), tau), "N")

    def _at(self, g: Tensor) -> Tensor:
        """(g, v) with v = 0."""
        return pad(g, (0, self.shape[0]))

    def _solve(self, game: ExtensiveGame, C: Any, tau: float) -> tuple[Tensor, int]:
        """log q, and the number of Newton steps; from large tau to this one."""
        each = zip(self.steps, self.masks, strict=True)
        g = torch.cat([step.interior[mask] for step, mask in each]).log()
        slope = torch.zeros_like(g)
        first, level, ratio, steps = 10.0, np.inf, 0.5, 0
        while level > tau and ratio < 0.999:
            lower, before = max(tau, min(level * ratio, first)), np.inf
            ahead = 0.0 if level == np.inf else (1 / lower - 1 / level) * level**2
            now = self._advance(g, ahead * slope)
            first, ratio = first * 4, ratio**0.5  # unless it converges
            for count in range(1, 31):
                steps += 1
                try:
                    factors, step = self._linearize(game, C, now, lower)
                except RuntimeError:  # a singular matrix
                    break
                last, now = now, self._advance(now, step)
                change = float((now.exp() - last.exp()).abs().amax())
                if self._moved(last, now) < (1e-9 if lower == tau else 0.1):
                    g, level, ratio = now, lower, ratio ** (3 if count <= 3 else 2)
                    here = [self._residual(game, self._at(g), lower + k) for k in (0, 1)]
                    slope = _Solve.apply(factors, here[1] - here[0], "N")
                    break
                if not change < np.inf or (count > 3 and change > max(0.9 * before, 1e-3)):
                    break
                before = change
        return g, steps
