"""What the hooks on vLLM's scheduler and on its front end have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

from otel_specdec.counts import ALL_RATIOS
from otel_specdec.engines import EngineDescription
from otel_specdec.engines.hooking import hooked

# Under vLLM's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("vllm.otel_specdec")


Around = Callable[[Callable[..., Any], Any, Any, Any], Any]
"""What a hook does: called with the bound original, the instance, its positional and its keyword arguments."""


def hook(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """What is to stand in a class in the original's place."""

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return around(MethodType(original, self), self, args, kwargs)

    return hooked(method, original)


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
