"""`otel-specdec watch` and `doctor` against a real Prometheus that receives OTLP, and a real collector."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from otel_specdec import GenerationExemplarFilter, GenerationReport, SpecCounts, SpecDecRecorder, views
from otel_specdec.cli import endpoints
from otel_specdec.cli.main import main
from tests.collector.processes import Collector, Prometheus, eventually
from tests.unit.test_prove import serving


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(Path(tmp_path_factory.mktemp("prometheus"))) as prometheus:
        yield prometheus


def watched(prometheus: Prometheus, capsys: Any, model: str) -> dict[str, Any]:
    assert main(["watch", "--once", "--json", "--prometheus", prometheus.url, "--model", model]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    return dict(group)


def record(provider: MeterProvider, model: str, *numbers: int) -> None:
    recorder = SpecDecRecorder(provider)
    for number in numbers:
        counts = SpecCounts(accepted=10, proposed=16, verify=4, completion=15, emitted=14)
        recorder.record(
            GenerationReport(
                f"cmpl-{number}", counts, model=model, provider="vllm", method="eagle",
                accepted_by_position=(4, 3, 2, 1), proposed_by_position=(4, 4, 4, 4),
            )
        )  # fmt: skip
    provider.force_flush()


def exporting(prometheus: Prometheus, instance: str) -> MeterProvider:
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(f"{prometheus.otlp}/v1/metrics"), export_interval_millis=3_600_000
    )
    resource = Resource({"service.name": "tests", "service.instance.id": instance})
    return MeterProvider([reader], resource=resource, views=views(), exemplar_filter=GenerationExemplarFilter())


def test_watch_reads_sums_windows_and_generations_from_prometheus(prometheus: Prometheus, capsys: Any) -> None:
    provider = exporting(prometheus, "one")
    record(provider, "m")  # nothing yet
    record(provider, "m", 1, 2)
    assert eventually(lambda: prometheus.value('specdec_generations_total{gen_ai_request_model="m"}') == 2, 20)
    time.sleep(1.1)
    record(provider, "m", 3)
    assert eventually(lambda: prometheus.value('specdec_generations_total{gen_ai_request_model="m"}') == 3, 20)
    group = watched(prometheus, capsys, "m")
    provider.shutdown()
    start = group["windows"]["since_start"]
    assert start["totals"] == {"accepted": 30, "proposed": 48, "verify": 12, "completion": 45, "emitted": 42}
    assert start["ratios"] == {"acceptance_length": 3.5, "accept_rate": 0.625, "tokens_per_verify": 3.75}
    assert start["acceptance_length_by_k"] == {"1": 2.0, "2": 2.75, "3": 3.25, "4": 3.5}
    # The first sample of a series is where its windows begin.
    assert group["windows"]["1_min"]["generations"] >= 1
    assert {each["id"] for each in group["latest"]} == {"cmpl-1", "cmpl-2", "cmpl-3"}
    assert group["latest"][0]["counts"]["completion"] == 15


def test_a_restart_in_prometheus_is_never_negative(prometheus: Prometheus, capsys: Any) -> None:
    for generations in (3, 1):  # the same identity twice, the second life shorter
        provider = exporting(prometheus, "two")
        record(provider, "restarted", *range(generations))
        time.sleep(1.1)
        provider.force_flush()
        provider.shutdown()
    series = 'specdec_generations_total{gen_ai_request_model="restarted"}'
    assert eventually(lambda: prometheus.value(f"sum({series})") is not None, 20)
    windows = watched(prometheus, capsys, "restarted")["windows"]
    for pooled in windows.values():
        assert all(value >= 0 for value in pooled["totals"].values())
    assert windows["since_start"]["generations"] == 4


def test_the_proof_reads_a_prometheus(prometheus: Prometheus, capsys: Any) -> None:
    with serving(prometheus.otlp, AggregationTemporality.CUMULATIVE) as (url, engine):
        engine.provider.force_flush()
        born = 'specdec_generations_total{gen_ai_request_model="tiny"}'
        assert eventually(lambda: prometheus.value(born) == 0, 20)
        command = ["doctor", "--json", "--prove", url, "--prometheus", prometheus.url, "--wait", "30"]
        assert main(command) == 0
        found = {each["check"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
        assert {each["state"] for each in found.values()} == {"ok"}
        assert found["completion"]["says"] == "24 completion tokens were counted, and 24 came back."
        assert len(engine.requests) == 1


def test_an_empty_export_gets_through_to_a_prometheus_and_a_collector(prometheus: Prometheus, tmp_path: Path) -> None:
    to = "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert endpoints.ask(endpoints.HTTP, 5, {to: prometheus.otlp}).reachable
    wrong = endpoints.ask(endpoints.HTTP, 5, {to: prometheus.url})
    assert wrong.reachable is False
    assert "not to OTLP metrics (HTTP 404)" in wrong.says
    with Collector(tmp_path, prometheus.otlp) as collector:
        assert endpoints.ask(endpoints.HTTP, 5, {to: collector.http}).reachable
        assert endpoints.ask(endpoints.GRPC, 5, {to: f"http://{collector.grpc}"}).reachable
        assert endpoints.ask(endpoints.GRPC, 5, {to: collector.http}).reachable is False
        assert endpoints.ask(endpoints.HTTP, 5, {to: f"http://{collector.grpc}"}).reachable is False
