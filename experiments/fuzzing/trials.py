"""One batch of experiments/fuzz.py: solved by the package, judged, and counted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import torch_occ as occ
from experiments.fuzzing.judge import CAREFUL, EXACT, FAST, FLOOR, Floats, extended
from experiments.fuzzing.newton import judge
from experiments.fuzzing.problems import Backend, Batch, Generator

#: Relative errors of q up to here are never held against a certificate.
HARMLESS = 1e-10
#: How many times the dual residual an error may be.
SLACK = 10.0
#: The size of errors made on purpose, and how many of them in a batch.
PLANTED, PLANTS = 1e-6, 2
#: Answers judged in a batch where long double is no longer than double, with 60 digits then.
SAMPLE = 4
#: Problems of one sort that a batch hands back.
KEPT = 3


class Failure(NamedTuple):
    """A step worth a look."""

    sort: str  # "wrong", "unjudged", or the name of its status
    what: str
    problem: Batch  # of one element


def _none() -> Floats:
    return np.zeros(0)


@dataclass
class Tally:
    """The results of some batches, added up."""

    statuses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(occ.Status), np.int64))
    errors: Floats = field(default_factory=_none)  # of judged answers; NaN where nothing settled
    claims: Floats = field(default_factory=_none)  # their dual residuals
    rechecked: int = 0  # judged with 60 digits
    planted: int = 0  # errors made on purpose
    missed: int = 0  # and not found
    solving: float = 0.0  # seconds of processor time
    judging: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count the other one too; its failures stay with it."""
        self.errors = np.concatenate([self.errors, other.errors])
        self.claims = np.concatenate([self.claims, other.claims])
        for name in ("statuses", "rechecked", "planted", "missed", "solving", "judging"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def steps(self) -> int:
        return int(self.statuses.sum())

    @property
    def certified(self) -> int:
        return int(self.statuses[occ.Status.CONVERGED])

    @property
    def wrong(self) -> int:
        return int(is_wrong(self.errors, self.claims).sum())

    @property
    def unjudged(self) -> int:
        return int(np.isnan(self.errors).sum())

    @property
    def largest(self) -> float:
        """The largest error of a certified answer."""
        return float(np.nanmax(self.errors, initial=0.0))

    def share(self, status: occ.Status) -> float:
        """The share of steps with this status."""
        return float(self.statuses[status] / max(self.steps, 1))


def is_wrong(error: Floats, claim: Floats) -> NDArray[np.bool_]:
    """The rule: an error above 1e-10 and above ten times the dual residual."""
    return error > np.maximum(HARMLESS, SLACK * claim)


def examine(batch: Batch, q: Floats) -> tuple[Floats, int]:
    """The errors of answers `(B,)`, NaN if they do not settle, and how many needed 60 digits."""
    errors, left, rechecked = np.full(len(q), np.nan), np.arange(len(q)), 0
    for arithmetic in (FAST, CAREFUL, EXACT) if extended() else (EXACT,):
        if len(left):
            part = batch.take(left)
            rechecked += len(left) if arithmetic is EXACT else 0
            model, terms = part.model(arithmetic), part.terms(arithmetic)
            errors[left] = judge(model, terms, part.loss, q[left])
            left = left[np.isnan(errors[left])]
    return errors, rechecked


def plant(random: Generator, q: Floats) -> tuple[Floats, Floats]:
    """Wrong answers, and by how much they are wrong `(B,)`."""
    noise = PLANTED * random.uniform(-1, 1, q.shape)
    sizes = np.where(q > FLOOR, abs(np.log1p(noise)), 0.0)
    return q * (1 + noise), sizes.max((1, 2))


def try_batch(random: Generator, batch: Batch, backend: Backend) -> tuple[Tally, occ.Solution]:
    """Solve a batch, and judge what was certified."""
    begin = time.process_time()
    solution = batch.solve(backend)
    found = Tally(solving=time.process_time() - begin)
    status, q = solution.status.numpy(), solution.q.numpy()
    found.statuses = np.bincount(status, minlength=len(occ.Status))
    certified = np.flatnonzero(status == occ.Status.CONVERGED)
    if not extended():
        certified = certified[:: max(1, len(certified) // SAMPLE)]
    begin = time.process_time()
    if len(certified):
        _judge(random, batch, q, certified, found)
        found.claims = solution.dual_residual.numpy()[certified]
    found.judging = time.process_time() - begin
    found.failures = _failures(batch, solution, certified, found)
    return found, solution


def _judge(
    random: Generator,
    batch: Batch,
    q: Floats,
    certified: NDArray[np.intp],
    found: Tally,
) -> None:
    """Errors of certified answers; a few are judged once more, with an error planted in them."""
    plants = certified[:PLANTS]
    falsified, sizes = plant(random, q[plants])
    both = batch.take(np.concatenate([certified, plants]))
    errors, found.rechecked = examine(both, np.concatenate([q[certified], falsified]))
    found.errors, seen = np.split(errors, [len(certified)])
    own = found.errors[: len(plants)]
    judged = ~np.isnan(own)
    hit = abs(seen - sizes) <= 0.01 * sizes + own  # the judge returned to the same solution
    found.planted, found.missed = int(judged.sum()), int((judged & ~hit).sum())


def _failures(
    batch: Batch,
    solution: occ.Solution,
    certified: NDArray[np.intp],
    found: Tally,
) -> list[Failure]:
    """The worst wrong answers, and the first ones of every other sort."""
    failures = []
    status, claims = solution.status.numpy(), solution.dual_residual.numpy()
    wrong = np.flatnonzero(is_wrong(found.errors, found.claims))
    for i in wrong[np.argsort(-found.errors[wrong])][:KEPT]:
        what = f"error {found.errors[i]:.1e}, claimed {found.claims[i]:.1e}"
        failures.append(Failure("wrong", what, batch.take(certified[i : i + 1])))
    for i in np.flatnonzero(np.isnan(found.errors))[:KEPT]:
        failures.append(Failure("unjudged", "not settled", batch.take(certified[i : i + 1])))
    for reason in occ.Status:
        where = np.flatnonzero(status == reason)
        for i in where[: 0 if reason == occ.Status.CONVERGED else KEPT]:
            what = f"after {int(solution.steps[i])} steps, dual residual {claims[i]:.1e}"
            failures.append(Failure(reason.name.lower(), what, batch.take(np.array([i]))))
    return failures
