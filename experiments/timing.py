"""What the measurements of the engine share: the games, and contestants that are timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import torch_occ as occ

Shape = tuple[int, int, int]


def game(shape: Shape) -> tuple[occ.LayeredMDP, torch.Tensor]:
    """An MDP and mean losses."""
    mdp = occ.LayeredMDP.random(*shape, seed=0)
    generator = torch.Generator().manual_seed(1)
    return mdp, torch.rand(
        mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator
    )


def in_turns(
    contestants: Mapping[str, Callable[[], Any]],
    repeats: int,
    budget: float = float("inf"),
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Seconds of each contestant's quickest call.

    All contestants are called once before, and that does not count. Then they take turns, so that
    a busy machine disturbs all of them alike. After two turns the budget, in seconds, may end it.
    """
    for function in contestants.values():
        function()
    quickest = dict.fromkeys(contestants, float("inf"))
    begun = time.perf_counter()
    for turn in range(repeats):
        if turn >= 2 and time.perf_counter() - begun > budget:
            break
        for name, function in contestants.items():
            start = clock()
            function()
            quickest[name] = min(quickest[name], clock() - start)
    return quickest


def smallest(
    function: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Seconds of the quickest call, after a first one that does not count."""
    return in_turns({"only": function}, repeats, clock=clock)["only"]
