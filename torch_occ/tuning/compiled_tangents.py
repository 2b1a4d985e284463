"""The compiled version of torch_occ.tuning.tangents, for tables of elementary terms.

Torch computes how weights and exponents depend on the parameters, once per chunk of episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from torch_occ._support.compiling import compile_message
from torch_occ._support.spacing import CHUNK
from torch_occ._support.streams import Purpose, uniforms
from torch_occ._support.threads import for_each
from torch_occ.game.losses import LossProcess, Stationary
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats, Terms, lanes_in, make_work
from torch_occ.kernels.play.episodes import NOISE
from torch_occ.kernels.play.tangents import (
    COST,
    FAILED,
    TANGENTS,
    Carried,
    Opponent,
    Pushes,
    play_with_tangents,
)
from torch_occ.mdp.occupancy import interior_point, optimal_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.compiled.inputs import (
    ONE,
    exponents_of,
    kinds_of,
    model_of,
    terms_of,
    weights_of,
    why_not,
)
from torch_occ.step.ftrl import FTRLStep
from torch_occ.tuning.tangents import Stretch


def why_not_carry(step: FTRLStep, losses: LossProcess) -> str | None:
    """The reason why the engine cannot carry these tangents, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    return why_not(step.mdp, step.regularizer)


def play_compiled(
    step: FTRLStep, losses: Stationary, episodes: int, seeds: Sequence[int]
) -> Iterator[Stretch]:
    """Play as `simulate` does, from the same random numbers; yield one chunk at a time.

    The seeds run in lanes if `suits_lanes`, and the groups of seeds in parallel threads.
    """
    mdp, model, table = step.mdp, model_of(step.mdp), _Table(step.regularizer)
    N, P, num_pairs = len(seeds), len(step.evaluator.names), mdp.num_states * mdp.num_actions
    logs = [parameter.detach().log() for parameter in step.evaluator.own_parameters]
    kinds = kinds_of(terms_of(step.regularizer, torch.ones((), dtype=torch.float64)))
    plan = optimal_policy(mdp, losses.mean, in_order=True)
    mean, gaps, middle = (
        x.detach().flatten().numpy() for x in (losses.mean, plan.gaps, interior_point(mdp))
    )
    opponent = Opponent(
        mean,
        gaps,
        NOISE[losses.noise],
        step.options.tolerance_in(torch.float64),
        step.options.max_steps,
    )
    lanes = lanes_in(model, N)
    width, new = lanes or 1, allocator(lanes)
    groups = [seeds[i : i + width] for i in range(0, N, width)]
    shapes = ((num_pairs,), (num_pairs,), (P, num_pairs), (P, num_pairs), (P,), (1,))
    carried = [Carried(*(new(*shape) for shape in shapes)) for _ in groups]
    for own in carried:
        own.q.T[...] = middle  # the lanes are the last axis

    def play_chunk(chunk: int, n: int) -> Tensor:
        # The whole chunk, so that runs of any length have the same bits.
        t = chunk * CHUNK + torch.arange(1, CHUNK + 1, dtype=torch.float64)
        weights, exponents, pushes = table.differentiate(step.evaluator.names, logs, t)
        terms = Terms(*kinds, new(*exponents.shape))
        terms.exponent.T[...] = exponents
        records = [new(n, 2 + 2 * P) for _ in groups]

        def play_group(i: int) -> None:
            # One seed after the other: for several seeds, `uniforms` would start threads.
            numbers = [
                uniforms([seed], Purpose.EPISODES, [chunk], (mdp.horizon, 3)) for seed in groups[i]
            ]
            work = make_work(model, new)
            if lanes:
                work.stale[3, len(numbers) :] = 0.0  # unused lanes rest
            play_with_tangents(
                model,
                terms,
                weights[:n],
                pushes,
                opponent,
                torch.cat(numbers).numpy(),
                carried[i],
                records[i],
                middle,
                new(weights.shape[1]),
                new(mdp.num_states),
                new(0),
                work,
                width_of(lanes),
            )

        with compile_message:
            for_each(play_group, len(groups))
        found = [record.reshape(n, -1, width).transpose(2, 0, 1) for record in records]
        return torch.from_numpy(np.concatenate(found)[:N])

    for chunk in range(-(-episodes // CHUNK)):
        record = play_chunk(chunk, min(CHUNK, episodes - chunk * CHUNK))
        slope, score = record[..., TANGENTS:].split(P, -1)
        yield Stretch(record[..., COST], slope, score, record[..., FAILED] == 0)


class _Table(nn.Module):
    """A module from t `(n,)` to weights `(n, K)` and exponents `(K,)`.

    It is a module so that `functional_call` can exchange its parameters.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        super().__init__()
        self.regularizer = regularizer

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        terms = terms_of(self.regularizer, t)
        return weights_of(terms, ONE).expand(len(t), -1), exponents_of(terms, ONE)

    def differentiate(
        self, names: Sequence[str], logs: Sequence[Tensor], t: Tensor
    ) -> tuple[Floats, Floats, Pushes]:
        """Weights, exponents, and their derivatives in the logarithm of each parameter."""

        def table(*logs: Tensor) -> tuple[Tensor, Tensor]:
            named = {
                f"regularizer.{name}": log.exp() for name, log in zip(names, logs, strict=True)
            }
            return torch.func.functional_call(self, named, (t,), tie_weights=False)

        moves = torch.func.jacfwd(table, tuple(range(len(logs))))(*logs)
        pushes = (
            torch.stack([x.detach() for x in move], -2).contiguous().numpy() for move in moves
        )
        weights, exponents = (x.detach().contiguous().numpy() for x in self(t))
        return weights, exponents, Pushes(*pushes)
