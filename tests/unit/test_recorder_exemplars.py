"""A recorder's exemplars: the same rules as an engine's, with the trace from `GenerationReport.context`."""

from __future__ import annotations

import os
import signal

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import GenerationExemplarFilter, GenerationReport, SpecCounts, SpecDecRecorder, views
from tests.unit.test_exemplars import collected, ids, value_of

SPAN = trace.SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=trace.TraceFlags(1))
CONTEXT = trace.set_span_in_context(trace.NonRecordingSpan(SPAN))


@pytest.fixture
def reader() -> InMemoryMetricReader:
    return InMemoryMetricReader()


@pytest.fixture
def recorder(reader: InMemoryMetricReader) -> SpecDecRecorder:
    provider = MeterProvider(
        [reader], views=views(), exemplar_filter=GenerationExemplarFilter(), shutdown_on_exit=False
    )
    return SpecDecRecorder(provider)


def report(name: str, completion: int = 9, *, finished: bool = True, model: str = "m") -> GenerationReport:
    counts = SpecCounts(6, 8, 2, completion, 8)
    return GenerationReport(name, counts, session_id="s", model=model, finished=finished, context=CONTEXT)


def test_a_recorded_generation_is_named_with_session_and_trace(
    recorder: SpecDecRecorder, reader: InMemoryMetricReader
) -> None:
    recorder.record(report("g1"))
    found = {name: exemplars for name, exemplars in collected(reader).items() if exemplars}
    assert {name: [e.value for e in exemplars] for name, exemplars in found.items()} == {  # type: ignore[attr-defined]
        "specdec.accepted_tokens": [6],
        "specdec.proposed_tokens": [8],
        "specdec.verify_steps": [2],
        "specdec.completion_tokens": [9],
        "specdec.emitted_tokens": [8],
        "specdec.generations": [1],
    }
    (exemplar,) = found["specdec.generations"]
    assert exemplar.filtered_attributes == {  # type: ignore[attr-defined]
        "gen_ai.response.id": "g1",
        "gen_ai.conversation.id": "s",
    }
    assert (exemplar.trace_id, exemplar.span_id) == (0xABC, 0xDEF)  # type: ignore[attr-defined]


def test_a_running_generation_has_none_and_the_final_one_is_its_share_since(
    recorder: SpecDecRecorder, reader: InMemoryMetricReader
) -> None:
    recorder.record(report("g1", 9, finished=False))
    assert not any(collected(reader).values())
    recorder.record(report("g1", 30))
    (exemplar,) = collected(reader)["specdec.completion_tokens"]
    assert exemplar.value == 21  # type: ignore[attr-defined]
    assert value_of(reader, "specdec.completion_tokens") == 30


def test_at_most_four_of_each_attribute_set(recorder: SpecDecRecorder, reader: InMemoryMetricReader) -> None:
    recorder.record_batch([report(f"{model}{n}", model=model) for model in ("m", "n") for n in range(25)])
    named = ids(collected(reader)["specdec.generations"])
    assert sorted(name[0] for name in named) == ["m"] * 4 + ["n"] * 4
    assert value_of(reader, "specdec.generations") == 50


def test_duplicates_and_conflicts_are_named_by_nothing(recorder: SpecDecRecorder, reader: InMemoryMetricReader) -> None:
    recorder.record(report("g1"))
    assert ids(collected(reader)["specdec.generations"]) == ["g1"]
    recorder.record(report("g1"))
    recorder.record(report("g1", 99))
    assert not any(collected(reader).values())


def test_a_recorder_that_is_gone_leaves_its_sums_to_the_next_collection(reader: InMemoryMetricReader) -> None:
    provider = MeterProvider([reader], shutdown_on_exit=False)
    SpecDecRecorder(provider).record(report("g1"))
    assert value_of(reader, "specdec.completion_tokens") == 9


def test_a_forked_recorder_counts_on_for_itself_alone(recorder: SpecDecRecorder, reader: InMemoryMetricReader) -> None:
    recorder.record(report("parent"))
    child = os.fork()
    if not child:
        try:
            recorder.record(report("child"))
            os._exit(value_of(reader, "specdec.generations"))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1  # its own generation, and not its parent's
    assert value_of(reader, "specdec.generations") == 1
