"""The rivals once more, in torch and plain Python, as they are written in the papers.

Each is a learner of its own that `simulate` plays in torch, from the same random numbers.
"""

import math

import numpy as np
import torch
from projecting import project

import torch_occ as occ
from torch_occ._support.constants import GOLDEN, MIX_ONE, MIX_TWO
from torch_occ.game.learners import EmpiricalLearner
from torch_occ.mdp.occupancy import cheapest, policy_of
from torch_occ.rivals.beliefs import split_transitions

F64 = torch.float64


def zeros(mdp, n, *more):
    return torch.zeros(n, *more, mdp.num_states, mdp.num_actions, dtype=F64)


# -- Gamma and Beta variates that are a function of seed, episode and item -------------------------


def mixed(z):
    """The output function of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_ONE)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_TWO)
    return z ^ (z >> np.uint64(31))


def step(number):
    return np.array([number + 1], np.uint64) * np.uint64(GOLDEN)


def keys_of(seeds, t, items):
    """The keys of the items in one episode, `(N, items)`."""
    key = mixed(mixed(np.array(seeds, np.uint64) + np.uint64(GOLDEN)) + step(t))
    return mixed(key[:, None] + np.arange(1, items + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def uniform(key, counter):
    """A uniform number in (0, 1) for every key."""
    return ((mixed(key + step(counter)) >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53


def gammas(key, shape):
    """A Gamma(shape, 1) variate for every key (Marsaglia and Tsang, 2000)."""
    d = np.where(shape >= 1, shape, shape + 1) - 1 / 3
    found, missing, counter = np.full(d.shape, np.nan), np.ones(d.shape, bool), 1
    while missing.any():
        radius = np.sqrt(-2 * np.log(uniform(key, counter)))
        normal = radius * np.cos(2 * np.pi * uniform(key, counter + 1))
        v = (1 + normal / np.sqrt(9 * d)) ** 3
        limit = 0.5 * normal**2 + d - d * v + d * np.log(np.maximum(v, 1e-300))
        accepted = missing & (v > 0) & (np.log(uniform(key, counter + 2)) < limit)
        found, missing = np.where(accepted, d * v, found), missing & ~accepted
        counter += 3
    return np.where(shape >= 1, found, found * uniform(key, 0) ** (1 / np.minimum(shape, 1)))


def betas(seeds, t, a, b):
    """A Beta(a, b) variate for every entry of `(N, ...)`."""
    first, second = (x.flatten(1).numpy() for x in (a, b))
    keys = keys_of(seeds, t, 2 * first.shape[1])
    x, y = gammas(keys[:, 0::2], first), gammas(keys[:, 1::2], second)
    return torch.from_numpy(x / (x + y)).view_as(a)


# -- known transitions -----------------------------------------------------------------------------


def kl_lower(mean, width):
    """The smallest x with kl(mean, x) <= width, by bisection."""
    low, high = torch.zeros_like(mean), mean
    for _ in range(80):
        x = (low + high) / 2
        information = torch.xlogy(mean, mean / x) + torch.xlogy(1 - mean, (1 - mean) / (1 - x))
        low, high = (
            torch.where(information > width, x, low),
            torch.where(information > width, high, x),
        )
    return torch.where(mean > 0, high, 0.0)


class KLUCB(EmpiricalLearner):
    def index(self, t):
        visits = self.state["visits"]
        seen = visits.clamp(min=1)
        return kl_lower(self.state["losses"] / seen, math.log(max(t, 2)) / seen) * (visits > 0)


class Thompson(EmpiricalLearner):
    def index(self, t):
        visits, losses = self.state["visits"], self.state["losses"]
        return betas(self.seeds, t, 1 + losses, 1 + (visits - losses).clamp(min=0))


# -- unknown transitions, planning with averages ---------------------------------------------------


class Counting(occ.rivals.CountingLearner):
    """Sums of losses beside the counts."""

    def start(self, num_seeds):
        super().start(num_seeds)
        self.state["losses"] = zeros(self.mdp, num_seeds)

    def observe(self, t, policy, feedback):
        self.state["losses"] = self.state["losses"] + feedback.scatter(feedback.losses, policy)
        self.record(t, feedback)

    def data(self, n):
        """Visits and losses (S, A), and counts per layer, of one seed."""
        counts = split_transitions(self.mdp, self.state["counts"][n])
        return self.state["visits"][n], self.state["losses"][n], counts


class PSRL(Counting):
    def propose_policy(self, t):
        pairs = self.mdp.actions.numel()
        visits, losses = self.state["visits"], self.state["losses"]
        loss = betas(self.seeds, t, 1 + losses, 1 + (visits - losses).clamp(min=0))
        m = [x + 1 / x.shape[-1] for x in split_transitions(self.mdp, self.state["counts"])]
        prior = torch.cat([x.flatten(1) for x in m], 1).numpy()
        drawn = gammas(keys_of(self.seeds, t, 2 * pairs + prior.shape[1])[:, 2 * pairs :], prior)
        parts = torch.from_numpy(drawn).split([x[0].numel() for x in m], 1)
        shares = [x.view_as(y) for x, y in zip(parts, m, strict=True)]
        believed = self.mdp.with_transitions([x / x.sum(-1, keepdim=True) for x in shares])
        return cheapest(self.mdp, occ.optimal_policy(believed, loss, in_order=True).Q)


def bonus_of(name, mdp, log, left, n, loss, p, low, up, arrivals, changed=0.0):
    """The bonus of one pair, from the formulas of the papers, with plain numbers."""
    L, S, A = mdp.horizon, mdp.num_states, mdp.num_actions
    if name in ("hoeffding", "sharp"):
        b = 7 * L * log / math.sqrt(n) if name == "hoeffding" else left * math.sqrt(log / (2 * n))
        return b + min(1, changed / (2 * n))
    if n < 2:
        return math.inf
    mean = np.dot(p, low)
    variance, gap = np.dot(p, (low - mean) ** 2), math.sqrt(np.dot(p, (up - low) ** 2))
    b = math.sqrt(2 * max(loss * (1 - loss), 0) * log / (n - 1)) + 7 * log / (3 * (n - 1))
    if name == "bernstein":
        b += math.sqrt(8 * log * variance / n) + 14 * L * log / (3 * n)
        if left > 1:
            spread = [
                min(1e4 * L**3 * S**2 * A * log**2 / m, L**2) if m else L**2 for m in arrivals
            ]
            b += math.sqrt(8 / n * np.dot(p, spread))
    elif len(p) > 1:
        b += math.sqrt(2 * log / (n - 1)) * (math.sqrt(variance) + gap)
        b += 7 * (left - 1) * log / (3 * (n - 1))
        if name == "strong":
            b += math.sqrt(2 * len(p) * log / (n - 1)) * gap
            b += 7 * len(p) * (left - 1) * log / (3 * (n - 1))
    return b


def plan(mdp, data, log, least=None, allowed=None):
    """Q_lower, Q_upper, V_lower and the actions, pair by pair.

    data: for each set of data the bonus' name, C, visits and losses (S, A), and counts per layer.
    """
    shape = (mdp.num_states, mdp.num_actions)
    lower, upper, value = np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape[0])
    chosen, low, up = [0] * shape[0], np.zeros(1), np.zeros(1)
    for k in reversed(range(mdp.horizon)):
        here, left, tops = mdp.layer_slices[k], mdp.horizon - k, []
        for s in range(here.start, here.stop):
            for a in np.flatnonzero(mdp.actions[s]):
                lower[s, a], upper[s, a] = 0.0, left
                for name, changed, visits, losses, counts in data:
                    n = float(visits[s, a])
                    if n:
                        p, loss = (
                            np.asarray(counts[k][s - here.start, a]) / n,
                            float(losses[s, a]) / n,
                        )
                        after = visits[mdp.layer_slices[k + 1]].sum(-1) if left > 1 else [0]
                        b = bonus_of(name, mdp, log, left, n, loss, p, low, up, after, changed)
                        lower[s, a] = max(lower[s, a], loss + np.dot(p, low) - b)
                        upper[s, a] = min(upper[s, a], loss + np.dot(p, up) + b)
                if least is not None:
                    lower[s, a] = max(lower[s, a], float(least[s, a]))
            play = lower[s] if allowed is None else np.where(allowed[s], lower[s], np.inf)
            value[s] = play.min()
            slack = 1e-9 * max(1, abs(value[s])) if np.isfinite(value[s]) else 0.0
            chosen[s] = int(np.argmax(play <= value[s] + slack))
            tops.append(upper[s, chosen[s]])
        low, up = value[here], np.array(tops)
    return lower, upper, value, chosen


class Optimist(Counting):
    """`UCBVI`, `EULER` and `StrongEuler`, with the settings of the learner."""

    def __init__(self, name, learner):
        super().__init__(learner.mdp)
        self.name, self.learner = name, learner

    def start(self, num_seeds):
        super().start(num_seeds)
        self.state["lower"] = zeros(self.mdp, num_seeds)

    def propose_policy(self, t):
        own, policy = self.learner, zeros(self.mdp, len(self.seeds))
        log = float(own.log(torch.tensor(float(t), dtype=F64)))
        for n in range(len(policy)):
            data = [(self.name, own.corruption, *self.data(n))]
            least = self.state["lower"][n] if own.monotone else None
            lower, _, _, chosen = plan(self.mdp, data, log, least=least)
            self.state["lower"][n] = torch.from_numpy(np.where(self.mdp.actions, lower, 0.0))
            policy[n, range(self.mdp.num_states), chosen] = 1.0
        return policy


class MultiLayerUCBVI(Counting):
    def __init__(self, learner):
        super().__init__(learner.mdp)
        self.learner, self.copies = learner, [Counting(learner.mdp) for _ in range(learner.layers)]

    def start(self, num_seeds):
        super().start(num_seeds)
        for copy in self.copies:
            copy.start(num_seeds)
        self.possible = self.mdp.actions.repeat(num_seeds, len(self.copies), 1, 1).numpy()

    def drawn(self, t):
        """The copy of episode t for every seed, numbered from 0."""
        shares = 0.5 ** np.arange(1, len(self.copies) + 1)
        found = (uniform(keys_of(self.seeds, t, 1)[:, 0], 0)[:, None] < shares).sum(-1)
        return np.where(found < len(self.copies), found, 0)

    def propose_policy(self, t):
        policy, own = zeros(self.mdp, len(self.seeds)), self.learner
        for n, r in enumerate(self.drawn(t)):
            allowed = self.mdp.actions.numpy()
            for slower in reversed(range(r + 1, len(self.copies))):
                fewer = allowed & self.possible[n, slower]
                allowed = np.where(fewer.any(-1, keepdims=True), fewer, allowed)
            data = [
                ("sharp", changed, *x.data(n))
                for x, changed in ((self.copies[r], own.corruption), (self, 2.0 ** (r + 1)))
            ]
            lower, upper, _, chosen = plan(self.mdp, data, own.logarithm, allowed=allowed)
            best = np.where(allowed, upper, np.inf).min(-1, keepdims=True)
            self.possible[n, r] = allowed & (lower <= best)
            policy[n, range(self.mdp.num_states), chosen] = 1.0
        return policy

    def observe(self, t, policy, feedback):
        super().observe(t, policy, feedback)
        for n, r in enumerate(self.drawn(t)):
            before = {name: x.clone() for name, x in self.copies[r].state.items()}
            self.copies[r].observe(t, policy, feedback)
            for name, x in self.copies[r].state.items():
                others = torch.arange(len(x)) != n
                x[others] = before[name][others]


# -- confidence sets -------------------------------------------------------------------------------


def widths_of(widths, mdp, transitions, visits):
    """B, one tensor per layer."""
    found = []
    for P, m in zip(transitions, mdp.split(visits.unsqueeze(-1), -3), strict=True):
        n = (m - widths.fewer).clamp(min=1)
        B = widths.c1 * (P * widths.iota / n).sqrt() + widths.c2 * widths.iota / n
        found.append(torch.where(m > 0, B.clamp(max=1), 1.0) * (P.shape[-1] > 1))
    return found


def upper_occupancy(mdp, policy, transitions, widths):
    """Comp-UOB for one seed: the largest probability of every state, `(S,)`."""
    found = np.zeros(mdp.num_states)
    tables = [(P.numpy(), B.numpy()) for P, B in zip(transitions, widths, strict=True)]
    for target in range(mdp.num_states):
        k = int(mdp.layer[target])
        f = np.eye(mdp.layer_sizes[k])[target - mdp.layer_slices[k].start]
        for j in reversed(range(k)):
            P, B = tables[j]
            low, high = np.maximum(P - B, 0), np.minimum(P + B, 1)
            left, value = 1 - low.sum(-1), low @ f
            for n in np.argsort(-f):
                more = np.minimum(high[..., n] - low[..., n], np.maximum(left, 0))
                left, value = left - more, value + more * f[n]
            f = (policy[mdp.layer_slices[j]].numpy() * value).sum(-1)
        found[target] = f @ mdp.initial.numpy()
    return torch.from_numpy(found)


class Confident(occ.rivals.CountingLearner):
    """The settings are those of the learner; the first state is its own."""

    def __init__(self, learner):
        super().__init__(learner.mdp, learner.pseudo_count)
        self.learner, self.B = learner, None

    def start(self, num_seeds):
        self.learner.start(num_seeds)
        self.learner.state = self.state = {x: y.clone() for x, y in self.learner.state.items()}
        self.renew()

    def renew(self):
        """The widths of the epoch."""
        if self.learner.widths is not None:
            visits = self.state["epoch_visits"]
            self.B = widths_of(self.learner.widths, self.mdp, self.transitions(), visits)
            self.state["widths"] = torch.cat([x.flatten(1) for x in self.B], 1)

    def upper(self, policy):
        """u(s, a) = pi(a | s) u(s), `(N, S, A)`."""
        parts = [
            upper_occupancy(self.mdp, policy[n], [P[n] for P in self.transitions()], B)
            for n, B in enumerate(zip(*self.B, strict=True))
        ]
        return policy * torch.stack(parts).unsqueeze(-1)


class UOBREPS(Confident):
    def propose_policy(self, t):
        return policy_of(self.mdp, self.state["q"])

    def observe(self, t, policy, feedback):
        state, own = self.state, self.learner
        seen = feedback.gather(self.upper(policy))
        loss = feedback.scatter(feedback.losses / (seen + own.bias), policy)
        self.record(t, feedback)
        self.renew()
        lower = (state["belief"] - state["widths"]).clamp(min=0)
        upper = (state["belief"] + state["widths"]).clamp(max=1)
        for n, q in enumerate(state["q"]):
            tables = (state["rows"][n], lower[n], upper[n])
            project(self.mdp, q, *tables, loss[n], own.learning_rate)


class UnknownFTRL(Confident):
    """The step in torch, and `FTRLStep` over a batch of beliefs."""

    def __init__(self, learner):
        super().__init__(learner)
        self.full_information = learner.full_information
        self.step = occ.FTRLStep(learner.mdp, learner.step.regularizer, backend="torch")

    def bonus_of(self):
        """As printed: L min(1, sum B); or half of (L - 1 - k) min(1, sum B / 2)."""
        L, source = self.mdp.horizon, self.learner.widths
        if not self.learner.bonus:
            return torch.zeros_like(self.state["visits"])
        rows = []
        for k, B in enumerate(self.B):
            whole = L * B.sum(-1).clamp(max=1)
            half = 0.5 * (L - 1 - k) * (0.5 * B.sum(-1)).clamp(max=1)
            rows.append(half if source.remaining else whole)
        return torch.cat(rows, -2) * self.mdp.actions

    def propose_policy(self, t):
        own, state = self.learner, self.state
        counted = t - (state["epoch_start"] if own.restart else torch.ones_like(state["epochs"]))
        loss = state["cumulative_loss"] - counted[:, None, None] * self.bonus_of()
        time = counted + 1
        if own.full_information:  # 1 / eta^2 of the paper
            choices = self.mdp.horizon * math.log(max(self.mdp.num_pairs, 2))
            time = 64 * self.mdp.horizon**4 + state["spread"] / choices
        state["q"] = self.step(loss, time, mdp=own.believed()).detach()
        return policy_of(self.mdp, state["q"])

    def observe(self, t, policy, feedback):
        own, state = self.learner, self.state
        shown = state["q"] if own.widths is None else self.upper(policy)
        estimate = feedback.scatter(feedback.losses / feedback.gather(shown), policy)
        if own.full_information:
            estimate = feedback.table
            charged, believed = estimate - self.bonus_of(), own.believed()
            V, Q = torch.zeros_like(policy[..., 0]), charged.clone()
            for k in reversed(range(self.mdp.horizon)):
                here = self.mdp.layer_slices[k]
                if k + 1 < self.mdp.horizon:
                    after = V[:, None, None, self.mdp.layer_slices[k + 1]]
                    Q[:, here] += (believed.transitions[k] * after).sum(-1)
                V[:, here] = (policy * Q)[:, here].sum(-1)
            sums = [(state["q"] * x**2).sum((-2, -1)) for x in (charged, Q - V.unsqueeze(-1))]
            state["spread"] = state["spread"] + torch.minimum(*sums)
        state["cumulative_loss"] = state["cumulative_loss"] + estimate
        new = self.record(t, feedback)
        self.renew()
        if own.restart:
            state["cumulative_loss"] = state["cumulative_loss"] * ~new[:, None, None]
            if own.full_information:
                state["spread"] = state["spread"] * ~new
