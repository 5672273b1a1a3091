"""vLLM's adapter: what each step of the V1 scheduler did, as sums. Knows vLLM and nothing of OpenTelemetry.

Where it runs: in the process that holds the scheduler (EngineCore, or the application itself with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`), on the engine's thread, once a step. What it may cost: a few passes at C speed
over the step's requests; no lock that waits, a byte or two per generation until 32 steps are counted together, no
OpenTelemetry.

Hooks, all on the base class `vllm.v1.core.sched.scheduler.Scheduler` (`AsyncScheduler` inherits them): `__init__` (the
engine is known), `update_from_output` (the counts), `finish_requests` (aborts). vllm is never imported from here: the
hooks wait for its module to be imported by somebody else, which costs seconds and is not ours to cause. The front end
has hooks of its own (`vllm_front_end`), the exemplars' candidates are in `vllm_candidates`.
"""

from __future__ import annotations

import heapq
import importlib
import inspect
import itertools
import random
import re
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import wrapt

from otel_specdec.candidates import PICKS, PLACES, choose
from otel_specdec.counts import SpecCounts
from otel_specdec.engines import EngineDescription, EngineListener, Increment, Picked, Taken
from otel_specdec.engines.hooking import is_hook
from otel_specdec.engines.vllm_candidates import NO_ROW, Birth, Entered, Followed, Following, Places, Step
from otel_specdec.engines.vllm_front_end import FrontHooks
from otel_specdec.engines.vllm_shared import describe_config, hook, logger
from otel_specdec.names import MAX_POSITIONS

SCHEDULER_MODULE: Final = "vllm.v1.core.sched.scheduler"
_TALLY: Final = "_otel_specdec_tally"

_nothing: Final = itertools.repeat(())

Lengths = bytes | list[int]  # bytes where none is above 255

_BELOW_16: Final = bytes(range(16))

_TOGETHER: Final = 32  # steps, until they are counted

_nobody: Final[frozenset[str]] = frozenset()

_req_id: Final = attrgetter("req_id")
_resumable: Final = itertools.repeat("resumable")
_false: Final = itertools.repeat(False)


Before = tuple[Lengths, int, Sequence[str], Sequence[Birth], int, Set[str]]
"""What must be read before the call, which trims the sampled lists and takes requests away.

The tokens of each row; how many drafts (≥ 1) everybody has but the new, who have none, or 0 where it is not like that;
ids that came from the waiting queue, the new; those of them without a token yet, as far as they may become
candidates; how many run; ids of those that finished before, as far as the scheduler still knows of them.
"""


Part = tuple[int, int, int]
"""One request's part in a step: valid drafts, generated, emitted."""

Changes = tuple[Sequence[int], Sequence[Entered], Set[str], Sequence[int], Lengths, int]
"""How a step changed who runs.

Rows of the new, who had no drafts where all others had as many; candidates that were born; ids of those who ended, and
their rows; how many tokens of each row went out, which may be less than were generated for those who ended; the time of
it in Unix nanoseconds, if anybody did.
"""

Whole = tuple[Step, Changes | None]
"""A step of which all tokens went out but what ends trimmed."""


class Aborted(NamedTuple):
    """Requests that ended by no step: their ids, those of them that are generations, and when (Unix nanoseconds)."""

    request_ids: Sequence[str]
    generations: Sequence[str]
    unix_nano: int


