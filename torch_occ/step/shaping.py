"""Potential-based shaping: the loss is replaced by its gaps.

Adding E'v to the loss does not change the solution of the FTRL step, for any potential v. With the
value of the optimal policy as potential, the loss becomes its gaps, which are non-negative, and
zero at every best action. `shape_loss` computes them in ordinary arithmetic, with an error of eps
times the values. Gaps can be tiny compared with the values. `shape_finely` then computes them
almost without rounding errors:

- The smallest loss of each state is moved from its losses to its value. The common part of each
  layer is taken out of its values: it is a constant of the objective, because each layer has mass
  one.
- Values are sums of two numbers, high + low. For E[v(s') | s, a], P and v are split into leading
  parts and small remainders. The leading parts have so few digits that the sum of their products is
  exact.
- A row p of P is read as p / sum(p), because floating-point numbers sum to one only up to rounding.
  If sums differ from one by more than rounding, rows are read as they are, and the common parts of
  layers are not taken out.

The remaining error is `fineness(eps)` times the values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer, SparseLayer
from torch_occ.mdp.occupancy import join, optimal_policy


class Shaped(NamedTuple):
    """loss = gaps + E'(value + potential of the constants of the layers)."""

    gaps: Tensor  # (*batch, S, A), zero on masked pairs
    value: Tensor  # (*batch, S)
    rounding: Tensor  # (*batch, S, A) or (*batch, S, 1), estimated rounding errors of the gaps
    constants: Tensor | None  # (*batch, L), the common parts of the layers, if taken out


