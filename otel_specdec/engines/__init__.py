"""The line between an engine's adapter and everything else.

An adapter knows its engine and nothing of OpenTelemetry; everything past this line knows OpenTelemetry and nothing of
engines. A new engine is one new module here that calls an `EngineListener`, and one instrumentor that installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from otel_specdec.counts import SpecCounts


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine's configuration says about its speculation.

    Attributes:
        provider: the engine's name (`gen_ai.provider.name`).
        model: the model label of the engine's own metrics.
        method: the drafting method.
        max_drafts: most draft tokens of one step (k, ≥ 1); 0 where it is not known.
        index: data-parallel rank (≥ 0); None where the process serves them all.
        ratios: the ratios that this engine can be expected to know for every generation; their series begin at 0 when
            the engine comes up.
        role: what the process is to the engine (`specdec.process`): `engine-0`, `tokenizer-2`; "" for `engine-<index>`.
        unknown: the fields of `SpecCounts` that no generation of this engine will have; their series do not begin.
        front_end: whether this is a front end of engines, which knows the tokens that no client got and nothing else.
    """

    provider: str
    model: str
    method: str
    max_drafts: int
    index: int | None
    ratios: frozenset[str]
    role: str = ""
    unknown: frozenset[str] = frozenset()
    front_end: bool = False


@dataclass(slots=True)
class Increment:
    """What an engine did since it was last asked: sums over generations (tokens, steps, finished generations; all ≥ 0).

    Attributes:
        counts: sums of the counters; None is unknown and adds nothing.
        generations: generations that finished.
        ratios: the ratios that all of this may enter (`specdec.ratio_set`); None: whatever `counts` themselves say.
            Increments that may enter different ratios are different `Increment`s, and so are finished generations of
            which different ratios held all their life.
        accepted_by_position: accepted draft tokens by position, from 0 up (tokens).
        proposed_by_position: proposed draft tokens by position, of the same length (tokens).
        trimmed: completed tokens that a front end did not hand on; None from whatever is not one.
    """

    counts: SpecCounts
    generations: int = 0
    ratios: frozenset[str] | None = None
    accepted_by_position: Sequence[int] = ()
    proposed_by_position: Sequence[int] = ()
    trimmed: int | None = None


class TraceIds(NamedTuple):
    """A request's own trace context, as the engine holds it."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(slots=True)
class Picked:
    """A finished generation that is to be named by exemplars.

    Attributes:
        response_id: exactly the id that the client got.
        finished_unix_nano: when it finished.
        order: a uniform random number in [0, 1) drawn at its birth; of several, the lowest ones are kept.
        increments: what it did since the engine was last asked, its finish included. They are part of the sums that
            come with it, never on top of them.
        choice: which of the request's sequences it is (`1`, `0.2`: prompt index, child index), where it has several.
        session_id: the session that the request belongs to.
        trace: the request's trace context: W3C headers (`traceparent`), or the ids.
        lowest_rate: its accept rate (0 to 1), if it was picked for having the lowest; None if it was picked by chance.
    """

    response_id: str
    finished_unix_nano: int
    order: float
    increments: Sequence[Increment]
    choice: str | None = None
    session_id: str | None = None
    trace: Mapping[str, str] | TraceIds | None = None
    lowest_rate: float | None = None


@dataclass(slots=True)
class Taken:
    """What came since an engine was last asked, and the finished generations picked from it (at most 4)."""

    increments: Sequence[Increment]
    picked: Sequence[Picked] = field(default_factory=list)


class Tally(Protocol):
    """An engine's sums. Written by the engine's thread, which never waits for a reader; read by whoever collects."""

    def take(self) -> Taken:
        """What came since the last call. Never called by two threads at once."""

    @property
    def ended(self) -> bool:
        """Whether the engine is gone and nothing will come again."""


class EngineListener(Protocol):
    """Who hears of engines. Every method is called on the engine's own thread and returns at once, whatever happens."""

    def engine_started(self, engine: EngineDescription, tally: Tally, is_idle: Callable[[], bool]) -> None:
        """An engine with speculation came up; `is_idle` may be called from any thread."""

    def engine_idle(self) -> None:
        """An engine has just finished its last request."""

    def failed(self, error: Exception, doing: str) -> None:
        """Something of ours went wrong and was kept from the engine."""
