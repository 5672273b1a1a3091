"""100,000 random steps: the sums of `StepTally`, at C speed over whole steps, equal a plain count request by request.

Steps are made with everything that vLLM's scheduler does to them: drafts of every length, padding of new and resumed
requests, drafts that the grammar invalidated, trimming at the end, outputs that are dropped, requests that fail,
aborts in every state, sessions whose turns end, ids used again. Stand-ins have the attributes that the adapter
reads, and no others.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_specdec.counts import COUNT_FIELDS
from otel_specdec.engines import Increment, Picked, vllm_candidates
from otel_specdec.engines import vllm as adapter
from otel_specdec.engines.vllm import StepTally
from otel_specdec.engines.vllm_candidates import Following, Places

K = 5
STEPS = 100_000


class Request:
    def __init__(self, request_id: str, plain: Counter[str], *, resumable: bool = False) -> None:
        self.request_id = request_id
        self.resumable = resumable  # streaming input: the end of a turn is not the end of the generation
        self.has_tokens = False
        self.num_output_tokens = 0
        self.finished = False
        self.plain = plain  # its own counts since the last collection
        self.session_id = None
        self.trace_headers = None

    def is_finished(self) -> bool:
        return self.finished


class World:
    """A scheduler's requests, random steps over them, and the plain count."""

    def __init__(self, seed: int, *, sessions: bool = False) -> None:
        self.random = random.Random(seed)
        self.sessions = sessions
        self.scheduler: Any = SimpleNamespace(requests={}, running=[], finished_req_ids=set())
        self.idle = self.became_idle = 0
        listener = SimpleNamespace(engine_idle=self.went_idle)
        self.tally = StepTally(SimpleNamespace(listener=listener), _Weak(self.scheduler), counts=True)  # type: ignore[arg-type]
        self.plain: Counter[str] = Counter()
        self.generations: list[tuple[str, Counter[str]]] = []  # finished since the last collection
        self.fresh: set[str] = set()
        self.req_ids: list[str] = []

    def went_idle(self) -> None:
        self.idle += 1
        assert not self.scheduler.requests

    def arrive(self) -> None:
        # An id may come back once its request is gone.
        request_id = f"r{self.random.randrange(400)}"
        if request_id not in self.scheduler.requests:
            request = Request(request_id, Counter(), resumable=self.sessions and self.random.random() < 0.3)
            self.scheduler.requests[request_id] = request
            self.scheduler.running.append(request)
            self.fresh.add(request_id)

    def count(self, request: Request, **counts: int) -> None:
        self.plain.update(counts)
        request.plain.update(counts)

    def end(self, request: Request) -> None:
        request.finished = True
        if request in self.scheduler.running:
            self.scheduler.running.remove(request)
        self.scheduler.finished_req_ids.add(request.request_id)
        del self.scheduler.requests[request.request_id]
        self.fresh.discard(request.request_id)
        if request.has_tokens:
            self.plain["generations"] += 1
            self.generations.append((request.request_id, request.plain))

    def abort(self) -> list[Request]:
        live = list(self.scheduler.requests)
        ids = [*self.random.sample(live, min(len(live), self.random.randint(1, 3))), "nobody"]
        requests = self.tally.before_finish(self.scheduler, ids)
        for request in requests:
            self.end(request)
        self.tally.after_finish(self.scheduler, requests)
        self.became_idle += bool(requests and not self.scheduler.requests)
        return requests

    def rarely(self) -> bool:
        return not self.steady and self.random.random() < 0.01

    def step(self) -> None:
        rng = self.random
        self.scheduler.finished_req_ids.clear()  # as `schedule` does
        uniform = rng.random() < 0.4  # every request has as many drafts, as with a draft model
        dropping = not self.steady and rng.random() < 0.1
        orderly = rng.random() < 0.5  # everybody is served, and stays in the same row
        live: list[Request] = [r for r in self.scheduler.requests.values() if orderly or rng.random() < 0.9]
        for request in live:
            if request not in self.scheduler.running:  # its session goes on
                self.scheduler.running.append(request)
                self.fresh.add(request.request_id)
        if not orderly:
            rng.shuffle(live)
        new = [r for r in live if r.request_id in self.fresh]
        resumed = {r.request_id for r in live if r not in new and not orderly and rng.random() < 0.05}
        second_runner = rng.random() < 0.5  # with which the resumed are among the new
        drafts: dict[str, list[int]] = {}
        invalid: dict[str, int] = {}
        sampled: list[list[int]] = []
        for request in live:
            fresh = request in new or request.request_id in resumed
            if fresh:
                if rng.random() < 0.3:
                    drafts[request.request_id] = [-1] * K  # padding
            elif uniform or rng.random() < 0.8:
                drafts[request.request_id] = [7] * (K if uniform else rng.randint(1, K))
                if not uniform and rng.random() < 0.2:
                    invalid[request.request_id] = rng.randint(1, len(drafts[request.request_id]))
            valid = 0 if fresh else len(drafts.get(request.request_id, ())) - invalid.get(request.request_id, 0)
            generated = 1 + rng.randint(0, valid)
            if request in new and rng.random() < 0.3:
                generated = 0  # in the middle of its prefill
            elif self.rarely():
                generated = rng.choice([0, valid + 3])  # which no version does
            sampled.append([1] * generated)
        places = list(enumerate(live))
        if rng.random() < 0.3:
            rng.shuffle(places)
        rows = {r.request_id: row for row, r in places}
        if (
            not self.steady and rng.random() < 0.1
        ):  # one more that ended since it was scheduled: it is in the rows, and in nothing else
            rows["ended"] = len(live)
            sampled.append([1] * 3)
            drafts["ended"] = [7] * 2
        if self.rarely():
            sampled.clear()  # nothing was sampled at all
        step = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id)
                for r in live
                if r in new or (second_runner and r.request_id in resumed)
            ],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set() if second_runner else resumed),
            scheduled_spec_decode_tokens=drafts,
            num_invalid_spec_tokens=invalid or None,
        )
        aborted = self.abort() if self.rarely() else []  # after it was scheduled
        preempted = [r for r in live if r in self.scheduler.running and self.rarely()]
        for request in preempted:
            self.scheduler.running.remove(request)
        output = SimpleNamespace(req_id_to_index=rows, sampled_token_ids=sampled)
        if rng.random() < 0.7:
            self.req_ids[:] = sorted(rows, key=rows.__getitem__)
            output.req_ids = self.req_ids
        before = self.tally.before_step(self.scheduler, step, output)
        self.tally.stepping = True

        outputs = []
        for request, tokens in zip(live, list(sampled), strict=False):
            generated = len(tokens)
            if not generated or request in aborted:
                continue
            if dropping and rng.random() < 0.1:
                continue  # a stale output, dropped
            self.fresh.discard(request.request_id)
            ends = rng.random() < 0.04
            emitted = rng.randint(1, generated) if ends else generated
            del tokens[emitted:]  # as vLLM does, in place
            fresh = request in new or request.request_id in resumed
            valid = 0 if fresh else len(drafts.get(request.request_id, ())) - invalid.get(request.request_id, 0)
            self.count(request, completion=emitted)
            request.num_output_tokens += emitted
            request.has_tokens = True
            if valid:
                # More accepted than proposed is kept out of positions.
                positions = range(valid if generated - 1 <= valid else 0)
                self.count(request, accepted=generated - 1, proposed=valid, verify=1, emitted=emitted)
                for position in positions:
                    self.plain[f"proposed@{position}"] += 1
                    self.plain[f"accepted@{position}"] += position < generated - 1
            if ends and request.resumable and rng.random() < 0.7:
                if request not in preempted:
                    self.scheduler.running.remove(request)
                request.num_output_tokens = 0  # what was generated is part of the next turn's prompt
            elif ends:
                self.end(request)
            reason = rng.choice(["stop", "length"]) if ends else None
            outputs.append(SimpleNamespace(request_id=request.request_id, new_token_ids=tokens, finish_reason=reason))
        for request in list(self.scheduler.requests.values()):
            if not self.steady and rng.random() < 0.002:  # it fails inside the call: an output without tokens
                failing = self.tally.before_finish(self.scheduler, [request.request_id])
                self.end(request)
                self.tally.after_finish(self.scheduler, failing)
                outputs.append(SimpleNamespace(request_id=request.request_id, new_token_ids=[], finish_reason="error"))
        half = len(outputs) // 2
        clients = {0: SimpleNamespace(outputs=outputs[:half]), 1: SimpleNamespace(outputs=outputs[half:])}
        self.tally.stepping = False
        was_busy = bool(self.scheduler.finished_req_ids - before[-1])
        self.tally.after_step(self.scheduler, step, output, before, clients)
        self.became_idle += was_busy and not self.scheduler.requests
        # The engine may use them again for the next step, as some versions do, and its list of ids.
        rows.clear()
        drafts.clear()

    def collect(self) -> None:
        """A collection: the sums equal the plain count, and so do the counts of each generation picked."""
        taken = self.tally.take()
        assert total(list(taken.increments)) == +self.plain
        own: dict[str, list[Counter[str]]] = {}
        for request_id, plain in self.generations:
            own.setdefault(request_id, []).append(plain)
        for picked in taken.picked:
            assert total(list(picked.increments), positions=False) - Counter(generations=1) in [
                +each for each in own[picked.response_id]
            ]
        assert len(taken.picked) <= 4
        if len(self.generations) <= 4:
            self.few += len(self.generations)
            self.few_picked += len(taken.picked)
        self.plain.clear()
        self.generations.clear()
        for request in self.scheduler.requests.values():
            request.plain.clear()

    few = few_picked = 0
    steady = False  # nothing goes astray


