"""What the collector's gauges say, read from where it sends them."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from examples.vllm_demo.otlp_receiver import Point
from otel_specdec import names
from tests.collector.fleet import Truth

POOL = "specdec.pool."


@dataclass
class Window:
    """The gauges of one pool in one window, without `specdec.pool.`."""

    time: int
    service: str
    model: str
    source: str
    values: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Each quotient is its own numerator over its own denominator, and exists only where that is not zero."""
        for ratio in names.RATIOS:
            _is_quotient(self.values, ratio, f"numerator.{ratio}", f"denominator.{ratio}")
            _is_quotient(self.values, f"coverage.{ratio}", f"covered.{ratio}", "generations")
        assert all(value >= 0 and math.isfinite(value) for value in self.values.values()), self


def _is_quotient(values: Mapping[str, float], quotient: str, above: str, below: str) -> None:
    if values.get(below) and above in values:
        assert values[quotient] == values[above] / values[below], (quotient, values)
    else:
        assert quotient not in values, (quotient, values)


def windows(points: Iterable[Point]) -> list[Window]:
    """The gauges by window and pool, in order of time; a gauge that comes twice in a window fails."""
    found: dict[tuple[object, ...], Window] = {}
    for point in points:
        if not point.metric.startswith(POOL):
            continue
        assert point.kind == "gauge", point
        service = str(point.resource_attributes.get("service.name"))
        model, source = (str(point.attributes.get(key)) for key in (names.MODEL, names.SOURCE))
        key = (point.time_unix_nano, service, model, source, point.attributes.get("deployment.environment.name"))
        window = found.setdefault(key, Window(point.time_unix_nano, service, model, source))
        name = point.metric.removeprefix(POOL)
        assert name not in window.values, point
        window.values[name] = point.value
    return sorted(found.values(), key=lambda window: window.time)


def sums(found: Iterable[Window]) -> Truth:
    """Numerators, denominators, covered and generations over all windows."""
    total: Truth = Tally()
    for window in found:
        window.check()
        for name, value in window.values.items():
            if name.split(".")[0] in {"numerator", "denominator", "covered", "generations"}:
                total[window.model, window.source, name] += int(value)
                assert value == int(value), (name, value)
    return total
