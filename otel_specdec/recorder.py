"""Counts from responses, each generation once: for those who do not own the engine's process.

Runs wherever the application calls it, from any thread; a call takes one lock and touches no exporter. Sums go to the
pool of the MeterProvider and reach the counters at the next collection.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from otel_specdec import names
from otel_specdec.counts import (
    ALL_RATIOS,
    COUNT_FIELDS,
    METRIC_OF_FIELD,
    GenerationReport,
    SpecCounts,
    ratios_holding,
)
from otel_specdec.sums import AttributeValue, Series, pool_for

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider

logger = logging.getLogger("otel_specdec")

REMEMBERED: Final = 65_536
"""Finished generations that a recorder remembers, and running ones, unless told otherwise."""

Identity = tuple[str | None, str]


class _Running:
    """What is known of a generation that has not finished."""

    __slots__ = ("accepted_by_position", "added", "holding", "known", "proposed_by_position")

    def __init__(self) -> None:
        # By COUNT_FIELDS: what the counters already have (None: never reported), and whether the last report knew it.
        self.added: list[int | None] = [None] * len(COUNT_FIELDS)
        self.known = [True] * len(COUNT_FIELDS)  # a generation starts at known zeros
        self.holding = ALL_RATIOS  # the ratios that held in every increment so far
        self.accepted_by_position: Sequence[int] = ()
        self.proposed_by_position: Sequence[int] = ()


class SpecDecRecorder:
    """Adds each generation's counts to the counters exactly once, under `specdec.source` = `response`.

    Reports are cumulative per `(session_id, generation_id)`; what is added is the difference from what that identity has
    already added. The same final report again is dropped as a duplicate, a contradicting one as a conflict
    (`specdec.dropped_reports`, by `specdec.reason`); what was added stays. Thread-safe.

    Args:
        meter_provider: the MeterProvider to count into; default: the global one. Without an SDK nothing is emitted.
        speculation: whether the engine speculates. True: generations without any draft counter are counted too, under
            ratio set `none`, so that coverage shows them. None (not known): they add nothing. False: nothing is emitted.
        remembered: how many finished generations are remembered to find duplicates, and how many running ones at most
            (each > 0). A report for a finished generation that has fallen out of this window counts anew.

    Raises:
        ValueError: `remembered` is not positive.
    """

    def __init__(
        self,
        meter_provider: MeterProvider | None = None,
        *,
        speculation: bool | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        if remembered < 1:
            raise ValueError(f"remembered must be at least 1, not {remembered}")
        self._pool = pool_for(meter_provider)
        self._speculation = speculation
        self._remembered = remembered
        self._lock = threading.Lock()
        self._running: OrderedDict[Identity, _Running] = OrderedDict()
        # The final report's counts, and the last known ones, which differ where the final report knew less.
        self._finished: OrderedDict[Identity, tuple[SpecCounts, SpecCounts]] = OrderedDict()
        self._logged: set[str] = set()
        _recorders.add(self)

    def record(self, report: GenerationReport) -> None:
        """Count one report of one generation. It never raises for what a report says; see the class for what it does.

        Anything that is not a `GenerationReport` is dropped, counted as `invalid` and logged once.
        """
        with self._lock:
            increments = self._increments(report) if isinstance(report, GenerationReport) else self._invalid(report)
            if increments:
                self._pool.add(increments)

    def _invalid(self, report: object) -> list[tuple[Series, int]]:
        self._log_once(
            names.INVALID,
            "otel_specdec: record() takes a GenerationReport, not %s; it was dropped. Shown once; %s counts them.",
            type(report).__name__,
            names.Metric.DROPPED_REPORTS.value,
        )
        # Where nothing speculates there is not one point, this one included.
        return [] if self._speculation is False else [(self._dropped(names.INVALID), 1)]

    def _increments(self, report: GenerationReport) -> list[tuple[Series, int]]:
        if self._speculation is False:
            if report.counts.accepted or report.counts.proposed or report.counts.verify:
                self._log_once(
                    "speculation",
                    "otel_specdec: a report has draft counters, but this recorder was made with speculation=False, "
                    "so nothing is counted. Leave the argument out, or give True.",
                )
            return []
        identity = (report.session_id, report.generation_id)
        if identity in self._finished:
            return self._after_finish(identity, report)
        running = self._running.get(identity)
        if running is None:
            if not report.counts.knows_drafts and not self._speculation:
                return []
            running = _Running()
        counts = [getattr(report.counts, field) for field in COUNT_FIELDS]
        higher = any(new is not None and new > (old or 0) for new, old in zip(counts, running.added))
        lower = any(new is not None and new < (old or 0) for new, old in zip(counts, running.added))
        if not report.finished and not higher:
            return []  # late
        if lower:
            return self._conflict(identity)
        if report.counts.completion == 0:
            return []  # ended, or stands, before its first token: no generation (yet)
        increments = self._advance(running, report, counts)
        if report.finished:
            increments.append((self._series(report, names.Metric.GENERATIONS, running.holding), 1))
            self._running.pop(identity, None)
            known = SpecCounts(*running.added)
            self._finished[identity] = (report.counts, report.counts if known == report.counts else known)
            if len(self._finished) > self._remembered:
                self._finished.popitem(last=False)
        else:
            self._running[identity] = running
            self._running.move_to_end(identity)
            if len(self._running) > self._remembered:
                self._running.popitem(last=False)
                self._log_once(
                    "running",
                    f"otel_specdec: more than {self._remembered} generations are running at once; the one that was silent "
                    "longest is forgotten, and counts anew if it reports again. Raise `remembered`.",
                )
        return increments

    def _after_finish(self, identity: Identity, report: GenerationReport) -> list[tuple[Series, int]]:
        final, known = self._finished[identity]
        if report.finished:
            if report.counts == final:
                return [(self._dropped(names.DUPLICATE), 1)]
            return self._conflict(identity)
        for field in COUNT_FIELDS:
            new, old = getattr(report.counts, field), getattr(known, field)
            if new is not None and old is not None and new > old:
                return self._conflict(identity)
        return []  # late

    def _conflict(self, identity: Identity) -> list[tuple[Series, int]]:
        self._log_once(
            names.CONFLICT,
            "otel_specdec: a report of generation %r contradicts an earlier one of the same session and id; it was "
            "dropped, the counts of the earlier stay. Ids that come back with other generations need a session_id. "
            "Shown once; %s counts them.",
            identity[1][:200],
            names.Metric.DROPPED_REPORTS.value,
        )
        return [(self._dropped(names.CONFLICT), 1)]

    def _advance(
        self, running: _Running, report: GenerationReport, counts: list[int | None]
    ) -> list[tuple[Series, int]]:
        """Move `running` on to what `report` says, and return what that adds."""
        differences = [None if new is None else new - (old or 0) for new, old in zip(counts, running.added)]
        # A half of a ratio counts only where it was known at both ends of the increment.
        increment = SpecCounts(
            *(diff if known else None for diff, known in zip(differences, running.known))
        )
        holding = ratios_holding(increment)
        running.holding &= holding
        added = [
            (self._series(report, METRIC_OF_FIELD[field], holding), diff)
            for field, diff in zip(COUNT_FIELDS, differences)
            if diff is not None
        ]
        running.added = [old if new is None else new for new, old in zip(counts, running.added)]
        running.known = [new is not None for new in counts]
        added += self._positions(running, report)
        return added

    def _positions(self, running: _Running, report: GenerationReport) -> list[tuple[Series, int]]:
        """What the positions add since they were last known and consistent, both halves together or neither."""
        accepted, proposed = report.accepted_by_position, report.proposed_by_position
        if accepted is None or proposed is None:
            return []
        differences = []
        for metric, new, old in (
            (names.Metric.POSITION_ACCEPTED, accepted, running.accepted_by_position),
            (names.Metric.POSITION_PROPOSED, proposed, running.proposed_by_position),
        ):
            differences.append([count - (old[i] if i < len(old) else 0) for i, count in enumerate(new)])
        consistent = len(accepted) == len(proposed) and len(accepted) >= len(running.accepted_by_position)
        if not consistent or any(not 0 <= a <= p for a, p in zip(*differences)):
            return []
        running.accepted_by_position, running.proposed_by_position = accepted, proposed
        attributes = self._attributes(report)
        return [
            (Series.of(metric, {**attributes, names.POSITION: position}), value)
            for metric, values in zip((names.Metric.POSITION_ACCEPTED, names.Metric.POSITION_PROPOSED), differences)
            for position, value in enumerate(values[: names.MAX_POSITIONS])
        ]

    def _attributes(self, report: GenerationReport) -> dict[str, AttributeValue | None]:
        return {
            names.PROVIDER: report.provider,
            names.MODEL: report.model,
            names.METHOD: report.method,
            names.SOURCE: names.RESPONSE,
            names.ENGINE_INDEX: report.engine_index,
            names.PROCESS: self._pool.recorder_process,
        }

    def _series(self, report: GenerationReport, metric: names.Metric, holding: frozenset[str]) -> Series:
        return Series.of(metric, {**self._attributes(report), names.RATIO_SET: names.ratio_set(metric, holding)})

    def _dropped(self, reason: str) -> Series:
        return Series.of(
            names.Metric.DROPPED_REPORTS,
            {
                names.REASON: reason,
                names.SOURCE: names.RESPONSE,
                names.PROCESS: self._pool.recorder_process,
            },
        )

    def _log_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(message, *args)


_recorders: weakref.WeakSet[SpecDecRecorder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for recorder in list(_recorders):
        recorder._lock = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
