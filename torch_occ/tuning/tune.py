"""`tune` minimizes forecast regret in several worlds by gradients; what to take without tuning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to

from torch_occ._support.choices import later, progress_bar, summary_writer, wants_bar
from torch_occ._support.files import Kept, State, copied
from torch_occ._support.fingerprints import fingerprints
from torch_occ._support.processes import stoppable
from torch_occ.game.callbacks import Callback, tell
from torch_occ.game.estimators import Estimator, ReducedVariance, centred
from torch_occ.game.learners import FTRL, Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.shifted import ShiftedFTRL
from torch_occ.mdp.checks import check_that, check_type
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import ConditionalEntropy, LogBarrier, Tsallis
from torch_occ.regularizers.parameters import Parametrized, call_with
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.tuning.forecast import SMALL_NOISE, Forecast, forecast

# -- The objective: forecast regret in several worlds, relative to a reference ---------------------
#
# In environment e, x_e is the mean over its MDPs of log((regret + floor) / (reference regret +
# floor)). The objective is a soft maximum over environments,
#
#     value = 1/robustness log mean_e exp(robustness x_e).
#
# It is the mean of the x_e for robustness -> 0 and the largest of them for robustness -> infinity.

#: The weight of the squared excess of noise over `trust`.
DISTRUST = 30.0


class World(NamedTuple):
    """An environment: MDPs with their losses. Worlds with the same name are averaged."""

    name: str
    mdp: LayeredMDP  # one, or a batch of one layout (`stack`)
    losses: Tensor | LossProcess  # means `(*batch, S, A)`, or a process that can be forecast


class Evaluation(NamedTuple):
    """The objective at B settings of the parameters."""

    value: Tensor  # (B,)
    regrets: dict[str, Tensor]  # by environment: the mean over its MDPs, (B,)
    certified: Tensor  # (B,), whether every forecast was certified


class ForecastObjective:
    """Forecast regret after `episodes` episodes, over all worlds.

    Args:
        reference: a regularizer whose regrets are the divisors, for example `jin_luo(mdp)` with
            the paper's constants; by default the divisor is the floor. Its loss estimates are
            importance-weighted, also if `estimator` is given.
        estimator: the loss estimator of all regularizers; importance-weighted by default, or
            `ReducedVariance`. With a baseline, keep a log-barrier's beta above 1/2: below, rare
            visits may make the regret much larger than the mean path predicts.
        robustness: how much the worst environment counts.
        trust: the largest share of noise at which a forecast is trusted. Beyond it, the objective
            rises steeply, because a tuner would otherwise exploit errors of the forecast. 1 trusts
            every forecast.
        floor: added to every regret before the logarithm. A negative regret counts as zero, and
            differences far below the floor have no effect.

    Raises:
        ValueError: if there are no worlds, a number is not positive, or the forecast of the
            reference has no certificate.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        episodes: int,
        *,
        reference: Regularizer | None = None,
        estimator: Estimator | None = None,
        robustness: float = 4.0,
        trust: float = SMALL_NOISE,
        floor: float = 1.0,
    ) -> None:
        check_that(bool(worlds), "worlds", "at least one", "none")
        kinds = {type(world).__name__ for world in worlds} - {World.__name__}
        check_that(not kinds, "worlds", "a list of worlds", ", ".join(sorted(kinds)), TypeError)
        fine, found = robustness > 0 and floor > 0, f"{robustness} and {floor}"
        check_that(fine, "robustness, floor", "positive numbers", found)
        self.worlds, self.episodes, self.robustness = tuple(worlds), episodes, robustness
        self.trust, self.floor = trust, floor
        self.estimator = centred(estimator)
        self.scales = [torch.zeros((), dtype=torch.float64) for _ in worlds]
        if reference is not None:
            with torch.no_grad():
                self.scales = [path.final for path in self._forecasts(reference, None)]
            for world, scale in zip(worlds, self.scales, strict=True):
                if not bool(scale.isfinite().all()):
                    found = f"its forecast regret in {world.name!r} is {scale.tolist()}"
                    raise ValueError(f"reference: {found}; it has no certificate")

    def _forecasts(self, psi: Regularizer, estimator: Estimator | None) -> list[Forecast]:
        return [
            forecast(world.mdp, psi, world.losses, self.episodes, estimator=estimator)
            for world in self.worlds
        ]

    def __call__(self, regularizer: Regularizer) -> Evaluation:
        """Evaluate the objective; parameters `(B, 1)` broadcast with the MDPs of a world."""
        paths = self._forecasts(regularizer, self.estimator)
        regrets: dict[str, list[Tensor]] = {}
        ratios: dict[str, list[Tensor]] = {}
        for world, scale, path in zip(self.worlds, self.scales, paths, strict=True):
            final = _batched(path.final)
            regrets.setdefault(world.name, []).append(final)
            ratios.setdefault(world.name, []).append(self._log(final) - self._log(scale))
        # (environments, B)
        x = torch.stack([torch.cat(parts, -1).mean(-1) for parts in ratios.values()])
        r = self.robustness
        value = (r * x).logsumexp(0) / r - math.log(len(x)) / r
        excess = [(_batched(path.noise_share) - self.trust).clamp(min=0) for path in paths]
        beyond = torch.stack([each.square().amax(-1) for each in excess]).amax(0)
        means = {name: torch.cat(parts, -1).mean(-1) for name, parts in regrets.items()}
        fine = torch.stack([_batched(path.certified).all(-1) for path in paths]).all(0)
        return Evaluation(value + DISTRUST * beyond, means, fine)

    def _log(self, regret: Tensor) -> Tensor:
        return (regret.clamp(min=0) + self.floor).log()


