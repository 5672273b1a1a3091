"""The hooks on vLLM's front end, on a stand-in: which tokens are counted as trimmed, and that vLLM never notices."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.engines import vllm_front_end
from otel_specdec.engines.hooking import is_hook
from tests.unit.collected import Meter
from tests.unit.vllm_stand_in import config, importable, write

FOLDER = ("vllm", "v1", "engine")
SOURCES = {
    "output_processor": '''
class OutputProcessor:
    def __init__(self):
        self.request_states = {}

    def process_outputs(self, engine_core_outputs, engine_core_timestamp=None):
        """`request_states` says after how many tokens each request stops, or None."""
        for output in engine_core_outputs:
            if output.request_id in self.request_states:
                stop = self.request_states[output.request_id]
                if stop is not None and stop <= len(output.new_token_ids):
                    del output.new_token_ids[stop:]
                    del self.request_states[output.request_id]
                elif stop is not None:
                    self.request_states[output.request_id] -= len(output.new_token_ids)
        return len(list(engine_core_outputs))
''',
    "async_llm": """
from types import SimpleNamespace
from vllm.v1.engine.output_processor import OutputProcessor

class AsyncLLM:
    def __init__(self, vllm_config, client_index=0):
        self.vllm_config = vllm_config
        self.output_processor = OutputProcessor()
        self.engine_core = SimpleNamespace(client_index=client_index)
""",
    "llm_engine": """
from vllm.v1.engine.output_processor import OutputProcessor

