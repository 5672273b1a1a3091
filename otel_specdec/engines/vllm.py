"""vLLM's adapter: what each step of the V1 scheduler did, as sums. Knows vLLM and nothing of OpenTelemetry.

Where it runs: in the process that holds the scheduler (EngineCore, or the application itself with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`), on the engine's thread, once a step. What it may cost: a few passes at C speed over the
step's requests; no lock, no allocation per generation that outlives the step, no call into OpenTelemetry.

Hooks, all on the base class `vllm.v1.core.sched.scheduler.Scheduler` (`AsyncScheduler` inherits them): `__init__` (the
engine is known), `update_from_output` (the counts), `finish_requests` (aborts). vllm is never imported from here: the
hooks wait for its module to be imported by somebody else, which costs seconds and is not ours to cause.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import logging
import re
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import wrapt

from otel_specdec.candidates import PICKS, Candidate, Candidates
from otel_specdec.counts import ALL_RATIOS, SpecCounts
from otel_specdec.engines import EngineDescription, EngineListener, Increment, Picked, Taken
from otel_specdec.names import MAX_POSITIONS

SCHEDULER_MODULE: Final = "vllm.v1.core.sched.scheduler"
_TALLY: Final = "_otel_specdec_tally"

# Under vLLM's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("vllm.otel_specdec")

_request_id = attrgetter("request_id")
_new_token_ids = attrgetter("new_token_ids")
_finish_reason = attrgetter("finish_reason")
_nothing: Final = itertools.repeat(())
_no_row: Final = itertools.repeat(-1)


Step = tuple[int, int, int]  # valid drafts, generated, emitted


class StepTally:
    """What one scheduler's steps did: how often each (valid drafts, generated, emitted) occurred, and who finished.

    The engine's thread never waits: if a collection is just reading the sums (some µs, 5 ms if the reader loses the GIL in
    the middle), the step's data are put aside and counted with the next step, or by the next collection.
    """

    def __init__(self, owner: Hooks, scheduler: Any, *, counts: bool) -> None:
        self.owner = owner
        self.counts = counts
        self._scheduler = weakref.ref(scheduler)
        self._reading = threading.Lock()
        self._aside: deque[Callable[[], None]] = deque()
        self._steps: Counter[Step] = Counter()
        self._finished = 0
        self._paused_sessions: set[str] = set()
        self._following = _Following()
        self._inside: list[tuple[str, bool]] | None = None  # a list while `update_from_output` runs

    @property
    def ended(self) -> bool:
        return self._scheduler() is None

    def is_idle(self) -> bool:
        scheduler = self._scheduler()
        return scheduler is None or not scheduler.requests

    def before_step(self, scheduler: Any, step: Any, output: Any) -> tuple[list[int], list[Any]]:
        """What must be read before the call: the lengths of the sampled lists, which it trims, and the newborn requests."""
        self._settle_inside()
        self._inside = []
        generated = list(map(len, output.sampled_token_ids))
        newborn = []
        if step.scheduled_new_reqs:
            requests = map(scheduler.requests.get, [new.req_id for new in step.scheduled_new_reqs])
            # With the second model runner, preempted requests that come back are in that list too.
            newborn = [request for request in requests if request is not None and not request.num_output_tokens]
        return generated, newborn

    def after_step(
        self, scheduler: Any, step: Any, output: Any, before: tuple[list[int], list[Any]], result: Any
    ) -> None:
        """Count one step."""
        generated, newborn = before
        rows: dict[str, int] = output.req_id_to_index if generated else {}
        generated.append(0)  # row -1: a request that this step did not run (it failed, or was refused)
        drafts = step.scheduled_spec_decode_tokens
        if drafts:
            drafts = _valid_drafts(step, drafts)
        parts: list[tuple[list[str], list[int]]] = []
        stopped: list[tuple[str, int]] = []
        turns: list[tuple[str, int]] = []
        # 0.9.0 returns one EngineCoreOutputs, later versions one for each client.
        for engine_outputs in result.values() if isinstance(result, dict) else (result,):
            outputs = engine_outputs.outputs
            if not outputs:
                continue
            ids = list(map(_request_id, outputs))
            emitted = list(map(len, map(_new_token_ids, outputs)))
            parts.append((ids, emitted))
            reasons = list(map(_finish_reason, outputs))
            if reasons.count(None) != len(reasons):
                for request_id, tokens, reason in zip(ids, emitted, reasons, strict=True):
                    if reason is not None and tokens:
                        # A resumable request (streaming input) has a reason after each turn without being finished.
                        request = scheduler.requests.get(request_id)
                        ended = request is None or request.is_finished()
                        (stopped if ended else turns).append((request_id, tokens))
        self._do(lambda: self._count(drafts, generated, rows, parts, newborn, stopped, turns))
        failed = self._settle_inside()
        if (stopped or failed) and not scheduler.requests:
            self.owner.listener.engine_idle()

    def _count(
        self,
        drafts: dict[str, Any],
        generated: list[int],
        rows: dict[str, int],
        parts: list[tuple[list[str], list[int]]],
        newborn: list[Any],
        stopped: list[tuple[str, int]],
        turns: list[tuple[str, int]],
    ) -> None:
        following = self._following
        for request in newborn:
            following.born(request)
        for ids, emitted in parts:
            self._steps.update(
                zip(
                    map(len, map(drafts.get, ids, _nothing)),
                    map(generated.__getitem__, map(rows.get, ids, _no_row)),
                    emitted,
                )
            )
        if following:
            following.step(drafts, generated, rows, parts, stopped + turns)
        for request_id, _ in stopped:
            self._finished += 1
            self._paused_sessions.discard(request_id)
            following.finished(request_id)
        for request_id, _ in turns:
            self._paused_sessions.add(request_id)

    def before_finish(self, scheduler: Any, request_ids: Iterable[str]) -> list[Any]:
        """The requests among these that are not finished yet."""
        found = map(scheduler.requests.get, request_ids)
        return [request for request in found if request is not None and not request.is_finished()]

    def after_finish(self, scheduler: Any, requests: list[Any]) -> None:
        """Count the requests of `before_finish` that the call took: generations, where they have a token."""
        taken = [(request.request_id, request.num_output_tokens > 0) for request in requests if request.is_finished()]
        if self._inside is not None:
            self._inside += taken
        elif taken:
            self._do(lambda: self._aborted(taken))
            if not scheduler.requests:
                self.owner.listener.engine_idle()

    def _settle_inside(self) -> bool:
        """Count the requests that failed inside `update_from_output`: after the step, which may have given them tokens."""
        taken, self._inside = self._inside, None
        if taken:
            self._do(lambda: self._aborted(taken))
        return bool(taken)

    def _aborted(self, taken: list[tuple[str, bool]]) -> None:
        for request_id, has_tokens in taken:
            # A resumed session's earlier output has become part of its prompt.
            if has_tokens or request_id in self._paused_sessions:
                self._finished += 1
                self._following.finished(request_id)
            else:
                self._following.gone(request_id)
            self._paused_sessions.discard(request_id)

    def _do(self, change: Callable[[], None]) -> None:
        """Apply a change to the sums, now, or when whoever reads them is done. On the engine's thread."""
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
        """See `engines.Tally`. On the collecting thread; the engine's does not wait for it."""
        with self._reading:
            self._catch_up()
            steps, self._steps = self._steps, Counter()
            finished, self._finished = self._finished, 0
            picked = self._following.drain()
        increments = _increments(steps, finished)
        return Taken(increments, [each.picked() for each in picked[:PICKS]])