def _batched(x: Tensor) -> Tensor:
    """Give x the shape `(B, M)`, also for one setting or one MDP."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def stack(mdps: Sequence[LayeredMDP]) -> LayeredMDP:
    """Stack MDPs of the same layout into a batch; raise a ValueError if layouts differ."""
    first = mdps[0]
    for i, other in enumerate(mdps):
        if other.layer_sizes != first.layer_sizes or not torch.equal(other.actions, first.actions):
            raise ValueError(f"mdps: number {i} is {other}, which has another layout than {first}")
    transitions = [
        torch.stack(layers) for layers in zip(*(mdp.transitions for mdp in mdps), strict=True)
    ]
    initial = torch.stack([mdp.initial for mdp in mdps])
    return LayeredMDP(transitions, actions=first.actions, initial=initial)


#: What is minimized: a function of a regularizer.
Objective = Callable[[Regularizer], Evaluation]


# -- The space in which parameters are tuned: one unconstrained coordinate per number, in bounds ---
#
# A number is the image of its coordinate under the transform of its parameter's domain: logarithms
# for positive numbers, logits for intervals.

#: The bounds of positive parameters, unless `bounds` gives others.
LOWEST, HIGHEST = 1e-4, 1e4


class ParameterSpace:
    """The parameters of a regularizer that are tuned, with their transforms and bounds."""

    def __init__(
        self,
        regularizer: Regularizer,
        only: Sequence[str] | None,
        bounds: Mapping[str, tuple[float, float]],
    ) -> None:
        # Users say the full name, or its last part.
        names = {name: name.rpartition(".")[2] for name, _ in regularizer.named_parameters()}
        known = {*names, *names.values()}
        for argument, given in (("only", only or ()), ("bounds", bounds)):
            for name in (each for each in given if each not in known):
                raise ValueError(
                    f"{argument}: the regularizer has no parameter {name!r}; it has "
                    f"{', '.join(names)}"
                )
        found, self.transforms, self.shapes = [], dict[str, Any](), list[torch.Size]()
        for name, last in names.items():
            if only is not None and {name, last}.isdisjoint(only):
                continue
            module = regularizer.get_submodule(name.rpartition(".")[0])
            parameter = regularizer.get_parameter(name)
            if not isinstance(module, Parametrized):
                raise ValueError(
                    f"regularizer: {name} belongs to a {type(module).__name__}, which cannot tell "
                    "a batch of starts from its own shape; give the parameter to the regularizer "
                    "itself, or leave it out with only="
                )
            if parameter.dim() > module.event_dims(last):
                raise ValueError(
                    f"regularizer: {name} has shape {tuple(parameter.shape)}; tune one "
                    "regularizer, the starts are the batch. For one value per layer, state or "
                    "pair, give occ.PerLayer, occ.PerState or occ.PerPair"
                )
            value = parameter.detach().double()
            domain = module.arg_constraints.get(last, constraints.real)
            self.transforms[name] = transform = transform_to(domain)
            self.shapes.append(value.shape)
            limits = bounds.get(name, bounds.get(last, _default_bounds(domain)))
            ends = transform.inv(torch.tensor(limits, dtype=torch.float64))
            if not (bool(ends.isfinite().all()) and ends[0] < ends[1]):
                raise ValueError(
                    f"bounds: {name} must satisfy {domain} with a lower and a higher end "
                    f"inside, got {limits}"
                )
            for outside in value[(value < limits[0]) | (value > limits[1])].tolist()[:1]:
                raise ValueError(
                    f"regularizer: {name} is {outside:g}, outside its bounds {limits}; "
                    "start inside, or give other bounds"
                )
            own = transform.inv(value).flatten()
            found.append(torch.cat([own[None], ends[:, None].expand(-1, len(own))]))
        if not found:
            raise ValueError("regularizer: there is no parameter to tune")
        self.centre, self.low, self.high = torch.cat(found, -1)  # (numbers,) each

    def tensors(self, u: Tensor) -> dict[str, Tensor]:
        """Every parameter `(..., *event)` by name, from coordinates `(..., numbers)`."""
        parts = u.split([shape.numel() for shape in self.shapes], -1)
        given = zip(self.transforms.items(), parts, self.shapes, strict=True)
        return {
            name: transform(part).reshape((*u.shape[:-1], *shape))
            for (name, transform), part, shape in given
        }

    def at_bounds(self, u: Tensor) -> tuple[str, ...]:
        """The names of the parameters with a number at a bound, for coordinates `(numbers,)`."""
        met = ((u <= self.low) | (u >= self.high)).split([x.numel() for x in self.shapes])
        return tuple(name for name, x in zip(self.transforms, met, strict=True) if bool(x.any()))


def _default_bounds(domain: constraints.Constraint) -> tuple[float, float]:
    if isinstance(domain, constraints.interval):
        margin = 1e-3 * (domain.upper_bound - domain.lower_bound)
        return domain.lower_bound + margin, domain.upper_bound - margin
    return (-HIGHEST, HIGHEST) if domain is constraints.real else (LOWEST, HIGHEST)


class TuningBoard(Callback):
    """Writes `meta/*` for TensorBoard."""

    def __init__(self, directory: str | Path, tuner: Tuner) -> None:
        self.writer: Any = summary_writer(directory, purge_step=len(tuner.values))

    def on_checkpoint(self, tuner: Any) -> None:
        step, best = len(tuner.values) - 1, int(tuner.best_values.argmin())
        values: dict[str, Any] = {
            "objective": tuner.values[-1][best],
            "best": tuner.best_values[best],
            "gradient_norm": tuner.gradient_norm[best],
            "failures": tuner.failures[-1].sum(),
            "at_bounds": len(tuner.space.at_bounds(tuner.best_u[best])),
        }
        values |= {f"objective_of_start/{i}": x for i, x in enumerate(tuner.values[-1])}
        values |= {f"regret/{name}": x[best] for name, x in tuner.best_regrets.items()}
        for name, x in tuner.space.tensors(tuner.last_u[best]).items():
            if x.dim():  # a curve for every number would be too many
                self.writer.add_histogram(f"meta/{name}", x, step)
                ends = {"least": x.min(), "mean": x.mean(), "largest": x.max()}
                values |= {f"{name}/{end}": y for end, y in ends.items()}
            else:
                values[name] = x
        for tag, value in values.items():
            self.writer.add_scalar(f"meta/{tag}", float(value), step)

    def on_end(self, tuner: Any, result: Any) -> None:
        if bool(tuner.best_values.isfinite().any()):
            text = f"```\n{tuner.result()}\n```"
            self.writer.add_text("meta/result", text, len(tuner.values) - 1)
        self.writer.close()


# -- Minimize an objective over a regularizer's parameters, by gradients ---------------------------
#
# All starts are one batch: parameters of shape `(starts, 1, *event)`. If the objective of a start
# is not finite, or its forecast has no certificate, the start returns to its best point so far.
# Such failures are recorded.


@dataclass(frozen=True)
class Tuned:
    """The result of tuning, over `steps + 1` evaluations and all starts."""

    # The best numbers, by their names in the regularizer: `terms.1.beta`. A parameter with one
    # value per layer, state or pair has a list of them.
    parameters: dict[str, Any]
    value: float  # the objective there
    regrets: dict[str, float]  # the regrets there, by environment
    start: int  # the index of the start that found it
    # Parameters of the best point that are at a bound; the optimum may lie beyond it.
    at_bounds: tuple[str, ...]
    failures: Tensor  # (evaluations, starts), where the objective was not finite or not certified
    values: Tensor  # (evaluations, starts), NaN at failures
    path: Tensor  # (evaluations, starts, numbers), in the order of `parameters`
    seconds: float
    finished: bool

    def load_into(self, regularizer: Regularizer) -> None:
        """Set a regularizer's parameters to the best ones."""
        with torch.no_grad():
            for name, value in self.parameters.items():
                regularizer.get_parameter(name).copy_(torch.tensor(value, dtype=torch.float64))

    def __str__(self) -> str:
        lines = [
            f"objective {self.value:.6g} by start {self.start}, {len(self.values)} evaluations, "
            f"{self.seconds:.1f} s"
        ]
        for name, value in self.parameters.items():
            own, note = torch.tensor(value), " (at its bound)" if name in self.at_bounds else ""
            ends = f"{float(own.min()):.6g} to {float(own.max()):.6g}"
            text = f"{own.numel()} numbers from {ends}" if own.dim() else f"{value:.6g}"
            lines.append(f"  {name} = {text}{note}")
        lines += [f"  regret, {name}: {value:.6g}" for name, value in self.regrets.items()]
        if failed := int(self.failures.sum()):
            every = self.failures.numel()
            lines.append(f"  {failed} of {every} evaluations were not finite or not certified")
        return "\n".join(lines)