class StepTally:
    """What one scheduler's steps did: how often each (valid drafts, generated, emitted) occurred, and who finished.

    Steps stand in a line until there are enough to count together, or somebody collects. The engine's thread never
    waits: if a collection is just reading the sums (some µs, 5 ms if the reader loses the GIL in the middle), what is
    in the line is counted with the next step, or by the next collection.
    """

    def __init__(self, owner: Hooks, scheduler: Any, *, counts: bool) -> None:
        self.owner = owner
        self.counts = counts
        self.stepping = self.finishing = False  # while vLLM's own method runs
        self._scheduler = weakref.ref(scheduler)
        self._reading = threading.Lock()
        self._line: deque[Whole | Aborted | Callable[[], None]] = deque()  # what is not counted yet
        self._sums = _StepSums()
        self._finished = 0
        self._resumable = False  # whether a request ever was: only those have a turn that ends without finishing them
        self._paused_sessions: set[str] = set()  # those whose turn ended; of the engine's thread
        self._places = Places()
        self._following = Following()
        self._inside: list[tuple[str, bool]] = []  # aborted while `update_from_output` ran
        self._row_ids: Sequence[str] | None = None  # whose the rows of the last step were
        self._in_order: Sequence[str] = ()  # the same, where it is known that they are in the rows' order

    @property
    def ended(self) -> bool:
        """See `engines.Tally`: the scheduler is gone."""
        return self._scheduler() is None

    def is_idle(self) -> bool:
        """Whether the scheduler has no request; from any thread."""
        scheduler = self._scheduler()
        return scheduler is None or not scheduler.requests

    def before_step(self, scheduler: Any, step: Any, output: Any) -> Before:
        """What must be read before the call: the lengths of the sampled lists, which it trims, and who is new."""
        if self._inside:
            self._settle_inside()  # the last call ended with an exception of vLLM's
        drafts = step.scheduled_spec_decode_tokens
        sampled = output.sampled_token_ids
        new: Sequence[str] = ()
        births: Sequence[Birth] = ()
        if step.scheduled_new_reqs:
            new = [*map(_req_id, step.scheduled_new_reqs)]
            births = self._births(scheduler, new)
        alike = 0
        if (
            drafts
            and len(drafts) == len(sampled) - len(new)
            # Or some drafts may be invalid; see `_valid_drafts`.
            and not getattr(step, "num_invalid_spec_tokens", None)
            and not getattr(step.scheduled_cached_reqs, "resumed_req_ids", None)
        ):
            # Not after the call: it looks at the drafts too, and finds them in the cache then.
            lengths = _lengths(drafts.values())
            if lengths.count(lengths[0]) == len(lengths) and (
                not new or drafts.keys().isdisjoint(new)  # those are padding
            ):
                alike = lengths[0]
        finished = scheduler.finished_req_ids
        return (
            _lengths(sampled),
            alike,
            new,
            births,
            len(scheduler.running),
            frozenset(finished) if finished else _nobody,
        )

    def _births(self, scheduler: Any, new: Sequence[str]) -> Sequence[Birth]:
        # Not after the call: it looks at these requests too, and finds them in the cache then.
        requests = [*map(scheduler.requests.get, new)]
        if not self._resumable and any(map(getattr, requests, _resumable, _false)):
            self._resumable = True
        orders = [random.random() for _ in new]
        bar = self._following.bar
        if min(orders) >= bar:
            return ()
        births = [
            (order, request)
            for order, request in zip(orders, requests, strict=True)
            # With the second model runner, preempted requests that come back are new too, and so is a session's next
            # turn, whose request has no output of its own yet.
            if order < bar
            and request is not None
            and not request.num_output_tokens
            and request.request_id not in self._paused_sessions
        ]
        if len(births) > PLACES + PICKS:  # no more of them can stay candidates
            births = heapq.nsmallest(PLACES + PICKS, births, itemgetter(0))
        return births

    def after_step(self, scheduler: Any, step: Any, output: Any, before: Before, result: Any) -> None:
        """Count one step.

        An ordinary one is only put in a line, and counted with others. That way is straight on purpose: what a step
        costs is less its instructions than that the model's run before it left nothing of ours in the caches,
        neither code nor data.
        """
        generated, alike, new, _, running, finished_before = before
        rows = output.req_id_to_index
        # 0.9.0 returns one EngineCoreOutputs, later versions one for each client.
        parts = []
        served = 0
        for each in result.values() if isinstance(result, dict) else (result,):
            parts.append(each.outputs)
            served += len(each.outputs)
        if (
            alike
            and not new
            # Every row went out.
            and served == len(generated) == len(rows)
            and isinstance(generated, bytes)
            and 0 not in generated
            # Nobody ended, failed inside the call, or left the running ones in another way.
            and len(scheduler.finished_req_ids) == len(finished_before)
            and len(scheduler.running) == running
            and not self._inside
            and not self._resumable  # see below
            # Nothing was trimmed, as at the end of a turn.
            and _lengths(output.sampled_token_ids) == generated
        ):
            of_places = self._rows_of_places(output)
            if self._places.complete:
                self._line.append(((alike, generated, of_places), None))
                if len(self._line) >= _TOGETHER:
                    self._count_line()
                return
        self._after_other_step(scheduler, step, output, before, parts, served)

    def _rows_of_places(self, output: Any) -> Sequence[int]:
        # Most steps have the rows of the step before, and lists of the same ids are compared without a look at them.
        row_ids = getattr(output, "req_ids", None)
        if row_ids is None or row_ids != self._row_ids:
            self._row_ids = None if row_ids is None else list(row_ids)
            self._in_order = ()
            self._places.look_again()
        return self._places.rows(output.req_id_to_index)

    def _after_other_step(
        self, scheduler: Any, step: Any, output: Any, before: Before, parts: Sequence[Sequence[Any]], served: int
    ) -> None:
        """Count a step in which drafts differ, something changed, or went astray.

        Unless it went astray, whoever began or ended is only noted, at C speed, and looked at when the line is counted.
        """
        generated, alike, new, births, running, finished_before = before
        rows = output.req_id_to_index
        places = self._places
        ended: Set[str] = _nobody
        if len(scheduler.finished_req_ids) != len(finished_before):
            ended = scheduler.finished_req_ids - finished_before
        came_back = bool(new) and places.holds(new)
        entered = places.enter(births) if births else ()
        drafts = step.scheduled_spec_decode_tokens
        if drafts and not alike:
            drafts = _valid_drafts(step, drafts, new)
        went_out = _lengths(output.sampled_token_ids)
        rows_of_ended: Sequence[int] | None = None
        whole: Step | None = None
        if (
            isinstance(generated, bytes)
            and len(generated) == len(rows)
            # Every row with tokens went out, and nothing without tokens did.
            and served == len(generated) - generated.count(0) > 0
            # No request failed inside the call, or left the running ones in another way than by finishing.
            and not self._inside
            and len(scheduler.running) == running - len(ended)
            and not (self._resumable and _somebody_stopped(parts))  # a turn may be over, also of who was preempted
            and (rows_of_ended := _rows_of_ended(ended, output, generated, went_out)) is not None
        ):
            of_places = self._rows_of_places(output)
            if alike and places.complete and not came_back and 0 not in generated:
                whole = alike, generated, of_places
            elif (by_row := self._drafts_by_row(drafts, rows)) is not None:
                whole = by_row, generated, of_places
        if whole is None or rows_of_ended is None:
            delivered, stopped, turns = _delivered(scheduler, parts)
            self._do(self._count, delivered, stopped, drafts, generated, rows, entered)
            places.leave(stopped)
            self._paused_sessions.difference_update(stopped)
            if turns:
                self._resumable = True
                self._paused_sessions.update(turns)
            self._settle_inside()
        else:
            changes: Changes | None = None
            if ended or new:
                rows_of_new = [*map(rows.__getitem__, new)] if isinstance(whole[0], int) else ()
                unix_nano = time.time_ns() if ended else 0
                changes = rows_of_new, entered, ended, rows_of_ended, went_out, unix_nano
                places.leave(ended)
            self._put_in_line((whole, changes))
        if ended and not scheduler.requests:
            self.owner.listener.engine_idle()

    def _drafts_by_row(self, drafts: Mapping[str, Any], rows: Mapping[str, int]) -> bytes | None:
        """How many drafts each row has; None where a byte cannot say it, or a row is nobody's."""
        if not drafts:
            return bytes(len(rows))
        if not self._in_order:
            in_order = self._row_ids or sorted(rows, key=rows.__getitem__)
            if [*map(rows.get, in_order)] != [*range(len(rows))]:
                return None
            self._in_order = in_order
        lengths = _lengths([*map(drafts.get, self._in_order, _nothing)])
        return lengths if isinstance(lengths, bytes) else None

    def _count_together(self, line: Sequence[Whole | Aborted]) -> None:
        self._sums.add_steps([each for each in line if not isinstance(each, Aborted)])
        failed: Exception | None = None
        for each in line:
            try:
                if isinstance(each, Aborted):
                    self._count_aborted(each)
                else:
                    self._follow(*each)
            except Exception as error:  # the others are not to be lost with it
                failed = failed or error
        self._following.tidy()
        if failed is not None:
            raise failed

    def _follow(self, step: Step, changes: Changes | None) -> None:
        following = self._following
        following.step(step)
        if changes is not None:
            _, generated, of_places = step
            new, births, ended, _, went_out, unix_nano = changes
            self._finished += len(ended)
            if births:
                following.born(births, [generated[of_places[place]] for _, _, place in births])
            following.finished(ended, unix_nano, (step, went_out, new))

    def _count_aborted(self, aborted: Aborted) -> None:
        self._finished += len(aborted.generations)
        self._following.finished(aborted.generations, aborted.unix_nano)
        for request_id in aborted.request_ids:
            self._following.gone(request_id)  # those without a token: the others are gone already

    def _count(
        self,
        delivered: Mapping[str, int],
        stopped: Sequence[str],
        drafts: Mapping[str, Any],
        generated: Lengths,
        rows: Mapping[str, int],
        births: Sequence[Entered],
    ) -> None:
        """The plain way, for steps in which something went astray: request by request."""
        self._following.born(births, itertools.repeat(0))
        for request_id, emitted in delivered.items():
            row = rows.get(request_id, -1)
            if 0 <= row < len(generated):
                self._sums.add(len(drafts.get(request_id, ())), generated[row], emitted)
        if self._following:
            self._following.odd_step(drafts, generated, rows, delivered)
        self._finished += len(stopped)
        self._following.finished(stopped, time.time_ns())

    def before_finish(self, scheduler: Any, request_ids: Iterable[str]) -> list[Any]:
        """The requests among these that are not finished yet."""
        found = map(scheduler.requests.get, request_ids)
        return [request for request in found if request is not None and not request.is_finished()]

    def after_finish(self, scheduler: Any, requests: list[Any]) -> None:
        """Count the requests of `before_finish` that the call took: generations, where they have a token."""
        taken = [(request.request_id, request.num_output_tokens > 0) for request in requests if request.is_finished()]
        if self.stepping:  # the call came from inside `update_from_output`
            self._inside += taken
        elif taken:
            self._settle(taken)
            if not scheduler.requests:
                self.owner.listener.engine_idle()

    def _settle_inside(self) -> None:
        """Count the requests that failed inside `update_from_output`, after the step that may have served them."""
        taken, self._inside = self._inside, []
        if taken:
            self._settle(taken)

    def _settle(self, taken: list[tuple[str, bool]]) -> None:
        paused = self._paused_sessions
        # A resumed session's earlier output has become part of its prompt.
        generations = [request_id for request_id, has_tokens in taken if has_tokens or request_id in paused]
        ids = [request_id for request_id, _ in taken]
        self._places.leave(ids)
        paused.difference_update(ids)
        self._put_in_line(Aborted(ids, generations, time.time_ns()))

    def _do(self, change: Callable[..., None], *arguments: Any) -> None:
        """Apply a change to the sums, now, or when whoever reads them is done. On the engine's thread."""
        if self._reading.acquire(blocking=False):
            try:
                self._catch_up()
                change(*arguments)
                self._following.renew(self._places)
            finally:
                self._reading.release()
        else:
            # The engine may use its dictionaries again for the next step.
            kept = [dict(each) if isinstance(each, dict) else each for each in arguments]
            self._line.append(partial(change, *kept))

    def _put_in_line(self, each: Whole | Aborted) -> None:
        self._line.append(each)
        # Until births are counted, all that come are below the bar.
        if len(self._line) >= _TOGETHER or self._places.crowded:
            self._count_line()

    def _count_line(self) -> None:
        """Count what is in the line, or leave it to whoever is reading. On the engine's thread."""
        if self._reading.acquire(blocking=False):
            try:
                self._catch_up()
                self._following.renew(self._places)
            finally:
                self._reading.release()

    def _catch_up(self) -> None:
        line = self._line
        together: list[Whole | Aborted] = []
        for _ in range(len(line)):
            each = line.popleft()
            if isinstance(each, tuple):
                together.append(each)
            else:
                self._count_together(together)
                together = []
                each()
        if together:
            self._count_together(together)

    def take(self) -> Taken:
        """See `engines.Tally`. On the collecting thread; the engine's does not wait for it."""
        with self._reading:
            self._catch_up()
            sums, self._sums = self._sums, _StepSums()
            finished, self._finished = self._finished, 0
            followed = self._following.drain()
        return Taken(_increments(sums.parts(), finished), [_picked(*each) for each in choose(followed, _drafts)])


