"""SGLang's adapter: what the messages on the response path say, as sums. Knows SGLang and nothing of OpenTelemetry.

Where it runs: in the process that holds the `TokenizerManager` (the server's main process, the application itself with
`sglang.Engine`, or one of several tokenizer workers, each for its own requests), on its event loop's thread, once a
message of the scheduler. What it may cost: a pass at C speed over the message's rows; a few microseconds of Python for
a generation that began, finished after a collection, or may become an exemplar; no lock that waits, no call into
OpenTelemetry.

Hooks, all on the base class `TokenizerManager` (`TokenizerWorker` inherits them): `__init__` (the engine is known),
`_handle_batch_output` (the counts), and where a request ends without a message: `_handle_abort_req` (aborted in the
queue), before 0.4.9 `abort_request`. The class is patched when its module is imported, because to 0.5.10 `__init__`
captures the bound methods; sglang is never imported from here.

The columns of a message are cumulative over a generation's life, so the newest row of each generation is all that is
kept, and a collection adds the difference to what was added before. Nothing is kept of a generation that finished.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, repeat, zip_longest
from operator import add, attrgetter, le, mul
from typing import Any, Final, NamedTuple

import wrapt

from otel_specdec.candidates import Candidate, Candidates, choose
from otel_specdec.counts import ALL_RATIOS, COUNT_FIELDS, SpecCounts, ratios_holding
from otel_specdec.engines import EngineDescription, EngineListener, Increment, Picked, Taken, TraceIds
from otel_specdec.engines.hooking import has_hook, hooked, is_hook
from otel_specdec.names import MAX_POSITIONS

TOKENIZER_MODULE: Final = "sglang.srt.managers.tokenizer_manager"
MESSAGES_MODULE: Final = "sglang.srt.managers.io_struct"
MESSAGE_CLASSES: Final = ("BatchTokenIDOutput", "BatchTokenIDOut")  # the second one to 0.5.3
_WATCH: Final = "_otel_specdec_watch"

# Under SGLang's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("sglang.otel_specdec")

# Columns, newest name first. Accepted draft tokens: 0.5.12 on, 0.5.11, 0.5.4 to 0.5.10; before that there is none.
_ACCEPTED: Final = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens")
_HISTOGRAM: Final = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")  # 0.5.12 on; 0.5.9 to 0.5.11
_VERIFY: Final = "spec_verify_ct"
_COMPLETION: Final = "completion_tokens"
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
_trace = attrgetter("trace")
_sampling_params = attrgetter("obj.sampling_params")
_input_embeds = attrgetter("obj.input_embeds")
_TOGETHER: Final = 512
"""Ended generations that wait to be added together, at most; a collection adds them all."""

_none: Final = repeat(None)
_one: Final = repeat(1)

Columns = Sequence[Sequence[Any]]
"""The columns of a message that tell something here, all of one length, in the order of `Knowledge.fields`."""


class Row(NamedTuple):
    """What the newest message said about one generation: cumulative over its life; None where it does not say."""

    verify: int | None = None
    accepted: int | None = None
    completion: int | None = None
    retractions: int | None = None
    histogram: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What this engine's version and configuration can tell about every generation.

    Attributes:
        accepted: the column of accepted draft tokens, or None where it is absent or known to be wrong. histogram: the
        column of steps by accepted tokens, or None where positions cannot be known. retractions: whether the number of
        retractions is told, without which emitted tokens are unknown. chain: draft tokens of every step, where that is
        the same for all; else 0, and proposed tokens are unknown. emits_always: whether every decoding step is a verify
        step, so that emitted tokens follow from the others. restores: whether a retracted request comes back without a
        prefill of its own (decode side of a disaggregated server).
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
    def fields(self) -> Mapping[str, str]:
        """The columns that are read, by field of `Row`; the others stay None."""
        columns = {
            "verify": _VERIFY,
            "accepted": self.accepted,
            "completion": _COMPLETION,
            "retractions": _RETRACTIONS if self.emitted else None,
            "histogram": self.histogram,
        }
        return {field: column for field, column in columns.items() if column is not None}

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

    def add_positions(self, histogram: Sequence[int], verify: int, accepted: int | None, chain: int) -> None:
        """`histogram[n]` steps accepted n of `chain` drafts: position i was accepted in all of them with n above i.

        Nothing is added where the histogram does not go with the other columns.
        """
        if (
            len(histogram) > chain + 1
            or sum(histogram) != verify
            or sum(map(mul, histogram, range(len(histogram)))) != accepted
        ):
            return
        reached = 0
        for position in range(len(histogram) - 2, -1, -1):
            reached += histogram[position + 1]
            if position < MAX_POSITIONS:
                self.accepted_at[position] += reached
        for position in range(min(chain, MAX_POSITIONS)):
            self.proposed_at[position] += verify

    def increment(self, ratios: frozenset[str]) -> Increment:
        positions = any(self.proposed_at)  # both, or none: a position is known with both halves
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

    def __init__(self, rid: str, state: Any, trace_of: Callable[[Any], TraceIds | None], order: float) -> None:
        super().__init__(order)
        self.rid = rid
        session = getattr(state.obj, "session_id", None)  # 0.5.18 on
        self.session_id = session if isinstance(session, str) else None
        self.trace = trace_of(state)
        self.increments: list[Increment] = []

    def drafts(self) -> tuple[int, int] | None:
        """Accepted and proposed tokens since the last drain; None where one is not known."""
        accepted = proposed = 0
        for increment in self.increments:
            if increment.counts.accepted is None or increment.counts.proposed is None:
                return None
            accepted += increment.counts.accepted
            proposed += increment.counts.proposed
        return accepted, proposed

    def picked(self, lowest_rate: float | None) -> Picked:
        # `meta_info.id`, and `id` of the OpenAI endpoints. Each of n > 1 sequences has an id of its own.
        return Picked(
            self.rid,
            self.finished_unix_nano,
            self.order,
            self.increments,
            session_id=self.session_id,
            trace=self.trace,
            lowest_rate=lowest_rate,
        )


class _Life:
    """What was added so far of a generation: of one that is collected before its end, or needs a look of its own."""

    __slots__ = ("accepted", "chain", "completion", "embeds", "emitted", "followed", "histogram", "ratios", "verify")

    def __init__(
        self, knowledge: Knowledge, followed: _Followed | None = None, *, grammar: bool = False, embeds: bool = False
    ) -> None:
        # None: unknown from here on. A new generation starts at known 0.
        self.verify: int | None = 0
        self.accepted: int | None = 0
        self.completion: int | None = 0
        self.emitted: int | None = 0
        self.histogram: Sequence[int] | None = ()
        self.chain = 0 if grammar else knowledge.chain
        self.embeds = embeds
        self.followed = followed
        self.ratios = ALL_RATIOS
        """Those that held in every increment."""

    def advance(self, row: Row, knowledge: Knowledge, *, final: bool) -> tuple[SpecCounts, Sequence[int] | None]:
        """What came since the last call, and how many of its steps accepted 0, 1, 2, … drafts, where that is known."""
        emitted = None
        if row.completion is not None and row.retractions is not None and knowledge.emitted:
            # The prefill gives a token, and so does the one after each retraction; all others come from verify steps.
            # Not where a retracted request is restored without a prefill, or starts over (embeddings cannot be
            # prolonged).
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
        return SpecCounts(accepted, proposed, verify, completion, emitted), histogram if self.chain else None


def _grow(known: int | None, now: int | None, final: bool) -> tuple[int | None, int | None]:
    """What is added now of a cumulative value: (the value so far, the difference); None is unknown, from here on.

    What was added never moves. A retraction raises its count before completion catches up, so a value may fall for a
    while; one that has fallen in the end contradicts what was added.
    """
    if known is None or now is None:
        return None, None
    if now >= known:
        return now, now - known
    return (None, None) if final else (known, 0)


def _spread(
    known: Sequence[int] | None, now: Sequence[int] | None
) -> tuple[Sequence[int] | None, Sequence[int] | None]:
    if known is None or now is None:
        return None, None
    difference = [new - old for new, old in zip_longest(now, known, fillvalue=0)]
    return (None, None) if difference and min(difference) < 0 else (now, difference)


class RankTally:
    """What the generations of one data-parallel rank did.

    The event loop's thread never waits: if a collection is just reading, the message is put aside and counted with the
    next one, or by the next collection.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._knowledge = watch.knowledge
        self._fields = tuple(watch.knowledge.fields)
        self._ratios = watch.knowledge.ratios
        place = {field: index for index, field in enumerate(self._fields)}
        self._verify, self._completion = place["verify"], place["completion"]
        self._accepted, self._retractions = place.get("accepted"), place.get("retractions")
        self._histogram = place.get("histogram")
        self._gaps = False
        """Whether a message had gaps (None) where a column should be: from then on each generation is looked at."""
        self._reading = threading.Lock()
        self._aside: deque[Callable[[], None]] = deque()
        self._live: dict[str, tuple[Any, ...]] = {}
        """A row of every generation that has begun and not finished, in the order of `_fields`: the newest but for
        `_newer`."""
        self._same: Sequence[str] | None = None
        """Whose rows were in the last message, if all of them are in `_live`: most messages are of the same ones."""
        self._newer: deque[tuple[Sequence[str], Columns]] = deque(maxlen=1)
        """`_same` and the columns of the last message, if it was of the same ones as that before it: not in `_live`
        yet. Put in and taken out at once, by whichever thread."""
        self._lives: dict[str, _Life] = {}
        """Of those, the ones of which something was added already, and those that need a look of their own."""
        self._done: list[tuple[Any, Any]] = []
        """Rows and reasons of generations that have ended, to be added together: so each costs less."""
        self._sums: dict[frozenset[str], _Sums] = {}
        self._candidates: Candidates[_Followed] = Candidates(lambda followed: None)

    @property
    def ended(self) -> bool:
        """See `engines.Tally`."""
        return self._watch.ended

    def gaps(self) -> None:
        """Messages begin to have gaps."""
        self._gaps = True

    def message(self, rids: Sequence[str], columns: Columns, reasons: Sequence[Any], ending: int) -> None:
        """Count one message; `reasons` are those of the rows that finish (`ending` of them), else None."""
        if self._reading.acquire(blocking=False):
            try:
                if self._aside:
                    self._catch_up()
                self._message(rids, columns, reasons, ending, self._watch.states.get, _trace_of)
            finally:
                self._reading.release()
        else:
            # SGLang goes on, finishes states, deletes them and ends their spans: what is wanted of them is read now.
            found = map(self._watch.states.get, rids)
            seen = {rid: _Seen(state) for rid, state in zip(rids, found, strict=True) if state is not None}
            self._aside.append(partial(self._message, rids, columns, reasons, ending, seen.get, _trace))

    def steady(self, rids: Sequence[str], message: Any, columns_of: Callable[[Any], Columns]) -> bool:
        """Note a message of the same generations as the last in which nobody ends; False, and nothing done, for others.

        Most messages are like that. The ids are compared one by one and not hashed, and no lock is taken: see
        `_forget_same`.
        """
        same = self._same
        if rids != same or self._aside:
            return False
        try:
            number = len(rids)
            columns = columns_of(message)
            if message.finished_reasons.count(None) != number:
                return False
            for column in columns:
                if len(column) != number:
                    return False
        except (AttributeError, TypeError):  # a column is absent, or None
            return False
        self._newer.append((same, columns))
        if self._same is not same:  # a collection came between, and may have passed it by
            self._newer.clear()
            return False
        return True

    def _message(
        self,
        rids: Sequence[str],
        columns: Columns,
        reasons: Sequence[Any],
        ending: int,
        state_of: Callable[[str], Any],
        trace_of: Callable[[Any], TraceIds | None],
    ) -> None:
        live = self._live
        self._forget_same()
        if ending == len(rids) and live.keys().isdisjoint(rids):
            # Each generation begins and ends with this message: what is not streamed, and short.
            states = list(map(state_of, rids))
            orders = [random.random() for _ in rids]
            entering = self._candidates.entering(orders)
            if not self._gaps and len(entering) < len(rids) and self._ordinary(rids, states):
                others = columns
                if entering:
                    staying = sorted(set(range(len(rids))).difference(entering))
                    others = [[column[row] for row in staying] for column in columns]
                if self._add_together(others):
                    if not entering:
                        return
                    rids, reasons, states, orders, *columns = (
                        [column[row] for row in entering] for column in (rids, reasons, states, orders, *columns)
                    )
                    ending = len(rids)
            live.update(zip(rids, zip(*columns)))  # noqa: B905  # of one length, see `Watch.message`; a check costs 0.3 µs
            self._begin(rids, states, orders, trace_of)
        else:
            before = len(live)
            born: Sequence[str] = ()
            live.update(zip(rids, zip(*columns)))  # noqa: B905  # of one length, see `Watch.message`; a check costs 0.3 µs
            if len(live) != before:
                born = list(islice(reversed(live), len(live) - before))
                states = list(map(state_of, born))
                orders = [random.random() for _ in born]
                if self._candidates.entering(orders) or not self._ordinary(born, states):
                    self._begin(born, states, orders, trace_of)
            if not ending and len(live) == before + len(born):  # none of them was passed over
                self._same = rids
        if ending == len(rids):
            self._end(rids, reasons)
        elif ending:
            last = [row for row, reason in enumerate(reasons) if reason is not None]
            self._end([rids[row] for row in last], [reasons[row] for row in last])

    def _ordinary(self, rids: Sequence[str], states: Sequence[Any]) -> bool:
        """Whether there is nothing to look at in any of these requests, which have just begun."""
        return (
            all(states)
            and not any(map(_finished, states))
            and not any(map(str.startswith, rids, repeat(_HEALTH_CHECK)))
            and not any(map(_input_embeds, states))
            and not (self._knowledge.chain and _any_grammar(states))
        )

    def _add_together(self, columns: Columns) -> bool:
        """Add whole generations at once; False, and nothing done, where one of them is not like the others."""
        verify, completion = columns[self._verify], columns[self._completion]
        if min(completion) < 2 or (self._retractions is not None and any(columns[self._retractions])):
            return False  # no token, a hidden warm-up, the prefill's token alone; a token of another prefill
        accepted = columns[self._accepted] if self._accepted is not None else None
        chain, emits = self._knowledge.chain, self._retractions is not None
        if accepted is not None:
            if emits and not all(map(le, completion, map(add, map(add, accepted, verify), _one))):
                return False
            if chain and not all(map(le, accepted, map(mul, verify, repeat(chain)))):
                return False
        steps, tokens = sum(verify), sum(completion)
        sums = self._sums_of(self._ratios)
        sums.generations += len(completion)
        sums.add("verify", steps)
        sums.add("completion", tokens)
        if accepted is not None:
            sums.add("accepted", sum(accepted))
        if chain:
            sums.add("proposed", steps * chain)
        if emits:
            sums.add("emitted", tokens - len(completion))  # each but the token of the prefill
        if self._histogram is not None and accepted is not None:
            together = list(map(sum, zip_longest(*columns[self._histogram], fillvalue=0)))
            sums.add_positions(together, steps, sum(accepted), chain)
        return True

    def _begin(
        self,
        rids: Sequence[str],
        states: Sequence[Any],
        orders: Sequence[float],
        trace_of: Callable[[Any], TraceIds | None],
    ) -> None:
        """Look at each of the requests that have just begun."""
        knowledge = self._knowledge
        for rid, state, order in zip(rids, states, orders, strict=True):
            # SGLang passes over a row without a state. A finished one that is still there was counted: to 0.4.8 after
            # the last message, to 0.5.9 after an abort in the queue, until whoever waits for it deletes it.
            if state is None or state.finished or rid.startswith(_HEALTH_CHECK):
                self._live.pop(rid, None)
                continue
            followed = self._candidates.born(partial(_Followed, rid, state, trace_of), order)
            grammar = bool(knowledge.chain) and _any_grammar((state,))
            embeds = _input_embeds(state) is not None
            if followed is not None or grammar or embeds:
                self._lives[rid] = _Life(knowledge, followed, grammar=grammar, embeds=embeds)

    def _end(self, rids: Sequence[str], reasons: Sequence[Any]) -> None:
        """These generations end with the rows that were just noted."""
        rows: list[Any] = list(map(self._live.pop, rids, _none))
        together: Sequence[tuple[Any, Any]] = list(zip(rows, reasons, strict=True))
        known: dict[str, Any] = self._lives
        lives = list(map(known.pop, rids, _none)) if known else [None] * len(rids)
        if any(lives) or not all(rows):
            for life, (row, reason) in zip(lives, together, strict=True):
                if life is not None:
                    self._finish(life, self._row(row), reason)
            together = [
                each for life, each in zip(lives, together, strict=True) if life is None and each[0] is not None
            ]
        self._done += together
        if len(self._done) >= _TOGETHER:
            self._add_done()

    def _add_done(self) -> None:
        """Add the generations that have ended since the last time, as far as they are like each other."""
        done, self._done = self._done, []
        if not done or (not self._gaps and self._add_together(list(zip(*[row for row, _ in done], strict=True)))):
            return
        if not self._gaps:  # those that are short or were retracted are taken out, and the others tried again
            others = [row for row, _ in done if not self._is_special(row)]
            if others and self._add_together(list(zip(*others, strict=True))):
                done = [each for each in done if self._is_special(each[0])]
        for row, reason in done:
            self._finish(_Life(self._knowledge), self._row(row), reason)

    def _is_special(self, row: Sequence[Any]) -> bool:
        """Whether it can't be added with others: no token, the prefill's alone, or a token of another prefill."""
        return bool(row[self._completion] < 2 or (self._retractions is not None and row[self._retractions]))

    def _row(self, row: Sequence[Any]) -> Row:
        return Row(**dict(zip(self._fields, row, strict=True)))

    def _finish(self, life: _Life, row: Row, reason: Any) -> None:
        # A sequence that was asked for no token is the warm-up of n > 1 sequences, which fills the prefix cache. In
        # 0.5.23 it has no token, in older versions one.
        no_output = isinstance(reason, Mapping) and reason.get("type") == "length" and reason.get("length") == 0
        followed = life.followed
        if row.completion == 0 or no_output:
            if followed is not None and not followed.evicted:
                self._candidates.gone(followed)
            return
        self._add(life, row, final=True)
        self._sums_of(life.ratios).generations += 1
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
            sums.add_positions(histogram, counts.verify, counts.accepted, life.chain)
        followed = life.followed
        if followed is not None and not followed.evicted:
            followed.increments.append(Increment(counts, 0, ratios))

    def _sums_of(self, ratios: frozenset[str]) -> _Sums:
        sums = self._sums.get(ratios)
        if sums is None:
            sums = self._sums[ratios] = _Sums()
        return sums

    def ended_unseen(self, rid: str) -> None:
        """A request went without a last message (it was aborted in the queue): it ends with what was told last."""
        change = partial(self._ended_unseen, rid)
        if self._reading.acquire(blocking=False):
            try:
                self._catch_up()
                change()
            finally:
                self._reading.release()
        else:
            self._aside.append(change)

    def _ended_unseen(self, rid: str) -> None:
        self._forget_same()
        row = self._live.pop(rid, None)
        if row is not None:
            life = self._lives.pop(rid) if rid in self._lives else _Life(self._knowledge)
            self._finish(life, self._row(row), None)

    def _note_newer(self, same: Sequence[str] | None = None) -> None:
        try:
            rids, columns = self._newer.pop()
        except IndexError:
            return
        if rids is (same or self._same):
            self._live.update(zip(rids, zip(*columns)))  # noqa: B905  # as above

    def _forget_same(self) -> None:
        """The next message is looked at row by row.

        In this order: `steady`, which takes no lock, notes its columns first and looks then whether these are still the
        same. If they are, the columns are found here; if not, it does nothing, and its message is counted as others
        are.
        """
        same, self._same = self._same, None
        self._note_newer(same)

    def _catch_up(self) -> None:
        while self._aside:
            try:
                self._aside[0]()
            finally:
                self._aside.popleft()  # not before: `steady` looks whether there is something

    def take(self) -> Taken:
        """See `engines.Tally`. On the collecting thread; the event loop's does not wait for it."""
        with self._reading:
            # Looked up before what was put aside is counted: a last message is seen before its state goes, so whoever
            # is still live after it and had no state ended without one.
            states = self._watch.states
            gone = [rid for rid in self._live if rid not in states]
            self._catch_up()
            self._note_newer()
            for rid in gone:
                if self._watch.closed:  # it may have ended in any way
                    self._forget_same()
                    self._live.pop(rid, None)
                    self._lives.pop(rid, None)
                else:
                    self._ended_unseen(rid)
            self._add_done()
            self._add_running()
            sums, self._sums = self._sums, {}
            picked = [each.picked(rate) for each, rate in choose(self._candidates.drain(), _Followed.drafts)]
            for life in self._lives.values():
                if life.followed is not None:
                    life.followed.increments = []
        return Taken([each.increment(ratios) for ratios, each in sums.items()], picked)

    def _add_running(self) -> None:
        for rid, row in self._live.items():
            life = self._lives.get(rid)
            if life is None:
                life = self._lives[rid] = _Life(self._knowledge)
            self._add(life, self._row(row), final=False)

    def hand_over(self, to: RankTally) -> None:
        """Let `to` go on with the running generations. What they did until here stays, to be taken from this one."""
        with self._reading:
            self._catch_up()
            self._forget_same()
            self._add_running()
            to._live, self._live = self._live, {}
            to._lives, self._lives = self._lives, {}
            for life in to._lives.values():
                life.followed = None


