"""Parameters with one value per layer, per state or per pair.

    LogBarrier(beta=PerState(mdp, 1.0))        one beta per state, all of them 1 at first

Such a parameter has the shape `(*batch, *event)`, where the event shape is `(L,)`, `(S,)` or
`(S, A)`. Where weights are computed, every parameter has its spread form, and t as well:

    ()                        a number
    (*batch, 1, 1)            one number per problem of a batch
    (*batch, S, 1 or A)       one value per layer or state, or per pair

so that products of weights broadcast, and a batch is never mistaken for states or actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP


@dataclass(frozen=True)
class Place:
    """What the entries of a parameter belong to."""

    kind: Literal["layer", "state", "pair"]
    layer_sizes: tuple[int, ...]
    num_actions: int

    @property
    def shape(self) -> torch.Size:
        """The event shape of the parameter."""
        states = sum(self.layer_sizes)
        sizes = {"layer": (len(self.layer_sizes),), "state": (states,)}
        return torch.Size(sizes.get(self.kind, (states, self.num_actions)))

    @property
    def layer_of(self) -> list[int]:
        """The layer of every state."""
        return [k for k, size in enumerate(self.layer_sizes) for _ in range(size)]

    def spread(self, x: Any) -> Any:
        """Return the spread form of a tensor or an array, `(*batch, S, 1 or A)`."""
        if self.kind == "pair" or not isinstance(x, Tensor | np.ndarray):
            return x  # a symbol of torch_occ.step.compiled.formulas stands for its spread form
        if self.kind == "layer":
            x = x[..., self.layer_of]
        return x[..., None]

    def collect(self, x: Tensor) -> Tensor:
        """Sum a tensor in the spread form to the parameter's shape; the adjoint of `spread`."""
        if self.kind == "pair":
            return x
        x = x.squeeze(-1)
        if self.kind == "state":
            return x
        return torch.stack([part.sum(-1) for part in x.split(self.layer_sizes, -1)], -1)

    def fits(self, mdp: LayeredMDP) -> bool:
        """Return whether the entries belong to the layers, states and actions of this MDP."""
        return self.layer_sizes == mdp.layer_sizes and self.num_actions == mdp.num_actions


class _Placed:
    """The first value of a parameter with several entries; its place is known from the MDP.

    Args:
        mdp: gives the layers, states and actions, the number type and the device.
        values: a number, or a tensor that broadcasts to `(*batch, *event)`.

    Raises:
        ValueError: if the values do not broadcast to the event shape.
    """

    kind: ClassVar[Literal["layer", "state", "pair"]]

    def __init__(self, mdp: LayeredMDP, values: Tensor | float = 1.0) -> None:
        self.place = Place(self.kind, mdp.layer_sizes, mdp.num_actions)
        given = torch.as_tensor(values, dtype=mdp.dtype, device=mdp.device).detach()
        event = self.place.shape
        try:
            batch = given.shape[: max(given.dim() - len(event), 0)]
            self.values = given.expand(*batch, *event).clone()
        except RuntimeError:
            raise ValueError(
                f"{type(self).__name__}: expected a number or a tensor of shape {tuple(event)}, "
                f"with the batch dimensions in front, got {tuple(given.shape)}"
            ) from None


class PerLayer(_Placed):
    """A parameter with one value per layer, `(L,)`."""

    kind = "layer"


class PerState(_Placed):
    """A parameter with one value per state, `(S,)`."""

    kind = "state"


class PerPair(_Placed):
    """A parameter with one value per pair, `(S, A)`; values on masked pairs have no effect."""

    kind = "pair"


def spread_batch(x: Tensor) -> Tensor:
    """Return the spread form of a number or of one number per problem."""
    return x[..., None, None] if x.dim() else x


def fit(x: Tensor, event_dims: int) -> Tensor:
    """Return a spread form with `event_dims` dimensions after the batch; numbers stay numbers.

    Raises:
        ValueError: if the values differ along a dimension that is removed.
    """
    if x.dim() == 0 or event_dims == 2:
        return x
    if any(size > 1 for size in x.shape[event_dims - 2 :]):
        kind = "state or pair" if event_dims == 0 else "pair"
        raise ValueError(
            f"regularizer: a weight has one value per {kind}, but the function that it multiplies "
            f"has one value per {'problem' if event_dims == 0 else 'state'}"
        )
    return x[..., 0] if event_dims == 1 else x[..., 0, 0]
