"""The dashboard: made from code, on recorded names, and every panel shows what there is to show."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from collector.mixin import dashboards, recording
from otel_specdec import names
from otel_specdec.names import Metric
from tests.collector.conftest import RULES
from tests.collector.fleet import Replica
from tests.collector.panels import for_everything, panel_targets
from tests.collector.processes import COLLECTOR, Collector, Prometheus, eventually


def test_the_committed_json_is_what_the_code_makes() -> None:
    for name, text in dashboards.files().items():
        assert (COLLECTOR / "dashboards" / name).read_text() == text


def test_panels_ask_for_recorded_names_only_but_for_exemplars() -> None:
    recorded = {rule.record for rule in RECORDED}
    for title, target in panel_targets():
        asked = set(re.findall(r"specdec[:_][a-z_0-9]*(?::[a-z_0-9]+)*", re.sub(r'"[^"]*"', "", target["expr"])))
        asked -= {"specdec_source"}  # a label
        if target.get("exemplar"):
            assert all(name.endswith("_total") for name in asked), title
        else:
            assert asked, title
            assert asked <= recorded, (title, asked - recorded)


RECORDED = [
    *recording.pool_rules(), *recording.ratio_rules(), *recording.position_rules(), *recording.replica_rules(),
    *recording.version_rules(), *recording.health_rules(), *recording.reconciliation_rules(),
]  # fmt: skip


def test_what_is_recorded_is_shown() -> None:
    shown = " ".join(target["expr"] for _, target in panel_targets())
    for rule in RECORDED:
        half = re.search(r":(numerator|denominator|covered)_", rule.record)
        assert rule.record in shown or half, rule.record


class Engines:
    """The metrics pages of a vLLM and an SGLang, with numbers that grow by the second."""

    def __init__(self) -> None:
        began = time.time()

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seconds = time.time() - began
                body = "\n".join(
                    f"{name}{{{labels}}} {value}"
                    for name, labels, value in [
                        ("vllm:spec_decode_num_accepted_tokens_total", 'model_name="m",engine="0"', 18 * seconds),
                        ("vllm:spec_decode_num_draft_tokens_total", 'model_name="m",engine="0"', 20 * seconds),
                        ("vllm:spec_decode_num_drafts_total", 'model_name="m",engine="0"', 6 * seconds),
                        ("vllm:generation_tokens_total", 'model_name="m",engine="0"', 26 * seconds),
                        ("sglang:generation_tokens_total", 'model_name="s",tp_rank="0"', 26 * seconds),
                        ("sglang:spec_accept_length", 'model_name="s",tp_rank="0"', 3.5),
                    ]
                )
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(f"{body}\n".encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    pages = Engines()
    yield pages
    pages.close()


@pytest.mark.parametrize("way", ["straight", "by way of the collector"])
def test_every_panel_shows_something(tmp_path: Path, engines: Engines, way: str) -> None:
    straight = way == "straight"
    rules = [RULES / ("specdec.rules.yml" if straight else "specdec_collector.rules.yml"), RULES / "specdec.alerts.yml"]
    with Prometheus(tmp_path / "prometheus", rules, scrape={"engines": engines.address}, features=()) as prometheus:
        collector = None if straight else Collector(tmp_path / "collector", prometheus.otlp, window="1s").start()
        try:
            endpoint = collector.http if collector else prometheus.otlp
            replicas = [
                Replica("a", environment="prod", service_version="1", positions=3),
                Replica("b", environment="prod", service_version="2", positions=3),
                Replica("c", model="s", provider="sglang", method="eagle3", positions=3),
                Replica("d", source="response", positions=3),
            ]
            for _ in range(8):
                for replica in replicas:
                    replica.add(accepted=9, proposed=10, verify=3, emitted=12, completion=13, generations=1)
                    for position, accepted in enumerate([3, 2, 1]):
                        replica.add_position(position, accepted, 3)
                    replica._counters[Metric.DROPPED_REPORTS].add(
                        1, {names.SOURCE: names.RESPONSE, names.REASON: names.CONFLICT}
                    )
                    replica._counters[Metric.ERRORS].add(1, {names.SOURCE: names.ENGINE, names.ERROR_TYPE: "KeyError"})
                    replica.export(endpoint)
                time.sleep(0.7)
            time.sleep(2.5)

            def empty() -> list[str]:
                return [
                    f"{title}: {target['expr']}"
                    for title, target in panel_targets()
                    if not target.get("exemplar")
                    and not [v for v in prometheus.query(for_everything(target["expr"])) if math.isfinite(v.value)]
                ]

            assert eventually(lambda: not empty(), 15, 1), empty()
            rate = prometheus.query('specdec:accept_rate:ratio_rate5m{gen_ai_request_model="m"}')
            assert {round(value.value, 6) for value in rate} == {0.9}
            # A pool has the same labels on either way.
            pools = {tuple(sorted(v.labels.items())) for v in prometheus.query("specdec:accept_rate:numerator_rate5m")}
            assert len(pools) == 3
            assert sum(("deployment_environment_name", "prod") in labels for labels in pools) == 1
            best = prometheus.query('specdec:best_k_acceptance_length:ratio_rate5m{gen_ai_request_model="s"}')
            assert {value.labels["k"]: round(value.value, 6) for value in best} == {"1": 2.0, "2": 2.666667, "3": 3.0}
            # All alerts are loaded and judged without an error.
            groups = prometheus.api("rules")["groups"]
            assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        finally:
            if collector:
                collector.stop()
