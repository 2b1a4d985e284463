"""Gradient and Hessian of psi_t by autograd, at the level at which psi is written.

Scalar terms cost two backward passes, whatever their number. Per-state functions cost one more per
action, and joint functions one per pair. `Evaluator` makes psi a function of its parameters, so
that they can be tensors of a `torch.func` transform.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.constants import FLAT
from torch_occ._support.private import own_parameters
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Composition, Key, Regularizer, TabularRegularizer, dims_of
from torch_occ.regularizers.parameters import (
    Parametrized,
    alone,
    call_with,
    spread_batch,
    with_rank,
)
from torch_occ.regularizers.terms import Argument, XLogX, keep, pull_back

#: psi_t at given parameters: from what its functions take to their values.
Evaluate = Callable[[dict[Key, Tensor]], dict[Key, Tensor]]


class Evaluator:
    """psi as a function of its parameters.

    These are the values of the factors of its weights, which broadcast against `(*batch, S, A)`,
    followed by the parameters of functions that users wrote, in shapes of their own.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self.composition = Composition(regularizer)
        self.factors = self.composition.factors[1:]  # without t
        paths = {id(module): path for path, module in regularizer.named_modules()}
        users = {id(module) for part, _ in self.composition.others for module in part.modules()}
        # A module that is used twice is listed once: functional_call would not restore a parameter
        # that it exchanged under two names.
        self.owners = [
            (module, name)
            for _, module in regularizer.named_modules()
            for name in own_parameters(module)
            if id(module) in users
        ]
        named = [*self.factors, *self.owners]
        self.names = tuple(".".join(filter(None, (paths[id(x)], name))) for x, name in named)
        own = [x.event_dims(n) if isinstance(x, Parametrized) else None for x, n in self.owners]
        #: None for parameters of other modules, such as nn.Linear, which have no batch shape.
        self.event_dims: tuple[int | None, ...] = (*(2 for _ in self.factors), *own)
        #: Whether psi_t is an entropy of torch_occ.step.entropic, for all parameters and t: w > 0
        #: and kappa >= 0. Only if kappa = 0 (`closed`), w may depend on the layer or the state.
        self.in_logs = self._is_entropy(closed=bool(regularizer.places()))
        self.closed = self._is_entropy(closed=True)

    def _is_entropy(self, closed: bool) -> bool:
        if any(place.kind == "pair" for place in self.regularizer.places().values()):
            return False
        largest = 0.0
        for leaf in self.regularizer.leaves():
            if not isinstance(leaf, TabularRegularizer):
                return False
            weights = {"pair": 0.0, "state": 0.0}
            for term in leaf.table():
                known = isinstance(term.weight, float | int) and term.parameter is None
                if not (known and isinstance(term.function, XLogX) and term.argument in weights):
                    return False
                weights[term.argument] += float(term.weight)
            price, largest = sum(weights.values()), max(largest, weights["pair"])
            if weights["pair"] < 0 or price < 0 or (closed and price > 0):
                return False
        return largest > 0

    def parameters(self, t: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters now; a RuntimeError if a user has replaced one, or a part."""
        try:
            with alone():
                own = [own_parameters(module)[name] for module, name in self.owners]
        except KeyError as error:
            raise RuntimeError(
                f"regularizer: the parameter {error} was replaced after the step was made, by a "
                "parametrization for example; call step.use(step.backend), or make a new FTRLStep"
            ) from None
        return (*self.composition.values(t)[1:], *own)  # type: ignore[arg-type]

    def align(self, rank: int, t: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return t and the parameters, as far as they have a batch, with this many dimensions."""
        found = [with_rank(t, rank, 0)]
        for i, (x, dims) in enumerate(zip(parameters, self.event_dims, strict=True)):
            least = 0 if i < len(self.factors) else dims
            stays = dims is None or x.dim() <= (least or 0)
            found.append(x if stays else with_rank(x, rank, dims or 0))
        return found

    def validate(self, parameters: Sequence[Tensor]) -> None:
        """Check that all parameters are in their domains; the ValueError names the first one."""
        for (owner, key), value in zip(self.factors, parameters, strict=False):
            if owner is not None and key:
                owner.check_value(key, value)
        for part, _ in self.composition.others:
            self._with(parameters, part.validate)

    def batch_shapes(self, parameters: Sequence[Tensor]) -> dict[str, torch.Size]:
        """Return the batch shape of each parameter by name."""
        return {
            name: x.shape[: 0 if dims is None else max(x.dim() - dims, 0)]
            for name, x, dims in zip(self.names, parameters, self.event_dims, strict=True)
        }

    def _with(self, parameters: Sequence[Tensor], function: Callable[[], Any]) -> Any:
        """Call a function that sees the last of these tensors as the users' parameters."""
        count = len(self.factors)
        given = dict(zip(self.names[count:], parameters[count:], strict=True))
        return call_with(self.regularizer, given, function)

    def bind(self, parameters: Sequence[Tensor], t: Tensor) -> Evaluate:
        """Return the function from inputs to values, at these parameters and this t."""
        values = [spread_batch(t), *parameters[: len(self.factors)]]
        weights, evaluate = self.composition.weigh(values), self.composition.evaluate
        return lambda inputs: self._with(parameters, lambda: evaluate(weights, inputs))


# -- Hessians, in one of three forms from cheap to general -----------------------------------------
#
#     Separable   three vectors d, w, c: the block of a state is
#                     H_s = diag(d + w) + (sum w + c) 1 1' - 1 w' - w 1'
#     Blocks      one A x A matrix per state
#     Full        one matrix over all pairs
#
# `combine` adds two of them in the more general form of the two. Entries of masked pairs are zero.


@dataclass(frozen=True)
class Separable:
    """d, w, c: second derivatives of the scalar terms on q(s, a), q(s) - q(s, a) and q(s)."""

    d: Tensor  # (*batch, S, A)
    w: Tensor  # (*batch, S, A)
    c: Tensor  # (*batch, S)
    actions: Tensor  # (S, A) bool

    @property
    def curvature(self) -> Tensor:
        """D = d + w, `(*batch, S, A)`. If x and y keep q(s), then x' H_s y = sum x D y."""
        return self.d + self.w

    def to_blocks(self) -> Blocks:
        constant = (self.w.sum(-1) + self.c)[..., None, None]
        rank_two = constant - self.w.unsqueeze(-1) - self.w.unsqueeze(-2)
        pairs = self.actions.unsqueeze(-1) & self.actions.unsqueeze(-2)
        return Blocks(self.curvature.diag_embed() + torch.where(pairs, rank_two, 0.0), self.actions)

    def to_full(self) -> Full:
        return self.to_blocks().to_full()


@dataclass(frozen=True)
class Blocks:
    """One matrix per state, `(*batch, S, A, A)`."""

    blocks: Tensor
    actions: Tensor

    @property
    def curvature(self) -> Tensor:
        return self.blocks.diagonal(dim1=-2, dim2=-1)

    def to_blocks(self) -> Blocks:
        return self

    def to_full(self) -> Full:
        # (*batch, S, A, S, A)
        full = torch.diag_embed(self.blocks.movedim(-3, -1), dim1=-4, dim2=-2)
        return Full(full.flatten(-4, -3).flatten(-2), self.actions)


@dataclass(frozen=True)
class Full:
    """One matrix over all pairs, `(*batch, S*A, S*A)`."""

    matrix: Tensor
    actions: Tensor

    def to_full(self) -> Full:
        return self

    @property
    def curvature(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).unflatten(-1, tuple(self.actions.shape))


Hessian = Separable | Blocks | Full


def combine(first: Hessian, second: Hessian) -> Hessian:
    """Return the sum, in the more general form of the two, which are not both separable."""
    if isinstance(first, Full) or isinstance(second, Full):
        return Full(first.to_full().matrix + second.to_full().matrix, first.actions)
    return Blocks(first.to_blocks().blocks + second.to_blocks().blocks, first.actions)


# -- Gradient and Hessian -------------------------------------------------------------------------


class Derivatives(NamedTuple):
    """Gradient and Hessian of psi_t at a point."""

    scalars: dict[Argument, Tensor]  # the arguments of the scalar terms at this point
    gradient: Tensor  # (*batch, S, A)
    hessian: Hessian
    # Second derivatives of the scalar terms, zero where an argument does not exist.
    bends: dict[Argument, Tensor]
    coarser: list[Tensor]  # (*batch, S, A) each, the diagonal of the Hessian of every other level

    def unit(self, q: Tensor) -> Tensor:
        """Return q times its curvature, `(*batch, S, A)`, the unit of dual residuals.

        An error of one unit in the gradient corresponds to a relative error of one in q. In a term
        of q(s) - q(s,a) or 1 - q(s,a), that argument replaces q where it is smaller, because the
        term determines the argument.
        """
        terms = [
            torch.minimum(q, self.scalars[name]) * bend
            for name, bend in self.bends.items()
            if name != "state"
        ]
        return sum([*terms, *(q * diagonal for diagonal in self.coarser)], torch.zeros_like(q))


def derivatives(
    mdp: LayeredMDP, regularizer: Regularizer, evaluate: Evaluate, q: Tensor
) -> Derivatives:
    """Gradient and Hessian at q `(*batch, S, A)`, without a graph; `evaluate` is psi_t.

    It is a ValueError if a parameter has a larger batch than q.
    """
    with torch.enable_grad():
        inputs = {
            key: x.detach().requires_grad_() for key, x in regularizer.read(mdp, q.detach()).items()
        }
        values = evaluate(inputs)
        for key, x in inputs.items():  # otherwise the Hessians of a larger batch would add up
            event, result = dims_of(key)
            if values[key].shape != x.shape[: x.dim() - event + result]:
                name = "per_state" if isinstance(key, int) else key
                raise ValueError(
                    f"regularizer: its {name} terms have shape {tuple(values[key].shape)} at an "
                    f"argument of shape {tuple(x.shape)}; batched parameters need a batch of q"
                )
        levels: list[tuple[Tensor, Hessian]] = []  # from fine to coarse
        bends: dict[Argument, Tensor] = {}
        scalars = {name: inputs[name] for name in regularizer.arguments}
        if scalars:
            slope, separable, bends = _of_scalars(mdp, scalars, values)
            levels.append((slope, separable))
        if 0 in inputs:
            levels.append(_of_states(mdp, inputs, values))
        if "joint" in inputs:
            levels.append(_of_joint(mdp, inputs["joint"], values["joint"]))
    gradient, hessian = levels[0]
    for more, coarser in levels[1:]:
        gradient, hessian = gradient + more, combine(coarser, hessian)
    arguments = {name: x.detach() for name, x in scalars.items()}
    diagonals = [level.curvature for _, level in levels if not isinstance(level, Separable)]
    return Derivatives(arguments, gradient, hessian, bends, diagonals)


def _grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: bool
) -> tuple[Tensor, ...]:
    """Return derivatives of the sum of the outputs, zero where there is no dependence."""
    varying = [y for y in outputs if y.requires_grad]
    if not varying:
        return tuple(map(torch.zeros_like, inputs))
    ones = [*map(torch.ones_like, varying)]
    return torch.autograd.grad(varying, inputs, ones, materialize_grads=True, **options)


