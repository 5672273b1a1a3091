"""Steps and messages as no engine makes them: well-formed ones in which some things are something else, or missing.

The engine's own method does and returns what was decided before the call, so that whatever reaches the caller beside it
comes from us. Seeded: the same seed gives the same shapes. Used by the tests (some thousands) and by
tests/benchmarks/million.py (all of them).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from otel_specdec import SGLangSpecDecInstrumentor, VLLMSpecDecInstrumentor
from tests.unit import sglang_stand_in
from tests.unit.collected import Meter, counted
from tests.unit.vllm_stand_in import config

REQUESTS = [f"cmpl-{n}-0-abcdef12" for n in range(8)]
STOP = {"type": "stop"}


class EngineError(Exception):
    """One of the engine's own."""


class Hostile:
    """Whatever it is asked, it raises."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __getattr__ = __len__ = __iter__ = __bool__ = __getitem__ = __contains__ = __int__ = __index__ = _raise
    __lt__ = __le__ = __add__ = __radd__ = __mul__ = __rmul__ = __str__ = __repr__ = _raise

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("hostile")

    def __hash__(self) -> int:
        raise RuntimeError("hostile")


class Endless:
    """A sequence whose length is a lie."""

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else 1


class Shapes:
    """Random things, and things with some of them in the wrong place."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def anything(self) -> Any:
        draw = self.draw
        makers: list[Callable[[], Any]] = [
            lambda: None, lambda: draw.choice([True, False, -1, 2**70]), lambda: draw.randint(-3, 9),
            lambda: draw.choice([1.5, math.nan, math.inf, -0.0]), lambda: draw.choice(["", "a", "\ud800", *REQUESTS]),
            lambda: b"a", list, dict, set, lambda: [None], lambda: [[1, 2], [3]], lambda: {"a": None, None: []},
            lambda: {draw.choice(REQUESTS): draw.randint(-2, 5)}, lambda: iter((1, 2)), object, Hostile, Endless,
            SimpleNamespace, lambda: SimpleNamespace(request_id=None, req_id=[], outputs=None), lambda: int,
            lambda: draw.choices(REQUESTS, k=3), lambda: (1, "a", None), lambda: EngineError(),
        ]  # fmt: skip
        return draw.choice(makers)()

    def mutated(self, root: Any) -> Any:
        """`root` with up to three of the things in it replaced, or gone."""
        for _ in range(self.draw.choice([0, 1, 1, 1, 2, 3])):
            places = list(_places(root, 3))
            if not places:
                return self.anything()
            owner, key = self.draw.choice(places)
            _put(owner, key, self.anything, gone=self.draw.random() < 0.15)
        return root

    def rows(self) -> list[str]:
        return self.draw.sample(REQUESTS, self.draw.randint(0, len(REQUESTS)))


