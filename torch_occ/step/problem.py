"""The checked arguments of a step, as the torch path needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.parameters import with_rank
from torch_occ.step.checks import check_values
from torch_occ.step.implicit import Bound

if TYPE_CHECKING:
    from torch_occ.step.ftrl import FTRLStep


class Problem(NamedTuple):
    """The checked arguments of a step, without the loss."""

    step: FTRLStep
    mdp: LayeredMDP
    t: Tensor
    parameters: tuple[Tensor, ...]  # those of `Evaluator`
    start: Tensor
    probabilities: bool  # whether they are differentiated
    rank: int  # the number of batch dimensions

    def align(self, x: Tensor) -> list[Tensor]:
        """Return x = - loss, the start, t, parameters and probabilities.

        All but the parameters get the same number of batch dimensions, so that the dimension that a
        vmap puts in front of them is aligned.
        """
        rank = self.rank
        tensors = [with_rank(x, rank, 2), with_rank(self.start, rank, 2)]
        tensors += self.step.evaluator.align(rank, self.t, self.parameters)
        if self.probabilities:
            dims = (1, *(layer.event_dims for layer in self.mdp.layers))
            pairs = zip(self.mdp.probabilities, dims, strict=True)
            tensors += [with_rank(p, rank, dim) for p, dim in pairs]
        return tensors

    def validate(self, bound: Bound, x: Tensor, start: Tensor) -> None:
        """Check values; runs on plain tensors, inside every transform."""
        bound.evaluator.validate(bound.parameters)
        check_values(self.step.mdp, bound.mdp, -x, start, bound.t, zeros=False)
