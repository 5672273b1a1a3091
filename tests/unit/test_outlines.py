"""Classes made from the outline of a source: what the hooks look at, and nothing that runs."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from otel_specdec.cli.sources import fields, outline, source_of

SOURCE = '''
import not_installed
boom = 1 / 0

@not_installed.decorate(boom)
class Scheduler(not_installed.Base[boom], metaclass=not_installed.Meta):
    """Documented."""

    attribute: int = boom

    def __init__(self, config: "Config", /, log: bool = boom, *rest, key=boom, **others) -> None:
        boom

    @not_installed.timed
    async def step(self, output: not_installed.Output) -> boom:
        await boom
'''


def test_an_outline_has_the_parameters_and_runs_nothing() -> None:
    made = outline(SOURCE, "Scheduler")
    assert inspect.isclass(made)
    assert str(inspect.signature(vars(made)["__init__"])) == "(self, config, /, log=None, *rest, key=None, **others)"
    assert inspect.iscoroutinefunction(vars(made)["step"])
    assert vars(made).keys() & {"attribute"} == set()
    assert outline(SOURCE, "Other") is None


def test_an_outline_of_a_class_without_methods() -> None:
    assert inspect.isclass(outline("class Empty:\n    x = y", "Empty"))


def test_a_source_that_is_not_for_this_python_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError):
        outline("class A: def", "A")


def test_fields_are_those_of_the_class_and_its_bases_in_the_same_source() -> None:
    source = "class A(B, other.C):\n    x: int\n    y: int = 0\n    z = 1\nclass B(A):\n    rids: list\n"
    assert fields(source, "A") == {"x", "y", "rids"}
    assert fields(source, "Gone") == frozenset()


def test_a_source_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "an_engine" / "inner"
    folder.mkdir(parents=True)
    for each in (folder.parent, folder):
        (each / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "module.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_of("an_engine.inner.module") == "x = 1"
    assert source_of("an_engine.inner") == "raise SystemExit('imported')"
    assert source_of("an_engine.inner.gone") is None
    assert source_of("no_such_engine.module") is None
    assert not [name for name in sys.modules if name.startswith("an_engine")]
