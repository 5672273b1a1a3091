"""100,000 random steps: the sums of `StepTally`, at C speed over whole steps, equal a plain count request by request.

Steps are made with everything that vLLM's scheduler does to them: drafts of every length, padding of new and resumed
requests, drafts that the grammar invalidated, trimming at the end, outputs that are dropped, requests that fail,
aborts in every state, ids used again. Stand-ins have the attributes that the adapter reads, and no others.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from otel_specdec.counts import COUNT_FIELDS
from otel_specdec.engines import Increment, Picked
from otel_specdec.engines.vllm import StepTally

K = 5
STEPS = 100_000


class Request:
    def __init__(self, request_id: str, plain: Counter[str]) -> None:
        self.request_id = request_id
        self.num_output_tokens = 0
        self.finished = False
        self.plain = plain  # its own counts since the last collection
        self.session_id = None
        self.trace_headers = None

    def is_finished(self) -> bool:
        return self.finished


class World:
    """A scheduler's requests, random steps over them, and the plain count."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler: Any = SimpleNamespace(requests={}, running=[], finished_req_ids=set())
        self.idle = 0
        listener = SimpleNamespace(engine_idle=self.went_idle)
        self.tally = StepTally(SimpleNamespace(listener=listener), _Weak(self.scheduler), counts=True)  # type: ignore[arg-type]
        self.plain: Counter[str] = Counter()
        self.generations: list[tuple[str, Counter[str]]] = []  # finished since the last collection
        self.fresh: set[str] = set()
        self.made = 0

    def went_idle(self) -> None:
        self.idle += 1
        assert not self.scheduler.requests

    def arrive(self) -> None:
        # An id may come back once its request is gone.
        request_id = f"r{self.random.randrange(400)}"
        if request_id not in self.scheduler.requests:
            request = Request(request_id, Counter())
            self.scheduler.requests[request_id] = request
            self.scheduler.running.append(request)
            self.fresh.add(request_id)

    def count(self, request: Request, **counts: int) -> None:
        self.plain.update(counts)
        request.plain.update(counts)

    def end(self, request: Request) -> None:
        request.finished = True
        self.scheduler.running.remove(request)
        self.scheduler.finished_req_ids.add(request.request_id)
        del self.scheduler.requests[request.request_id]
        self.fresh.discard(request.request_id)
        if request.num_output_tokens:
            self.plain["generations"] += 1
            self.generations.append((request.request_id, request.plain))

    def abort(self) -> None:
        live = list(self.scheduler.requests)
        ids = [*self.random.sample(live, min(len(live), self.random.randint(1, 3))), "nobody"]
        requests = self.tally.before_finish(self.scheduler, ids)
        for request in requests:
            self.end(request)
        self.tally.after_finish(self.scheduler, requests)

    def step(self) -> None:
        rng = self.random
        self.scheduler.finished_req_ids.clear()  # as `schedule` does
        uniform = rng.random() < 0.4  # every request has as many drafts, as with a draft model
        dropping = rng.random() < 0.1
        live: list[Request] = [r for r in self.scheduler.requests.values() if rng.random() < 0.9]
        rng.shuffle(live)
        new = [r for r in live if r.request_id in self.fresh]
        resumed = {r.request_id for r in live if r not in new and rng.random() < 0.05}
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
            prefilling = request in new and rng.random() < 0.3
            sampled.append([] if prefilling else [1] * (1 + rng.randint(0, valid)))
        rows = {r.request_id: row for row, r in enumerate(live)}
        if rng.random() < 0.1:  # one more that ended since it was scheduled: it is in the rows, and in nothing else
            rows["ended"] = len(live)
            sampled.append([1] * 3)
            drafts["ended"] = [7] * 2
        step = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=r.request_id) for r in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
            scheduled_spec_decode_tokens=drafts,
            num_invalid_spec_tokens=invalid or None,
        )
        output = SimpleNamespace(req_id_to_index=rows, sampled_token_ids=sampled)
        before = self.tally.before_step(self.scheduler, step, output)

        outputs = []
        for request, tokens in zip(live, list(sampled), strict=False):
            generated = len(tokens)
            if not generated:
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
            if valid:
                self.count(request, accepted=generated - 1, proposed=valid, verify=1, emitted=emitted)
                for position in range(valid):
                    self.plain[f"proposed@{position}"] += 1
                    self.plain[f"accepted@{position}"] += position < generated - 1
            if ends:
                self.end(request)
            reason = rng.choice(["stop", "length"]) if ends else None
            outputs.append(SimpleNamespace(request_id=request.request_id, new_token_ids=tokens, finish_reason=reason))
        for request in list(self.scheduler.requests.values()):
            if rng.random() < 0.002:  # it fails inside the call: an output without tokens
                failing = self.tally.before_finish(self.scheduler, [request.request_id])
                self.end(request)
                self.tally.after_finish(self.scheduler, failing)
                outputs.append(SimpleNamespace(request_id=request.request_id, new_token_ids=[], finish_reason="error"))
        half = len(outputs) // 2
        clients = {0: SimpleNamespace(outputs=outputs[:half]), 1: SimpleNamespace(outputs=outputs[half:])}
        self.tally.after_step(self.scheduler, step, output, before, clients)

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
def test_random_steps_equal_the_plain_count(seed: int) -> None:
    world = World(seed)
    steps = 0
    while steps < STEPS // 4:
        # Crowds of different size, so that the places for exemplars are sometimes free and sometimes all taken.
        crowd = world.random.choice([1, 3, 10, 40])
        for _ in range(world.random.randint(1, 200)):
            if len(world.scheduler.requests) < crowd and world.random.random() < 0.7:
                world.arrive()
            if world.random.random() < 0.02:
                world.abort()
            world.step()
            steps += 1
            if world.random.random() < 0.1:
                world.collect()
        world.collect()
    # Where at most 4 finished, each was picked, but for the rare one that had lost its place in a crowd before.
    assert 0.99 * world.few < world.few_picked <= world.few
    assert world.idle > 0


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