class _StepSums:
    """How often each (valid drafts, generated, emitted) occurred, in the cheapest form found to note it.

    Of steps whose tokens all went out, both numbers of each request are counted as bytes, those of many steps at once.
    """

    def __init__(self) -> None:
        self._parts: Counter[Part] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()  # (valid drafts, generated = emitted)
        self._trims: Counter[Part] = Counter()  # in the above as emitted whole, but perhaps they were trimmed

    def add_steps(self, steps: Iterable[Whole]) -> None:
        """Note steps whose tokens all went out, but for what was trimmed."""
        alike: dict[int, list[bytes]] = {}
        mixed: list[tuple[bytes, bytes]] = []
        undrafted: dict[int, bytearray] = {}  # tokens of those who had no drafts in alike steps
        # Of those who ended in steps in which somebody was trimmed.
        valid: list[int] = []
        got, out = bytearray(), bytearray()
        for (drafts, generated, _), changes in steps:
            if isinstance(drafts, int):
                alike.setdefault(drafts, []).append(generated)
            else:
                mixed.append((drafts, generated))
            if changes is None:
                continue
            new, _, _, of_ended, went_out, _ = changes
            if new and isinstance(drafts, int):
                undrafted.setdefault(drafts, bytearray()).extend(map(generated.__getitem__, new))
            if went_out != generated:
                if isinstance(drafts, bytes):
                    valid.extend(map(drafts.__getitem__, of_ended))
                else:
                    without = set(new)
                    valid.extend([0 if row in without else drafts for row in of_ended])
                got.extend(map(generated.__getitem__, of_ended))
                out.extend(map(went_out.__getitem__, of_ended))
        for number, all_tokens in alike.items():
            self._add_alike(number, b"".join(all_tokens))
        for number, tokens in undrafted.items():
            for each, times in Counter(tokens).items():
                self._pairs[number, each] -= times
                self._pairs[0, each] += times
        if mixed:
            self._add_mixed(*map(b"".join, zip(*mixed, strict=True)))
        self._trims.update(zip(valid, got, out, strict=True))

    def _add_alike(self, drafts: int, tokens: bytes) -> None:
        """Note parts in steps that all had as many drafts."""
        left = len(tokens)
        for got in (*range(1, min(drafts + 2, 256)), 0):
            if times := tokens.count(got):
                self._pairs[drafts, got] += times
                left -= times
                if not left:
                    return
        self._pairs.update((drafts, got) for got in tokens if got > drafts + 1)  # which no version does

    def _add_mixed(self, drafts: bytes, tokens: bytes) -> None:
        """Note parts in steps: at C speed, a few ns for each, where both numbers go into one byte."""
        if drafts.translate(None, _BELOW_16) or tokens.translate(None, _BELOW_16):
            self._pairs.update(zip(drafts, tokens, strict=True))
            return
        both = int.from_bytes(drafts, "little") << 4 | int.from_bytes(tokens, "little")
        pairs = both.to_bytes(len(drafts), "little")
        for number in range(16):
            left = drafts.count(number)
            for got in (*range(number + 2), *range(number + 2, 16)):  # the usual ones first
                if not left:
                    break
                if times := pairs.count(number << 4 | got):
                    self._pairs[number, got] += times
                    left -= times

    def add(self, drafts: int, generated: int, emitted: int) -> None:
        """Note one request's part in a step."""
        self._parts[drafts, generated, emitted] += 1

    def parts(self) -> Mapping[Part, int]:
        """All of it. Call it once, at the end."""
        for (drafts, generated), times in self._pairs.items():
            self._parts[drafts, generated, generated] += times
        for (drafts, generated, emitted), times in self._trims.items():
            self._parts[drafts, generated, generated] -= times
            self._parts[drafts, generated, emitted] += times
        return self._parts


