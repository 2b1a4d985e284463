"""Every learner in every world: how far is it from the best learner that has a guarantee there?

The worlds are those that refute a learner sooner or later: losses that are stochastic, constrained,
corrupted, drift, switch, or change once (two phases, levels); an adversary that charges what is
likely; and one that raises the ledger of `ShiftedFTRL`. They are played on MDPs of several shapes,
and on two arms. A world with T in its definition is played for T and for T/10, so that its exponent
is that of regret over T. The MDPs and the tables are held out: no constant was chosen by them.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common

STOCHASTIC, CONSTRAINED, CORRUPTED = "stochastic", "constrained", "corrupted"
GREEDY, SWITCHING, TWO_PHASE = "greedy adversary", "switching", "two phases"
DRIFT, LEVELS, SEESAW = "drift", "levels", "seesaw"
WORLDS = (STOCHASTIC, CONSTRAINED, CORRUPTED, GREEDY, TWO_PHASE, DRIFT, SWITCHING, LEVELS, SEESAW)
Shape = tuple[int, int, int]

SHIFTED, SMOOTH, FROZEN, PLAIN = "shifted", "shifted, smooth", "shifted, frozen", "without hints"
TSALLIS, VARYING, PAPER, THOMPSON = "Tsallis", "varying", "paper", "Thompson sampling"
NAMES = (SHIFTED, SMOOTH, FROZEN, PLAIN, TSALLIS, VARYING, PAPER, THOMPSON)
LEARNERS: dict[str, Callable[[occ.LayeredMDP], occ.Learner]] = {
    SHIFTED: occ.recommended,
    SMOOTH: lambda mdp: occ.ShiftedFTRL(mdp, budget=1.0, ledger="smooth"),
    FROZEN: lambda mdp: occ.ShiftedFTRL(mdp, ledger="frozen"),
    PLAIN: lambda mdp: occ.ShiftedFTRL(mdp, cap=5.0, budget=10.0, hints=False),
    TSALLIS: occ.FTRL.tsallis,
    VARYING: lambda mdp: occ.recommended(mdp, "varying"),
    PAPER: lambda mdp: occ.FTRL(mdp, occ.jin_luo(mdp)),
    THOMPSON: occ.rivals.Thompson,
}
#: Learners with a theorem in every world; Thompson sampling has one in the stochastic world only.
PROVED = (SHIFTED, SMOOTH, FROZEN, PLAIN, TSALLIS, PAPER)


@dataclass(frozen=True)
class Args:
    """Which games are played."""

    episodes: int = 100_000
    """T"""
    seeds: int = 8
    """runs of each game"""
    shapes: tuple[Shape, ...] = ((3, 3, 3), (5, 3, 2), (2, 8, 3), (4, 4, 3), (1, 1, 2))
    """horizon, width and actions"""
    draws: int = 1
    """MDPs and losses of each shape"""
    seed: int = 9501
    """of the first MDP of each shape and its losses"""
    learners: tuple[str, ...] = NAMES
    """who plays"""
    worlds: tuple[str, ...] = WORLDS
    """where"""
    processes: int = 2
    """games played at the same time"""
    root: Path = Path("runs")
    """where the run's directory goes"""


