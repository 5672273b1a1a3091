"""A batch of reports handed over at once: judged before anything is counted, and its summary for an experiment tracker.

Free of OpenTelemetry, of locks and of any memory of earlier batches. Runs in the caller's thread; a report costs some
ten microseconds and, until the batch is counted, as much memory as it takes itself. The summary holds sums alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from otel_specdec import names
from otel_specdec.counts import COUNT_FIELDS, METRIC_OF_FIELD, GenerationReport, counts_of
from otel_specdec.generations import Addition, Finished, Running
from otel_specdec.tally import Tally

Identity = tuple[str | None, str]
"""Session id and generation id."""


def identity_of(report: GenerationReport) -> Identity:
    """What makes two reports the same generation's."""
    return report.session_id, report.generation_id


class Outcome(NamedTuple):
    """What reports add to a generation, all of them together.

    Attributes:
        additions: what the counters get, in this order.
        state: what is known of the generation afterwards.
        duplicates: reports that were dropped because they were equal to the final one.
    """

    additions: Sequence[Addition]
    state: Running | Finished
    duplicates: int


class Told(NamedTuple):
    """What a batch tells of one generation.

    Attributes:
        identity: the generation.
        reports: its reports in the order in which they are read: running ones ascending, then the final ones.
        number: of its reports in the batch; `reports` may lack those of an attempt without any token.
        outcome: what they add to a generation of which nothing else is known; None where they contradict each other.
    """

    identity: Identity
    reports: Sequence[GenerationReport]
    number: int
    outcome: Outcome | None


def judge(reports: Iterable[GenerationReport], *, speculation: bool | None) -> Iterator[Told]:
    """Sort a batch by generation, and judge each by what the batch says of it, in the order of their first reports."""
    by_identity: dict[Identity, list[GenerationReport] | tuple[GenerationReport]] = {}
    for report in reports:
        identity = (report.session_id, report.generation_id)
        others = by_identity.get(identity)
        if others is None:
            by_identity[identity] = (report,)  # as good as always: a list for each would double what a batch takes
        elif isinstance(others, list):
            others.append(report)
        else:
            by_identity[identity] = [*others, report]
    for identity, its in by_identity.items():
        ordered = its if len(its) == 1 else in_order(its)
        outcome = None if ordered is None else take_all(Running(), ordered, speculation=speculation)
        yield Told(identity, ordered or its, len(its), outcome)


def take_all(
    state: Running | Finished, reports: Sequence[GenerationReport], *, speculation: bool | None
) -> Outcome | None:
    """Take reports in this order; None if any of them is a conflict. `state` itself may be changed either way."""
    if len(reports) == 1:
        verdict = state.take(reports[0], speculation=speculation)
        if isinstance(verdict, Addition):
            if verdict.report.finished and isinstance(state, Running):
                state = state.finish(verdict.report)
            return Outcome((verdict,), state, 0)
        return None if verdict == names.CONFLICT else Outcome((), state, int(verdict == names.DUPLICATE))
    additions: list[Addition] = []
    duplicates = 0
    for report in reports:
        verdict = state.take(report, speculation=speculation)
        if isinstance(verdict, Addition):
            additions.append(verdict)
            if report.finished and isinstance(state, Running):
                state = state.finish(report)
        elif verdict == names.CONFLICT:
            return None
        elif verdict == names.DUPLICATE:
            duplicates += 1
    return Outcome(additions, state, duplicates)


def in_order(reports: Sequence[GenerationReport]) -> list[GenerationReport] | None:
    """A generation's running reports ascending, then its final ones; None where no such order exists.

    A final report of no token is an attempt that was no generation: it counts for nothing beside one that was.
    """
    finals = [report for report in reports if report.finished]
    generated = [report for report in finals if report.counts.completion != 0]
    if any(report.counts != generated[0].counts for report in generated):
        return None
    running = ascending([report for report in reports if not report.finished])
    return None if running is None else running + (generated or finals)