class _Weak(SimpleNamespace):
    """A namespace that a weak reference may point to, and that nobody keeps: the tally needs no scheduler of its
    own."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(requests=scheduler.requests)


def total(increments: list[Increment], *, positions: bool = True) -> Counter[str]:
    sums: Counter[str] = Counter()
    for increment in increments:
        for field in COUNT_FIELDS:
            sums[field] += getattr(increment.counts, field) or 0
        sums["generations"] += increment.generations
        for position, (accepted, proposed) in enumerate(
            zip(increment.accepted_by_position, increment.proposed_by_position, strict=True)
        ):
            if positions:
                sums[f"accepted@{position}"] += accepted
                sums[f"proposed@{position}"] += proposed
    return +sums


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_equal_the_plain_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_TOGETHER", 5 if seed % 2 else 32)
    random.seed(seed)  # the candidates' numbers too: whoever sees it fail can see it again
    world = World(seed, sessions=seed >= 2)
    steps = during = 0
    reading = world.tally._reading
    while steps < STEPS // 4:
        # Crowds of different size, so that the places for exemplars are sometimes free and sometimes all taken.
        crowd = world.random.choice([1, 3, 10, 40])
        often = world.random.choice([0.1, 0.01])
        for _ in range(world.random.randint(1, 200)):
            if len(world.scheduler.requests) < crowd and world.random.random() < 0.7:
                world.arrive()
            if world.random.random() < 0.02:
                world.abort()
            if not during and world.random.random() < 0.02:
                reading.acquire()  # a collection that takes its time
                during = world.random.randint(1, 40)
            world.step()
            steps += 1
            if during:
                during -= 1
                if not during:
                    reading.release()
            elif world.random.random() < often:
                world.collect()
        if during:
            during = 0
            reading.release()
        world.collect()
    # Where at most 4 finished, each was picked, but for the rare one that had lost its place in a crowd before.
    assert 0.95 * world.few < world.few_picked <= world.few
    assert world.idle == world.became_idle > 0


def test_only_steps_in_which_something_went_astray_are_counted_request_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cheap way is taken for the ends of generations too, trimmed or not: most steps of a busy engine have some."""
    one_by_one = 0
    plainly = StepTally._count

    def note(*step: Any) -> None:
        nonlocal one_by_one
        one_by_one += 1
        plainly(*step)

    monkeypatch.setattr(StepTally, "_count", note)
    world = World(0)
    world.steady = True
    ended = 0
    for _ in range(300):
        while len(world.scheduler.requests) < 40:
            world.arrive()
        world.step()
        ended += bool(world.scheduler.finished_req_ids)
    assert ended > 200
    assert not one_by_one
    world.collect()


