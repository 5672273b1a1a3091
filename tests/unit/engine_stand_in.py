"""An engine for everything that knows no engine: a tally filled by hand, and what its configuration would say."""

from __future__ import annotations

from typing import Any

from otel_specdec import SpecCounts
from otel_specdec.engines import EngineDescription, Increment, Taken


class HandTally:
    """Increments wait in it until they are taken."""

    def __init__(self) -> None:
        self.ended = False
        self.taken = 0
        self._increments: list[Increment] = []

    def put(self, *counts: int | None, generations: int = 0, **more: Any) -> None:
        self._increments.append(Increment(SpecCounts(*counts), generations, **more))

    def take(self) -> Taken:
        self.taken += 1
        increments, self._increments = self._increments, []
        return Taken(increments)


class BrokenTally(HandTally):
    def take(self) -> Taken:
        super().take()
        raise RuntimeError("this tally is broken")


def description(**fields: Any) -> EngineDescription:
    told: dict[str, Any] = {
        "provider": "stand-in",
        "model": "m",
        "method": "ngram",
        "max_drafts": 2,
        "index": 0,
        "ratios": frozenset({"accept_rate", "acceptance_length", "tokens_per_verify"}),
    }
    return EngineDescription(**(told | fields))