def _increments(steps: Mapping[Step, int], finished: int) -> list[Increment]:
    consistent, inconsistent = _Sums(), _Sums()
    for step, times in steps.items():
        drafts, generated, _ = step
        (consistent if generated - 1 <= drafts or not drafts else inconsistent).add(*step, times)
    increments = [consistent.increment(finished)]
    if inconsistent.verify:
        # More accepted than proposed: no version seen does it. Kept out of the accept rate and of the positions.
        increments.append(inconsistent.increment(0, positions=False))
    return increments


class _Followed(Candidate):
    """A candidate for exemplars: its ids, and its steps since the last drain that are not in the log any more."""

    __slots__ = ("request_id", "session_id", "since", "slot", "steps", "trace_headers")

    def __init__(self, order: float, request: Any) -> None:
        super().__init__(order)
        self.request_id: str = request.request_id
        self.session_id = getattr(request, "session_id", None)
        self.trace_headers = getattr(request, "trace_headers", None)
        self.slot = -1
        self.since = 0  # its first row in the log
        self.steps: Counter[Step] = Counter()

    def picked(self) -> Picked:
        response_id, choice = visible_id(self.request_id)
        return Picked(
            response_id=response_id,
            finished_unix_nano=self.finished_unix_nano,
            order=self.order,
            increments=_increments(self.steps, 1),
            choice=choice,
            session_id=self.session_id if isinstance(self.session_id, str) else None,
            trace=self.trace_headers if isinstance(self.trace_headers, Mapping) else None,
        )