def test_one_candidate_among_requests_that_are_none() -> None:
    """The hooks came when the others were running already."""
    following, places = Following(), Places()
    entered = places.enter([(0.5, Request("newborn", Counter())), (0.5, Request("", Counter()))])  # one without a name
    following.born(entered, itertools.repeat(0))
    rows = {"old": 0, "older": 1, "newborn": 2, "oldest": 3}
    for number in range(1, 4):
        of_places = places.rows(rows)
        assert of_places == [2]
        following.step((bytes([K] * 4) if number == 2 else K, bytes([1, 2, 3, 4]), of_places))
    following.finished({"newborn", "nobody"}, 5, ((K, bytes([1, 2, 3, 4]), of_places), bytes([1, 2, 2, 4]), ()))
    (followed,) = following.drain()
    assert (followed.accepted, followed.proposed, followed.verify) == (6, 3 * K, 3)
    assert (followed.completion, followed.emitted, followed.finished_unix_nano) == (8, 8, 5)
    following.finished({""}, 5)


def test_a_candidate_that_waits_while_the_others_go_on() -> None:
    following, places = Following(), Places()
    births = [(0.5, Request(request_id, Counter())) for request_id in ("waits", "goes")]
    following.born(places.enter(births), [1, 1])
    together = bytes([2, 3]), bytes([2, 3]), places.rows({"waits": 0, "goes": 1})
    places.look_again()
    alone = bytes([4, 1]), bytes([4, 2]), places.rows({"other": 0, "goes": 1})
    for step in (together, *[alone] * 16, together, *[alone] * 16):
        following.step(step)
        following.tidy()
    following.finished(["waits", "goes"], 1)
    by_id = {each.request_id: each for each in following.drain()}
    waits, goes = by_id["waits"], by_id["goes"]
    assert (waits.accepted, waits.proposed, waits.verify, waits.completion) == (2, 4, 2, 1 + 4)
    assert (goes.accepted, goes.proposed, goes.verify, goes.completion) == (4 + 32, 6 + 32, 34, 1 + 6 + 64)


