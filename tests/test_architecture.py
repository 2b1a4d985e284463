"""The contract on imports: packages in one order, one module that imports later, no name hidden."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import ROOT

import torch_occ as occ

PACKAGE = ROOT / "torch_occ"
FUNCTION = ast.FunctionDef

#: Every package may import from itself and from those before it.
ORDER = (
    "_support",
    "mdp",
    "regularizers",
    "engine",
    "step",
    "reference",
    "learning",
    "game",
    "games",
    "rivals",
    "tuning",
    "limits",
    "theory",
    "sweeps",
    "__main__",
)

#: The one module that imports modules of this package inside a function.
LATER = "_support.choices"


class Import(NamedTuple):
    """`importer` imports `imported`, both below torch_occ."""

    importer: str
    imported: str
    inside_function: bool
    for_types: bool


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def modules_of(room: str) -> set[str]:
    """The modules and packages in a folder."""
    return {child.name for child in pkgutil.iter_modules([PACKAGE.joinpath(*room.split("."))])}


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of this package in a file, those behind `later("...")` included."""
    importer = name_of(path)

    def walk(node: ast.AST, inside: bool, types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            deeper = inside or isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            typing = types or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            )
            if (
                isinstance(child, ast.ImportFrom)
                and (child.module or "").split(".")[0] == "torch_occ"
            ):
                base = (child.module or "").removeprefix("torch_occ").removeprefix(".")
                for alias in child.names:
                    whole = f"{base}.{alias.name}".removeprefix(".")
                    is_module = (PACKAGE / f"{whole.replace('.', '/')}.py").exists() or (
                        PACKAGE / whole
                    ).is_dir()
                    yield Import(importer, whole if is_module else base, inside, types)
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == "torch_occ":
                        yield Import(
                            importer,
                            alias.name.removeprefix("torch_occ").removeprefix("."),
                            inside,
                            types,
                        )
            elif (
                isinstance(child, ast.Call)
                and isinstance(child.func, ast.Name)
                and child.func.id == "later"
            ):
                assert isinstance(child.args[0], ast.Constant), (
                    f"{importer}: later() needs the name of a module"
                )
                yield Import(importer, child.args[0].value, False, False)
            yield from walk(child, deeper, typing)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False, False)


#: Every folder with modules: the packages, and those inside them.
ROOMS = sorted(name_of(path) for path in PACKAGE.glob("*/**/__init__.py"))

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
IMPORTS = [found for path in FILES for found in imports_of(path)]


def test_the_order_names_every_package():
    found = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    assert set(ORDER) == {name.removesuffix(".py") for name in found}


@pytest.mark.parametrize("package", ORDER[:-1])  # the command uses the public face
def test_imports_go_one_way(package):
    allowed = ORDER[: ORDER.index(package) + 1]
    wrong = [
        x
        for x in IMPORTS
        if x.importer.split(".")[0] == package and x.imported.split(".")[0] not in allowed
    ]
    assert not wrong


def test_no_import_inside_a_function():
    assert [x for x in IMPORTS if x.inside_function] == []
    calls = [
        name_of(path)
        for path in FILES
        if re.search(r"\bimport_module\(f?\"torch_occ", path.read_text())
    ]
    assert calls == [LATER]


def test_a_module_imported_later_stands_beside_its_importer():
    found = [
        (name_of(path).split(".")[0], module.split(".")[0])
        for path in FILES
        for module in re.findall(r"\blater\(\"([\w.]+)\"\)", path.read_text())
    ]
    assert found
    # The player of two learners in a game uses that of one.
    known = {("games", "game"), ("games", "engine")}
    assert all(each[0] == each[1] or each[1] == "rivals" or each in known for each in found)


def test_there_are_no_cycles():
    """Nor inside a package; imports for types and modules imported later do not count."""
    strict = {name_of(path): set[str]() for path in FILES}
    for path in FILES:
        later = set(re.findall(r"\blater\(\"([\w.]+)\"\)", path.read_text()))
        for x in imports_of(path):
            if (
                not x.for_types
                and x.imported not in later
                and x.imported in strict
                and x.imported != x.importer
            ):
                strict[x.importer].add(x.imported)
    while leaves := [name for name, needs in strict.items() if not needs]:
        for name in leaves:
            del strict[name]
        for needs in strict.values():
            needs.difference_update(leaves)
    assert not strict


