"""Regularized (quantal response) equilibria as a layer: Newton's method over both treeplexes.

    q_i = argmin over q of ⟨q, loss_i(q_other)⟩ + tau psi_i(q)        for both players

In zero-sum games this is min over x max over y of ⟨x, A y⟩ + tau (psi(x) - psi(y)), and the
solution is unique. The unknowns are g = log q of all pairs and the multipliers v of the flow, of
both players. With q = exp(g), the equations are

    loss + tau grad psi(q) - v(s) + sum_{s'} P(s'|s,a) v(s') = 0,        sum_a q(s,a) = inflow(s);

for entropies of closed form (`ConditionalEntropy`, `dilated_entropy`) tau grad psi is
tau_s log pi(a|s), and the flow is written as sum_a pi(a|s) = 1. There q may underflow, but not g.
Absorbing ends take no part then. Newton steps are solved by a sparse factorization.

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
from torch_occ.games.tree import ExtensiveGame
from torch_occ.mdp.occupancy import flow_adjoint, occupancy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.step.entropic import entropy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting

#: The largest change of a log-probability in a Newton step, and how many steps are tried with it.
CAPS = ((4.0, 25), (16.0, 80))


class Equilibrium(NamedTuple):
    """The strategies of both players, `(S, A)` each, and the certificate."""

    log_policies: tuple[Tensor, Tensor]
    qs: tuple[Tensor, Tensor]
    payoff: Tensor  # (2,), expected, without the regularizer
    gap: float  # what both could gain by best responses, regularizer included
    policy_residual: float
    steps: int  # of Newton's method


class _Solve(torch.autograd.Function):
    """J^-1 x for a constant factorization of J."""

    @staticmethod
    def forward(ctx: Any, factors: Any, x: Tensor, mode: str) -> Tensor:
        ctx.factors, ctx.mode = factors, mode
        return torch.from_numpy(factors.solve(x.detach().numpy(), mode))

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[None, Tensor, None]:
        return None, _Solve.apply(ctx.factors, bar, "T" if ctx.mode == "N" else "N"), None


class _Half:
    """The equations of one player: which pairs and states count, and the constant matrices."""

    def __init__(self, game: ExtensiveGame, player: int, regularizer: Regularizer) -> None:
        from scipy import sparse

        self.plex = plex = game.treeplex(player)
        self.mdp, self.step = plex.mdp, FTRLStep(plex.mdp, regularizer)
        self.logs = self.step.closed
        count, states = self.mdp.num_actions, torch.arange(self.mdp.num_states)
        used = ~plex.is_end if self.logs else torch.ones_like(plex.is_end)
        self.pairs = (self.mdp.actions & used[:, None]).flatten().nonzero()[:, 0]
        self.states, self.owner = states[used], self.pairs // count
        # E: sum_a q(s, a) - inflow(s), by state and pair.
        rows, columns = [self.owner.numpy()], [self.pairs.numpy()]
        values = [np.ones(len(self.pairs))]
        layers: list[Any] = [*self.mdp.layers[:-1]]  # sparse
        for k, layer in enumerate(layers):
            here, there = self.mdp.layer_slices[k], self.mdp.layer_slices[k + 1]
            rows.append(layer.pattern.next.numpy() + there.start)
            columns.append(layer.pattern.pair.numpy() + here.start * count)
            values.append(-layer.probabilities.detach().numpy())
        entries = (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns)))
        shape = (self.mdp.num_states, self.mdp.num_states * count)
        self.E = sparse.csr_matrix(entries, shape=shape)[self.states.numpy()][:, self.pairs.numpy()]
        # The pair before each state, if the flow is written with policies; -1 for none.
        self.parent = torch.full((self.mdp.num_states,), -1)
        for k, layer in enumerate(layers):
            here, there = self.mdp.layer_slices[k], self.mdp.layer_slices[k + 1]
            self.parent[layer.pattern.next + there.start] = (
                layer.pattern.pair + here.start * count
            ).long()
        self.sizes = (len(self.pairs), len(self.states))

    def rates(self) -> Tensor:
        """w of the closed form, `(S,)`."""
        composition = self.step.evaluator.composition
        one = torch.ones((), dtype=torch.float64)
        return entropy_of(composition, composition.values(one)).rates.expand(self.mdp.num_states)

    def table(self, flat: Tensor) -> Tensor:
        """Numbers of the used pairs as a table `(S, A)`, zero elsewhere."""
        empty = flat.new_zeros(self.mdp.num_states * self.mdp.num_actions)
        return empty.index_copy(0, self.pairs, flat).view(self.mdp.actions.shape)

    def log_policy(self, g: Tensor) -> Tensor:
        """log pi of the used pairs, from log q."""
        table = torch.where(self.table(torch.ones_like(g)) > 0, self.table(g), -torch.inf)
        return g - table.logsumexp(-1)[self.owner]

    def before(self, g: Tensor) -> Tensor:
        """log of the inflow of the state of each used pair, with policies."""
        ahead = self.table(g).flatten()
        share = (self.plex.weights / self._weight_before()).log()
        parent = self.parent[self.owner]
        return share[self.owner] + torch.where(parent >= 0, ahead[parent.clamp(min=0)], 0.0)

    def _weight_before(self) -> Tensor:
        owner = self.parent.clamp(min=0) // self.mdp.num_actions
        return torch.where(self.parent >= 0, self.plex.weights[owner], 1.0)

    def residual(self, g: Tensor, v: Tensor, loss: Tensor, tau: Tensor) -> Tensor:
        """Both equations, of pairs and of states, in differentiable operations."""
        value = v.new_zeros(self.mdp.num_states).index_copy(0, self.states, v)
        slope = loss - flow_adjoint(self.mdp, value)
        if self.logs:
            policy = self.log_policy(g)
            first = slope.flatten()[self.pairs] + tau * self.rates()[self.owner] * policy
            share = (g - self.before(g)).exp()
            total = v.new_zeros(self.mdp.num_states).index_add(0, self.owner, share)
            return torch.cat([first, total[self.states] - 1])
        q = self.table(g.exp())
        first = (slope + tau * self.setting().gradient(q)).flatten()[self.pairs]
        setting = self.setting()
        return torch.cat([first, setting.constrain(q, v) - setting.source])

    def setting(self) -> Setting:
        """psi at t = 1."""
        one = torch.ones((), dtype=torch.float64)
        evaluator: Evaluator = self.step.evaluator
        return Setting(self.mdp, evaluator, False, one, evaluator.parameters(one))

    def jacobian(self, g: Tensor, tau: float) -> tuple[Any, Any, Any]:
        """d residual / d(g, v) of the own equations, in three blocks; that of (v, v) is zero."""
        from scipy import sparse

        n, m = self.sizes
        if self.logs:
            rate = tau * self.rates().detach().numpy()[self.owner.numpy()]
            place = torch.full((self.mdp.actions.numel(),), -1)
            place[self.pairs] = torch.arange(n)
            parent = self.parent[self.owner]
            before = torch.where(parent >= 0, place[parent.clamp(min=0)], -1).numpy()
            has = before >= 0
            up = sparse.csr_matrix((np.ones(has.sum()), (np.arange(n)[has], before[has])), (n, n))
            change = sparse.identity(n) - up  # of log q minus log of the inflow
            state = torch.full((self.mdp.num_states,), -1)
            state[self.states] = torch.arange(m)
            owner, every = state[self.owner].numpy(), np.arange(n)
            share, policy = (g - self.before(g)).exp().numpy(), self.log_policy(g).exp().numpy()
            members = sparse.csr_matrix((np.ones(n), (every, owner)), (n, m))
            own = sparse.csr_matrix((policy, (owner, every)), (m, n))
            flow = sparse.csr_matrix((share, (owner, every)), (m, n))
            H = sparse.diags(rate) @ (sparse.identity(n) - members @ own)
            return H, -self.E.T, flow @ change
        q = self.table(g.exp())
        found: Any = self.setting().deriver(torch.Size())(q).hessian
        hessian = found.to_blocks().blocks.numpy()
        count = self.mdp.num_actions
        s, a, b = np.meshgrid(*(np.arange(k) for k in hessian.shape), indexing="ij")
        H = sparse.csr_matrix(
            (hessian.ravel(), ((s * count + a).ravel(), (s * count + b).ravel())),
            (self.mdp.actions.numel(),) * 2,
        )
        own, scale = self.pairs.numpy(), sparse.diags(g.exp().numpy())
        return tau * H[own][:, own] @ scale, -self.E.T, self.E @ scale


class QuantalResponse(nn.Module):
    """The regularized equilibrium of a game, differentiable in its payoffs and in tau.

    Args:
        game: the payoffs may require gradients; see `ExtensiveGame.with_payoffs`.
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
        self.halves = [_Half(game, i, regularizer(game.treeplex(i))) for i in (0, 1)]
        self.psi = nn.ModuleList(half.step for half in self.halves)

    def forward(self, tau: Tensor | float, game: ExtensiveGame | None = None) -> Equilibrium:
        """Solve.

        Args:
            tau: a positive number.
            game: the same game with other payoffs.

        Raises:
            ArithmeticError: if Newton's method does not converge.
        """
        game = self.game if game is None else game
        tau = torch.as_tensor(tau, dtype=torch.float64)
        if not (tau.dim() == 0 and 0 < tau.item() < np.inf):
            raise ValueError(f"tau: expected a positive number, got {tau}")
        with torch.no_grad():
            plain = game.with_payoffs(game.payoffs.detach())
            z, steps = self._solve(plain, tau.item(), None)
            factors = self._factorize(plain, z, tau.item())
        off = _Solve.apply(factors, self._residual(plain, z, tau.detach()).detach(), "N")
        policy_off = max(
            float(half.log_policy(g + d).sub(half.log_policy(g)).abs().amax())
            for half, (g, _), (d, _) in zip(
                self.halves, self._split(z), self._split(off), strict=True
            )
        )
        if not policy_off <= self.tolerance:
            raise ArithmeticError(
                f"equilibrium: policies are known to {policy_off:.1e} only, at tau = {tau.item()}"
            )
        moving = z
        for _ in range(2):
            moving = moving - _Solve.apply(factors, self._residual(game, moving, tau), "N")
        logs, qs = [], []
        for half, (g, _) in zip(self.halves, self._split(moving), strict=True):
            exists = half.table(torch.ones_like(g)) > 0
            log_policy = torch.where(exists, half.table(half.log_policy(g)), -torch.inf)
            log_policy = torch.where(half.mdp.actions & ~exists, 0.0, log_policy)  # ends
            logs.append(log_policy)
            qs.append(occupancy(half.mdp, log_policy.exp().nan_to_num()))
        gap = self._gap(plain, [q.detach() for q in qs], tau.item())
        return Equilibrium(
            (logs[0], logs[1]), (qs[0], qs[1]), game.value(*qs), gap, policy_off, steps
        )

    def _split(self, z: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = [size for half in self.halves for size in half.sizes]
        g0, v0, g1, v1 = z.split(sizes)
        return [(g0, v0), (g1, v1)]

    def _residual(self, game: ExtensiveGame, z: Tensor, tau: Tensor) -> Tensor:
        parts = self._split(z)
        qs = [half.table(g.exp()) for half, (g, _) in zip(self.halves, parts, strict=True)]
        return torch.cat(
            [
                half.residual(*parts[i], game.loss(i, qs[1 - i]), tau)
                for i, half in enumerate(self.halves)
            ]
        )

    def _factorize(self, game: ExtensiveGame, z: Tensor, tau: float) -> Any:
        from scipy import sparse
        from scipy.sparse.linalg import splu

        (g0, _), (g1, _) = self._split(z)
        (H0, T0, F0), (H1, T1, F1) = (
            half.jacobian(g, tau) for half, g in zip(self.halves, (g0, g1), strict=True)
        )
        C0, C1 = (self._coupling(game, i, g) for i, g in ((0, g1), (1, g0)))
        blocks = [[H0, T0, C0, None], [F0, None, None, None], [C1, None, H1, T1]]
        blocks.append([None, None, F1, None])
        matrix = sparse.bmat(blocks, format="csc")
        if not np.isfinite(matrix.data).all():
            raise RuntimeError("the Jacobian is not finite")
        return splu(matrix)

    def _coupling(self, game: ExtensiveGame, i: int, g: Tensor) -> Any:
        """d loss of player i / d g of the other, by pairs."""
        from scipy import sparse

        own, other = self.halves[i], self.halves[1 - i]
        pairs = game.tree.pair
        both = (pairs[i] >= 0) & (pairs[1 - i] >= 0)
        inverse = [
            1 / half.plex.weights.numpy()[np.maximum(pairs[k], 0) // half.mdp.num_actions]
            for k, half in ((i, own), (1 - i, other))
        ]
        flow = -game.tree.chance * game.payoffs[:, i].detach().numpy() * inverse[0] * inverse[1]
        shape = (own.mdp.actions.numel(), other.mdp.actions.numel())
        C = sparse.csr_matrix((flow[both], (pairs[i][both], pairs[1 - i][both])), shape)
        return C[own.pairs.numpy()][:, other.pairs.numpy()] @ sparse.diags(g.exp().numpy())

    def _solve(self, game: ExtensiveGame, tau: float, start: Tensor | None) -> tuple[Tensor, int]:
        """Newton's method; if it does not converge, from the solution at a larger tau."""
        total = 0
        for cap, most in CAPS:
            z = self._start() if start is None else start
            for _ in range(most):
                try:
                    z, moved = self._advance(game, z, tau, cap)
                except RuntimeError:  # a singular matrix
                    break
                total += 1
                if moved < 1e-9:
                    return z, total
                if not moved < np.inf:
                    break
        if start is not None or tau > 1e6:
            return z, total
        ahead, before = self._solve(game, 4 * tau, None)
        found, more = self._solve(game, tau, ahead)
        return found, total + before + more

    def _advance(
        self, game: ExtensiveGame, z: Tensor, tau: float, cap: float
    ) -> tuple[Tensor, float]:
        """A Newton step; its length follows from the largest change of a logarithm.

        Outside logarithms it follows from the largest relative fall of q.
        """
        at, logs = torch.tensor(tau, dtype=torch.float64), self.halves[0].logs
        residual = self._residual(game, z, at).numpy()
        step = torch.from_numpy(self._factorize(game, z, tau).solve(-residual))
        parts = self._split(step)
        if logs:
            moved = max(
                float((half.log_policy(g + d) - half.log_policy(g)).abs().amax())
                for half, (g, _), (d, _) in zip(self.halves, self._split(z), parts, strict=True)
            )
            return z + min(1.0, cap / max(moved, 1e-300)) * step, moved
        moved = max(float(d.abs().amax()) for d, _ in parts)
        fall = max(float((-d).amax()) for d, _ in parts)
        length = 1.0 if moved < 0.1 else min(1.0, 0.9 / max(fall, 1e-300))
        changed = [
            x
            for (g, v), (d, dv) in zip(self._split(z), parts, strict=True)
            for x in (g + torch.log1p(length * d), v + length * dv)
        ]
        return torch.cat(changed), moved

    def _start(self) -> Tensor:
        parts = []
        for half in self.halves:
            q = half.step.interior.flatten()[half.pairs]
            parts += [q.log(), q.new_zeros(half.sizes[1])]
        return torch.cat(parts)

    def _gap(self, game: ExtensiveGame, qs: list[Tensor], tau: float) -> float:
        total = 0.0
        for i, half in enumerate(self.halves):
            loss = game.loss(i, qs[1 - i])
            psi = half.step.regularizer
            best = half.step.solve(loss / tau, 1.0).q.detach()
            for sign, q in ((1, qs[i]), (-1, best)):
                value = float((q * loss).sum() + tau * psi(q, 1.0, half.mdp).detach())
                total += sign * value
        return total