@given(st.lists(st.binary(min_size=2, max_size=9), min_size=1, max_size=40), st.integers(1, 300))
def test_the_tokens_of_rows_are_added_without_a_carry(steps: list[bytes], most: int) -> None:
    width = max(map(len, steps))
    parts = [part.ljust(width, b"\0") for part in vllm_candidates._summed(steps, most)]
    assert [*map(sum, zip(*parts, strict=True))] == [
        *map(sum, zip(*[each.ljust(width, b"\0") for each in steps], strict=True))
    ]


@given(st.lists(st.binary(min_size=9, max_size=9).map(lambda row: bytes(n % 7 for n in row)), min_size=33))
def test_steps_of_a_usual_model_are_added_as_one_number(steps: list[bytes]) -> None:
    parts = [*vllm_candidates._summed(steps, 6)]
    assert len(parts) == -(-len(steps) // (255 // 6))
    assert [*map(sum, zip(*parts, strict=True))] == [*map(sum, zip(*steps, strict=True))]


def test_places_are_given_anew_only_when_they_are_many() -> None:
    following, places = Following(), Places()
    rows: dict[str, int] = {}
    for number in range(1000):
        request_id = f"r{number}"
        rows = {request_id: 1, "stays": 0}
        births = [(0.5, Request(request_id, Counter()))]
        if not number:
            births.append((0.1, Request("stays", Counter())))
        following.born(places.enter(births), [1, 1])
        places.look_again()
        of_places = places.rows(rows)
        assert of_places.count(-1) == len(of_places) - 2
        assert places.complete
        following.step((K, bytes([2, 3]), of_places))
        following.finished([request_id], number + 1)
        places.leave([request_id])
        assert places.holds(["stays"])
        assert not places.holds([request_id])
        assert set(places.rows({"elsewhere": 0})) == {-1}
        assert not places.complete  # somebody is not in this step
        following.tidy()
        had = len(places)
        following.renew(places)
        assert len(places) == (had if had <= 10 else 1)  # 8 to spare, and two for each who is followed
        places.look_again()
        assert [row for row in places.rows({"stays": 0}) if row >= 0] == [0]
    following.finished(["stays"], 2000)
    by_id = {followed.request_id: followed for followed in following.drain()}
    assert (by_id["stays"].accepted, by_id["stays"].completion) == (1000, 2001)
    others = [followed for request_id, followed in by_id.items() if request_id != "stays"]
    assert {(each.accepted, each.verify, each.completion) for each in others} == {(2, 1, 4)}


@pytest.mark.parametrize("length", [15, 16, 17, 255, 256, 300])
@pytest.mark.parametrize("drafts_only", [False, True])
def test_numbers_of_any_size_are_counted(length: int, drafts_only: bool) -> None:
    sums = adapter._StepSums()
    tokens = 2 if drafts_only or length > 255 else length
    changes: adapter.Changes = ([2], [], {"b"}, [1], bytes([tokens, 3, 9]), 0)
    sums.add_steps(
        [
            ((bytes([min(length, 255), 3, 0]), bytes([tokens, 1, 5]), ()), None),
            ((length, bytes([tokens, tokens]), ()), None),
            ((length, bytes([tokens, 4, 9]), ()), changes),
        ]
    )
    counted = Counter({part: times for part, times in sums.parts().items() if times and part[1]})
    expected = Counter({(length, tokens, tokens): 3, (3, 1, 1): 1, (length, 4, 3): 1, (0, 5, 5): 1, (0, 9, 9): 1})
    expected[min(length, 255), tokens, tokens] += 1
    assert counted == expected


def test_a_new_request_whose_first_tokens_are_trimmed_had_no_drafts() -> None:
    """No version samples more than one for it; if one does, it was no verify step."""
    scheduler: Any = SimpleNamespace(requests={"a": 1}, running=["a", "b"], finished_req_ids=set())
    listener: Any = SimpleNamespace(engine_idle=lambda: None)
    tally = StepTally(SimpleNamespace(listener=listener), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    request = Request("b", Counter())
    scheduler.requests["b"] = request
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="b")],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        scheduled_spec_decode_tokens={"a": [7] * K},
    )
    output = SimpleNamespace(req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[1] * 3, [1] * 3])
    before = tally.before_step(scheduler, step, output)
    assert before[1] == K
    del output.sampled_token_ids[1][1:]
    scheduler.running.remove("b")
    scheduler.finished_req_ids.add("b")
    outputs = [SimpleNamespace(request_id=i, new_token_ids=[1], finish_reason=None) for i in "ab"]
    tally.after_step(scheduler, step, output, before, SimpleNamespace(outputs=outputs))
    taken = tally.take()
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=2, proposed=K, verify=1, completion=4, emitted=3, generations=1
    )
    (picked,) = taken.picked
    assert total(list(picked.increments), positions=False) == Counter(completion=1, generations=1)


