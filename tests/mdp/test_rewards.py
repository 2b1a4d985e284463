import pytest
import torch

import torch_occ as occ

F64 = torch.float64


@pytest.mark.parametrize(
    "rewards", [[-100.0, -1.0], [1.0, 0.0], [3.0, 5.0], [-10.0, -1.0, 20.0], [0.0], [-7.5], []]
)
def test_the_map_covers_the_rewards_and_zero_and_can_be_inverted(rewards):
    table = torch.tensor(rewards, dtype=F64)
    scale = occ.mdp.RewardMap.covering(table)
    seen = torch.cat([table, torch.zeros(1, dtype=F64)])
    losses = scale.loss(seen)
    assert bool(((losses >= 0) & (losses <= 1)).all())
    if len(seen.unique()) > 1:
        assert losses.min() == 0.0
        assert losses.max() == 1.0
    torch.testing.assert_close(scale.reward(losses), seen, rtol=0, atol=1e-13)
    # What is said of a sum of rewards and of a difference of sums.
    assert float(scale.total(losses.sum(), len(seen))) == pytest.approx(
        float(seen.sum()), abs=1e-12
    )
    first, second = losses.sum(), losses[:1].sum() * len(seen)
    assert float(scale.regret(first - second)) == pytest.approx(
        float(seen[:1].sum() * len(seen) - seen.sum()), abs=1e-12
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rewards_are_finite(bad):
    with pytest.raises(ValueError, match=f"rewards: expected finite numbers, found {bad}"):
        occ.mdp.RewardMap.covering(torch.tensor([0.0, bad], dtype=F64))


def test_an_empty_interval_is_refused():
    with pytest.raises(ValueError, match=r"low < high, got 1\.0 and 1\.0"):
        occ.mdp.RewardMap(1.0, 1.0)
