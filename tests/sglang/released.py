"""The response path of released SGLang versions, from their wheels: message classes, methods of `TokenizerManager`.

Old versions do not import here (other torch, other kernels). So their wheels are fetched from the registry, once, into
the ignored build folder, and of two files those classes and methods are taken that a message passes through. They are
that version's own code and run as they stand; whatever else they name (loggers, metrics, tracing) is a mock.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dataclasses
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

CACHE = Path(__file__).resolve().parents[2] / "build" / "sglang_released"
FILES = ("io_struct.py", "tokenizer_manager.py")
FOLDER = "sglang/srt/managers"
METHODS = ("_handle_batch_output", "_calculate_spec_decoding_metrics", "_handle_abort_req", "abort_request")
INSTALLED = "installed"


def sources(version: str) -> dict[str, str]:
    """The two files of a version's wheel, or of the SGLang that is installed here."""
    if version == INSTALLED:
        spec = find_spec("sglang")
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parents[1] / FOLDER
    else:
        folder = CACHE / version
        if not all((folder / name).exists() for name in FILES):
            _fetch(version, folder)
    return {name: (folder / name).read_text() for name in FILES}


def _fetch(version: str, folder: Path) -> None:
    tools = Path(sys.prefix).parent / "tools/bin/python"  # uv's environments have no pip, the one that holds uv has
    python = tools if tools.exists() else Path(getattr(sys, "_base_executable", sys.executable))
    with tempfile.TemporaryDirectory() as there:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", there, f"sglang=={version}"], check=True, timeout=300)
        (wheel,) = Path(there).glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as opened:
            for name in FILES:
                with opened.open(f"{FOLDER}/{name}") as source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target)


class _Mocks(dict[str, Any]):
    """Builtins, and a mock for every name that the version's own modules would have imported."""

    def __missing__(self, name: str) -> Any:
        if name == "__annotations__":
            raise KeyError(name)
        self[name] = MagicMock(name=name)
        return self[name]


def _classes(source: str, wanted: Any) -> list[ast.stmt]:
    """The classes of a module that `wanted` names, and those of its own that they derive from, in order."""
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    keep: set[str] = set()
    todo = [name for name in found if wanted(name)]
    while todo:
        name = todo.pop()
        if name not in keep:
            keep.add(name)
            todo += [base.id for base in found[name].bases if isinstance(base, ast.Name) and base.id in found]
    return [node for name, node in found.items() if name in keep]


def _module(name: str, nodes: list[ast.stmt], given: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(given)
    vars(module)["__builtins__"] = _Mocks(vars(builtins))
    sys.modules[name] = module
    flags = __future__.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(ast.Module(nodes, [])), name, "exec", flags=flags, dont_inherit=True)
    exec(code, vars(module))  # a released version's own classes
    return module


def load(version: str) -> types.ModuleType:
    """Put the version's response path where SGLang's modules would be, and return `tokenizer_manager`."""
    import abc
    import copy
    import enum
    import typing
    import uuid

    import msgspec

    texts = sources(version)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        sys.modules[name] = types.ModuleType(name)
    given: dict[str, Any] = {
        **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Union", "Literal", "Tuple")},
        "ABC": abc.ABC,
        "Enum": enum.Enum,
        "copy": copy,
        "uuid": uuid,
        "msgspec": msgspec,
        "dataclasses": dataclasses,
        "dataclass": dataclasses.dataclass,
        "field": dataclasses.field,
    }
    messages = _module(
        "sglang.srt.managers.io_struct",
        _classes(texts["io_struct.py"], lambda name: name.startswith("Batch") and name.endswith(("Out", "Output"))),
        given,
    )
    nodes = _classes(texts["tokenizer_manager.py"], lambda name: name in ("ReqState", "TokenizerManager"))
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == "TokenizerManager":
            node.bases = []
            node.decorator_list = []
            node.body = [
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in METHODS
            ]
            node.body += ast.parse("def __init__(self, **attributes):\n    self.__dict__.update(attributes)\n").body
    nodes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in ("ReqState", "TokenizerManager")]
    known = {name: value for name, value in vars(messages).items() if name.startswith("Batch")}
    logger = MagicMock()
    state_free = {
        # What the newer versions ask of a message before they read it.
        "unwrap_from_pickle": lambda value: None,
        "try_build_beam_search_out_dict": lambda *_: None,
        "is_health_check_generate_req": lambda _: False,
        "HEALTH_CHECK_RID_PREFIX": "HEALTH_CHECK",
        "get_spec": lambda: types.SimpleNamespace(speculative_algorithm="", speculative_num_draft_tokens=4),
        "_ragged_verify_cap_accept": lambda: False,
        "get_serving": lambda: types.SimpleNamespace(batch_notify_size=16, skip_tokenizer_init=False),
        "GenerateReqInput": type("GenerateReqInput", (), {}),
        "torch": types.SimpleNamespace(Tensor=type("Tensor", (), {})),
        "time": __import__("time"),
        "asyncio": __import__("asyncio"),
        "logger": logger,
    }
    return _module("sglang.srt.managers.tokenizer_manager", nodes, {**given, **known, **state_free})


def message(kind: Any, **columns: Any) -> Any:
    """A message of this version's own class; columns that it has not are left out."""
    names = getattr(kind, "__struct_fields__", None) or [each.name for each in dataclasses.fields(kind)]
    return kind(**{name: columns.get(name) for name in names})
