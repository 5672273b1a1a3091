"""Ratios and coverage from an in-memory collection: what the recording rules do, for tests and notebooks.

Pure; reads the SDK's `MetricsData` by its attributes and imports no SDK.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from otel_specdec import names
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric


@dataclass(frozen=True, slots=True)
class Pooled:
    """Sums over all points of one group, and the quotients of sums.

    Attributes:
        attributes: what the group was made by; always has `specdec.source`, but for the one group of what did not fit
            into a counter's 2,000 attribute sets (`otel.metric.overflow`).
        totals: every known value, by the fields of `SpecCounts` (tokens, steps); a counter without points is absent.
        generations: finished generations.
        ratios: `acceptance_length` (≥ 0, tokens per step), `accept_rate` (0 … 1), `tokens_per_verify` (≥ 0, tokens per
            step), each over the points that may enter it; absent where its denominator is zero.
        coverage: for each ratio the share of generations that have it (0 … 1); empty where no generation finished.
        accept_rate_by_position: by draft position, accepted / proposed (0 … 1), for positions with proposed tokens.
        acceptance_length_by_k: by k ≥ 1, what drafts of at most k tokens would have given (≥ 1, tokens per step, before
            trimming at the end of a generation): 1 + accepted tokens of positions below k, for each step that proposed
            position 0. Only for a k that was really proposed.
    """

    attributes: Mapping[str, object]
    totals: Mapping[str, int]
    generations: int
    ratios: Mapping[str, float]
    coverage: Mapping[str, float]
    accept_rate_by_position: Mapping[int, float]
    acceptance_length_by_k: Mapping[int, float]


def pool(metrics_data: Any, by: str | Iterable[str] = ()) -> list[Pooled]:
    """Pool the counters of an in-memory collection.

    Args:
        metrics_data: what `InMemoryMetricReader.get_metrics_data()` returned; None, as it returns for nothing, is
            empty.
        by: a name, or names, of point attributes (or resource attributes) to group by, for example
            `gen_ai.request.model`. Groups are always split by `specdec.source` too: an engine and a recorder may count
            the same generation.

    Returns:
        One `Pooled` for each group that has points, in the order of its attribute values.
    """
    by = (by,) if isinstance(by, str) else by
    keys = (names.SOURCE, *(key for key in by if key != names.SOURCE))
    groups: dict[tuple[object, ...], list[tuple[Metric, Mapping[str, Any], int]]] = {}
    for metric, resource, attributes, value in _points(metrics_data):
        group = tuple(attributes.get(key, resource.get(key)) for key in keys)
        groups.setdefault(group, []).append((metric, attributes, value))
    return [
        pooled({k: v for k, v in zip(keys, group, strict=True) if v is not None}, points)
        for group, points in sorted(groups.items(), key=lambda item: tuple(map(repr, item[0])))
    ]


def _points(metrics_data: Any) -> Iterator[tuple[Metric, Mapping[str, Any], Mapping[str, Any], int]]:
    counted = {*METRIC_OF_FIELD.values(), Metric.GENERATIONS, Metric.POSITION_ACCEPTED, Metric.POSITION_PROPOSED}
    known = {metric.value: metric for metric in counted}
    for resource_metrics in getattr(metrics_data, "resource_metrics", ()):
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                if metric.name in known:
                    for point in metric.data.data_points:
                        resource = resource_metrics.resource.attributes
                        yield known[metric.name], resource, point.attributes or {}, point.value


def pooled(group: Mapping[str, object], points: Iterable[tuple[Metric, Mapping[str, Any], int]]) -> Pooled:
    """Pool the points of one group: metric, attributes (of which ratio set and position are read), value."""
    totals: Counter[Metric] = Counter()
    entering: Counter[tuple[Metric, str]] = Counter()
    positions: Counter[tuple[Metric, int]] = Counter()
    for metric, attributes, value in points:
        totals[metric] += value
        for ratio in str(attributes.get(names.RATIO_SET, names.NONE)).split(","):
            entering[metric, ratio] += value
        if names.POSITION in attributes:
            positions[metric, attributes[names.POSITION]] += value
    generations = totals[Metric.GENERATIONS]
    proposed = {p: n for (metric, p), n in sorted(positions.items()) if metric is Metric.POSITION_PROPOSED and n}
    return Pooled(
        attributes=group,
        totals={field: totals[metric] for field, metric in METRIC_OF_FIELD.items() if metric in totals},
        generations=generations,
        ratios={
            ratio: entering[above, ratio] / below_sum
            for ratio, (above, below) in names.RATIOS.items()
            if (below_sum := entering[below, ratio])
        },
        coverage={r: entering[Metric.GENERATIONS, r] / generations for r in names.RATIOS} if generations else {},
        accept_rate_by_position={p: positions[Metric.POSITION_ACCEPTED, p] / n for p, n in proposed.items()},
        acceptance_length_by_k={
            p + 1: 1 + sum(positions[Metric.POSITION_ACCEPTED, below] for below in range(p + 1)) / proposed[0]
            for p in proposed
            if 0 in proposed
        },
    )
