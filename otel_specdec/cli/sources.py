"""What an engine's released source says of the classes that are hooked, without running any of it.

A class is made anew from the source's outline: the methods' names and parameters, and nothing that would be executed
(no bodies, decorators, defaults, annotations or bases). So the adapters' own tests of what they need can look at it,
in any environment, in milliseconds, where importing the engine takes seconds and memory, and may start things.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

_Method = ast.FunctionDef | ast.AsyncFunctionDef


def source_of(module: str) -> str | None:
    """The source text of a module; None where it, or its package, is not there as source.

    `find_spec` is asked for the top package alone, which imports nothing; for a submodule it would import the package.
    """
    top, *parts = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, *parts)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            try:
                return candidate.read_text(encoding="utf-8")
            except OSError:
                continue
    return None


def outline(source: str, name: str) -> type | None:
    """A class with the parameters of the methods of the source's top-level class `name`; None where there is none.

    SyntaxError where the source is not for this Python.
    """
    found = _classes(source).get(name)
    if found is None:
        return None
    methods = [_bare(node) for node in found.body if isinstance(node, _Method)]
    namespace: dict[str, type] = {}
    exec("\n    ".join([f"class {name}:", *methods, "pass"]), namespace)
    return namespace[name]


def _bare(method: _Method) -> str:
    """The method in one line, without annotations, and with None for every default."""
    arguments = method.args
    several = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in filter(None, several):
        argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    keyword = "async def" if isinstance(method, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {method.name}({ast.unparse(arguments)}): pass"


def fields(source: str, name: str) -> frozenset[str]:
    """The annotated fields of a class and of its bases in the same source; empty where it is not there."""
    classes = _classes(source)
    found: set[str] = set()
    todo, seen = [name], set()
    while todo:
        current = todo.pop()
        if current in seen or current not in classes:
            continue
        seen.add(current)
        node = classes[current]
        todo += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.add(statement.target.id)
    return frozenset(found)


def _classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
