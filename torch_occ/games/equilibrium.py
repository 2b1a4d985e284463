"""Regularized (quantal response) equilibria as a layer: Newton's method over both treeplexes.

    q_i = argmin over q of ⟨q, loss_i(q_other)⟩ + tau psi_i(q)        for both players

In zero-sum games this is min over x max over y of ⟨x, A y⟩ + tau (psi(x) - psi(y)), and the
solution is unique. The unknowns are g = log q and the multipliers v of the flow, of both players:

    loss + tau grad psi(q) - v(s) + sum_{s'} P(s'|s,a) v(s') = 0,        sum_a q(s,a) = inflow(s).

For entropies of closed form (`ConditionalEntropy`, `dilated_entropy`) tau grad psi is
tau w(s) log pi(a|s), and the flow is log sum_a pi(a|s) = 0; there q may underflow, but not g. tau
falls in stages to its value, because g is nearly linear in 1 / tau.
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

    If the game is not zero-sum, it need not be unique. `regularizer` is a function from a treeplex,
    for example `occ.dilated_entropy`, or `lambda plex: occ.LogBarrier()`; `tolerance` is the
    largest policy residual that counts as solved.
    """

    def __init__(self, game: ExtensiveGame, regularizer: Any, tolerance: float = 1e-8) -> None:
        super().__init__()
        with extra("games", "equilibria need SciPy"):
            from scipy import sparse
        self.game, self.tolerance, self.sparse = game, tolerance, sparse
        steps = [FTRLStep(x.mdp, regularizer(x)) for x in game.treeplexes]
        self.steps: Any = nn.ModuleList(steps)
        self.closed = all(step.evaluator.closed for step in steps)
        self.masks = [x.mdp.actions for x in game.treeplexes]
        # Arrays of both players: n existing pairs, S states. A pair has the place of its state and
        # of the pair before it, n if there is none; D g = g - g(before) = log pi + log share.
        owners, before, shares, blocks, self.sizes = [], [], [], [], [0, 0]
        for x, mask in zip(game.treeplexes, self.masks, strict=True):
            E = flow_constraints(x.mdp)[0]
            blocks.append(sparse.csr_matrix((E.values(), E.indices().numpy()), E.shape))
            place = pad(mask.flatten().cumsum(0) - 1 + self.sizes[0], (0, 1), value=10**9)
            state, above = mask.nonzero()[:, 0], x.weights[x.parent // x.mdp.num_actions]
            owners.append(state + self.sizes[1])
            before.append(place[x.parent][state])
            shares.append((x.weights / above.where(x.parent >= 0, 1.0))[state])
            self.sizes = [self.sizes[0] + len(state), self.sizes[1] + len(mask)]
        n, self.E = self.sizes[0], sparse.block_diag(blocks, format="csr")
        self.owner, self.before = torch.cat(owners), torch.cat(before).clamp(max=n)
        self.log_share, self.one = torch.cat(shares).log(), torch.ones((), dtype=torch.float64)
        self.layer = torch.cat([x.mdp.layer for x in game.treeplexes])[self.owner]
        up = sparse.csr_matrix((np.ones(n), (np.arange(n), self.before.numpy())), (n, n + 1))
        self.D = sparse.identity(n, format="csr") - up[:, :-1]

    def forward(self, tau: Tensor | float, game: ExtensiveGame | None = None) -> Equilibrium:
        """Solve for a positive tau; `game` is the same game with other payoffs.

        Two more Newton steps with a constant Jacobian, in differentiable operations, leave the
        value and give two derivatives. An ArithmeticError says that there is no certificate.
        """
        game, tau = self.game if game is None else game, torch.as_tensor(tau, dtype=torch.float64)
        if not (tau.dim() == 0 and 0 < tau.item() < np.inf):
            raise ValueError(f"tau: expected a positive number, got {tau}")
        plain, level = game.with_payoffs(game.payoffs.detach()), tau.item()
        with torch.no_grad():
            C = self._coupling(plain)
            g, count = self._solve(plain, C, level)
            factors, step = self._linearize(plain, C, g, level)
            moved = self._moved(g, g + step[: len(g)])
        if not moved <= self.tolerance:
            raise ArithmeticError(f"tau: at {level}, policies are known to {moved:.1e} only")
        z = torch.cat([g, step[len(g) :]])
        for _ in range(2):
            z = z - _Solve.apply(factors, self._residual(game, z, tau), "N")
        logs, gap = self._tables(self._log_policy(z[: len(g)]), -torch.inf), 0.0
        qs = [occupancy(one.mdp, y.exp()) for one, y in zip(self.steps, logs, strict=True)]
        for i, one in enumerate(self.steps):
            loss = plain.loss(i, qs[1 - i].detach())
            for sign, q in ((1, qs[i]), (-1, one.solve(loss / level, 1.0).q)):
                regular = one.regularizer(q.detach(), 1.0, one.mdp).detach()
                gap += sign * float((q.detach() * loss).sum() + level * regular)
        return Equilibrium(tuple(logs), tuple(qs), game.value(*qs), gap, moved, count)

    def _tables(self, flat: Tensor, fill: float = 0.0) -> list[Tensor]:
        """Numbers of the pairs in a table `(S, A)` for each player."""
        parts = zip(flat.split([int(mask.sum()) for mask in self.masks]), self.masks, strict=True)
        return [x.new_full(mask.shape, fill).masked_scatter(mask, x) for x, mask in parts]

    def _conditional(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """log pi as g says, not normalized, and log sum exp of it in every state."""
        y = g - self.log_share - pad(g, (0, 1))[self.before] if self.closed else g
        return y, torch.cat([x.logsumexp(-1) for x in self._tables(y, -torch.inf)])

    def _log_policy(self, g: Tensor) -> Tensor:
        y, total = self._conditional(g)
        return y - total[self.owner]

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
        parts = zip((x.evaluator.composition for x in self.steps), self.masks, strict=True)
        found = [entropy_of(x, x.values(self.one)).weight.expand(len(mask)) for x, mask in parts]
        return torch.cat(found)[self.owner]

    def _psi(self, step: Any) -> Setting:
        """The regularizer of a step at t = 1."""
        given = step.evaluator.parameters(self.one)
        return Setting(step.mdp, step.evaluator, False, self.one, given)

    def _residual(self, game: ExtensiveGame, z: Tensor, tau: Tensor | float) -> Tensor:
        """Both equations, of pairs and of states, in differentiable operations."""
        g, *values = z.split([self.sizes[0], *map(len, self.masks)])
        tables, slopes, flows = self._tables(g.exp()), [], []
        for i, (step, mask) in enumerate(zip(self.steps, self.masks, strict=True)):
            slope = game.loss(i, tables[1 - i]) - flow_adjoint(step.mdp, values[i])
            if not self.closed:
                slope = slope + tau * self._psi(step).gradient(tables[i])
                flows.append(flow_residual(step.mdp, tables[i]))
            slopes.append(slope[mask])
        if not self.closed:
            return torch.cat(slopes + flows)
        y, total = self._conditional(g)
        return torch.cat([torch.cat(slopes) + tau * self._rates() * y, total])

    def _coupling(self, game: ExtensiveGame) -> Any:
        """d loss / d q, by pairs of both players."""
        pairs, places, count = torch.stack(game.last_pairs), [], 0
        both = (pairs >= 0).all(0)
        flow = -(game.chance * game.payoffs.T)[:, both]
        for plex, pair in zip(game.treeplexes, pairs[:, both], strict=True):
            flow = flow / plex.weights[pair // plex.mdp.num_actions]
            places.append((plex.mdp.actions.flatten().cumsum(0) - 1)[pair] + count)
            count += plex.mdp.num_pairs
        entries = torch.cat(places).numpy(), torch.cat(places[::-1]).numpy()
        return self.sparse.csr_matrix((flow.flatten().numpy(), entries), self.D.shape)

    def _linearize(self, game: ExtensiveGame, C: Any, g: Tensor, tau: float) -> tuple[Any, Tensor]:
        """The factors of the Jacobian at g, and the Newton step of (g, v) from v = 0."""
        from scipy.sparse.linalg import splu

        sparse, Q = self.sparse, self.sparse.diags(g.exp().numpy())
        if self.closed:
            own = self.owner.numpy(), np.arange(len(g))
            S = sparse.csr_matrix((self._log_policy(g).exp().numpy(), own), self.E.shape)
            H, F = sparse.diags(tau * self._rates().detach().numpy()) @ self.D, S @ self.D
        else:
            blocks, parts = [], zip(self.steps, self.masks, self._tables(g.exp()), strict=True)
            for step, mask, table in parts:
                found: Any = self._psi(step).deriver(torch.Size())(table).hessian
                every, has = np.arange(len(mask) + 1), mask.flatten().numpy()
                whole = sparse.bsr_matrix((found.to_blocks().blocks.numpy(), every[:-1], every))
                blocks.append(whole.tocsr()[has][:, has])
            H, F = tau * sparse.block_diag(blocks, format="csr") @ Q, self.E @ Q
        factors = splu(sparse.bmat([[H + C @ Q, -self.E.T], [F, None]], format="csc"))
        step = _Solve.apply(factors, self._residual(game, pad(g, (0, self.sizes[1])), tau), "N")
        return factors, -step

    def _solve(self, game: ExtensiveGame, C: Any, tau: float) -> tuple[Tensor, int]:
        """log q, and the number of Newton steps; from large tau to this one."""
        g = torch.cat([step.interior[step.mdp.actions] for step in self.steps]).log()
        slope, first, level, ratio, steps = torch.zeros_like(g), 10.0, np.inf, 0.5, 0
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
                    z = pad(g, (0, self.sizes[1]))
                    by_tau = self._residual(game, z, lower + 1) - self._residual(game, z, lower)
                    slope = _Solve.apply(factors, by_tau, "N")
                    break
                if not change < np.inf or (count > 3 and change > max(0.9 * before, 1e-3)):
                    break
                before = change
        return g, steps
