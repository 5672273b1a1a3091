"""The instruments of one MeterProvider: the whole emitted surface, created once.

Called when a pool is made (never in an engine's step, never inside a collection: a callback holds the SDK's lock).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from otel_specdec import names
from otel_specdec.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Counter, MeterProvider, Observation


class Instruments:
    """One counter for each `names.Metric`, and the observable whose callback drains the pool into them."""

    def __init__(self, provider: MeterProvider, drain: Callable[[CallbackOptions], Iterable[Observation]]) -> None:
        meter = provider.get_meter(names.METER, __version__, schema_url=names.SCHEMA_URL)
        self.counters: dict[names.Metric, Counter] = {
            metric: meter.create_counter(metric.value, unit=metric.unit, description=metric.description)
            for metric in names.Metric
        }
        meter.create_observable_gauge(
            names.DRAIN,
            callbacks=[drain],
            description="Moves pending sums into the counters of this meter; observes nothing.",
        )
