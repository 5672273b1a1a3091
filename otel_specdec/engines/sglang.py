"""SGLang's adapter: what the messages on the response path say, as sums. Knows SGLang and nothing of OpenTelemetry.

Where it runs: in the process that holds the `TokenizerManager` (the server's main process, the application itself with
`sglang.Engine`, or one of several tokenizer workers, each for its own requests), on its event loop's thread, once a message
of the scheduler. What it may cost: a pass at C speed over the message's rows; a few microseconds of Python for a generation
that began, finished after a collection, or may become an exemplar; no lock that waits, no call into OpenTelemetry.

Hooks, all on the base class `TokenizerManager` (`TokenizerWorker` inherits them): `__init__` (the engine is known),
`_handle_batch_output` (the counts), and where a request ends without a message: `_handle_abort_req` (aborted in the queue),
before 0.4.9 `abort_request`. The class is patched when its module is imported, because to 0.5.10 `__init__` captures the bound
methods; sglang is never imported from here.

The columns of a message are cumulative over a generation's life, so the newest row of each generation is all that is kept,
and a collection adds the difference to what was added before. Nothing is kept of a generation that finished.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat, zip_longest
from operator import add, attrgetter, le, mul
from typing import Any, Final, NamedTuple

import wrapt

from otel_specdec.candidates import PICKS, Candidate, Candidates
from otel_specdec.counts import COUNT_FIELDS, SpecCounts, ratios_holding
from otel_specdec.engines import EngineDescription, EngineListener, Increment, Picked, Taken, TraceIds
from otel_specdec.names import MAX_POSITIONS

TOKENIZER_MODULE: Final = "sglang.srt.managers.tokenizer_manager"
_WATCH: Final = "_otel_specdec_watch"
_ORIGINAL: Final = "_otel_specdec_original"

# Under SGLang's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("sglang.otel_specdec")

# Columns, newest name first. Accepted draft tokens: 0.5.12 on, 0.5.11, 0.5.4 to 0.5.10; before that there is none.
_ACCEPTED: Final = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens")
_HISTOGRAM: Final = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")  # 0.5.12 on; 0.5.9 to 0.5.11
_RETRACTIONS: Final = "retraction_counts"  # 0.5.5 on
_RANKS: Final = "dp_ranks"  # 0.5.10 on

# Draft a chain of a fixed length with top-k 1: EAGLE and its kin. Not those that cap their drafts (DSPARK), read their
# length from the draft model (DFLASH), pad a tree (NGRAM) or come from a plugin.
_CHAINS: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"})
# Every decoding step of these is a verify step that emits one token more than it accepts. UNO emits two more.
_VERIFY_ALWAYS: Final = _CHAINS | {"NGRAM", "DFLASH", "DSPARK"}

_GRAMMARS: Final = ("json_schema", "regex", "ebnf", "structural_tag")
_HEALTH_CHECK: Final = "HEALTH_CHECK"

_finished = attrgetter("finished")
_sampling_params = attrgetter("obj.sampling_params")
_none: Final = repeat(None)


class Row(NamedTuple):
    """What the newest message said about one generation: cumulative over its life; None where it does not say."""

    verify: int | None
    accepted: int | None
    completion: int | None
    retractions: int | None
    histogram: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What this engine's version and configuration can tell about every generation.

    Attributes:
        accepted: the column of accepted draft tokens, or None where it is absent or known to be wrong.
        histogram: the column of steps by accepted tokens, or None where positions cannot be known.
        retractions: whether the number of retractions is told, without which emitted tokens are unknown.
        chain: draft tokens of every step, where that is the same for all; else 0, and proposed tokens are unknown.
        emits_always: whether every decoding step is a verify step, so that emitted tokens follow from the others.
        restores: whether a retracted request comes back without a prefill of its own (decode side of a disaggregated server).
    """

    accepted: str | None
    histogram: str | None
    retractions: bool
    chain: int
    emits_always: bool
    restores: bool

    @property
    def emitted(self) -> bool:
        """Whether emitted tokens can be known at all."""
        return self.retractions and self.emits_always

    @property
    def unknown(self) -> frozenset[str]:
        """The fields of `SpecCounts` that no generation here will have."""
        known = {"verify", "completion"}
        if self.accepted:
            known.add("accepted")
        if self.chain:
            known.add("proposed")
        if self.emitted:
            known.add("emitted")
        return frozenset(COUNT_FIELDS) - known

    @property
    def ratios(self) -> frozenset[str]:
        """The ratios that a generation without surprises may enter."""
        unknown = self.unknown
        return ratios_holding(SpecCounts(**{name: None if name in unknown else 0 for name in COUNT_FIELDS}))


