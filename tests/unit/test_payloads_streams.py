"""A streamed response: its counters once, whatever chunk they came in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder, StreamedResponse
from otel_specdec import reports_from_payload as reports_from
from tests.unit.collected import Meter

READ = SpecCounts(accepted=9, proposed=15, verify=5, completion=15)
USAGE = {"prompt_tokens": 3, "completion_tokens": 15}
DETAILS = {"spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 15, "spec_verify_ct": 5}
METRICS = {"speculative_decoding": {"num_spec_steps": 5, "num_accepted_draft_tokens": 9, "num_draft_tokens": 15}}


def chunk(index: int | None = None, finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choices = [] if index is None else [{"index": index, "delta": {"content": "x"}, "finish_reason": finish_reason}]
    return {"id": "r", "object": "chat.completion.chunk", "model": "m", "choices": choices, **more}


VLLM = [chunk(0), chunk(0), chunk(0, "stop"), chunk(usage=USAGE, metrics=METRICS)]
SGLANG = [chunk(0), chunk(0, "stop"), chunk(usage=None, sglext={"spec_tokens_details": DETAILS}), chunk(usage=USAGE)]


def streamed(chunks: list[Any]) -> StreamedResponse:
    stream = StreamedResponse()
    for each in chunks:
        stream.add(each)
    return stream


@pytest.mark.parametrize(("chunks", "provider"), [(VLLM, "vllm"), (SGLANG, "sglang")], ids=["vllm", "sglang"])
def test_a_streamed_response_says_what_the_whole_one_would_have_said(chunks: list[Any], provider: str) -> None:
    expected = [GenerationReport("r", READ, model="m", provider=provider)]
    assert reports_from(streamed(chunks).payload) == expected
    assert reports_from(streamed([json.dumps(each) for each in chunks]).payload) == expected
    events = [line for each in chunks for line in (f"data: {json.dumps(each)}", "", ": a comment", "event: usage")]
    assert reports_from(streamed([*events, "data: [DONE]"]).payload) == expected
    assert reports_from(streamed([f"{line}\r\n".encode() for line in events]).payload) == expected


def test_the_same_stream_twice_is_a_duplicate() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for _ in range(2):
        recorder.record_payload(streamed(SGLANG).payload)
    assert meter.totals() == {"accepted": 9, "proposed": 15, "verify": 5, "completion": 15, "generations": 1}
    assert meter.dropped() == {"duplicate": 1}


def test_of_single_chunks_only_the_usage_chunk_counts_and_only_once() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    for each in VLLM:
        recorder.record_payload(each)
    assert meter.totals() == {"accepted": 9, "proposed": 15, "verify": 5, "completion": 15, "generations": 1}
    assert meter.dropped() == {}


def test_continuous_usage_counts_once() -> None:
    running = [chunk(0, usage={"completion_tokens": tokens}) for tokens in (1, 7, 14)]
    last = chunk(0, "stop", usage={"completion_tokens": 15})
    chunks = [*running, last, VLLM[-1]]
    assert reports_from(streamed(chunks).payload) == [GenerationReport("r", READ, model="m", provider="vllm")]
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    for each in chunks:
        recorder.record_payload(each)
    assert meter.totals()["generations"] == 1
    assert meter.dropped() == {}


def test_timings_of_every_chunk_are_cumulative() -> None:
    chunks = [
        chunk(0, timings={"draft_n": 4, "draft_n_accepted": 2, "predicted_n": 4}),
        chunk(0, timings={"draft_n": 12, "draft_n_accepted": 7, "predicted_n": 11}),
        chunk(0, "stop", timings={"draft_n": 15, "draft_n_accepted": 9, "predicted_n": 15}),
    ]
    expected = SpecCounts(accepted=9, proposed=15, completion=15)
    assert [report.counts for report in reports_from(streamed(chunks).payload)] == [expected]
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for each in chunks:
        recorder.record_payload(each)
    assert meter.totals() == {"accepted": 9, "proposed": 15, "completion": 15, "generations": 1}
    assert meter.pooled().coverage["accept_rate"] == 1.0


def test_several_choices_of_a_stream_are_several_generations() -> None:
    # SGLang gives the chunks of each choice an id of their own; the response's is the first.
    contents = [chunk(index, reason, id=f"r{index}") for reason in (None, "stop") for index in (0, 1)]
    tail = [chunk(id="r1", sglext={"spec_tokens_details": [DETAILS, DETAILS]}), chunk(id="r1", usage=USAGE)]
    reports = reports_from(streamed(contents + tail).payload)
    assert [report.generation_id for report in reports] == ["r0#0.0", "r0#0.1"]
    assert {report.counts for report in reports} == {SpecCounts(9, 15, 5)}
    without = reports_from(streamed([*contents, chunk(id="r1", usage=USAGE)]).payload)
    assert [report.counts for report in without] == [SpecCounts(), SpecCounts()]


def test_a_choice_that_has_finished_stays_finished() -> None:
    chunks = [chunk(0, "stop"), chunk(0), chunk(usage=USAGE, metrics=METRICS)]
    assert [report.finished for report in reports_from(streamed(chunks).payload)] == [True]


def test_token_ids_in_a_chunk_of_their_own_do_not_hide_the_details() -> None:
    chunks = [*SGLANG[:3], chunk(sglext={"output_ids": [[1, 2]]}), SGLANG[3]]
    assert [report.counts for report in reports_from(streamed(chunks).payload)] == [READ]


@pytest.mark.parametrize("kept", range(3))
def test_a_stream_that_broke_off_has_nothing_to_count(kept: int) -> None:
    assert reports_from(streamed(VLLM[:kept]).payload) == []


def test_a_stream_keeps_no_text_and_no_more_for_more_chunks() -> None:
    stream = streamed([chunk(0)] * 1000 + VLLM)
    stream.add(chunk(sglext={"spec_tokens_details": DETAILS, "routed_experts": "x" * 10_000}))
    assert len(json.dumps(stream.payload)) < 500
    assert '"x"' not in json.dumps(stream.payload)


@pytest.mark.parametrize(
    "nonsense", [None, 7, "data: {", b"\xff", [], ["data: {}"], "[DONE]", {"choices": [None, 7, {}]}, object()]
)
def test_what_is_no_chunk_says_nothing(nonsense: Any) -> None:
    assert reports_from(streamed([nonsense, *VLLM, nonsense]).payload) == reports_from(streamed(VLLM).payload)