def _any_grammar(states: Iterable[Any]) -> bool:
    """Whether one of these requests is bound to a grammar, which masks drafts that nobody counts."""
    parameters = list(map(_sampling_params, states))
    return any(any(map(dict.get, parameters, repeat(name))) for name in _GRAMMARS)


def _trace_of(state: Any) -> TraceIds | None:
    """The context of the request's own span, which SGLang ends with the last message."""
    trace = getattr(getattr(state, "time_stats", None), "trace_ctx", None)  # with --enable-trace
    if getattr(trace, "tracing_enable", None) is not True:
        return None
    span = getattr(trace, "root_span", None)
    if span is None:
        return None
    context = span.get_span_context()
    return TraceIds(context.trace_id, context.span_id, bool(context.trace_flags & 1))


class _Seen:
    """What a request's state said when its message came, for one that is counted later."""

    __slots__ = ("finished", "obj", "trace")

    def __init__(self, state: Any) -> None:
        self.finished: bool = state.finished
        self.obj = state.obj
        self.trace = _trace_of(state)


class Watch:
    """One `TokenizerManager` with speculation: what it can tell, and a tally for each data-parallel rank."""

    def __init__(self, owner: Hooks, manager: Any, engine: EngineDescription | None, knowledge: Knowledge) -> None:
        self.owner = owner
        self.counts = engine is not None
        self.knowledge = knowledge
        self.states: Mapping[str, Any] = manager.rid_to_state
        self._manager = weakref.ref(manager)
        self._engine = engine
        self._columns: Callable[[Any], Columns] = attrgetter(*knowledge.fields.values())
        self._tallies: dict[int, RankTally] = {}
        self._only: RankTally | None = None
        """The tally, if there is one alone: then the same generations are of the same rank."""

    @property
    def ended(self) -> bool:
        """Whether the manager is gone."""
        return self._manager() is None

    @property
    def closed(self) -> bool:
        """Whether nothing is seen any more of what this manager does."""
        return Hooks._installed is not self.owner

    def is_idle(self) -> bool:
        """Whether the manager has no request just now."""
        return not self.states

    def tally(self, rank: int) -> RankTally:
        """The tally of a rank; made at first sight where the configuration did not announce it."""
        tally = self._tallies.get(rank)
        if tally is None:
            assert self._engine is not None
            tally = self._tallies[rank] = RankTally(self)
            self._only = tally if len(self._tallies) == 1 else None
            self.owner.listener.engine_started(replace(self._engine, index=rank), tally, self.is_idle)
        return tally

    def message(self, message: Any) -> None:
        """Read a message's columns; on the event loop's thread, before SGLang itself reads them."""
        rids = message.rids
        number = len(rids)
        if not number:
            return
        if self._only is not None and self._only.steady(rids, message, self._columns):
            return
        columns: Columns
        try:
            columns = self._columns(message)
            whole = {*map(len, columns)} == {number}
        except (AttributeError, TypeError):  # embeddings; without speculation a column is None
            whole = False
        if not whole:
            if not getattr(message, _COMPLETION, None):
                return
            columns = [_column(message, name, number) for name in self.knowledge.fields.values()]
            for tally in self._tallies.values():
                tally.gaps()
        reasons = message.finished_reasons
        ending = number - reasons.count(None)
        ranks = getattr(message, _RANKS, None)
        if not ranks or ranks.count(ranks[0]) == number:
            rank = ranks[0] or 0 if ranks else 0
            (self._tallies.get(rank) or self.tally(rank)).message(rids, columns, reasons, ending)
        else:
            for rank in dict.fromkeys(ranks):
                rows = [row for row, each in enumerate(ranks) if each == rank]
                ids, why, *part = ([column[row] for row in rows] for column in (rids, reasons, *columns))
                self.tally(rank or 0).message(ids, part, why, len(why) - why.count(None))
        if ending and ending >= len(self.states):  # as many as there are; whoever flushes asks `is_idle` once more
            self.owner.listener.engine_idle()

    def ended_unseen(self, rid: str) -> None:
        """A request was aborted in the queue, or its state taken away: no message will tell of it again."""
        for tally in self._tallies.values():
            tally.ended_unseen(rid)

    def take_over(self, earlier: Watch) -> None:
        """Go on with the running generations of an earlier instrumentation of the same manager."""
        for rank, tally in earlier._tallies.items():
            tally.hand_over(self.tally(rank))


