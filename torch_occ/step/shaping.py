"""Potential-based shaping: the loss as its gaps.

Adding E'v to the loss does not move the solution of the FTRL step, for any potential v. The value of
the optimal policy turns the loss into its gaps: non-negative, zero at every best action. `shape_loss`
adds up as the numbers come; rounding leaves an error of eps times the values. A gap may be tiny beside
the values that it is the difference of, and then `shape_finely` adds up without rounding errors:

- Each state's smallest loss is taken out of its losses, and put into its value. Each layer's common
  part is taken out of its values: every layer carries mass one, so it is a constant of the objective.
- Values are pairs of numbers, high + low. For E[v(s') | s, a], P and v are cut in two: leading parts
  with so few digits that the sum of their products is exact, and small remainders.
- A row of P is read as p / sum(p), since floating-point numbers sum to one only up to rounding. Rows
  that are further from one are taken as they are; then the layers' common parts stay where they are.

What rounding leaves is `fineness(eps)` times the values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer, SparseLayer
from torch_occ.mdp.occupancy import join, optimal_policy


class Shaped(NamedTuple):
    """loss = gaps + E'(value + the layers' constants)."""

    gaps: Tensor  # (*batch, S, A), zero on masked pairs
    value: Tensor  # (*batch, S)
    rounding: Tensor  # (*batch, S, A) or (*batch, S, 1), an estimate of what it did to the gaps
    constants: Tensor | None  # (*batch, L), if some were taken out


def shape_loss(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """The gaps of the optimal policy, by backward induction."""
    plan = optimal_policy(mdp, loss)
    rounding = torch.finfo(loss.dtype).eps * plan.value.abs()
    return Shaped(plan.gaps, plan.value, rounding.unsqueeze(-1), None)


def shape_finely(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """The same without rounding errors."""
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
        # Actions that share the best leading part differ in what follows.
        tail, first = torch.where(exists & (high == best), low, torch.inf).min(-1, keepdim=True)
        rounding.insert(0, torch.zeros_like(high))
        if values:
            size = mdp.layers[k].ahead(values[0][0].abs()).detach()
            # Where the same is expected, rounding did the same.
            apart = (ahead != ahead.gather(-1, first)) | (rest != rest.gather(-1, first))
            size = (size + size.gather(-1, first.expand(*size.shape[:-1], 1))) * apart
            rounding[0] = fineness(eps) * size
        gaps.insert(0, torch.where(exists, (high - best) + (low - tail), 0.0).clamp(min=0))
        # The base of this layer that is closest to zero: no number becomes larger by taking it out.
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
    """What rounding leaves of a shaped loss, relative to the values."""
    return eps * 2.0 ** (2 - _digits(eps)[1])


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and what its rounding left out (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _digits(eps: float) -> tuple[int, int]:
    """Binary digits of the leading parts of P and of v: the sum of their products has room for both and a few more."""
    return (26, 24) if eps < 1e-12 else (11, 9)


def _expect(
    layer: DenseLayer | SparseLayer,
    high: Tensor,
    low: Tensor,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """E[v(s') | s, a] for v = high + low `(*batch, S')`, as two numbers `(*batch, S, A)`."""
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
    """x rounded to multiples of a power of two."""
    large = 1.5 * grid / torch.finfo(x.dtype).eps
    return (x + large) - large


def conserves_mass(mdp: LayeredMDP) -> bool:
    """Whether all rows of P sum to one, but for rounding."""
    eps = torch.finfo(mdp.dtype).eps
    for layer, exists in zip(mdp.layers[:-1], mdp.split(mdp.actions, -2), strict=False):
        width = layer.sizes[-1]
        ones = torch.ones(width, dtype=mdp.dtype, device=mdp.device)
        off = (layer.ahead(ones).detach() - 1).abs() > (64 + width) * eps
        if bool((off & exists).any()):
            return False
    return True


def at_likeliest_pairs(mdp: LayeredMDP, q: Tensor, x: Tensor) -> Tensor:
    """x at the pair of the largest q of every layer, `(*batch, L)`."""
    parts = zip(mdp.split(q, -2), mdp.split(x, -2), strict=True)
    found = [x.flatten(-2).gather(-1, q.flatten(-2).argmax(-1, keepdim=True)) for q, x in parts]
    return torch.cat(found, -1)


def potential(mdp: LayeredMDP, constants: Tensor | None) -> Tensor | float:
    """The v with E'v = a constant in every layer `(*batch, L)`, as `(*batch, S)`; zero for None."""
    if constants is None:
        return 0.0
    return constants.flip(-1).cumsum(-1).flip(-1)[..., mdp.layer]


def cut_before_single_states(mdp: LayeredMDP) -> LayeredMDP:
    """The MDP with no transitions into layers of one state.

    All mass goes there, whatever is done, so changes of q that keep the mass are the same for both. But summed up over transitions,
    they leave rounding where there is nothing, and a pair that takes nearly all of its layer would amplify it.
    """
    kept = [
        torch.zeros_like(layer.probabilities) if layer.sizes[-1] == 1 else layer.probabilities
        for layer in mdp.layers
    ]
    return mdp.with_probabilities(mdp.initial, *kept)


def rejoin(mdp: LayeredMDP, v: Tensor) -> Tensor:
    """Multipliers of the MDP from those of `cut_before_single_states`: there, E'v lacks v at each single state, a constant."""
    following = [*mdp.layer_slices[1:], None]
    constants = [
        v[..., here.start]
        if here is not None and here.stop - here.start == 1
        else torch.zeros_like(v[..., 0])
        for here in following
    ]
    return v + potential(mdp, torch.stack(constants, -1))
