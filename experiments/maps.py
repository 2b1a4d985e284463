"""Learned policies on the maps of Gymnasium's grid worlds: visited squares and actions there.

A layered policy has an arrow for every step and square. The map shows their mean, weighted by
visits: pi(a | s) = sum_k q_k(s, a) / sum_k q_k(s).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import torch_occ as occ
from torch_occ.mdp.unroll import ABSORBING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, WALL, CLIFF, GOAL, START = "#1F2430", "#39404F", "#E9C7C1", "#F2C14E", "#5B8E7D"
LAKE, CLIFFS, TAXI = "FrozenLake", "CliffWalking", "Taxi"

#: (row, column) of every action that moves; the other actions of a taxi are drawn as letters.
MOVES = {
    LAKE: {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)},
    CLIFFS: {0: (-1, 0), 1: (0, 1), 2: (1, 0), 3: (0, -1)},
    TAXI: {0: (1, 0), 1: (-1, 0), 2: (0, 1), 3: (0, -1)},
}


@dataclass(frozen=True)
class Panel:
    """One map: which squares it shows, by the environment's states, and its title."""

    title: str
    squares: dict[int, tuple[int, int]]  # state -> (row, column)


def family(env: Any) -> str:
    """Which of the three grid worlds an environment is."""
    return type(env.unwrapped).__name__.removesuffix("Env")


def visits(
    mdp: occ.LayeredMDP, q: Tensor, num_states: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """sum_k q_k(s, a) by the environment's own states, `(S, A)`."""
    alive = mdp.origin != ABSORBING
    total = torch.zeros(num_states, mdp.num_actions, dtype=q.dtype)
    return total.index_add(0, mdp.origin[alive], q[alive]).numpy()


def panels(env: Any, mdp: occ.LayeredMDP, q: Tensor) -> list[Panel]:
    """One map for the lake and the cliff; two for a taxi.

    The two maps of a taxi show the trip of the most frequent passenger, before and after the
    passenger is aboard.
    """
    base = env.unwrapped
    kind = family(env)
    if kind != TAXI:
        rows, columns = base.desc.shape if kind == LAKE else base.shape
        return [Panel("", {s: divmod(s, columns) for s in range(rows * columns)})]
    first = int(mdp.origin[int(mdp.initial.argmax())])
    _, _, passenger, destination = base.decode(first)
    names = "RGYB"
    stages = (
        (f"to the passenger at {names[passenger]}", passenger),
        (f"from {names[passenger]} to {names[destination]}, passenger aboard", len(base.locs)),
    )
    squares = [(row, column) for row in range(5) for column in range(5)]
    return [
        Panel(title, {base.encode(r, c, place, destination): (r, c) for r, c in squares})
        for title, place in stages
    ]


def draw_policy(
    axes: Axes, env: Any, panel: Panel, seen: np.ndarray[Any, np.dtype[np.float64]]
) -> None:
    """The map, shaded by visits per episode, with arrows for actions.

    The shade follows the square root of the visits. The length of an arrow is the probability of
    its action.
    """
    from matplotlib.patches import FancyArrow, Rectangle

    kind = family(env)
    size = (
        1 + max(row for row, _ in panel.squares.values()),
        1 + max(column for _, column in panel.squares.values()),
    )
    for state, (row, column) in panel.squares.items():
        shade = min(1.0, float(seen[state].sum())) ** 0.5
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5),
                1,
                1,
                facecolor=_blend("#FFFFFF", "#9CC3E6", shade),
                edgecolor="#D5DAE3",
                linewidth=0.8,
            )
        )
    _landmarks(axes, env, kind)
    for state, (row, column) in panel.squares.items():
        total = float(seen[state].sum())
        if total < 1e-3:
            continue
        faint = 0.25 + 0.75 * min(1.0, total) ** 0.5
        for action, probability in enumerate(seen[state] / total):
            move = MOVES[kind].get(action)
            if move is not None and probability > 0.03:
                length = 0.36 * probability
                arrow = FancyArrow(
                    column,
                    row,
                    length * move[1],
                    length * move[0],
                    width=0.035,
                    head_width=0.16,
                    head_length=0.11,
                    color=INK,
                    alpha=faint,
                    linewidth=0,
                    zorder=3,
                )
                axes.add_patch(arrow)
            elif move is None and probability > 0.25:
                word = "pick up" if action == 4 else "drop off"
                axes.text(
                    column,
                    row + 0.33,
                    word,
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=INK,
                    alpha=faint,
                    weight="bold",
                    zorder=4,
                )
    axes.set(
        xlim=(-0.55, size[1] - 0.45),
        ylim=(size[0] - 0.45, -0.55),
        aspect="equal",
        xticks=[],
        yticks=[],
    )
    axes.set_title(panel.title, fontsize=9)
    axes.spines[:].set_visible(False)


def _landmarks(axes: Axes, env: Any, kind: str) -> None:
    from matplotlib.patches import Circle, Rectangle

    base = env.unwrapped

    def square(row: int, column: int, colour: str, text: str = "", ink: str = INK) -> None:
        axes.add_patch(
            Rectangle(
                (column - 0.5, row - 0.5),
                1,
                1,
                facecolor=colour,
                edgecolor="#D5DAE3",
                linewidth=0.8,
                zorder=1.5,
            )
        )
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink, zorder=2)

    if kind == LAKE:
        for (row, column), letter in np.ndenumerate(base.desc):
            if letter == b"H":
                square(row, column, WALL, "hole", "white")
            elif letter == b"G":
                square(row, column, GOAL, "goal")
            elif letter == b"S":
                axes.add_patch(
                    Circle(
                        (column, row),
                        0.44,
                        facecolor="none",
                        edgecolor=START,
                        linewidth=1.6,
                        zorder=2,
                    )
                )
    elif kind == CLIFFS:
        for row, column in np.argwhere(base._cliff):
            square(int(row), int(column), CLIFF, "cliff" if column in (2, 6, 10) else "", "#8C3B2E")
        square(3, 11, GOAL, "goal")
        axes.add_patch(
            Circle((0, 3), 0.44, facecolor="none", edgecolor=START, linewidth=1.6, zorder=2)
        )
    else:
        for (row, column), name, colour in zip(
            base.locs, "RGYB", ("#E76F6F", "#6FBF73", "#E5C454", "#6F8FE7"), strict=True
        ):
            axes.add_patch(
                Rectangle(
                    (column - 0.46, row - 0.46),
                    0.92,
                    0.92,
                    facecolor="none",
                    edgecolor=colour,
                    linewidth=2.2,
                    zorder=2,
                )
            )
            axes.text(
                column - 0.3,
                row - 0.26,
                name,
                fontsize=8,
                color=colour,
                weight="bold",
                ha="center",
                va="center",
                zorder=2,
            )
        for row in range(5):
            for column in range(4):
                if base.desc[1 + row, 2 * column + 2] == b"|":
                    axes.plot(
                        [column + 0.5] * 2,
                        [row - 0.5, row + 0.5],
                        color=INK,
                        linewidth=2.4,
                        solid_capstyle="round",
                        zorder=2.5,
                    )


def _blend(first: str, second: str, share: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(
        (1 - share) * a + share * b for a, b in zip(to_rgb(first), to_rgb(second), strict=True)
    )
