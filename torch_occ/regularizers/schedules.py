"""Learning rates: eta_t as a function of the episode t = 1, 2, ..."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.distributions import constraints

from torch_occ.regularizers.parameters import Parametrized, Value
from torch_occ.regularizers.terms import TIME, Factor, Weight


class Schedule(Parametrized):
    """A positive function of the episode. Subclasses write `forward`.

    A regularizer that is scaled by the schedule calls it with t and the parameters in a shape that
    broadcasts against `(*batch, S, A)`. So `forward` acts entry by entry, and a parameter may be
    given as `PerLayer`, `PerState` or `PerPair`.
    """

    def forward(self, t: Tensor) -> Tensor:
        """Return eta_t for a tensor t of any shape."""
        raise NotImplementedError

    @property
    def weight(self) -> Weight:
        """The schedule as a factor of weights."""
        return Weight(powers={Factor(self): 1.0})

    @property
    def depends_on_t(self) -> bool:
        """Whether it may change with the episode."""
        weight = self.weight
        return bool(weight.slopes) or TIME in weight.powers or Factor(self) in weight.powers


class PowerSchedule(Schedule):
    """A schedule that is data: powers of its parameters and of t.

    A parameter in `exponents` is a power of t, with this sign.
    """

    powers: ClassVar[dict[str, float]]
    time: ClassVar[float] = 0.0
    exponents: ClassVar[dict[str, float]] = {}

    def forward(self, t: Tensor) -> Tensor:
        factors: list[Factor] = [TIME]
        row = self._weight.row(factors)
        values = [t, *(getattr(self, factor.key) for factor in factors[1:])]
        found: Tensor = row.at(values)
        return found.expand(t.shape) if found.dim() == 0 else found

    @property
    def _weight(self) -> Weight:
        time = {TIME: self.time} if self.time else {}
        return Weight(
            powers={Factor(self, name): p for name, p in self.powers.items()} | time,
            slopes={Factor(self, name): c for name, c in self.exponents.items()},
        )

    @property
    def weight(self) -> Weight:
        own = type(self).forward is PowerSchedule.forward  # a subclass may have another
        return self._weight if own else super().weight


class Constant(PowerSchedule):
    """eta_t = rate."""

    arg_constraints: ClassVar = {"rate": constraints.positive}
    powers: ClassVar = {"rate": 1.0}

    def __init__(self, rate: Value) -> None:
        super().__init__(rate=rate)


class Polynomial(PowerSchedule):
    """eta_t = gamma t^(-exponent)."""

    arg_constraints: ClassVar = {"gamma": constraints.positive, "exponent": constraints.nonnegative}
    powers: ClassVar = {"gamma": 1.0}
    exponents: ClassVar = {"exponent": -1.0}

    def __init__(self, gamma: Value = 1.0, exponent: Value = 0.5) -> None:
        super().__init__(gamma=gamma, exponent=exponent)


class InverseSqrt(PowerSchedule):
    """eta_t = gamma / sqrt(t), the learning rate of `alg:main_alg`."""

    arg_constraints: ClassVar = {"gamma": constraints.positive}
    powers: ClassVar = {"gamma": 1.0}
    time: ClassVar = -0.5

    def __init__(self, gamma: Value = 1.0) -> None:
        super().__init__(gamma=gamma)
