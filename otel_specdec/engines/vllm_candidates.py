"""The bounded number of vLLM generations that are followed one by one, as candidates for exemplars.

On the engine's thread, once a step: what it may cost is a few passes at C speed over at most 68 places.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from otel_specdec.candidates import Candidate, Candidates

_nothing: Final = itertools.repeat(())
_no_row: Final = itertools.repeat(-1)  # the entry that stands behind the last row


class Followed(Candidate):
    """A candidate for exemplars: its ids, and what it did since the last drain (but for what is in the log still)."""

    __slots__ = (
        "accepted", "alike_drafts", "alike_steps", "completion", "emitted", "proposed", "request_id", "session_id",
        "since_alike", "since_mixed", "slot", "trace_headers", "verify",
    )  # fmt: skip

    def __init__(self, order: float, request: Any) -> None:
        super().__init__(order)
        self.request_id: str = request.request_id
        self.session_id = getattr(request, "session_id", None)
        self.trace_headers = getattr(request, "trace_headers", None)
        self.slot = -1
        self.begin(0, 0, 0, 0)

    def begin(self, alike_steps: int, alike_drafts: int, since_alike: int, since_mixed: int) -> None:
        """Count from here on: the sums and the rows of the log that are there already are not its own."""
        self.accepted = self.proposed = self.verify = self.completion = self.emitted = 0
        self.alike_steps, self.alike_drafts = alike_steps, alike_drafts
        self.since_alike, self.since_mixed = since_alike, since_mixed


class Following:
    """The candidates, each in a slot. A step notes where their rows are, at C speed, in a short log.

    What a candidate did is read from the log when it finishes, and for all of them when the log is full. Of a step in
    which every request has equally many drafts only the generated tokens are logged; how many steps and drafts there
    were is the same for all.
    """

    _FREE: Final = ""  # no request has this id
    _ROWS: Final = 32

    def __init__(self) -> None:
        self._candidates: Candidates[Followed] = Candidates(self._leave)
        self._by_id: dict[str, Followed] = {}
        self._ids: list[str] = []  # by slot
        self._free: list[int] = []  # a heap: low slots first, so that there are few
        self._find: Callable[[Mapping[str, int]], tuple[int, ...]] | None = None  # the slots' rows; None: to be made
        self._alike: list[tuple[Sequence[int], Sequence[int]]] = []  # the row of each slot, tokens of each row
        self._alike_steps = 0  # such steps with drafts, ever, and the drafts that each request had in them
        self._alike_drafts = 0
        self._mixed: list[tuple[list[int], list[int]]] = []  # valid drafts and generated tokens of each slot

    def __bool__(self) -> bool:
        return bool(self._by_id)

    def knows(self, requests: Sequence[Any]) -> bool:
        """Whether one of these is followed."""
        return any([request.request_id in self._by_id for request in requests])  # noqa: C419  # quicker as a list

    def born(self, request: Any, tokens: int = 0) -> None:
        """A generation had its first step; in a step that is noted already it got so many tokens."""
        order = random.random()
        if order >= self._candidates.bar or not request.request_id or request.request_id in self._by_id:
            return  # bad luck; nothing to name it by; or preempted before its first token, and back
        followed = self._candidates.born(lambda order: Followed(order, request), order)
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
        self._find = None
        followed.slot = slot
        followed.begin(self._alike_steps, self._alike_drafts, len(self._alike), len(self._mixed))
        followed.completion = tokens
        self._by_id[followed.request_id] = followed

    def step(self, drafts: Mapping[str, Any], generated: Sequence[int], rows: Mapping[str, int], alike: int) -> None:
        """Note a step whose tokens all went out.

        Args:
            drafts: valid drafts, by request.
            generated: tokens of each row. Kept: it must not change any more.
            rows: the row of each request in the step.
            alike: how many drafts each followed request had, where all had as many and got a token, else 0.
        """
        try:
            of_slots = (self._find or self._new_find())(rows)
        except KeyError:  # somebody is not in this step
            of_slots = ()
        if alike and of_slots:
            self._alike_steps += 1
            self._alike_drafts += alike
            self._alike.append((of_slots, generated))
            if len(self._alike) >= self._ROWS:
                self._add_all_up()
            return
        self._mixed.append(([*map(len, map(drafts.get, self._ids, _nothing))], self._generated(generated, rows)))
        if len(self._mixed) >= self._ROWS:
            self._add_all_up()

    def _new_find(self) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
        """What finds the rows of all slots at once; a free slot stands for somebody else's, and nobody reads it."""
        anybody = next(iter(self._by_id))
        ids = self._ids if len(self._ids) == len(self._by_id) else [each or anybody for each in self._ids]
        self._find = itemgetter(*ids, anybody)  # of one id alone it would make no tuple
        return self._find

    def odd_step(
        self,
        drafts: Mapping[str, Any],
        generated: Sequence[int],
        rows: Mapping[str, int],
        delivered: Mapping[str, int],
    ) -> None:
        """Note a step in which something went to nobody: `delivered` says what went out, by request."""
        got = self._generated(generated, rows)
        for request_id, followed in self._by_id.items():
            emitted = delivered.get(request_id, 0)
            valid = len(drafts.get(request_id, ()))
            if emitted:
                followed.completion += emitted
                if valid and (tokens := got[followed.slot]):
                    followed.accepted += tokens - 1
                    followed.proposed += valid
                    followed.verify += 1
                    followed.emitted += emitted

    def _generated(self, generated: Sequence[int], rows: Mapping[str, int]) -> list[int]:
        padded = [*generated, 0]
        found: Mapping[str, int] = rows if generated else {}
        return [*map(padded.__getitem__, map(found.get, self._ids, _no_row))]

    def _add_up(self, followed: Followed) -> None:
        slot = followed.slot
        if steps := self._alike_steps - followed.alike_steps:
            tokens = sum([generated[of_slots[slot]] for of_slots, generated in self._alike[followed.since_alike :]])
            followed.verify += steps
            followed.proposed += self._alike_drafts - followed.alike_drafts
            followed.accepted += tokens - steps
            followed.completion += tokens
            followed.emitted += tokens
        for lengths, got in self._mixed[followed.since_mixed :]:
            tokens = got[slot]
            followed.completion += tokens
            if tokens and lengths[slot]:
                followed.accepted += tokens - 1
                followed.proposed += lengths[slot]
                followed.verify += 1
                followed.emitted += tokens
        followed.alike_steps, followed.alike_drafts = self._alike_steps, self._alike_drafts

    def _add_all_up(self) -> None:
        for followed in self._by_id.values():
            self._add_up(followed)
            followed.since_alike = followed.since_mixed = 0
        self._alike.clear()
        self._mixed.clear()

    def trimmed(self, request_id: str, tokens: int, *, verified: bool) -> None:
        """So many tokens of its part in the step just noted did not go out; it was a verify step for it, or not."""
        followed = self._by_id.get(request_id)
        if followed is not None:
            followed.completion -= tokens
            if verified:
                followed.emitted -= tokens

    def finished(self, request_ids: Iterable[str]) -> None:
        """These generations finished."""
        for followed in filter(None, map(self._by_id.get, request_ids)):
            self._add_up(followed)
            self._candidates.finish(followed, time.time_ns())
            self._leave(followed)

    def gone(self, request_id: str) -> None:
        """A request ended before its first token."""
        followed = self._by_id.get(request_id)
        if followed is not None:
            self._candidates.gone(followed)
            self._leave(followed)

    def _leave(self, followed: Followed) -> None:
        del self._by_id[followed.request_id]
        self._ids[followed.slot] = self._FREE
        self._find = None
        heapq.heappush(self._free, followed.slot)
        while self._ids and self._ids[-1] == self._FREE:
            self._ids.pop()
        if not self._by_id:
            self._free.clear()
            self._alike.clear()
            self._mixed.clear()

    def drain(self) -> list[Followed]:
        """The candidates that finished since the last drain; the others count from 0 again."""
        self._alike.clear()
        self._mixed.clear()
        for followed in self._by_id.values():
            followed.begin(self._alike_steps, self._alike_drafts, 0, 0)
        return self._candidates.drain()