def _lengths(lists: Collection[Any]) -> Lengths:
    try:
        return bytes(map(len, lists))
    except ValueError:
        return list(map(len, lists))


def _rows_of_ended(ended: Set[str], output: Any, generated: bytes, went_out: Lengths) -> Sequence[int] | None:
    """The rows of those who ended; None where not all of them ended by this step, or others were trimmed.

    vLLM trims the sampled lists in place. Of arrays (0.11.1 and 0.11.2) it trims copies, and nothing can be seen here.
    """
    if not ended:
        return () if went_out == generated else None
    of_ended = [*map(output.req_id_to_index.get, ended, NO_ROW)]
    if not (
        isinstance(went_out, bytes)
        and 0 <= min(of_ended) <= max(of_ended) < len(went_out)
        and all(map(went_out.__getitem__, of_ended))
        and isinstance(output.sampled_token_ids[of_ended[0]], list)
    ):
        return None
    if went_out != generated:
        untrimmed = bytearray(went_out)
        for row in of_ended:
            untrimmed[row] = generated[row]
        if untrimmed != generated:
            return None
    return of_ended


def _somebody_stopped(parts: Iterable[Sequence[Any]]) -> bool:
    return any(output.finish_reason is not None for outputs in parts for output in outputs)


def _delivered(scheduler: Any, parts: Iterable[Sequence[Any]]) -> tuple[dict[str, int], list[str], list[str]]:
    """The tokens that went out, by request; who finished with them; and whose turn ended without finishing."""
    delivered: dict[str, int] = {}
    stopped: list[str] = []
    turns: list[str] = []
    for outputs in parts:
        for output in outputs:
            tokens = len(output.new_token_ids)
            if not tokens:
                continue  # it failed, and is settled by `finish_requests`
            delivered[output.request_id] = tokens
            if output.finish_reason is not None:
                # A resumable request (streaming input) has a reason after each turn without being finished.
                request = scheduler.requests.get(output.request_id)
                (stopped if request is None or request.is_finished() else turns).append(output.request_id)
    return delivered, stopped, turns


