"""From a point to the generation behind it, decoded from what the real server exported."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.vllm_demo.otlp_receiver import Exemplar
from examples.vllm_demo.tiny_model import Models
from examples.vllm_demo.traffic import Answer, Ask, chat, complete
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric
from tests.vllm.serving import KNOWN, Serving, check_no_id_left, serving

# Three tokens: one by prefill, and two of a verified block of five.
THREE_TOKENS = {"accepted": 4, "proposed": 4, "verify": 1, "completion": 3, "emitted": 2}
VALUES = {METRIC_OF_FIELD[field].value: value for field, value in THREE_TOKENS.items()} | {Metric.GENERATIONS.value: 1}


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    traces = ["--otlp-traces-endpoint", "RECEIVER/v1/traces"]
    env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with serving(models, Path(tmp_path_factory.mktemp("server")), extra_args=traces, env=env) as served:
        yield served


def traceparent() -> tuple[str, str, dict[str, str]]:
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, {"traceparent": f"00-{trace}-{span}-01"}


def asked(served: Serving, ask: Ask, headers: dict[str, str], generations: int = 1) -> Answer:
    before = served.totals()["generations"]
    (answer,) = served.ask([Ask(ask.name, ask.body, chat=ask.chat, headers=headers)])
    served.settle(before + generations)
    return answer


def by_choice(found: dict[str, list[Exemplar]], metric: Metric) -> dict[str | None, Exemplar]:
    exemplars = found[metric.value]
    named = {str(e.filtered_attributes.get("specdec.choice", "")) or None: e for e in exemplars}
    assert len(named) == len(exemplars)
    return named


def test_a_completion_is_named_on_all_six_counters_with_its_own_counts_and_trace(served: Serving) -> None:
    trace, span, headers = traceparent()
    answer = asked(served, complete("one", KNOWN, 3), headers)
    found = served.exemplars(answer.response_id)
    assert {metric: [e.value for e in exemplars] for metric, exemplars in found.items()} == {
        metric: [value] for metric, value in VALUES.items()
    }
    for (exemplar,) in found.values():
        assert exemplar.trace_id == trace
        assert exemplar.span_id == span
        assert exemplar.filtered_attributes == {"gen_ai.response.id": answer.response_id, "specdec.choice": "0"}


def test_a_chat_is_named_by_its_own_id(served: Serving) -> None:
    trace, _, headers = traceparent()
    answer = asked(served, chat("chat", KNOWN, 9), headers)
    assert answer.response_id.startswith("chatcmpl-")
    (exemplar,) = served.exemplars(answer.response_id)[Metric.COMPLETION.value]
    assert (exemplar.value, exemplar.trace_id) == (9, trace)
    assert "specdec.choice" not in exemplar.filtered_attributes


def test_three_prompts_are_three_choices_of_one_response(served: Serving) -> None:
    _, _, headers = traceparent()
    body = {"prompt": [KNOWN, KNOWN + "c", KNOWN + "cd"], "max_tokens": 5, "temperature": 0}
    answer = asked(served, Ask("three prompts", body), headers, generations=3)
    named = by_choice(served.exemplars(answer.response_id), Metric.COMPLETION)
    assert {choice: exemplar.value for choice, exemplar in named.items()} == {"0": 5, "1": 5, "2": 5}


def test_three_children_are_three_choices_of_one_response(served: Serving) -> None:
    _, _, headers = traceparent()
    ask = complete("n", KNOWN, 5, n=3, temperature=1.0)
    answer = asked(served, ask, headers, generations=3)
    named = by_choice(served.exemplars(answer.response_id), Metric.COMPLETION)
    assert {choice: exemplar.value for choice, exemplar in named.items()} == {
        f"0.{sequence.index}": len(sequence.token_ids) for sequence in answer.sequences
    }


@pytest.mark.parametrize(
    ("length", "kept"),
    [
        (47, {"id": True, "trace": True, "span": True, "choice": False}),  # beside trace and span nothing more fits
        (48, {"id": True, "trace": True, "span": False, "choice": False}),
        (100, {"id": True, "trace": False, "span": False, "choice": False}),
        (200, {"id": False, "trace": True, "span": True, "choice": False}),
    ],
)
def test_a_long_request_id(served: Serving, length: int, kept: dict[str, bool]) -> None:
    trace, _, headers = traceparent()
    request_id = "r" * (length - len("cmpl-"))
    answer = asked(served, complete("long id", KNOWN, 6), {**headers, "X-Request-Id": request_id})
    assert answer.response_id == f"cmpl-{request_id}"
    exemplars = [
        exemplar
        for point in served.receiver.points(Metric.COMPLETION.value)
        for exemplar in point.exemplars
        if exemplar.trace_id == trace or exemplar.filtered_attributes.get("gen_ai.response.id") == answer.response_id
    ]
    (exemplar,) = exemplars
    assert ("gen_ai.response.id" in exemplar.filtered_attributes) == kept["id"]
    assert (exemplar.trace_id == trace) == kept["trace"]
    assert bool(exemplar.span_id.strip("0")) == kept["span"]
    assert ("specdec.choice" in exemplar.filtered_attributes) == kept["choice"]
    runes = sum(len(str(each)) for pair in exemplar.filtered_attributes.items() for each in pair)
    runes += (40 if kept["trace"] else 0) + (23 if kept["span"] else 0)
    assert runes <= 128


def test_ids_live_in_exemplars_alone(served: Serving) -> None:
    check_no_id_left(served)


def test_without_a_traces_endpoint_and_randomised_ids_there_are_ids_only(models: Models, tmp_path: Path) -> None:
    # vLLM 0.32 drops the trace headers of a request unless it exports traces itself.
    with serving(models, tmp_path, env={"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}) as served:
        _, _, headers = traceparent()
        answer = asked(served, complete("one", KNOWN, 3), headers)
        found = served.exemplars(answer.response_id)
        assert sorted(found) == sorted(VALUES)
        for (exemplar,) in found.values():
            assert exemplar.trace_id == ""
            assert exemplar.filtered_attributes == {"gen_ai.response.id": answer.response_id, "specdec.choice": "0"}
        answer = asked(served, chat("chat", KNOWN, 9), {"X-Request-Id": "job-0-deadbeef"})
        assert answer.response_id == "chatcmpl-job-0-deadbeef"
        assert served.exemplars(answer.response_id)
