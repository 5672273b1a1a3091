"""A recorder's pending sums, and the generations that exemplars will name among them: a `sums.Source`.

Written by whoever records, read by whoever collects, under one lock of its own, so that a generation's share is always
part of the sums that it comes with. A recorded generation costs one random number; one of the few that are followed
some microseconds more.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import trace

from otel_specdec import names
from otel_specdec.batches import Identity
from otel_specdec.candidates import Candidate, Candidates, choose
from otel_specdec.counts import SpecCounts, carried
from otel_specdec.engines import Picked, TraceIds
from otel_specdec.payloads import split_choice
from otel_specdec.sums import Harvest, Pick, Pool, Series
from otel_specdec.tally import Tally

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from otel_specdec.generations import Addition


class Told(NamedTuple):
    """What was added for one identity, in order; `new` where nothing was known of it before."""

    identity: Identity
    new: bool
    additions: Sequence[Addition]


class _Followed(Candidate):
    """A candidate, and what it added since the last drain."""

    __slots__ = ("identity", "share", "trace")

    def __init__(self, order: float, identity: Identity) -> None:
        super().__init__(order)
        self.identity = identity
        self.share = Tally()
        self.trace: TraceIds | None = None


class RecordedSums:
    """See the module. `owner` is the recorder: when it is gone and all is taken, the pool may forget these sums."""

    def __init__(self, pool: Pool, owner: object) -> None:
        self._pool = pool
        self._owner = weakref.ref(owner)
        self._lock = threading.Lock()
        self._pending: dict[Series, int] = {}
        self._by_identity: dict[Identity, _Followed] = {}
        self._candidates: Candidates[_Followed] = Candidates(self._leave)
        pool.attach(self)

    @property
    def ended(self) -> bool:
        """See `sums.Source`."""
        return self._owner() is None

    def add(self, tally: Tally, told: Iterable[Told] = ()) -> None:
        """Add sums, and note the generations behind them. Never call it inside a collection: it begins new series."""
        sums = [(self._pool.begin(series), value) for series, value in tally.sums(self._pool.recorder_process)]
        with self._lock:
            for series, value in sums:
                self._pending[series] = self._pending.get(series, 0) + value
            for each in told:
                if each.additions:
                    self._follow(each)

    def _follow(self, told: Told) -> None:
        followed = self._by_identity.get(told.identity)
        if followed is None:
            if not told.new:
                return  # it lost its place, or was born before there was one
            if any(text and carried(text) != text for text in told.identity):
                return  # no exporter carries such an id as it is
            followed = self._candidates.born(lambda order: _Followed(order, told.identity))
            if followed is None:
                return
            self._by_identity[told.identity] = followed
        for addition in told.additions:
            followed.share.add(addition)
            followed.trace = _trace_of(addition.report.context) or followed.trace
            if addition.covered is not None:
                self._candidates.finish(followed, time.time_ns())
                self._leave(followed)

    def _leave(self, followed: _Followed) -> None:
        self._by_identity.pop(followed.identity, None)

    def take(self) -> Harvest:
        """See `sums.Source`."""
        with self._lock:
            pending, self._pending = self._pending, {}
            finished = self._candidates.drain()
            for followed in self._by_identity.values():
                followed.share = Tally()
        groups: dict[frozenset[object], list[_Followed]] = {}  # by attribute set
        for followed in finished:  # lowest order first
            groups.setdefault(frozenset(attributes for attributes, _ in followed.share.generations), []).append(
                followed
            )
        picks = [self._pick(*each) for group in groups.values() for each in choose(group, _drafts)]
        return Harvest(pending.items(), picks)

    def _pick(self, followed: _Followed, lowest_rate: float | None) -> Pick:
        session, generation = followed.identity
        response_id, choice = split_choice(generation)
        positions = (names.Metric.POSITION_ACCEPTED, names.Metric.POSITION_PROPOSED)
        sums = followed.share.sums(self._pool.recorder_process)
        share = [(series, value) for series, value in sums if series.metric not in positions]
        picked = Picked(
            response_id=response_id,
            choice=choice,
            finished_unix_nano=followed.finished_unix_nano,
            order=followed.order,
            increments=(),
            session_id=session,
            trace=followed.trace,
            lowest_rate=lowest_rate,
        )
        return Pick(picked, share)

    def after_fork_in_child(self) -> None:
        """Forget what the parent will export itself; go on under a lock that nobody holds."""
        self._lock = threading.Lock()
        self._pending = {}
        self._by_identity = {}
        self._candidates = Candidates(self._leave)
        self._pool.attach(self)  # the pool forgot its sources too


def _drafts(followed: _Followed) -> tuple[int, int] | None:
    accepted = proposed = 0
    for (_, holding), row in followed.share.counts.items():
        counts = SpecCounts(*row)
        if names.ACCEPT_RATE not in holding or counts.accepted is None or counts.proposed is None:
            return None
        accepted += counts.accepted
        proposed += counts.proposed
    return accepted, proposed


def _trace_of(context: Context | Any) -> TraceIds | None:
    if not context:
        return None
    span = trace.get_current_span(context).get_span_context()
    return TraceIds(span.trace_id, span.span_id, span.trace_flags.sampled) if span.is_valid else None
