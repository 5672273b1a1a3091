"""Counters as they arrive, summed over windows: what `watch` shows. It keeps sums and the latest generations alone.

Values come by OTLP (cumulative or delta) or from a Prometheus, each series from wherever it is by now; what counts is
its increase. A restart is seen by its start time (or, where there is none, by a value that falls): the new life counts
from 0, so nothing is ever negative. Everything is bounded: series, groups, seconds, generations.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from otel_specdec import names
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric
from otel_specdec.pooling import Pooled, pooled

WINDOWS: Final = {"1 min": 60, "5 min": 300}
"""Lengths in seconds."""
SINCE_START: Final = "since start"

MAX_SERIES: Final = 20_000
MAX_GROUPS: Final = 200
LATEST: Final = 8
"""Generations kept of each group."""

GROUPED_BY: Final = (names.SOURCE, names.PROVIDER, names.MODEL, names.METHOD)
BY_NAME: Final = {metric.value: metric for metric in Metric}
FIELDS: Final = {metric: field for field, metric in METRIC_OF_FIELD.items()}
_LONGEST: Final = max(WINDOWS.values())


class Observation(NamedTuple):
    """One value of one series.

    Attributes:
        series: what it belongs to over restarts: metric, resource and attributes. attributes: those of the point.
        value: tokens, steps, … start, time: Unix nanoseconds; a start of 0 is unknown. delta: whether the value is what
        came since the last one, not since the start.
    """

    metric: Metric
    series: Hashable
    attributes: Mapping[str, object]
    value: int
    start: int
    time: int
    delta: bool = False


class Named(NamedTuple):
    """An exemplar that names a generation: one counter's share of it."""

    metric: Metric
    series: Hashable
    attributes: Mapping[str, object]
    """Of the point."""
    response_id: str
    choice: str
    trace_id: str
    time_ms: int
    value: int


@dataclass
class Generation:
    """One generation, put together from the exemplars on its counters."""

    response_id: str
    choice: str
    trace_id: str
    time_ms: int
    shares: dict[tuple[Metric, Hashable], int] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """What it did since the export before its last one, by the fields of `SpecCounts`."""
        counts: Counter[str] = Counter()
        for (metric, _), value in self.shares.items():
            if metric in FIELDS:
                counts[FIELDS[metric]] += value
        return dict(counts)


class Group(NamedTuple):
    """What is shown of one model, method and source."""

    attributes: Mapping[str, object]
    windows: Mapping[str, Pooled]
    latest: list[Generation]
    """The newest first."""


class _Last(NamedTuple):
    start: int
    time: int
    value: int


Cell = tuple[Metric, str, int]  # metric, ratio set ("" where it has none), position (-1 where it has none)


class _Sums:
    """One group's sums: since the start, and second by second for the longest window."""

    def __init__(self) -> None:
        self.total: Counter[Cell] = Counter()
        self.seconds: deque[tuple[int, Counter[Cell]]] = deque()
        self.latest: dict[tuple[str, str, int], Generation] = {}

    def add(self, cell: Cell, value: int, second: int) -> None:
        """Add to the window's second; late ones, which a Prometheus may give, to the place where they belong."""
        for at, sums in reversed(self.seconds):
            if at == second:
                sums[cell] += value
                return
            if at < second:
                break
        position = next((i for i, (at, _) in enumerate(self.seconds) if at > second), len(self.seconds))
        self.seconds.insert(position, (second, Counter({cell: value})))

    def name(self, named: Named) -> None:
        key = named.response_id, named.choice, named.time_ms
        if key not in self.latest:
            self.latest[key] = Generation(named.response_id, named.choice, named.trace_id, named.time_ms)
            if len(self.latest) > LATEST:
                oldest = min(self.latest, key=lambda key: key[2])
                del self.latest[oldest]
                if oldest == key:
                    return
        self.latest[key].shares[named.metric, named.series] = named.value