class _Sums:
    """Sums under one set of ratios; a counter of which nothing was known stays None."""

    __slots__ = ("accepted_at", "counts", "generations", "proposed_at")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.generations = 0
        self.accepted_at = [0] * MAX_POSITIONS
        self.proposed_at = [0] * MAX_POSITIONS

    def add(self, field: str, value: int | None) -> None:
        if value is not None:
            self.counts[field] = self.counts.get(field, 0) + value

    def add_positions(self, histogram: Sequence[int], verify: int, chain: int) -> None:
        """`histogram[n]` steps accepted n of `chain` draft tokens: position i was accepted in all with n above i."""
        accepted = 0
        for position in range(min(chain, len(histogram) - 1) - 1, -1, -1):
            accepted += histogram[position + 1]
            if position < MAX_POSITIONS:
                self.accepted_at[position] += accepted
        for position in range(min(chain, MAX_POSITIONS)):
            self.proposed_at[position] += verify

    def increment(self, ratios: frozenset[str]) -> Increment:
        positions = any(self.proposed_at)
        return Increment(
            SpecCounts(**self.counts),
            self.generations,
            ratios,
            self.accepted_at if positions else (),
            self.proposed_at if positions else (),
        )


class _Followed(Candidate):
    """A candidate for exemplars: its ids, and what it added since the last drain."""

    __slots__ = ("increments", "rid", "session_id", "trace")

    def __init__(self, order: float, rid: str, state: Any, trace: TraceIds | None) -> None:
        super().__init__(order)
        self.rid = rid
        session = getattr(state.obj, "session_id", None)  # 0.5.18 on
        self.session_id = session if isinstance(session, str) else None
        self.trace = trace
        self.increments: list[Increment] = []

    def picked(self) -> Picked:
        # `meta_info.id`, and `id` of the OpenAI endpoints. Each of n > 1 sequences has an id of its own.
        return Picked(
            self.rid, self.finished_unix_nano, self.order, self.increments, session_id=self.session_id, trace=self.trace
        )


class _Life:
    """A generation of which something was added before its end, or that needs a look of its own: what was added so far."""

    __slots__ = ("accepted", "chain", "completion", "embeds", "emitted", "followed", "histogram", "ratios", "verify")

    def __init__(self, knowledge: Knowledge) -> None:
        # None: unknown from here on. A new generation starts at known 0.
        self.verify: int | None = 0
        self.accepted: int | None = 0
        self.completion: int | None = 0
        self.emitted: int | None = 0
        self.histogram: Sequence[int] | None = ()
        self.chain = knowledge.chain
        self.embeds = False
        self.ratios = knowledge.ratios
        self.followed: _Followed | None = None

    def advance(self, row: Row, knowledge: Knowledge, *, final: bool) -> tuple[SpecCounts, Sequence[int] | None]:
        """What came since the last call, and the steps by accepted tokens where positions are known."""
        emitted = None
        if row.completion is not None and row.retractions is not None and knowledge.emitted:
            # The prefill gives a token, and so does that after each retraction; all others come from verify steps. Not so
            # where a retracted request is restored without one, or starts over (its own embeddings cannot be extended).
            if not row.retractions:
                emitted = max(0, row.completion - 1)
            elif not (knowledge.restores or self.embeds):
                emitted = max(0, row.completion - 1 - row.retractions)
        self.verify, verify = _grow(self.verify, row.verify, final)
        self.accepted, accepted = _grow(self.accepted, row.accepted, final)
        self.completion, completion = _grow(self.completion, row.completion, final)
        self.emitted, emitted = _grow(self.emitted, emitted, final)
        proposed = verify * self.chain if verify is not None and self.chain else None
        self.histogram, histogram = _spread(self.histogram, row.histogram)
        if histogram is not None and (
            proposed is None
            or sum(histogram) != verify
            or sum(map(mul, histogram, range(len(histogram)))) != accepted
            or len(histogram) > self.chain + 1
        ):
            histogram = None  # it does not go with the other columns, so positions stay out of it
        return SpecCounts(accepted, proposed, verify, completion, emitted), histogram


