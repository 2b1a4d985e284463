"""The regret with unknown transitions in parts: identities, definitions by loops, and runs."""

import itertools

import pytest
import torch
from beliefs import random_belief, random_policy
from games import same
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ import theory

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
LOSSES = occ.BernoulliLosses(random_loss(MDP, seed=3))
COARSE = ("err1", "estreg", "err2")
FINE = ("errsub", "erropt", "occdiff", "bias")


def psi():
    return occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(1.0)


def case(name, optimistic=False):
    """A belief, two policies, a loss and an estimate of it, which has nothing to do with it."""
    mdp = PROBLEMS[name]().mdp
    _, P, B = random_belief(mdp, "practical", 2, batch=(4,), most=30)
    if optimistic:
        P = tuple(torch.maximum(p - b, 0.05 * p) for p, b in zip(P, B, strict=True))
    believed = mdp.blind().with_transitions(P)
    comparator = occ.optimal_policy(mdp, random_loss(mdp, seed=9)).policy.expand(4, -1, -1)
    loss, estimate = random_loss(mdp, seed=5, batch=(4,)), 2 * random_loss(mdp, 6, batch=(4,)) - 1
    return mdp, believed, random_policy(mdp, 3, (4,)), comparator, loss, estimate


@pytest.mark.parametrize("optimistic", [False, True])
@pytest.mark.parametrize("name", ["masked", "contexts", "layers", "bandit"])
def test_the_parts_add_up(name, optimistic):
    parts = theory.unknown_parts(*case(name, optimistic))
    found = parts._asdict()
    coarse = sum(found[part] for part in COARSE)
    torch.testing.assert_close(coarse, parts.regret, rtol=1e-12, atol=1e-13)
    fine = sum(found[part] for part in FINE)
    torch.testing.assert_close(fine, parts.err1 + parts.err2, rtol=1e-12, atol=1e-13)


def expectation(mdp, transitions, policy, charge):
    """E[charge(path)] over all paths of pairs, by enumeration."""
    total = 0.0
    layers = [range(here.start, here.stop) for here in mdp.layer_slices]
    for states in itertools.product(*layers):
        for actions in itertools.product(range(mdp.num_actions), repeat=mdp.horizon):
            chance = float(mdp.initial[states[0]])
            for k, (s, a) in enumerate(zip(states, actions, strict=True)):
                chance *= float(policy[s, a])
                if k + 1 < mdp.horizon:
                    here, there = mdp.layer_slices[k].start, mdp.layer_slices[k + 1].start
                    chance *= float(transitions[k][s - here, a, states[k + 1] - there])
            if chance:
                total += chance * charge(list(zip(states, actions, strict=True)))
    return total


@pytest.mark.parametrize("name", ["masked", "contexts"])
def test_the_parts_are_their_definitions(name):
    """Every part by enumeration of trajectories, for the first element of the batch."""
    mdp, believed, policy, comparator, loss, estimate = case(name)
    parts = theory.unknown_parts(mdp, believed, policy, comparator, loss, estimate)
    P, P_hat = mdp.transitions, [layer[0] for layer in believed.transitions]
    pi_t, pi, loss, estimate = policy[0], comparator[0], loss[0], estimate[0]

    def cost(table):
        return lambda path: sum(float(table[s, a]) for s, a in path)

    V_t = expectation(mdp, P, pi_t, cost(loss))
    V = expectation(mdp, P, pi, cost(loss))
    V_hat_t = expectation(mdp, P_hat, pi_t, cost(estimate))
    V_hat = expectation(mdp, P_hat, pi, cost(estimate))
    expected = {"regret": V_t - V, "err1": V_t - V_hat_t, "estreg": V_hat_t - V_hat}
    expected["err2"] = V_hat - V

    def values(transitions, table):
        """V and Q of the comparator, state by state from the last."""
        v, Q = [0.0] * mdp.num_states, torch.zeros_like(table)
        for s in reversed(range(mdp.num_states)):
            k = int(mdp.layer[s])
            for a in range(mdp.num_actions):
                Q[s, a] = table[s, a]
                if k + 1 < mdp.horizon:
                    row = transitions[k][s - mdp.layer_slices[k].start, a]
                    there = mdp.layer_slices[k + 1]
                    Q[s, a] += sum(float(p) * x for p, x in zip(row, v[there], strict=True))
            v[s] = float(Q[s, int(pi[s].argmax())])
        return v, Q

    v, _ = values(P, loss)
    v_hat, Q_hat = values(P_hat, estimate)
    error = loss.clone()
    for s in range(mdp.num_states):
        k = int(mdp.layer[s])
        if k + 1 < mdp.horizon:
            rows, there = P[k][s - mdp.layer_slices[k].start], mdp.layer_slices[k + 1]
            error[s] += rows @ torch.tensor(v_hat[there], dtype=torch.float64)
    error -= Q_hat

    def is_best(s, a):
        return bool(pi[s, a] == 1)

    def errsub(path):
        return sum(float(error[s, a]) for s, a in path if not is_best(s, a))

    def erropt(path):
        found, inside = 0.0, True
        for s, a in path:
            found += float(error[s, a]) * (is_best(s, a) and not inside)
            inside &= is_best(s, a)
        return found

    def bias(path):
        for s, a in path:
            if not is_best(s, a):
                return v_hat[s] - v[s]
        return 0.0

    def advantage(path):
        return sum(float(Q_hat[s, a]) - v_hat[s] for s, a in path)

    expected["errsub"] = expectation(mdp, P, pi_t, errsub)
    expected["erropt"] = expectation(mdp, P, pi_t, erropt)
    expected["bias"] = expectation(mdp, P, pi_t, bias)
    expected["occdiff"] = expectation(mdp, P, pi_t, advantage) - expectation(
        mdp, P_hat, pi_t, advantage
    )
    for part, value in expected.items():
        assert float(getattr(parts, part)[0]) == pytest.approx(value, abs=1e-12), part


