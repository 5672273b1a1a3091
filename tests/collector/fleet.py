"""Simulated replicas: the real SDK and its real encoding, with clocks, restarts and repetitions at the test's will.

A replica is one process life after the other of one engine or recorder. Its counters are those of `otel_specdec.names`,
born at 0 as the package does it, collected by a reader of either temporality, encoded by the OTLP exporter's encoder.
Then the times are moved by the replica's clock error, and the bytes are posted, as often as wanted.
"""

from __future__ import annotations

import gzip
import logging
import time
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from otel_specdec import names
from otel_specdec.names import Metric
from tests.collector.processes import post

logging.getLogger("opentelemetry").setLevel(logging.ERROR)

ALL = frozenset(names.RATIOS)
COUNTS = {
    "accepted": Metric.ACCEPTED,
    "proposed": Metric.PROPOSED,
    "verify": Metric.VERIFY,
    "completion": Metric.COMPLETION,
    "emitted": Metric.EMITTED,
    "generations": Metric.GENERATIONS,
}

Key = tuple[str, str, str]
"""Model, source, and `numerator.accept_rate` and the like."""
Truth = Tally[Key]


@dataclass
class Replica:
    """One engine or recorder; `truth` is what every pool must add up to, over all its lives."""

    instance: str
    model: str = "m"
    service: str = "vllm"
    environment: str = ""
    provider: str = "vllm"
    method: str = "ngram"
    source: str = names.ENGINE
    version: str = "0.1.0"
    service_version: str = ""
    skew: float = 0.0
    delta: bool = False
    positions: int = 0
    truth: Truth = field(default_factory=Tally)
    sent: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, instance: str | None = None) -> None:
        """A new process, under the same instance id unless told otherwise; what was not exported is lost with it."""
        self.instance = instance or self.instance
        temporality = AggregationTemporality.DELTA if self.delta else AggregationTemporality.CUMULATIVE
        self._reader = InMemoryMetricReader(preferred_temporality={Counter: temporality})
        resource = {
            "service.name": self.service,
            "service.instance.id": self.instance,
            "deployment.environment.name": self.environment,
            "service.version": self.service_version,
        }
        self._provider = MeterProvider(
            [self._reader], resource=Resource({k: v for k, v in resource.items() if v}), shutdown_on_exit=False
        )
        meter = self._provider.get_meter(names.METER, self.version, schema_url=names.SCHEMA_URL)
        self._counters = {m: meter.create_counter(m.value, m.unit, m.description) for m in Metric}
        self._unsent: Truth = Tally()
        self.add(generations=0, accepted=0, proposed=0, verify=0, completion=0, emitted=0)
        for position in range(self.positions):
            self.add_position(position, 0, 0)
        # An export in the millisecond of its birth would have no start of its own; no process is that fast.
        time.sleep(0.002)

    @property
    def attributes(self) -> dict[str, str | int]:
        return {
            names.PROVIDER: self.provider,
            names.MODEL: self.model,
            names.METHOD: self.method,
            names.SOURCE: self.source,
            names.ENGINE_INDEX: 0,
            names.PROCESS: "engine-0" if self.source == names.ENGINE else f"recorder-{self.instance}",
        }

    def add(self, holding: Iterable[str] = ALL, **counts: int) -> None:
        """Count an increment that may enter the ratios `holding`."""
        ratios = frozenset(holding)
        for name, value in counts.items():
            metric = COUNTS[name]
            ratio_set = names.ratio_set(metric, ratios)
            self._counters[metric].add(value, {**self.attributes, names.RATIO_SET: ratio_set})
            if metric is Metric.GENERATIONS:
                self._unsent[self.model, self.source, "generations"] += value
            for ratio in () if ratio_set == names.NONE else ratio_set.split(","):
                above, _ = names.RATIOS[ratio]
                half = "numerator" if metric is above else "denominator"
                name = f"{'covered' if metric is Metric.GENERATIONS else half}.{ratio}"
                self._unsent[self.model, self.source, name] += value

    def add_position(self, position: int, accepted: int, proposed: int) -> None:
        for metric, value in ((Metric.POSITION_ACCEPTED, accepted), (Metric.POSITION_PROPOSED, proposed)):
            self._counters[metric].add(value, {**self.attributes, names.POSITION: position})

    def collect(self) -> bytes:
        """The next export; from here on its increments are owed by everything downstream."""
        data = self._reader.get_metrics_data()  # None: a reader of deltas had nothing new
        request = encode_metrics(data) if data is not None else ExportMetricsServiceRequest()
        if self.skew:
            _move(request, int(self.skew * 1e9))
        self.truth.update(self._unsent)
        self._unsent.clear()
        self.sent.append(request.SerializeToString())
        return self.sent[-1]

    def export(self, endpoint: str) -> None:
        """Collect and post; the receiver must take it."""
        send(endpoint, self.collect())

    def repeat(self, endpoint: str, back: int = 1) -> None:
        """Post an earlier export once more, as an exporter does that had no answer in time."""
        send(endpoint, self.sent[-min(back, len(self.sent))])


def send(endpoint: str, body: bytes) -> None:
    """Post an export to an OTLP/HTTP base."""
    status = post(f"{endpoint}/v1/metrics", gzip.compress(body, 1), {"Content-Encoding": "gzip"})
    assert status == 200, status


def truth_of(replicas: Sequence[Replica]) -> Truth:
    """What all of them together have exported."""
    total: Truth = Tally()
    for replica in replicas:
        total.update(replica.truth)
    return total


def non_zero(truth: Mapping[Key, int | float]) -> dict[Key, int | float]:
    return {key: value for key, value in truth.items() if value}


def _move(request: ExportMetricsServiceRequest, nanoseconds: int) -> None:
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                for point in metric.sum.data_points:
                    point.start_time_unix_nano += nanoseconds
                    point.time_unix_nano += nanoseconds