def _column(message: Any, name: str, number: int) -> Sequence[Any]:
    """A column of a message; nothing but None where it is absent or empty (`[]` or None without speculation)."""
    column = getattr(message, name, None)
    return column if column is not None and len(column) == number else [None] * number


def describe(manager: Any) -> tuple[EngineDescription | None, Knowledge]:
    """What the configuration and the version say, or None where this process is not to count.

    It is not where the engine does not speculate, nor on the prefill side of a disaggregated server: each of its
    requests is a generation of the decode side.
    """
    setting = partial(_setting, manager)
    algorithm = str(setting("speculative_algorithm") or "").upper()
    side = str(setting("disaggregation_mode") or "null")
    knowledge = _knowledge(algorithm, side, setting)
    if not algorithm or side == "prefill":
        return None, knowledge
    model = getattr(manager, "served_model_name", None) or setting("served_model_name") or setting("model_path")
    return (
        EngineDescription(
            provider="sglang",
            model=str(model),
            method=algorithm.lower(),
            max_drafts=knowledge.chain,
            index=0,
            ratios=knowledge.ratios,
            role=f"tokenizer-{_worker(manager)}",
            unknown=knowledge.unknown,
        ),
        knowledge,
    )


def _knowledge(algorithm: str, side: str, setting: Callable[[str], Any]) -> Knowledge:
    columns = _message_columns()
    accepted = next((name for name in _ACCEPTED if name in columns), None)
    histogram = next((name for name in _HISTOGRAM if name in columns), None)
    retractions = _RETRACTIONS in columns
    if histogram is None:
        # 0.5.4 and 0.5.5 have the column and leave it 0 with NGRAM, 0.5.4 in EAGLE's overlap scheduler too. (0.5.6 to
        # 0.5.8 cannot be told from 0.5.5 by their columns.)
        overlap = not setting("disable_overlap_schedule")
        if algorithm == "NGRAM" or (overlap and not retractions):
            accepted = None
    chain = 0
    steps, drafts = setting("speculative_num_steps"), setting("speculative_num_draft_tokens")
    if (
        algorithm in _CHAINS
        and setting("speculative_eagle_topk") == 1
        and isinstance(steps, int)
        and drafts == steps + 1  # the first of them is the last verified token, not a draft
        and not setting("speculative_adaptive")
        and setting("decoupled_spec_role") in (None, "null")
        and os.environ.get("SGLANG_RAGGED_VERIFY_MODE", "static").lower() == "static"
    ):
        chain = steps
    return Knowledge(
        accepted=accepted,
        histogram=histogram if chain else None,
        retractions=retractions,
        chain=chain,
        # In a mixed batch a decoding request gets one token beside another's prefill, without a verify step.
        emits_always=algorithm in _VERIFY_ALWAYS and not setting("enable_mixed_chunk"),
        restores=side == "decode",
    )