def ascending(reports: Sequence[GenerationReport]) -> list[GenerationReport] | None:
    """Order reports so that no known count is below a known one before it; None where that cannot be.

    Unknown counts are not compared, so this is no sort: a report may come next once every count that it knows is the
    lowest left. Of those that may, the one that knows most comes first, which makes the lesser ones late.
    """
    if len(reports) < 2:
        return list(reports)
    rows = [counts_of(report.counts) for report in reports]
    levels: list[deque[list[int]]] = []  # for each count, the reports that know it, lowest first, equal ones together
    for field in range(len(COUNT_FIELDS)):
        by_value: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if (value := row[field]) is not None:
                by_value.setdefault(value, []).append(i)
        levels.append(deque(by_value[value] for value in sorted(by_value)))
    left = [len(level[0]) if level else 0 for level in levels]
    waits_for = [sum(value is not None for value in row) for row in rows]
    ready: list[tuple[int, tuple[int, ...], int]] = [(0, (), i) for i, number in enumerate(waits_for) if number == 0]
    ordered: list[GenerationReport] = []

    def reach(field: int) -> None:
        for i in levels[field][0]:
            waits_for[i] -= 1
            if waits_for[i] == 0:
                lowest = tuple(-1 if value is None else value for value in rows[i])
                heapq.heappush(ready, (-sum(value is not None for value in rows[i]), lowest, i))

    for field, level in enumerate(levels):
        if level:
            reach(field)
    while ready:
        i = heapq.heappop(ready)[2]
        ordered.append(reports[i])
        for field, value in enumerate(rows[i]):
            if value is None:
                continue
            left[field] -= 1
            if left[field] == 0:
                levels[field].popleft()
                if levels[field]:
                    left[field] = len(levels[field][0])
                    reach(field)
    return ordered if len(ordered) == len(reports) else None


# The summary

_FIELD: Final = {metric: COUNT_FIELDS.index(field) for field, metric in METRIC_OF_FIELD.items()}
_HALVES: Final = {ratio: (_FIELD[above], _FIELD[below]) for ratio, (above, below) in names.RATIOS.items()}

