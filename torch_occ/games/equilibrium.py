"""Regularized (quantal response) equilibria as a layer: Newton's method over both treeplexes.

    q_i = argmin over q of ⟨q, loss_i(q_other)⟩ + tau psi_i(q)        for both players

In zero-sum games this is min over x max over y of ⟨x, A y⟩ + tau (psi(x) - psi(y)), and the
solution is unique. The unknowns are g = log q of all pairs and the multipliers v of the flow, of
both players. With q = exp(g), the equations are

    loss + tau grad psi(q) - v(s) + sum_{s'} P(s'|s,a) v(s') = 0,        sum_a q(s,a) = inflow(s);

for entropies of closed form (`ConditionalEntropy`, `dilated_entropy`) tau grad psi is
tau w(s) log pi(a|s), and the flow is written as log sum_a pi(a|s) = 0. There q may underflow, but
not g. Ends take no part then. Newton steps are solved by a sparse factorization, and policies are
normalized after each. tau falls in stages to its value; g is nearly linear in 1 / tau.

**Derivatives.** Two more Newton steps from the solution, with a constant Jacobian and in
differentiable operations, leave the value and give the first two derivatives.

**Certificate.** The duality gap says nothing about information sets that a player hardly reaches.
So `policy_residual` is the largest change of a log-probability in one more Newton step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_occ._support.choices import extra
from torch_occ.games.tree import ExtensiveGame, Treeplex
from torch_occ.mdp.occupancy import flow_adjoint, flow_residual, occupancy
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
    """The equations of one player: which pairs and states count, and the constant matrices."""

    def __init__(self, plex: Treeplex, regularizer: Regularizer) -> None:
        from scipy import sparse

        self.sparse, self.plex, self.mdp = sparse, plex, plex.mdp
        self.step, mdp, count = FTRLStep(plex.mdp, regularizer), plex.mdp, plex.mdp.num_actions
        used = ~(plex.is_end & self.step.closed)
        self.states = used.nonzero()[:, 0]
        self.pairs = (mdp.actions & used[:, None]).flatten().nonzero()[:, 0]
        self.owner, n = self.pairs // count, len(self.pairs)
        entries = [(self.owner, self.pairs, torch.ones(n, dtype=torch.float64))]
        layers: list[Any] = [*mdp.layers[:-1]]  # sparse
        for layer, here, there in zip(layers, mdp.layer_slices, mdp.layer_slices[1:], strict=False):
            rows, columns = layer.pattern.next + there.start, layer.pattern.pair
            entries.append((rows, columns + here.start * count, -layer.probabilities))
        rows, columns, values = (torch.cat(x).numpy() for x in zip(*entries, strict=True))
        shape = (mdp.num_states, mdp.actions.numel())
        E = sparse.csr_matrix((values, (rows, columns)), shape)  # sum_a q(s, a) - inflow(s)
        self.E = E[self.states.numpy()][:, self.pairs.numpy()]
        # With policies: log pi(a|s) = g(s, a) - log share - g(the pair before s) = D g - log share.
        place = torch.full((mdp.actions.numel() + 1,), n)
        place[self.pairs] = torch.arange(n)
        self.before = place[plex.parent[self.owner]]  # n for none
        above = plex.weights[plex.parent.clamp(min=0) // count].where(plex.parent >= 0, 1.0)
        self.log_share = (plex.weights / above).log()[self.owner]
        has = (self.before < n).nonzero()[:, 0].numpy()
        up = (np.ones(len(has)), (has, self.before.numpy()[has]))
        self.D = sparse.identity(n, format="csr") - sparse.csr_matrix(up, (n, n))

    def table(self, flat: Tensor, fill: float = 0.0) -> Tensor:
        """Numbers of the used pairs as a table `(S, A)`."""
        empty = flat.new_full((self.mdp.actions.numel(),), fill)
        return empty.index_copy(0, self.pairs, flat).view(self.mdp.actions.shape)

    def conditional(self, g: Tensor) -> Tensor:
        """log pi of the used pairs as g says, D g - log share; not normalized."""
        return g - self.log_share - torch.nn.functional.pad(g, (0, 1))[self.before]

    def log_policy(self, g: Tensor) -> Tensor:
        """log pi of the used pairs, normalized."""
        y = self.conditional(g) if self.step.closed else g
        return y - self.table(y, -torch.inf).logsumexp(-1)[self.owner]

    def advance(self, g: Tensor, d: Tensor) -> Tensor:
        """g after a step d of log q: normalized; without closed form, q itself moves linearly."""
        if not self.step.closed:
            return g + torch.log1p(min(1.0, 0.9 / max(float(-d.amin()), 1e-300)) * d)
        y = self.log_policy(g + d) + self.log_share
        for here in self.mdp.layer_slices[1:]:
            mine = (self.owner >= here.start) & (self.owner < here.stop)
            y[mine] += torch.nn.functional.pad(y, (0, 1))[self.before[mine]]
        return y

    def psi(self) -> Setting:
        """The regularizer at t = 1."""
        one, evaluator = torch.ones((), dtype=torch.float64), self.step.evaluator
        return Setting(self.mdp, evaluator, False, one, evaluator.parameters(one))

    def rates(self) -> Tensor:
        """w(s) of the closed form, by pairs."""
        composition, one = self.step.evaluator.composition, torch.ones((), dtype=torch.float64)
        weight = entropy_of(composition, composition.values(one)).weight
        return weight.expand(self.mdp.num_states)[self.owner]

    def residual(self, g: Tensor, v: Tensor, loss: Tensor, tau: Tensor | float) -> Tensor:
        """Both equations, of pairs and of states, in differentiable operations."""
        value = v.new_zeros(self.mdp.num_states).index_copy(0, self.states, v)
        slope = (loss - flow_adjoint(self.mdp, value)).flatten()[self.pairs]
        if self.step.closed:
            y = self.conditional(g)
            flow = self.table(y, -torch.inf)[self.states].logsumexp(-1)
            return torch.cat([slope + tau * self.rates() * y, flow])
        q = self.table(g.exp())
        gradient = self.psi().gradient(q).flatten()[self.pairs]
        return torch.cat([slope + tau * gradient, flow_residual(self.mdp, q)])

    def jacobian(self, g: Tensor, tau: float) -> tuple[Any, Any]:
        """d residual / dg, of pairs and of states; d residual / dv is -E' and 0."""
        n, m, sparse = len(self.pairs), len(self.states), self.sparse
        if self.step.closed:
            place = torch.zeros(self.mdp.num_states, dtype=torch.int64)
            place[self.states] = torch.arange(m)
            own = place[self.owner].numpy(), np.arange(n)
            S = sparse.csr_matrix((self.conditional(g).exp().numpy(), own), (m, n))
            return sparse.diags(tau * self.rates().detach().numpy()) @ self.D, S @ self.D
        found: Any = self.psi().deriver(torch.Size())(self.table(g.exp())).hessian
        every, own = np.arange(self.mdp.num_states + 1), self.pairs.numpy()
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
        self.sizes = [len(x) for half in self.halves for x in (half.pairs, half.states)]

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
            factors, z = self._linearize(plain, gs, tau.item())
            (d0, v0), (d1, v1) = self._split(z)
            off = self._moved(gs, [gs[0] + d0, gs[1] + d1])
            moving = torch.cat([gs[0], v0, gs[1], v1])
        if not off <= self.tolerance:
            raise ArithmeticError(
                f"equilibrium: policies are known to {off:.1e} only, at tau = {tau.item()}"
            )
        for _ in range(2):
            moving = moving - _Solve.apply(factors, self._residual(game, moving, tau), "N")
        logs, qs = [], []
        for half, (g, _) in zip(self.halves, self._split(moving), strict=True):
            ends = (half.plex.is_end[:, None] & half.mdp.actions).flatten()
            table = half.table(half.log_policy(g), -torch.inf).flatten()
            logs.append(table.masked_fill(ends, 0.0).view(half.mdp.actions.shape))
            qs.append(occupancy(half.mdp, logs[-1].exp()))
        gap = self._gap(plain, [q.detach() for q in qs], tau.item())
        return Equilibrium((logs[0], logs[1]), (qs[0], qs[1]), game.value(*qs), gap, off, steps)

    def _split(self, z: Tensor) -> list[tuple[Tensor, Tensor]]:
        g0, v0, g1, v1 = z.split(self.sizes)
        return [(g0, v0), (g1, v1)]

    def _residual(self, game: ExtensiveGame, z: Tensor, tau: Tensor | float) -> Tensor:
        parts = self._split(z)
        qs = [half.table(g.exp()) for half, (g, _) in zip(self.halves, parts, strict=True)]
        each = enumerate(self.halves)
        return torch.cat([x.residual(*parts[i], game.loss(i, qs[1 - i]), tau) for i, x in each])

    def _linearize(self, game: ExtensiveGame, gs: Any, tau: float) -> tuple[Any, Tensor]:
        """The factors of the Jacobian at g, and the Newton step of (g, v) from v = 0."""
        from scipy.sparse import bmat
        from scipy.sparse.linalg import splu

        rows: list[list[Any]] = []
        for i, (half, g) in enumerate(zip(self.halves, gs, strict=True)):
            J, F = half.jacobian(g, tau)
            own, other = [J, -half.E.T], [self._coupling(game, i, gs[1 - i]), None]
            rows += [own + other, [F, None, None, None]] if i == 0 else [other + own]
        rows.append([None, None, F, None])
        factors = splu(bmat(rows, format="csc"))
        zeros = [g.new_zeros(size) for g, size in zip(gs, self.sizes[1::2], strict=True)]
        z = torch.cat([gs[0], zeros[0], gs[1], zeros[1]])
        return factors, _Solve.apply(factors, -self._residual(game, z, tau), "N")

    def _coupling(self, game: ExtensiveGame, i: int, g: Tensor) -> Any:
        """d loss of player i / d g of the other, by pairs."""
        pairs, own, other = game.tree.pair, self.halves[i], self.halves[1 - i]
        both = (pairs >= 0).all(0)
        rows, columns = pairs[i][both], pairs[1 - i][both]
        scale = [x.plex.weights.numpy().repeat(x.mdp.num_actions) for x in (own, other)]
        flow = -(game.tree.chance * game.payoffs[:, i].numpy())[both]
        values = flow / (scale[0][rows] * scale[1][columns])
        shape = (len(scale[0]), len(scale[1]))
        C = own.sparse.csr_matrix((values, (rows, columns)), shape)
        Q = own.sparse.diags(g.exp().numpy())
        return C[own.pairs.numpy()][:, other.pairs.numpy()] @ Q

    def _moved(self, before: Any, after: Any) -> float:
        """The largest change of a log-probability."""
        each = zip(self.halves, before, after, strict=True)
        return max(float((x.log_policy(b) - x.log_policy(a)).abs().amax()) for x, a, b in each)

    def _advance(self, gs: Any, z: Tensor) -> list[Tensor]:
        steps = zip(self.halves, gs, self._split(z), strict=True)
        return [half.advance(g, d) for half, g, (d, _) in steps]

    def _solve(self, game: ExtensiveGame, tau: float) -> tuple[Any, int]:
        """log q of both players, and the number of Newton steps; from large tau to this one."""
        gs = [half.step.interior.flatten()[half.pairs].log() for half in self.halves]
        first, level, ratio, total = 10.0, np.inf, 0.5, 0
        slope: Tensor | None = None
        while level > tau and ratio < 0.999:
            lower = max(tau, min(level * ratio, first))
            now = gs
            if slope is not None:
                now = self._advance(gs, (1 / lower - 1 / level) * level**2 * slope)
            found, count = self._newton(game, now, lower, 1e-9 if lower == tau else 0.1)
            total += count
            if found is None:
                first, ratio = first * 4, ratio**0.5
                continue
            (gs, slope), level = found, lower
            ratio = ratio**1.5 if count <= 3 else ratio
        return gs, total

    def _newton(
        self, game: ExtensiveGame, gs: Any, tau: float, enough: float
    ) -> tuple[tuple[Any, Tensor] | None, int]:
        """g and J^-1 dF / dtau after some Newton steps, or None if they do not converge."""
        before = np.inf
        for count in range(1, 13):
            try:
                factors, step = self._linearize(game, gs, tau)
            except RuntimeError:  # a singular matrix
                return None, count
            after = self._advance(gs, step)
            moved = self._moved(gs, after)
            change = max(
                float((b.exp() - a.exp()).abs().amax()) for a, b in zip(gs, after, strict=True)
            )
            gs = after
            if moved < enough:
                z = torch.cat([gs[0], 0 * step[: self.sizes[1]], gs[1], 0 * step[: self.sizes[3]]])
                slope = self._residual(game, z, tau + 1) - self._residual(game, z, tau)
                return (gs, _Solve.apply(factors, slope, "N")), count
            if not change < np.inf or (count > 3 and change > max(0.5 * before, 1e-3)):
                return None, count
            before = change
        return None, count

    def _gap(self, game: ExtensiveGame, qs: list[Tensor], tau: float) -> float:
        total = 0.0
        for i, half in enumerate(self.halves):
            loss, psi = game.loss(i, qs[1 - i]), half.step.regularizer
            best = half.step.solve(loss / tau, 1.0).q.detach()
            own, least = (
                (q * loss).sum() + tau * psi(q, 1.0, half.mdp).detach() for q in (qs[i], best)
            )
            total += float(own - least)
        return total