def _increments(parts: Mapping[Part, int], finished: int) -> list[Increment]:
    consistent, inconsistent = _Sums(), _Sums()
    for part, times in parts.items():
        drafts, generated, _ = part
        (consistent if generated - 1 <= drafts or not drafts else inconsistent).add(*part, times)
    increments = [consistent.increment(finished)]
    if inconsistent.verify:
        # More accepted than proposed: no version seen does it. Kept out of the accept rate and of the positions.
        increments.append(inconsistent.increment(0, positions=False))
    return increments


def _drafts(followed: Followed) -> tuple[int, int]:
    return followed.accepted, followed.proposed


def _picked(followed: Followed, lowest_rate: float | None) -> Picked:
    response_id, choice = visible_id(followed.request_id)
    counts = SpecCounts(followed.accepted, followed.proposed, followed.verify, followed.completion, followed.emitted)
    return Picked(
        response_id=response_id,
        finished_unix_nano=followed.finished_unix_nano,
        order=followed.order,
        increments=[Increment(counts, 1)],
        choice=choice,
        session_id=followed.session_id if isinstance(followed.session_id, str) else None,
        trace=followed.trace_headers if isinstance(followed.trace_headers, Mapping) else None,
        lowest_rate=lowest_rate,
    )


_CHILD = re.compile(r"(\d+)_(?=(?:cmpl|chatcmpl)-|\d+(?:-[0-9a-f]{8})?$)")
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_PROMPT = re.compile(r"-(\d+)$")