_UNIT: Final = 53
"""A sample's ratio is rounded to this many binary places, finer than a float's own: sums are exact in any order."""


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What one batch of reports says, whatever was recorded before it. Made by `SpecDecRecorder.record_batch`.

    All of it are sums over generations, each counted once, those in conflict left out: summaries of several ranks or
    batches are combined by `merge`, never by averaging. Nothing here is an id or grows with the batch.

    Attributes:
        totals: every known value, by the fields of `SpecCounts` (tokens, steps; ≥ 0); a count that no report knew is
            absent.
        numerators, denominators: by ratio, the sums over what may enter it: both halves known and consistent (≥ 0).
        covered: by ratio, the finished generations that have it in all they added (0 … `generations`).
        generations: finished generations.
        reports: reports in the batch, duplicates and those in conflict included.
        duplicates: surplus final reports, equal to one that was counted.
        conflicts: generations whose reports contradict each other.
        samples: training samples, by `sample_id`; a generation without one is a sample of its own.
        sample_sums: for each of `names.PER_SAMPLE` the sum over samples, in units of 2**-53; absent where a sample
            lacks the complete pair. See `per_sample_means`.
    """

    totals: Mapping[str, int]
    numerators: Mapping[str, int]
    denominators: Mapping[str, int]
    covered: Mapping[str, int]
    generations: int
    reports: int
    duplicates: int
    conflicts: int
    samples: int
    sample_sums: Mapping[str, int]

    @property
    def ratios(self) -> dict[str, float]:
        """Quotients of sums: `acceptance_length` and `tokens_per_verify` (tokens per step, ≥ 0), `accept_rate` (0 … 1).

        A ratio whose denominator is zero does not exist and is absent. `tokens_per_verify` counts tokens of steps that
        had no drafts, so it has no upper bound and compares with nothing but itself.
        """
        return {ratio: self.numerators[ratio] / below for ratio in names.RATIOS if (below := self.denominators[ratio])}

    @property
    def coverage(self) -> dict[str, float]:
        """For each ratio the share of generations that have it (0 … 1); empty where no generation finished."""
        return {ratio: self.covered[ratio] / self.generations for ratio in names.RATIOS} if self.generations else {}

    def per_sample_means(self) -> dict[str, float]:
        """The means over samples that frameworks have published, for continuity of their curves. Do not use them.

        A sample of 10 tokens weighs as much as one of 4,000, and the mean cannot be pooled over ranks, steps or
        filters again; on a batch of seven short samples and one long one it is 81 % below `ratios`. A generation that
        several samples share counts in each of them.

        Returns:
            `spec_accept_rate` (accepted / proposed) and `spec_accept_length` (completion / verify), each only where
            every sample has its complete pair and a denominator above zero: a missing pair is not a ratio of 0.
        """
        if not self.samples:
            return {}
        return {mean: total / (self.samples << _UNIT) for mean, total in self.sample_sums.items()}

    def merge(self, other: BatchSummary) -> BatchSummary:
        """The summary of both batches, where they share no generation and no sample; sums, in any order."""
        return BatchSummary(
            totals=_summed(self.totals, other.totals),
            numerators=_summed(self.numerators, other.numerators),
            denominators=_summed(self.denominators, other.denominators),
            covered=_summed(self.covered, other.covered),
            generations=self.generations + other.generations,
            reports=self.reports + other.reports,
            duplicates=self.duplicates + other.duplicates,
            conflicts=self.conflicts + other.conflicts,
            samples=self.samples + other.samples,
            sample_sums={
                mean: self.sample_sums[mean] + other.sample_sums[mean]
                for mean in names.PER_SAMPLE
                if mean in self.sample_sums and mean in other.sample_sums
            },
        )

    def as_dict(self) -> dict[str, float]:
        """Flat names and plain numbers for a tracker or for JSON; `from_dict` gives the same summary back.

        `spec/<ratio>` where the ratio exists, `spec/coverage/<ratio>` where a generation finished, `spec/<count>_total`
        where the count is known; and all the sums that these come from, for ranks to be merged by.
        """
        data: dict[str, float] = {names.TRACKED_RATIOS[ratio]: value for ratio, value in self.ratios.items()}
        data.update({names.TRACKED_COVERAGE[ratio]: value for ratio, value in self.coverage.items()})
        data.update({names.TRACKED_TOTALS[field]: value for field, value in self.totals.items()})
        for tracked, sums in (
            (names.TRACKED_NUMERATORS, self.numerators),
            (names.TRACKED_DENOMINATORS, self.denominators),
            (names.TRACKED_COVERED, self.covered),
        ):
            data.update({tracked[ratio]: sums[ratio] for ratio in names.RATIOS})
        data[names.TRACKED_GENERATIONS] = self.generations
        data[names.TRACKED_REPORTS] = self.reports
        data[names.TRACKED_DUPLICATES] = self.duplicates
        data[names.TRACKED_CONFLICTS] = self.conflicts
        data[names.TRACKED_SAMPLES] = self.samples
        for mean, total in self.sample_sums.items():
            whole, fraction = divmod(total, 1 << _UNIT)
            data[names.TRACKED_SAMPLE_SUMS[mean]] = whole
            data[names.TRACKED_SAMPLE_FRACTIONS[mean]] = fraction / (1 << _UNIT)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BatchSummary:
        """The summary that `as_dict` gave, also after a trip through JSON; names that are not its own are ignored.

        Raises:
            ValueError: a sum is missing, is no whole number, or is negative; the message names it.
        """

        def count(name: str) -> int:
            value = data.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # trackers keep floats
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number ≥ 0, not {type(value).__name__}")
            return value

        def fraction(name: str) -> int:
            value = data.get(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                raise ValueError(f"{name} must be a number from 0 up to 1, not {type(value).__name__}")
            return int(value * (1 << _UNIT))

        return cls(
            totals={field: count(name) for field, name in names.TRACKED_TOTALS.items() if name in data},
            numerators={ratio: count(name) for ratio, name in names.TRACKED_NUMERATORS.items()},
            denominators={ratio: count(name) for ratio, name in names.TRACKED_DENOMINATORS.items()},
            covered={ratio: count(name) for ratio, name in names.TRACKED_COVERED.items()},
            generations=count(names.TRACKED_GENERATIONS),
            reports=count(names.TRACKED_REPORTS),
            duplicates=count(names.TRACKED_DUPLICATES),
            conflicts=count(names.TRACKED_CONFLICTS),
            samples=count(names.TRACKED_SAMPLES),
            sample_sums={
                mean: (count(name) << _UNIT) + fraction(names.TRACKED_SAMPLE_FRACTIONS[mean])
                for mean, name in names.TRACKED_SAMPLE_SUMS.items()
                if name in data
            },
        )


class Summing:
    """Adds up a batch generation by generation, and gives its summary; no generation is kept."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._duplicates = self._conflicts = 0
        self._samples = _Samples()

    def add(self, told: Told) -> None:
        """Add what the batch tells of one generation."""
        if told.outcome is None:
            self._conflicts += 1
        else:
            for addition in told.outcome.additions:
                self._tally.add(addition)
            self._duplicates += told.outcome.duplicates
        if any(report.counts.completion != 0 for report in told.reports):  # else no generation, so no sample's either
            self._samples.add(told)

    def summary(self, reports: int) -> BatchSummary:
        """The summary of all that was added, which came in so many reports."""
        totals: dict[str, int] = {}
        numerators, denominators = dict.fromkeys(names.RATIOS, 0), dict.fromkeys(names.RATIOS, 0)
        for (_, holding), row in self._tally.counts.items():
            for field, value in zip(COUNT_FIELDS, row, strict=True):
                if value is not None:
                    totals[field] = totals.get(field, 0) + value
            for ratio in holding:
                above, below = _HALVES[ratio]
                numerators[ratio] += row[above] or 0
                denominators[ratio] += row[below] or 0
        covered = dict.fromkeys(names.RATIOS, 0)
        for (_, ratios), number in self._tally.generations.items():
            for ratio in ratios:
                covered[ratio] += number
        samples, sample_sums = self._samples.sums()
        return BatchSummary(
            totals=totals,
            numerators=numerators,
            denominators=denominators,
            covered=covered,
            generations=sum(self._tally.generations.values()),
            reports=reports,
            duplicates=self._duplicates,
            conflicts=self._conflicts,
            samples=samples,
            sample_sums=sample_sums,
        )


