"""A limit on the whole: what a reader must hold in the head. The limits only go down.

`python tests/test_size.py` prints the table. A feature pays for its lines by removing others.
"""

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_occ"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(files):
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def code_lines():
    """Lines of the package without blank lines, comments, docstrings and imports."""
    total = 0
    for path, tree in TREES.items():
        silent = set()
        for node in ast.walk(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
                first = node.body[0]
                silent |= set(range(first.lineno, first.end_lineno + 1))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                silent |= set(range(node.lineno, node.end_lineno + 1))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip()
            total += bool(text) and not text.startswith("#") and number not in silent
    return total


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in FILES}


def imports_of(path):
    """The modules of this package that a file imports when it is imported, types apart."""
    found, todo = set(), list(TREES[path].body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_occ"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in NAMES else node.module)
    return found & NAMES


IMPORTS = {name_of(path): imports_of(path) for path in FILES}
#: Modules that are imported on demand, `later("...")`, belong to what a reader enters.
LATER = {
    name_of(path): {
        f"torch_occ.{name}" for name in re.findall(r'\blater\(\s*"([\w.]+)"', path.read_text())
    }
    for path in FILES
}


def closure(module):
    """The modules that a reader enters to understand a module."""
    found, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name in IMPORTS and name not in found:
            found.add(name)
            todo += IMPORTS[name] | LATER[name]
    return len(found)


def home_of(name):
    """The module that defines a name, as `torch_occ/__init__.py` says."""
    for node in TREES[PACKAGE / "__init__.py"].body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return node.module
    raise AssertionError(f"{name} is not exported")


def exports(path):
    """Names that a package exports, `X as X`."""
    return sum(
        alias.asname == alias.name
        for node in TREES[path].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def functions():
    return [
        node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
    ]


def parameters(node):
    given = node.args
    count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
    return count - (bool(given.args) and given.args[0].arg in ("self", "cls"))


def used_twice(kind):
    """Names of top-level classes or functions that stand in more than one module."""
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, kind) and node.name != "_" and node.name != "__getattr__"
    )
    return sum(count > 1 for count in names.values())


def decorated(name):
    return sum(
        isinstance(decorator, ast.Name) and decorator.id == name
        for node in functions()
        for decorator in node.decorator_list
    )


def one_importer():
    importers = Counter(
        imported for name, found in IMPORTS.items() for imported in found | LATER[name]
    )
    inner = {name_of(path) for path in FILES if path.name != "__init__.py"}
    return sum(importers[name] == 1 for name in inner)


def docstrings_with(word):
    return sum(
        bool(re.search(rf"\b{word}\b", ast.get_docstring(node) or "", re.IGNORECASE))
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module))
    )


def python(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def pages():
    return sorted((ROOT / "docs").rglob("*.md"))


#: What is counted: how, the limit now, and the limit that the project works towards.
RULES = {
    "lines of torch_occ": (lambda: lines_of(FILES), 26_420, 26_500),
    "lines of code of torch_occ": (code_lines, 15_500, 15_500),
    "files of torch_occ": (lambda: len(FILES), 93, 100),
    "folders of torch_occ": (lambda: len({path.parent for path in FILES}), 12, 14),
    "folders that a module stands in": (
        lambda: max(len(path.relative_to(PACKAGE).parts) for path in FILES) - 1,
        1,
        1,
    ),
    "public names of torch_occ": (lambda: exports(PACKAGE / "__init__.py"), 73, 75),
    "public names of theory": (lambda: exports(PACKAGE / "theory" / "__init__.py"), 53, 60),
    "modules behind simulate": (lambda: closure(home_of("simulate")), 52, 65),
    "modules behind FTRLStep": (lambda: closure(home_of("FTRLStep")), 38, 38),
    "docstrings that say twin": (lambda: docstrings_with("twins?"), 0, 8),
    "kernels that Python calls": (lambda: decorated("kernel"), 6, 30),
    "functions with more than 8 parameters": (
        lambda: sum(parameters(node) > 8 for node in functions()),
        4,
        8,
    ),
    "modules with one importer": (one_importer, 15, 20),
    "class names used twice": (lambda: used_twice(ast.ClassDef), 0, 0),
    "function names used twice": (lambda: used_twice(FUNCTIONS), 9, 10),
    "lines of tests": (lambda: lines_of(python("tests")), 16_800, 17_000),
    "lines of experiments": (lambda: lines_of(python("experiments")), 8_000, 8_000),
    "files of experiments": (lambda: len(python("experiments")), 27, 30),
    "words of docs": (
        lambda: sum(len(path.read_text(encoding="utf-8").split()) for path in pages()),
        32_000,
        32_000,
    ),
    "pages of docs": (lambda: len(pages()), 24, 24),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_whole_is_bounded(rule):
    count, limit, _ = RULES[rule]
    found = count()
    assert found <= limit, f"{rule}: {found}, at most {limit}; take something out"


if __name__ == "__main__":
    print(f"{'':55}{'now':>8}{'limit':>8}{'target':>8}")
    for name, (count, limit, target) in RULES.items():
        print(f"{name:55}{count():8}{limit:8}{target:8}")
    sys.exit()