def visible_id(request_id: str) -> tuple[str, str | None]:
    """The id that the client got, and which of the request's sequences this is (prompt index, then child index).

    The scheduler's id of a completion is `cmpl-X-0-abcdef12`, and `2_cmpl-X-0-abcdef12` for the third of n > 1
    sequences; the client's is `cmpl-X`. A chat has one prompt and no prompt index. The child prefix is taken off only
    where the rest is an id that vLLM itself makes (the servers' `cmpl-` and `chatcmpl-`, `LLM`'s numbers): a caller
    of `AsyncLLM` may use any id, also one that begins like that.
    """
    child = _CHILD.match(request_id)
    if child:
        request_id = request_id[child.end() :]
    if _ids_are_randomised():
        request_id = _RANDOM.sub("", request_id)
    prompt = _PROMPT.search(request_id) if request_id.startswith("cmpl-") else None
    if prompt:
        request_id = request_id[: prompt.start()]
    if child:
        return request_id, f"{prompt[1] if prompt else 0}.{child[1]}"
    return request_id, prompt[1] if prompt else None


def _ids_are_randomised() -> bool:
    """Whether this vLLM appends 8 random hexadecimal digits to ids (0.14 on), which a variable switches off for now."""
    envs = sys.modules.get("vllm.envs")
    disabled = getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", None)
    if disabled is not None:
        return not disabled
    request = getattr(sys.modules.get("vllm.v1.engine"), "EngineCoreRequest", None)
    return "external_req_id" in getattr(request, "__struct_fields__", ())


def _valid_drafts(step: Any, drafts: dict[str, Any], new: Sequence[str]) -> dict[str, Any]:
    """The step's drafts without padding and without those that the grammar invalidated; only lengths matter then."""
    fresh = drafts.keys() & new
    # A request that this step took from the waiting queue, new or resumed, has only padding (0.25 on, to keep a full
    # CUDA graph). That its drafts are -1 is no test: under async scheduling all drafts are -1 here. Before 0.11.1
    # resumed requests are not listed like this, and have no drafts either.
    resumed = getattr(step.scheduled_cached_reqs, "resumed_req_ids", None)
    if resumed:
        fresh |= drafts.keys() & resumed
    invalid = getattr(step, "num_invalid_spec_tokens", None)  # 0.14 on; the invalid ones are a draft's tail
    if fresh or invalid:
        drafts = dict(drafts)
        for request_id, number in (invalid or {}).items():
            if request_id in drafts:
                drafts[request_id] = drafts[request_id][: max(0, len(drafts[request_id]) - number)]
        for request_id in fresh:
            drafts.pop(request_id, None)
    return drafts


