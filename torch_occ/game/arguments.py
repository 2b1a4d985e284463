"""What `simulate` is given, checked before the first episode: each error says what to pass."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_occ.game.learners.base import Learner
from torch_occ.game.losses import LossProcess, check_noise
from torch_occ.mdp.layered import LayeredMDP


def check_players(mdp: LayeredMDP, learner: Any, losses: Any, episodes: int) -> None:
    """Raise an error unless the learner and the losses can play this MDP for so many episodes.

    Raises:
        TypeError: if one of them is something else.
        ValueError: if the learner is for another MDP or another layout, the noise is not a known
            kind, the stride is not a positive integer, there are not enough losses, or the learner
            was made for fewer episodes.
    """
    if not isinstance(learner, Learner):
        raise TypeError(f"learner: expected an occ.Learner, for example occ.FTRL, {_got(learner)}")
    if not isinstance(losses, LossProcess):
        example = "for example occ.BernoulliLosses(mean)"
        raise TypeError(f"losses: expected an occ.LossProcess, {example}, {_got(losses)}")
    name = type(losses).__name__
    if not hasattr(learner, "mdp"):
        raise TypeError(
            f"learner: {type(learner).__name__} has no mdp; call super().__init__(mdp) in __init__"
        )
    _check_learner(mdp, learner)
    if learner.max_episodes is not None and episodes > learner.max_episodes:
        raise ValueError(
            f"episodes: {type(learner).__name__} was made for {learner.max_episodes} episodes, but "
            f"{episodes} were asked for; its confidence level does not hold beyond. Make it with "
            f"episodes={episodes}"
        )
    if type(losses).draw is LossProcess.draw:
        check_noise(losses.noise)
    if not isinstance(losses.stride, int) or losses.stride < 1:
        raise ValueError(
            f"losses: expected {name}.stride to be a positive integer, got {losses.stride!r}"
        )
    if losses.length is not None and losses.length < episodes:
        raise ValueError(
            f"losses: the table has {losses.length} episodes, but {episodes} were asked for"
        )


def _check_learner(mdp: LayeredMDP, learner: Learner) -> None:
    """Raise an error unless the learner is for this MDP, or for its layout if it is blind."""
    name, kind = type(learner).__name__, type(learner)
    if learner.proposes_policy and kind.propose is not Learner.propose:
        raise TypeError(
            f"learner: {name} has both propose and propose_policy; write one of them, propose if "
            "it knows the transitions"
        )
    if not learner.mdp.is_blind:
        if learner.mdp is not mdp:
            raise ValueError(
                "learner: was made for another MDP than the one to simulate; make both with the "
                "same LayeredMDP"
            )
        return
    if not learner.proposes_policy:
        raise TypeError(
            f"learner: {name} does not know the transitions (its mdp is blind), so it cannot "
            "propose q; write propose_policy instead of propose"
        )
    difference = learner.mdp.layout_difference(mdp)
    if difference is None and not torch.equal(learner.mdp.initial, mdp.initial):
        difference = "another initial distribution"
    if difference is not None:
        raise ValueError(
            f"learner: {name} was made for another layout than that of the MDP to simulate: it has "
            f"{difference}; make both with the same LayeredMDP"
        )


def check_state(losses: LossProcess, state: Any) -> dict[str, Tensor]:
    """The first state of a loss process; a TypeError if `start` returned something else."""
    if not isinstance(state, dict):
        raise TypeError(
            f"losses: {type(losses).__name__}.start returned {type(state).__name__}; expected a "
            "dict of tensors, {} if there is nothing to remember"
        )
    return state


def whole(name: str, value: Any) -> int:
    """The value as a positive int; an error names the argument if it is not a whole number."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
    if number < 1:
        raise ValueError(f"{name}: expected at least 1, got {number}")
    return number


def integers(name: str, values: Any) -> tuple[int, ...]:
    """The values as ints; an error names the argument if it is no sequence of integers."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        shown = list(values) if isinstance(values, Iterable) else values
        raise TypeError(
            f"{name}: expected integers, for example range(1, 9), got {shown!r}"
        ) from None


def check_config(config: Any) -> None:
    """Raise a TypeError if JSON cannot hold the configuration."""
    try:
        json.dumps(config)
    except TypeError as error:
        raise TypeError(
            f"config: {error}; it may hold numbers, strings, lists and dictionaries of these"
        ) from None


def _got(thing: Any) -> str:
    if isinstance(thing, type):
        return f"got the class {thing.__name__}; make an object of it"
    return f"got {type(thing).__name__}"
