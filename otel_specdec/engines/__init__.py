"""The line between an engine's adapter and everything else.

An adapter knows its engine and nothing of OpenTelemetry; everything past this line knows OpenTelemetry and nothing of
engines. A new engine is one new module here that calls an `EngineListener`, and one instrumentor that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from otel_specdec.counts import SpecCounts


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine's configuration says about its speculation.

    Attributes:
        provider: the engine's name (`gen_ai.provider.name`).
        model: the model label of the engine's own metrics.
        method: the drafting method.
        max_drafts: most draft tokens of one step (k, ≥ 1); 0 where it is not known.
        index: data-parallel rank (≥ 0).
    """

    provider: str
    model: str
    method: str
    max_drafts: int
    index: int


@dataclass(slots=True)
class Increment:
    """What an engine did since it was last asked: sums over generations (tokens, steps, finished generations; all ≥ 0).

    The positions go from 0 up, both lists of one length.
    """

    counts: SpecCounts
    generations: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)


class Tally(Protocol):
    """An engine's sums. Written by the engine's thread without a lock, read by whoever collects."""

    def take(self) -> Iterable[Increment]:
        """What came since the last call. Never called by two threads at once."""

    @property
    def ended(self) -> bool:
        """Whether the engine is gone and nothing will come again."""


class EngineListener(Protocol):
    """Who hears of engines. Every method is called on the engine's own thread and returns at once, whatever happens."""

    def engine_started(
        self, engine: EngineDescription, tally: Tally, is_idle: Callable[[], bool]
    ) -> None:
        """An engine with speculation came up; `is_idle` may be called from any thread."""

    def engine_idle(self) -> None:
        """An engine has just finished its last request."""

    def failed(self, error: Exception, doing: str) -> None:
        """Something of ours went wrong and was kept from the engine."""
