"""The Kullback-Leibler projection of UOB-REPS for one reference, called from Python."""

from torch_occ._support import constants
from torch_occ.engine.layout import PAIR, kernel
from torch_occ.rivals import projection
from torch_occ.rivals.beliefs import entries
from torch_occ.step.arrays import model_of


@kernel
def run(model, reference, loss, rate, limits, certificate, scratch):
    found = projection.project(model, reference, loss, rate, limits[0], limits[1], scratch)
    for k in range(4):
        certificate[k] = found[k]
    for i in range(len(reference.q)):
        if model.exists[PAIR, i]:
            reference.q[i] = scratch.pairs[projection.FOUND, i]
            for e in range(reference.entry[i], reference.entry[i + 1]):
                reference.rows[e] = scratch.rows[projection.P, e]


def project(mdp, q, rows, lower, upper, loss, rate, max_steps=200):
    """Project q `(S, A)` and its flat rows `(M,)` in place.

    Returns the status, the number of steps, the flow residual and the dual residual.
    """
    model, entry = model_of(mdp, dense=True), entries(mdp)
    certificate = loss.new_zeros(4)
    tables = (x.numpy().reshape(-1) for x in (q, rows, lower, upper))
    run(
        model,
        projection.Reference(*tables, entry),
        loss.numpy().reshape(-1),
        float(rate),
        (2.0**-35, max_steps),  # eps^(2/3)
        certificate.numpy(),
        projection.make_scratch(model.start, entry),
    )
    assert certificate[0] in (constants.CONVERGED, constants.MAX_STEPS, constants.UNDERFLOW)
    return certificate
