"""The two experiments about tuning run in their smallest configuration and leave behind what they promise."""

from test_experiments import PNG, run


def test_meta_gradients(tmp_path):
    small = ["--horizon", "2", "--width", "2", "--actions", "2", "--episodes", "6", "12", "--betas", "3", "--budget", "96"]
    printed = run("meta_gradients", *small, "--root", str(tmp_path))
    (found,) = tmp_path.iterdir()
    assert (found / "gradients.png").read_bytes().startswith(PNG)
    assert "beta = 3, T = 12: 8 seeds, played by engine" in printed
    assert "beta = 3, T = 12, pathwise + score: " in printed
    assert len((found / "gradients.csv").read_text().splitlines()) == 1 + 2 * 4 * 3


def test_meta_tune(tmp_path):
    small = ["--horizon", "2", "--width", "2", "--actions", "2", "--episodes", "60", "--train", "1", "--test", "1", "--seeds", "3"]
    small += [
        "--betas",
        "10",
        "--gammas",
        "1",
        "--steps",
        "2",
        "--starts",
        "1",
        "--rounds",
        "1",
        "--guard-mdps",
        "1",
        "--guard-seeds",
        "1",
        "--particles",
        "4",
        "--search-seeds",
        "2",
    ]
    small += ["--tradeoff-betas", "10", "--tradeoff-gammas", "1", "--parts", "accuracy", "tune", "tradeoff"]
    printed = run("meta_tune", *small, "--budget", "0.2", "--cache", str(tmp_path / "cache"), "--root", str(tmp_path / "runs"))
    (found,) = (tmp_path / "runs").iterdir()
    for name in ("accuracy.png", "landscape.png", "environments.png", "tradeoff.png"):
        assert (found / name).read_bytes().startswith(PNG)
    assert "by the rule: " in printed
    assert "greedy adversary: the paper's constants cost" in printed