def _of_scalars(
    mdp: LayeredMDP, arguments: dict[Argument, Tensor], values: dict[Key, Tensor]
) -> tuple[Tensor, Separable, dict[Argument, Tensor]]:
    """Return gradient, Hessian, and the second derivatives by argument."""
    names, xs = list(arguments), list(arguments.values())
    slopes = _grad([values[name] for name in names], xs, create_graph=True)
    # The terms act entry by entry, so the derivative of the sum of slopes is the diagonal.
    bends = _grad(slopes, xs)
    pairs = zip(names, slopes, strict=True)
    gradient = sum(pull_back(name, mdp, slope.detach()) for name, slope in pairs)
    second = {name: keep(name, mdp, bend, 0.0) for name, bend in zip(names, bends, strict=True)}
    if (alone := mdp.missing["rest"]) is not None and "pair" in second:
        flat = alone & mdp.actions & (second["pair"] == 0)
        second["pair"] = second["pair"].masked_fill(flat, FLAT)
    assert isinstance(gradient, Tensor)
    zero = torch.zeros_like(gradient)
    d, complement = second.get("pair", zero), second.get("complement")
    hessian = Separable(
        d=d if complement is None else d + complement,
        w=second.get("rest", zero),
        c=second.get("state", zero[..., 0]),
        actions=mdp.actions,
    )
    return gradient, hessian, second