def plain_step(
    tally: StepTally,
    scheduler: Any,
    tokens: dict[str, int],
    *,
    new: Sequence[str] = (),
    trimmed: Sequence[str] = (),
    turns_over: Sequence[str] = (),
    preempted: Sequence[str] = (),
) -> None:
    """A step with an output for each request, who each have K drafts but the new.

    One token is trimmed off some; the turn of some is over, who were perhaps preempted since this step began.
    """
    scheduler.running.extend(each for each in new if each not in scheduler.running)
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=each) for each in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        scheduled_spec_decode_tokens={each: [7] * K for each in tokens if each not in new},
    )
    output = SimpleNamespace(
        req_id_to_index={each: row for row, each in enumerate(tokens)},
        sampled_token_ids=[[1] * number for number in tokens.values()],
    )
    for each in preempted:
        scheduler.running.remove(each)
    before = tally.before_step(scheduler, step, output)
    for each, number in tokens.items():
        scheduler.requests[each].num_output_tokens += number
    for each in turns_over:
        scheduler.requests[each].num_output_tokens = 0  # what it generated is part of its prompt now
        if each in scheduler.running:
            scheduler.running.remove(each)
    for each in trimmed:
        del output.sampled_token_ids[output.req_id_to_index[each]][-1:]
    given_out = zip(tokens, output.sampled_token_ids, strict=True)
    outputs = [
        SimpleNamespace(request_id=i, new_token_ids=list(out), finish_reason="stop" if i in turns_over else None)
        for i, out in given_out
    ]
    tally.after_step(scheduler, step, output, before, {0: SimpleNamespace(outputs=outputs)})


