"""First and second derivatives of the FTRL step with respect to the loss; both differentiable.

At q = argmin ⟨q, L⟩ + psi_t(q) over Omega, a small change x of the loss L changes q by -Pi x. Here

    Pi = H^-1 - H^-1 E'(E H^-1 E')^-1 E H^-1

is symmetric and positive semidefinite. Its derivative in the direction m is

    d/ds Pi(L + s m) = Pi D3psi[Pi m] Pi,        D3psi[u] = d/ds H(q + s u).

So a second-order expansion of q in random losses needs Pi and the third derivatives of psi.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import SeparableRegularizer, total
from torch_occ.regularizers.parameters import with_rank
from torch_occ.regularizers.terms import Argument, change
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import ImplicitSolution, Linearized, Setting


class Linearization:
    """First and second derivatives of a step at its solution q.

    `dense` and `bend` are for MDPs of at most a few hundred pairs, `apply` and `bend_along` for
    all.

    Args:
        q: a solution of the step, `(*batch, S, A)`.
        t: its episodes, `(*batch,)`.
    """

    def __init__(self, step: FTRLStep, q: Tensor, t: Tensor) -> None:
        self.mdp: LayeredMDP = step.mdp
        self.q = q
        self.evaluator = step.evaluator
        self.t = with_rank(t, q.dim() - 2, 0)
        self.parameters = step.evaluator.parameters(self.t)
        self.setting = Setting(self.mdp, step.evaluator, False)

    def apply(self, x: Tensor) -> Tensor:
        """Return Pi x for x of shape `(*more, *batch, S, A)`."""
        nothing = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
        # All tensors get the same number of batch dimensions, so that the dimension that a vmap
        # puts in front of them is aligned.
        tensors = (x, nothing, with_rank(self.q, x.dim() - 2, 2), *self._tensors(x.dim() - 2))
        moved, _ = ImplicitSolution.apply(Linearized(self.setting), *tensors)
        return moved

    def _tensors(self, rank: int) -> list[Tensor]:
        """Return t and the parameters with this number of batch dimensions."""
        return self.evaluator.align(rank, self.t, self.parameters)

    def dense(self) -> Tensor:
        """Return Pi as a matrix over all pairs, `(*batch, S * A, S * A)`."""
        identity = torch.eye(self.q.shape[-2:].numel(), dtype=self.q.dtype, device=self.q.device)
        return self.apply(self._columns(identity)).flatten(-2).movedim(0, -1)

    def bend(self, u: Tensor, G: Tensor) -> Tensor:
        """Return D3psi[u](G) = d/ds tr(H(q + s u) G), `(*batch,)`.

        For scalar terms f(x), with x linear in q, this is the sum of f'''(x) times the change of x
        along u times the variance of x if q has the covariance G.

        Args:
            u: `(*batch, S, A)`.
            G: symmetric, `(*batch, S * A, S * A)`.
        """
        bound = self.setting.bind(self._tensors(self.q.dim() - 2))
        if bound.evaluator.regularizer.levels != {SeparableRegularizer}:
            return self._bend_by_columns(bound, u, G)
        total = torch.zeros_like(u[..., 0, 0])
        for name, third in self._third_derivatives(bound).items():
            moment = third * change(name, self.mdp, u) * self._variance(name, G)
            total = total + moment.sum(-1 if name == "state" else (-2, -1))
        return total

    def bend_along(self, u: Tensor, y: Tensor) -> Tensor:
        """Return D3psi[u](y y') for vectors y `(*more, *batch, S, A)`, without matrices.

        Returns:
            `(*more, *batch)`.
        """
        bound = self.setting.bind(self._tensors(self.q.dim() - 2))
        total = torch.zeros_like(y[..., 0, 0])
        if bound.evaluator.regularizer.levels != {SeparableRegularizer}:
            q = self.q.expand(y.shape)

            def form(q: Tensor) -> Tensor:
                return (bound.hessian_product(q, y) * y).sum()

            return total + (torch.func.grad(form)(q) * u).sum((-2, -1))
        for name, third in self._third_derivatives(bound).items():
            moment = third * change(name, self.mdp, u) * change(name, self.mdp, y).square()
            total = total + moment.sum(-1 if name == "state" else (-2, -1))
        return total

    def _third_derivatives(self, bound: Setting) -> dict[Argument, Tensor]:
        """Return the third derivatives at q of the scalar terms, by argument."""
        regularizer = bound.evaluator.regularizer
        evaluate = bound.evaluator.bind(bound.parameters, bound.t.expand(self.q.shape[:-2]))
        inputs = regularizer.read(self.mdp, self.q)
        names, every = regularizer.arguments, tuple(range(len(inputs)))

        def value(*xs: Tensor) -> Tensor:
            return total(self.mdp, evaluate(dict(zip(names, xs, strict=True)))).sum()

        def slopes(*xs: Tensor) -> Tensor:
            parts = (slope.sum() for slope in torch.func.grad(value, every)(*xs))
            return sum(parts, xs[0].new_zeros(()))

        def curvatures(*xs: Tensor) -> Tensor:
            parts = (curvature.sum() for curvature in torch.func.grad(slopes, every)(*xs))
            return sum(parts, xs[0].new_zeros(()))

        return dict(zip(names, torch.func.grad(curvatures, every)(*inputs.values()), strict=True))

    def _variance(self, name: Argument, G: Tensor) -> Tensor:
        """Return the variance of an argument of psi if q has the covariance G."""
        S, A = self.q.shape[-2:]
        paired = G.unflatten(-1, (S, A)).unflatten(-3, (S, A))  # (*batch, S, A, S, A)
        blocks = paired.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (*batch, S, A, A)
        if name == "state":
            return blocks.sum((-2, -1))
        others = self.mdp.other_actions
        return (others @ blocks @ others if name == "rest" else blocks).diagonal(dim1=-2, dim2=-1)

    def _bend_by_columns(self, bound: Setting, u: Tensor, G: Tensor) -> Tensor:
        """Compute `bend` for any regularizer, with one Hessian product per column of G."""
        rows = G.movedim(-1, 0).unflatten(-1, self.q.shape[-2:])  # (S * A, *batch, S, A)
        picks = self._columns(torch.eye(len(rows), dtype=G.dtype, device=G.device))

        def trace(q: Tensor) -> Tensor:
            return (bound.hessian_product(q.expand(len(rows), *q.shape), rows) * picks).sum()

        return (torch.func.grad(trace)(self.q) * u).sum((-2, -1))

    def _columns(self, matrix: Tensor) -> Tensor:
        """Return the rows of a matrix over pairs as a leading batch, `(S * A, *batch, S, A)`."""
        batch, pairs = self.q.shape[:-2], self.q.shape[-2:]
        return matrix.reshape(-1, *(1,) * len(batch), *pairs).expand(-1, *batch, *pairs)