def _message_columns() -> frozenset[str]:
    """The columns of this version's messages: a dataclass to 0.5.17, then a msgspec.Struct."""
    structs = sys.modules.get(MESSAGES_MODULE)
    message = next(filter(None, (getattr(structs, name, None) for name in MESSAGE_CLASSES)), None)
    names = getattr(message, "__struct_fields__", None) or getattr(message, "__dataclass_fields__", None)
    return frozenset(names or ())


def _setting(manager: Any, name: str) -> Any:
    """A resolved setting: from the process's published configuration (0.5.18 on), else from the server's arguments."""
    context = getattr(sys.modules.get("sglang.srt.runtime_context"), "get_context", None)
    leaf = getattr(context(), "config_leaf", None) if context is not None else None
    if leaf is not None:
        try:
            return leaf(name)
        except Exception:  # no such setting in this version, or nothing published yet
            pass
    return getattr(getattr(manager, "server_args", None), name, None)


def _worker(manager: Any) -> int:
    """Which tokenizer this process is: 0 for the only one, else its number among the server's children."""
    import multiprocessing  # here: it is some ms, and only engines need it

    if type(manager).__name__ != "TokenizerWorker" and multiprocessing.parent_process() is None:
        return 0
    identity = multiprocessing.current_process()._identity  # no public name; the name holds it too
    return int(identity[-1]) if identity else 0