def _places(owner: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Where something could be replaced: (owner, attribute, key or index)."""
    inner: list[tuple[Any, Any]]
    if isinstance(owner, SimpleNamespace):
        inner = list(vars(owner).items())
    elif type(owner) is dict:
        inner = list(owner.items())
    elif type(owner) is list:
        inner = list(enumerate(owner))
    else:
        return
    for key, value in inner:
        yield owner, key
        if depth:
            yield from _places(value, depth - 1)


def _put(owner: Any, key: Any, make: Callable[[], Any], *, gone: bool) -> None:
    owner = owner if isinstance(owner, dict | list) else vars(owner)
    if gone:
        owner.pop(key)
    else:
        owner[key] = make()


class Abuse:
    """Calls an instrumented engine's methods again and again, and checks that nothing of ours comes out of them."""

    def __init__(self, seed: int) -> None:
        self.shapes = Shapes(seed)
        self.meter = Meter()
        self.calls = 0
        self.last: dict[str, int] = {}

    def call(self, engine: Any, method: Callable[..., Any], *args: Any, answer: Any) -> None:
        error = EngineError() if self.shapes.draw.random() < 0.05 else None

        def outcome() -> Any:
            if error is not None:
                raise error
            return answer

        engine.outcome = outcome
        came: object
        try:
            came = method(*args)
        except EngineError as raised:
            came = raised
        assert came is (error or answer)
        self.calls += 1

    def once(self) -> None:
        """One call."""
        raise NotImplementedError

    def works_still(self) -> bool:
        """Whether a well-formed step of a new engine is counted, after all that."""
        raise NotImplementedError

    def check(self) -> None:
        """What is collected stays a sum: of integers, never negative, never falling."""
        found = self.meter.points()
        assert all(type(point.value) is int and point.value >= 0 for point in found)
        totals = self.meter.totals()
        assert all(totals.get(name, 0) >= value for name, value in self.last.items())
        self.last = totals


class VllmAbuse(Abuse):
    """vLLM's stand-in scheduler: `update_from_output` with random steps, `finish_requests` with random ids."""

    def __init__(self, seed: int, module: Any) -> None:
        super().__init__(seed)

        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            return self.outcome()

        def finish_requests(self: Any, request_ids: Any, finished_status: Any = None) -> Any:
            return self.outcome()

        self.module = module
        module.Scheduler.update_from_output = update_from_output
        module.Scheduler.finish_requests = finish_requests
        VLLMSpecDecInstrumentor().instrument(meter_provider=self.meter.provider)
        self.scheduler = module.Scheduler(config())

    def once(self) -> None:
        draw, shapes, scheduler = self.shapes.draw, self.shapes, self.scheduler
        vars(scheduler).update(self.state())
        if draw.random() < 0.1:
            _put(scheduler, draw.choice(["requests", "running", "finished_req_ids"]),
                 shapes.anything, gone=draw.random() < 0.3)  # fmt: skip
        if draw.random() < 0.15:
            ids = draw.choice([None, shapes.rows(), draw.choice(REQUESTS), shapes.anything()])
            self.call(scheduler, scheduler.finish_requests, ids, "aborted", answer=shapes.anything())
        else:
            step, output, answer = self.step()
            self.call(scheduler, scheduler.update_from_output, shapes.mutated(step), shapes.mutated(output),
                      answer=shapes.mutated(answer))  # fmt: skip

    def state(self) -> dict[str, Any]:
        requests = {
            name: SimpleNamespace(
                request_id=name, num_output_tokens=self.shapes.draw.randint(0, 3), is_finished=lambda: False,
                session_id=None, trace_headers=None,
            )
            for name in self.shapes.rows()
        }  # fmt: skip
        running = list(requests)
        if requests and self.shapes.draw.random() < 0.1:
            requests = self.shapes.mutated(requests)
        return {"requests": requests, "running": running, "finished_req_ids": set()}

    def step(self) -> tuple[Any, Any, Any]:
        draw, rows = self.shapes.draw, self.shapes.rows()
        step = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(rows, 1),
            scheduled_spec_decode_tokens={name: [-1] * draw.randint(1, 5) for name in rows if draw.random() < 0.7},
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in rows if draw.random() < 0.2],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={name for name in rows if draw.random() < 0.1}),
            num_invalid_spec_tokens=draw.choice([None, {name: draw.randint(0, 5) for name in rows[:2]}]),
        )
        output = SimpleNamespace(
            sampled_token_ids=[list(range(draw.randint(0, 6))) for _ in rows],
            req_id_to_index={name: row for row, name in enumerate(rows)},
        )
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=list(range(draw.randint(0, 6))),
                            finish_reason=draw.choice([None, None, "stop"]))
            for name in rows if draw.random() < 0.9
        ]  # fmt: skip
        answer = SimpleNamespace(outputs=outputs)
        return step, output, answer if draw.random() < 0.2 else {0: answer}

    def works_still(self) -> bool:
        meter = Meter()
        VLLMSpecDecInstrumentor().uninstrument()
        VLLMSpecDecInstrumentor().instrument(meter_provider=meter.provider)
        scheduler = self.module.Scheduler(config())
        request = SimpleNamespace(request_id="r", num_output_tokens=1, is_finished=lambda: False)
        scheduler.requests, scheduler.running = {"r": request}, [request]
        answer = {
            0: SimpleNamespace(outputs=[SimpleNamespace(request_id="r", new_token_ids=[1, 2], finish_reason=None)])
        }
        scheduler.outcome = lambda: answer
        step = SimpleNamespace(
            scheduled_spec_decode_tokens={"r": [-1] * 4}, scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )  # fmt: skip
        scheduler.update_from_output(step, SimpleNamespace(sampled_token_ids=[[1, 2]], req_id_to_index={"r": 0}))
        return meter.totals() == counted(accepted=1, proposed=4, verify=1, completion=2, emitted=2)


