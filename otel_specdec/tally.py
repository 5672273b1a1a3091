"""What recorded generations add, added up: few rows, however many reports, and then the series that they go to.

Not thread-safe; a recorder makes one for each call. An increment costs about a microsecond, the series some ten
microseconds for each distinct set of point attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import attrgetter
from typing import Final

from otel_specdec import names
from otel_specdec.counts import COUNT_FIELDS, LONGEST_LABEL, METRIC_OF_FIELD, GenerationReport, carried
from otel_specdec.generations import Addition
from otel_specdec.names import Metric
from otel_specdec.sums import AttributeValue, Series

Attributes = tuple[str | None, str | None, str | None, int | None]
"""What a report says of its points: provider, model, method, engine index."""

Holding = frozenset[str]
"""The ratios that an increment may enter."""

_NO_COUNTS: Final = (None,) * len(COUNT_FIELDS)

_attributes_of: Final[Callable[[GenerationReport], Attributes]] = attrgetter(
    "provider", "model", "method", "engine_index"
)


class Tally:
    """Sums over additions and dropped reports.

    Attributes:
        counts: for each set of attributes and ratios the sums by `COUNT_FIELDS`; None where nobody knew the count.
        generations: finished generations by attributes and by the ratios that held in every one of their increments.
        positions: accepted and proposed tokens by draft position, for each set of attributes.
        dropped: reports that were not counted, by reason.
    """

    __slots__ = ("counts", "dropped", "generations", "positions")

    def __init__(self) -> None:
        self.counts: dict[tuple[Attributes, Holding], list[int | None]] = {}
        self.generations: Counter[tuple[Attributes, Holding]] = Counter()
        self.positions: dict[Attributes, tuple[Counter[int], Counter[int]]] = {}
        self.dropped: Counter[str] = Counter()

    def add(self, addition: Addition) -> None:
        """Add what a report adds."""
        attributes = _attributes_of(addition.report)
        key = (attributes, addition.holding)
        row = self.counts.get(key)
        if row is None:
            row = self.counts[key] = list(_NO_COUNTS)
        for i, value in enumerate(addition.counts):
            if value is not None:
                row[i] = (row[i] or 0) + value
        if addition.covered is not None:
            self.generations[attributes, addition.covered] += 1
        if addition.positions is not None:
            halves = self.positions.setdefault(attributes, (Counter(), Counter()))
            for half, values in zip(halves, addition.positions, strict=True):
                for position, value in enumerate(values[: names.MAX_POSITIONS]):
                    half[position] += value

    def sums(self, process: str) -> Iterator[tuple[Series, int]]:
        """The sums by series, of counters that are of source `response`; `process` is the value of `names.PROCESS`."""
        for (told, holding), row in self.counts.items():
            attributes = _labels(told)
            for field, value in zip(COUNT_FIELDS, row, strict=True):
                if value is not None:
                    yield _series(METRIC_OF_FIELD[field], attributes, holding, process), value
        for (attributes, covered), number in self.generations.items():
            yield _series(Metric.GENERATIONS, _labels(attributes), covered, process), number
        for attributes, halves in self.positions.items():
            point = _point(_labels(attributes), process)
            for metric, half in zip((Metric.POSITION_ACCEPTED, Metric.POSITION_PROPOSED), halves, strict=True):
                for position, value in half.items():
                    yield Series.of(metric, {**point, names.POSITION: position}), value
        for reason, number in self.dropped.items():
            point = {names.REASON: reason, names.SOURCE: names.RESPONSE, names.PROCESS: process}
            yield Series.of(Metric.DROPPED_REPORTS, point), number


def _labels(attributes: Attributes) -> Attributes:
    """What can be a label of these; what cannot is unknown."""
    *texts, engine_index = attributes
    provider, model, method = (carried(text, LONGEST_LABEL) for text in texts)
    return provider, model, method, engine_index


def _point(attributes: Attributes, process: str) -> dict[str, AttributeValue | None]:
    provider, model, method, engine_index = attributes
    return {
        names.PROVIDER: provider,
        names.MODEL: model,
        names.METHOD: method,
        names.SOURCE: names.RESPONSE,
        names.ENGINE_INDEX: engine_index,
        names.PROCESS: process,
    }


@lru_cache(maxsize=2048)  # a recorder asks for the same few for every report
def _series(metric: Metric, attributes: Attributes, holding: Holding, process: str) -> Series:
    return Series.of(metric, {**_point(attributes, process), names.RATIO_SET: names.ratio_set(metric, holding)})
