"""Which generations exemplars will name: a bounded, uniform sample of those that finish, but for one place (`choose`).

Engine-neutral, no OpenTelemetry.

Each generation draws a random number at its birth, and a sample is always the generations with the lowest numbers. So
samples can be cut down and merged anywhere (between drains, between readers, on six counters alike) and stay uniform,
and a burst does not hide what came before or after it.

Not thread-safe: the owner guards it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

PLACES: Final = 64
"""Running generations that are followed as candidates; four more places stand in for those that finish meanwhile."""

PICKS: Final = 4
"""Exemplars of one attribute set in one collection, at most."""

MIN_PROPOSED: Final = 16
"""Proposed draft tokens from which on a generation's accept rate says something of it."""


class Candidate:
    """One followed generation. Owners derive from it and keep beside it what they need to know."""

    __slots__ = ("evicted", "finished_unix_nano", "order")

    def __init__(self, order: float) -> None:
        self.order = order
        self.finished_unix_nano = 0
        self.evicted = False


C = TypeVar("C", bound=Candidate)


def choose(finished: Sequence[C], drafts: Callable[[C], tuple[int, int] | None]) -> list[tuple[C, float | None]]:
    """Which of the finished candidates exemplars will name: the one with the lowest accept rate, others uniformly.

    Args:
        finished: of one attribute set, lowest order first.
        drafts: a candidate's accepted and proposed tokens since the last drain; None where one is not known.

    Returns:
        At most `PICKS`, and the accept rate (0 to 1) of that one, which has at least `MIN_PROPOSED` proposed tokens;
        None for the others.
    """
    lowest: tuple[float, C] | None = None
    for candidate in finished:
        known = drafts(candidate)
        if known is not None and known[1] >= MIN_PROPOSED:
            rate = known[0] / known[1]
            if lowest is None or rate < lowest[0]:
                lowest = rate, candidate
    if lowest is None:
        return [(candidate, None) for candidate in finished[:PICKS]]
    rate, worst = lowest
    others = [candidate for candidate in finished if candidate is not worst]
    return [(worst, rate), *((candidate, None) for candidate in others[: PICKS - 1])]


class Candidates(Generic[C]):
    """The places, the generations in them, and those that finished since the last drain.

    Places that are free at a drain are filled from the births until the next one: by reservoir sampling, so that the
    head of a burst is no more likely than its tail. A generation that has come through a drain keeps its place until
    it finishes, however long that takes. With at most `PLACES` generations alive and at most `PICKS` finished between
    two drains, every one is picked.

    Args:
        release: called with a candidate that lost its place to a later birth; it is followed no longer.
    """

    def __init__(self, release: Callable[[C], None]) -> None:
        self._release = release
        self._live = 0
        self._free = PLACES + PICKS  # for births until the next drain
        self._young: list[tuple[float, int, C]] = []  # those births, a heap with the highest order first
        self._finished: list[C] = []
        self._tie = itertools.count()

    def __bool__(self) -> bool:
        return self._live > 0

    @property
    def bar(self) -> float:
        """A birth gets a place if its random number is below this: 1.0 while there are free places, 0.0 without any."""
        young = self._young  # once: a drain on another thread puts another list in its place
        if len(young) < self._free:
            return 1.0
        return -young[0][0] if young else 0.0

    def entering(self, orders: Sequence[float]) -> Sequence[int]:
        """Which of so many births, with these random numbers drawn before, may get a place; others get none."""
        bar = self.bar
        if bar == 1.0:
            return range(len(orders))
        return [index for index, order in enumerate(orders) if order < bar] if bar and min(orders) < bar else ()

    def born(self, make: Callable[[float], C], order: float | None = None) -> C | None:
        """A generation came to life: its candidate if it gets a place, made by `make(order)`.

        `order` is its random number in [0, 1) where it was drawn before.
        """
        if order is None:
            order = random.random()
        if len(self._young) < self._free:
            candidate = make(order)
            heapq.heappush(self._young, (-order, next(self._tie), candidate))
        elif self._young and order < -self._young[0][0]:
            candidate = make(order)
            _, _, loser = heapq.heapreplace(self._young, (-order, next(self._tie), candidate))
            loser.evicted = True
            if loser.finished_unix_nano:
                self._finished.remove(loser)
            else:
                self._live -= 1
                self._release(loser)
        else:
            return None
        self._live += 1
        return candidate

    def finish(self, candidate: C, unix_nano: int) -> None:
        """The generation finished; what it counts from now on does not exist."""
        candidate.finished_unix_nano = unix_nano
        self._live -= 1
        self._finished.append(candidate)

    def gone(self, candidate: C) -> None:
        """It ended before its first token, and is no generation: its place is as free as if it had never come."""
        candidate.evicted = True
        self._live -= 1
        others = [entry for entry in self._young if entry[2] is not candidate]
        if len(others) == len(self._young):
            self._free += 1
        else:
            heapq.heapify(others)
            self._young = others

    def drain(self) -> list[C]:
        """Those that finished since the last drain and kept their place, lowest order first; begins the next round."""
        finished = sorted(self._finished, key=lambda candidate: candidate.order)
        self._finished = []
        self._young = []
        self._free = max(0, PLACES + PICKS - self._live)
        return finished