Pair = tuple[int, int] | None
"""A sample's own sums of both halves of a ratio; None where one of its generations lacks the complete pair."""


class _Samples:
    """The sums behind the means over samples: each sample's quotients, and those of samples that may still grow."""

    def __init__(self) -> None:
        self._open: dict[str, list[Pair]] = {}
        self._number = 0  # of samples of one generation, whose quotients are in the sums already
        self._sums: list[int | None] = [0] * len(names.PER_SAMPLE)

    def add(self, told: Told) -> None:
        pairs = [_pair(told.outcome, ratio) for ratio in names.PER_SAMPLE.values()]
        ids = [report.sample_id for report in told.reports]
        for sample in ids if len(ids) == 1 else set(ids):
            if sample is None:
                self._number += 1
                self._sums = _plus_quotients(self._sums, pairs)
            elif (others := self._open.get(sample)) is None:
                self._open[sample] = pairs
            else:
                self._open[sample] = [
                    None if one is None or two is None else (one[0] + two[0], one[1] + two[1])
                    for one, two in zip(pairs, others, strict=True)
                ]

    def sums(self) -> tuple[int, dict[str, int]]:
        """The number of samples, and the sum of each mean that exists for all of them, in units of 2**-53."""
        sums = self._sums
        for pairs in self._open.values():
            sums = _plus_quotients(sums, pairs)
        by_mean = zip(names.PER_SAMPLE, sums, strict=True)
        return self._number + len(self._open), {mean: total for mean, total in by_mean if total is not None}


def _pair(outcome: Outcome | None, ratio: str) -> Pair:
    additions = outcome.additions if outcome is not None else ()
    if not additions or ratio not in (additions[-1].covered or ()):
        return None
    above, below = _HALVES[ratio]
    if len(additions) == 1:
        counts = additions[0].counts
        return counts[above] or 0, counts[below] or 0
    return sum(each.counts[above] or 0 for each in additions), sum(each.counts[below] or 0 for each in additions)


def _plus_quotients(sums: list[int | None], pairs: list[Pair]) -> list[int | None]:
    """The sums with a sample's quotients added in units of 2**-53, rounded; None from where one does not exist."""
    return [
        None if total is None or pair is None or not pair[1] else total + (((pair[0] << _UNIT + 1) // pair[1] + 1) >> 1)
        for total, pair in zip(sums, pairs, strict=True)
    ]


def _summed(one: Mapping[str, int], two: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + two.get(name, 0) for name in {**one, **two}}
