"""The FTRL step with many digits: an oracle in mpmath, over Python lists, that shares no code."""

from mpmath import mp, mpf

DIGITS = 60
STEP = mpf(10) ** -20  # of differences, relative: their errors are below 1e-35


class Oracle:
    """F(q, v) = (grad psi + loss - E'v, E q - b) = 0 by Newton's method, with differences of F."""

    def __init__(self, mdp, loss, theta, kind):
        self.pairs = [tuple(pair) for pair in mdp.actions.nonzero().tolist()]
        self.kind, self.states = kind, range(mdp.num_states)
        self.theta = {name: mpf(value) for name, value in theta.items()}
        self.loss = [mpf(float(loss[pair])) for pair in self.pairs]
        self.P = [[mpf(float(p)) for p in mdp.joint_transitions[pair]] for pair in self.pairs]
        self.source = [mpf(float(p)) for p in mdp.initial]
        self.source += [mpf(0)] * (mdp.num_states - len(self.source))
        numbered = list(enumerate(self.pairs))
        self.others = [[j for j, (s, _) in numbered if s == r and j != i] for i, (r, _) in numbered]

    def slopes(self, q, alpha=0, beta=0, gamma=1, t=1):
        """The gradient of psi."""
        weight = mp.sqrt(t) / gamma
        if self.kind == "shannon":
            return [weight * (mp.log(x) + 1) for x in q]
        found = [-weight / (2 * mp.sqrt(x)) for x in q]
        if self.kind == "complement":
            return [
                g + weight * alpha / (2 * mp.sqrt(1 - x)) for g, x in zip(found, q, strict=True)
            ]
        roots = [2 * mp.sqrt(sum(q[j] for j in row)) for row in self.others]
        rest = [sum(weight * alpha / roots[j] for j in row) for row in self.others]
        return [g - r - beta / x for g, r, x in zip(found, rest, q, strict=True)]

    def residual(self, z, theta):
        q, v = z[: len(self.pairs)], z[len(self.pairs) :]
        ahead = [sum(p * x for p, x in zip(row, v, strict=True)) for row in self.P]
        rows = zip(self.slopes(q, **theta), self.loss, self.pairs, ahead, strict=True)
        dual = [g + c - v[s] + x for g, c, (s, _), x in rows]
        flow = [-b for b in self.source]
        for x, (state, _), row in zip(q, self.pairs, self.P, strict=True):
            flow = [f + x * (int(s == state) - row[s]) for s, f in enumerate(flow)]
        return mp.matrix([*dual, *flow])

    def slope_in(self, values, key, residual):
        """The derivative of F in one of the values that it is given."""
        h, (less, more) = STEP * (abs(values[key]) or 1), (values.copy(), values.copy())
        less[key] -= h
        more[key] += h
        return (residual(more) - residual(less)) / (2 * h)

    def jacobian(self, z):
        K = mp.zeros(len(z))
        for i in range(len(z)):
            K[:, i] = self.slope_in(z, i, lambda z: self.residual(z, self.theta))
        return K

    def solve(self, start):
        z = [mpf(float(start[pair])) for pair in self.pairs] + [mpf(0)] * len(self.states)
        for _ in range(10):
            change = mp.lu_solve(self.jacobian(z), -self.residual(z, self.theta))
            z = [x + dx for x, dx in zip(z, change, strict=True)]
            if max(abs(change[i] / z[i]) for i in range(len(self.pairs))) < mpf(10) ** -35:
                self.K = self.jacobian(z)
                return z[: len(self.pairs)], z[len(self.pairs) :]
        raise AssertionError("the oracle did not converge")

    def pull_back(self, q, v, q_bar, v_bar):
        """The gradient of <q_bar, q> + <v_bar, v> in everything: K' m = z_bar, then - m . dF."""
        z, n = [*q, *v], len(q)
        bars = [*(float(q_bar[pair]) for pair in self.pairs), *map(float, v_bar)]
        m = mp.lu_solve(self.K.T, mp.matrix(bars))
        found = {"loss": [-x for x in m[:n]], "initial": m[n:]}
        found["P"] = [[m[n + s] * q[i] - m[i] * v[s] for s in self.states] for i in range(n)]
        for name in self.theta:
            slope = self.slope_in(self.theta, name, lambda theta: self.residual(z, theta))
            found[name] = -mp.fdot(m, slope)
        return found
