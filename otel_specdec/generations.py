"""What one identity has reported so far, and what a further report adds: the contract's section "Exactly once".

Engine-neutral, free of OpenTelemetry and of locks: whoever holds a generation's state lets one thread at it at a time.
A report costs some microseconds. Between reports a state is kept packed: 8 bytes a count instead of an object each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct, pack, unpack_from
from typing import Final, NamedTuple

from otel_specdec import names
from otel_specdec.counts import (
    ALL_RATIOS,
    COUNT_FIELDS,
    RATIO_SETS,
    GenerationReport,
    SpecCounts,
    counts_of,
    ratios_holding,
)


class Addition(NamedTuple):
    """What a report adds to what its generation has added before.

    Attributes:
        report: the report itself, for the attributes of its points.
        counts: what it adds, by `COUNT_FIELDS`; None adds nothing, 0 adds its 0.
        holding: the ratios that these counts may enter.
        positions: accepted and proposed tokens to add by draft position, equally long; None where nothing is known.
        covered: on the report that finishes the generation, the ratios that held in every increment; else None.
    """

    report: GenerationReport
    counts: tuple[int | None, ...]
    holding: frozenset[str]
    positions: tuple[Sequence[int], Sequence[int]] | None
    covered: frozenset[str] | None


Verdict = Addition | str | None
"""An addition; why the report is dropped (`names.DUPLICATE`, `names.CONFLICT`); or None: it adds nothing."""


_COUNTS: Final = Struct(f"<{len(COUNT_FIELDS)}Q")
_NOT_KNOWN: Final = 2**64 - 1
"""Stands for None among packed counts, which all fit into 63 bits."""


def _packed(counts: Iterable[int | None]) -> bytes:
    return _COUNTS.pack(*[_NOT_KNOWN if count is None else count for count in counts])


def _unpacked(data: bytes, offset: int = 0) -> tuple[int | None, ...]:
    return tuple([None if count == _NOT_KNOWN else count for count in _COUNTS.unpack_from(data, offset)])


class Finished(NamedTuple):
    """All that is remembered of a finished generation: its final report's counts, and the last known ones.

    They differ where the final report knew less than one before it, and are one object where they do not.
    """

    final: SpecCounts
    known: SpecCounts

    def packed(self) -> bytes:
        """The same in 40 bytes, or 80 where the two differ."""
        final = _packed(counts_of(self.final))
        return final if self.known is self.final else final + _packed(counts_of(self.known))

    @classmethod
    def unpacked(cls, data: bytes) -> Finished:
        """What `packed` was called on."""
        final = SpecCounts(*_unpacked(data))
        return cls(final, SpecCounts(*_unpacked(data, _COUNTS.size)) if len(data) > _COUNTS.size else final)

    def take(self, report: GenerationReport, *, speculation: bool | None) -> Verdict:
        """Judge a report that comes after the finish: it never adds anything, whether the engine speculates or not."""
        if report.finished:
            return names.DUPLICATE if report.counts == self.final else names.CONFLICT
        if any(
            new is not None and old is not None and new > old
            for new, old in zip(counts_of(report.counts), counts_of(self.known), strict=True)
        ):
            return names.CONFLICT
        return None  # late


_UNKNOWN: Final[tuple[int | None, ...]] = (None,) * len(COUNT_FIELDS)
_ZEROS: Final[tuple[int | None, ...]] = (0,) * len(COUNT_FIELDS)


class Running:
    """What is known of a generation that has not finished; a new one starts at known zeros."""

    __slots__ = ("_accepted_by_position", "_added", "_holding", "_last", "_proposed_by_position")

    def __init__(self) -> None:
        # By COUNT_FIELDS: what was added (None: never reported), and what the last report knew.
        self._added = _UNKNOWN
        self._last = _ZEROS
        self._holding = ALL_RATIOS  # the ratios that held in every increment so far
        self._accepted_by_position: Sequence[int] = ()
        self._proposed_by_position: Sequence[int] = ()

    def packed(self) -> bytes:
        """The same in 41 bytes, and 16 for each draft position."""
        known_last = sum(1 << i for i, count in enumerate(self._last) if count is not None)
        flags = known_last << 3 | RATIO_SETS.index(self._holding)
        positions = *self._accepted_by_position, *self._proposed_by_position
        return _packed(self._added) + pack(f"<B{len(positions)}Q", flags, *positions)

    @classmethod
    def unpacked(cls, data: bytes) -> Running:
        """What `packed` was called on. Of the last report it is only known which counts it knew: no more is asked."""
        state = cls()
        state._added = _unpacked(data)
        number = (len(data) - _COUNTS.size - 1) // 8
        flags, *positions = unpack_from(f"<B{number}Q", data, _COUNTS.size)
        state._last = tuple([0 if flags >> 3 & 1 << i else None for i in range(len(COUNT_FIELDS))])
        state._holding = RATIO_SETS[flags & 7]
        state._accepted_by_position, state._proposed_by_position = positions[: number // 2], positions[number // 2 :]
        return state

    def take(self, report: GenerationReport, *, speculation: bool | None) -> Verdict:
        """Judge a report, and move on to what it says if that adds something.

        Args:
            report: the report. A finishing one that adds something ends this state: `finish` says what to remember.
            speculation: whether the engine is known to speculate; a generation of which nothing about drafts is known
                begins only where it is.
        """
        counts = counts_of(report.counts)
        if self._added is _UNKNOWN:
            if not (report.counts.knows_drafts or speculation):
                return None
            if not report.finished and not any(counts):
                return None  # late
            if report.counts.completion == 0:
                return None  # ended, or stands, before its first token: no generation (yet)
            holding = self._holding = ratios_holding(report.counts)
            differences = self._added = counts
        else:
            changes = [new - (old or 0) for new, old in zip(counts, self._added, strict=True) if new is not None]
            if not report.finished and not any(change > 0 for change in changes):
                return None  # late
            if any(change < 0 for change in changes):
                return names.CONFLICT
            if report.counts.completion == 0:
                return None
            differences = tuple(
                None if new is None else new - (old or 0) for new, old in zip(counts, self._added, strict=True)
            )
            # A half of a ratio counts only where it was known at both ends of the increment.
            judged = (None if last is None else diff for diff, last in zip(differences, self._last, strict=True))
            holding = ratios_holding(SpecCounts(*judged))
            self._holding &= holding
            self._added = tuple(old if new is None else new for new, old in zip(counts, self._added, strict=True))
        self._last = counts
        covered = self._holding if report.finished else None
        return Addition(report, differences, holding, self._positions(report), covered)

    def finish(self, final: GenerationReport) -> Finished:
        """What to remember once `final` was taken."""
        # Most generations have one report: nothing is made twice for them.
        known = final.counts if self._added == self._last else SpecCounts(*self._added)
        return Finished(final.counts, known)

    def _positions(self, report: GenerationReport) -> tuple[Sequence[int], Sequence[int]] | None:
        """What the positions add since they were last known and consistent, both halves together or neither."""
        accepted, proposed = report.accepted_by_position, report.proposed_by_position
        if accepted is None or proposed is None:
            return None
        if len(accepted) != len(proposed):
            return None
        accepted, proposed = accepted[: names.MAX_POSITIONS], proposed[: names.MAX_POSITIONS]
        if len(accepted) < len(self._accepted_by_position):
            return None
        more_accepted = _grown(accepted, self._accepted_by_position)
        more_proposed = _grown(proposed, self._proposed_by_position)
        if any(not 0 <= a <= p for a, p in zip(more_accepted, more_proposed, strict=True)):
            return None
        self._accepted_by_position, self._proposed_by_position = accepted, proposed
        return more_accepted, more_proposed


def _grown(now: Sequence[int], before: Sequence[int]) -> Sequence[int]:
    """The differences, of the length of `now`; what `before` does not reach was 0."""
    return [count - (before[i] if i < len(before) else 0) for i, count in enumerate(now)] if before else now
