"""Kernels on disk: stale ones are never used; without a disk, kernels still compile."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_occ
from torch_occ._support import caching

PACKAGE = Path(torch_occ.__file__).parent

#: Compiles as little as `simulate` can, in two modules: `play_fixed`, which calls kernels of
#: torch_occ.engine.play.
PLAY = """
import torch, torch_occ as occ
from torch_occ.engine.play import play_fixed
mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
losses = occ.BernoulliLosses(torch.full((mdp.num_states, 2), 0.5, dtype=torch.float64))
history = occ.simulate(mdp, occ.FixedPolicy(mdp), losses, 50)
assert history.backend == "engine"
print(float(history.realised_regret[0, -1]), sum(play_fixed.stats.cache_hits.values()))
"""


@pytest.fixture
def copied(tmp_path):
    """A copy of the package without compiled kernels; `run` plays with it in a new process."""
    shutil.copytree(PACKAGE, tmp_path / "torch_occ", ignore=shutil.ignore_patterns("__pycache__"))

    def run(**changed):
        lost = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH"}
        environment = {name: value for name, value in os.environ.items() if name not in lost}
        environment |= {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "default"} | changed
        done = subprocess.run(
            [sys.executable, "-c", PLAY],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        regret, hits = done.stdout.split()
        return float(regret), int(hits), done.stderr

    run.kernels = tmp_path / "torch_occ" / "engine"
    return run


def test_an_edited_kernel_is_noticed_by_those_that_call_it(copied):
    before, hits, _ = copied()
    assert hits == 0
    assert copied()[:2] == (before, 1)  # from the disk
    callee = copied.kernels / "play.py"
    edited = callee.read_text().replace("return 1.0 if uniform < mean else 0.0", "return 0.0")
    assert edited != callee.read_text()
    callee.write_text(edited)
    files = {path.name for path in (copied.kernels / "__pycache__").glob("*.nb?")}
    after, hits, _ = copied()
    assert hits == 0
    # the comparator pays 1/2 in either of two layers; now nothing is lost
    assert after == before - round(before + 50)
    assert {
        path.name for path in (copied.kernels / "__pycache__").glob("*.nb?")
    } == files  # old files are overwritten, not left behind


def test_where_nothing_can_be_written_kernels_are_compiled_and_one_warning_says_so(copied):
    """A file in the place of the folder stops root, too."""
    (copied.kernels / "__pycache__").write_text("")
    before, hits, said = copied(HOME=os.devnull)
    assert hits == 0
    assert said.count("compiled kernels cannot be kept") == 1
    assert "NUMBA_CACHE_DIR" in said
    elsewhere = copied.kernels.parent.parent.parent / "elsewhere"
    # as the warning advises
    again, _, said = copied(HOME=os.devnull, NUMBA_CACHE_DIR=str(elsewhere))
    assert (again, "cannot be kept" in said) == (before, False)
    assert list(elsewhere.rglob("baselines.play_fixed*.nbc"))


# -- files that are not what the index says ----------------------------------------------------

TWO = """
from torch_occ.engine.layout import kernel

@kernel
def one(x):
    return x + 1.0

@kernel
def two(x):
    return x + 2.0
"""


@pytest.fixture
def compiled_twice(tmp_path, monkeypatch):
    """A function that imports and calls two kernels, and counts those that came from disk."""
    monkeypatch.setattr(caching.caching.config, "CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "kernels.py"
    path.write_text(TWO)

    def call():
        spec = importlib.util.spec_from_file_location("kernels", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = module.one(0.0), module.two(0.0)
        return found, sum(sum(f.stats.cache_hits.values()) for f in (module.one, module.two))

    call.files = lambda: sorted((tmp_path / "cache").rglob("*.nbc"))
    return call


def test_a_file_with_another_kernel_is_not_taken(compiled_twice):
    """Two processes that compile at once may leave an index that leads to another kernel."""
    assert compiled_twice() == ((1.0, 2.0), 0)
    assert compiled_twice() == ((1.0, 2.0), 2)
    one, two = compiled_twice.files()
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert compiled_twice() == ((1.0, 2.0), 0)


def test_a_damaged_file_is_compiled_again(compiled_twice):
    compiled_twice()
    one, two = compiled_twice.files()
    one.write_bytes(one.read_bytes()[:100])
    two.unlink()
    assert compiled_twice() == ((1.0, 2.0), 0)
    assert compiled_twice() == ((1.0, 2.0), 2)


def test_an_index_that_cannot_be_read_is_replaced(compiled_twice):
    """An earlier version may have left one that names a class of its own."""
    compiled_twice()
    for file in compiled_twice.files():
        (index,) = file.parent.glob(file.name.split("-")[0] + "-*.nbi")
        index.write_bytes(index.read_bytes()[:-20])
    assert compiled_twice() == ((1.0, 2.0), 0)
    assert compiled_twice() == ((1.0, 2.0), 2)


def test_a_disk_that_is_full_costs_a_warning_only(compiled_twice, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.caching.IndexDataCacheFile, "save", full)
    caching._nowhere.cache_clear()
    with pytest.warns(UserWarning, match=r"No space left on device.*NUMBA_CACHE_DIR") as said:
        assert compiled_twice() == ((1.0, 2.0), 0)
    assert len(said) == 1


# -- the stamp ---------------------------------------------------------------------------------


def test_the_stamp_knows_contents_names_and_versions(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("x = 1")
    stamps = [caching.stamp_of([tmp_path / "a.py"]), caching.stamp_of([tmp_path / "b.py"])]
    assert caching.stamp_of([tmp_path / "a.py"]) == stamps[0]
    (tmp_path / "a.py").write_text("x = 2")
    stamps.append(caching.stamp_of([tmp_path / "a.py"]))
    for package in ("numba", "llvmlite"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{package}.__version__", "0")
            stamps.append(caching.stamp_of([tmp_path / "a.py"]))
    monkeypatch.setattr(caching, "VERSION", "0")
    stamps.append(caching.stamp_of([tmp_path / "a.py"]))
    assert len(set(stamps)) == len(stamps)


def test_every_name_in_a_kernel_comes_from_a_source_in_the_stamp():
    """Numba compiles values of global names into a kernel, so their files belong to the stamp."""
    decorators = {"kernel", "adder", "part", "inlined"}
    checked = 0
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        tree = ast.parse(path.read_text())
        origin = {
            name.asname or name.name: statement.module
            for statement in tree.body
            if isinstance(statement, ast.ImportFrom)
            and statement.module
            and statement.module.startswith("torch_occ")
            for name in statement.names
        }
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            if decorators & {d.id for d in function.decorator_list if isinstance(d, ast.Name)}:
                for name in (
                    node.id
                    for line in function.body
                    for node in ast.walk(line)
                    if isinstance(node, ast.Name)
                ):
                    if name in origin:
                        checked += 1
                        assert (
                            PACKAGE.parent / (origin[name].replace(".", "/") + ".py")
                            in caching.SOURCES
                        ), f"{path.name}: {name}"
    assert checked > 50
