"""The bounded number of vLLM generations that are followed one by one, as candidates for exemplars.

The engine's thread notes in each step where their rows are (`Places`), at C speed; what they did is read from that
later, for many steps together, on whichever thread counts them (`Following`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from otel_specdec.candidates import PICKS, PLACES, Candidate, Candidates

Birth = tuple[float, Any]
"""A request that had no token yet, and the random number that it drew."""

Step = tuple[int | bytes, bytes, Sequence[int]]
"""A step whose tokens all went out: drafts, tokens of each row, and the row of each place.

The drafts are one number (≥ 1) if every candidate had as many and got a token; else those of each row.
"""

Last = tuple[Step, Sequence[int], Sequence[int]]
"""A step in which generations finished: how many tokens of each row went out, and the rows of those who had no drafts
where all others had as many."""

NO_ROW: Final = itertools.repeat(-1)
"""The row of everybody who is not in a step."""

Entered = tuple[float, Any, int]
"""A birth, and the place where its rows are looked up."""


class Places:
    """Where the candidates' rows are looked up: a list of ids. Of the engine's thread alone.

    A place is never given to another as long as a step that is not counted yet may speak of it. So the list grows,
    until somebody who has counted all calls `renew`; which is urgent when it is `crowded`.
    """

    _NOBODY: Final = ""  # no request has this id
    _CROWD: Final = 2 * (PLACES + PICKS)

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._by_id: dict[str, int] = {}
        self._left = 0  # places of nobody
        self._rows: Sequence[int] = ()
        self.complete = True  # whether the rows found last were those of everybody

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def crowded(self) -> bool:
        """Whether there are so many that it is time for new ones."""
        return len(self._ids) > self._CROWD

    def holds(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these has a place."""
        return not self._by_id.keys().isdisjoint(request_ids)

    def enter(self, births: Iterable[Birth]) -> list[Entered]:
        """Give them places: but for those without an id, who could not be named, and those who have one already."""
        entered = []
        for order, request in births:
            request_id = request.request_id
            if request_id and request_id not in self._by_id:  # preempted before its first token, and back
                entered.append((order, request, len(self._ids)))
                self._by_id[request_id] = len(self._ids)
                self._ids.append(request_id)
                self._rows = ()
        return entered

    def leave(self, request_ids: Iterable[str]) -> None:
        """These ended, whether they have a place or not."""
        for request_id in self._by_id.keys() & request_ids:
            self._ids[self._by_id.pop(request_id)] = self._NOBODY
            self._left += 1
            self._rows = ()

    def rows(self, rows: Mapping[str, int]) -> Sequence[int]:
        """The row of each place; -1 for nobody's, and for who is not in this step."""
        if not self._rows:
            self._rows = [*map(rows.get, self._ids, NO_ROW)]
            self.complete = self._rows.count(-1) == self._left
        return self._rows

    def look_again(self) -> None:
        """The rows of the next step are not where those of the last were."""
        self._rows = ()

    def renew(self, request_ids: Iterable[str]) -> None:
        """These have the places from now on, in this order."""
        self._ids = list(request_ids)
        self._by_id = dict(zip(self._ids, itertools.count(), strict=False))
        self._left = 0
        self._rows = ()


class Followed(Candidate):
    """A candidate for exemplars: its ids, and what it did since the last drain (but for what is in the log still)."""

    __slots__ = (
        "accepted", "alike_drafts", "alike_steps", "completion", "emitted", "place", "proposed", "request_id",
        "session_id", "since_alike", "since_mixed", "trace_headers", "verify",
    )  # fmt: skip

    def __init__(self, order: float, request: Any, place: int) -> None:
        super().__init__(order)
        self.request_id: str = request.request_id
        self.session_id = getattr(request, "session_id", None)
        self.trace_headers = getattr(request, "trace_headers", None)
        self.place = place

    def begin(self, alike_steps: int, alike_drafts: int, since_alike: int, since_mixed: int) -> None:
        """Count from here on: the sums and the rows of the log that are there already are not its own."""
        self.accepted = self.proposed = self.verify = self.completion = self.emitted = 0
        self.alike_steps, self.alike_drafts = alike_steps, alike_drafts
        self.since_alike, self.since_mixed = since_alike, since_mixed