class _Following:
    """The candidates, each in a slot: a step adds one row for all slots, at C speed, to a short log.

    A candidate's column is added up when it finishes, or when the log is full: some 0.2 µs a step and candidate.
    """

    _FREE: Final = "\0free"  # no request has this id
    _ROWS: Final = 32

    def __init__(self) -> None:
        self._candidates: Candidates[_Followed] = Candidates(self._leave)
        self._by_id: dict[str, _Followed] = {}
        self._ids: list[str] = []  # by slot
        self._free: list[int] = []  # a heap: low slots first, so that rows stay short
        self._log: list[list[Step]] = []

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def born(self, request: Any) -> None:
        if request.request_id in self._by_id:
            return  # preempted before its first token, and back
        followed = self._candidates.born(lambda order: _Followed(order, request))
        if followed is None:
            return
        slot = len(self._ids)
        while self._free:
            free = heapq.heappop(self._free)
            if free < slot:
                slot = free
                break
        if slot == len(self._ids):
            self._ids.append(followed.request_id)
        else:
            self._ids[slot] = followed.request_id
        followed.slot, followed.since = slot, len(self._log)
        self._by_id[followed.request_id] = followed

    def step(
        self,
        drafts: Mapping[str, Any],
        generated: list[int],
        rows: Mapping[str, int],
        parts: list[tuple[list[str], list[int]]],
        trimmed: list[tuple[str, int]],
    ) -> None:
        got = list(map(generated.__getitem__, map(rows.get, self._ids, _no_row)))
        row = list(zip(map(len, map(drafts.get, self._ids, _nothing)), got, got, strict=True))
        for request_id, emitted in trimmed:  # only a step that ends something emits less than it generated
            followed = self._by_id.get(request_id)
            if followed is not None:
                row[followed.slot] = (*row[followed.slot][:2], emitted)
        delivered = sum(len(emitted) - emitted.count(0) for _, emitted in parts)
        if delivered != len(generated) - generated.count(0):
            # Somebody's tokens were dropped (a stale output): rare, so it may cost something.
            served = {each for ids, emitted in parts for each, tokens in zip(ids, emitted, strict=True) if tokens}
            for request_id, followed in self._by_id.items():
                if request_id not in served:
                    row[followed.slot] = (0, 0, 0)
        self._log.append(row)
        if len(self._log) >= self._ROWS:
            for followed in self._by_id.values():
                self._add_up(followed)
                followed.since = 0
            self._log.clear()

    def _add_up(self, followed: _Followed) -> None:
        slot = followed.slot
        followed.steps.update([row[slot] for row in self._log[followed.since :]])

    def finished(self, request_id: str) -> None:
        followed = self._by_id.get(request_id)
        if followed is not None:
            self._add_up(followed)
            self._candidates.finish(followed, time.time_ns())
            self._leave(followed)

    def gone(self, request_id: str) -> None:
        followed = self._by_id.get(request_id)
        if followed is not None:
            self._candidates.gone(followed)
            self._leave(followed)

    def _leave(self, followed: _Followed) -> None:
        del self._by_id[followed.request_id]
        self._ids[followed.slot] = self._FREE
        heapq.heappush(self._free, followed.slot)
        while self._ids and self._ids[-1] == self._FREE:
            self._ids.pop()
        if not self._by_id:
            self._free.clear()
            self._log.clear()

    def drain(self) -> list[_Followed]:
        for followed in self._by_id.values():
            followed.steps.clear()
            followed.since = 0
        self._log.clear()
        return self._candidates.drain()


_CHILD = re.compile(r"(\d+)_(?=(?:cmpl|chatcmpl)-|\d+(?:-[0-9a-f]{8})?$)")
_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_PROMPT = re.compile(r"-(\d+)$")