def tune(
    objective: Objective,
    regularizer: Regularizer,
    *,
    steps: int = 60,
    starts: int = 4,
    only: Sequence[str] | None = None,
    bounds: dict[str, tuple[float, float]] | None = None,
    rate: float = 0.15,
    spread: float = 1.5,
    seed: int = 0,
    directory: str | Path | None = None,
    progress: bool | None = None,
    save_to: str | Path | None = None,
    resume: bool = True,
) -> Tuned:
    """Minimize an objective over the parameters of a regularizer.

    The regularizer is not changed; `Tuned.load_into` sets its parameters.

    Args:
        objective: called with a regularizer whose parameters have shape `(starts, 1)`, and
            `(starts, 1, *event)` with one value per layer, state or pair; for example a
            `ForecastObjective`.
        regularizer: its parameters, which have no batch shape, are the first start.
        steps: of the optimizer, Adam.
        starts: the other starts are drawn around the first one, with standard deviation `spread`
            in the unconstrained space.
        only: names of the parameters to tune, in full (`terms.1.beta`) or their last part
            (`beta`); all by default.
        bounds: by the same names; 1e-4 to 1e4 by default.
        rate: the learning rate of Adam; it decreases to zero along a cosine.
        directory: a directory for TensorBoard's `meta/*`.
        progress: show a progress bar; by default on a terminal.
        save_to: a file in which the tuning is saved after every step, so that it can continue
            after an interruption, with the same numbers. If a save fails, there is a warning.
        resume: continue from `save_to` if it exists; otherwise a tuning saved there is replaced.

    Returns:
        The best point found, and all evaluations.

    Raises:
        KeyboardInterrupt: after Ctrl-C. `error.result` is a `Tuned` of the steps so far (None if
            none was certified), and `error.saved_to` is the file. The same call continues.
        SystemExit: after SIGTERM, in the same way; see `simulate`.
        ValueError: if an argument is wrong, or `save_to` is damaged or belongs to another tuning.
        OSError: if `save_to` cannot be written, before the first step.
        RuntimeError: if no evaluation was finite and certified.
    """
    advice = "; the order is tune(objective, psi)"
    check_type("regularizer", regularizer, Regularizer, "an occ.Regularizer", advice)
    fine, found = steps >= 0 and starts >= 1, f"{steps} and {starts}"
    check_that(fine, "steps, starts", "steps >= 0 and starts >= 1", found)
    space = ParameterSpace(regularizer, only, bounds or {})
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(starts, len(space.centre), dtype=torch.float64, generator=generator)
    noise[0] = 0.0  # the regularizer's own point, and others around it
    u = (space.centre + spread * noise).clamp(space.low, space.high)  # (starts, numbers)
    tuner = Tuner(objective, regularizer, space, u, steps, rate)
    kept = None
    if save_to is not None:
        names, defaults = tuple(space.transforms), tuner.optimizer.defaults
        options = [names, steps, starts, space.low, space.high, rate, spread, seed, defaults]
        own = fingerprints(objective=objective, regularizer=regularizer, options=options)
        kept = Kept(save_to, "tuning", own)
        kept.begin(tuner, resume)
    watching: list[Callback] = [] if directory is None else [TuningBoard(directory, tuner)]
    bar = None
    if wants_bar(progress):
        bar = progress_bar(steps + 1, len(tuner.values), "step", "tuning")

    def stopped() -> tuple[str, Tuned | None]:
        best = tuner.result() if bool(tuner.best_values.isfinite().any()) else None
        return f"after {len(tuner.values)} of {steps + 1} steps", best

    try:
        with stoppable(kept, stopped):
            while len(tuner.values) <= steps:
                tuner.advance()
                tell(watching, "on_checkpoint", tuner)
                if bar is not None:
                    bar.set_postfix_str(f"best {tuner.best_values.min():.4g}")
                    bar.update(1)
                if kept is not None:
                    kept.keep(tuner.state())
    finally:
        tell(watching, "on_end", tuner, None)
        if bar is not None:
            bar.close()
    return tuner.result()


