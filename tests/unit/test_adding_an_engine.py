"""docs/adding-an-engine.md: its code runs as it stands there, and it speaks of the whole interface."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import engines
from tests.unit.scripts import ROOT, run

PAGE = (ROOT / "docs" / "adding-an-engine.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(title: str) -> str:
    (found,) = [each for each in BLOCKS if each.startswith(f"# {title}\n")]
    return str(found)


def test_the_adapter_of_the_page_counts_and_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    for module in ("toyengine.py", "toy_adapter.py"):
        (tmp_path / module).write_text(block(module))
    more = """
import json
before = pooled
engine.step([("c", 4, 4, 5, True)])
(pooled,) = pool(reader.get_metrics_data())
print(json.dumps([before.totals, before.ratios, before.generations, pooled.generations, dict(pooled.attributes)]))
"""
    totals, ratios, generations, after_removal, attributes = run(block("use it") + more, path=tmp_path).value
    assert totals == {"accepted": 7, "proposed": 12, "verify": 3, "completion": 8, "emitted": 7}
    assert ratios == {"acceptance_length": 7 / 3, "accept_rate": 7 / 12, "tokens_per_verify": 8 / 3}
    assert (generations, after_removal) == (2, 2)
    assert attributes == {"specdec.source": "engine"}


def test_an_error_of_the_page_s_adapter_does_not_reach_the_engine(tmp_path: Path) -> None:
    (tmp_path / "toyengine.py").write_text(block("toyengine.py"))
    (tmp_path / "toy_adapter.py").write_text(block("toy_adapter.py"))
    more = """
import json
hooks.install()
toyengine.Engine.k = property(lambda self: 1 / 0, lambda self, value: None)
engine = toyengine.Engine("tiny", "ngram", k=4)
result = engine.step([("a", 4, 3, 4, False)])
errors = [
    point.value
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics
    for metric in scope.metrics
    if metric.name == "specdec.instrumentation.errors"
    for point in metric.data.data_points
]
print(json.dumps([result, errors]))
"""
    result, errors = run(block("use it") + more, path=tmp_path).value
    assert result == [["a", 4, 3, 4, False]]
    assert errors == [1]


def test_the_page_s_report_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    monkeypatch.setattr("opentelemetry.metrics.get_meter_provider", lambda: provider)
    (answers,) = [each for each in BLOCKS if each.startswith("from otel_specdec import GenerationReport")]
    exec(compile(answers, "adding-an-engine.md", "exec"), {})
    data: Any = reader.get_metrics_data()
    assert "specdec.accepted_tokens" in {
        m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics
    }


@pytest.mark.parametrize(
    "name",
    [
        each
        for kind in (engines.EngineDescription, engines.Increment, engines.Picked, engines.Taken)
        for each in (kind.__name__, *(field.name for field in fields(kind)))
    ]
    + [*engines.TraceIds._fields, "Tally", "take()", "ended", "EngineListener"]
    + ["engine_started", "engine_idle", "failed"],
)
def test_every_name_of_the_interface_is_on_the_page(name: str) -> None:
    assert re.search(rf"`[^`\n]*(?<!\w){re.escape(name)}(?!\w)[^`\n]*`", PAGE), name


def test_every_block_of_code_is_one_that_a_test_runs() -> None:
    assert [each.splitlines()[0] for each in BLOCKS] == [
        "# toyengine.py", "# toy_adapter.py", "# use it",
        "from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["adding-an-engine", "proposal", "releasing", "semantic-conventions"])
def test_links_within_the_repository_lead_somewhere(name: str) -> None:
    page = ROOT / "docs" / f"{name}.md"
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]*)(?:#[^)]*)?\)", text):
        if link and not re.match(r"[a-z]+://", link):
            assert (page.parent / link).exists(), link
