"""What is read of a response, family by family; `test_payloads_recorded` has the real ones."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import (
    GenerationExemplarFilter,
    GenerationReport,
    SpecCounts,
    SpecDecRecorder,
    counts_from_payload,
    payloads,
    views,
)
from otel_specdec import reports_from_payload as reports_from
from tests.unit.collected import Meter, points

CASES = json.loads((Path(__file__).parent / "cases" / "payloads.json").read_text())

SGLANG = {
    "0.5.12": ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
    "0.5.11": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    "0.5.9": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
}
READ = SpecCounts(accepted=9, proposed=15, verify=5, completion=15)


@pytest.fixture(autouse=True)
def nothing_warned_of_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_warned", set())


def sglang(version: str = "0.5.12", **more: Any) -> dict[str, Any]:
    accepted, proposed, _ = SGLANG[version]
    return {accepted: 9, proposed: 15, "spec_verify_ct": 5, "completion_tokens": 15, **more}


def vllm(**more: Any) -> dict[str, Any]:
    metrics = {"num_spec_steps": 5, "num_accepted_draft_tokens": 9, "num_draft_tokens": 15, **more}
    return {
        "id": "cmpl-1",
        "model": "m",
        "usage": {"completion_tokens": 15},
        "metrics": {"speculative_decoding": metrics},
    }


def choices(number: int, **each: Any) -> list[dict[str, Any]]:
    return [{"index": index, "text": "x", "finish_reason": "length", **each} for index in range(number)]


class Attributes:
    """Anything that has these attributes and is no mapping, as the classes of an engine or a client library."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        for name, value in names.items():
            setattr(self, name, Attributes(value) if isinstance(value, Mapping) else value)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_handed_case_is_read_as_told(case: dict[str, Any]) -> None:
    expected = SpecCounts(**case["counts"])
    payload = case["payload"]
    assert counts_from_payload(payload) == expected
    assert counts_from_payload(json.dumps(payload)) == expected
    assert counts_from_payload(json.dumps(payload).encode()) == expected
    assert counts_from_payload(Attributes(payload)) == expected


# Families


@pytest.mark.parametrize("version", SGLANG)
@pytest.mark.parametrize("place", ["meta_info", "flat", "sglext", "choice"])
def test_every_family_of_sglang_is_read_wherever_it_stands(version: str, place: str) -> None:
    names = sglang(version)
    details = {name: value for name, value in names.items() if name != "completion_tokens"}
    usage = {"completion_tokens": 15}
    payload = {
        "meta_info": {"meta_info": {"id": "r", **names}},
        "flat": {"id": "r", **names},
        "sglext": {"id": "r", "choices": choices(1), "usage": usage, "sglext": {"spec_tokens_details": details}},
        "choice": {"id": "r", "choices": choices(1, meta_info={"id": "r", **names}), "usage": usage},
    }[place]
    assert counts_from_payload(payload) == READ
    (report,) = reports_from(payload)
    assert (report.generation_id, report.counts, report.provider) == ("r", READ, "sglang")


def test_vllm_is_read() -> None:
    (report,) = reports_from(vllm())
    assert report == GenerationReport("cmpl-1", READ, model="m", provider="vllm")


def test_llama_cpp_is_read_with_rounds_where_they_are_given() -> None:
    timings = {"draft_n_accepted": 9, "draft_n": 15, "predicted_n": 15, "predicted_ms": 3.5}
    payload = {"id": "chatcmpl-1", "choices": choices(1), "usage": {"completion_tokens": 15}, "timings": timings}
    assert counts_from_payload(payload) == SpecCounts(accepted=9, proposed=15, completion=15)
    assert counts_from_payload({"timings": {**timings, "draft_rounds": 5}}) == READ
    assert [report.provider for report in reports_from(payload)] == ["llama.cpp"]


def test_the_newest_complete_family_wins() -> None:
    # SGLang 0.5.12 has the names of 0.5.11 beside its own.
    assert counts_from_payload({**sglang("0.5.11"), **sglang(spec_num_correct_drafts=8)}).accepted == 8
    assert counts_from_payload({**sglang("0.5.11"), "spec_num_correct_drafts": 8}).accepted == 9


