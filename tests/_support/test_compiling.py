"""How kernels are compiled and kept: routines become parts of them, stale ones are never used."""

import ast
import gc
import importlib.util
import operator
import os
import pickle
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


def test_kernels_are_kept_where_it_is_possible_and_noticed_if_a_callee_is_edited(tmp_path):
    """On a copy of the package, in new processes."""
    shutil.copytree(PACKAGE, tmp_path / "torch_occ", ignore=shutil.ignore_patterns("__pycache__"))
    kernels, elsewhere = tmp_path / "torch_occ" / "engine", tmp_path / "elsewhere"
    # A file in the place of the folder stops root, too.
    (kernels / "__pycache__").write_text("")

    def run(**changed):
        lost = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "PYTHONPATH"}
        environment = {name: value for name, value in os.environ.items() if name not in lost}
        environment |= {"PYTHONPATH": str(tmp_path), "PYTHONWARNINGS": "default"}
        environment |= {"HOME": os.devnull} | changed
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
        command = [sys.executable, "-c", PLAY]
        done = subprocess.run(command, env=environment, check=False, **options)
        assert done.returncode == 0, done.stderr
        regret, hits = done.stdout.split()
        return (float(regret), int(hits)), done.stderr

    found, said = run()
    assert found[1] == 0
    assert said.count("compiled kernels cannot be kept") == 1
    advised = {"NUMBA_CACHE_DIR": str(elsewhere)}
    assert "NUMBA_CACHE_DIR" in said
    again, said = run(**advised)
    assert (again, "cannot be kept" in said) == (found, False)
    assert run(**advised)[0] == (found[0], 1)  # from the disk
    files = {path.name for path in elsewhere.rglob("*.nb?")}
    assert any(name.startswith("play-") for name in files)
    callee = kernels / "play.py"
    edited = callee.read_text().replace("return 1.0 if uniform < mean else 0.0", "return 0.0")
    assert edited != callee.read_text()
    callee.write_text(edited)
    # The comparator pays 1/2 in either of two layers; now nothing is lost.
    assert run(**advised)[0] == (found[0] - round(found[0] + 50), 0)
    # Old files are overwritten, not left behind.
    assert {path.name for path in elsewhere.rglob("*.nb?")} == files


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
ONE = "from torch_occ.engine.layout import kernel\n@kernel\ndef f(x):\n return {}"


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
    module = imported(INNER)  # a routine from disk is linked into new kernels
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
    assert imported(ONE.format(" + ".join("x" * 20))).f(1.0) == 20.0
    assert asked.count(operator.add) == 1


def test_the_collector_rests_while_a_kernel_compiles(imported, monkeypatch):
    seen = []
    compile_core = compiling.KernelCompiler._compile_core
    noted = lambda self: (seen.append(gc.isenabled()), compile_core(self))[1]  # noqa: E731
    monkeypatch.setattr(compiling.KernelCompiler, "_compile_core", noted)
    imported(ONE.format("x")).f(1.0)
    assert gc.isenabled()
    with pytest.raises(numba.TypingError):
        imported(ONE.format("x.missing")).f(1.0)
    assert gc.isenabled()
    assert seen == [False, False]


@pytest.mark.parametrize("terminal", [False, True])
def test_messages_say_what_is_compiled_and_how_far(capsys, monkeypatch, terminal):
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for name in ("one", "two"):  # not only the first
        with compiling._compiling(name), compiling._compiling("inner"):
            time.sleep(0.3)
    with compiling._compiling("quick"):
        pass
    said = capsys.readouterr().err
    found = re.findall(r"compil\w+ \w+(?:, once for this machine ...[\n\r])?", said)
    end = "\r" if terminal else "\n"
    assert found == [
        text
        for name in ("one", "two")
        for text in (
            f"compiling {name}, once for this machine ...{end}",
            *[f"compiling {name}"] * (said.count(f"compiling {name}") - 1),
            f"compiled {name}",
        )
    ]
    assert ("... 2 functions\r" in said) == terminal


# -- files that are not what the index says ----------------------------------------------------

TWO = ONE.format("x + 1.0") + "\n@kernel\ndef g(x):\n return x + 2.0"


@pytest.fixture
def compiled_twice(imported, tmp_path):
    """A function that imports and calls two kernels, and counts those that came from disk."""

    def call():
        module = imported(TWO)
        assert (module.f(0.0), module.g(0.0)) == (1.0, 2.0)
        return sum(sum(f.stats.cache_hits.values()) for f in (module.f, module.g))

    call.files = lambda: sorted((tmp_path / "cache").rglob("*.nbc"))
    return call


def test_files_that_are_wrong_are_compiled_again(compiled_twice):
    """A process may crash while it writes, and names of files could be equal by chance."""

    def exchange():
        one.write_bytes(second)
        two.write_bytes(first)

    def damage():
        one.write_bytes(first[:100])
        two.unlink()

    def empty():
        one.write_bytes(pickle.dumps((pickle.loads(first)[0], ())))
        two.unlink()

    assert compiled_twice() == 0
    for spoil in (exchange, damage, empty):
        assert compiled_twice() == 2
        one, two = compiled_twice.files()
        first, second = one.read_bytes(), two.read_bytes()
        spoil()
        assert compiled_twice() == 0, spoil.__name__


def test_a_disk_that_is_full_costs_a_warning_only(compiled_twice, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling.caching.IndexDataCacheFile, "_save_data", full)
    compiling._nowhere.cache_clear()
    with pytest.warns(UserWarning, match=r"No space left on device.*NUMBA_CACHE_DIR") as said:
        assert compiled_twice() == 0
    assert len(said) == 1
    compiling._nowhere.cache_clear()


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
    for version in ("numba.__version__", "llvmlite.__version__", f"{compiling.__name__}.VERSION"):
        with monkeypatch.context() as patch:
            patch.setattr(version, "0")
            stamps.append(compiling.stamp_of([tmp_path / "a.py"]))
    assert len(set(stamps)) == len(stamps)


def test_every_name_in_a_kernel_comes_from_a_source_in_the_stamp():
    """Numba compiles values of global names into a kernel, so their files belong to the stamp."""
    checked = 0
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        tree = ast.parse(path.read_text())
        origin = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_occ"):
                place = PACKAGE.parent / node.module.replace(".", "/")
                for name in node.names:  # of a package, or of a module
                    own = place / f"{name.name}.py"
                    file = own if own.exists() else place.with_suffix(".py")
                    origin[name.asname or name.name] = file
        compiled = (x for x in tree.body if isinstance(x, ast.FunctionDef) and x.decorator_list)
        for node in (x for function in compiled for line in function.body for x in ast.walk(line)):
            if isinstance(node, ast.Name) and node.id in origin:
                checked += 1
                assert origin[node.id] in compiling.SOURCES, f"{path.name}: {node.id}"
    assert checked > 50