def test_the_engine_does_not_know_torch():
    for path in (PACKAGE / "engine").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE), path


def test_what_is_private_of_others_stands_in_one_module():
    private = (
        r"\b(?:torch|forward_ad|pool|writer|p|module|functorch|numba)\._(?!_)[a-zA-Z]\w*|\"_nrt\""
        r"|\bnumba\.(?:core|np|targets|typed)\b|\bllvmlite\.[a-z]|(?:from|import) llvmlite"
        r"|from numba import (?:core|np)\b"
    )
    found = {name_of(path): re.findall(private, path.read_text()) for path in FILES}
    assert [name for name, uses in found.items() if uses] == ["_support.private"]


def test_nothing_hides_a_module():
    for package in ("", *ROOMS):
        module = importlib.import_module(f"torch_occ.{package}".removesuffix("."))
        for child in pkgutil.iter_modules(module.__path__):
            shown = getattr(module, child.name, None)
            assert shown is None or type(shown).__name__ == "module", (
                f"{module.__name__}.{child.name}"
            )


@pytest.mark.parametrize("room", ROOMS)
def test_the_docstring_of_a_package_lists_its_modules(room):
    """CONTRIBUTING.md sends readers there: one line per module, its name and what it holds."""
    listed = re.findall(r"^(\w+)  +\S", importlib.import_module(f"torch_occ.{room}").__doc__, re.M)
    assert sorted(listed) == sorted(modules_of(room))


def test_public_names():
    """The names of the first day; the others stand in packages, and old names say where."""
    public = sorted(
        name
        for name in vars(occ)
        if not name.startswith("_") and type(getattr(occ, name)).__name__ != "module"
    )
    assert public == (ROOT / "tests" / "public_names.txt").read_text().split()


def test_old_names_say_where_they_are_now():
    for package, names in occ._MOVED.items():
        for name in names.split():
            with pytest.warns(DeprecationWarning, match=rf"torch_occ.{package}.{name} now"):
                found = getattr(occ, name)
            assert found is getattr(importlib.import_module(f"torch_occ.{package}"), name)
    for names, advice in occ._GONE.items():
        for name in names.split():
            with pytest.raises(AttributeError, match=re.escape(f"{name} was removed: {advice}")):
                getattr(occ, name)
    with pytest.raises(AttributeError, match="module 'torch_occ' has no attribute 'nothing'"):
        _ = occ.nothing


def test_an_import_takes_neither_numba_nor_what_is_needed_later():
    code = "import torch_occ, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late = {"numba", "cvxpy", "scipy", "matplotlib", "torch_occ.rivals", "torch_occ.theory"}
    assert not late & set(found.stdout.split())


#: Names that meant "settings", "state", "solve" or "walk" before there was one word for each.
SYNONYMS = {
    *("Rules", "Manner", "Trust", "Course", "Way", "Mirror", "Opponent", "Confidence"),
    *("settle", "_settle_or_descend", "venture", "roam", "nowhere", "stale", "GUESS", "CHOICE"),
}
#: Those that are still in the engine and in `rivals`; the set only shrinks.
STILL = {"Confidence", "GUESS", "_settle_or_descend", "settle", "stale"}


def test_words_are_used_and_their_synonyms_are_not():
    """docs/words.md lists one word per thing; names and docstrings of the package keep to it."""
    words = re.findall(r"^\| ([\w ]+) \| \S", (ROOT / "docs" / "words.md").read_text(), re.M)
    words.remove("word")
    assert 30 <= len(words) <= 40
    assert words == sorted(words, key=str.lower)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FILES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {getattr(x, "name", None) for x in nodes if isinstance(x, ast.ClassDef | FUNCTION)}
    defined |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    defined |= {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    documented = (ast.Module, ast.ClassDef, FUNCTION)
    said = " ".join(ast.get_docstring(x) or "" for x in nodes if isinstance(x, documented))
    text = f"{said} {' '.join(map(str, defined))}".lower().replace("_", " ")
    assert [word for word in words if not re.search(rf"\b{word.lower()}", text)] == []
    assert sorted((SYNONYMS & defined) - STILL) == []