def visible_id(request_id: str) -> tuple[str, str | None]:
    """The id that the client got, and which of the request's sequences this is (prompt index, then child index).

    The scheduler's id of a completion is `cmpl-X-0-abcdef12`, and `2_cmpl-X-0-abcdef12` for the third of n > 1 sequences;
    the client's is `cmpl-X`. A chat has one prompt and no prompt index. The child prefix is taken off only where the rest
    is an id that vLLM itself makes (the servers' `cmpl-` and `chatcmpl-`, `LLM`'s numbers): a caller of `AsyncLLM` may use
    any id, also one that begins like that.
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


def _valid_drafts(step: Any, drafts: dict[str, Any]) -> dict[str, Any]:
    """The step's drafts without padding and without those that the grammar invalidated. Only lengths matter after it."""
    fresh = [new.req_id for new in step.scheduled_new_reqs if new.req_id in drafts]
    # A request that this step took from the waiting queue, new or resumed, has only padding (0.26 on, to keep a full
    # CUDA graph). That its drafts are -1 is no test: under async scheduling all drafts are -1 here. Before 0.12 resumed
    # requests are not listed like this, and have no drafts either.
    resumed = getattr(step.scheduled_cached_reqs, "resumed_req_ids", None)
    if resumed:
        fresh.extend(drafts.keys() & resumed)
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
    speculation = config.speculative_config
    if speculation is None or getattr(scheduler, "num_sampled_tokens_per_step", 1) == 0:
        return None
    served = config.model_config.served_model_name  # a string; a list in some versions before the config is validated
    if isinstance(served, list | tuple):
        served = served[0] if served else None
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)  # 0.12 on; before it the rank, which is reset nowhere
    if index is None:
        index = getattr(parallel, "data_parallel_rank", 0)
    return EngineDescription(
        provider="vllm",
        model=str(served or config.model_config.model),
        method=str(speculation.method or "unknown"),
        max_drafts=int(speculation.num_speculative_tokens or 0),
        index=int(index or 0),
        ratios=ALL_RATIOS,
    )


class Hooks:
    """The hooks on vLLM's scheduler for one listener. At most one is installed in a process.

    `install` may come before vllm is imported, after it, or after the engine was built; `remove` puts the originals
    back and leaves what was counted to be taken.
    """

    _installed: Hooks | None = None
    _awaiting_import = False

    def __init__(self, listener: EngineListener) -> None:
        self.listener = listener

    def install(self) -> None:
        Hooks._installed = self
        if SCHEDULER_MODULE in sys.modules:
            self._wrap(sys.modules[SCHEDULER_MODULE])
        elif not Hooks._awaiting_import:
            Hooks._awaiting_import = True
            wrapt.register_post_import_hook(_on_import, SCHEDULER_MODULE)

    def remove(self) -> None:
        if Hooks._installed is self:
            Hooks._installed = None
        scheduler = getattr(sys.modules.get(SCHEDULER_MODULE), "Scheduler", None)
        for name in ("__init__", "update_from_output", "finish_requests"):
            current = vars(scheduler).get(name) if scheduler is not None else None
            if isinstance(current, _SpecDecWrapper):
                setattr(scheduler, name, current.__wrapped__)

    def _wrap(self, module: Any) -> None:
        scheduler = getattr(module, "Scheduler", None)
        missing = _differences(scheduler)
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
            if not isinstance(original, _SpecDecWrapper):
                setattr(scheduler, name, _SpecDecWrapper(original, around))
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


class _SpecDecWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # generic in wrapt 2 alone
    """A class of our own, so that `remove` finds what is ours, and a second install wraps nothing twice."""


def _on_import(module: Any) -> None:
    Hooks._awaiting_import = False
    hooks = Hooks._installed
    if hooks is not None:
        try:
            hooks._wrap(module)
        except Exception as error:  # an exception here would break vllm's own import
            hooks.listener.failed(error, "hooking vLLM's scheduler")


def _differences(scheduler: Any) -> list[str]:
    """What this vLLM's scheduler lacks of what the hooks need; empty where all is there."""
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
        tally = hooks.tally_for(scheduler)
        if tally is not None:
            step = args[0] if args else kwargs["scheduler_output"]
            output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
            before = tally.before_step(scheduler, step, output)
    except Exception as error:
        hooks.listener.failed(error, "reading a vLLM step")
    result = wrapped(*args, **kwargs)
    if tally is not None and before is not None:
        try:
            tally.after_step(scheduler, step, output, before, result)
        except Exception as error:
            hooks.listener.failed(error, "counting a vLLM step")
    return result


def _around_finish(wrapped: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    hooks = Hooks._installed
    if hooks is None:
        return wrapped(*args, **kwargs)
    tally = None
    finishing: list[Any] = []
    try:
        tally = hooks.tally_for(scheduler)
        if tally is not None:
            ids = args[0] if args else kwargs["request_ids"]
            if ids is None:  # all of them
                ids = list(scheduler.requests)
            elif isinstance(ids, str):
                ids = (ids,)
            else:
                ids = tuple(ids)  # it may be an iterator, which the engine could not read again
                if args:
                    args = (ids, *args[1:])
                else:
                    kwargs = {**kwargs, "request_ids": ids}
            finishing = tally.before_finish(scheduler, dict.fromkeys(ids))
    except Exception as error:
        hooks.listener.failed(error, "reading an abort in vLLM")
    result = wrapped(*args, **kwargs)
    if tally is not None:
        try:
            tally.after_finish(scheduler, finishing)
        except Exception as error:
            hooks.listener.failed(error, "counting an abort in vLLM")
    return result
