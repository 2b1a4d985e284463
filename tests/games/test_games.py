"""Games: OpenSpiel is the judge; targets on Kuhn and Leduc; refusals with the place."""

import pytest
import torch

import torch_occ as occ
from torch_occ.games import Chance, Decision, End, GameHistory, GamePolicy, QuantalResponse
from torch_occ.rivals import adaptive_ftrl, balanced_ftrl, ixomd

GAMES = (
    "kuhn_poker",
    "leduc_poker",
    "liars_dice(numdice=1,dice_sides=3)",
    "tiny_hanabi",
    "sheriff(num_rounds=2)",
    "goofspiel(num_cards=3,imp_info=True,points_order=descending)",
)


def policies_of(game, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for plex in game.treeplexes:
        shape = plex.mdp.actions.shape
        policy = torch.rand(shape, dtype=torch.float64, generator=generator) * plex.mdp.actions
        found.append(policy / policy.sum(-1, keepdim=True))
    return tuple(found)


def strategies_of(game, seed=0):
    each = zip(game.treeplexes, policies_of(game, seed), strict=True)
    return [occ.occupancy(plex.mdp, policy) for plex, policy in each]


@pytest.mark.parametrize("name", GAMES)
def test_openspiel_agrees(name):
    pyspiel = pytest.importorskip("pyspiel")
    from open_spiel.python.algorithms import best_response, expected_game_score, exploitability

    game = occ.ExtensiveGame.from_openspiel(pyspiel.load_game_as_turn_based(name))
    q, root = strategies_of(game), game.openspiel
    theirs = GamePolicy(game, policies_of(game)).to_openspiel()
    values = expected_game_score.policy_value(root.new_initial_state(), [theirs, theirs])
    assert game.value(*q).tolist() == pytest.approx(values, abs=1e-12)
    for i, plex in enumerate(game.treeplexes):
        response = best_response.BestResponsePolicy(root, i, theirs)
        value = response.value(root.new_initial_state())
        policy, payoff = game.best_response(i, q[1 - i])
        assert float(payoff) == pytest.approx(value, abs=1e-12)
        best = list(q)
        best[i] = occ.occupancy(plex.mdp, policy)
        assert float(game.value(*best)[i]) == pytest.approx(value, abs=1e-12)
        loss = game.loss(i, q[1 - i])
        assert float((q[i] * loss).sum()) == pytest.approx(-values[i], abs=1e-12)
        x = plex.sequences(q[i])
        torch.testing.assert_close(plex.occupancy(x), q[i])
        reached = x.flatten()[plex.parent.clamp(min=0)].where(plex.parent >= 0, 1.0)
        real = ~plex.is_end
        torch.testing.assert_close(x.sum(-1)[real], reached[real])  # the sequence form
    conv = exploitability.nash_conv(root, theirs)
    assert float(game.exploitability(*q)) == pytest.approx(conv / 2, abs=1e-12)


def coin():
    """Player 0 sees a coin and says what it shows; player 1 believes it or not."""

    def answer(side, said):
        right = 1.0 if said == side else -1.0
        return Decision(1, said, {"believe": End(-right), "doubt": End(right)})

    sides = ("heads", "tails")
    looks = [Decision(0, side, {said: answer(side, said) for said in sides}) for side in sides]
    return occ.ExtensiveGame(Chance([(0.5, looks[0]), (0.5, looks[1])]))


def test_a_plain_description_and_batches():
    game = coin()
    assert repr(game) == "ExtensiveGame(2 and 2 information sets, 8 ends)"
    plex = game.treeplex(0)
    assert plex.names == ("heads", "tails")
    assert plex.actions[0] == ("heads", "tails")
    assert plex.weights.tolist() == [0.5, 0.5]
    one, other = strategies_of(game, 1), strategies_of(game, 2)
    both = [torch.stack(pair) for pair in zip(one, other, strict=True)]
    assert float(game.exploitability(*both)[1]) == pytest.approx(float(game.exploitability(*other)))


def test_derivatives_in_payoffs():
    game = coin()
    q = strategies_of(game)
    payoffs = (game.payoffs + 0.01 * torch.rand_like(game.payoffs)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: game.with_payoffs(x).exploitability(*q), payoffs)


def test_other_things_are_refused():
    pytest.importorskip("pyspiel")
    with pytest.raises(ValueError, match="3 players"):
        occ.ExtensiveGame.from_openspiel("kuhn_poker(players=3)")
    with pytest.raises(ValueError, match="convert_to_turn_based"):
        occ.ExtensiveGame.from_openspiel("matrix_rps")


def test_a_player_without_a_decision():
    game = occ.ExtensiveGame(Decision(0, "a", {"x": End(1.0), "y": End(3.0)}))
    q = [occ.interior_point(plex.mdp) for plex in game.treeplexes]
    assert game.value(*q).tolist() == [2.0, -2.0]
    assert float(game.best_response(1, q[0])[1]) == -2.0
    assert float(game.exploitability(*q)) == 0.5
    assert float((q[1] * game.loss(1, q[0])).sum()) == 2.0


@pytest.fixture(scope="module")
def kuhn():
    pytest.importorskip("pyspiel")
    return occ.ExtensiveGame.from_openspiel("kuhn_poker")


@pytest.fixture(scope="module")
def leduc():
    pytest.importorskip("pyspiel")
    return occ.ExtensiveGame.from_openspiel("leduc_poker")


def entropic(plex, kind=occ.FTRL, **given):
    return kind(plex.mdp, occ.ConditionalEntropy() / occ.InverseSqrt(1.0), **given)


def barrier(plex):
    return occ.FTRL.log_barrier(plex.mdp, 3000.0)


@pytest.mark.parametrize(("make", "most"), [(entropic, 3.5e-2), (barrier, 5e-2)])
def test_leduc_after_1000_rounds(leduc, make, most):
    history = occ.self_play(leduc, make, 1000, checkpoints=[1000])
    assert history.final().mean < most
    assert int(history.uncertified[0, -1]) == 0


def test_optimistic_last_iterates_converge_to_the_value_of_kuhn(kuhn):
    psi = occ.ConditionalEntropy() / occ.Constant(1.0)
    history = occ.self_play(kuhn, lambda plex: occ.FTRL(plex.mdp, psi, optimistic=True), 2000)
    assert history.final("last_exploitability").mean < 1e-3
    value = float(kuhn.value(history.last_q0, history.last_q1)[0, 0])
    assert value == pytest.approx(-1 / 18, abs=1e-3)


def lopsided():
    """Player 1 may not move at all, and player 0 moves once or twice, or never."""
    late = Decision(
        0, "late", {"x": End(0.3), "y": Decision(1, "b", {"u": End(1.0), "v": End(0.0)})}
    )
    early = Decision(0, "early", {"stop": End(0.4), "go": late})
    return occ.ExtensiveGame(Chance([(0.7, early), (0.3, End(-1.0, 2.0))]))


def tsallis(plex, kind=occ.FTRL):
    return kind(plex.mdp, occ.Tsallis() / occ.InverseSqrt(0.85))


def shifted(plex):
    return tsallis(plex, occ.ShiftedFTRL)


def in_torch(learner, **methods):
    """The same learner without a compiled form, so that torch plays it."""
    learner.__class__ = type("Twin", (type(learner),), methods)
    return learner


@pytest.mark.parametrize("make", [entropic, tsallis, shifted])
def test_torch_draws_the_same_ends(make):
    game, given = lopsided(), {"seeds": range(3), "feedback": "bandit"}
    one = occ.self_play(game, make, 300, **given)
    other = occ.self_play(game, lambda plex: in_torch(make(plex)), 300, **given)
    assert (one.backend, other.backend) == ("engine", "torch")
    torch.testing.assert_close(one.average_q0, other.average_q0)
    torch.testing.assert_close(one.last_q1, other.last_q1)
    assert not torch.allclose(one.average_q0[0], one.average_q0[1])


class Keep(occ.Callback):
    """Keeps the states of the learners at checkpoints."""

    def __init__(self):
        self.states = []

    def on_checkpoint(self, run):
        learners = run.learner.learners
        self.states.append([{k: x.clone() for k, x in y.state.items()} for y in learners])


@pytest.mark.parametrize("make", [tsallis, shifted])
def test_bandit_estimates_are_unbiased(make):
    """Against a player of the uniform policy, although it visits pairs more rarely than q says."""
    game, keep = lopsided(), Keep()
    middle = [occ.interior_point(plex.mdp) for plex in game.treeplexes]

    def uniform(plex):
        return in_torch(
            make(plex), propose=lambda *_: occ.interior_point(plex.mdp).expand(16, -1, -1)
        )

    given = {"feedback": "bandit", "callbacks": [keep], "checkpoints": [2_000]}
    occ.self_play(game, uniform, 2_000, range(16), **given)
    most, least = game.payoffs.amax(0), game.payoffs.amin(0)
    minus = (game.payoffs - most) / (most - least)  # the losses, which are in [0, 1]
    for i, state in enumerate(keep.states[0]):
        seen = game.with_payoffs(minus * (game.last_pairs[i] >= 0)[:, None])
        found = state["cumulative_loss"].mean(0) / 2_000
        torch.testing.assert_close(found, seen.loss(i, middle[1 - i]), atol=0.03, rtol=0)


LEARNERS = dict.fromkeys((ixomd, balanced_ftrl, adaptive_ftrl), 0.1)
LEARNERS[lambda plex, *_: occ.ShiftedFTRL(plex.mdp)] = 0.03


@pytest.mark.parametrize("make", LEARNERS)
def test_learners_with_bandit_feedback_learn(kuhn, make):
    history = occ.self_play(
        kuhn, lambda plex: make(plex, 50_000, 3.0), 50_000, range(2), feedback="bandit"
    )
    assert history.final().mean < LEARNERS[make]
    assert history.exploitability[0, -1] != history.exploitability[1, -1]


@pytest.mark.parametrize("adaptive", [False, True])
def test_exploration_by_hand(adaptive):
    """One information set with two actions: the estimates and the rates of three episodes."""
    game, keep = occ.ExtensiveGame(Decision(0, "a", {"x": End(1.0), "y": End(0.0)})), Keep()
    learner = occ.rivals.ExploringFTRL(game.treeplex(0), 0.5, adaptive=adaptive)
    learners = [learner, occ.FixedPolicy(game.treeplex(1).mdp)]
    given = {"feedback": "bandit", "callbacks": [keep], "checkpoints": [1, 2, 3]}
    occ.self_play(game, learners, 3, [5], **given)
    total, visits, q = torch.zeros(2).double(), 0.0, torch.full((2,), 0.5).double()
    for state, _ in keep.states:
        torch.testing.assert_close(state["q"][0, 0], q)
        bias = 0.5 / (1 + visits * adaptive)
        total[1] += 1 / (q[1] + bias) if state["cumulative_loss"][0, 0, 1] > total[1] else 0
        torch.testing.assert_close(state["cumulative_loss"][0, 0], total)
        visits = float(state["visits"][0, 0, 0])
        q = torch.softmax(-total * 0.5 / (1 + visits * adaptive), 0)
    assert (visits > 0) == adaptive
    assert total[1] > 0


def test_balanced_weights(leduc):
    """Their rates sum, over the subtree of an information set, as the number of its actions."""
    plex = leduc.treeplex(0)
    scale = balanced_ftrl(plex, 1).scale  # w / w*
    star, count = plex.weights / scale, plex.mdp.num_actions
    sizes = torch.tensor([float(len(names)) for names in plex.actions])
    for s in reversed(range(plex.mdp.num_states)):
        if plex.parent[s] >= 0:
            sizes[plex.parent[s] // count] += sizes[s]
    for s in (~plex.is_end).nonzero()[:, 0].tolist():
        together = sizes[(plex.parent == plex.parent[s]) & ~plex.is_end].sum()
        before = star[plex.parent[s] // count] if plex.parent[s] >= 0 else 1.0
        assert float(star[s]) == pytest.approx(float(before * sizes[s] / together))


def test_a_run_continues_from_a_file(tmp_path):
    game, path = coin(), tmp_path / "run"

    def play(*callbacks, **given):
        return occ.self_play(
            game, entropic, 20_000, range(2), feedback="bandit", callbacks=callbacks, **given
        )

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t >= 10_000:
                raise KeyboardInterrupt

    whole = play()
    with pytest.raises(KeyboardInterrupt) as error:
        play(Stop(), save_to=path)
    assert isinstance(error.value.result, GameHistory)
    assert error.value.result.finished is False
    with pytest.raises(ValueError, match="belongs to another run"):
        occ.self_play(game, barrier, 20_000, range(2), feedback="bandit", save_to=path)
    again = play(occ.TensorBoard(tmp_path / "board", images_per_decade=0), save_to=path)
    assert torch.equal(again.average_q0, whole.average_q0)
    again.save(tmp_path / "history.npz")
    loaded = GameHistory.load(tmp_path / "history.npz")
    assert torch.equal(loaded.exploitability, whole.exploitability)
    assert list((tmp_path / "board").glob("events*"))
    assert "last exploitability |" in repr(loaded)


@pytest.mark.parametrize("kind", [occ.FollowTheLeader, occ.ShiftedFTRL])
def test_averages_with_full_information_go_to_openspiel(kuhn, kind):
    from open_spiel.python.algorithms import exploitability

    history = occ.self_play(kuhn, lambda plex: kind(plex.mdp), 200)
    theirs = exploitability.exploitability(kuhn.openspiel, history.average_policy.to_openspiel())
    assert history.final().mean == pytest.approx(theirs, abs=1e-12)
    assert history.final().mean < 0.05


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
    for i, step in enumerate(layer.steps):  # each is the step against the other
        loss = kuhn.loss(i, found.qs[1 - i]).detach() / 0.1
        torch.testing.assert_close(step(loss, 1.0), found.qs[i].detach())
    game, payoffs = coin(), (coin().payoffs + torch.rand(8, 2).double()).requires_grad_()
    layer = QuantalResponse(game, REGULARIZERS[name])
    tau = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

    def solve(tau, payoffs):
        return layer(tau, game.with_payoffs(payoffs)).qs

    assert torch.autograd.gradcheck(solve, (tau, payoffs))
    assert torch.autograd.gradgradcheck(lambda tau: solve(tau, payoffs.detach()), tau)


@pytest.mark.parametrize("name", REGULARIZERS)
@pytest.mark.parametrize("tau", [0.1, 0.01])
def test_equilibria_of_leduc(leduc, name, tau):
    found = QuantalResponse(leduc, REGULARIZERS[name])(tau)
    assert abs(found.gap) < 1e-10
    assert found.policy_residual < 1e-8
    if name != "barrier":  # policies are soft best responses, where nobody gets, too
        plex, logs = leduc.treeplex(0), found.log_policies[0]
        last = (plex.mdp.layer == plex.mdp.horizon - 1) & ~plex.is_end
        rate = tau / plex.weights if name == "unit" else tau + 0 * plex.weights
        scores = -leduc.loss(0, found.qs[1])[last] / rate[last, None]
        scores = torch.where(plex.mdp.actions[last], scores, -torch.inf)
        torch.testing.assert_close(logs[last], scores.log_softmax(-1), atol=1e-6, rtol=1e-9)


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_ends_need_no_barrier(backend):
    """A weight of 0 there, where there is one action; the limit of small weights."""
    plex, found = lopsided().treeplex(0), []
    loss = plex.mdp.actions.double().cumsum(-1).requires_grad_()
    for least in (1e-9, 0.0):
        psi = occ.LogBarrier(occ.PerState(plex.mdp, torch.where(plex.is_end, least, 1.0).double()))
        found.append(occ.FTRLStep(plex.mdp, psi, backend=backend))
    torch.testing.assert_close(found[1](loss, 1.0), found[0](loss, 1.0), atol=1e-8, rtol=0)
    assert torch.autograd.gradcheck(lambda x: found[1](x, 1.0), loss)


def test_equilibria_refuse(kuhn):
    with pytest.raises(ArithmeticError, match="policies are known to"):
        QuantalResponse(kuhn, occ.dilated_entropy, tolerance=0.0)(0.1)
