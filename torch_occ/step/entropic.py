"""The FTRL step of an entropy, in logarithms: q may underflow, its logarithm does not.

Sums of `Shannon` and `ConditionalEntropy`, each with its weight, are of the form

    psi(q) = w sum q(s,a) log pi(a|s) + kappa sum u(s) log u(s),    q(s,a) = u(s) pi(a|s),

with 0 <= kappa <= w: kappa = w for Shannon's entropy, kappa = 0 for the conditional one. Where the
derivative of ⟨q, loss⟩ + psi(q) vanishes, for a guess g of log u,

    v(s)        = kappa (1 + g(s)) - w log sum_a exp(-Q(s,a) / w),    Q = loss + P v,
    log pi(a|s) = log softmax_a(-Q(s,a) / w),
    log u(s')   = log sum_{s,a} P(s'|s,a) exp(log u(s) + log pi(a|s)),

soft value iteration back through the layers and a forward pass, and the step is solved when
log u = g. Only these S equations are left to solve; nothing in them overflows or underflows,
however small q is. With kappa = 0 nothing depends on g, and the step has a closed form.

**Newton's method.** Let rho(s,a|s') = q(s,a) P(s'|s,a) / u(s') be the probability of coming from
(s,a), P_pi and rho_pi the two kernels with the actions summed out, and C(s', .) the covariance
sum rho(s,a|s') (P(.|s,a) - P_pi(.|s)) / w. Then d(g - log u) / dg is the Jacobian

    J = I + kappa (I - rho_pi)^-1 C (I - P_pi)^-1,

whose entries are of the order of the horizon and whose eigenvalues are at least 1: it is similar
to the matrix M of torch_occ.step.kkt. The equations are nearly piecewise linear, and full steps
from the uniform policy take 1 to 8 iterations for losses of 1 to 1e12. (The direction is that of
torch_occ.step.newton at q, which descends; from starts that are far off, full steps may cycle, and
half steps end that.)

**Derivatives.** g is the solution of equations whose terms are ordinary differentiable operations.
Two Newton steps from the solution, g + J^-1 (log u - g), written in operations that autograd sees,
are g in value and have its first three derivatives, in the loss, w, kappa and the probabilities.
What
underflows has the derivative 0, and v is differentiated even where a whole state underflows.

**Certificate.** The dual residual is kappa / w |log u - g|, the error of log q; in states of which
log u < log DEAD, relative to log u.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ.kernels.constants import FULL_STEPS, LOG_DEAD, STALL_AFTER
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import largest_exponent
from torch_occ.mdp.occupancy import flow_of, flow_residual, flow_source, join
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.terms import Term, XLogX
from torch_occ.step.shaping import Shaped, potential, shape_finely
from torch_occ.step.solution import Options, Solution, Status


class Entropy(NamedTuple):
    """w and kappa, `()` or `(*batch,)`."""

    weight: Tensor
    price: Tensor


def is_entropy(regularizer: Regularizer) -> bool:
    """Whether psi_t has the form above, for all parameters and every t."""
    for leaf in regularizer.leaves():
        if not isinstance(leaf, TabularRegularizer):
            return False
        weights = {"pair": 0.0, "state": 0.0}
        for term in leaf.table():
            known = isinstance(term.function, XLogX) and isinstance(term.weight, float | int)
            if not known or term.argument not in weights:
                return False
            weights[term.argument] += float(term.weight)
        if not 0 <= weights["pair"] + weights["state"] <= weights["pair"]:
            return False
    return True


def entropy_at(regularizer: Regularizer, t: Tensor) -> Entropy:
    """w and kappa of psi_t."""
    terms: list[Term] = []
    for part, weight in regularizer.parts(t):
        assert isinstance(part, TabularRegularizer)
        terms += part.constant(weight)[0].terms
    return entropy_of([(term.argument, torch.as_tensor(term.weight).to(t)) for term in terms])


def entropy_of(terms: Sequence[tuple[str, Tensor]]) -> Entropy:
    """w and kappa from the arguments and weights of the terms."""
    pairs = [weight for argument, weight in terms if argument == "pair"]
    every = [weight for _, weight in terms]
    return Entropy(sum(pairs[1:], pairs[0]), sum(every[1:], every[0]))


class Unfolded(NamedTuple):
    """What follows from a guess of log u."""

    value: Tensor  # (*batch, S), v
    log_policy: Tensor  # (*batch, S, A), minus infinity on masked pairs
    log_state: Tensor  # (*batch, S), log u


def unfold(mdp: LayeredMDP, loss: Tensor, entropy: Entropy, guess: Tensor) -> Unfolded:
    """Back by soft value iteration, and forth by the policy; in differentiable operations."""
    losses, masks, guesses = mdp.split(loss, -2), mdp.split(mdp.actions, -2), mdp.split(guess, -1)
    weight, price = entropy.weight.unsqueeze(-1), entropy.price.unsqueeze(-1)  # (*batch, 1)
    values: list[Tensor] = []
    policies: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        Q = losses[k] + mdp.layers[k].ahead(values[0]) if values else losses[k]
        least = torch.where(masks[k], Q, torch.inf).amin(-1).detach()  # any constant would do
        scores = torch.where(masks[k], (least.unsqueeze(-1) - Q) / weight.unsqueeze(-1), -torch.inf)
        soft = scores.logsumexp(-1)
        policies.insert(0, scores - soft.unsqueeze(-1))
        values.insert(0, price * (1 + guesses[k]) + least - weight * soft)
    logs = [mdp.initial.log()]
    for layer, policy in zip(mdp.layers[:-1], policies[:-1], strict=True):
        logs.append(layer.arrive_logs(logs[-1].unsqueeze(-1) + policy))
    return Unfolded(join(values, 1), join(policies, 2), join(logs, 1))


def jacobian(mdp: LayeredMDP, entropy: Entropy, at: Unfolded) -> Tensor:
    """J, `(*batch, S, S)`, in differentiable operations."""
    kernel = mdp.join_transitions()  # (*batch, S, A, S)
    policy = at.log_policy.exp()
    onward = (policy.unsqueeze(-2) @ kernel).squeeze(-2)  # P_pi, (*batch, S, S)
    log_q = at.log_state.unsqueeze(-1) + at.log_policy
    relative = log_q.unsqueeze(-1) - at.log_state[..., None, None, :]
    relative = relative.clamp(max=largest_exponent(policy.dtype))
    sources = kernel * relative.exp()  # rho(s, a | s'), (*batch, S, A, S)
    spread = (kernel - onward.unsqueeze(-2)) / entropy.weight[..., None, None, None]
    covariance = sources.flatten(-3, -2).mT @ spread.flatten(-3, -2)
    identity = torch.eye(mdp.num_states, dtype=onward.dtype, device=onward.device)
    half = _divide(identity - sources.sum(-2).mT, covariance)
    whole = _divide((identity - onward).mT, half.mT).mT
    return identity + entropy.price[..., None, None] * whole


def _divide(triangle: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(triangle, x, upper=False, unitriangular=True)


def occupancy_of(mdp: LayeredMDP, log_policy: Tensor) -> Tensor:
    """q of the policy, `(*batch, S, A)`, zero where it underflows."""
    policy = log_policy.exp()
    return flow_of(mdp).forward(policy, flow_source(mdp)).unsqueeze(-1) * policy


def error_unit(log_state: Tensor) -> Tensor:
    """What an error of log u is measured by: 1, and in dead states log u itself."""
    return (log_state / LOG_DEAD).clamp(min=1.0)


# -- solving ---------------------------------------------------------------------------------------


def settle(
    mdp: LayeredMDP,
    shaped: Shaped,
    entropy: Entropy,
    guess: Tensor,
    options: Options,
) -> tuple[Tensor, Solution]:
    """Solve log u(g) = g from a guess `(*batch, S)`, for plain tensors; returns g, too.

    The value of the solution is that of the shaped loss.
    """
    loss, eps = shaped.gaps, torch.finfo(guess.dtype).eps
    done = entropy.price == 0  # then there is nothing to guess
    status = torch.full(guess.shape[:-1], Status.MAX_STEPS, device=guess.device)
    running, steps = torch.ones_like(done), done.to(status.dtype)
    patience = torch.full_like(status, STALL_AFTER)
    best = torch.full_like(guess[..., 0], torch.inf)
    decrement = torch.zeros_like(best)
    for count in range(options.max_steps + 1):
        found = unfold(mdp, loss, entropy, guess)
        off = found.log_state - guess
        status = torch.where(running & done, Status.STALLED, status)  # until certified below
        running = running & ~done
        if count == options.max_steps or not bool(running.any()):
            break
        step = _solve(jacobian(mdp, entropy, found), off)
        moved = (step.abs() / error_unit(found.log_state)).amax(-1)
        status = torch.where(running & ~moved.isfinite(), Status.NOT_FINITE, status)
        running = running & moved.isfinite()
        length = torch.where((moved < 0.1) | (count < FULL_STEPS), 1.0, 0.5)
        ahead = guess + length.unsqueeze(-1) * step
        guess = torch.where(running.unsqueeze(-1), ahead, guess)
        squared = entropy.price * (off * (off - step) * found.log_state.exp()).sum(-1)
        decrement = torch.where(running, squared, decrement)
        steps += running
        patience = torch.where((moved < 0.5 * best) | (moved > 0.1), STALL_AFTER, patience - 1)
        best = torch.minimum(best, moved)
        done = (moved <= eps**0.5) | (patience == 0)

    closed = (entropy.price == 0).unsqueeze(-1)
    guess = torch.where(closed, found.log_state, guess)
    q = occupancy_of(mdp, found.log_policy)
    error = torch.where(closed, 0.0, off) / error_unit(found.log_state)
    dual = entropy.price / entropy.weight * error.abs().amax(-1)
    # What is added to all actions of a state moves none of them.
    others = 1 - found.log_policy.exp()
    seen = torch.where(q > torch.finfo(q.dtype).tiny / eps, shaped.rounding * others, 0.0)
    dual = torch.maximum(dual, seen.amax((-2, -1)) / entropy.weight)
    alive = found.log_state > LOG_DEAD
    flow = (flow_residual(mdp, q) / torch.where(alive, q.sum(-1), torch.inf)).abs().amax(-1)
    tolerance = options.tolerance_in(loss.dtype)
    certified = (dual <= tolerance) & (flow <= tolerance)
    status = torch.where((status == Status.STALLED) & certified, Status.CONVERGED, status)
    numbers = (status.to(q), steps.to(q), decrement.clamp(min=0).sqrt(), flow, dual)
    return guess, Solution(q, found.value, torch.stack(numbers, -1))


def _solve(matrix: Tensor, x: Tensor) -> Tensor:
    # Not torch.linalg.solve: its derivative is wrong in a vmap of jacfwd (torch 2.13).
    return (torch.linalg.inv_ex(matrix).inverse @ x.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Task:
    """What of a step is no tensor."""

    mdp: LayeredMDP
    options: Options
    probabilities: bool  # whether a derivative may be taken in them
    check: Callable[[LayeredMDP, Tensor, Tensor, Entropy, Tensor], None]  # raises for wrong inputs
    report: Callable[[Solution], None]  # raises if a step failed and that is an error


class Settled(torch.autograd.Function):
    """g, gaps and potential of the shaped loss, q, v and the certificate; without derivatives."""

    @staticmethod
    def forward(task: Task, *tensors: Tensor) -> tuple[Tensor, ...]:
        loss, start, weight, price, t, *probabilities = tensors
        mdp = task.mdp.with_probabilities(*probabilities) if probabilities else task.mdp
        task.check(mdp, loss, start, Entropy(weight, price), t)
        batches = (loss.shape[:-2], start.shape[:-2], weight.shape, price.shape, mdp.batch_shape)
        batch = broadcast(*batches)
        entropy = Entropy(weight.expand(batch), price.expand(batch))
        shaped = shape_finely(mdp, loss.expand(*batch, *loss.shape[-2:]))
        smallest = torch.finfo(loss.dtype).tiny
        first = start.sum(-1).clamp(min=smallest).log().expand_as(shaped.value)
        guess, solution = settle(mdp, shaped, entropy, first, task.options)
        shift = shaped.value + potential(mdp, shaped.constants)
        solution = solution._replace(value=solution.value + shift)
        task.report(solution)
        return guess, shaped.gaps, shift, *solution[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        task: Task,
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = Settled.apply(task, *_in_front(info.batch_size, in_dims[1:], tensors))
        return outputs, (0,) * len(outputs)


class Poisoned(torch.autograd.Function):
    """x, with the derivative NaN where a step has failed."""

    @staticmethod
    def forward(x: Tensor, certificate: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        x, certificate = inputs
        failed = certificate[..., 0] != Status.CONVERGED
        failed = failed[(..., *(None,) * (x.dim() - failed.dim()))]
        ctx.save_for_backward(failed)
        ctx.save_for_forward(failed)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0], torch.nan, cotangent), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return torch.where(ctx.saved_tensors[0], torch.nan, tangent)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, int | None],
        x: Tensor,
        certificate: Tensor,
    ) -> tuple[Tensor, int]:
        return Poisoned.apply(*_in_front(info.batch_size, in_dims, (x, certificate))), 0


def _in_front(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor with the dimension of a `vmap` in front."""
    pairs = zip(tensors, dims, strict=True)
    return [x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0) for x, dim in pairs]


