"""The hooks on vLLM's scheduler, on a stand-in: when they are put where, and that vLLM never notices."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.engines.hooking import is_hook
from tests.unit.collected import Meter, counted
from tests.unit.vllm_stand_in import SOURCE, Steps, importable, write

METHODS = ("__init__", "update_from_output", "finish_requests")

Import = Callable[[], ModuleType]


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Import]:
    write(tmp_path)
    with importable(tmp_path) as load:
        yield load


def drive(steps: Steps) -> dict[str, int]:
    """Two requests to their end; returns what must be counted."""
    steps.add("a", limit=9)
    steps.add("b", limit=3)
    steps.step(a=(0, 1), b=(0, 1))
    steps.step(a=(4, 5), b=(4, 5))  # b comes to its limit: 2 of 5 are emitted
    steps.step(a=(2, 1))
    steps.step(a=(0, 1))
    steps.step(a=(1, 1))
    return counted(
        accepted=4 + 4, proposed=4 + 4 + 2 + 1, verify=4, completion=9 + 3, emitted=5 + 2 + 1 + 1, generations=2
    )


# When the hooks are installed


def test_hooks_may_come_before_vllm_is_imported(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    assert meter.totals() == counted()  # born
    expected = drive(steps)
    assert meter.totals() == expected


def test_hooks_may_come_after_vllm_is_imported(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    module = vllm()
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(module)
    assert meter.totals() == counted()
    expected = drive(steps)
    assert meter.totals() == expected


@pytest.mark.parametrize("name", ["Scheduler", "AsyncScheduler"])
def test_hooks_may_come_after_the_engine_was_built_and_count_from_there_on(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, name: str
) -> None:
    steps = Steps(vllm(), name)
    drive(steps)
    instrumentor.instrument(meter_provider=meter.provider)
    assert meter.points() == []
    expected = drive(steps)
    assert meter.totals() == expected


def test_vllm_is_never_imported_by_us(meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]


def test_hooks_that_were_removed_before_the_import_are_not_installed_by_it(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    instrumentor.uninstrument()
    module = vllm()
    assert all(type(vars(module.Scheduler)[name]) is type(drive) for name in METHODS)
    drive(Steps(module))
    assert meter.points() == []


def test_installed_removed_and_installed_before_the_import_counts_once(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=Meter().provider)
    instrumentor.uninstrument()
    instrumentor.instrument(meter_provider=meter.provider)
    expected = drive(Steps(vllm()))
    assert meter.totals() == expected


# What uninstrument leaves


def test_uninstrument_restores_vllm_s_own_methods(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    module = vllm()
    originals = {name: vars(module.Scheduler)[name] for name in METHODS}
    instrumentor.instrument(meter_provider=meter.provider)
    assert all(vars(module.Scheduler)[name] is not originals[name] for name in METHODS)
    instrumentor.uninstrument()
    assert all(vars(module.Scheduler)[name] is originals[name] for name in METHODS)


def test_uninstrument_leaves_what_was_counted_to_the_next_collection(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    expected = drive(steps)
    instrumentor.uninstrument()
    drive(steps)
    assert meter.totals() == expected


def test_instrumented_again_counts_from_there_on_into_the_same_series(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    module = vllm()
    steps = Steps(module)
    for _ in range(3):
        instrumentor.instrument(meter_provider=meter.provider)
        expected = drive(steps)
        instrumentor.uninstrument()
        drive(steps)
    assert meter.totals() == {name: 3 * value for name, value in expected.items()}
    assert len(meter.points()) == 6 + 2 * 4


def test_instrument_twice_warns_and_counts_once(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    instrumentor.instrument(meter_provider=Meter().provider)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "already instrumented" in caplog.text
    expected = drive(Steps(vllm()))
    assert meter.totals() == expected


def test_uninstrument_twice_warns(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    instrumentor.uninstrument()
    instrumentor.uninstrument()
    assert "already uninstrumented" in caplog.text


def test_a_wrapper_that_somebody_put_over_ours_stays_and_we_count_no_more(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    module = vllm()
    instrumentor.instrument(meter_provider=meter.provider)
    ours, calls = module.Scheduler.update_from_output, []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return ours(self, *args, **kwargs)

    module.Scheduler.update_from_output = theirs
    steps = Steps(module)
    expected = drive(steps)
    instrumentor.uninstrument()
    assert module.Scheduler.update_from_output is theirs
    drive(steps)
    assert meter.totals() == expected
    assert len(calls) == 10


# A vLLM that we don't know


def changed(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


UNKNOWN = {
    "no class": changed("class Scheduler:", "class Planner:").replace("(Scheduler)", "(Planner)"),
    "not a class": SOURCE + "\ndef Scheduler(config): pass\n",
    "method renamed": changed("def update_from_output", "def update_from_model_output"),
    "finish renamed": changed("def finish_requests", "def end_requests"),
    "other signature": changed("(self, scheduler_output, model_runner_output)", "(self, step, output)"),
    "other order": changed("scheduler_output, model_runner_output)", "model_runner_output, scheduler_output)"),
    "no arguments": changed("(self, request_ids, finished_status", "(self, finished_status"),
    "update is a coroutine": changed("    def update_from_output", "    async def update_from_output"),
    "finish is a coroutine": changed("    def finish_requests", "    async def finish_requests"),
    "static method": changed("    def update_from_output(self, ", "    @staticmethod\n    def update_from_output("),
    "inherited": changed("class Scheduler:", "class Base:").replace("(Scheduler)", "(Base)")
    + "\nclass Scheduler(Base): pass\n",
}


@pytest.mark.parametrize("early", [True, False], ids=["before the import", "after the import"])
@pytest.mark.parametrize("source", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_an_unknown_scheduler_gets_one_warning_and_is_left_as_it_is(
    tmp_path: Path,
    meter: Meter,
    instrumentor: VLLMSpecDecInstrumentor,
    caplog: pytest.LogCaptureFixture,
    source: str,
    early: bool,
) -> None:
    write(tmp_path, source)
    with importable(tmp_path) as load:
        module = None if early else load()
        instrumentor.instrument(meter_provider=meter.provider)
        module = module or load()
        scheduler = getattr(module, "Scheduler", None)
        (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert line.name == "vllm.otel_specdec"
        assert "does not know this vLLM" in line.getMessage()
        assert not line.exc_info
        for name in METHODS:
            found = vars(scheduler).get(name) if isinstance(scheduler, type) else None
            assert not is_hook(found)
        instrumentor.uninstrument()
        assert meter.points() == []
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_an_engine_without_speculation_makes_not_one_point(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm(), speculation=False)
    steps.add("a", "b", limit=3)
    steps.step(a=(0, 1), b=(0, 1))
    steps.scheduler.finish_requests("a")
    steps.step(b=(0, 2))
    assert meter.points() == []
    assert caplog.records == []


def test_a_diffusion_model_uses_the_fields_for_something_else(
    tmp_path: Path, meter: Meter, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    attribute = "        self.num_sampled_tokens_per_step = 0\n"
    write(tmp_path, changed("        self.requests = {}\n", "        self.requests = {}\n" + attribute))
    with importable(tmp_path) as load:
        instrumentor.instrument(meter_provider=meter.provider)
        drive(Steps(load()))
        assert meter.points() == []


# vLLM never notices


def test_the_return_value_is_passed_through_unchanged(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    steps.add("a", "b")
    assert steps.step(a=(0, 1)) is steps.scheduler.returned
    assert steps.scheduler.finish_requests("a") is steps.scheduler.finished


def test_arguments_may_come_by_keyword(meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    steps.add("a", "b")
    assert steps.step(by_keyword=True, a=(4, 3), b=(0, 1)) is steps.scheduler.returned
    steps.scheduler.finish_requests(finished_status="stopped", request_ids=iter(["a"]))
    assert steps.scheduler.finished_with[-1][1] == "stopped"
    assert meter.totals() == counted(accepted=2, proposed=4, verify=1, completion=4, emitted=3, generations=1)


@pytest.mark.parametrize(
    ("ids", "finished"),
    [
        (None, "abc"),
        ("a", "a"),
        (["a", "b"], "ab"),
        (("a", "b"), "ab"),
        ({"a"}, "a"),
        ({"a": 1, "c": 2}.keys(), "ac"),
        ([], ""),
        (["nobody", "b"], "b"),
        (["a", "a"], "a"),
        (iter("ab"), "ab"),
        ((each for each in "bc"), "bc"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_aborts_are_counted_however_they_are_named(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, ids: Any, finished: str
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    steps.add("a", "b", "c", "queued")
    steps.step(a=(0, 1), b=(0, 1), c=(0, 1))
    steps.scheduler.finish_requests(ids)
    taken = [request.request_id for request in steps.scheduler.finished]
    assert sorted(set(taken) - {"queued"}) == list(finished)
    assert meter.totals() == counted(completion=3, generations=len(finished))
    if ids is None or isinstance(ids, str):
        assert steps.scheduler.finished_with[-1][0] is type(ids)


def test_what_the_callers_own_iterator_raises_reaches_the_caller(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    def ids() -> Iterator[str]:
        yield "a"
        raise LookupError("the caller's own")

    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    steps.add("a")
    steps.step(a=(0, 1))
    with pytest.raises(LookupError, match="the caller's own"):
        steps.scheduler.finish_requests(ids())
    assert steps.scheduler.requests
    assert meter.totals() == counted(completion=1)
    assert meter.errors() == {}


def test_an_abort_without_a_token_is_no_generation(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    steps.add("queued")
    steps.scheduler.finish_requests(["queued"])
    steps.scheduler.finish_requests(None)
    assert meter.totals() == counted()


class EngineError(Exception):
    pass


VLLM_S_OWN = EngineError()


class Failing:
    """Methods of a scheduler that fail."""

    def __init__(self, vllm_config: Any) -> None:
        raise VLLM_S_OWN

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        raise VLLM_S_OWN

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        raise VLLM_S_OWN


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_of_vllm_s_own_passes_unchanged(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, method: str
) -> None:
    module = vllm()
    setattr(module.Scheduler, method, vars(Failing)[method])
    instrumentor.instrument(meter_provider=meter.provider)
    with pytest.raises(EngineError) as raised:
        use_all(module)
    assert raised.value is VLLM_S_OWN
    assert meter.errors() == {}


def use_all(module: ModuleType) -> None:
    steps = Steps(module)
    steps.add("a")
    steps.step(a=(0, 1))
    steps.scheduler.finish_requests(["a"], "aborted")


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2, 3)])
def test_a_call_with_wrong_arguments_fails_as_it_would_without_us(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, wrong: tuple[int, ...]
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    with pytest.raises(TypeError, match="update_from_output"):
        steps.scheduler.update_from_output(*wrong)


@pytest.mark.parametrize(
    "part",
    ["describe", "StepTally.before_step", "StepTally.after_step", "StepTally.before_finish", "StepTally.after_finish"],
)
def test_an_error_of_ours_never_reaches_vllm(
    meter: Meter,
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("ours")

    instrumentor.instrument(meter_provider=meter.provider)
    monkeypatch.setattr(f"otel_specdec.engines.vllm.{part}", fail)
    steps = Steps(vllm())
    steps.add("a", "b")
    for _ in range(3):
        assert steps.step(a=(4, 3)) is steps.scheduler.returned
    assert [request.request_id for request in steps.scheduler.finish_requests(["a"])] == ["a"]
    assert meter.errors()["ZeroDivisionError"] >= 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_step_that_is_not_as_expected_is_an_error_of_ours(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    with pytest.raises(AttributeError, match="num_scheduled_tokens"):  # the stand-in's own
        steps.scheduler.update_from_output(object(), object())
    assert meter.errors() == {"AttributeError": 1}


def test_a_listener_that_cannot_even_count_an_error_does_no_harm(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=object())
    steps = Steps(vllm())
    steps.add("a")
    assert steps.step(a=(0, 1)) is steps.scheduler.returned


def test_the_hooks_keep_no_engine_alive(meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm())
    expected = drive(steps)
    scheduler = type(steps.scheduler)
    del steps
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is scheduler]
    assert meter.totals() == expected  # what it did is counted all the same
    assert meter.totals() == expected


# Other versions


def test_0_9_0_returns_one_output_and_not_one_for_each_client(
    tmp_path: Path, meter: Meter, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    write(tmp_path, changed("return {0: outputs}", "return outputs"))
    with importable(tmp_path) as load:
        instrumentor.instrument(meter_provider=meter.provider)
        expected = drive(Steps(load()))
        assert meter.totals() == expected


class Array:
    """As much of a numpy array as vLLM 0.11.1 and the hooks use."""

    def __init__(self, values: range) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __getitem__(self, part: slice) -> Array:
        return Array(self.values[part])

    def __bool__(self) -> bool:
        raise ValueError("The truth value of an array with more than one element is ambiguous")


ARRAYS: list[Callable[[range], Any]] = [Array]
try:
    import numpy  # type: ignore[import-not-found, unused-ignore]  # only some environments have it

    ARRAYS.append(numpy.array)
except ImportError:
    pass


@pytest.mark.parametrize("array", ARRAYS)
def test_0_11_1_holds_arrays_and_not_lists(
    tmp_path: Path,
    meter: Meter,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    array: Callable[[range], Any],
) -> None:
    write(tmp_path, changed("    del tokens[room:]\n    return tokens", "    return tokens[:room]"))
    monkeypatch.setattr(Steps, "row", staticmethod(lambda length: array(range(length))))
    with importable(tmp_path) as load:
        instrumentor.instrument(meter_provider=meter.provider)
        expected = drive(Steps(load()))
        assert meter.totals() == expected
        assert meter.errors() == {}


@pytest.mark.parametrize(
    ("parallel", "index"),
    [
        ({}, 0),
        ({"data_parallel_index": 3, "data_parallel_rank": 0}, 3),
        ({"data_parallel_index": None, "data_parallel_rank": 2}, 2),
    ],
)
def test_the_engine_index_is_the_data_parallel_one(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, parallel: dict[str, Any], index: int
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm(), **parallel)
    assert steps
    assert {point.attributes["specdec.engine.index"] for point in meter.points()} == {index}


@pytest.mark.parametrize(
    ("served", "model"),
    [
        ("name", "name"),
        (["first", "second"], "first"),
        (None, "/models/path"),
        ([], "/models/path"),
        ("", "/models/path"),
    ],
)
def test_the_model_is_the_first_served_name_and_a_path_only_where_there_is_none(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor, served: Any, model: str
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    steps = Steps(vllm(), speculation=False)
    configured = steps.scheduler.vllm_config
    configured.model_config.served_model_name = served
    configured.speculative_config = type("Speculation", (), {"method": None, "num_speculative_tokens": 2})
    steps.module.Scheduler(configured)
    (attributes,) = {
        (point.attributes["gen_ai.request.model"], point.attributes["specdec.method"]) for point in meter.points()
    }
    assert attributes == (model, "unknown")


def test_two_engines_of_one_process_are_two_sources(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    instrumentor.instrument(meter_provider=meter.provider)
    module = vllm()
    first, second = Steps(module), Steps(module, data_parallel_index=1)
    expected = drive(first)
    drive(second)
    by_index: dict[int, int] = {}
    for point in meter.points("specdec.completion_tokens"):
        by_index[point.attributes["specdec.engine.index"]] = point.value
    assert by_index == {0: expected["completion"], 1: expected["completion"]}