class Seesaw(occ.LossProcess):
    """An adversary that raises the ledger of `ShiftedFTRL`.

    X grows where the shift falls on what is played. So one action of each state is cheap, until the
    learner has played it nearly always for as long as the phase took to get there. Then the next
    action becomes cheap: by now its mean is old and too high.
    """

    stride = 1
    noise = "bernoulli"

    def start(self, mdp: occ.LayeredMDP, seeds: Any) -> dict[str, Tensor]:
        zero = torch.zeros(len(seeds), mdp.num_states, dtype=mdp.dtype)
        return {"cheap": zero, "played": zero.clone(), "age": zero.clone()}

    def means(
        self, mdp: occ.LayeredMDP, state: dict[str, Tensor], t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        cheap, age = state["cheap"], state["age"] + 1
        chosen = q.gather(-1, cheap.long().unsqueeze(-1)).squeeze(-1)
        played = state["played"] + (chosen > 0.8 * q.sum(-1))
        turn = played > torch.clamp(0.4 * age, min=50.0)
        cheap = torch.where(turn, (cheap + 1) % mdp.num_actions, cheap)
        is_cheap = torch.arange(mdp.num_actions) == cheap.unsqueeze(-1)
        kept = {"played": played.where(~turn, 0.0), "age": age.where(~turn, 0.0)}
        return torch.where(is_cheap, 0.3, 0.7).to(mdp.dtype)[None], {"cheap": cheap} | kept


def losses_of(mdp: occ.LayeredMDP, seed: int, world: str, episodes: int) -> occ.LossProcess:
    """The losses of a world that lasts for so many episodes."""
    mean = 0.2 + 0.6 * common.random_means(mdp, seed)
    best = occ.optimal_policy(mdp, mean).policy
    after = torch.where(best > 0, mean, 0.0)  # every action that is not optimal becomes free
    bernoulli, t = occ.BernoulliLosses(mean), torch.arange(1, episodes + 1, dtype=mdp.dtype)
    if world in (TWO_PHASE, DRIFT):
        share = (t > 0.4 * episodes).to(mdp.dtype) if world == TWO_PHASE else t / episodes
        table = mean + share[:, None, None] * (after - mean)
        uniform = torch.rand(table.shape, generator=torch.Generator().manual_seed(seed))
        return occ.TableLosses((uniform < table).to(mdp.dtype))
    if world == SWITCHING:
        other = 0.2 + 0.6 * common.random_means(mdp, seed + 10_000)
        quarter = max(episodes // 4, 1)
        return occ.SwitchingLosses(torch.stack([mean, other]), quarter, noise="bernoulli")
    if world == LEVELS:
        # A rare action is seen mostly after the level has risen, and so its mean is too high.
        gap = min(6 / episodes**0.5, 0.06)
        both = torch.stack([0.2 + gap * (1 - best), 0.8 + 3 * gap * best])
        return occ.SwitchingLosses(both, -(-episodes // 2), noise="bernoulli")
    return {
        STOCHASTIC: bernoulli,
        CONSTRAINED: occ.StochasticallyConstrained(mean),
        CORRUPTED: occ.Corrupted(bernoulli, 4 * episodes**0.5, "targeted", target=mean),
        GREEDY: occ.GreedyAdversary(),
        SEESAW: Seesaw(),
    }[world]


class Watch(occ.Callback):
    """The ledger, and how much less regret is if all seeds are compared with one policy.

    The theorems bound max_u E, and `History.regret` is E max_u. They differ if losses react.
    """

    def __init__(self) -> None:
        self.largest = self.closed = float("nan")  # X / (1 + B), and the share of closed ledgers
        self.less = 0.0

    def on_checkpoint(self, run: Any) -> None:
        total, state = run.sums["total_mean"], run.learner.state
        own, one = (occ.game.comparator(run.mdp, x) for x in (total, total.mean(0)))
        self.less = float(one - own.mean())
        if isinstance(run.learner, occ.ShiftedFTRL):
            found = float((state["ledger"] / (1 + state["stability"].sum(-1))).max())
            self.largest = found if self.largest != self.largest else max(self.largest, found)
            self.closed = float((state["refused"] > 0).double().mean())


def play(args: Args, shape: Shape, seed: int, world: str, name: str) -> dict[str, Any]:
    """One game: regret of all seeds at T/10 and at T, its exponent, and the ledger."""
    torch.set_num_threads(1)
    mdp, ends = occ.LayeredMDP.random(*shape, seed=seed), (args.episodes // 10, args.episodes)
    # T is part of the definition of these worlds.
    apart = world in (CORRUPTED, TWO_PHASE, DRIFT, SWITCHING, LEVELS)
    watch, found = Watch(), dict[int, Tensor]()
    for T in ends[0 if apart else 1 :]:
        history = occ.simulate(
            mdp,
            LEARNERS[name](mdp),
            losses_of(mdp, seed, world, T),
            T,
            range(1, 1 + args.seeds),
            checkpoints=sorted({-(-T * i // 20) for i in range(1, 21)} | ({*ends} & {T, T // 10})),
            callbacks=[watch],
        )
        # The run of T/10 comes first, and its regret stays: the run of T passes T/10 as well.
        found = dict(zip(history.episodes.tolist(), history.regret.T, strict=True)) | found
    early, late = (found[T] for T in ends)
    both = torch.stack([early, late], 1)
    t = torch.tensor(ends, dtype=both.dtype)
    exponent = common.bootstrap(common.power_slope, t, both)
    error = float(late.std() / args.seeds**0.5) if args.seeds > 1 else 0.0
    row = {"shape": "x".join(map(str, shape)), "MDP": seed, "world": world, "learner": name}
    row |= {"early": float(early.mean()), "regret": float(late.mean()), "standard error": error}
    row |= {"X": watch.largest, "closed": watch.closed}
    return row | {"against one": float(late.mean()) - watch.less} | exponent.row("exponent")


def ratios(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Tensor]:
    """Regret over the least of a learner with a guarantee, for every world and learner, `(MDPs,)`.

    It is the difference where that least regret is not positive.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        proved = (*PROVED, THOMPSON) if row["world"] == STOCHASTIC else PROVED
        same = [x for x in rows if all(x[k] == row[k] for k in ("shape", "MDP", "world"))]
        least = min(x["regret"] for x in same if x["learner"] in proved)
        value = row["regret"] / least if row["world"] in RATIO else row["regret"] - least
        found.setdefault((row["world"], row["learner"]), []).append(value)
    return {key: torch.tensor(values) for key, values in found.items()}


#: Worlds in which the least regret is positive; in the others a fixed policy is no good rival.
RATIO = (STOCHASTIC, CONSTRAINED, GREEDY)


def report(args: Args, rows: list[dict[str, Any]]) -> list[str]:
    """Three tables: distance to the best, mean regret and exponents, and the ledger."""
    found, lines = ratios(rows), []

    def mean(world: str, name: str, key: str) -> float:
        kept = [row[key] for row in rows if (row["world"], row["learner"]) == (world, name)]
        return float(torch.tensor(kept).nanmean())

    def distance(world: str, name: str) -> str:
        x = found[world, name]
        if world in RATIO:
            return f"{float(x.log().mean().exp()):.2f} [{float(x.min()):.2f}, {float(x.max()):.2f}]"
        return f"{float(x.mean()):+,.0f}"

    def regret(world: str, name: str) -> str:
        kept = [row for row in rows if (row["world"], row["learner"]) == (world, name)]
        error = sum(row["standard error"] ** 2 for row in kept) ** 0.5 / len(kept)
        return f"{mean(world, name, 'regret'):,.0f} ± {error:,.0f}"

    def steepest(world: str, name: str) -> str:
        kept = [row for row in rows if (row["world"], row["learner"]) == (world, name)]
        fits = [
            common.Fit(*(row[f"exponent{x}"] for x in ("", "_lower", "_upper"))) for row in kept
        ]
        fits = [fit for fit in fits if fit.exists]
        return max(fits).text() if fits else "-"

    def ledger(world: str, name: str) -> str:
        return f"{mean(world, name, 'X'):.1f}, {mean(world, name, 'closed'):.0%}"

    size = f"T = {args.episodes:,}, {args.seeds} seeds, {len(args.shapes) * args.draws} MDPs"
    shifted = [name for name in args.learners if LEARNERS[name] in map(LEARNERS.get, SHIFTS)]
    for title, cell, names in (
        ("regret over the least with a guarantee [range]; a difference has a sign", distance, None),
        ("mean regret ± standard error", regret, None),
        ("steepest exponent of any MDP, [95 %]; - if regret is not positive", steepest, None),
        ("X / (1 + B), mean over MDPs of the largest; share of seeds that closed", ledger, shifted),
    ):
        cells = [[name, *(cell(w, name) for w in args.worlds)] for name in names or args.learners]
        lines += [f"{title} ({size}):", common.table(["learner", *args.worlds], cells), ""]
    return lines


SHIFTS = (SHIFTED, SMOOTH, FROZEN, PLAIN)


def draw_frontier(args: Args, rows: list[dict[str, Any]]) -> Figure:
    """Where losses are stochastic, over where they change: one point per learner."""
    found, figure = ratios(rows), common.new_figure(10, 4.4)
    for axes, world in zip(figure.subplots(1, 2), (GREEDY, TWO_PHASE), strict=True):
        for i, name in enumerate(args.learners):
            x, y = found[STOCHASTIC, name].log().mean().exp(), found[world, name].mean()
            if world == GREEDY:
                y = found[world, name].log().mean().exp()
            look = {"color": common.COLOURS[i % len(common.COLOURS)], "marker": "os^Dv*PX"[i]}
            axes.plot([x], [y], linestyle="none", markersize=8, label=name, **look)
        kind = "ratio" if world == GREEDY else "difference"
        common.tidy(axes, xscale="log", ylabel=f"{world}: {kind}")
        axes.set_xlabel("stochastic: ratio")
        axes.set_xticks([1, 2, 3, 5, 10, 30], ["1", "2", "3", "5", "10", "30"], minor=False)
        axes.set_xticks([], minor=True)
    common.legend_below(figure, axes, 4)
    size = f"T = {args.episodes:,}, means over {len(args.shapes) * args.draws} MDPs"
    figure.suptitle(f"to the least regret of a learner with a guarantee; {size}", fontsize=11)
    return figure


def main(args: Args) -> Path:
    """Play everything, world by world."""
    for kind, given, known in (
        ("learners", args.learners, LEARNERS),
        ("worlds", args.worlds, WORLDS),
    ):
        for name in given:
            if name not in known:
                raise SystemExit(f"{kind}: expected some of {', '.join(known)}, got {name!r}")
    directory = common.begin("all_worlds", args, args.seed)
    print(common.machine(), flush=True)
    rows: list[dict[str, Any]] = []
    places = [(shape, args.seed + i) for shape in args.shapes for i in range(args.draws)]
    games = itertools.product(args.worlds, places, args.learners)
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(play, args, *place, world, name) for world, place, name in games]
        for future in futures:
            rows.append(future.result())
            cells = (f"{x:.4g}" if isinstance(x, float) else str(x) for x in rows[-1].values())
            print(f"  {', '.join(cells)}", flush=True)
            # After every game, so that an interruption costs only the last ones.
            common.write_csv(directory / "all_worlds.csv", rows)
    lines = [common.machine(), "", *report(args, rows)]
    print("\n".join(lines))
    common.write_text(directory / "report.txt", "\n".join(lines))
    if {STOCHASTIC, GREEDY, TWO_PHASE} <= {*args.worlds}:
        common.write_figure(directory / "frontier.png", draw_frontier(args, rows))
    print(f"written to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