def _grow(known: int | None, now: int | None, final: bool) -> tuple[int | None, int | None]:
    """What is added now of a cumulative value: (the value so far, the difference); None is unknown, from here on.

    What was added never moves. A retraction raises its count before completion catches up, so a value may fall for a while;
    one that has fallen in the end contradicts what was added.
    """
    if known is None or now is None:
        return None, None
    if now >= known:
        return now, now - known
    return (None, None) if final else (known, 0)


def _spread(known: Sequence[int] | None, now: Sequence[int] | None) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    if known is None or now is None:
        return None, None
    difference = [new - old for new, old in zip_longest(now, known, fillvalue=0)]
    return (None, None) if difference and min(difference) < 0 else (now, difference)


class RankTally:
    """What the generations of one data-parallel rank did.

    The event loop's thread never waits: if a collection is just reading, the message is put aside and counted with the next
    one, or by the next collection.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._knowledge = watch.knowledge
        self._reading = threading.Lock()
        self._aside: deque[Callable[[], None]] = deque()
        self._live: dict[str, Row] = {}
        """The newest row of every generation that has begun and not finished."""
        self._lives: dict[str, _Life] = {}
        """Of those, the ones of which something was added already, and those that need a look of their own."""
        self._sums: dict[frozenset[str], _Sums] = {}
        self._candidates: Candidates[_Followed] = Candidates(lambda followed: None)

    @property
    def ended(self) -> bool:
        return self._watch.ended

    def message(
        self, rids: Sequence[str], rows: Sequence[Row] | Iterable[Any], reasons: Sequence[Any], columns: Sequence[Any] | None
    ) -> None:
        """One message: its rows, and the reasons of those that finished. `columns` where all are there and whole."""
        lock = self._reading
        if lock.acquire(blocking=False):
            try:
                if self._aside:
                    self._catch_up()
                self._message(rids, rows, reasons, columns, self._watch.states.get, _trace_of)
            finally:
                lock.release()
        else:
            # The engine goes on, deletes the finished states and ends their spans: what is read of them is read now.
            states = dict(zip(rids, map(self._watch.states.get, rids), strict=True))
            traces = {id(state): _trace_of(state) for state in states.values()}
            rows = list(rows)
            self._aside.append(
                lambda: self._message(rids, rows, reasons, columns, states.get, lambda state: traces[id(state)])
            )

    def _message(
        self,
        rids: Sequence[str],
        rows: Iterable[Any],
        reasons: Sequence[Any],
        columns: Sequence[Any] | None,
        state_of: Callable[[str], Any],
        trace_of: Callable[[Any], TraceIds | None],
    ) -> None:
        live = self._live
        finishing = len(reasons) - reasons.count(None)
        if finishing == len(rids) and columns is not None and live.keys().isdisjoint(rids):
            states = list(map(state_of, rids))
            if self._whole_lives(rids, columns, states):
                return
        before = len(live)
        live.update(zip(rids, rows, strict=False))
        if len(live) != before:
            born = list(islice(reversed(live), len(live) - before))
            self._births(born, list(map(state_of, born)), trace_of)
        if finishing:
            for rid, reason in zip(rids, reasons, strict=True):
                if reason is not None:
                    row = live.pop(rid, None)
                    if row is not None:
                        self._finish(rid, row, reason)

    def _whole_lives(self, rids: Sequence[str], columns: Sequence[Any], states: list[Any]) -> bool:
        """Count generations that this one message tells all of, at once; False, and nothing done, where one is special."""
        verify, accepted, completion, retractions, histogram = columns
        knowledge = self._knowledge
        if (
            min(completion) < 2  # a health check, a hidden warm-up, nothing generated: those are told apart one by one
            or (retractions is not None and any(retractions))
            or not all(states)
            or any(map(_finished, states))
        ):
            return False
        if accepted is not None:
            most = map(add, map(add, accepted, verify), repeat(1))
            if knowledge.emitted and not all(map(le, completion, most)):
                return False
        if knowledge.chain:
            if accepted is not None and not all(map(le, accepted, map(mul, verify, repeat(knowledge.chain)))):
                return False
            if _any_grammar(states):
                return False
        if self._candidates.any_place(len(rids)):
            return False
        sums = self._sums_of(knowledge.ratios)
        steps = sum(verify)
        tokens = sum(completion)
        sums.add("verify", steps)
        sums.add("completion", tokens)
        if accepted is not None:
            sums.add("accepted", sum(accepted))
        if knowledge.chain:
            sums.add("proposed", steps * knowledge.chain)
        if knowledge.emitted:
            sums.add("emitted", tokens - len(rids))
        if histogram is not None:
            together = list(map(sum, zip_longest(*histogram, fillvalue=0)))
            if sum(together) == steps and len(together) <= knowledge.chain + 1:
                sums.add_positions(together, steps, knowledge.chain)
        sums.generations += len(rids)
        return True

    def _births(self, rids: Sequence[str], states: Sequence[Any], trace_of: Callable[[Any], TraceIds | None]) -> None:
        knowledge = self._knowledge
        for rid, state in zip(rids, states, strict=True):
            # SGLang passes over a row without a state. One that is finished already (to 0.4.8 it stays for a moment) was counted.
            if state is None or state.finished or rid.startswith(_HEALTH_CHECK):
                del self._live[rid]
                continue
            followed = self._candidates.born(lambda order, rid=rid, state=state: _Followed(order, rid, state, trace_of(state)))  # type: ignore[misc]
            grammar = bool(knowledge.chain) and _any_grammar((state,))
            embeds = getattr(state.obj, "input_embeds", None) is not None
            if followed is not None or grammar or embeds:
                life = self._lives[rid] = _Life(knowledge)
                life.followed = followed
                life.embeds = embeds
                if grammar:  # drafts that it invalidates are masked away in the scheduler, and nobody counts them
                    life.chain = 0
                    life.ratios = life.ratios & replace_chain(knowledge).ratios

    def _finish(self, rid: str, row: Row, reason: Any) -> None:
        life = self._lives.pop(rid, None)
        # A sequence that was asked for no token: the warm-up of n > 1 sequences, which fills the prefix cache.
        # Newer versions say that it has none, older ones that it has one.
        no_output = isinstance(reason, Mapping) and reason.get("type") == "length" and reason.get("length") == 0
        if not row.completion or no_output:
            if life is not None and life.followed is not None and not life.followed.evicted:
                self._candidates.gone(life.followed)
            return
        if life is None:
            life = _Life(self._knowledge)
        self._add(life, row, final=True)
        self._sums_of(life.ratios).generations += 1
        followed = life.followed
        if followed is not None and not followed.evicted:
            followed.increments.append(Increment(SpecCounts(), 1, life.ratios))
            self._candidates.finish(followed, time.time_ns())

    def _add(self, life: _Life, row: Row, *, final: bool) -> None:
        counts, histogram = life.advance(row, self._knowledge, final=final)
        ratios = ratios_holding(counts)
        life.ratios = life.ratios & ratios
        sums = self._sums_of(ratios)
        for field in COUNT_FIELDS:
            sums.add(field, getattr(counts, field))
        if histogram is not None and counts.verify is not None:
            sums.add_positions(histogram, counts.verify, life.chain)
        followed = life.followed
        if followed is not None and not followed.evicted:
            followed.increments.append(Increment(counts, 0, ratios))

    def _sums_of(self, ratios: frozenset[str]) -> _Sums:
        sums = self._sums.get(ratios)
        if sums is None:
            sums = self._sums[ratios] = _Sums()
        return sums

    def ended_unseen(self, rid: str) -> None:
        """A request was taken away without a last message: aborted in the queue. It ends with what was told last."""
        self._do(lambda: self._ended_unseen(rid))

    def _ended_unseen(self, rid: str) -> None:
        row = self._live.pop(rid, None)
        if row is not None:
            self._finish(rid, row, None)

    def _do(self, change: Callable[[], None]) -> None:
        if self._reading.acquire(blocking=False):
            try:
                self._catch_up()
                change()
            finally:
                self._reading.release()
        else:
            self._aside.append(change)

    def _catch_up(self) -> None:
        while self._aside:
            self._aside.popleft()()

    def take(self) -> Taken:
        """See `engines.Tally`. On the collecting thread; the event loop's does not wait for it."""
        with self._reading:
            # Looked up before what was put aside is counted: a last message is seen before its state goes, so whoever is
            # still live after it and has no state ended without one.
            states = self._watch.states
            gone = [rid for rid in self._live if rid not in states]
            self._catch_up()
            for rid in gone:
                if self._watch.closed:
                    self._live.pop(rid, None)
                    self._lives.pop(rid, None)
                else:
                    self._ended_unseen(rid)
            self._add_running()
            sums, self._sums = self._sums, {}
            picked = self._candidates.drain()[:PICKS]
            taken = Taken([each.increment(ratios) for ratios, each in sums.items()], [each.picked() for each in picked])
            for life in self._lives.values():
                if life.followed is not None:
                    life.followed.increments = []
        return taken

    def _add_running(self) -> None:
        for rid, row in self._live.items():
            life = self._lives.get(rid)
            if life is None:
                life = self._lives[rid] = _Life(self._knowledge)
            self._add(life, row, final=False)

    def hand_over(self, to: RankTally) -> None:
        """Let `to` go on with the running generations: what they did until here stays, to be taken from this one."""
        with self._reading:
            self._catch_up()
            self._add_running()
            to._live, self._live = self._live, {}
            to._lives, self._lives = self._lives, {}
            for life in to._lives.values():
                life.followed = None


def replace_chain(knowledge: Knowledge) -> Knowledge:
    """The same without a known number of drafts."""
    return Knowledge(
        knowledge.accepted, None, knowledge.retractions, 0, knowledge.emits_always, knowledge.restores
    )


def _any_grammar(states: Iterable[Any]) -> bool:
    """Whether one of these requests is bound to a grammar, which invalidates drafts."""
    parameters = list(map(_sampling_params, states))
    return any(any(map(dict.get, parameters, repeat(name))) for name in _GRAMMARS)


def _trace_of(state: Any) -> TraceIds | None:
    """The context of the request's own span, which SGLang ends with the last message."""
    trace = getattr(getattr(state, "time_stats", None), "trace_ctx", None)  # 0.5.12 on, with --enable-trace
    if getattr(trace, "tracing_enable", None) is not True:
        return None
    span = getattr(trace, "root_span", None)
    if span is None:
        return None
    context = span.get_span_context()
    return TraceIds(context.trace_id, context.span_id, bool(context.trace_flags & 1))
