"""Games as treeplexes: OpenSpiel is the judge; wrong games are refused with the place."""

import pytest
import torch

import torch_occ as occ
from torch_occ.games import Chance, Decision, End, GamePolicy

pyspiel = pytest.importorskip("pyspiel")

GAMES = (
    "kuhn_poker",
    "leduc_poker",
    "liars_dice(numdice=1,dice_sides=3)",
    "tiny_hanabi",
    "sheriff(num_rounds=2)",
)


def random_policies(game):
    found = []
    for i in (0, 1):
        mdp = game.treeplex(i).mdp
        policy = torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64) * mdp.actions
        found.append(policy / policy.sum(-1, keepdim=True))
    return found


@pytest.mark.parametrize("name", GAMES)
def test_openspiel_agrees(name):
    from open_spiel.python.algorithms import best_response, expected_game_score, exploitability

    torch.manual_seed(0)
    game = occ.ExtensiveGame.from_openspiel(name)
    policies = random_policies(game)
    q = [occ.occupancy(game.treeplex(i).mdp, policies[i]) for i in (0, 1)]
    theirs, root = GamePolicy(game, tuple(policies)).to_openspiel(), game.openspiel
    values = expected_game_score.policy_value(root.new_initial_state(), [theirs, theirs])
    assert game.value(*q).tolist() == pytest.approx(values, abs=1e-12)
    for i in (0, 1):
        response = best_response.BestResponsePolicy(root, i, theirs)
        best = game.best_response(i, q[1 - i])
        assert float(best.payoff) == pytest.approx(
            response.value(root.new_initial_state()), abs=1e-12
        )
        loss, plex = game.loss(i, q[1 - i]), game.treeplex(i)
        assert torch.isclose((q[i] * loss).sum(), -game.value(*q)[i], atol=1e-12)
        torch.testing.assert_close(plex.occupancy(plex.sequences(q[i])), q[i])
    conv = exploitability.nash_conv(root, theirs)
    assert float(game.exploitability(*q)) == pytest.approx(conv / 2, abs=1e-12)


def test_derivatives_in_payoffs():
    game = occ.ExtensiveGame.from_openspiel("kuhn_poker")
    q = [occ.occupancy(game.treeplex(i).mdp, p) for i, p in enumerate(random_policies(game))]
    payoffs = (game.payoffs + 0.01 * torch.rand_like(game.payoffs)).requires_grad_()

    def exploit(payoffs):
        return game.with_payoffs(payoffs).exploitability(*q)

    assert torch.autograd.gradcheck(exploit, payoffs)


def matching(second=("heads", "tails"), name="b", payoff=1.0, player=1):
    moves = {action: End(payoff) for action in second}
    same = dict.fromkeys(("heads", "tails"), End(1.0))
    first, other = Decision(1, "b", same), Decision(player, name, moves)
    return Decision(0, "a", {"left": first, "right": other})


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (matching(second=("heads",)), "information set 'b' of player 1 has the actions"),
        (matching(payoff=float("nan")), r"payoff: \(nan, nan\) after \[right, heads\]"),
        (matching(player=2), r"player: 2 moves after \[right\]"),
        (
            matching(second=("left", "right"), name="a", player=0),
            r"'a' of player 0 forgets.*after \[\] and after \[right\] \(imperfect recall\)",
        ),
        (Chance([(0.5, End(1.0))]), r"outcomes: the probabilities of chance after \[\]"),
        (Decision(0, "a", {}), "has no action"),
    ],
)
def test_wrong_games_are_refused_with_the_place(root, message):
    with pytest.raises(ValueError, match=message):
        occ.ExtensiveGame(root)


def test_three_players_and_simultaneous_moves_are_refused():
    with pytest.raises(ValueError, match="3 players"):
        occ.ExtensiveGame.from_openspiel("kuhn_poker(players=3)")
    with pytest.raises(ValueError, match="convert_to_turn_based"):
        occ.ExtensiveGame.from_openspiel("matrix_rps")


def test_a_player_without_a_decision():
    game = occ.ExtensiveGame(Decision(0, "a", {"x": End(1.0), "y": End(3.0)}))
    q = [occ.interior_point(game.treeplex(i).mdp) for i in (0, 1)]
    assert game.value(*q).tolist() == [2.0, -2.0]
    assert float(game.best_response(1, q[0]).payoff) == -2.0
    assert float(game.exploitability(*q)) == 0.5


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e7])
def test_unit_weights_are_soft_value_iteration_in_x(backend, scale):
    """v(I) = -tau log sum_a exp(-(loss + sum of v of the next information sets) / tau)."""
    torch.manual_seed(1)
    plex = occ.ExtensiveGame.from_openspiel("leduc_poker").treeplex(1)
    mdp, w = plex.mdp, plex.weights
    step = occ.FTRLStep(mdp, occ.dilated_entropy(plex) / occ.InverseSqrt(2.0), backend=backend)
    loss = scale * torch.randn(mdp.num_states, mdp.num_actions, dtype=torch.float64)
    solution = step.solve(loss, 9)
    assert bool(solution.converged)
    tau, value = 1.5, torch.zeros(mdp.num_states, dtype=torch.float64)
    logs = torch.zeros_like(loss)
    for k in reversed(range(mdp.horizon)):
        here = mdp.layer_slices[k]
        Q = loss[here] * w[here, None]
        if k + 1 < mdp.horizon:
            ahead = value[mdp.layer_slices[k + 1]] / w[mdp.layer_slices[k + 1]]
            Q = Q + w[here, None] * mdp.layers[k].ahead(ahead)
        scores = torch.where(mdp.actions[here], -Q / tau, -torch.inf)
        value[here] = -tau * scores.logsumexp(-1)
        logs[here] = scores.log_softmax(-1)
    expected = occ.occupancy(mdp, logs.exp())
    real = ~plex.is_end
    torch.testing.assert_close(solution.q[real], expected[real], rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_rates_per_state_have_derivatives(backend):
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=1)
    rates = occ.PerState(mdp, torch.rand(mdp.num_states, dtype=torch.float64) + 0.5)
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(rates)
    step = occ.FTRLStep(mdp, psi, backend=backend)
    loss = torch.randn(2, mdp.num_states, mdp.num_actions, dtype=torch.float64, requires_grad=True)
    gamma = psi.factor.gamma.detach().clone().requires_grad_()

    def solve(loss, gamma):
        return torch.func.functional_call(step, {"regularizer.factor.gamma": gamma}, (loss, 3.0))

    assert torch.autograd.gradcheck(solve, (loss, gamma))
