"""The real server under `opentelemetry-instrument`, n-gram speculation on the CPU: counters against final answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_demo.tiny_model import Models
from otel_specdec import reports_from_payload
from otel_specdec.names import RESPONSE_ID, Metric
from tests.sglang.serving import KNOWN, Serving, check_points, serving, told
from tests.unit.recorded import check_live_sglang, payload_of, recorded

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = Path(tmp_path_factory.mktemp("server"))
    # Traces go to a port where nobody listens: the ids are there all the same.
    with serving(models, folder, enable_trace=True, otlp_traces_endpoint="127.0.0.1:9") as served:
        yield served


def expect(served: Serving, before: dict[str, int], answers: list[Any]) -> None:
    """Our counters have grown by what these final answers say, and by nothing else."""
    says = told(answers)
    totals = served.settle(before["generations"] + len(answers))
    assert {name: totals[name] - before[name] for name in totals} == says


def test_series_begin_at_zero_before_any_traffic_and_none_of_proposed_tokens(served: Serving) -> None:
    assert served.receiver.wait(lambda receiver: bool(receiver.points()), 10)
    assert served.totals() == {"accepted": 0, "verify": 0, "completion": 0, "emitted": 0, "generations": 0}
    assert len(served.lines()) == 1
    assert "of sglang engine 0 (model tiny, method ngram" in served.lines()[0]
    assert "opentelemetry-instrument" in served.lines()[0]


def test_single_stream_several_and_batch(served: Serving) -> None:
    before = served.totals()
    answers = served.generate(KNOWN, sampling={"max_new_tokens": 24})
    parts = served.stream(KNOWN, sampling={"max_new_tokens": 24})
    assert len(parts) > 3
    answers += [parts[-1]]
    several = served.generate(KNOWN, sampling={"max_new_tokens": 40, "n": 2})
    assert len({answer["meta_info"]["id"] for answer in several}) == 2
    answers += several
    batch = served.generate([KNOWN, "the cat", "12"], rid=["r0", "r1", "r2"], sampling={"max_new_tokens": 30})
    assert [answer["meta_info"]["id"] for answer in batch] == ["r0", "r1", "r2"]
    answers += batch
    expect(served, before, answers)
    assert served.totals()["accepted"] > 0


@pytest.mark.parametrize("limit", [1, 19, 20, 21, 22, 23, 60])
def test_a_limit_anywhere_in_a_block_of_drafts(served: Serving, limit: int) -> None:
    before = served.totals()
    answers = served.generate(KNOWN, sampling={"max_new_tokens": limit})
    assert answers[0]["meta_info"]["completion_tokens"] == limit
    expect(served, before, answers)


def test_a_stop_token_inside_an_accepted_run(served: Serving, models: Models) -> None:
    before = served.totals()
    served.generate(KNOWN, sampling={"max_new_tokens": 30})  # the trie of drafts has seen the alphabet now
    first = told(served.generate(KNOWN, sampling={"max_new_tokens": 30}))
    stop = served.generate(KNOWN, sampling={"max_new_tokens": 60, "stop": ["i"]})
    ids = stop[0]["output_ids"]
    by_token = served.generate(KNOWN, sampling={"max_new_tokens": 60, "stop_token_ids": [ids[-1]], "ignore_eos": False})
    meta = by_token[0]["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"
    # More was accepted than emitted: the run went on behind the stop.
    assert meta["spec_num_correct_drafts"] + meta["spec_verify_ct"] > meta["completion_tokens"] - 1
    totals = served.settle(before["generations"] + 4)
    assert first["generations"] == 1
    assert totals["generations"] - before["generations"] == 4


def test_an_abort_while_it_runs(served: Serving) -> None:
    before = served.totals()
    parts = served.stream("the cat", abort_after=2, sampling={"max_new_tokens": 400})
    assert parts[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    expect(served, before, [parts[-1]])


def test_a_client_that_hangs_up_leaves_its_record(served: Serving) -> None:
    before, before_calls = served.totals(), served.verify_calls()
    parts = served.stream("the dog", sampling={"max_new_tokens": 400}, hang_up_after=4)
    totals = served.settle(before["generations"] + 1, seconds=60)
    assert totals["completion"] - before["completion"] >= parts[-1]["meta_info"]["completion_tokens"]
    assert totals["verify"] - before["verify"] == served.verify_calls() - before_calls


def test_an_abort_in_the_queue_and_health_checks_are_no_generations(served: Serving) -> None:
    before = served.totals()
    running = [
        threading.Thread(target=served.generate, args=(f"cat {n}",), kwargs={"sampling": {"max_new_tokens": 60}})
        for n in range(4)
    ]
    for each in running:
        each.start()
    time.sleep(0.3)
    answers: list[Any] = []
    queued = threading.Thread(
        target=lambda: answers.extend(served.stream("queued", rid="queued", sampling={"max_new_tokens": 60}))
    )
    queued.start()
    time.sleep(0.2)
    served.post("/abort_request", {"rid": "queued"})
    for each in [*running, queued]:
        each.join(60)
    aborted = [answer for answer in answers if answer["meta_info"]["completion_tokens"]]
    served.settle(before["generations"] + 4 + bool(aborted))


def test_the_same_id_one_after_the_other(served: Serving) -> None:
    before = served.totals()
    answers = [served.generate(KNOWN, rid="again", sampling={"max_new_tokens": 12})[0] for _ in range(3)]
    expect(served, before, answers)


@pytest.mark.parametrize("name", [name for name in recorded("sglang") if name != "native, aborted"])
def test_a_response_says_what_the_engine_counted(served: Serving, name: str) -> None:
    """The recorded requests once more: what is read of the live answer is what our counters in the engine grew by."""
    recorded_case = recorded("sglang")[name]
    before = served.totals()
    case = {"path": recorded_case["path"], **served.answer(recorded_case["path"], recorded_case["request"])}
    payload = payload_of(case)
    reports = reports_from_payload(payload)
    totals = served.settle(before["generations"] + len(recorded_case["truth"]))
    grown = {name: totals[name] - before[name] for name in totals}
    check_live_sglang(name, payload, reports, grown)


def test_exemplars_hold_the_id_that_the_client_saw_and_the_trace_of_its_request(served: Serving) -> None:
    before = served.totals()
    answer = served.post(
        "/v1/completions",
        {"model": "tiny", "prompt": KNOWN, "max_tokens": 12, "temperature": 0},
        {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )
    served.settle(before["generations"] + 1)
    found = [
        exemplar
        for point in served.receiver.points(Metric.GENERATIONS.value)
        for exemplar in point.exemplars
        if exemplar.filtered_attributes.get(RESPONSE_ID) == answer["id"]
    ]
    assert found
    assert {exemplar.trace_id for exemplar in found} == {TRACE}
    assert all(exemplar.span_id not in ("", "b7ad6b7169203331") for exemplar in found)  # the request's own span


def test_sglangs_own_count_of_verify_steps_is_the_same_over_all_traffic(served: Serving) -> None:
    assert served.totals()["verify"] == served.verify_calls() > 0


def test_points_say_whose_they_are(served: Serving) -> None:
    check_points(served, processes=1)