class Hooks:
    """The hooks on SGLang's tokenizer manager for one listener. At most one is installed in a process.

    `install` may come before sglang is imported, after it, or after the manager was made (to 0.5.10 that is too late:
    it has captured its methods, and a line in the log says so). `remove` puts the originals back and leaves what was
    counted to be taken.
    """

    _installed: Hooks | None = None
    _awaiting_import = False

    def __init__(self, listener: EngineListener) -> None:
        self.listener = listener

    def install(self) -> None:
        """Hook the class, now or when its module is imported."""
        Hooks._installed = self
        if TOKENIZER_MODULE in sys.modules:
            self._wrap(sys.modules[TOKENIZER_MODULE])
        elif not Hooks._awaiting_import:
            Hooks._awaiting_import = True
            wrapt.register_post_import_hook(_on_import, TOKENIZER_MODULE)

    def remove(self) -> None:
        """Put the class's own methods back."""
        if Hooks._installed is self:
            Hooks._installed = None
        manager = getattr(sys.modules.get(TOKENIZER_MODULE), "TokenizerManager", None)
        for name in _WRAPPERS:
            current: Any = vars(manager).get(name) if manager is not None else None
            if is_hook(current):
                setattr(manager, name, current.__wrapped__)

    def _wrap(self, module: Any) -> None:
        manager = getattr(module, "TokenizerManager", None)
        missing = differences(manager, _message_columns())
        if missing:
            logger.warning(
                "otel_specdec does not know this SGLang (%s): it counts nothing here, and SGLang is left as it is.",
                "; ".join(missing),
            )
            return
        for name, wrapper in _WRAPPERS.items():
            original = vars(manager).get(name)
            # The abort in the queue has its handler from 0.4.9 on; before it the frontend deletes the state itself.
            if name == "abort_request" and "_handle_abort_req" in vars(manager):
                continue
            if original is not None and not has_hook(original):
                setattr(manager, name, wrapper(original))
        logger.debug("otel_specdec hooked SGLang's TokenizerManager")

    def watch_for(self, manager: Any) -> Watch:
        """What is kept for this manager; made at first sight, for one that was made before the hooks too."""
        watch: Watch | None = getattr(manager, _WATCH, None)
        if watch is None or watch.owner is not self:
            earlier = watch
            engine, knowledge = None, _UNKNOWN
            try:
                engine, knowledge = describe(manager)
            except Exception as error:
                self.listener.failed(error, "reading SGLang's configuration")
            watch = Watch(self, manager, engine, knowledge)
            setattr(manager, _WATCH, watch)
            if engine is not None:
                ranks = _setting(manager, "dp_size") if _RANKS in _message_columns() else 1
                for rank in range(max(1, int(ranks or 1))):
                    watch.tally(rank)
                if earlier is not None:
                    watch.take_over(earlier)
        return watch