def test_an_output_without_tokens_is_no_verify_step() -> None:
    requests = {each: Request(each, Counter()) for each in "ab"}
    scheduler: Any = SimpleNamespace(requests=requests, running=["a", "b"], finished_req_ids=set())
    listener: Any = SimpleNamespace(engine_idle=lambda: None)
    tally = StepTally(SimpleNamespace(listener=listener), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    plain_step(tally, scheduler, {"a": 1, "b": 1}, new="ab")
    plain_step(tally, scheduler, {"a": 3, "b": 0})
    plain_step(tally, scheduler, {"a": 3, "b": 2})
    tally._catch_up()
    tally._following.finished("ab", 1)
    taken = tally.take()
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=5, proposed=3 * K, verify=3, completion=10, emitted=8
    )
    assert sorted(total(list(picked.increments), positions=False)["verify"] for picked in taken.picked) == [1, 2]


def test_aborts_stand_in_the_line_with_the_steps() -> None:
    requests = {each: Request(each, Counter()) for each in "abc"}
    scheduler: Any = SimpleNamespace(requests=dict(requests), running=["a", "b"], finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    plain_step(tally, scheduler, {"a": 1, "b": 1}, new="ab")
    plain_step(tally, scheduler, {"a": 3, "b": 2})
    earliest = time.time_ns()
    finishing = tally.before_finish(scheduler, ["a", "c"])  # and one that waits for its first step
    for each in finishing:
        each.finished = True
        scheduler.requests.pop(each.request_id)
    scheduler.running.remove("a")
    tally.after_finish(scheduler, finishing)
    latest = time.time_ns()
    plain_step(tally, scheduler, {"b": 3})
    assert len(tally._line) == 4  # nothing is counted yet
    taken = tally.take()
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=5, proposed=3 * K, verify=3, completion=10, emitted=8, generations=1
    )
    (picked,) = taken.picked
    assert (picked.response_id, earliest <= picked.finished_unix_nano <= latest) == ("a", True)
    assert total(list(picked.increments), positions=False)["completion"] == 4


class Unreadable(Request):
    """The engine has made an attribute of it something that fails."""

    @property
    def trace_headers(self) -> None:
        raise RuntimeError("no headers")

    @trace_headers.setter
    def trace_headers(self, value: None) -> None: ...


