"""vLLM's front end: the tokens that an engine completed and no client got. Knows vLLM and nothing of OpenTelemetry.

Where it runs: in the process that holds `AsyncLLM` (each API server) or `LLMEngine` (an application with `LLM`), on the
thread that hands the engine's outputs on.

The front end finds stop strings and lets the engine know afterwards. Two kinds of tokens never reach the client: those
behind the stop string in the same step, which it cuts off (0.32 on; before, the client got them), and all that the
engine still sends for a request that the front end has forgotten, because of a stop string or of a client that hung up.
So the completion tokens of the engines less these are what the front ends handed on.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import wrapt

from otel_specdec.counts import SpecCounts
from otel_specdec.engines import EngineDescription, EngineListener, Increment, Taken
from otel_specdec.engines.hooking import is_hook
from otel_specdec.engines.vllm_shared import describe_config, hook, logger

_TALLY: Final = "_otel_specdec_front"


class FrontTally:
    """The tokens that one `OutputProcessor` did not hand on. One thread adds, another takes; neither waits."""

    def __init__(self, owner: FrontHooks, engine: EngineDescription, processor: Any) -> None:
        self.owner = owner
        self.engine = engine
        self._processor = weakref.ref(processor)
        self._trimmed = 0  # written by the front end's thread alone
        self._taken = 0  # written by the collecting thread alone
        self.processing = False  # while vLLM's own method runs

    @property
    def ended(self) -> bool:
        """See `engines.Tally`: the front end is gone."""
        return self._processor() is None

    def is_idle(self) -> bool:
        """Whether no request is being answered; from any thread."""
        processor = self._processor()
        return processor is None or not processor.request_states

    def before(self, processor: Any, outputs: Any) -> list[tuple[Any, int]]:
        """Count what comes for requests that are forgotten; returns the other outputs and their lengths."""
        if not isinstance(outputs, list | tuple):
            raise TypeError(f"outputs come as {type(outputs).__name__}, which may be read only once")
        states = processor.request_states
        answered = []
        for output in outputs:
            if output.request_id in states:
                answered.append((output, len(output.new_token_ids)))
            else:
                self._trimmed += len(output.new_token_ids)
        return answered

    def after(self, answered: list[tuple[Any, int]]) -> None:
        """Count what was cut off these outputs, in place."""
        for output, tokens in answered:
            if len(output.new_token_ids) < tokens:
                self._trimmed += tokens - len(output.new_token_ids)

    def take(self) -> Taken:
        """See `engines.Tally`."""
        trimmed = self._trimmed - self._taken
        self._taken += trimmed
        return Taken([Increment(SpecCounts(), trimmed=trimmed)])


def _around_init(wrapped: Callable[..., None], engine: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    hooks = FrontHooks._installed
    if hooks is not None:
        try:
            hooks.meet(engine)
        except Exception as error:
            hooks.listener.failed(error, "meeting a vLLM front end")


def _around_process(wrapped: Callable[..., Any], processor: Any, args: Any, kwargs: Any) -> Any:
    hooks = FrontHooks._installed
    tally: FrontTally | None = getattr(processor, _TALLY, None)
    if hooks is None or tally is None or tally.processing:
        return wrapped(*args, **kwargs)
    answered = None
    try:
        if tally.owner is not hooks:  # those that it was met by are gone
            tally = hooks.count(processor, tally.engine)
        answered = tally.before(processor, args[0] if args else kwargs["engine_core_outputs"])
    except Exception as error:
        hooks.listener.failed(error, "reading outputs in vLLM's front end")
    tally.processing = True
    try:
        result = wrapped(*args, **kwargs)
    finally:
        tally.processing = False
    if answered is not None:
        try:
            tally.after(answered)
            if not processor.request_states:
                hooks.listener.engine_idle()
        except Exception as error:
            hooks.listener.failed(error, "counting trimmed tokens in vLLM's front end")
    return result


PLACES: Final[dict[str, tuple[str, str, str | None, Callable[..., Any]]]] = {
    "vllm.v1.engine.async_llm": ("AsyncLLM", "__init__", None, _around_init),
    "vllm.v1.engine.llm_engine": ("LLMEngine", "__init__", None, _around_init),
    "vllm.v1.engine.output_processor": (
        "OutputProcessor", "process_outputs", "engine_core_outputs", _around_process,
    ),
}  # fmt: skip
"""By module: the class, its method, the method's first parameter where it matters, and what goes around it."""