class LLMEngine:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.output_processor = OutputProcessor()
""",
}

Import = Callable[[str], Any]


@pytest.fixture
def meter() -> Meter:
    return Meter(resource={"service.instance.id": "i"})  # without one a random suffix follows `api-0`


@pytest.fixture
def write_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], Import]]:
    monkeypatch.setattr(vllm_front_end.FrontHooks, "_installed", None)
    monkeypatch.setattr(vllm_front_end.FrontHooks, "_awaiting", set())
    write(tmp_path)
    folder = tmp_path.joinpath(*FOLDER)
    folder.mkdir()
    (folder / "__init__.py").touch()
    with importable(tmp_path):

        def make(sources: dict[str, str]) -> Import:
            for name, source in sources.items():
                (folder / f"{name}.py").write_text(source)
            return lambda module: importlib.import_module(".".join((*FOLDER, module)))

        yield make


def outputs(**tokens: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(request_id=name, new_token_ids=[7] * number) for name, number in tokens.items()]


def trimmed(meter: Meter) -> dict[object, int]:
    return {point.attributes["specdec.process"]: point.value for point in meter.points("specdec.trimmed_tokens")}


def drive(processor: Any) -> int:
    """Some outputs; returns how many of their tokens no client gets."""
    processor.request_states = {"a": None, "b": 7, "c": 3}
    assert processor.process_outputs(outputs(a=5, b=5, c=5, gone=4)) == 4  # c stops after 3 of 5
    processor.process_outputs(engine_core_outputs=outputs(a=5, b=5, c=5), engine_core_timestamp=1.0)  # b after 2 of 5
    processor.process_outputs(outputs(a=5, b=1, c=0))
    return 2 + 4 + 3 + 5 + 1


@pytest.mark.parametrize("early", [True, False])
def test_tokens_behind_a_stop_string_and_for_forgotten_requests(
    meter: Meter,
    write_front: Callable[[dict[str, str]], Import],
    instrumentor: VLLMSpecDecInstrumentor,
    *,
    early: bool,
) -> None:
    load = write_front(SOURCES)
    if early:
        instrumentor.instrument(meter_provider=meter.provider)
    front = load("async_llm")
    if not early:
        instrumentor.instrument(meter_provider=meter.provider)
    engines = [front.AsyncLLM(config(), client_index=index) for index in (0, 1)]
    assert trimmed(meter) == {"api-0": 0, "api-1": 0}  # born
    expected = drive(engines[1].output_processor)
    assert trimmed(meter) == {"api-0": 0, "api-1": expected}
    assert meter.points()[0].attributes == {
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "served",
        "specdec.method": "ngram",
        "specdec.source": "engine",
        "specdec.process": "api-0",
    }
    del engines
    assert {point.name for point in meter.points()} == {"specdec.trimmed_tokens"}


def test_an_llm_in_this_process(
    meter: Meter, write_front: Callable[[dict[str, str]], Import], instrumentor: VLLMSpecDecInstrumentor
) -> None:
    load = write_front(SOURCES)
    instrumentor.instrument(meter_provider=meter.provider)
    engine = load("llm_engine").LLMEngine(config())
    expected = drive(engine.output_processor)
    assert trimmed(meter) == {"api-0": expected}


def test_without_speculation_not_one_point(
    meter: Meter, write_front: Callable[[dict[str, str]], Import], instrumentor: VLLMSpecDecInstrumentor
) -> None:
    load = write_front(SOURCES)
    instrumentor.instrument(meter_provider=meter.provider)
    drive(load("async_llm").AsyncLLM(config(speculation=False)).output_processor)
    diffusion = config()
    diffusion.model_config.is_diffusion = True
    drive(load("async_llm").AsyncLLM(diffusion).output_processor)
    assert meter.points() == []


def test_uninstrument_puts_the_methods_back_and_a_second_instrument_counts_for_its_own_provider(
    meter: Meter, write_front: Callable[[dict[str, str]], Import], instrumentor: VLLMSpecDecInstrumentor
) -> None:
    load = write_front(SOURCES)
    instrumentor.instrument(meter_provider=meter.provider)
    engine = load("async_llm").AsyncLLM(config())
    expected = drive(engine.output_processor)
    instrumentor.uninstrument()
    owners = [load("async_llm").AsyncLLM, load("llm_engine").LLMEngine, load("output_processor").OutputProcessor]
    assert not [each for owner in owners for each in vars(owner).values() if is_hook(each)]
    drive(engine.output_processor)
    assert trimmed(meter) == {"api-0": expected}  # what was counted until then
    other = Meter(resource={"service.instance.id": "i"})
    instrumentor.instrument(meter_provider=other.provider)
    expected = drive(engine.output_processor)
    assert trimmed(other) == {"api-0": expected}
    drive(engine.output_processor)
    assert trimmed(meter)["api-0"] < trimmed(other)["api-0"] == 2 * expected


@pytest.mark.parametrize(
    "changed",
    [
        {"output_processor": "class OutputProcessor:\n    request_states = {}\n"},
        {"output_processor": SOURCES["output_processor"].replace("engine_core_outputs", "batch")},
        {"output_processor": SOURCES["output_processor"].replace("def process", "async def process")},
        {"async_llm": SOURCES["async_llm"].replace("class AsyncLLM", "class AsyncEngine")},
    ],
    ids=["no method", "another parameter", "a coroutine", "another class"],
)
def test_a_front_end_of_another_shape_gets_one_warning_and_is_left_alone(
    meter: Meter,
    write_front: Callable[[dict[str, str]], Import],
    instrumentor: VLLMSpecDecInstrumentor,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, str],
) -> None:
    load = write_front(SOURCES | changed)
    instrumentor.instrument(meter_provider=meter.provider)
    for module in SOURCES:
        load(module)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.name == "vllm.otel_specdec"
    assert "does not know this vLLM's front end" in line.getMessage()
    assert not line.exc_info


@pytest.mark.parametrize("part", ["FrontTally.before", "FrontTally.after", "FrontHooks.meet"])
def test_a_failure_of_ours_is_kept_from_the_front_end(
    meter: Meter,
    write_front: Callable[[dict[str, str]], Import],
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(f"otel_specdec.engines.vllm_front_end.{part}", fail)
    load = write_front(SOURCES)
    instrumentor.instrument(meter_provider=meter.provider)
    engine = load("async_llm").AsyncLLM(config())
    drive(engine.output_processor)
    assert list(meter.errors()) == ["ZeroDivisionError"]


def test_an_exception_of_vllms_own_passes_through_and_the_next_call_counts(
    meter: Meter, write_front: Callable[[dict[str, str]], Import], instrumentor: VLLMSpecDecInstrumentor
) -> None:
    load = write_front(SOURCES)
    instrumentor.instrument(meter_provider=meter.provider)
    processor = load("async_llm").AsyncLLM(config()).output_processor
    with pytest.raises(TypeError):
        processor.process_outputs(7)
    assert processor.process_outputs(iter(())) == 0  # not a list any more, and not ours to read first
    assert meter.errors() == {"TypeError": 2}
    expected = drive(processor)
    assert trimmed(meter) == {"api-0": expected}
