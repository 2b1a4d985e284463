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
    """A schedule that is data: its first parameter, divided by a power of t.

    The power is a number or the name of a parameter.
    """

    time: ClassVar[float | str] = 0.0

    def forward(self, t: Tensor) -> Tensor:
        factors: list[Factor] = [TIME]
        row = self._weight.row(factors)
        values = [t, *(getattr(self, factor.key) for factor in factors[1:])]
        found: Tensor = row.at(values)
        return found.expand(t.shape) if found.dim() == 0 else found

    @property
    def _weight(self) -> Weight:
        powers, time = {Factor(self, next(iter(self.arg_constraints))): 1.0}, self.time
        if isinstance(time, str):
            return Weight(powers=powers, slopes={Factor(self, time): -1.0})
        return Weight(powers=powers | ({TIME: -time} if time else {}))

    @property
    def weight(self) -> Weight:
        own = type(self).forward is PowerSchedule.forward  # a subclass may have another
        return self._weight if own else super().weight


class Constant(PowerSchedule):
    """eta_t = rate."""

    arg_constraints: ClassVar = {"rate": constraints.positive}

    def __init__(self, rate: Value) -> None:
        super().__init__(rate=rate)


class Polynomial(PowerSchedule):
    """eta_t = gamma t^(-exponent)."""

    arg_constraints: ClassVar = {"gamma": constraints.positive, "exponent": constraints.nonnegative}
    time: ClassVar = "exponent"

    def __init__(self, gamma: Value = 1.0, exponent: Value = 0.5) -> None:
        super().__init__(gamma=gamma, exponent=exponent)


class InverseSqrt(PowerSchedule):
    """eta_t = gamma / sqrt(t), the learning rate of `alg:main_alg`."""

    arg_constraints: ClassVar = {"gamma": constraints.positive}
    time: ClassVar = 0.5

    def __init__(self, gamma: Value = 1.0) -> None:
        super().__init__(gamma=gamma)
