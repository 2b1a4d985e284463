"""Readable scripts, one per question: `python -m experiments.<name> --help`.

That help comes without an import of torch, which takes seconds. The arguments of a script are the
fields of its dataclass `Args`, and they are read from the source: executed are the definition of
`Args` without its methods, what its fields and its bases refer to, and imports of the standard
library. Nothing else of the script is executed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]


def print_help(command: list[str]) -> None:
    """Print the help of `python -m experiments.<name> --help`, and exit; else return."""
    script = command[command.index("-m") + 1] if "-m" in command[:-1] else ""
    path = source_file(script)
    asked = script.startswith("experiments.") and {"-h", "--help"} & set(command) and path.exists()
    if asked:
        import tyro

        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        tyro.cli(excerpt(script, "Args"), prog=f"python -m {script}", description=description)


def source_file(module: str) -> Path:
    """The file of a module of this repository."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def excerpt(module: str, name: str) -> Any:
    """A definition at the top level of a module of this repository, without an import of it.

    Classes lose their methods. Raises NameError if the definition needs another package.
    """
    path = source_file(module)
    result = ModuleType(f"excerpt of {module}: {name}")
    result.__file__ = str(path)  # where tyro reads the texts below the fields
    kept: list[ast.stmt] = []
    needed = {name}
    for node in reversed(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if str(origin).partition(".")[0] in sys.stdlib_module_names:
                kept.append(node)
            elif str(origin).startswith("experiments."):
                for alias in node.names:
                    if alias.name in needed:
                        setattr(result, alias.name, excerpt(str(origin), alias.name))
        elif needed & _defined(node):
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if not isinstance(part, ast.FunctionDef)]
            kept.append(node)
            names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            needed |= {part.id for part in names if isinstance(part.ctx, ast.Load)}
    sys.modules[result.__name__] = result  # where dataclasses and tyro look up the annotations
    exec(compile(ast.Module(kept[::-1], type_ignores=[]), str(path), "exec"), result.__dict__)
    return getattr(result, name)


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    return {part.id for part in parts if isinstance(part, ast.Name)}


print_help(sys.orig_argv)
