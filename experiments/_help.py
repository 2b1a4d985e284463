"""`python -m experiments.<name> --help` without importing torch, which takes seconds.

The arguments of a script are the fields of its dataclass `Args`. This module reads them from the
source: it executes the definition of `Args` without its methods, the definitions that its fields
refer to, and imports of the standard library. Nothing else of the script is executed.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]


def print_help() -> None:
    """If Python was started as `python -m experiments.<name> --help`, print the help and exit.

    A field of `Args` may refer to something that needs a package, such as an object of
    `torch_occ`. Then nothing is printed here, and the script prints its help after all imports.
    """
    script = script_asking_for_help(sys.orig_argv)
    if script is None:
        return
    try:
        arguments = excerpt(script, "Args")
    except NameError:
        return
    import tyro

    description = ast.get_docstring(ast.parse(source_file(script).read_text(encoding="utf-8")))
    tyro.cli(arguments, prog=f"python -m {script}", description=description)


def script_asking_for_help(command: list[str]) -> str | None:
    """The `experiments.<name>` of `python -m experiments.<name> ... --help`, or None."""
    if "-m" not in command[:-1]:
        return None
    script, *arguments = command[command.index("-m") + 1 :]
    asked = script.startswith("experiments.") and {"-h", "--help"} & set(arguments)
    return script if asked and source_file(script).exists() else None


def source_file(module: str) -> Path:
    """The file of a module of this repository."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def excerpt(module: str, name: str) -> Any:
    """Something that a module of this repository defines at its top level, without importing it.

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
            package = str(origin).partition(".")[0]
            if package in sys.stdlib_module_names:
                kept.append(node)
            elif isinstance(node, ast.ImportFrom) and (ROOT / package).is_dir():
                for alias in node.names:
                    if (alias.asname or alias.name) in needed:
                        found = excerpt(str(origin), alias.name)
                        setattr(result, alias.asname or alias.name, found)
        elif needed & defined(node):
            if isinstance(node, ast.ClassDef):
                node.body = [part for part in node.body if not isinstance(part, ast.FunctionDef)]
            kept.append(node)
            names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            needed |= {part.id for part in names if isinstance(part.ctx, ast.Load)}
    sys.modules[result.__name__] = result  # where dataclasses and tyro look up the annotations
    code = compile(ast.Module(kept[::-1], type_ignores=[]), str(path), "exec")
    exec(code, result.__dict__)
    try:
        return getattr(result, name)
    except AttributeError:
        raise NameError(f"{module} does not define {name}") from None


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
