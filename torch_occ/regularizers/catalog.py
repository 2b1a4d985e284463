"""The built-in regularizers, as data.

Each is a table of weighted elementary terms (argument, function, weight); see
torch_occ.regularizers.terms. The torch path and the compiled kernels read the same table.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer, TabularRegularizer
from torch_occ.regularizers.parameters import Value
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.regularizers.terms import Log, Power, Term, XLogX


class Tsallis(TabularRegularizer):
    """- sum q(s,a)^power with 0 < power < 1.

    The default is the 1/2-Tsallis entropy (Audibert and Bubeck; Zimmert and Seldin).
    """

    arg_constraints: ClassVar = {"power": constraints.interval(1e-3, 1 - 1e-3)}
    power: Tensor

    def __init__(self, power: Value = 0.5) -> None:
        super().__init__(power=power)

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", Power("power"), -1.0),)


class HybridTsallis(TabularRegularizer):
    """phi_H(q) = - sum ( sqrt(q(s,a)) + alpha sqrt(q(s) - q(s,a)) ), `eq:hybrid`."""

    arg_constraints: ClassVar = {"alpha": constraints.nonnegative}
    alpha: Tensor

    def __init__(self, alpha: Value) -> None:
        super().__init__(alpha=alpha)

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", Power(0.5), -1.0), Term("rest", Power(0.5), -1.0, "alpha"))


class HybridComplement(TabularRegularizer):
    """- sum ( sqrt(q(s,a)) + alpha sqrt(1 - q(s,a)) ).

    At alpha = 1 this is the regularizer of Zimmert, Luo and Wei (2019).
    """

    arg_constraints: ClassVar = {"alpha": constraints.nonnegative}
    alpha: Tensor

    def __init__(self, alpha: Value = 1.0) -> None:
        super().__init__(alpha=alpha)

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", Power(0.5), -1.0), Term("complement", Power(0.5), -1.0, "alpha"))


class Shannon(TabularRegularizer):
    """sum q(s,a) log q(s,a), the regularizer of O-REPS (Zimin and Neu, 2013)."""

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", XLogX(), 1.0),)


class ConditionalEntropy(TabularRegularizer):
    """sum q(s,a) log( q(s,a) / q(s) ).

    The step is then soft value iteration: its policy is a softmax.
    """

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", XLogX(), 1.0), Term("state", XLogX(), -1.0))


class LogBarrier(TabularRegularizer):
    """phi_L(q) = - beta sum log q(s,a), `eq:log-barrier`."""

    arg_constraints: ClassVar = {"beta": constraints.nonnegative}
    beta: Tensor

    def __init__(self, beta: Value = 1.0) -> None:
        super().__init__(beta=beta)

    def table(self) -> tuple[Term, ...]:
        return (Term("pair", Log(), -1.0, "beta"),)


def jin_luo(
    mdp: LayeredMDP,
    alpha: Value | None = None,
    beta: Value | None = None,
    gamma: Value | None = None,
) -> Regularizer:
    """Make the regularizer of Jin and Luo, with the constants of `thm:main` by default.

        psi_t = phi_H / eta_t + phi_L,        eta_t = gamma / sqrt(t)

    Args:
        mdp: gives A, L, the number type and the device.
        alpha: the weight in phi_H (`HybridTsallis`); by default 1 / sqrt(A).
        beta: the weight of phi_L (`LogBarrier`); by default 64 L.
        gamma: the factor of the learning rate; by default 1.

    Returns:
        `HybridTsallis(alpha) / InverseSqrt(gamma) + LogBarrier(beta)`.

    Raises:
        ValueError: if alpha or beta is negative, or gamma is not positive.
    """

    def value(given: Value | None, default: float) -> Value:
        given = default if given is None else given
        if not isinstance(given, Tensor | int | float):
            return given
        return torch.as_tensor(given, dtype=mdp.dtype, device=mdp.device)

    hybrid = HybridTsallis(value(alpha, mdp.num_actions**-0.5)) / InverseSqrt(value(gamma, 1.0))
    return hybrid + LogBarrier(value(beta, 64.0 * mdp.horizon))
