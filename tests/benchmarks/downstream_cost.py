"""What the collector and Prometheus cost at 10, 100 and 1,000 replicas, for docs/sizing.md.

    build/venvs/downstream/bin/python -m tests.benchmarks.downstream_cost [REPLICAS ...]

Each replica exports what an engine at k = 5 exports: the bytes are those of the real SDK, with identity, times and
values
replaced. Exports come every 5 s instead of every 60 s, and so do windows, so that minutes tell of an hour: costs are
per
export and per window, memory is what is there after all exports. Then every replica restarts once, for the growth.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from tests.collector.fleet import Replica
from tests.collector.processes import COLLECTOR, Child, Collector, Prometheus

ROUNDS = 6
PACE_S = 5.0
POSITIONS = 5
MODELS = 3


@dataclass
class Cost:
    """CPU a single export takes, and anonymous memory before, after, and after one restart of every replica."""

    way: str
    replicas: int
    series: int
    bytes_each: int
    cpu_ms_each: float
    idle_mb: float
    memory_mb: float
    restarted_mb: float
    evaluation_ms: float = 0.0


class Traffic:
    """Exports of many replicas, one after the other over one connection."""

    def __init__(self, endpoint: str, replicas: int) -> None:
        template = Replica("template", positions=POSITIONS)
        template.add(accepted=0, proposed=0, verify=0, emitted=0, completion=0, generations=0)
        self._request = ExportMetricsServiceRequest()
        self._request.ParseFromString(template.collect())
        self._points = [
            point
            for resource in self._request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.sum.data_points
        ]
        self.series = len(self._points)
        self.replicas = replicas
        self.started = time.time_ns()
        self.value = 0
        url = urlsplit(endpoint)
        self._path = f"{url.path}/v1/metrics"
        self._connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        self.bytes_each = 0

    def round(self) -> None:
        self.value += 100
        for number in range(self.replicas):
            now = time.time_ns()
            for attribute in self._request.resource_metrics[0].resource.attributes:
                if attribute.key == "service.instance.id":
                    attribute.value.string_value = f"pod-{number:05d}-7f9c6d5b8-{number:05x}"
            for point in self._points:
                point.start_time_unix_nano = self.started
                point.time_unix_nano = now
                point.as_int = self.value
                for attribute in point.attributes:
                    if attribute.key == "gen_ai.request.model":
                        attribute.value.string_value = f"model-{number % MODELS}"
            body = self._request.SerializeToString()
            self.bytes_each = len(body)
            self._connection.request("POST", self._path, body, {"Content-Type": "application/x-protobuf"})
            answer = self._connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status

    def restart(self) -> None:
        self.started = time.time_ns()
        self.value = 0


def drive(way: str, child: Child, traffic: Traffic) -> Cost:
    time.sleep(2)
    idle_mb = child.memory_bytes() / 1e6
    traffic.round()  # births
    cpu = child.cpu_seconds()
    for _ in range(ROUNDS):
        began = time.monotonic()
        traffic.round()
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
    time.sleep(PACE_S + 1)
    cpu_ms = (child.cpu_seconds() - cpu) * 1e3
    memory_mb = child.memory_bytes() / 1e6
    traffic.restart()
    for _ in range(2):
        traffic.round()
        time.sleep(PACE_S)
    restarted_mb = child.memory_bytes() / 1e6
    exports = ROUNDS * traffic.replicas
    return Cost(
        way, traffic.replicas, traffic.series, traffic.bytes_each, cpu_ms / exports, idle_mb, memory_mb, restarted_mb
    )


def by_collector(folder: Path, replicas: int) -> Cost:
    with OtlpReceiver(grpc=False) as backend:
        # A backend that answers and forgets: its cost is not the collector's.
        with Collector(folder, backend.http_endpoint, window=f"{PACE_S:.0f}s") as collector:
            assert collector.child is not None
            traffic = Traffic(collector.http, replicas)
            cost = drive("collector", collector.child, traffic)
        backend.clear()
        return cost


def straight(folder: Path, replicas: int) -> Cost:
    rules = [COLLECTOR / "prometheus" / "rules" / "specdec.rules.yml"]
    with Prometheus(folder, rules, features=(), evaluation="30s") as prometheus:
        assert prometheus.child is not None
        cost = drive("prometheus", prometheus.child, Traffic(prometheus.otlp, replicas))
        groups = prometheus.api("rules")["groups"]
        cost.evaluation_ms = sum(group["evaluationTime"] for group in groups) * 1e3
        return cost


def main() -> int:
    sizes = [int(size) for size in sys.argv[1:]] or [10, 100, 1000]
    print("way         replicas  series  bytes/export  CPU ms/export  idle MB     MB  after restarts MB  rules ms")
    for size in sizes:
        for way in (by_collector, straight):
            with tempfile.TemporaryDirectory(prefix="cost-") as folder:
                cost = way(Path(folder), size)
            print(
                f"{cost.way:10} {cost.replicas:9} {cost.series:7} {cost.bytes_each:13} {cost.cpu_ms_each:14.2f}"
                f" {cost.idle_mb:8.0f} {cost.memory_mb:6.0f} {cost.restarted_mb:18.0f} {cost.evaluation_ms:9.0f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
