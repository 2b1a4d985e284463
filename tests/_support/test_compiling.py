"""How kernels are compiled and kept: routines become parts of them, stale ones are never used."""

from __future__ import annotations

import ast
import gc
import importlib.util
import operator
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

import torch_occ
from torch_occ._support import choices, compiling

PACKAGE = Path(torch_occ.__file__).parent

#: Compiles as little as `simulate` can, in two modules: `play`, which calls functions of
#: torch_occ.engine.learners.
PLAY = """
import torch, torch_occ as occ
from torch_occ.engine.play import play
mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
losses = occ.BernoulliLosses(torch.full((mdp.num_states, 2), 0.5, dtype=torch.float64))
history = occ.simulate(mdp, occ.FixedPolicy(mdp), losses, 50)
assert history.backend == "engine"
print(float(history.realised_regret[0, -1]), sum(play.stats.cache_hits.values()))
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
    assert list(elsewhere.rglob("play.play-*.nbc"))


# -- routines ----------------------------------------------------------------------------------

INNER = """
from torch_occ.engine.layout import choose, kernel, routine

@routine
def half(x):
    return 0.5 * x

@routine
def third(x):
    return x / 3.0

some = choose(lambda kind: "float" in str(kind), half, third)

@kernel
def first(x):
    return some(x) + half(x)

@kernel
def second(x):
    return some(x) + some(3)
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A function that imports kernels from text, with a cache of their own."""
    monkeypatch.setattr(compiling.caching.config, "CACHE_DIR", str(tmp_path / "cache"))

    def load(text):
        path = tmp_path / "kernels.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("kernels", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.canary
def test_a_routine_is_linked_into_kernels_and_has_no_machine_code(imported):
    """If this fails, Numba's classes have changed, and compiling takes twice as long."""
    module = imported(INNER)
    assert module.first(3.0) == 3.0
    (found,) = module.half.overloads.values()
    assert found.library.get_pointer_to_function(found.fndesc.llvm_func_name) == 0
    assert found._reduce()[0][1] == "bitcode"
    assert not module.third.overloads  # what is not chosen is not compiled
    (found,) = module.first.overloads.values()
    assert found.library.get_pointer_to_function(found.fndesc.llvm_cpython_wrapper_name) != 0


def test_a_routine_from_disk_is_linked_into_new_kernels(imported):
    assert imported(INNER).first(3.0) == 3.0
    module = imported(INNER)
    assert module.second(3.0) == 2.5
    assert sum(module.half.stats.cache_hits.values()) == 1
    (found,) = module.half.overloads.values()
    assert type(found.library) is compiling._RoutineLibrary


@pytest.mark.canary
def test_operators_are_looked_up_once(imported, monkeypatch):
    """If this fails, Numba's typing has changed, and compiling takes longer."""
    asked = []
    context = type(numba.njit(lambda: 0).typingctx)
    resolve = context.resolve_function_type

    def counted(self, function, *arguments):
        asked.append(getattr(function, "typing_key", None))
        return resolve(self, function, *arguments)

    monkeypatch.setattr(compiling._Remembering, "_found", {})
    monkeypatch.setattr(context, "resolve_function_type", counted)
    sums = " + ".join("x" * 20)
    module = imported(
        f"from torch_occ.engine.layout import kernel\n@kernel\ndef f(x):\n return {sums}"
    )
    assert module.f(1.0) == 20.0
    assert asked.count(operator.add) == 1


@pytest.mark.parametrize("text", ["x", "x.missing"])
def test_the_collector_rests_while_a_kernel_compiles(imported, monkeypatch, text):
    seen = []
    compile_core = compiling.KernelCompiler._compile_core
    monkeypatch.setattr(
        compiling.KernelCompiler,
        "_compile_core",
        lambda self: (seen.append(gc.isenabled()), compile_core(self))[1],
    )
    module = imported(
        f"from torch_occ.engine.layout import kernel\n@kernel\ndef f(x):\n return {text}"
    )
    assert gc.isenabled()
    if text == "x":
        module.f(1.0)
    else:
        with pytest.raises(numba.TypingError):
            module.f(1.0)
    assert seen[0] is False
    assert gc.isenabled()


def test_a_message_says_what_is_compiled_in_every_process_that_compiles(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    for name in ("one", "two"):  # not only the first
        with compiling._compiling(name), compiling._compiling("inner"):
            time.sleep(0.2)
    with compiling._compiling("quick"):
        pass
    assert re.findall(r"compil\w+ \w+", capsys.readouterr().err) == [
        "compiling one",
        "compiled one",
        "compiling two",
        "compiled two",
    ]


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
def compiled_twice(imported, tmp_path):
    """A function that imports and calls two kernels, and counts those that came from disk."""

    def call():
        module = imported(TWO)
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

    monkeypatch.setattr(compiling.caching.IndexDataCacheFile, "save", full)
    compiling._nowhere.cache_clear()
    with pytest.warns(UserWarning, match=r"No space left on device.*NUMBA_CACHE_DIR") as said:
        assert compiled_twice() == ((1.0, 2.0), 0)
    assert len(said) == 1


# -- without Numba -----------------------------------------------------------------------------


def test_without_numba_torch_is_used_and_one_warning_says_so():
    def why_not():
        raise ImportError("No module named 'numba'")

    choices._without_engine.cache_clear()
    with pytest.warns(UserWarning, match="No module named 'numba'.*torch is used") as said:
        assert [choices.engine_takes("auto", why_not) for _ in range(2)] == [False, False]
    assert len(said) == 1
    with pytest.raises(ImportError, match="the engine cannot be imported: No module named 'numba'"):
        choices.engine_takes("engine", why_not)
    assert not choices.engine_takes("torch", why_not)


# -- the stamp ---------------------------------------------------------------------------------


def test_the_stamp_knows_contents_names_and_versions(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "b.py").write_text("x = 1")
    stamps = [compiling.stamp_of([tmp_path / "a.py"]), compiling.stamp_of([tmp_path / "b.py"])]
    assert compiling.stamp_of([tmp_path / "a.py"]) == stamps[0]
    (tmp_path / "a.py").write_text("x = 2")
    stamps.append(compiling.stamp_of([tmp_path / "a.py"]))
    for package in ("numba", "llvmlite"):
        with monkeypatch.context() as patch:
            patch.setattr(f"{package}.__version__", "0")
            stamps.append(compiling.stamp_of([tmp_path / "a.py"]))
    monkeypatch.setattr(compiling, "VERSION", "0")
    stamps.append(compiling.stamp_of([tmp_path / "a.py"]))
    assert len(set(stamps)) == len(stamps)


def test_every_name_in_a_kernel_comes_from_a_source_in_the_stamp():
    """Numba compiles values of global names into a kernel, so their files belong to the stamp."""
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
            if function.decorator_list:
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
                            in compiling.SOURCES
                        ), f"{path.name}: {name}"
    assert checked > 50
