"""What the hooks on vLLM's scheduler and on its front end have in common."""

from __future__ import annotations

import logging
from typing import Any

import wrapt

from otel_specdec.counts import ALL_RATIOS
from otel_specdec.engines import EngineDescription

# Under vLLM's own logger name, so that its handlers show the line in the server's log, in its format.
logger = logging.getLogger("vllm.otel_specdec")


class SpecDecWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]  # generic in wrapt 2 alone
    """A class of our own, so that whoever takes hooks back finds what is ours, and nothing is wrapped twice."""


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
