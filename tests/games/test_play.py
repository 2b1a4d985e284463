"""Self-play and equilibria: targets on Kuhn and Leduc, save and continue, refusals."""

import pytest
import torch

import torch_occ as occ
from torch_occ.games import FictitiousPlay, GameBoard, GameHistory, QuantalResponse, TreeFTRL

pytest.importorskip("pyspiel")


@pytest.fixture(scope="module")
def kuhn():
    return occ.ExtensiveGame.from_openspiel("kuhn_poker")


def entropic(plex):
    return occ.FTRL(plex.mdp, occ.ConditionalEntropy() / occ.InverseSqrt(1.0))


def test_leduc_after_1000_rounds():
    game = occ.ExtensiveGame.from_openspiel("leduc_poker")
    history = occ.self_play(game, entropic, 1000)
    assert history.final().mean < 3.5e-2
    assert int(history.uncertified[0, -1]) == 0


def test_optimistic_last_iterates_converge_to_the_value_of_kuhn(kuhn):
    psi = occ.ConditionalEntropy() / occ.Constant(1.0)
    history = occ.self_play(kuhn, lambda plex: TreeFTRL(plex, psi, optimistic=True), 2000)
    assert history.final("last_exploitability").mean < 1e-3
    assert float(kuhn.value(history.last_q0, history.last_q1)[0, 0]) == pytest.approx(
        -1 / 18, abs=1e-3
    )


class Twin(occ.FTRL):
    """Has no compiled form, so Python plays it."""


def test_python_plays_the_same_rounds(kuhn):
    def same(plex):
        return Twin(plex.mdp, occ.ConditionalEntropy() / occ.InverseSqrt(1.0))

    one, other = occ.self_play(kuhn, entropic, 50), occ.self_play(kuhn, same, 50)
    assert (one.backend, other.backend) == ("engine", "torch")
    torch.testing.assert_close(one.exploitability, other.exploitability)


@pytest.mark.parametrize("make", [TreeFTRL.ixomd, TreeFTRL.balanced, TreeFTRL.adapting])
def test_bandit_learners_learn(kuhn, make):
    shares = "balanced" if make == TreeFTRL.balanced else "uniform"
    learners = [make(kuhn.treeplex(i, shares), 50_000, 3.0) for i in (0, 1)]
    history = occ.self_play(kuhn, learners, 50_000, range(2), feedback="bandit")
    assert history.final().mean < 0.12
    assert history.exploitability[0, -1] != history.exploitability[1, -1]


def test_a_run_continues_from_a_file(kuhn, tmp_path):
    def play(callbacks=(), **given):
        return occ.self_play(
            kuhn, entropic, 2000, range(2), feedback="bandit", callbacks=callbacks, **given
        )

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t >= 1000:
                raise KeyboardInterrupt

    whole = play()
    from torch_occ.games import play as module

    path = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNKS", 4)
        with pytest.raises(KeyboardInterrupt) as error:
            play([Stop()], save_to=path)
        assert error.value.result.finished is False
        again = play([GameBoard(tmp_path / "board")], save_to=path)
    torch.testing.assert_close(again.average_q0, whole.average_q0, rtol=0, atol=0)
    again.save(tmp_path / "history.npz")
    loaded = GameHistory.load(tmp_path / "history.npz")
    assert torch.equal(loaded.exploitability, whole.exploitability)
    assert list((tmp_path / "board").glob("events*"))


def test_the_average_policy_goes_to_openspiel(kuhn):
    from open_spiel.python.algorithms import exploitability

    history = occ.self_play(kuhn, lambda plex: FictitiousPlay(plex.mdp), 200)
    theirs = exploitability.exploitability(kuhn.openspiel, history.average_policy.to_openspiel())
    assert history.final().mean == pytest.approx(theirs, abs=1e-12)


def test_refusals(kuhn):
    shifted = [occ.ShiftedFTRL(kuhn.treeplex(i).mdp) for i in (0, 1)]
    with pytest.raises(ValueError, match="probability of a visit"):
        occ.self_play(kuhn, shifted, 10, feedback="bandit")
    with pytest.raises(ValueError, match="was made for another MDP"):
        occ.self_play(kuhn, [entropic(kuhn.treeplex(0))] * 2, 10)
    with pytest.raises(ValueError, match="feedback: expected full or bandit"):
        occ.self_play(kuhn, entropic, 10, feedback="some")


REGULARIZERS = {
    "unit": occ.dilated_entropy,
    "w": lambda plex: occ.ConditionalEntropy(),
    "barrier": lambda plex: occ.LogBarrier(),
}


@pytest.mark.parametrize("name", REGULARIZERS)
def test_equilibria_and_their_derivatives(kuhn, name):
    layer = QuantalResponse(kuhn, REGULARIZERS[name])
    found = layer(0.1)
    assert abs(found.gap) < 1e-10
    assert found.policy_residual < 1e-8
    for i, half in enumerate(layer.halves):  # each is the step against the other
        loss = kuhn.loss(i, found.qs[1 - i]).detach() / 0.1
        torch.testing.assert_close(half.step(loss, 1.0), found.qs[i].detach())
    payoffs = kuhn.payoffs.clone().requires_grad_()
    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def solve(tau, payoffs):
        return layer(tau, kuhn.with_payoffs(payoffs)).qs

    assert torch.autograd.gradcheck(solve, (tau, payoffs), rtol=1e-4)


@pytest.mark.parametrize(("name", "tau"), [("unit", 0.1), ("unit", 0.01), ("barrier", 0.1)])
def test_equilibria_of_leduc(name, tau):
    found = QuantalResponse(occ.ExtensiveGame.from_openspiel("leduc_poker"), REGULARIZERS[name])(
        tau
    )
    assert abs(found.gap) < 1e-10
    assert found.policy_residual < 1e-8
