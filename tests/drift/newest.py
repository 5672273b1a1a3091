"""The newest released wheels of the engines: files of them, read from the registry without the wheels.

A wheel of vLLM has hundreds of megabytes. pip names the newest one that the configured index has, and of it the few
files that are asked for are read where they lie. Nothing here says which index that is.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from remotezip import RemoteZip

PLATFORMS = ("any", *(f"manylinux_2_{minor}_x86_64" for minor in range(17, 50)))


class UnreachableError(Exception):
    """The registry did not give what was asked for."""


class Newest:
    """The newest wheel of a project for Linux and CPython 3.12, whatever it needs."""

    def __init__(self, project: str) -> None:
        self.project = project
        tools = Path(sys.prefix).parent / "tools/bin/python"  # uv's environments have no pip, the one that holds uv has
        command = [str(tools), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
        command += ["--only-binary", ":all:", "--python-version", "3.12", "--target", "nowhere", "--report", "-"]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        ended = subprocess.run([*command, project], capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode:
            raise UnreachableError(f"pip found no newest {project} (exit status {ended.returncode})")
        (found,) = json.loads(ended.stdout)["install"]
        self.version: str = found["metadata"]["version"]
        self._url: str = found["download_info"]["url"]
        self._read: dict[str, str] = {}

    def __enter__(self) -> Newest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if "_wheel" in vars(self):
            self._wheel.close()

    @cached_property
    def _wheel(self) -> Any:
        try:
            return RemoteZip(self._url)
        except Exception as error:
            raise UnreachableError(f"{self} could not be read ({type(error).__name__})") from None

    def source(self, path: str) -> str:
        """The text of one of the wheel's files.

        Raises:
            FileNotFoundError: the wheel has no such file.
            UnreachableError: it could not be read.
        """
        if path not in self._read:
            if path not in self._wheel.namelist():
                raise FileNotFoundError(f"{self} has no {path}")
            try:
                self._read[path] = self._wheel.read(path).decode()
            except Exception as error:
                raise UnreachableError(f"{path} of {self} could not be read ({type(error).__name__})") from None
        return self._read[path]

    def __str__(self) -> str:
        return f"{self.project} {self.version}"


def bare_class(source: str, name: str, methods: Iterable[str]) -> Any:
    """A class like the one that a module's source defines: these methods with their parameters, without their bodies.

    None where the module has no such class.
    """
    node = classes(source).get(name)
    if node is None:
        return None
    kept = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    kept = [each for each in kept if each.name in methods]
    for function in kept:
        function.body, function.returns = [ast.Pass()], None
        parameters = function.args
        for argument in ast.walk(parameters):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        parameters.defaults = [ast.Constant(None) for _ in parameters.defaults]
        parameters.kw_defaults = [each and ast.Constant(None) for each in parameters.kw_defaults]
        # What makes something else of a function than a method; all others need their modules, and wrap.
        function.decorator_list = [
            each for each in function.decorator_list if getattr(each, "id", None) in ("staticmethod", "property")
        ]
    module = ast.parse(f"class {name}:\n    pass")
    bare = module.body[0]
    assert isinstance(bare, ast.ClassDef)
    bare.body = [*bare.body, *kept]
    ast.fix_missing_locations(module)
    made: dict[str, Any] = {}
    exec(compile(module, f"<{name}>", "exec"), made)
    return made[name]


def members(source: str, name: str) -> set[str]:
    """The fields, methods and attributes of a class, with those of its bases in the same module."""
    defined = classes(source)
    found: set[str] = set()
    waiting = [name]
    while waiting:
        node = defined.get(waiting.pop())
        if node is None:
            continue
        waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
        for each in ast.walk(node):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(each.name)
            elif isinstance(each, ast.AnnAssign | ast.Assign):
                targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
                found |= {target.attr for target in targets if isinstance(target, ast.Attribute)}
    return found


def returned(source: str, name: str, method: str) -> str:
    """What a method says that it returns; empty where it doesn't, or isn't there."""
    node = classes(source).get(name)
    for each in node.body if node is not None else ():
        if (
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name == method
            and each.returns is not None
        ):
            return ast.unparse(each.returns)
    return ""


def classes(source: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
