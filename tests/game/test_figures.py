import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from scipy import stats

import torch_occ as occ
from torch_occ.game.figures import occupancy_figure, pixels, regret_figure
from torch_occ.game.history import band, student


def history(regret, episodes):
    curves, t = torch.as_tensor(regret, dtype=torch.float64), torch.tensor(episodes)
    given = {field.name: torch.zeros_like(curves) for field in fields(occ.History)}
    given |= {"episodes": t, "regret": curves, "realised_regret": curves + 1, "backend": "torch"}
    given |= {"seeds": tuple(range(len(curves))), "finished": True, "config": {}}
    return occ.History(**given)


T = [1, 2, 5, 10, 100, 1000, 10000]
LOGARITHMIC = history([[3 * math.log(t) + 0.1 * seed for t in T] for seed in range(4)], T)


def test_students_quantiles():
    for degrees in (1, 2, 3, 4, 5, 10, 30, 100):
        assert student(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=2e-3)


def test_the_band_covers_the_mean_of_a_normal_sample_95_times_in_100():
    samples = torch.randn(6, 20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    _, lower, upper = band(samples)
    assert float(((lower < 0) & (upper > 0)).double().mean()) == pytest.approx(0.95, abs=0.006)


def test_one_seed_has_no_band():
    mean, lower, upper = band(torch.tensor([[1.0, 2.0]]))
    assert mean.tolist() == lower.tolist() == upper.tolist() == [1.0, 2.0]


def test_the_regret_figure_has_axes_on_which_the_references_are_straight():
    left, right = LOGARITHMIC.plot("a run").axes
    assert left.figure.get_suptitle() == "a run"
    assert [left.get_xscale(), left.get_yscale()] == ["log", "log"]
    assert [right.get_xscale(), right.get_yscale()] == ["log", "linear"]
    assert [text.get_text() for text in right.get_legend().get_texts()] == [
        "pseudo-regret",
        "realised regret",
        r"$\propto \log T$",
        r"$\propto \sqrt{T}$",
    ]
    curve, logarithm, root = left.lines
    assert curve.get_ydata() == pytest.approx(LOGARITHMIC.regret.mean(0).numpy())
    assert logarithm.get_xdata()[[0, -1]] == pytest.approx([100, 10000])
    first = float(LOGARITHMIC.regret.mean(0)[4])
    assert [logarithm.get_ydata()[0], root.get_ydata()[0]] == pytest.approx([first] * 2)
    slopes = np.diff(np.log(root.get_ydata())) / np.diff(np.log(root.get_xdata()))
    assert slopes == pytest.approx(0.5)
    steps = np.diff(logarithm.get_ydata()) / np.diff(np.log(logarithm.get_xdata()))
    assert steps == pytest.approx(steps[0])


def test_several_runs_share_a_figure_with_one_colour_each():
    _, right = regret_figure({"one": LOGARITHMIC, "two": LOGARITHMIC}).axes
    labels = [text.get_text() for text in right.get_legend().get_texts()]
    assert labels[:2] == ["one", "two"]
    assert "realised regret" not in labels
    assert right.lines[0].get_color() != right.lines[1].get_color()


@pytest.mark.parametrize(
    "regret", [[[0.5]], [[-1.0, -2.0]], [[0.0, 0.0, 0.0]], [[-1.0, 2.0], [-3.0, 1.0]]]
)
def test_short_and_negative_curves_are_drawn_without_warnings(regret):
    short = history(regret, range(1, len(regret[0]) + 1))
    assert pixels(regret_figure(short)).ndim == 3


def test_the_heat_map_has_a_panel_a_layer_and_leaves_masked_pairs_out():
    actions = torch.ones(7, 3, dtype=torch.bool)
    actions[2, 1] = False
    base = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=0)
    mdp = occ.LayeredMDP(list(base.transitions), initial=base.initial, actions=actions)
    q = occ.interior_point(mdp)
    best = occ.optimal_policy(mdp, torch.rand_like(q)).policy
    figure = occupancy_figure(mdp, q, optimal=best, title="q")
    *panels, _ = figure.axes
    assert [panel.get_title() for panel in panels] == ["layer 0", "layer 1", "layer 2"]
    shown = np.concatenate([panel.images[0].get_array().filled(-1.0) for panel in panels])
    assert shown == pytest.approx(torch.where(actions, q, -1.0).numpy(), rel=1e-7, abs=1e-7)
    assert [len(panel.collections[0].get_offsets()) for panel in panels] == [1, 3, 3]
    image = pixels(figure)
    assert image.dtype == np.uint8
    assert image.shape[2] == 3


def test_of_a_large_mdp_the_busiest_states_of_some_layers_are_shown():
    mdp = occ.LayeredMDP.random(horizon=10, width=20, num_actions=2, seed=0)
    q = occ.interior_point(mdp)
    figure = occupancy_figure(mdp, q, optimal=occ.optimal_policy(mdp, q).policy)
    *panels, bar = figure.axes
    assert [panel.get_title() for panel in panels[:2]] == ["layer 0", "layer 1: 16 of 20"]
    assert [panel.get_title().split(":")[0] for panel in panels[-2:]] == ["layer 8", "layer 9"]
    states = [int(label.get_text()) for label in panels[-1].get_yticklabels()]
    visits = q[mdp.layer_slices[9]].sum(-1)
    assert set(states) == set(visits.argsort(descending=True)[:16].tolist())
    shown = torch.from_numpy(panels[-1].images[0].get_array().data)
    torch.testing.assert_close(shown, q[mdp.layer_slices[9]][states])
    assert len(panels[-1].collections[0].get_offsets()) == 16
    assert bar.get_ylim()[1] == pytest.approx(float(q.max()))
    assert not panels[0].texts
    assert max(pixels(figure).shape) < 2500