class _Sums:
    def __init__(self) -> None:
        self.accepted = self.proposed = self.verify = self.completion = self.emitted = 0
        self.by_accepted: Counter[int] = Counter()
        self.by_drafts: Counter[int] = Counter()

    def add(self, drafts: int, generated: int, emitted: int, times: int) -> None:
        if not emitted:
            return  # an output without tokens: the request failed, and its step is counted by no one
        self.completion += emitted * times
        if drafts and generated:
            accepted = generated - 1  # one of the generated tokens is the target model's own (the bonus token)
            self.accepted += accepted * times
            self.proposed += drafts * times
            self.verify += times
            self.emitted += emitted * times
            self.by_accepted[accepted] += times
            self.by_drafts[drafts] += times

    def increment(self, generations: int, *, positions: bool = True) -> Increment:
        counts = SpecCounts(self.accepted, self.proposed, self.verify, self.completion, self.emitted)
        if not positions:
            return Increment(counts, generations)
        return Increment(
            counts,
            generations,
            accepted_by_position=_at_least(self.by_accepted),
            proposed_by_position=_at_least(self.by_drafts),
        )


def _at_least(lengths: Mapping[int, int]) -> list[int]:
    """How many of these prefixes reach each position: position i belongs to every prefix longer than i."""
    reached = [0] * MAX_POSITIONS
    for length, times in lengths.items():
        for position in range(min(length, MAX_POSITIONS)):
            reached[position] += times
    return reached


def describe(scheduler: Any) -> EngineDescription | None:
    """What the engine's configuration says, or None where it does not speculate in a way that counts.

    Diffusion and pooling models sample no token of their own in a step (`num_sampled_tokens_per_step` is 0) and use the
    same fields for something else.
    """
    config = scheduler.vllm_config
    if getattr(scheduler, "num_sampled_tokens_per_step", 1) == 0:
        return None
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)  # 0.14 on; before it the rank, which is reset nowhere
    if index is None:
        index = getattr(parallel, "data_parallel_rank", 0)
    return describe_config(config, index=int(index or 0))


class Hooks:
    """The hooks on vLLM's scheduler, and on its front end, for one listener. At most one is installed in a process.

    `install` may come before vllm is imported, after it, or after the engine was built; `remove` puts the originals
    back and leaves what was counted to be taken.
    """

    _installed: Hooks | None = None
    _awaiting_import = False

    def __init__(self, listener: EngineListener) -> None:
        self.listener = listener
        self._front = FrontHooks(listener)

    def install(self) -> None:
        """Hook the scheduler's class: now, or when its module is imported. Where it is not as known: one warning."""
        Hooks._installed = self
        self._front.install()
        if SCHEDULER_MODULE in sys.modules:
            # Not sys.modules[...]: another thread may be in the middle of this import, and this waits for its end.
            self._wrap(importlib.import_module(SCHEDULER_MODULE))
        elif not Hooks._awaiting_import:
            Hooks._awaiting_import = True
            wrapt.register_post_import_hook(_on_import, SCHEDULER_MODULE)

    def remove(self) -> None:
        """Put back what is still ours; if somebody has wrapped our wrapper since, it stays and does nothing."""
        if Hooks._installed is self:
            Hooks._installed = None
        self._front.remove()
        scheduler = getattr(sys.modules.get(SCHEDULER_MODULE), "Scheduler", None)
        for name in ("__init__", "update_from_output", "finish_requests"):
            current: Any = vars(scheduler).get(name) if inspect.isclass(scheduler) else None
            if is_hook(current):
                setattr(scheduler, name, current.__wrapped__)

    def _wrap(self, module: Any) -> None:
        scheduler = getattr(module, "Scheduler", None)
        missing = differences(scheduler)
        if missing:
            logger.warning(
                "otel_specdec does not know this vLLM (%s): it counts nothing here, and vLLM is left as it is.",
                "; ".join(missing),
            )
            return
        for name, around in (
            ("__init__", _around_init),
            ("update_from_output", _around_update),
            ("finish_requests", _around_finish),
        ):
            original = vars(scheduler)[name]
            if not is_hook(original):
                setattr(scheduler, name, hook(original, around))
        logger.debug("otel_specdec hooked vLLM's Scheduler: __init__, update_from_output, finish_requests")

    def tally_for(self, scheduler: Any) -> StepTally | None:
        """The scheduler's tally; made at first sight, for a scheduler that was built before the hooks too."""
        tally: StepTally | None = getattr(scheduler, _TALLY, None)
        if tally is None or tally.owner is not self:
            engine = None
            try:
                engine = describe(scheduler)
            except Exception as error:
                self.listener.failed(error, "reading vLLM's configuration")
            tally = StepTally(self, scheduler, counts=engine is not None)
            setattr(scheduler, _TALLY, tally)
            if engine is not None:
                self.listener.engine_started(engine, tally, tally.is_idle)
        return tally if tally.counts else None