def solve_entropic(
    task: Task,
    loss: Tensor,
    start: Tensor,
    entropy: Entropy,
    t: Tensor,
    differentiable: bool,
) -> Solution:
    """The step, for tensors of one batch rank.

    Args:
        start: an occupancy measure that may be zero in places; only q(s) counts.
        differentiable: whether derivatives may be asked for; they cost two Newton steps more.
    """
    mdp = task.mdp
    tensors = (loss, start, *entropy, t, *(mdp.probabilities if task.probabilities else ()))
    guess, gaps, shift, *found = Settled.apply(task, *(x.detach() for x in tensors))
    if not differentiable:
        return Solution(*found)
    certificate = found[2]
    # The gaps in value, and in their derivatives loss + P shift - shift.
    moving = loss + flow_of(mdp).lookahead(shift)
    shaped = torch.where(mdp.actions, gaps + (moving - moving.detach()), 0.0)
    at = unfold(mdp, shaped, entropy, guess)
    for _ in range(2):
        guess = guess + _solve(jacobian(mdp, entropy, at), at.log_state - guess)
        at = unfold(mdp, shaped, entropy, guess)
    q, value = occupancy_of(mdp, at.log_policy), at.value + shift
    return Solution(Poisoned.apply(q, certificate), Poisoned.apply(value, certificate), certificate)