class Windows:
    """Takes observations in, and gives groups out; from any thread.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._began = clock() * 1e9
        self._lock = threading.Lock()
        self._last: dict[Hashable, _Last] = {}
        self._groups: dict[tuple[object, ...], _Sums] = {}
        self.errors: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.refused = 0
        """Observations of series or groups beyond those that are kept."""
        self.last_arrival = 0.0
        """When something of ours arrived, in seconds since the epoch; 0 where nothing did."""

    def observe(
        self, observations: Iterable[Observation], named: Iterable[Named] = (), *, sampled: bool = False
    ) -> None:
        """Take values in, those of a series in the order of time.

        Args:
            observations: the values.
            named: exemplars that came with them.
            sampled: whether an increase belongs to the time of its value (a Prometheus tells of the past), not to now.
        """
        now = self._clock()
        with self._lock:
            for each in observations:
                self.last_arrival = now
                self._observe(each, int(each.time / 1e9 if sampled else now))
            for exemplar in named:
                sums = self._groups.get(_group(exemplar.attributes))
                if sums is not None:
                    sums.name(exemplar)

    def _observe(self, now: Observation, second: int) -> None:
        last = self._last.get(now.series)
        if last is None and len(self._last) >= MAX_SERIES:
            self.refused += 1
            return
        increase = _increase(last, now)
        if increase is None:
            return
        # At first sight what came before this watch is in no window.
        in_window = now.delta or last is not None or 0 < self._began <= now.start
        if now.metric in (Metric.ERRORS, Metric.DROPPED_REPORTS):
            kind, name = (
                (self.errors, names.ERROR_TYPE) if now.metric is Metric.ERRORS else (self.dropped, names.REASON)
            )
            kind[str(now.attributes.get(name, "unknown"))] += increase
        else:
            key = _group(now.attributes)
            sums = self._groups.get(key)
            if sums is None:
                if len(self._groups) >= MAX_GROUPS:
                    self.refused += 1
                    return
                sums = self._groups[key] = _Sums()
            position = str(now.attributes.get(names.POSITION, ""))
            ratio_set = str(now.attributes.get(names.RATIO_SET, ""))
            cell = now.metric, ratio_set, int(position) if position.isdecimal() else -1
            sums.total[cell] += increase
            if in_window:
                sums.add(cell, increase, second)
        self._last[now.series] = _Last(now.start, now.time, now.value)

    def groups(self) -> list[Group]:
        """Every group, in the order of its attributes; forgets what is older than the longest window."""
        now = self._clock()
        with self._lock:
            return [
                self._shown(key, sums, now)
                for key, sums in sorted(self._groups.items(), key=lambda item: repr(item[0]))
            ]

    def _shown(self, key: tuple[object, ...], sums: _Sums, now: float) -> Group:
        while sums.seconds and sums.seconds[0][0] < now - _LONGEST:
            sums.seconds.popleft()
        attributes = {name: value for name, value in zip(GROUPED_BY, key, strict=True) if value is not None}
        windows: dict[str, Pooled] = {}
        for title, seconds in WINDOWS.items():
            cells: Counter[Cell] = Counter()
            for at, counter in sums.seconds:
                if at >= now - seconds:
                    cells.update(counter)
            windows[title] = _pool(attributes, cells)
        windows[SINCE_START] = _pool(attributes, sums.total)
        return Group(attributes, windows, sorted(sums.latest.values(), key=lambda each: -each.time_ms))


def _group(attributes: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(attributes.get(name) for name in GROUPED_BY)


def _increase(last: _Last | None, now: Observation) -> int | None:
    """What came with this value; None where it is old: a repeat, a late one, one of an earlier life."""
    if now.delta:
        return None if last is not None and now.time <= last.time else now.value
    if last is None:
        return now.value
    if now.start < last.start or (now.start == last.start and now.time <= last.time):
        return None
    if now.start > last.start or now.value < last.value:
        return now.value  # a restart: this life began at 0
    return now.value - last.value


def _pool(attributes: Mapping[str, object], cells: Mapping[Cell, int]) -> Pooled:
    def points() -> Iterable[tuple[Metric, Mapping[str, object], int]]:
        for (metric, ratio_set, position), value in cells.items():
            yield metric, {names.RATIO_SET: ratio_set} if position < 0 else {names.POSITION: position}, value

    return pooled(attributes, points())