def _on_import(module: Any) -> None:
    Hooks._awaiting_import = False
    hooks = Hooks._installed
    if hooks is not None:
        try:
            hooks._wrap(module)
        except Exception as error:  # an exception here would break vllm's own import
            hooks.listener.failed(error, "hooking vLLM's scheduler")


def differences(scheduler: Any) -> list[str]:
    """What this vLLM's scheduler lacks of what the hooks need; empty where all is there.

    Looks at the methods' names and parameters alone: the doctor asks about a class that it made from the source.
    """
    if not inspect.isclass(scheduler):
        return [f"{SCHEDULER_MODULE} has no class Scheduler"]
    found = []
    for name, needed in (
        ("__init__", ()),
        ("update_from_output", ("scheduler_output", "model_runner_output")),
        ("finish_requests", ("request_ids",)),
    ):
        function = vars(scheduler).get(name)
        function = getattr(function, "__wrapped__", function)
        if not inspect.isfunction(function):
            found.append(f"Scheduler.{name} is not a method")
            continue
        parameters = list(inspect.signature(function).parameters)
        if tuple(parameters[1 : 1 + len(needed)]) != needed or inspect.iscoroutinefunction(function):
            found.append(f"Scheduler.{name}({', '.join(parameters)}) is not as expected")
    return found


def _around_init(wrapped: Callable[..., None], scheduler: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    hooks = Hooks._installed
    if hooks is not None:
        try:
            hooks.tally_for(scheduler)
        except Exception as error:
            hooks.listener.failed(error, "meeting a vLLM engine")


def _around_update(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    hooks = Hooks._installed
    if hooks is None:
        return wrapped(*args, **kwargs)
    tally = before = None
    try:
        tally = getattr(scheduler, _TALLY, None)
        if tally is None or tally.owner is not hooks or not tally.counts:
            tally = hooks.tally_for(scheduler)
        if tally is not None and not tally.stepping:
            step = args[0] if args else kwargs["scheduler_output"]
            output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
            before = tally.before_step(scheduler, step, output)
    except Exception as error:
        hooks.listener.failed(error, "reading a vLLM step")
    if tally is None or tally.stepping:  # our own hook once more, beneath somebody else's wrapper
        return wrapped(*args, **kwargs)
    tally.stepping = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        tally.stepping = False
    if before is not None:
        try:
            tally.after_step(scheduler, step, output, before, result)
        except Exception as error:
            hooks.listener.failed(error, "counting a vLLM step")
    return result


def _around_finish(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    hooks = Hooks._installed
    if hooks is None:
        return wrapped(*args, **kwargs)
    ids = args[0] if args else kwargs.get("request_ids")
    if isinstance(ids, Iterable) and not isinstance(ids, Collection):
        # An iterator, which the engine could not read again. What it raises is its owner's affair.
        ids = tuple(ids)
        if args:
            args = (ids, *args[1:])
        else:
            kwargs = {**kwargs, "request_ids": ids}
    tally = None
    finishing: list[Any] = []
    try:
        tally = hooks.tally_for(scheduler)
        if tally is not None and not tally.finishing:
            if ids is None:  # all of them
                ids = list(scheduler.requests)
            elif isinstance(ids, str):
                ids = (ids,)
            finishing = tally.before_finish(scheduler, dict.fromkeys(ids))
    except Exception as error:
        hooks.listener.failed(error, "reading an abort in vLLM")
    if tally is None or tally.finishing:
        return wrapped(*args, **kwargs)
    tally.finishing = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        tally.finishing = False
    try:
        tally.after_finish(scheduler, finishing)
    except Exception as error:
        hooks.listener.failed(error, "counting an abort in vLLM")
    return result
