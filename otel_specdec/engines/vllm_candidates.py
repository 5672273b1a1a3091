"""The bounded number of vLLM generations that are followed one by one, as candidates for exemplars.

On the engine's thread, once a step: what it may cost is a few passes at C speed over at most 68 places.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from otel_specdec.candidates import Candidate, Candidates

Birth = tuple[float, Any]
"""A request that had no token yet, and the random number that it drew."""

AlikeStep = tuple[int, bytes, Sequence[int]]
"""The drafts (≥ 1) that every candidate had, the tokens (≥ 1) of each row, and the row of each slot."""

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
        self._row_ids: Sequence[str] | None = None  # whose the rows were when the slots were looked up, and
        self._of_slots: Sequence[int] = ()  # where they stood
        self._alike: list[AlikeStep] = []
        self._alike_steps = 0  # such steps, ever, and the drafts that each request had in them
        self._alike_drafts = 0
        self._mixed: list[tuple[list[int], Sequence[int], bytes]] = []  # valid drafts of each slot; the same two

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def bar(self) -> float:
        """A birth may become a candidate if its random number is below this; see `Candidates.bar`."""
        return self._candidates.bar

    def follows(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these is a candidate."""
        return not self._by_id.keys().isdisjoint(request_ids)

    def born(self, births: Iterable[Birth], tokens: Iterable[int]) -> None:
        """Generations had their first step; in a step that is noted already each got so many tokens."""
        for (order, request), number in zip(births, tokens, strict=False):
            # Without an id there is nothing to name it by; or it was preempted before its first token, and is back.
            if request.request_id and request.request_id not in self._by_id:
                self._enter(order, request, number)

    def _enter(self, order: float, request: Any, tokens: int) -> None:
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
        self._find, self._of_slots = None, ()
        followed.slot = slot
        followed.begin(self._alike_steps, self._alike_drafts, len(self._alike), len(self._mixed))
        followed.completion = tokens
        self._by_id[followed.request_id] = followed

    def rows_of_slots(self, row_ids: Sequence[str] | None, rows: Mapping[str, int]) -> Sequence[int] | None:
        """The row of each slot; None where somebody is not in this step.

        Most steps have the rows of the step before, and two lists of the same ids are compared without a look at them.
        """
        if not self._by_id:
            return ()
        if not (self._of_slots and row_ids and row_ids == self._row_ids):
            try:
                self._of_slots = (self._find or self._new_find())(rows)
            except KeyError:
                return None
            self._row_ids = row_ids and list(row_ids)
        return self._of_slots

    def step(self, drafts: Mapping[str, Any], generated: bytes, rows: Mapping[str, int], alike: int) -> None:
        """Note a step whose tokens all went out.

        Args:
            drafts: valid drafts, by request.
            generated: tokens of each row.
            rows: the row of each request in the step.
            alike: how many drafts each followed request had, where all had as many and got a token, else 0.
        """
        try:
            of_slots: Sequence[int] = (self._find or self._new_find())(rows)
        except KeyError:  # somebody is not in this step
            of_slots, generated, alike = [*map(rows.get, self._ids, _no_row)], generated + b"\0", 0
        if alike:
            self.alike([(alike, generated, of_slots)])
            return
        self._mixed.append(([*map(len, map(drafts.get, self._ids, _nothing))], of_slots, generated))
        if len(self._mixed) >= self._ROWS:
            self._add_all_up()

    def alike(self, steps: Sequence[AlikeStep]) -> None:
        """Note steps in which everybody had as many drafts; the rows in them are by today's slots."""
        self._alike += steps
        self._alike_steps += len(steps)
        self._alike_drafts += sum([drafts for drafts, _, _ in steps])
        if len(self._alike) >= self._ROWS:
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
        for request_id, followed in self._by_id.items():
            emitted = delivered.get(request_id, 0)
            if emitted:
                followed.completion += emitted
                row = rows.get(request_id, -1)
                tokens = generated[row] if 0 <= row < len(generated) else 0
                valid = len(drafts.get(request_id, ()))
                if valid and tokens:
                    followed.accepted += tokens - 1
                    followed.proposed += valid
                    followed.verify += 1
                    followed.emitted += emitted

    def _add_up(self, followed: Followed, tokens_of_slots: Sequence[int] = ()) -> None:
        """Read what it did from the log; `tokens_of_slots` says it for those who were there since its beginning."""
        slot = followed.slot
        if steps := self._alike_steps - followed.alike_steps:
            if tokens_of_slots and not followed.since_alike:
                tokens = tokens_of_slots[slot]
            else:
                alike = self._alike[followed.since_alike :]
                tokens = sum([generated[of_slots[slot]] for _, generated, of_slots in alike])
            followed.verify += steps
            followed.proposed += self._alike_drafts - followed.alike_drafts
            followed.accepted += tokens - steps
            followed.completion += tokens
            followed.emitted += tokens
        for lengths, of_slots, generated in self._mixed[followed.since_mixed :]:
            tokens = generated[of_slots[slot]]
            followed.completion += tokens
            if tokens and lengths[slot]:
                followed.accepted += tokens - 1
                followed.proposed += lengths[slot]
                followed.verify += 1
                followed.emitted += tokens
        followed.alike_steps, followed.alike_drafts = self._alike_steps, self._alike_drafts

    def _add_all_up(self) -> None:
        columns: list[Iterable[int]] = []
        for (drafts, of_slots), steps in itertools.groupby(self._alike, itemgetter(0, 2)):
            summed = _summed([generated for _, generated, _ in steps], drafts + 1)
            columns.extend(map(tokens.__getitem__, of_slots) for tokens in summed)
        # Slots that are not in all of these steps are of nobody who was there since the log's beginning.
        tokens_of_slots = [*map(sum, zip(*columns, strict=False))]
        for followed in self._by_id.values():
            self._add_up(followed, tokens_of_slots)
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
        self._find, self._of_slots = None, ()
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


def _summed(steps: Sequence[bytes], most: int) -> Iterator[bytes]:
    """The tokens of each row in all of these steps, as bytes that are to be added; usually `most` in a step at most.

    Whole steps are added as one long number each, as many as leave every byte without a carry into the next.
    """
    together = max(1, 255 // most)
    for start in range(0, len(steps), together):
        some = steps[start : start + together]
        if len(some) == 1 or b"".join(some).translate(None, bytes(range(most + 1))):  # more than that occurs
            yield from some
        else:
            total = sum([int.from_bytes(each, "little") for each in some])
            yield total.to_bytes(max(map(len, some)), "little")