def test_a_step_that_cannot_be_followed_takes_no_other_with_it() -> None:
    requests = {"a": Request("a", Counter()), "b": Unreadable("b", Counter())}
    scheduler: Any = SimpleNamespace(requests=requests, running=["a", "b"], finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    plain_step(tally, scheduler, {"a": 1}, new="a")
    plain_step(tally, scheduler, {"a": 3, "b": 1}, new="b")
    plain_step(tally, scheduler, {"a": 3, "b": 2})
    with pytest.raises(RuntimeError, match="no headers"):
        tally._catch_up()
    tally._following.finished("ab", 1)
    taken = tally.take()
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=5, proposed=3 * K, verify=3, completion=10, emitted=8
    )
    (picked,) = taken.picked
    assert total(list(picked.increments), positions=False)["verify"] == 2


def test_a_crowd_that_comes_at_once_has_few_places() -> None:
    requests = {f"r{number}": Request(f"r{number}", Counter()) for number in range(3000)}
    scheduler: Any = SimpleNamespace(requests=requests, running=list(requests), finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    ids = list(requests)
    for number in range(0, len(ids), 100):
        plain_step(tally, scheduler, dict.fromkeys(ids[number : number + 100], 1), new=ids[number : number + 100])
        assert len(tally._places._ids) < 300
    plain_step(tally, scheduler, dict.fromkeys(ids, 3))
    tally._catch_up()
    assert len(tally._following._by_id) == 68
    plain_step(tally, scheduler, dict.fromkeys(ids, 2))
    tally._catch_up()
    assert len(tally._places._ids) <= 136
    tally._following.finished(ids, 1)
    taken = tally.take()
    assert {total(list(each.increments), positions=False)["accepted"] for each in taken.picked} == {3}
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=9000, proposed=6000 * K, verify=6000, completion=18000, emitted=15000
    )