class Tuner:
    """A tuning in progress: Adam moves the points u `(starts, numbers)` of a space."""

    def __init__(
        self,
        objective: Objective,
        regularizer: Regularizer,
        space: ParameterSpace,
        u: Tensor,
        steps: int,
        rate: float,
    ) -> None:
        self.objective, self.regularizer, self.space, self.u = objective, regularizer, space, u
        self.optimizer = torch.optim.Adam([u], rate, betas=(0.8, 0.99))
        self.steps, self.starts, self.rate = steps, len(u), rate
        self.values, self.failures, self.path = list[Tensor](), list[Tensor](), list[Tensor]()
        self.best_values = torch.full((self.starts,), torch.inf, dtype=torch.float64)
        self.best_u = self.last_u = u.clone()
        self.best_regrets: dict[str, Tensor] = {}
        self.gradient_norm = torch.zeros(self.starts, dtype=torch.float64)
        self.seconds = 0.0

    def advance(self) -> None:
        """Evaluate the objective at the current points, and make one step."""
        begun = time.monotonic()
        u = self.u.detach().clone().requires_grad_()
        given = {name: x.unsqueeze(1) for name, x in self.space.tensors(u).items()}
        evaluation = call_with(self.regularizer, given, lambda: self.objective(self.regularizer))
        if not isinstance(evaluation, Evaluation):
            returned = f"returns {type(evaluation).__name__}, not occ.tuning.Evaluation"
            raise TypeError(f"objective: {returned}; try occ.tuning.ForecastObjective(worlds)")
        value = evaluation.value.expand(self.starts).double()
        fine = value.isfinite() & evaluation.certified.expand(self.starts)
        gradient = torch.zeros_like(u)
        if bool(fine.any()):
            # The starts are independent rows of a batch, so a failed one does not affect the
            # others.
            (gradient,) = torch.autograd.grad(torch.where(fine, value, 0.0).sum(), u)
            fine = fine & gradient.isfinite().all(-1)
            gradient = torch.where(fine[:, None], gradient, 0.0)
        self._record(u.detach(), value.detach(), fine, evaluation.regrets)
        self.gradient_norm = gradient.norm(dim=-1)
        if len(self.values) <= self.steps:
            turned = math.cos(math.pi * (len(self.values) - 1) / max(self.steps, 1))
            for group in self.optimizer.param_groups:
                group["lr"] = 0.5 * self.rate * (1 + turned)
            self.u.grad = gradient
            self.optimizer.step()
            with torch.no_grad():
                inside = self.u.clamp(self.space.low, self.space.high)
                self.u.copy_(torch.where(fine[:, None], inside, self.best_u))
        self.seconds += time.monotonic() - begun

    def _record(self, u: Tensor, value: Tensor, fine: Tensor, regrets: dict[str, Tensor]) -> None:
        self.values.append(torch.where(fine, value, torch.nan))
        self.failures.append(~fine)
        self.last_u, tensors = u, self.space.tensors(u)
        self.path.append(torch.cat([x.reshape(len(u), -1) for x in tensors.values()], -1))
        better = fine & (value < self.best_values)
        self.best_values = torch.where(better, value, self.best_values)
        self.best_u = torch.where(better[:, None], u, self.best_u)
        for name, found in regrets.items():
            regret = found.detach().expand(self.starts)
            before = self.best_regrets.get(name, torch.full_like(regret, torch.nan))
            self.best_regrets[name] = torch.where(better, regret, before)

    def result(self) -> Tuned:
        """The best point so far; a RuntimeError if none was finite and certified."""
        best = int(self.best_values.argmin())
        if not bool(self.best_values.isfinite().any()):
            raise RuntimeError(
                f"the objective was not finite and certified at any of {len(self.values)} "
                f"evaluations of {self.starts} starts; start elsewhere, or look at "
                "objective(regularizer)"
            )
        tensors = self.space.tensors(self.best_u[best])
        return Tuned(
            parameters={name: x.tolist() for name, x in tensors.items()},
            value=float(self.best_values[best]),
            regrets={name: float(regret[best]) for name, regret in self.best_regrets.items()},
            start=best,
            at_bounds=self.space.at_bounds(self.best_u[best]),
            failures=torch.stack(self.failures),
            values=torch.stack(self.values),
            path=torch.stack(self.path),
            seconds=self.seconds,
            finished=len(self.values) > self.steps,
        )

    def state(self) -> State:
        """A copy of everything that changes from step to step."""
        names = "u values failures path best_values best_u best_regrets gradient_norm seconds"
        now = {name: getattr(self, name) for name in names.split()}
        return copied(now | {"optimizer": self.optimizer.state_dict()})

    def restore(self, state: State) -> None:
        """Continue from a result of `state`, in this process or another."""
        state = copied(state)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        with torch.no_grad():
            self.u.copy_(state.pop("u"))
        for name, value in state.items():
            setattr(self, name, value)