def difference(module: str, owner: Any) -> str | None:
    """What the class `owner` of this module lacks of what its hook needs; None where all is there.

    Looks at the method's name and parameters alone: the doctor asks about a class that it made from the source.
    """
    kind, method, parameter, _ = PLACES[module]
    function = vars(owner).get(method) if inspect.isclass(owner) else None
    if not inspect.isfunction(function):
        return f"{module} has no {kind}.{method}"
    if parameter not in (None, *list(inspect.signature(function).parameters)[1:2]):
        return f"{kind}.{method} does not begin with {parameter}"
    if inspect.iscoroutinefunction(function):
        return f"{kind}.{method} is a coroutine"
    return None


class FrontHooks:
    """The hooks on vLLM's front end for one listener. At most one is installed in a process.

    A front end that was made before the hooks came is not counted: nothing says whether its engine speculates.
    """

    _installed: FrontHooks | None = None
    _awaiting: set[str] = set()  # noqa: RUF012  # of the process, as the modules are

    def __init__(self, listener: EngineListener) -> None:
        self.listener = listener
        self._warned = False

    def install(self) -> None:
        """Hook the classes: now, or when their modules are imported. Where one is not as known: one warning."""
        FrontHooks._installed = self
        for module in PLACES:
            if module in sys.modules:
                self._wrap(importlib.import_module(module))
            elif module not in FrontHooks._awaiting:
                FrontHooks._awaiting.add(module)
                wrapt.register_post_import_hook(_on_import, module)

    def remove(self) -> None:
        """Put back what is still ours."""
        if FrontHooks._installed is self:
            FrontHooks._installed = None
        for module, (kind, method, _, _) in PLACES.items():
            owner = getattr(sys.modules.get(module), kind, None)
            current: Any = vars(owner).get(method) if inspect.isclass(owner) else None
            if is_hook(current):
                setattr(owner, method, current.__wrapped__)

    def meet(self, engine: Any) -> None:
        """Count an `AsyncLLM`'s or `LLMEngine`'s outputs from now on, if its engine speculates."""
        # The client of several API servers knows which one it is.
        server = getattr(getattr(engine, "engine_core", None), "client_index", 0)
        description = describe_config(engine.vllm_config, index=None, role=f"api-{server}", front_end=True)
        if description is not None:
            self.count(engine.output_processor, description)

    def count(self, processor: Any, engine: EngineDescription) -> FrontTally:
        """Count this front end for our listener."""
        tally = FrontTally(self, engine, processor)
        setattr(processor, _TALLY, tally)
        self.listener.engine_started(engine, tally, tally.is_idle)
        return tally

    def _wrap(self, module: Any) -> None:
        kind, method, _, around = PLACES[module.__name__]
        owner = getattr(module, kind, None)
        original = vars(owner).get(method) if inspect.isclass(owner) else None
        if is_hook(original):
            return
        if why := difference(module.__name__, owner):
            self._warn(why)
        else:
            setattr(owner, method, hook(vars(owner)[method], around))

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "otel_specdec does not know this vLLM's front end (%s): it does not count trimmed tokens here, and "
                "vLLM is left as it is.",
                what,
            )


def _on_import(module: Any) -> None:
    FrontHooks._awaiting.discard(module.__name__)
    hooks = FrontHooks._installed
    if hooks is not None:
        try:
            hooks._wrap(module)
        except Exception as error:  # an exception here would break vllm's own import
            hooks.listener.failed(error, "hooking vLLM's front end")
