"""Settings of all tests: one thread, no leaks of global state, the same examples everywhere."""

import warnings

import pytest
import torch
from games import Interruptible
from hypothesis import settings
from threads import THREADS

import torch_occ as occ

torch.set_num_threads(THREADS)

# The first use of forward mode imports deprecated code of torch, whose warning would fail a test.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

# The same examples in every run, for any PYTHONHASHSEED; nothing is stored, nothing is timed.
settings.register_profile(
    "torch_occ", derandomize=True, deadline=None, database=None, print_blob=True
)
settings.load_profile("torch_occ")


#: Needs nearly all kernels. One process compiles them, the other runs tests that need few.
RECORD = "tests/test_record.py"
FEW_KERNELS = ("mdp", "regularizers", "reference", "sweeps", "learning", "theory")


def pytest_collection_modifyitems(items):
    """Canaries run first: what they find explains the failures of others."""

    def place(item):
        folder = item.path.parent.name
        return "canary" not in item.keywords, RECORD not in item.nodeid, folder not in FEW_KERNELS

    items.sort(key=place)


@pytest.fixture(autouse=True)
def global_state_is_left_alone():
    """Check that a test leaves torch's settings alone.

    float64 is the default of this package, not of torch: a test that needs `set_default_dtype`
    hides a mistake.
    """
    before = torch.get_rng_state()
    yield
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == THREADS
    torch.set_rng_state(before)


@pytest.fixture(scope="module", params=["torch", "auto"])
def both_backends(request):
    """Run a module twice: in torch, and with the engine wherever the step chooses it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(occ.FTRLStep.__init__.__kwdefaults__, "backend", request.param)
        yield request.param


@pytest.fixture
def at(monkeypatch):
    """`at(t, call)`: the learner `Interruptible` calls `call` in episode t."""
    return lambda t, call: monkeypatch.setattr(Interruptible, "calls", {t: call})


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of eight episodes, so that a short run has many."""
    for module in ("simulate", "losses"):
        monkeypatch.setattr(f"torch_occ.game.{module}.CHUNK", 8)
    monkeypatch.setattr(occ.LossProcess, "stride", 8)