def _of_states(
    mdp: LayeredMDP, inputs: dict[Key, Tensor], values: dict[Key, Tensor]
) -> tuple[Tensor, Blocks]:
    gradient = inputs[0].new_zeros(*inputs[0].shape[:-2], *mdp.actions.shape)
    blocks = gradient.new_zeros(*gradient.shape, mdp.num_actions)
    for i, (index, actions) in enumerate(mdp.action_groups):
        (slope,) = _grad([values[i]], [inputs[i]], create_graph=True)
        gradient[..., index[:, None], actions] = slope.detach()
        rows = [_grad([row], [inputs[i]], retain_graph=True)[0] for row in slope.unbind(-1)]
        place = (index[:, None, None], actions[:, :, None], actions[:, None, :])
        blocks[..., *place] = torch.stack(rows, -2)
    return gradient, Blocks(blocks, mdp.actions)


def _of_joint(mdp: LayeredMDP, q: Tensor, value: Tensor) -> tuple[Tensor, Full]:
    (slope,) = _grad([value], [q], create_graph=True)
    entries = slope.flatten(-2).unbind(-1)
    rows = [_grad([entry], [q], retain_graph=True)[0].flatten(-2) for entry in entries]
    exists = mdp.actions.flatten()
    matrix = torch.where(exists & exists.unsqueeze(-1), torch.stack(rows, -2), 0.0)
    return keep("pair", mdp, slope.detach(), 0.0), Full(matrix, mdp.actions)
