import numpy as np
import pytest
import torch
from games import MDP, same
from zoo import random_loss

import torch_occ as occ


@pytest.fixture
def history():
    losses = occ.Corrupted(occ.BernoulliLosses(random_loss(MDP)), 3.0)
    config = {"name": "α", "numbers": [1, 2.5, None], "nested": {"flag": True}}
    return occ.simulate(
        MDP, occ.FTRL(MDP, occ.jin_luo(MDP)), losses, 12, (4, 2), config=config, backend="torch"
    )


def test_final_is_the_mean_over_seeds(history):
    regret = history.regret[:, -1]
    assert history.final() == (
        pytest.approx(float(regret.mean())),
        pytest.approx(float(regret.std()) / 2**0.5),
        2,
    )
    assert history.final("corruption").mean == pytest.approx(
        float(history.corruption[:, -1].mean())
    )


def test_prints_as_a_short_table(history):
    lines = repr(history).splitlines()
    assert lines[0] == "History: 2 seeds, 12 episodes, played by torch"
    assert [line.split("|")[1].strip() for line in lines[3:]] == ["1", "10", "12"]
    assert str(history.final()) in lines[-1]


def test_round_trip(history, tmp_path):
    history.save(tmp_path / "deep" / "history.npz")
    with np.load(tmp_path / "deep" / "history.npz") as file:  # the seal does not disturb NumPy
        assert "regret" in file.files
    again = occ.History.load(tmp_path / "deep" / "history.npz")
    same(history, again)
    again.regret[1, 2] += 1e-3
    with pytest.raises(AssertionError, match=r"index \(1, 2\)(.|\n)*'regret'"):
        torch.testing.assert_close(again.curves, history.curves)
    assert history.cumulative_occupancy.shape == (2, 4, 2)
    assert float(history.dual_residual.max()) < 1e-10
    assert bool((history.wall_time.diff() >= 0).all())