def shape_loss(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """Compute the gaps of the optimal policy, by backward induction."""
    plan = optimal_policy(mdp, loss)
    rounding = torch.finfo(loss.dtype).eps * plan.value.abs()
    return Shaped(plan.gaps, plan.value, rounding.unsqueeze(-1), None)


def shape_finely(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """Compute the gaps almost without rounding errors; see the module."""
    conserved = conserves_mass(mdp)
    eps = torch.finfo(loss.dtype).eps
    gaps: list[Tensor] = []
    values: list[tuple[Tensor, Tensor]] = []
    rounding: list[Tensor] = []
    constants: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        here = mdp.layer_slices[k]
        exists, own = mdp.actions[here], loss[..., here, :]
        base = torch.where(exists, own, torch.inf).amin(-1)
        high, low = two_sum(torch.where(exists, own, 0.0), -base.unsqueeze(-1))
        ahead = rest = torch.zeros_like(high)
        if values:
            ahead, rest = _expect(mdp.layers[k], *values[0], conserved)
            high, lost = two_sum(high, ahead)
            low = low + lost + rest
        high, low = two_sum(high, low)
        best = torch.where(exists, high, torch.inf).amin(-1, keepdim=True)
        # Actions with the same best `high` part differ in the `low` part.
        tail, first = torch.where(exists & (high == best), low, torch.inf).min(-1, keepdim=True)
        rounding.insert(0, torch.zeros_like(high))
        if values:
            size = mdp.layers[k].ahead(values[0][0].abs()).detach()
            # Equal expectations have equal rounding errors, which cancel in the gap.
            apart = (ahead != ahead.gather(-1, first)) | (rest != rest.gather(-1, first))
            size = (size + size.gather(-1, first.expand(*size.shape[:-1], 1))) * apart
            rounding[0] = fineness(eps) * size
        gaps.insert(0, torch.where(exists, (high - best) + (low - tail), 0.0).clamp(min=0))
        # The common part is the base closest to zero: subtracting it makes no number larger.
        constant = base.amin(-1).clamp(min=0) + base.amax(-1).clamp(max=0)
        constant = constant if conserved else torch.zeros_like(constant)
        high, low = two_sum(base, -constant.unsqueeze(-1))
        high, lost = two_sum(high, best.squeeze(-1))
        values.insert(0, two_sum(high, low + lost + tail.squeeze(-1)))
        constants.insert(0, constant)
    batch = gaps[0].shape[:-2]
    return Shaped(
        join(gaps, 2),
        join([high for high, _ in values], 1),
        join(rounding, 2),
        torch.stack([constant.expand(batch) for constant in constants], -1) if conserved else None,
    )


def fineness(eps: float) -> float:
    """Return the error of a finely shaped loss, relative to the values."""
    return eps * 2.0 ** (2 - _digits(eps)[1])


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _digits(eps: float) -> tuple[int, int]:
    """Return the binary digits of the leading parts of P and v.

    The sum of their products fits into a floating-point number exactly.
    """
    return (26, 24) if eps < 1e-12 else (11, 9)


def _expect(
    layer: DenseLayer | SparseLayer,
    high: Tensor,
    low: Tensor,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """Return E[v(s') | s, a] for v = high + low `(*batch, S')`, as two parts `(*batch, S, A)`."""
    P = layer.probabilities.detach()
    of_rows, of_values = _digits(torch.finfo(high.dtype).eps)
    grid = 2.0 ** -torch.tensor(of_rows, dtype=P.dtype)
    leading = layer.with_probabilities(_cut(P, grid))
    remainder = layer.with_probabilities(P - leading.probabilities)
    size = high.abs().amax(-1, keepdim=True)
    exponent = torch.where(size > 0, size, 1.0).log2().ceil()
    coarse = _cut(high, torch.exp2(exponent - of_values))
    left = (high - coarse) + low
    ahead = leading.ahead(coarse)
    rest = remainder.ahead(coarse) + layer.ahead(left)
    if normalized:
        ones = torch.ones_like(high)
        rest = rest - ahead * ((leading.ahead(ones) - 1) + remainder.ahead(ones))
    return ahead, rest


def _cut(x: Tensor, grid: Tensor) -> Tensor:
    """Round x to multiples of a power of two."""
    large = 1.5 * grid / torch.finfo(x.dtype).eps
    return (x + large) - large


def conserves_mass(mdp: LayeredMDP) -> bool:
    """Return whether all rows of P sum to one up to rounding."""
    eps = torch.finfo(mdp.dtype).eps
    for layer, exists in zip(mdp.layers[:-1], mdp.split(mdp.actions, -2), strict=False):
        width = layer.sizes[-1]
        ones = torch.ones(width, dtype=mdp.dtype, device=mdp.device)
        off = (layer.ahead(ones).detach() - 1).abs() > (64 + width) * eps
        if bool((off & exists).any()):
            return False
    return True


def at_likeliest_pairs(mdp: LayeredMDP, q: Tensor, x: Tensor) -> Tensor:
    """Return x at the pair with the largest q of each layer, `(*batch, L)`."""
    parts = zip(mdp.split(q, -2), mdp.split(x, -2), strict=True)
    found = [x.flatten(-2).gather(-1, q.flatten(-2).argmax(-1, keepdim=True)) for q, x in parts]
    return torch.cat(found, -1)


def potential(mdp: LayeredMDP, constants: Tensor | None) -> Tensor | float:
    """Return the v `(*batch, S)` with E'v equal to constants `(*batch, L)` in each layer.

    None stands for zero.
    """
    if constants is None:
        return 0.0
    return constants.flip(-1).cumsum(-1).flip(-1)[..., mdp.layer]


def cut_before_single_states(mdp: LayeredMDP) -> LayeredMDP:
    """Return the MDP without transitions into layers of one state.

    All mass goes through such a state under every policy, so the feasible changes of q are the same
    for both MDPs. But their sums over transitions have rounding errors where the exact result is
    zero, and a pair that takes nearly all of its layer would amplify these errors.
    """
    kept = [
        torch.zeros_like(layer.probabilities) if layer.sizes[-1] == 1 else layer.probabilities
        for layer in mdp.layers
    ]
    return mdp.with_probabilities(mdp.initial, *kept)


def rejoin(mdp: LayeredMDP, v: Tensor) -> Tensor:
    """Return multipliers of the MDP from those of `cut_before_single_states`.

    In the cut MDP, E'v lacks the v of the single state that follows, a constant of the layer.
    """
    zero = torch.zeros_like(v[..., 0])
    following = zip(mdp.layer_sizes[1:], mdp.layer_slices[1:], strict=True)
    constants = [v[..., there.start] if width == 1 else zero for width, there in following]
    constants.append(zero)
    return v + potential(mdp, torch.stack(constants, -1))