class SglangAbuse(Abuse):
    """SGLang's stand-in manager: `_handle_batch_output` with random messages, `_handle_abort_req` with random ids."""

    def __init__(self, seed: int, manager: Any) -> None:
        super().__init__(seed)
        self.kind = manager
        SGLangSpecDecInstrumentor().instrument(meter_provider=self.meter.provider)
        self.manager = manager(sglang_stand_in.settings())

    def once(self) -> None:
        draw, shapes, manager = self.shapes.draw, self.shapes, self.manager
        states = {name: sglang_stand_in.state() for name in shapes.rows()}
        # The watch holds on to the first dictionary, as SGLang does.
        if type(manager.rid_to_state) is not dict:
            manager.rid_to_state = manager._otel_specdec_watch.states
        manager.rid_to_state.clear()
        if draw.random() < 0.1:
            shapes.mutated(states)
        manager.rid_to_state.update(states)
        if draw.random() < 0.02:
            manager.rid_to_state = shapes.anything()
        if draw.random() < 0.15:
            about = draw.choice([SimpleNamespace(rid=draw.choice(REQUESTS)), shapes.anything()])
            self.call(manager, manager._handle_abort_req, about, answer=shapes.anything())
        else:
            message = self.message()
            message = shapes.mutated(message) if draw.random() < 0.95 else shapes.anything()
            self.call(manager, manager._handle_batch_output, message, answer=shapes.anything())

    def message(self) -> Any:
        draw, rows = self.shapes.draw, self.shapes.rows()
        return SimpleNamespace(
            rids=rows,
            finished_reasons=[
                draw.choice([None, None, {"type": "stop"}, {"type": "length", "length": 0}]) for _ in rows
            ],
            completion_tokens=[draw.randint(0, 30) for _ in rows],
            spec_verify_ct=[draw.randint(0, 9) for _ in rows],
            spec_num_correct_drafts=[draw.randint(0, 27) for _ in rows],
            spec_correct_drafts_histogram=[[draw.randint(0, 3) for _ in range(draw.randint(0, 6))] for _ in rows],
            retraction_counts=[draw.choice([0, 0, 0, 1]) for _ in rows],
            dp_ranks=draw.choice([None, [draw.choice([0, 1, None]) for _ in rows], [0 for _ in rows]]),
        )

    def works_still(self) -> bool:
        meter = Meter()
        SGLangSpecDecInstrumentor().uninstrument()
        SGLangSpecDecInstrumentor().instrument(meter_provider=meter.provider)
        manager = self.kind(sglang_stand_in.settings())
        manager.rid_to_state["r"] = sglang_stand_in.state()
        manager._handle_batch_output(
            SimpleNamespace(
                rids=["r"], finished_reasons=[STOP], completion_tokens=[6], spec_verify_ct=[2], retraction_counts=[0],
                spec_num_correct_drafts=[3], spec_correct_drafts_histogram=[[0, 1, 1]], dp_ranks=None,
            )
        )  # fmt: skip
        return meter.totals() == counted(accepted=3, proposed=6, verify=2, completion=6, emitted=5, generations=1)