def test_a_pair_is_never_half_from_each_family_nor_from_two_places() -> None:
    halves = {"spec_num_correct_drafts": 9, "spec_draft_token_num": 15, "spec_verify_ct": 5, "completion_tokens": 15}
    assert counts_from_payload(halves) == SpecCounts(verify=5, completion=15)
    apart = {"spec_num_correct_drafts": 9, "meta_info": {"spec_num_proposed_drafts": 15, "spec_verify_ct": 5}}
    assert counts_from_payload(apart) == SpecCounts(verify=5)


def test_verify_is_of_the_family_of_the_pair() -> None:
    payload = {**vllm(), "spec_verify_ct": 99}
    del payload["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert counts_from_payload(payload) == SpecCounts(accepted=9, proposed=15, completion=15)


def test_verify_steps_alone_are_read() -> None:
    # SGLang up to 0.5.3 says nothing else.
    (report,) = reports_from({"meta_info": {"id": "r", "completion_tokens": 20, "spec_verify_ct": 8}})
    assert report.counts == SpecCounts(verify=8, completion=20)
    assert report.provider == "sglang"


@pytest.mark.parametrize("name", ["spec_num_correct_drafts", "spec_verify_ct", "completion_tokens"])
@pytest.mark.parametrize(
    "value", [None, True, False, -1, 9.0, 4.5, float("nan"), float("inf"), "9", b"9", [9], {}, 2**63, 10**400, 1j]
)
def test_what_is_no_count_is_unknown_and_never_zero(name: str, value: Any) -> None:
    counts = counts_from_payload(sglang(**{name: value}))
    field = {"spec_num_correct_drafts": "accepted", "spec_verify_ct": "verify", "completion_tokens": "completion"}[name]
    assert getattr(counts, field) is None


def test_a_reported_zero_is_zero() -> None:
    zeros = dict.fromkeys(sglang(), 0)
    assert counts_from_payload(zeros) == SpecCounts(0, 0, 0, 0)
    assert counts_from_payload(vllm(num_spec_steps=0, num_accepted_draft_tokens=0, num_draft_tokens=0)) == SpecCounts(
        0, 0, 0, 15
    )


def test_emitted_is_in_no_response() -> None:
    assert counts_from_payload({**sglang(), "emitted": 14, "emitted_tokens": 14}).emitted is None


# Forms


def test_bytes_and_a_byte_order_mark_and_broken_utf_8_are_read() -> None:
    text = json.dumps({**vllm(), "choices": choices(1, text="é")}, ensure_ascii=False)
    assert counts_from_payload(text.encode()) == READ
    assert counts_from_payload(b"\xef\xbb\xbf" + text.encode()) == READ
    assert counts_from_payload(bytearray(text.encode("latin-1"))) == READ  # a lone 0xe9
    assert counts_from_payload(memoryview(text.encode())) == READ


def test_an_integer_too_long_for_python_is_unknown_and_the_rest_is_read() -> None:
    text = json.dumps(vllm()).replace('"completion_tokens": 15', f'"completion_tokens": {"9" * 5000}')
    assert counts_from_payload(text) == SpecCounts(accepted=9, proposed=15, verify=5)


def test_an_object_may_hold_mappings_and_a_mapping_objects() -> None:
    # The openai client keeps what it does not know as plain dicts.
    response = SimpleNamespace(id="cmpl-1", model="m", usage=SimpleNamespace(completion_tokens=15), **{
        "metrics": vllm()["metrics"], "choices": [SimpleNamespace(index=0, finish_reason="stop", text="x")],
    })  # fmt: skip
    (report,) = reports_from(response)
    assert report.counts == READ
    assert counts_from_payload({"meta_info": SimpleNamespace(**sglang())}) == READ


class Number(IntEnum):
    FIFTEEN = 15


def test_any_integer_counts() -> None:
    assert counts_from_payload(sglang(completion_tokens=Number.FIFTEEN)) == READ


@pytest.mark.parametrize(
    "payload",
    [None, 7, 1.5, True, "", "text", "[1, 2", "null", "7", '"text"', b"", b"\xff\xfe", "[" * 100_000, object(), [], {}],
    ids=lambda payload: repr(payload)[:20],
)
def test_what_is_no_response_says_nothing(payload: Any) -> None:
    assert counts_from_payload(payload) == SpecCounts()
    assert reports_from(payload) == []


class Raising(Mapping[str, Any]):
    """A mapping that fails whatever it is asked for."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(key)

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


class RaisingAttributes:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class NoClass:
    @property  # type: ignore[misc]  # the point of the test
    def __class__(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize("kind", [Raising, RaisingAttributes, NoClass, type, object])
def test_a_payload_that_fails_when_it_is_read_does_no_harm(kind: Any) -> None:
    foreign = kind if kind is type else kind()
    for payload in (
        foreign,
        [foreign],
        {"id": "r", "meta_info": foreign, "usage": foreign, "choices": foreign},
        {"id": "r", "choices": [foreign, foreign], "sglext": {"spec_tokens_details": [foreign]}},
        {"id": foreign, "model": foreign, **sglang(spec_num_correct_drafts=foreign)},
        {"id": "r", **vllm(acceptance_histogram=[foreign])},
    ):
        counts_from_payload(payload)
        reports_from(payload)
        SpecDecRecorder(Meter().provider).record_payload(payload)


def test_a_payload_is_not_changed() -> None:
    payload = {"id": "r", "choices": choices(2), "sglext": {"spec_tokens_details": [sglang(), sglang()]}}
    before = json.dumps(payload)
    reports_from(payload)
    counts_from_payload(payload)
    assert json.dumps(payload) == before


# Ids and attributes


def test_the_id_of_a_response_is_its_own_or_the_request_s() -> None:
    assert [
        report.generation_id for report in reports_from({"id": "top", "meta_info": {"id": "meta", **sglang()}})
    ] == ["top"]
    assert [report.generation_id for report in reports_from({"meta_info": {"id": "meta", **sglang()}})] == ["meta"]
    assert [report.generation_id for report in reports_from({"request_id": "req", **sglang()})] == ["req"]


@pytest.mark.parametrize("id_", [None, "", 7, ["r"], {}])
def test_a_response_without_an_id_gives_no_report_unless_the_caller_names_it(
    id_: Any, caplog: pytest.LogCaptureFixture
) -> None:
    payload = {"id": id_, **sglang()}
    assert reports_from(payload) == []
    assert reports_from(payload) == []
    (line,) = caplog.records
    assert "pass generation_id" in line.getMessage()
    (report,) = reports_from(payload, generation_id="mine")
    assert (report.generation_id, report.counts) == ("mine", READ)


def test_the_caller_s_ids_go_before_the_payload_s() -> None:
    (report,) = reports_from(vllm(), generation_id="mine", session_id="step 7")
    assert (report.session_id, report.generation_id) == ("step 7", "mine")


@pytest.mark.parametrize("name", ["session_id", "generation_id"])
def test_an_argument_of_the_wrong_type_is_the_caller_s_error(name: str) -> None:
    wrong: Any = {name: 7}
    with pytest.raises(TypeError, match=name):
        reports_from(vllm(), **wrong)
    with pytest.raises(TypeError, match=name):
        SpecDecRecorder(Meter().provider).record_payload(vllm(), **wrong)


def test_model_and_rank_are_read() -> None:
    assert [report.model for report in reports_from({**vllm(), "model": "llama"})] == ["llama"]
    for rank, expected in ((3, 3), (0, 0), (None, None), (-1, None), (True, None)):
        (report,) = reports_from({"meta_info": {"id": "r", "dp_rank": rank, **sglang()}})
        assert report.engine_index == expected


@pytest.mark.parametrize("model", [None, "", 7, "m" * 513, ["m"]])
def test_what_is_no_model_name_is_left_out(model: Any) -> None:
    (report,) = reports_from({**vllm(), "model": model})
    assert report.model is None


def test_half_a_surrogate_pair_does_not_reach_an_exporter() -> None:
    (report,) = reports_from('{"id": "r\\ud800", "model": "m\\udfff", "spec_verify_ct": 5}')
    assert (report.generation_id, report.model) == ("r?", "m?")


def test_a_response_without_drafts_tells_its_engine_by_its_form_or_not_at_all() -> None:
    (native,) = reports_from({"meta_info": {"id": "r", "completion_tokens": 7}})
    (openai,) = reports_from({"id": "cmpl-1", "choices": choices(1), "usage": {"completion_tokens": 7}})
    assert (native.provider, openai.provider) == ("sglang", None)
    assert native.counts == openai.counts == SpecCounts(completion=7)


# Several generations


def test_one_usage_summed_over_choices_is_none_of_them_s() -> None:
    payload = {"id": "cmpl-1", "choices": choices(3), "usage": {"completion_tokens": 21}}
    assert counts_from_payload(payload) == SpecCounts(completion=21)
    reports = reports_from(payload)
    assert [report.generation_id for report in reports] == ["cmpl-1#0", "cmpl-1#1", "cmpl-1#2"]
    assert {report.counts for report in reports} == {SpecCounts()}


def test_choices_with_counters_of_their_own_are_whole_generations() -> None:
    own = [sglang(), sglang(spec_num_correct_drafts=3, completion_tokens=9)]
    payload = {
        "id": "r",
        "choices": [{"index": i, "finish_reason": "stop", "meta_info": names} for i, names in enumerate(own)],
        "usage": {"completion_tokens": 24},
    }
    assert [report.counts for report in reports_from(payload)] == [READ, SpecCounts(3, 15, 5, 9)]
    assert counts_from_payload(payload) == SpecCounts(12, 30, 10, 24)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["r#0", "r#1"]),
        ({"object": "chat.completion"}, ["r#0.0", "r#0.1"]),
        ({"sglext": {"spec_tokens_details": [{}, {}]}}, ["r#0.0", "r#0.1"]),
    ],
)
def test_the_choice_is_part_of_the_id_and_can_be_taken_off(more: dict[str, Any], expected: list[str]) -> None:
    reports = reports_from({"id": "r", "choices": choices(2), "usage": {"completion_tokens": 9}, **more})
    assert [report.generation_id for report in reports] == expected
    assert [payloads.split_choice(each) for each in expected] == [("r", each.partition("#")[2]) for each in expected]


def test_an_exemplar_of_a_choice_names_the_client_s_id_and_the_choice() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider(
        [reader], views=views(), exemplar_filter=GenerationExemplarFilter(), shutdown_on_exit=False
    )
    payload = {"id": "r", "object": "chat.completion", "choices": choices(2), "usage": {"completion_tokens": 9}}
    SpecDecRecorder(provider, speculation=True).record_payload(payload)
    (generations,) = (point for point in points(reader.get_metrics_data()) if point.name == "specdec.generations")
    named = [dict(exemplar.filtered_attributes) for exemplar in generations.exemplars]
    assert sorted(named, key=lambda names: names["specdec.choice"]) == [
        {"gen_ai.response.id": "r", "specdec.choice": choice} for choice in ("0.0", "0.1")
    ]


@pytest.mark.parametrize("id_", ["cmpl-1", "a#b", "#", "", "a#", "a#1.2.3"])
def test_an_id_without_a_choice_stays_as_it_is(id_: str) -> None:
    assert payloads.split_choice(id_) == (id_, None)


def details(accepted: int) -> dict[str, Any]:
    return {"spec_num_correct_drafts": accepted, "spec_num_proposed_drafts": 15, "spec_verify_ct": 5}


def test_details_as_a_list_are_the_choices_in_order() -> None:
    payload = {
        "id": "r",
        "choices": choices(2),
        "usage": {"completion_tokens": 24},
        "sglext": {"spec_tokens_details": [details(9), details(3)]},
    }
    assert [report.counts for report in reports_from(payload)] == [SpecCounts(9, 15, 5), SpecCounts(3, 15, 5)]
    assert counts_from_payload(payload) == SpecCounts(12, 30, 10, 24)


def test_a_choice_s_own_counters_go_before_the_list_because_they_know_its_completion() -> None:
    own = [sglang(), sglang(spec_num_correct_drafts=3, completion_tokens=9)]
    payload = {
        "id": "r",
        "choices": [{"index": i, "finish_reason": "stop", "meta_info": names} for i, names in enumerate(own)],
        "usage": {"completion_tokens": 24},
        "sglext": {"spec_tokens_details": [details(9), details(3)]},
    }
    assert [report.counts.completion for report in reports_from(payload)] == [15, 9]


def test_a_choice_that_never_verified_is_missing_in_the_list_and_unknown() -> None:
    payload = {
        "id": "r",
        "choices": choices(3),
        "usage": {"completion_tokens": 24},
        "sglext": {"spec_tokens_details": [details(9), details(3)]},
    }
    assert [report.counts.accepted for report in reports_from(payload)] == [9, 3, None]
    assert counts_from_payload(payload) == SpecCounts(completion=24)


def test_details_as_an_object_beside_several_prompts_are_the_first_one_s() -> None:
    # SGLang 0.5.23, n == 1: serving_completions.py takes the first of the prompts' details.
    payload = {
        "id": "r",
        "choices": choices(2),
        "usage": {"completion_tokens": 24},
        "sglext": {"spec_tokens_details": details(9)},
    }
    assert [report.counts for report in reports_from(payload)] == [SpecCounts(9, 15, 5), SpecCounts()]
    assert counts_from_payload(payload) == SpecCounts(completion=24)


def test_a_list_is_several_responses() -> None:
    payload = [{"meta_info": {"id": id_, **sglang()}} for id_ in ("a", "b")]
    assert [report.generation_id for report in reports_from(payload)] == ["a", "b"]
    assert [report.generation_id for report in reports_from(json.dumps(payload), generation_id="g")] == ["g#0", "g#1"]
    assert counts_from_payload(payload) == SpecCounts(18, 30, 10, 30)
    assert counts_from_payload([sglang(), {"completion_tokens": 5}]) == SpecCounts(completion=20)


def test_a_sum_that_does_not_fit_is_unknown() -> None:
    assert counts_from_payload([sglang(completion_tokens=2**63 - 1)] * 2) == SpecCounts()


# Finished and running


@pytest.mark.parametrize(
    ("payload", "finished"),
    [
        ({"meta_info": {"id": "r", "finish_reason": None, **sglang()}}, False),
        ({"meta_info": {"id": "r", "finish_reason": {"type": "length"}, **sglang()}}, True),
        ({"meta_info": {"id": "r", **sglang()}}, True),
        ({"id": "r", "finish_reason": None, **sglang()}, False),
        (vllm(), True),
        ({**vllm(), "choices": choices(1, finish_reason=None)}, False),
        ({**vllm(), "choices": []}, True),
        ({"id": "r", "stop": False, "timings": {"draft_n": 4, "draft_n_accepted": 1}}, False),
        ({"id": "r", "stop": True, "timings": {"draft_n": 4, "draft_n_accepted": 1}}, True),
    ],
)
def test_a_generation_has_finished_once_its_reason_is_there(payload: Any, finished: bool) -> None:
    (report,) = reports_from(payload)
    assert report.finished is finished


@pytest.mark.parametrize(
    "chunk",
    [
        {"id": "r", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": None}]},
        {"id": "r", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"id": "r", "object": "text_completion", "choices": choices(1), "usage": None},
        {"id": "r", "object": "text_completion", "choices": choices(1, finish_reason=None)},
        # continuous usage: completion so far, and on the last chunk of content
        {"id": "r", "choices": choices(1, finish_reason=None), "usage": {"completion_tokens": 3}},
        {"id": "r", "object": "chat.completion.chunk", "choices": choices(1), "usage": {"completion_tokens": 3}},
        {"meta_info": {"id": "r", "finish_reason": None, "completion_tokens": 9}},
        {"id": "r", "object": "error", "message": "no"},
        {"error": {"message": "no", "code": 404}},
    ],
)
def test_a_message_without_counters_is_no_report(chunk: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert reports_from(chunk) == []
    assert caplog.records == []


def test_the_usage_chunk_is_the_final_report() -> None:
    (report,) = reports_from({**vllm(), "object": "chat.completion.chunk", "choices": []})
    assert report == GenerationReport("cmpl-1", READ, model="m", provider="vllm")


# Positions


def test_positions_follow_from_the_histogram_where_every_step_has_the_most_drafts() -> None:
    (report,) = reports_from(vllm(acceptance_histogram=[1, 1, 1, 2], num_spec_tokens=3))
    assert report.accepted_by_position == (4, 3, 2)
    assert report.proposed_by_position == (5, 5, 5)


def test_positions_follow_from_each_step_s_own_drafts() -> None:
    (report,) = reports_from(
        vllm(
            num_draft_tokens=13,
            acceptance_histogram=[1, 1, 1, 2, 0],
            num_spec_tokens=4,
            per_step_drafted=[3, 1, 4, 3, 2],
        )
    )
    assert report.accepted_by_position == (4, 3, 2, 0)
    assert report.proposed_by_position == (5, 4, 3, 1)


@pytest.mark.parametrize("version", SGLANG)
def test_positions_of_sglang_follow_from_its_histogram(version: str) -> None:
    names = sglang(version, id="r", **{SGLANG[version][2]: [1, 1, 1, 2]})
    for payload in ({"meta_info": names}, {"id": "r", "sglext": {"spec_tokens_details": names}}):
        (report,) = reports_from(payload)
        assert (report.accepted_by_position, report.proposed_by_position) == ((4, 3, 2), (5, 5, 5))


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"acceptance_histogram": None},
        {"acceptance_histogram": []},
        {"acceptance_histogram": [1, 1, 1, 1]},  # fewer steps than verified
        {"acceptance_histogram": [2, 1, 1, 1]},  # fewer accepted
        {"acceptance_histogram": [1, 1, 1, 2.0]},
        {"acceptance_histogram": [1, 1, 1, True]},
        {"acceptance_histogram": [2, 1, 1, -1]},
        {"acceptance_histogram": "1112"},
        {"num_draft_tokens": 14},  # not the same number in each step
        {"num_spec_tokens": 4},  # some steps had fewer than the most
        {"num_spec_tokens": None},
        {"per_step_drafted": [3, 3, 3, 3], "num_spec_tokens": 4},
        {"num_spec_steps": 0},
        {"num_accepted_draft_tokens": None},
        # one step with five accepted of three drafts
        {"acceptance_histogram": [2, 0, 2, 0, 0, 1]},
    ],
)
def test_positions_are_unknown_where_they_do_not_follow(metrics: dict[str, Any]) -> None:
    payload = vllm(**{"acceptance_histogram": [1, 1, 1, 2], "num_spec_tokens": 3} | metrics)
    if not metrics:
        del payload["metrics"]["speculative_decoding"]["acceptance_histogram"]
    (report,) = reports_from(payload)
    assert report.accepted_by_position is None
    assert report.proposed_by_position is None


def test_positions_beyond_the_last_are_left_out() -> None:
    (report,) = reports_from(
        vllm(
            num_spec_steps=2, num_accepted_draft_tokens=40, num_draft_tokens=80, num_spec_tokens=40,
            acceptance_histogram=[1] + [0] * 39 + [1],
        )
    )  # fmt: skip
    assert report.accepted_by_position == (1,) * 32
    assert report.proposed_by_position == (2,) * 32


def test_huge_numbers_and_lists_cost_no_memory() -> None:
    most = 2**63 - 1
    metrics = {"num_spec_steps": 1, "num_draft_tokens": most, "num_accepted_draft_tokens": 0, "num_spec_tokens": most}
    (report,) = reports_from(vllm(**metrics, acceptance_histogram=[1]))
    assert report.proposed_by_position == (1,) * 32
    (report,) = reports_from(vllm(num_spec_steps=10**6, num_accepted_draft_tokens=0, acceptance_histogram=[1] * 10**6))
    assert report.proposed_by_position is None


# The next renaming


RENAMED = [
    {"meta_info": {"id": "r", "completion_tokens": 15, "spec_verify_ct": 5, "spec_num_right_drafts": 9}},
    {"id": "r", "completion_tokens": 15, "num_accepted_speculative_tokens": 9},
    {"id": "r", "usage": {"completion_tokens": 15, "draft_tokens": 15}, "choices": choices(1)},
    {
        "id": "r",
        "usage": {"completion_tokens": 15},
        "speculation": {"accepted": 9, "offered": 15},
        "choices": choices(1),
    },
    {"id": "r", "usage": {"completion_tokens": 15}, "choices": choices(1), "metrics": {"specDecode": {"accepted": 9}}},
    {"id": "r", "usage": {"completion_tokens": 15}, "choices": choices(1), "sglext": {"spec": [{"right": 9}]}},
    {"id": "r", "usage": {"completion_tokens": 15}, "choices": choices(1), "timings": {"drafted_n": 15}},
    {"id": "r", "usage": {"completion_tokens": 15}, "choices": choices(1, meta_info={"spec_right_drafts": 9})},
    {"id": "r", "usage": {"completion_tokens": 15}, "choices": choices(1), "stats": {"acceptance_rate": 0.6}},
    {"id": "r", "completion_tokens": 15, "verified_tokens": 15},
    # names that are known, but only half a pair, or no numbers
    {"id": "r", "completion_tokens": 15, "spec_verify_ct": 5, "spec_num_correct_drafts": 9},
    {"id": "r", "completion_tokens": 15, "spec_num_correct_drafts": "9", "spec_num_proposed_drafts": "15"},
]


@pytest.mark.parametrize("payload", RENAMED, ids=lambda payload: json.dumps(payload)[:60])
def test_names_that_look_like_speculation_but_are_unknown_are_named_once_and_counted_each_time(
    payload: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    for _ in range(3):
        counts_from_payload(payload)
        recorder.record_payload(payload)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert meter.dropped()["invalid"] == 3
    assert re.search("right|accepted|acceptance_rate|draft_tokens|drafted_n|verified_tokens", line.getMessage())


def test_an_object_s_unknown_names_are_found_too(caplog: pytest.LogCaptureFixture) -> None:
    counts_from_payload(SimpleNamespace(id="r", spec_num_right_drafts=9))
    counts_from_payload(SimpleNamespace(id="r", model_extra={"speculation": {"right": 9}}))
    assert [("spec_num_right_drafts" in line.getMessage(), "speculation.right" in line.getMessage())
            for line in caplog.records] == [(True, False), (False, True)]  # fmt: skip


def test_what_can_be_read_is_counted_all_the_same() -> None:
    meter = Meter()
    SpecDecRecorder(meter.provider).record_payload(RENAMED[0])
    assert meter.totals() == {"verify": 5, "completion": 15, "generations": 1}
    assert meter.dropped() == {"invalid": 1}


@pytest.mark.parametrize(
    "payload",
    [
        {"usage": {"completion_tokens": 12, "prompt_tokens": 3}},
        {"completion_tokens": 20, "spec_verify_ct": 8},
        {"completion_tokens": 20, "spec_verify_ct": 8, "spec_accept_length": 2.5},
        {**vllm(), "metrics": {"speculative_decoding": None, "time_to_first_token_ms": 3.5}},
        # OpenAI's predicted outputs are no speculative decoding.
        {"usage": {"completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}}},
        {"special_tokens": 3, "specification": 4, "accepted": 1, "inspect_count": 4, "aspect": 1},
        {"is_draft": True, "draft": "text", "spec": "text", "verified": True, "speculative": None},
        {"choices": choices(1, text="draft_tokens", spec_num_drafts=3), "usage": {"completion_tokens": 3}},
        {"choices": [], "text": {"draft_tokens": 3}, "content": {"spec_tokens": 3}, "error": {"spec_tokens": 3}},
        sglang(), vllm(), [sglang()],
    ],
    ids=lambda payload: json.dumps(payload)[:60],
)  # fmt: skip
def test_nothing_is_said_of_a_payload_that_is_all_right(payload: Any, caplog: pytest.LogCaptureFixture) -> None:
    counts_from_payload(payload)
    assert caplog.records == []


def test_warnings_do_not_grow_with_what_payloads_say(caplog: pytest.LogCaptureFixture) -> None:
    for n in range(200):
        counts_from_payload({f"spec_{n}_{'x' * 10_000}": 1, **{f"spec_{n}_{m}": 1 for m in range(20)}})
    assert len(caplog.records) == 32
    assert all(len(line.getMessage()) < 1_000 for line in caplog.records)


def test_the_search_for_unknown_names_is_bounded() -> None:
    deep: dict[str, Any] = {"spec_tokens": 1}
    for _ in range(5000):
        deep = {"a": deep}
    wide = {f"key{n}": {f"key{m}": m for m in range(300)} for n in range(300)}
    assert payloads.read(deep).problem == ""
    assert payloads.read(wide).problem == ""
    assert len(list(payloads._walk(wide))) == 256


# record_payload


def test_record_payload_counts_what_it_reads_and_hands_it_back() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider)
    payload = vllm(acceptance_histogram=[1, 1, 1, 2], num_spec_tokens=3)
    assert recorder.record_payload(payload, session_id="s") == reports_from(payload, session_id="s")
    recorder.record_payload(payload, session_id="s")
    assert meter.totals() == {"accepted": 9, "proposed": 15, "verify": 5, "completion": 15, "generations": 1}
    assert meter.at_positions() == ([4, 3, 2], [5, 5, 5])
    assert meter.dropped() == {"duplicate": 1}
    (point,) = meter.points("specdec.accepted_tokens")
    assert point.attributes.pop("specdec.process").startswith("recorder-")
    assert point.attributes == {
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "specdec.source": "response",
        "specdec.ratio_set": "accept_rate",
    }


def test_what_the_caller_knows_better_goes_before_the_payload() -> None:
    meter = Meter()
    (report,) = SpecDecRecorder(meter.provider).record_payload(
        vllm(), sample_id="sample", model="served", provider="other", method="eagle3", engine_index=0
    )
    assert report.sample_id == "sample"
    (point,) = meter.points("specdec.verify_steps")
    assert point.attributes["gen_ai.request.model"] == "served"
    assert point.attributes["gen_ai.provider.name"] == "other"
    assert point.attributes["specdec.method"] == "eagle3"
    assert point.attributes["specdec.engine.index"] == 0


@pytest.mark.parametrize("payload", [None, b"", "{", 7, {"completion_tokens": 9, "spec_verify_ct": 3}])
def test_what_cannot_be_read_or_told_apart_is_invalid(payload: Any) -> None:
    meter = Meter()
    assert SpecDecRecorder(meter.provider).record_payload(payload) == []
    assert meter.totals() == {}
    assert meter.dropped() == {"invalid": 1}


@pytest.mark.parametrize("payload", [{}, [], {"error": "no"}, {"id": "cmpl-1", "choices": choices(1)}])
def test_what_says_nothing_is_not_invalid(payload: Any) -> None:
    meter = Meter()
    assert SpecDecRecorder(meter.provider).record_payload(payload) == []
    assert meter.points() == []


def test_where_nothing_speculates_a_payload_gives_no_point() -> None:
    meter = Meter()
    recorder = SpecDecRecorder(meter.provider, speculation=False)
    for payload in (vllm(), None, RENAMED[0]):
        recorder.record_payload(payload)
    assert meter.points() == []