class Following:
    """The candidates. Steps go into a short log; whoever calls has to guard it.

    What a candidate did is read from the log when it finishes, and for all of them when the log is full. Of a step in
    which every request has equally many drafts only the generated tokens are logged; how many steps and drafts there
    were is the same for all.
    """

    _FULL: Final = 32
    _SPARE: Final = 8

    def __init__(self) -> None:
        self._candidates: Candidates[Followed] = Candidates(self._leave)
        self._by_id: dict[str, Followed] = {}
        self._alike: list[tuple[int, bytes, Sequence[int]]] = []
        self._alike_steps = 0  # such steps, ever, and the drafts that each request had in them
        self._alike_drafts = 0
        # Drafts and tokens of each row and the row of each place; in the first two a 0 at the end, for those at -1.
        self._mixed: list[tuple[bytes, bytes, Sequence[int]]] = []

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def bar(self) -> float:
        """A birth may become a candidate if its random number is below this; see `Candidates.bar`. Any thread asks."""
        return self._candidates.bar

    def born(self, births: Iterable[Entered], tokens: Iterable[int]) -> None:
        """Generations had their first step; in a step that is noted already each got so many tokens."""
        for (order, request, place), number in zip(births, tokens, strict=False):
            followed = self._candidates.born(lambda order: Followed(order, request, place), order)  # noqa: B023
            if followed is not None:
                followed.begin(self._alike_steps, self._alike_drafts, len(self._alike), len(self._mixed))
                followed.completion = number
                self._by_id[followed.request_id] = followed

    def step(self, step: Step) -> None:
        """Note a step."""
        drafts, tokens, rows = step
        if isinstance(drafts, int):
            self._alike.append((drafts, tokens, rows))
            self._alike_steps += 1
            self._alike_drafts += drafts
        elif self._by_id:
            self._mixed.append((drafts + b"\0", tokens + b"\0", rows))

    def tidy(self) -> None:
        """Read the log for everybody where it is full."""
        if len(self._alike) >= self._FULL or len(self._mixed) >= self._FULL:
            self._add_all_up()

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

    def _add_up(
        self, followed: Followed, tokens_of_places: Sequence[int] = (), mixed: Sequence[_Block] | None = None
    ) -> None:
        """Read what it did from the log.

        Args:
            followed: the candidate.
            tokens_of_places: what they did in alike steps, for those who were there since the log's beginning.
            mixed: the same of mixed steps.
        """
        place = followed.place
        if steps := self._alike_steps - followed.alike_steps:
            if tokens_of_places and not followed.since_alike:
                tokens = tokens_of_places[place]
            else:
                alike = self._alike[followed.since_alike :]
                tokens = sum([generated[rows[place]] for _, generated, rows in alike])
            followed.verify += steps
            followed.proposed += self._alike_drafts - followed.alike_drafts
            followed.accepted += tokens - steps
            followed.completion += tokens
            followed.emitted += tokens
        if mixed is not None and not followed.since_mixed:
            for drafts, all_tokens, width, rows in mixed:
                own = slice(rows[place], None, width)
                self._add_mixed(followed, drafts[own], all_tokens[own])
        elif since := self._mixed[followed.since_mixed :]:
            self._add_mixed(
                followed,
                [drafts[rows[place]] for drafts, _, rows in since],
                [generated[rows[place]] for _, generated, rows in since],
            )
        followed.alike_steps, followed.alike_drafts = self._alike_steps, self._alike_drafts

    @staticmethod
    def _add_mixed(followed: Followed, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        emitted = sum(itertools.compress(tokens, drafts))
        verify = sum(map(bool, itertools.compress(tokens, drafts)))
        followed.completion += sum(tokens)
        followed.proposed += sum(itertools.compress(drafts, tokens))
        followed.verify += verify
        followed.emitted += emitted
        followed.accepted += emitted - verify

    def _add_all_up(self) -> None:
        if self._by_id:
            self._add_up_those_who_run()
        self._alike.clear()
        self._mixed.clear()

    def _add_up_those_who_run(self) -> None:
        columns: list[Iterable[int]] = []
        for (drafts, rows), steps in itertools.groupby(self._alike, itemgetter(0, 2)):
            summed = _summed([generated for _, generated, _ in steps], drafts + 1)
            columns.extend(map(tokens.__getitem__, rows) for tokens in summed)
        # Places that are not in all of these steps are of nobody who was there since the log's beginning.
        tokens_of_places = [*map(sum, zip(*columns, strict=False))]
        mixed = [*_blocks(self._mixed)] if self._mixed else None
        for followed in self._by_id.values():
            self._add_up(followed, tokens_of_places, mixed)
            followed.since_alike = followed.since_mixed = 0

    def finished(self, request_ids: Iterable[str], unix_nano: int, last: Last | None = None) -> None:
        """These generations finished; perhaps with the step that was just noted."""
        if self._by_id.keys().isdisjoint(request_ids):
            return  # most are none of these
        for followed in filter(None, map(self._by_id.get, request_ids)):
            self._add_up(followed)
            if last is not None:
                (drafts, generated, rows), went_out, undrafted = last
                row = rows[followed.place]
                trimmed = generated[row] - went_out[row]
                followed.completion -= trimmed
                if drafts[row] if isinstance(drafts, bytes) else row not in undrafted:
                    followed.emitted -= trimmed
            self._candidates.finish(followed, unix_nano)
            self._leave(followed)

    def gone(self, request_id: str) -> None:
        """A request ended before its first token."""
        followed = self._by_id.get(request_id)
        if followed is not None:
            self._candidates.gone(followed)
            self._leave(followed)

    def _leave(self, followed: Followed) -> None:
        del self._by_id[followed.request_id]
        if not self._by_id:
            self._alike.clear()
            self._mixed.clear()

    def renew(self, places: Places) -> None:
        """Give those who are left new places, if it is worth it. On the engine's thread, when every step is counted."""
        if len(places) <= self._SPARE + 2 * len(self._by_id) and not places.crowded:
            return  # a look at a place of nobody costs less
        self._add_all_up()
        for place, followed in enumerate(self._by_id.values()):
            followed.place = place
        places.renew(self._by_id)

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


_Block = tuple[bytes, bytes, int, Sequence[int]]
"""Mixed steps in a row: their drafts as one string and their tokens as one, each step `width` long, and where in a step
a place is."""


def _blocks(steps: Sequence[tuple[bytes, bytes, Sequence[int]]]) -> Iterator[_Block]:
    """What those did who had their place in all of these steps: of steps with the same rows without a look at them."""
    moving: list[tuple[bytes, bytes]] = []
    for (rows, width), same in itertools.groupby(steps, lambda step: (step[2], len(step[1]))):
        drafts, tokens, _ = zip(*same, strict=True)
        if len(tokens) > 1:
            yield b"".join(drafts), b"".join(tokens), width, rows  # -1 is the last of all: the 0 at the end
        else:
            moving.append((bytes(map(drafts[0].__getitem__, rows)), bytes(map(tokens[0].__getitem__, rows))))
    if moving:
        width = max(len(tokens) for _, tokens in moving)
        drafts_in_a_row = b"".join([drafts.ljust(width, b"\0") for drafts, _ in moving])
        yield drafts_in_a_row, b"".join([tokens.ljust(width, b"\0") for _, tokens in moving]), width, range(width)
