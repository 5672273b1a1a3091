"""A vLLM of the future, made of the real one: its scheduler's module is executed anew, and changed before we see it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import wrapt

from examples.vllm_demo.tiny_model import Models
from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.engines.vllm import SCHEDULER_MODULE
from tests.vllm import versions
from tests.vllm.engine import points
from tests.vllm.scheduler import Rig

BLOCK = [11, 12, 13, 14, 15]


def update(scheduler: Any, step: Any, output: Any) -> Any:
    return scheduler.update_from_output(step, output)


def finish(scheduler: Any, ids: Any, status: Any) -> Any:
    return scheduler.finish_requests(ids, status)


@dataclass(frozen=True)
class Future:
    """A change to the module, which returns its scheduler class, and how that vLLM's engine would call its methods."""

    change: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any] = update
    finish: Callable[[Any, Any, Any], Any] = finish


def unchanged(module: Any) -> Any:
    return module.Scheduler


def class_renamed(module: Any) -> Any:
    kind = module.Planner = module.Scheduler
    del module.Scheduler
    return kind


def inherited(module: Any) -> Any:
    module.Scheduler = type("Scheduler", (module.Scheduler,), {})
    return module.Scheduler


def renamed(method: str, name: str) -> Callable[[Any], Any]:
    def change(module: Any) -> Any:
        setattr(module.Scheduler, name, vars(module.Scheduler)[method])
        delattr(module.Scheduler, method)
        return module.Scheduler

    return change


def replaced(method: str, replacement: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(module: Any) -> Any:
        setattr(module.Scheduler, method, replacement(vars(module.Scheduler)[method]))
        return module.Scheduler

    return change


def other_names(original: Any) -> Any:
    def update_from_output(self: Any, step: Any, output: Any) -> Any:
        return original(self, step, output)

    return update_from_output


def one_more(original: Any) -> Any:
    def update_from_output(self: Any, grammar: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def other_order(original: Any) -> Any:
    def finish_requests(self: Any, finished_status: Any, request_ids: Any) -> Any:
        return original(self, request_ids, finished_status)

    return finish_requests


def update_coroutine(original: Any) -> Any:
    async def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return original(self, scheduler_output, model_runner_output)

    return update_from_output


def finish_coroutine(original: Any) -> Any:
    async def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> Any:
        return original(self, request_ids, finished_status)

    return finish_requests


FUTURES = {
    "the class renamed": Future(class_renamed),
    "the methods inherited": Future(inherited),
    "update renamed": Future(
        renamed("update_from_output", "update_from_model_output"),
        update=lambda scheduler, step, output: scheduler.update_from_model_output(step, output),
    ),
    "finish renamed": Future(
        renamed("finish_requests", "end_requests"),
        finish=lambda scheduler, ids, status: scheduler.end_requests(ids, status),
    ),
    "arguments renamed": Future(replaced("update_from_output", other_names)),
    "one argument more": Future(
        replaced("update_from_output", one_more),
        update=lambda scheduler, step, output: scheduler.update_from_output(None, step, output),
    ),
    "arguments in another order": Future(
        replaced("finish_requests", other_order),
        finish=lambda scheduler, ids, status: scheduler.finish_requests(status, ids),
    ),
    "update a coroutine": Future(
        replaced("update_from_output", update_coroutine),
        update=lambda scheduler, step, output: asyncio.run(scheduler.update_from_output(step, output)),
    ),
    "finish a coroutine": Future(
        replaced("finish_requests", finish_coroutine),
        finish=lambda scheduler, ids, status: asyncio.run(scheduler.finish_requests(ids, status)),
    ),
}


@contextmanager
def vllm_with(change: Callable[[Any], Any]) -> Iterator[Callable[[], tuple[Any, dict[str, Any]]]]:
    """vLLM's scheduler module is not imported yet; the call imports it: the changed class, and what it holds then."""
    module = importlib.import_module(SCHEDULER_MODULE)
    package, _, name = SCHEDULER_MODULE.rpartition(".")
    seen: list[tuple[Any, dict[str, Any]]] = []

    def hook(imported: Any) -> None:
        kind = change(imported)
        seen.append((kind, dict(vars(kind))))

    del sys.modules[SCHEDULER_MODULE]
    # Registered first, so that it runs before the hook of ours that waits for the same import.
    wrapt.register_post_import_hook(hook, SCHEDULER_MODULE)

    def load() -> tuple[Any, dict[str, Any]]:
        importlib.import_module(SCHEDULER_MODULE)
        (found,) = seen
        return found

    try:
        yield load
    finally:
        sys.modules[SCHEDULER_MODULE] = module
        setattr(sys.modules[package], name, module)


def drive(rig: Rig, kind: Any, future: Future) -> list[Any]:
    """Two steps and an abort: what went out in each step, and who is left."""
    from vllm.v1.request import RequestStatus

    rig.scheduler = rig.make(kind)
    answers: list[Any] = []
    for request_id in ("a", "b"):
        rig.add(request_id)
    for generated in ({"a": [10], "b": [10]}, {"a": BLOCK, "b": [11]}):
        step = rig.schedule()
        result = future.update(rig.scheduler, step, versions.make_output(step, generated))
        answers.append({o.request_id: o.new_token_ids for out in result.values() for o in out.outputs})
        rig.draft("a")
    future.finish(rig.scheduler, ["a"], RequestStatus.FINISHED_ABORTED)
    return [*answers, list(rig.scheduler.requests)]


@pytest.fixture
def rig(models: Models) -> Rig:
    return Rig(models)


@pytest.fixture
def warnings(rig: Rig) -> Iterator[list[str]]:
    """What we warn of, under vLLM's logger: it hands nothing up to pytest's, and drops handlers with the first rig."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger("vllm.otel_specdec"), logging.getLogger("otel_specdec")]
    for logger in loggers:
        logger.addHandler(handler)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)


EXPECTED = [{"a": [10], "b": [10]}, {"a": BLOCK, "b": [11]}, ["b"]]


@pytest.mark.parametrize("early", [True, False], ids=["hooks before the import", "hooks after it"])
@pytest.mark.parametrize("future", FUTURES.values(), ids=FUTURES.keys())
def test_a_vllm_of_the_future_gets_one_warning_and_is_left_alone(
    rig: Rig, warnings: list[str], future: Future, early: bool
) -> None:
    with vllm_with(future.change) as load:
        try:
            if not early:
                load()
            VLLMSpecDecInstrumentor().instrument(meter_provider=rig.provider)
            kind, before = load()
            assert drive(rig, kind, future) == EXPECTED
        finally:
            VLLMSpecDecInstrumentor().uninstrument()
        assert dict(vars(kind)) == before
        assert points(rig.reader) == []
    (line,) = warnings
    assert "does not know this vLLM" in line


@pytest.mark.parametrize("early", [True, False], ids=["hooks before the import", "hooks after it"])
def test_the_same_vllm_unchanged_is_counted(rig: Rig, warnings: list[str], early: bool) -> None:
    future = Future(unchanged)
    with vllm_with(future.change) as load:
        try:
            if not early:
                load()
            VLLMSpecDecInstrumentor().instrument(meter_provider=rig.provider)
            assert drive(rig, load()[0], future) == EXPECTED
            assert rig.counted() == {
                "accepted": 4, "proposed": 4, "verify": 1, "completion": 8, "emitted": 5, "generations": 1
            }  # fmt: skip
        finally:
            VLLMSpecDecInstrumentor().uninstrument()
    assert warnings == []