def test_what_is_trimmed_though_nobody_ends_is_seen() -> None:
    requests = {each: Request(each, Counter()) for each in "ab"}
    scheduler: Any = SimpleNamespace(requests=requests, running=["a", "b"], finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    plain_step(tally, scheduler, {"a": 3, "b": 4}, trimmed=["b"])
    assert total(list(tally.take().increments), positions=False) == Counter(
        accepted=5, proposed=2 * K, verify=2, completion=6, emitted=6
    )


@pytest.mark.parametrize("during_a_collection", [False, True])
@pytest.mark.parametrize(("preempted", "resumable"), [("", True), ("a", True), ("", False)])
def test_a_sessions_next_turn_is_not_taken_for_its_beginning(
    preempted: str, resumable: bool, during_a_collection: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where a request does not say that it is resumable, if it leaves the running ones at its turn's end."""
    request = Request("a", Counter(), resumable=resumable)
    scheduler: Any = SimpleNamespace(requests={"a": request}, running=["a"], finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    monkeypatch.setattr(random, "random", lambda: 1.0)  # no candidate
    plain_step(tally, scheduler, {"a": 1}, new="a")
    if during_a_collection:
        tally._reading.acquire()
    plain_step(tally, scheduler, {"a": 2}, turns_over="a", preempted=preempted)
    monkeypatch.setattr(random, "random", lambda: 0.0)
    plain_step(tally, scheduler, {"a": 1}, new="a")
    if during_a_collection:
        tally._reading.release()
    tally._catch_up()
    assert not tally._following
    plain_step(tally, scheduler, {"a": 3}, turns_over="a")
    requests = tally.before_finish(scheduler, ["a"])  # the client goes away between two turns
    request.finished = True
    tally.after_finish(scheduler, requests)
    assert total(list(tally.take().increments), positions=False) == Counter(
        accepted=3, proposed=2 * K, verify=2, completion=7, emitted=5, generations=1
    )


def test_rows_without_sampled_tokens_are_counted_by_what_went_out() -> None:
    scheduler: Any = SimpleNamespace(requests={"a": 1, "b": 1}, running=["a", "b"], finished_req_ids=set())
    tally = StepTally(SimpleNamespace(listener=None), _Weak(scheduler), counts=True)  # type: ignore[arg-type]
    births = [(0.1, Request("a", Counter())), (0.2, Request("b", Counter()))]
    tally._following.born(tally._places.enter(births), [1, 1])
    step = SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        scheduled_spec_decode_tokens={"a": [7] * K},
    )  # fmt: skip
    output = SimpleNamespace(req_id_to_index={"b": 1, "a": 0}, sampled_token_ids=[[1] * 3])
    before = tally.before_step(scheduler, step, output)
    outputs = [SimpleNamespace(request_id="a", new_token_ids=[1] * 3, finish_reason=None)]
    tally.after_step(scheduler, step, output, before, SimpleNamespace(outputs=outputs))
    tally._following.finished("ab", 1)
    taken = tally.take()
    assert total(list(taken.increments), positions=False) == Counter(
        accepted=2, proposed=K, verify=1, completion=3, emitted=3
    )
    assert [total(list(picked.increments), positions=False)["completion"] for picked in taken.picked] == [4, 1]


@pytest.mark.parametrize(
    ("ended", "generated", "left", "expected"),
    [
        ({"a"}, [4, 2], [[1], [1, 1]], [0]),
        ({"a", "b"}, [4, 2], [[1] * 4, [1]], [0, 1]),
        ({"b"}, [4, 2], [[1] * 4, [1, 1]], [1]),  # nothing was trimmed
        (set(), [4, 2], [[1] * 4, [1, 1]], []),
        (set(), [4, 2], [[1] * 4, [1]], None),  # trimmed without an end
        ({"a"}, [4, 2], [[1], [1]], None),  # somebody else trimmed
        ({"a"}, [4, 2], [[], [1, 1]], None),  # trimmed to nothing
        ({"a"}, [0, 2], [[], [1, 1]], None),  # ended by something else
        ({"c"}, [4, 2], [[1] * 4, [1, 1]], None),  # not in the step
        ({"d"}, [4, 2], [[1] * 4, [1, 1]], None),  # has a row without tokens
        ({"a"}, [4, 2], [(1,) * 4, (1, 1)], None),  # not a list, of which a copy may have been trimmed
        ({"a"}, [4, 2], [[1] * 256, [1, 1]], None),
    ],
)
def test_the_rows_of_those_who_ended_are_known_or_said_to_be_unknown(
    ended: set[str], generated: list[int], left: list[Any], expected: list[int] | None
) -> None:
    output = SimpleNamespace(req_id_to_index={"a": 0, "b": 1, "d": 2}, sampled_token_ids=left)
    rows = adapter._rows_of_ended(ended, output, bytes(generated), adapter._lengths(left))
    assert (rows if rows is None else sorted(rows)) == expected


def test_a_step_during_a_collection_waits_for_nobody_and_is_counted_by_the_next() -> None:
    world = World(0)
    world.arrive()
    reading = world.tally._reading
    reading.acquire()  # a collection that takes its time
    done = threading.Event()

    def engine() -> None:
        for _ in range(10):
            world.step()
        done.set()

    threading.Thread(target=engine, daemon=True).start()
    assert done.wait(10)
    reading.release()
    world.collect()


def test_collections_at_any_moment_lose_and_double_nothing() -> None:
    world = World(1)
    sums: Counter[str] = Counter()
    picked: list[Picked] = []
    stop = threading.Event()

    def collector() -> None:
        while not stop.is_set():
            taken = world.tally.take()
            sums.update(total(list(taken.increments)))
            picked.extend(taken.picked)

    thread = threading.Thread(target=collector)
    thread.start()
    for _ in range(5_000):
        if len(world.scheduler.requests) < 20:
            world.arrive()
        if world.random.random() < 0.02:
            world.abort()
        world.step()
    stop.set()
    thread.join()
    sums.update(total(list(world.tally.take().increments)))
    assert +sums == +world.plain
    assert picked
