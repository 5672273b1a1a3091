"""Counts from responses, each generation once: for those who do not own the engine's process.

Runs wherever the application calls it, from any thread; a call takes one lock and touches no exporter. Sums go to the
pool of the MeterProvider and reach the counters at the next collection.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from otel_specdec import names, payloads
from otel_specdec.batches import BatchSummary, Identity, Outcome, Summing, identity_of, judge, take_all
from otel_specdec.counts import GenerationReport
from otel_specdec.generations import Finished, Running
from otel_specdec.recorded import RecordedSums, Told
from otel_specdec.sums import pool_for
from otel_specdec.tally import Tally

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider

logger = logging.getLogger("otel_specdec")

REMEMBERED: Final = 65_536
"""Finished generations that a recorder remembers, and running ones, unless told otherwise."""


class SpecDecRecorder:
    """Adds each generation's counts to the counters exactly once, under `specdec.source` = `response`.

    Reports are cumulative per `(session_id, generation_id)`; what is added is the difference from what that identity
    has already added. The same final report again is dropped as a duplicate, a contradicting one as a conflict
    (`specdec.dropped_reports`, by `specdec.reason`); what was added stays. Thread-safe.

    Args:
        meter_provider: the MeterProvider to count into; default: the global one. Without an SDK nothing is emitted.
        speculation: whether the engine speculates. True: generations without any draft counter are counted too, under
            ratio set `none`, so that coverage shows them. None (not known): they add nothing. False: nothing is
            emitted.
        remembered: how many finished generations are remembered to find duplicates, and how many running ones at most
            (each > 0; up to 1/64 more). A report for a generation that has fallen out of this window counts anew. A
            finished one takes some 200 bytes whatever its ids are like, 13 MiB for the default.

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
        from otel_specdec.windows import Window, digest_of  # OpenSSL comes with it, which an engine's process is spared

        self._sums = RecordedSums(pool_for(meter_provider), self)
        self._speculation = speculation
        self._remembered = remembered
        self._lock = threading.Lock()
        self._digest_of = digest_of
        self._running = Window(remembered)
        self._finished = Window(remembered)
        self._logged: set[str] = set()
        _recorders.add(self)

    def record(self, report: GenerationReport) -> None:
        """Count one report of one generation. It never raises for what a report says; see the class for what it does.

        Anything that is not a `GenerationReport` is dropped, counted as `invalid` and logged once.
        """
        if not isinstance(report, GenerationReport):
            self._drop_invalid([report])
        elif not self._is_off([report]):
            tally = Tally()
            with self._lock:
                identity = identity_of(report)
                told = self._take_up(identity, self._digest_of(identity), [report], 1, tally)
                self._sums.add(tally, [told])

    def record_payload(
        self,
        payload: object,
        *,
        session_id: str | None = None,
        generation_id: str | None = None,
        sample_id: str | None = None,
        model: str | None = None,
        provider: str | None = None,
        method: str | None = None,
        engine_index: int | None = None,
        context: Context | None = None,
    ) -> list[GenerationReport]:
        """Count what a response says: `reports_from_payload`, then `record`. It never raises for what a payload says.

        A payload that is no response, has counters but no id, or has names like those of speculative decoding but its
        accepted and proposed tokens under none that is known (an engine has renamed them) is counted under
        `specdec.dropped_reports`, `specdec.reason` = `invalid`, and logged once; what can be read of it is counted all
        the same. Of a streamed response hand over what `StreamedResponse` has put together, once.

        Args:
            payload: as for `reports_from_payload`.
            session_id: the session, rollout step or batch in which the response's id is unique.
            generation_id: instead of the response's id, or where it has none.
            sample_id: the training sample that the generation belongs to.
            model: instead of the payload's; it should be the name in the engine's own metrics, which is not always the
                one that the client asked for.
            provider: the engine, instead of the one that the payload's names tell.
            method: the drafting method, which no payload says.
            engine_index: data-parallel rank, instead of the payload's.
            context: the OpenTelemetry context of the request.

        Returns:
            The reports that were read of it, whether or not they added anything.

        Raises:
            TypeError, ValueError: an argument other than `payload` has the wrong type or range.
        """
        payloads.check_texts(session_id=session_id, generation_id=generation_id)
        given: dict[str, Any] = {
            "sample_id": sample_id,
            "model": model,
            "provider": provider,
            "method": method,
            "engine_index": engine_index,
            "context": context,
        }
        given = {name: value for name, value in given.items() if value is not None}
        found = payloads.read_safely(payload, session_id=session_id, generation_id=generation_id)
        reports = [replace(report, **given) for report in found.reports]
        for report in reports:
            self.record(report)
        if problem := found.problem or found.unidentified:
            payloads.warn_of(problem)
            self._count_invalid(1)
        return reports

    def record_batch(self, reports: Iterable[GenerationReport], *, dedupe: str = "window") -> BatchSummary:
        """Count a whole batch, each generation once, and say what is in it. It never raises for what a report says.

        Duplicates and conflicts are found before anything is counted, so the order within the batch does not matter,
        and a generation whose reports contradict each other is left out whole.

        Args:
            reports: the batch; a generation that several trajectories share may come with each of them. Anything that
                is not a `GenerationReport` is dropped as `invalid`.
            dedupe: `window` also finds generations that an earlier call counted, the last `remembered` ones: their
                reports are duplicates or in conflict, and what was counted stays. `batch` knows this batch alone and
                remembers nothing of it, for ids that are unique within one batch only, such as an index; a batch that
                is handed over twice counts twice then.

        Returns:
            The summary of this batch alone, whatever was recorded before it.

        Raises:
            ValueError: `dedupe` is neither of the two.
        """
        if dedupe not in ("window", "batch"):
            raise ValueError(f"dedupe must be 'window' or 'batch', not {dedupe!r}")
        handed = list(reports)
        batch = [report for report in handed if isinstance(report, GenerationReport)]
        if len(batch) < len(handed):
            self._drop_invalid([report for report in handed if not isinstance(report, GenerationReport)])
        summing, tally = Summing(), Tally()
        if self._is_off(batch):
            return summing.summary(len(batch))
        counted: list[Told] = []
        came_back: list[str] = []
        with self._lock:
            for told in judge(batch, speculation=self._speculation):
                summing.add(told)
                if told.outcome is None:
                    self._conflict(told.identity, told.number, tally)
                    continue
                digest = self._digest_of(told.identity) if dedupe == "window" else None
                if digest is not None and (digest in self._finished or digest in self._running):
                    came_back.append(told.identity[1])
                    counted.append(self._take_up(told.identity, digest, told.reports, told.number, tally))
                else:
                    _add(told.outcome, tally)
                    counted.append(Told(told.identity, True, told.outcome.additions))
                    if digest is not None:
                        self._remember(digest, told.outcome)
            self._sums.add(tally, counted)
        self._warn_of_indices(came_back, len(counted))
        return summing.summary(len(batch))

    # Under the lock

    def _take_up(
        self, identity: Identity, digest: bytes, reports: Sequence[GenerationReport], number: int, tally: Tally
    ) -> Told:
        """Add what a generation's reports, in this order, add to what is remembered of it: all of them, or none."""
        state: Running | Finished
        new = False
        if (finished := self._finished.get(digest)) is not None:
            state = Finished.unpacked(finished)
        elif (running := self._running.get(digest)) is not None:
            state = Running.unpacked(running)
        else:
            state, new = Running(), True
        outcome = take_all(state, reports, speculation=self._speculation)
        if outcome is None:
            self._conflict(identity, number, tally)
            return Told(identity, False, ())
        _add(outcome, tally)
        self._remember(digest, outcome)
        return Told(identity, new, outcome.additions)

    def _remember(self, digest: bytes, outcome: Outcome) -> None:
        if not outcome.additions:
            return
        if isinstance(outcome.state, Finished):
            self._running.forget(digest)
            self._finished.put(digest, outcome.state.packed())
        elif self._running.put(digest, outcome.state.packed()):
            self._log_once(
                "running",
                "otel_specdec: more than %d generations are running at once; the one that was silent longest is "
                "forgotten, and counts anew if it reports again. Raise `remembered`.",
                self._remembered,
            )

    def _conflict(self, identity: Identity, number: int, tally: Tally) -> None:
        tally.dropped[names.CONFLICT] += number
        self._log_once(
            names.CONFLICT,
            "otel_specdec: reports of generation %r contradict each other; they were dropped, and what an earlier call "
            "had counted stays. Ids that come back with other generations need a session_id. Shown once; %s counts "
            "them.",
            identity[1][:200],
            names.Metric.DROPPED_REPORTS.value,
        )

    # Anywhere

    def _is_off(self, reports: Sequence[GenerationReport]) -> bool:
        """Whether nothing is counted at all, because nothing speculates."""
        if self._speculation is not False:
            return False
        if any(report.counts.accepted or report.counts.proposed or report.counts.verify for report in reports):
            self._log_once(
                "speculation",
                "otel_specdec: a report has draft counters, but this recorder was made with speculation=False, "
                "so nothing is counted. Leave the argument out, or give True.",
            )
        return True

    def _drop_invalid(self, reports: Sequence[object]) -> None:
        self._log_once(
            names.INVALID,
            "otel_specdec: a recorder takes GenerationReports, not %s; it was dropped. Shown once; %s counts them.",
            type(reports[0]).__name__,
            names.Metric.DROPPED_REPORTS.value,
        )
        self._count_invalid(len(reports))

    def _count_invalid(self, number: int) -> None:
        if self._speculation is not False:  # where nothing speculates there is not one point, this one included
            tally = Tally()
            tally.dropped[names.INVALID] += number
            self._sums.add(tally)

    def _warn_of_indices(self, came_back: Sequence[str], of: int) -> None:
        """Say so once if most of a batch's generations are told by an index, and were counted by an earlier call."""
        indices = [each for each in came_back if len(each) <= 6 and each.isdecimal()]
        if 2 * len(indices) > of:
            self._log_once(
                "indices",
                "otel_specdec: generation ids that look like indices (%r) came back with another batch, where they are "
                "taken for the same generations. Give each batch a session_id of its own (the rollout step), or "
                "record_batch(..., dedupe='batch') where ids are unique within a batch only.",
                indices[0],
            )

    def _log_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(message, *args)


def _add(outcome: Outcome, tally: Tally) -> None:
    for addition in outcome.additions:
        tally.add(addition)
    if outcome.duplicates:
        tally.dropped[names.DUPLICATE] += outcome.duplicates


_recorders: weakref.WeakSet[SpecDecRecorder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for recorder in list(_recorders):
        recorder._lock = threading.Lock()  # another thread of the parent may have held it
        recorder._sums.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