# -- What to take without tuning: one learner for each kind of world -------------------------------

Kind = Literal["any", "stochastic", "varying", "adversarial"]

#: gamma and beta of "varying", chosen on MDPs 80 to 82 (docs/tuning.md).
VARYING = (1.0, 0.5)

#: gamma and beta of "adversarial", chosen on MDPs 92 to 99, of horizon 3, width 3 and 3 actions.
ADVERSARIAL = (0.2663, 1.0)

#: A rate so small that the baseline is 1/2 wherever q is not tiny.
EVERYWHERE = 0.001


def recommended(mdp: LayeredMDP, world: Kind = "any") -> Learner:
    """Return a learner with constants that were good on MDPs on which they were not chosen.

    - "any": nothing is known about the losses. `ShiftedFTRL`, with its defaults. Its
      guarantee is Theorems A and B of docs/adaptive.md: O(sqrt(L S A T)) regret against any
      adversary, and O(log T + sqrt(C log T)) where losses are stochastic, with corruption C.
    - "stochastic": losses are independent with the same means in every episode. Thompson sampling.
      Its regret may be linear in any other world.
    - "varying": means change from outside, as where losses are constrained or corrupted. FTRL with
      the 1/2-Tsallis entropy, eta_t = 1 / sqrt(t), a log-barrier of weight 0.5, and estimates with
      a baseline of 1/2.
    - "adversarial": losses react to the learner. FTRL with the conditional entropy,
      eta_t = 0.2663 / sqrt(t), a log-barrier of weight 1, and the same estimates. They were chosen
      on MDPs 92 to 99 and do not carry over to larger ones.

    docs/tuning.md has the measurements. The baselines are for losses that are spread over
    [0, 1].

    Raises:
        ValueError: if the world is not one of these.
    """
    known = get_args(Kind)
    check_that(world in known, "world", f"one of {', '.join(map(repr, known))}", repr(world))
    if world == "stochastic":
        return later("rivals.thompson").Thompson(mdp)
    if world == "any":
        return ShiftedFTRL(mdp)
    entropy, (gamma, beta) = (
        (Tsallis(), VARYING) if world == "varying" else (ConditionalEntropy(), ADVERSARIAL)
    )
    estimator = ReducedVariance(InverseSqrt(EVERYWHERE))
    return FTRL(mdp, entropy / InverseSqrt(gamma) + LogBarrier(beta), estimator)