_UNKNOWN: Final = Knowledge(None, None, False, 0, False, False)


def _on_import(module: Any) -> None:
    Hooks._awaiting_import = False
    hooks = Hooks._installed
    if hooks is not None:
        try:
            hooks._wrap(module)
        except Exception as error:  # an exception here would break sglang's own import
            hooks.listener.failed(error, "hooking SGLang's tokenizer manager")


def differences(manager: Any, columns: frozenset[str]) -> list[str]:
    """What this SGLang's tokenizer manager and its messages lack of what the hooks need; empty where all is there.

    Looks at the methods' names and parameters alone: the doctor asks about a class that it made from the source.
    """
    if not inspect.isclass(manager):
        return [f"{TOKENIZER_MODULE} has no class TokenizerManager"]
    found = []
    for name, needed in (("__init__", ()), ("_handle_batch_output", ("recv_obj",))):
        function = inspect.unwrap(vars(manager)[name]) if name in vars(manager) else None
        if not inspect.isfunction(function):
            found.append(f"TokenizerManager.{name} is not a method")
            continue
        parameters = list(inspect.signature(function).parameters)
        if tuple(parameters[1 : 1 + len(needed)]) != needed:
            found.append(f"TokenizerManager.{name}({', '.join(parameters)}) is not as expected")
    lacking = {"rids", "finished_reasons", "completion_tokens", "spec_verify_ct"} - columns
    if lacking:
        found.append(f"its messages have no {', '.join(sorted(lacking))}")
    return found


