"""Learning rates: eta_t as a function of the episode t = 1, 2, ..."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.distributions import constraints

from torch_occ.regularizers.parameters import Parametrized, Value


class Schedule(Parametrized):
    """A positive function of the episode. Subclasses write `forward`.

    A regularizer that is scaled by the schedule calls it with t and the parameters in the spread
    form of torch_occ.regularizers.parameters. So `forward` acts entry by entry, and a parameter may
    be given as `PerLayer`, `PerState` or `PerPair`.
    """

    def forward(self, t: Tensor) -> Tensor:
        """Return eta_t for a tensor t of any shape."""
        raise NotImplementedError


class Constant(Schedule):
    """eta_t = rate."""

    arg_constraints: ClassVar = {"rate": constraints.positive}
    rate: Tensor

    def __init__(self, rate: Value) -> None:
        super().__init__(rate=rate)

    def forward(self, t: Tensor) -> Tensor:
        return self.rate.expand_as(t) if self.rate.dim() == 0 else self.rate


class Polynomial(Schedule):
    """eta_t = gamma t^(-exponent)."""

    arg_constraints: ClassVar = {"gamma": constraints.positive, "exponent": constraints.nonnegative}
    gamma: Tensor
    exponent: Tensor

    def __init__(self, gamma: Value = 1.0, exponent: Value = 0.5) -> None:
        super().__init__(gamma=gamma, exponent=exponent)

    def forward(self, t: Tensor) -> Tensor:
        return self.gamma * t**-self.exponent


class InverseSqrt(Schedule):
    """eta_t = gamma / sqrt(t), the learning rate of `alg:main_alg`."""

    arg_constraints: ClassVar = {"gamma": constraints.positive}
    gamma: Tensor

    def __init__(self, gamma: Value = 1.0) -> None:
        super().__init__(gamma=gamma)

    def forward(self, t: Tensor) -> Tensor:
        return self.gamma / t.sqrt()
