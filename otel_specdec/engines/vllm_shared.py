"""What the hooks on vLLM's scheduler and on its front end have in common."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import wrapt

from otel_specdec.counts import ALL_RATIOS
from otel_specdec.engines import EngineDescription

# Under vLLM's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("vllm.otel_specdec")


_HOOK: Final = "_otel_specdec_hook"

Around = Callable[[Callable[..., Any], Any, Any, Any], Any]
"""What a hook does: called with the original, the instance, positional and keyword arguments, as by wrapt."""


class _Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # generic in wrapt 2 alone
    """A class of our own, so that whoever takes hooks back finds what is ours, and nothing is wrapped twice."""


def hook(original: Any, around: Around) -> Any:
    """What is to stand in a class in the original's place."""
    return _Wrapper(original, around)


def hot_hook(original: Callable[..., Any], around: Around) -> Any:
    """The same as a plain function, where a step's time is looked at: some µs less than wrapt's objects."""

    @functools.wraps(original)
    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(MethodType(original, self), self, args, kwargs)

    # Itself, for `wraps` copies the attribute to the function of whoever wraps ours.
    setattr(method, _HOOK, method)
    return method


def is_hook(found: Any) -> bool:
    """Whether this is ours, not the original and not somebody's wrapper of either."""
    return isinstance(found, _Wrapper) or (found is not None and getattr(found, _HOOK, None) is found)


def describe_config(
    config: Any, *, index: int | None, role: str = "", front_end: bool = False
) -> EngineDescription | None:
    """What a `VllmConfig` says of the engine, or None where it does not speculate."""
    speculation = config.speculative_config
    if speculation is None or getattr(config.model_config, "is_diffusion", False):
        return None
    served = config.model_config.served_model_name  # a string; a list in some versions before the config is validated
    if isinstance(served, list | tuple):
        served = served[0] if served else None
    return EngineDescription(
        provider="vllm",
        model=str(served or config.model_config.model),
        method=str(speculation.method or "unknown"),
        max_drafts=int(speculation.num_speculative_tokens or 0),
        index=index,
        ratios=ALL_RATIOS,
        role=role,
        front_end=front_end,
    )
