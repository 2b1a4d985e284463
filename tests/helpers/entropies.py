"""Steps of entropies with 60 digits: what torch_occ.step.entropic must find."""

from typing import NamedTuple

import torch
from mpmath import mp, mpf
from torch import Tensor

import torch_occ as occ
from torch_occ.step import entropic
from torch_occ.step.newton import shape_finely
from torch_occ.step.solution import Options


class Exact(NamedTuple):
    log_q: list[list[mpf]]  # minus infinity on masked pairs
    value: list[mpf]


def numbers(x: Tensor) -> list:
    """A tensor as nested lists of mpf."""
    return [numbers(row) for row in x] if x.dim() else mpf(float(x))


def solve_exactly(
    mdp: occ.LayeredMDP, loss: Tensor | list, weight: float | Tensor, price: float
) -> Exact:
    """The solution for w and kappa: equations with 60 digits, solved from the float one.

    If kappa = 0, w may have one value per state.

    Steps with the float Jacobian gain 8 digits or more each; the equations say when they hold.
    """
    if isinstance(loss, Tensor):
        loss = numbers(loss)
    if price == 0:
        every = numbers(weight) if isinstance(weight, Tensor) else [mpf(weight)] * mdp.num_states
        log_q, _, value = _unfold(mdp, loss, every, mpf(0), [mpf(0)] * mdp.num_states)
        return Exact(log_q, value)
    rough = torch.tensor([[float(x) for x in row] for row in loss], dtype=torch.float64)
    entropy = entropic.Entropy(
        *(torch.tensor([float(x)], dtype=torch.float64) for x in (weight, price))
    )
    shaped = shape_finely(mdp, rough)
    uniform = occ.interior_point(mdp).sum(-1).log()
    guess, _ = entropic.settle(mdp, shaped, entropy, uniform, Options())
    at = entropic.unfold(mdp, shaped.gaps, entropy, guess)
    inverse = entropic.invert_jacobian(mdp, entropy, at)(
        torch.eye(len(guess), dtype=torch.float64)
    ).mT
    weights, price = [mpf(weight)] * mdp.num_states, mpf(price)
    g = numbers(guess)
    for _ in range(40):
        log_q, log_u, value = _unfold(mdp, loss, weights, price, g)
        off = [u - x for u, x in zip(log_u, g, strict=True)]
        size = max(abs(x) / (1 + abs(u)) for x, u in zip(off, log_u, strict=True))
        if size < mpf(10) ** -45:
            return Exact(log_q, value)
        scale = max(abs(x) for x in off)
        step = inverse @ torch.tensor([float(x / scale) for x in off], dtype=torch.float64)
        g = [x + scale * mpf(float(d)) for x, d in zip(g, step, strict=True)]
    raise AssertionError(f"no digits gained beyond {size}")


def _unfold(mdp: occ.LayeredMDP, loss: list, weights: list[mpf], price: mpf, g: list[mpf]) -> tuple:
    layers = [range(here.start, here.stop) for here in mdp.layer_slices]
    value, log_pi = [mpf(0)] * mdp.num_states, [[-mp.inf] * mdp.num_actions for _ in g]
    rows = {}
    for here, there, kernel in reversed(
        list(zip(layers, [*layers[1:], []], mdp.transitions, strict=True))
    ):
        for s in here:
            Q, weight = {}, weights[s]
            for a in range(mdp.num_actions):
                if mdp.actions[s, a]:
                    row = [mpf(float(p)) for p in kernel[s - here[0], a]]
                    rows[s, a] = [
                        (r, p / mp.fsum(row)) for r, p in zip(there, row, strict=False) if p
                    ]
                    Q[a] = loss[s][a] + mp.fsum(p * value[r] for r, p in rows[s, a])
            least = min(Q.values())
            soft = mp.log(mp.fsum(mp.exp((least - x) / weight) for x in Q.values()))
            value[s] = price * (1 + g[s]) + least - weight * soft
            for a, x in Q.items():
                log_pi[s][a] = (least - x) / weight - soft
    log_u = [[mp.log(mpf(float(p)))] for p in mdp.initial] + [
        [] for _ in range(len(g) - len(mdp.initial))
    ]
    log_q = [[-mp.inf] * mdp.num_actions for _ in g]
    for s, arriving in enumerate(log_u):
        top = max(arriving)
        log_u[s] = top + mp.log(mp.fsum(mp.exp(x - top) for x in arriving))
        for a in range(mdp.num_actions):
            if mdp.actions[s, a]:
                log_q[s][a] = log_u[s] + log_pi[s][a]
                for r, p in rows[s, a]:
                    log_u[r].append(log_q[s][a] + mp.log(p))
    return log_q, log_u, value


def worst_error(q: Tensor, exact: Exact, smallest: float = -670.0) -> float:
    """The largest relative error of entries that are not tiny; infinite if a tiny one is not."""
    errors = [mpf(0)]
    for row, logs in zip(q.tolist(), exact.log_q, strict=True):
        for x, log in zip(row, logs, strict=True):
            if log > smallest:
                errors.append(abs(mpf(x) / mp.exp(log) - 1))
            elif x > 1e-290:
                errors.append(mp.inf)
    return float(max(errors))
