"""What the sweeps of the tests run. Workers import it, so it stands by itself."""

import os
import signal
import time
from pathlib import Path
from typing import Any


def trace(config: dict[str, Any], event: str) -> None:
    """Leave a file for every run of a cell: `<cell>.<event>.<process>`."""
    (Path(config["log"]) / f"{config['cell']}.{event}.{os.getpid()}").touch()


def square(config: dict[str, Any], power: float = 2, *_: Any, **__: Any) -> dict[str, Any]:
    return {"square": config["x"] ** power, "third": config["x"] / 3}


def slow(config: dict[str, Any]) -> dict[str, Any]:
    trace(config, "begun")
    time.sleep(config["seconds"])
    trace(config, "done")
    return {"answer": config["cell"] * 7}


def gated(config: dict[str, Any]) -> dict[str, Any]:
    """From cell 2 on, it waits for the file `go`."""
    trace(config, "begun")
    while config["cell"] >= 2 and not (Path(config["log"]) / "go").exists():
        time.sleep(0.02)
    return {"answer": config["cell"]}


def deadly(config: dict[str, Any]) -> dict[str, Any]:
    """Cell 2 kills the process it runs in; cell 3 raises."""
    trace(config, "begun")
    if config["cell"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if config["cell"] == 3:
        raise RuntimeError("cell three never works")
    return {"answer": config["cell"]}


def mended(config: dict[str, Any]) -> dict[str, Any]:
    if not (Path(config["log"]) / "mended").exists():
        raise OSError("broken today")
    return {"answer": 1.0}


def careless(config: dict[str, Any]) -> Any:
    return {"x": {"x": 1}, "list": [1], "set": {"set": {1}}}[config["returns"]]


def counting(config: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Count to 4 with a checkpoint after every step; the process is killed at 2."""
    kept = checkpoint / "count"
    count = int(kept.read_text()) if kept.exists() else 0
    begun = count
    while count < 4:
        count += 1
        kept.write_text(str(count))
        if count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return {"begun": begun, "count": count}


def endless(config: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A game that is far too long, and that saves only when it is stopped."""
    import torch_occ as occ

    class Began(occ.Callback):
        def on_chunk(self, simulation: Any) -> None:
            trace(config, "begun")

    mdp = occ.LayeredMDP.random(1, 1, 2)
    options = {"save_to": checkpoint / "run", "save_every": 1e9, "callbacks": [Began()]}
    occ.simulate(
        mdp, occ.FixedPolicy(mdp), occ.RandomWalkLosses(), 10**9, backend="torch", **options
    )
    return {}


def game(config: dict[str, Any]) -> dict[str, Any]:
    """A real cell: FTRL in a random MDP, on the torch path."""
    import torch

    import torch_occ as occ

    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    mean = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=1.0, gamma=config["gamma"]))
    history = occ.simulate(
        mdp, learner, occ.BernoulliLosses(mean), 30, seeds=[config["seed"]], backend="torch"
    )
    return {"regret": float(history.regret[0, -1])}
