"""Every snippet of Python on every page runs, from top to bottom, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import pytest
import yaml
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from collector.mixin import recording
from collector.mixin.prometheus_names import counter
from otel_specdec import SGLangSpecDecInstrumentor, VLLMSpecDecInstrumentor
from otel_specdec.names import Metric
from tests.docs.pages import PAGES, ROOT, Block, blocks

LANGUAGES = {"python", "text", "sh", "promql", "yaml", "json"}
ELSEWHERE = {("index.md", "from vllm import")}
"""Snippets that need a real engine: tests/vllm/test_docs.py runs them on one."""

OTHERS = {"adding-an-engine.md": "tests/unit/test_adding_an_engine.py"}
"""Pages whose snippets are files that import each other: these tests lay them out and run them."""

run_python = PythonEvaluator()


def run_and_keep_output(example: Example) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_python(example)
    example.namespace["__printed__"] = printed.getvalue()


def compare_output(example: Example) -> None:
    """A block of text after a snippet that printed is what it printed."""
    if printed := example.namespace.pop("__printed__", ""):
        assert str(example.parsed).strip() == printed.strip()


PARSERS = [
    CodeBlockParser("python", run_and_keep_output),
    CodeBlockParser("text", compare_output),
    SkipParser(),
]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    for instrumentor in (VLLMSpecDecInstrumentor(), SGLangSpecDecInstrumentor()):
        if instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.uninstrument()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OTHERS], ids=lambda page: page.name)
def test_its_python_runs(page: Path) -> None:
    document = Sybil(PARSERS, path=str(ROOT)).parse(page)
    for example in document.examples():
        example.evaluate()


def test_only_what_needs_an_engine_is_left_to_another_test() -> None:
    pages = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    skipped = {name: text.count("<!-- skip:") for name, text in pages.items() if "<!-- skip:" in text}
    assert skipped == {name: 1 for name, _ in ELSEWHERE}
    for name, part in ELSEWHERE:
        assert part in pages[name].split("<!-- skip: next -->\n```python\n")[1].split("```")[0]


@pytest.mark.parametrize(("page", "test"), OTHERS.items())
def test_a_page_that_is_left_to_another_test_is_read_by_it(page: str, test: str) -> None:
    assert page in (ROOT / test).read_text(encoding="utf-8")


def test_every_block_says_what_it_is() -> None:
    assert [block for block in blocks() if block.language not in LANGUAGES] == []
    assert sum(block.language == "python" for block in blocks()) > 12


@pytest.mark.parametrize("block", [*blocks("yaml", "json")], ids=lambda block: f"{block.page}:{block.line}")
def test_its_yaml_and_json_can_be_read(block: Block) -> None:
    assert (json.loads if block.language == "json" else yaml.safe_load)(block.text)


RECORDED = {
    rule.record
    for rules in (recording.pool_rules, recording.ratio_rules, recording.position_rules, recording.reconciliation_rules)
    for rule in rules()
}


@pytest.mark.parametrize("block", [*blocks("promql")], ids=lambda block: f"{block.page}:{block.line}")
def test_its_queries_ask_for_what_there_is(block: Block) -> None:
    parsed = promql_parser.parse(block.text)
    asked = []

    def visit(expr: promql_parser.Expr) -> None:
        if isinstance(expr, promql_parser.VectorSelector):
            asked.append(expr.name)
        elif isinstance(expr, promql_parser.MatrixSelector):
            asked.append(expr.vector_selector.name)

    promql_parser.walk(parsed, visit)
    assert asked
    assert {*asked} <= RECORDED | {counter(metric) for metric in Metric}
