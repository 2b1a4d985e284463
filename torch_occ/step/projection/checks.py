"""Checks of the arguments of a projection; errors name the layer, state, action and successor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.validation import row_tolerance
from torch_occ.step.checks import check_batches, check_like


def check_layout(mdp: LayeredMDP) -> None:
    """Check that rows of transitions can have bounds: the layers must be dense.

    Raises:
        TypeError: if it is not an MDP.
        ValueError: if a layer is sparse.
    """
    if not isinstance(mdp, LayeredMDP):
        raise TypeError(f"mdp: expected an occ.LayeredMDP, got {type(mdp).__name__}")
    if mdp.is_sparse:
        raise ValueError(
            "mdp: its layers are sparse, and the projection needs a number for every successor; "
            "use mdp.to_dense()"
        )


def check_shapes(
    mdp: LayeredMDP,
    q: Tensor,
    loss: Tensor,
    rate: Tensor,
    rows: dict[str, Sequence[Tensor]],
) -> torch.Size:
    """Check shapes, number types and devices; return the largest batch shape.

    Args:
        rows: `transitions`, `lower` and `upper`, each with one tensor per layer.

    Raises:
        TypeError: if an argument is not a tensor, or not a sequence of tensors.
        ValueError: if a shape, a number type or a device does not fit the MDP, or batch shapes do
            not broadcast.
    """
    check_like("q", q, mdp)
    check_like("loss", loss, mdp)
    shapes = {"q": q.shape[:-2], "loss": loss.shape[:-2], "learning_rate": rate.shape}
    for name, tensors in rows.items():
        if isinstance(tensors, Tensor) or len(tensors) != mdp.horizon:
            found = "a tensor" if isinstance(tensors, Tensor) else f"{len(tensors)} tensors"
            raise ValueError(
                f"{name}: expected {mdp.horizon} tensors, one per layer, as mdp.transitions, got "
                f"{found}"
            )
        for k, tensor in enumerate(tensors):
            check_layer(mdp, f"{name}[{k}]", k, tensor)
            shapes[f"{name}[{k}]"] = tensor.shape[:-3]
    check_batches(shapes)
    return max(shapes.values(), key=len)


def check_layer(mdp: LayeredMDP, name: str, k: int, x: Tensor) -> None:
    """Check the shape, number type and device of a tensor of layer k."""
    after = mdp.layer_sizes[k + 1] if k + 1 < mdp.horizon else 1
    expected = (mdp.layer_sizes[k], mdp.num_actions, after)
    text = "(*batch, " + ", ".join(map(str, expected)) + ")"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor of shape {text}, got {type(x).__name__}")
    if tuple(x.shape[-3:]) != expected:
        raise ValueError(f"{name}: expected shape {text}, got {tuple(x.shape)}")
    if x.dtype != mdp.dtype or x.device != mdp.device:
        raise ValueError(
            f"{name}: is {x.dtype} on {x.device}, the MDP {mdp.dtype} on {mdp.device}; "
            "convert one of them"
        )


def check_values(
    mdp: LayeredMDP,
    q: Tensor,
    loss: Tensor,
    rate: Tensor,
    rows: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]],
) -> None:
    """Check the values of plain tensors; runs inside every transform.

    Raises:
        ValueError: if a number is not finite, or has the wrong sign; if no distribution is between
            the bounds of a row; or if a state cannot be reached under the upper bounds.
    """
    available = mdp.actions
    _all("q", mdp, 0, q, ~available | ((q > 0) & q.isfinite()), "expected a positive number")
    _all("loss", mdp, 0, loss, ~available | loss.isfinite(), "expected a finite number")
    wrong = (~((rate >= 0) & rate.isfinite())).nonzero()
    if len(wrong):
        value = float(rate[tuple(wrong[0])])
        raise ValueError(f"learning_rate: expected a number of at least 0, got {value}")
    reached = mdp.initial > 0
    masks = mdp.split(available, -2)
    for k, (p, lower, upper) in enumerate(zip(*rows, strict=True)):
        start, unused = mdp.layer_slices[k].start, ~masks[k].unsqueeze(-1)
        _check_rows(mdp, k, p, lower, upper, unused)
        if not bool(reached.all()):
            *batch, state = (~reached).nonzero()[0].tolist()
            _raise("upper", mdp, batch, start + state, "cannot be reached; every policy avoids it")
        reached = ((upper > 0) & ~unused).flatten(-3, -2).any(-2)


def _check_rows(
    mdp: LayeredMDP, k: int, p: Tensor, lower: Tensor, upper: Tensor, unused: Tensor
) -> None:
    """Check the reference and the bounds of layer k; `unused` `(S_k, A, 1)` marks masked pairs."""
    start, tolerance = mdp.layer_slices[k].start, row_tolerance(mdp.dtype)
    good = unused | ((lower >= 0) & lower.isfinite())
    _all("lower", mdp, start, lower, good, "expected a number of at least 0")
    good = unused | (upper.isfinite() & (upper >= lower))
    _all("upper", mdp, start, upper, good, "expected at least the lower bound, {:.6g}", lower)
    good = unused | (p.isfinite() & (p >= 0) & ((p > 0) | (upper <= 0)))
    _all(
        *("transitions", mdp, start, p, good),
        "expected a positive number where the upper bound is positive ({:.6g}); what is zero "
        "stays zero",
        upper,
    )
    for name, sums, wrong in (
        ("lower", lower.sum(-1), lower.sum(-1) > 1 + tolerance),
        ("upper", upper.sum(-1), upper.sum(-1) < 1 - tolerance),
    ):
        bad = (wrong & ~unused.squeeze(-1)).nonzero()
        if len(bad):
            *batch, state, action = bad[0].tolist()
            side = "at most" if name == "lower" else "at least"
            total = float(sums[tuple(bad[0])])
            message = f"the bounds sum to {total:.12g}; expected {side} 1"
            _raise(name, mdp, batch, start + state, message, action)


def _all(
    name: str,
    mdp: LayeredMDP,
    start: int,
    x: Tensor,
    good: Tensor,
    expected: str,
    other: Tensor | None = None,
) -> None:
    """Raise a ValueError for the first entry that is not good; `other` goes into its message."""
    if bool(good.all()):
        return
    place = (~good).nonzero()[0]
    values = [float(y.expand(good.shape)[tuple(place)]) for y in (x, other) if y is not None]
    events = 2 if name in ("q", "loss") else 3
    batch, (state, action, *after) = place[:-events].tolist(), place[-events:].tolist()
    _raise(
        *(name, mdp, batch, start + state),
        f"is {values[0]:.6g}; " + expected.format(*values[1:]),
        *(action, *after),
    )


def _raise(
    name: str,
    mdp: LayeredMDP,
    batch: Sequence[int],
    state: int,
    message: str,
    action: int | None = None,
    successor: int | None = None,
) -> NoReturn:
    where = [f"batch element {tuple(batch)}"] if batch else []
    where.append(mdp.locate(state))
    where += [] if action is None else [f"action {action}"]
    where += [] if successor is None else [f"successor {successor}"]
    raise ValueError(f"{name}: {', '.join(where)}: {message}")
