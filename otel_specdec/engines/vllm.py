"""vLLM's adapter: what each step of the V1 scheduler did, as sums. Knows vLLM and nothing of OpenTelemetry.

Where it runs: in the process that holds the scheduler (EngineCore, or the application itself with
`VLLM_ENABLE_V1_MULTIPROCESSING=0`), on the engine's thread, once a step. What it may cost: a few passes at C speed over the
step's requests; no lock, no allocation per generation that outlives the step, no call into OpenTelemetry.

Hooks, all on the base class `vllm.v1.core.sched.scheduler.Scheduler` (`AsyncScheduler` inherits them): `__init__` (the
engine is known), `update_from_output` (the counts), `finish_requests` (aborts). vllm is never imported from here: the
hooks wait for its module to be imported by somebody else, which costs seconds and is not ours to cause.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final

import wrapt

from otel_specdec.counts import SpecCounts
from otel_specdec.engines import EngineDescription, EngineListener, Increment
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


class StepTally:
    """What one scheduler's steps did, as monotonic sums: how often each (valid drafts, generated, emitted) occurred.

    Only the engine's thread writes, only by growing; a reader takes a copy and subtracts the last one. Both are atomic
    under the GIL (and under the per-object locks of free-threaded builds), so no lock stands in the engine's path.
    """

    def __init__(self, owner: Hooks, scheduler: Any, *, counts: bool) -> None:
        self.owner = owner
        self.counts = counts
        self._scheduler = weakref.ref(scheduler)
        self._steps: Counter[tuple[int, int, int]] = Counter()
        self._finished = 0
        self._paused_sessions: set[str] = set()
        self._taken_steps: dict[tuple[int, int, int], int] = {}
        self._taken_finished = 0

    @property
    def ended(self) -> bool:
        return self._scheduler() is None

    def is_idle(self) -> bool:
        scheduler = self._scheduler()
        return scheduler is None or not scheduler.requests

    def after_step(self, scheduler: Any, step: Any, output: Any, generated: list[int], result: Any) -> None:
        """Count one step. `generated` are the lengths of the sampled lists from before the call, which trims them."""
        rows: Mapping[str, int] = output.req_id_to_index if generated else {}
        generated.append(0)  # row -1: a request that this step did not run (it failed, or was refused)
        drafts = step.scheduled_spec_decode_tokens
        if drafts:
            drafts = _valid_drafts(step, drafts)
        ended = False
        # 0.9.0 returns one EngineCoreOutputs, later versions one for each client.
        for engine_outputs in result.values() if isinstance(result, dict) else (result,):
            outputs = engine_outputs.outputs
            if not outputs:
                continue
            ids = list(map(_request_id, outputs))
            emitted = list(map(len, map(_new_token_ids, outputs)))
            self._steps.update(
                zip(
                    map(len, map(drafts.get, ids, _nothing)),
                    map(generated.__getitem__, map(rows.get, ids, _no_row)),
                    emitted,
                )
            )
            reasons = list(map(_finish_reason, outputs))
            if reasons.count(None) != len(reasons):
                ended = True
                for request_id, tokens, reason in zip(ids, emitted, reasons):
                    if reason is not None and tokens:
                        self._stopped(scheduler.requests, request_id)
        if ended and not scheduler.requests:
            self.owner.listener.engine_idle()

    def _stopped(self, requests: Mapping[str, Any], request_id: str) -> None:
        # A resumable request (streaming input) has a finish reason after each turn without being finished.
        request = requests.get(request_id)
        if request is None or request.is_finished():
            self._finished += 1
            self._paused_sessions.discard(request_id)
        else:
            self._paused_sessions.add(request_id)

    def before_finish(self, scheduler: Any, request_ids: Iterable[str]) -> list[Any]:
        """The requests among these that become finished generations if the call takes them."""
        found = map(scheduler.requests.get, request_ids)
        return [
            request
            for request in found
            if request is not None
            and not request.is_finished()
            # A resumed session's earlier output has become part of its prompt.
            and (request.num_output_tokens > 0 or request.request_id in self._paused_sessions)
        ]

    def after_finish(self, scheduler: Any, requests: list[Any]) -> None:
        for request in requests:
            if request.is_finished():
                self._finished += 1
                self._paused_sessions.discard(request.request_id)
        if requests and not scheduler.requests:
            self.owner.listener.engine_idle()

    def take(self) -> list[Increment]:
        finished = self._finished  # first: no generation is seen before its tokens
        steps = dict(self._steps)
        consistent, inconsistent = _Sums(), _Sums()
        for step, times in steps.items():
            times -= self._taken_steps.get(step, 0)
            if times:
                drafts, generated, _ = step
                (consistent if generated - 1 <= drafts or not drafts else inconsistent).add(*step, times)
        increments = [consistent.increment(finished - self._taken_finished)]
        if inconsistent.verify:
            # More accepted than proposed: no version seen does it. Kept out of the accept rate and of the positions.
            increments.append(inconsistent.increment(0, positions=False))
        self._taken_steps, self._taken_finished = steps, finished
        return increments


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
        return Increment(counts, generations, _at_least(self.by_accepted), _at_least(self.by_drafts))


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


class _SpecDecWrapper(wrapt.FunctionWrapper):  # type: ignore[misc]  # wrapt's class is untyped
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
    tally = generated = None
    try:
        tally = hooks.tally_for(scheduler)
        if tally is not None:
            step = args[0] if args else kwargs["scheduler_output"]
            output = args[1] if len(args) > 1 else kwargs["model_runner_output"]
            generated = list(map(len, output.sampled_token_ids))  # the call trims these lists in place
    except Exception as error:
        hooks.listener.failed(error, "reading a vLLM step")
    result = wrapped(*args, **kwargs)
    if tally is not None and generated is not None:
        try:
            tally.after_step(scheduler, step, output, generated, result)
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