def _around_init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hooks = Hooks._installed
        if hooks is not None:
            try:
                hooks.watch_for(self)
            except Exception as error:
                hooks.listener.failed(error, "meeting an SGLang engine")

    return hooked(__init__, original)


def _around_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    # Not a coroutine itself, where the original is one (0.5.12 on): it returns the original's, and is done before it
    # runs.
    def _handle_batch_output(self: Any, recv_obj: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = Hooks._installed
        if hooks is not None:
            try:
                # Not by `__dict__`: asking makes it, and SGLang's own attributes are slower to reach from then on.
                watch = getattr(self, _WATCH, None)
                if watch is None or watch.owner is not hooks:
                    watch = hooks.watch_for(self)
                if watch.counts:
                    watch.message(recv_obj)
            except Exception as error:
                hooks.listener.failed(error, "counting a message of SGLang's")
        return original(self, recv_obj, *args, **kwargs)

    return hooked(_handle_batch_output, original)


def _around_abort(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around `_handle_abort_req(recv_obj)` and the older `abort_request(rid)`: a request may end without a message.

    Its state is deleted at once before 0.4.9 and in newer versions; in those between it is finished, and deleted by
    whoever waits for it.
    """

    def abort(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = Hooks._installed
        state = rid = None
        if hooks is not None:
            try:
                about = args[0] if args else next(iter(kwargs.values()), None)
                rid = getattr(about, "rid", about)
                state = self.rid_to_state.get(rid) if isinstance(rid, str) else None
            except Exception as error:
                hooks.listener.failed(error, "reading an abort in SGLang")
        result = original(self, *args, **kwargs)
        if hooks is not None and state is not None:
            try:
                watch = getattr(self, _WATCH, None)
                gone = self.rid_to_state.get(rid) is not state
                if watch is not None and watch.counts and (gone or state.finished):
                    watch.ended_unseen(rid)
                    if not self.rid_to_state:
                        hooks.listener.engine_idle()
            except Exception as error:
                hooks.listener.failed(error, "counting an abort in SGLang")
        return result

    return hooked(abort, original)


_WRAPPERS: Final[Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "__init__": _around_init,
    "_handle_batch_output": _around_batch,
    "_handle_abort_req": _around_abort,
    "abort_request": _around_abort,
}
