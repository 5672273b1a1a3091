"""A MeterProvider of the real SDK with an in-memory reader, and what its collections hold, in a form to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.metrics import Counter as CounterInstrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from otel_specdec import Pooled, pool
from otel_specdec.counts import COUNT_FIELDS

# Spelled as in the contract and not taken from the package, so that a changed name is seen.
FIELD_OF_METRIC = {
    "specdec.accepted_tokens": "accepted",
    "specdec.proposed_tokens": "proposed",
    "specdec.verify_steps": "verify",
    "specdec.completion_tokens": "completion",
    "specdec.emitted_tokens": "emitted",
    "specdec.generations": "generations",
}
ACCEPTED_AT = "specdec.position.accepted_tokens"
PROPOSED_AT = "specdec.position.proposed_tokens"
DROPPED = "specdec.dropped_reports"
ERRORS = "specdec.instrumentation.errors"


@dataclass(frozen=True)
class Point:
    """One point of a sum."""

    name: str
    attributes: dict[str, Any]
    value: int
    start: int
    time: int
    exemplars: tuple[Any, ...]

    @property
    def series(self) -> tuple[str, frozenset[tuple[str, Any]]]:
        return self.name, frozenset(self.attributes.items())


def points(data: Any) -> list[Point]:
    return [
        Point(
            metric.name,
            dict(point.attributes or {}),
            point.value,
            point.start_time_unix_nano,
            point.time_unix_nano,
            tuple(point.exemplars),
        )
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    ]


class Meter:
    """A provider with one in-memory reader. Every look at it is a collection."""

    def __init__(self, *, delta: bool = False, resource: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.reader = in_memory_reader(delta=delta)
        # Not Resource.create(), which in newer SDKs finds an instance id of its own.
        self.provider = MeterProvider([self.reader], Resource(dict(resource or {})), shutdown_on_exit=False, **settings)

    def points(self, *metrics: str) -> list[Point]:
        found = points(self.reader.get_metrics_data())
        return [point for point in found if not metrics or point.name in metrics]

    def totals(self) -> dict[str, int]:
        return totals(self.points())

    def sets(self) -> dict[tuple[str, str], int]:
        """Totals by field of `SpecCounts` (or `generations`) and ratio set."""
        found: Counter[tuple[str, str]] = Counter()
        for point in self.points(*FIELD_OF_METRIC):
            found[FIELD_OF_METRIC[point.name], point.attributes["specdec.ratio_set"]] += point.value
        return dict(found)

    def at_positions(self) -> tuple[list[int], list[int]]:
        """Accepted and proposed tokens by draft position, from 0 up."""
        found = self.points(ACCEPTED_AT, PROPOSED_AT)
        return by_position(found, ACCEPTED_AT), by_position(found, PROPOSED_AT)

    def dropped(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for point in self.points(DROPPED):
            found[point.attributes["specdec.reason"]] += point.value
        return dict(found)

    def errors(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        for point in self.points(ERRORS):
            found[point.attributes["error.type"]] += point.value
        return dict(found)

    def pooled(self, by: Iterable[str] = ()) -> Pooled:
        """The one group that there is."""
        (group,) = pool(self.reader.get_metrics_data(), by)
        return group


def in_memory_reader(*, delta: bool) -> InMemoryMetricReader:
    temporality = AggregationTemporality.DELTA if delta else AggregationTemporality.CUMULATIVE
    return InMemoryMetricReader(preferred_temporality={CounterInstrument: temporality})


def totals(found: Iterable[Point]) -> dict[str, int]:
    """Sums over all attribute sets, by field of `SpecCounts` and `generations`; a counter without points is absent."""
    sums: Counter[str] = Counter()
    for point in found:
        if point.name in FIELD_OF_METRIC:
            sums[FIELD_OF_METRIC[point.name]] += point.value
    return dict(sums)


def by_position(found: Iterable[Point], metric: str) -> list[int]:
    sums: Counter[int] = Counter()
    for point in found:
        if point.name == metric:
            sums[point.attributes["specdec.position"]] += point.value
    return [sums[position] for position in range(len(sums))]


def counted(**values: int) -> dict[str, int]:
    """Totals with 0 for what is not named."""
    return dict.fromkeys((*COUNT_FIELDS, "generations"), 0) | values
