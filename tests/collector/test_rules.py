"""The rule files: made from code, checked and tested by promtool, and each rule is in one of its tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from collector.mixin import alerts, recording
from collector.mixin.prometheus_names import POOL, counter
from collector.mixin.yaml_files import Rule
from otel_specdec import names
from otel_specdec.names import Metric
from tests.collector.conftest import RULES
from tests.collector.processes import BUILD, ROOT, Prometheus, run

TESTS = ROOT / "collector" / "prometheus" / "tests"
EXTENDED = "--enable-feature=promql-extended-range-selectors"


def rules_in(path: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def test_the_committed_files_are_what_the_code_makes() -> None:
    assert (RULES / "specdec.rules.yml").read_text() == recording.stock_file()
    assert (RULES / "specdec_collector.rules.yml").read_text() == recording.collector_file()
    assert (RULES / "specdec_exact.rules.yml").read_text() == recording.exact_file()
    assert (RULES / "specdec.alerts.yml").read_text() == alerts.alert_file()


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yml")), ids=lambda path: path.name)
def test_promtool_finds_nothing_wrong(path: Path) -> None:
    checked = run([BUILD / "promtool", EXTENDED, "check", "rules", path])
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_configuration_of_prometheus_is_valid() -> None:
    checked = run([BUILD / "promtool", "check", "config", RULES.parent / "prometheus.yml"])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "3 rule files found" not in checked.stdout  # one of the two recording files, and the alerts
    assert "2 rule files found" in checked.stdout


@pytest.mark.parametrize("path", sorted(TESTS.glob("*.yml")), ids=lambda path: path.name)
def test_promtool_tests(path: Path) -> None:
    tested = run([BUILD / "promtool", "test", "rules", path])
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_rule_is_in_a_test() -> None:
    asked = (TESTS / "specdec_test.yml").read_text()
    for rule in rules_in(RULES / "specdec.rules.yml"):
        assert re.search(rf"expr: .*{rule['record']}\b", asked), rule["record"]
        for value in rule.get("labels", {}).values():
            if rule["record"].startswith("specdec:best_k"):
                continue  # 32 of one form; those tested are 1, 2, 3, 11 and 32
            assert f'"{value}"' in asked, rule
    asked_of_gauges = (TESTS / "specdec_collector_test.yml").read_text()
    for pooled in recording.pool_rules_from_gauges():
        assert re.search(rf"expr: .*{pooled.record}\b", asked_of_gauges), pooled.record
    asked_of_alerts = (TESTS / "specdec_alerts_test.yml").read_text()
    for alert in alerts.alerts():
        fires = re.search(rf"alertname: {alert.record}\n\s+exp_alerts:\n", asked_of_alerts)
        assert fires, alert.record


def test_the_collector_file_records_the_same_names_and_differs_in_the_sums_alone() -> None:
    stock = rules_in(RULES / "specdec.rules.yml")
    gauges = rules_in(RULES / "specdec_collector.rules.yml")
    assert [(rule["record"], rule.get("labels")) for rule in stock] == [
        (rule["record"], rule.get("labels")) for rule in gauges
    ]
    differing = {a["record"] for a, b in zip(stock, gauges, strict=True) if a != b}
    assert differing == {rule.record for rule in recording.pool_rules()}


def test_sums_are_of_rates_and_always_by_source() -> None:
    def check(rule: Rule) -> None:
        for by in re.findall(r"(?:sum|count) by \(([^)]*)\)", rule.expr):
            labels = {label.strip() for label in by.split(",")}
            if rule.record.startswith(("specdec:own_", "specdec:engine_")):
                assert f'specdec_source="{names.ENGINE}"' in rule.expr or "specdec_" not in rule.expr
            else:
                assert "specdec_source" in labels, rule.record
        assert not re.search(r"(rate|increase)\((sum|specdec:)", rule.expr), rule.record

    for rule in [
        *recording.pool_rules(), *recording.pool_rules_from_gauges(), *recording.ratio_rules(),
        *recording.position_rules(),
        *recording.replica_rules(), *recording.version_rules(), *recording.health_rules(),
        *recording.reconciliation_rules(), *recording.exact_rules(),
    ]:  # fmt: skip
        check(rule)


def test_alerts_ask_for_recorded_names_only() -> None:
    recorded = {rule["record"] for rule in rules_in(RULES / "specdec.rules.yml")}
    for alert in alerts.alerts():
        asked = set(re.findall(r"specdec:[a-z_0-9]+:[a-z_0-9]+", alert.expr))
        assert asked
        assert asked <= recorded
        assert not re.search(r"\bspecdec_[a-z_]+(_total|_pool)", alert.expr)


def test_prometheus_calls_our_counters_what_the_rules_ask_for(tmp_path: Path) -> None:
    from tests.collector.fleet import Replica

    with Prometheus(tmp_path) as prometheus:
        replica = Replica("a", environment="prod", service_version="1.2", positions=1)
        replica.add(accepted=1, proposed=1, verify=1, emitted=1, completion=1, generations=1)
        replica._counters[Metric.TRIMMED].add(1, {names.SOURCE: names.ENGINE, names.PROCESS: "api-0"})
        replica._counters[Metric.DROPPED_REPORTS].add(1, {names.SOURCE: names.RESPONSE, names.REASON: names.CONFLICT})
        replica._counters[Metric.ERRORS].add(1, {names.SOURCE: names.ENGINE, names.ERROR_TYPE: "KeyError"})
        replica.export(prometheus.otlp)
        found = {value.labels["__name__"] for value in prometheus.query('{__name__=~"specdec_.+"}')}
        assert found == {counter(metric) for metric in Metric}
        series = prometheus.query(counter(Metric.GENERATIONS))[0].labels
        assert set(POOL) <= set(series), json.dumps(dict(series))
        assert series["instance"] == "a"
        assert series["service_version"] == "1.2"