PRACTICAL = occ.Widths.of("practical", MDP)
LEARNERS = {
    "plug-in": lambda: occ.UnknownFTRL(MDP, psi()),
    "practical": lambda: occ.UnknownFTRL.practical(MDP),
    "printed": lambda: occ.UnknownFTRL.jin_huang_luo(MDP, 300),
    "full": lambda: occ.UnknownFTRL.jin_huang_luo(MDP, 300, full_information=True),
    "optimistic": lambda: occ.UnknownFTRL(MDP, psi(), widths=PRACTICAL, optimistic=True),
    "biased": lambda: occ.UnknownFTRL(MDP, psi(), estimator=occ.ImplicitExploration(0.1)),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_adds_up(name):
    """With every episode a checkpoint, the sums are the regret of the history."""
    certificate, T = theory.UnknownCertificate(), 200
    history = occ.simulate(
        MDP,
        LEARNERS[name](),
        LOSSES,
        T,
        range(3),
        callbacks=[certificate],
        checkpoints=range(1, T + 1),
    )
    curves = certificate.curves
    assert curves["episodes"].tolist() == list(range(1, T + 1))
    torch.testing.assert_close(curves["regret"], history.regret, rtol=1e-9, atol=1e-9)
    coarse = sum(curves[part] for part in COARSE)
    torch.testing.assert_close(coarse, history.regret, rtol=1e-9, atol=1e-9)
    fine = sum(curves[part] for part in FINE)
    torch.testing.assert_close(fine, curves["err1"] + curves["err2"], rtol=1e-9, atol=1e-9)
    if name in ("printed", "full"):
        # Optimism: the confidence set holds P, so the values of the belief are too small.
        assert bool((torch.diff(curves["err2"], dim=-1) <= 1e-12).all())


def test_the_belief_is_the_one_that_was_played():
    """One seed by hand: V^(pi_t) is the loss of q^_t under the belief before the episode."""
    seen = {"belief": [], "shown": []}

    class Watched(occ.UnknownFTRL):
        def observe(self, t, q, feedback):
            seen["belief"].append(self.state["q"].clone())
            seen["shown"].append(self.bounds(q))
            super().observe(t, q, feedback)

    certificate, T = theory.UnknownCertificate(), 30
    learner = Watched(MDP, psi(), widths=PRACTICAL)
    played = []

    class Played(occ.Callback):
        def on_checkpoint(self, run):
            played.append(run.q.clone())

    options = {"checkpoints": range(1, T + 1), "callbacks": [certificate, Played()]}
    occ.simulate(MDP, learner, LOSSES, T, [4], **options)
    estreg = torch.diff(certificate.curves["estreg"][0], prepend=torch.zeros(1).double())
    err1 = torch.diff(certificate.curves["err1"][0], prepend=torch.zeros(1).double())
    for t in range(T):
        q, q_hat, shown = played[t][0], seen["belief"][t][0], seen["shown"][t][0]
        expected = LOSSES.mean * q / shown
        V_hat = float((q_hat * expected).sum())
        assert float(err1[t]) == pytest.approx(float((q * LOSSES.mean).sum()) - V_hat, abs=1e-9)
    assert float(estreg.abs().max()) > 0


def test_fewer_checkpoints_are_interpolated():
    """The sums stay close, and still add up to the interpolated regret."""
    certificate = theory.UnknownCertificate()
    learner = occ.UnknownFTRL.practical(MDP)
    history = occ.simulate(MDP, learner, LOSSES, 2000, range(4), callbacks=[certificate])
    curves = certificate.curves
    coarse = sum(curves[part] for part in COARSE)
    torch.testing.assert_close(coarse, curves["regret"], rtol=1e-9, atol=1e-9)
    found, exact = float(curves["regret"][:, -1].mean()), history.final().mean
    assert found == pytest.approx(exact, rel=0.1)


def test_a_run_continues_with_its_certificate(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_occ.game.players.engine.EnginePlayer.chunks", 1)

    class Stop(occ.Callback):
        def on_checkpoint(self, run):
            if run.t == 600:
                raise KeyboardInterrupt

    options = {"checkpoints": [10, 11, 512, 600, 601, 700], "seeds": [1, 2]}
    learner, path = occ.UnknownFTRL.practical(MDP), tmp_path / "run.pt"
    whole, first, second = (theory.UnknownCertificate() for _ in range(3))
    history = occ.simulate(MDP, learner, LOSSES, 700, callbacks=[whole], **options)
    with pytest.raises(KeyboardInterrupt):
        occ.simulate(MDP, learner, LOSSES, 700, callbacks=[first, Stop()], save_to=path, **options)
    again = occ.simulate(MDP, learner, LOSSES, 700, callbacks=[second], save_to=path, **options)
    same(history, again)
    assert {*whole.curves} == {*second.curves}
    for name, curve in whole.curves.items():
        assert torch.equal(curve, second.curves[name]), name
    without = tmp_path / "without.pt"
    with pytest.raises(KeyboardInterrupt):
        occ.simulate(MDP, learner, LOSSES, 700, callbacks=[Stop()], save_to=without, **options)
    with pytest.raises(ValueError, match="begun without the certificate"):
        occ.simulate(MDP, learner, LOSSES, 700, callbacks=[whole], save_to=without, **options)


def test_the_board_shows_the_parts(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = occ.TensorBoard(tmp_path, images_per_decade=0)
    callbacks = [board, theory.UnknownCertificate(board=board)]
    occ.simulate(MDP, occ.UnknownFTRL.practical(MDP), LOSSES, 100, callbacks=callbacks)
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    expected = {f"theory/{part}" for part in theory.UnknownParts._fields}
    assert expected <= set(events.Tags()["scalars"])


def test_bad_input():
    def play(certificate, learner=None, losses=LOSSES, before=()):
        learner = occ.UnknownFTRL(MDP, psi()) if learner is None else learner
        occ.simulate(MDP, learner, losses, 5, callbacks=[certificate, *before])

    with pytest.raises(ValueError, match="parts are those of UnknownFTRL, not FTRL"):
        play(theory.UnknownCertificate(), occ.FTRL(MDP, psi()))
    with pytest.raises(ValueError, match="comparator: GreedyAdversary has no best policy"):
        play(theory.UnknownCertificate(), losses=occ.GreedyAdversary())
    with pytest.raises(ValueError, match=r"comparator: layer 0, state 0 does not take one action"):
        play(theory.UnknownCertificate(occ.uniform_policy(MDP)))
    with pytest.raises(ValueError, match=r"comparator: expected a policy \(\*batch, 7, 3\)"):
        play(theory.UnknownCertificate(torch.ones(3, 7)))
    biased = occ.UnknownFTRL(MDP, psi(), estimator=occ.ReducedVariance(occ.InverseSqrt()))
    with pytest.raises(ValueError, match="expectation of its estimator must be known"):
        play(theory.UnknownCertificate(), biased)
    board = occ.TensorBoard("nowhere")
    with pytest.raises(ValueError, match="must stand before the certificate"):
        play(theory.UnknownCertificate(board=board))
