"""The real server under `opentelemetry-instrument`, OTLP over HTTP, decoded at a receiver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.vllm_demo.tiny_model import Models
from examples.vllm_demo.traffic import Answer, aborted, greedy_mix, sampled, sequences
from tests.vllm.serving import (
    Serving,
    check_attributes,
    check_no_id_left,
    check_two_hundred_of_three_tokens,
    check_what_clients_got,
    serving,
    short,
    wait_for,
)


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, Path(tmp_path_factory.mktemp("server"))) as served:
        yield served


def test_every_series_is_born_at_zero_before_any_traffic(served: Serving) -> None:
    assert served.receiver.wait(lambda receiver: len(receiver.points()) >= 14, 10)
    assert {point.value for point in served.points()} == {0}
    check_attributes(served, {0})


def test_one_line_in_the_servers_log_says_what_is_counted(served: Serving) -> None:
    lines = [line for line in served.server.log_path.read_text().splitlines() if "otel_specdec" in line]
    assert len(lines) == 1, lines
    assert "method ngram, k = 4" in lines[0]
    assert "opentelemetry-instrument" in lines[0]


def test_two_hundred_requests_of_three_tokens(served: Serving) -> None:
    check_two_hundred_of_three_tokens(served)


def test_mixed_traffic_equals_what_clients_got_and_vllms_own_counters(served: Serving) -> None:
    before, before_vllm = served.totals(), served.vllm()
    trimmed = {"stop string", "stop string, streamed"}
    # A prompt of one token that joins running requests is padded, and vLLM counts padding as proposed: see
    # test_engine_ngram.py. Here vLLM's own counters are right.
    answers = served.ask([ask for ask in greedy_mix() if ask.name not in trimmed and ask.body.get("prompt") != "5"])
    answers += served.ask(sampled())  # alone: see there
    got = sequences(answers)
    totals = served.settle(before["generations"] + len(got))
    grown = {name: totals[name] - before[name] for name in totals}
    assert grown["completion"] == sum(len(sequence.token_ids) for _, sequence in got)
    after_vllm = served.vllm()
    for name in ("accepted", "proposed", "completion"):
        assert grown[name] == after_vllm[name] - before_vllm[name], name
    assert grown["accepted"] < grown["proposed"]
    assert grown["emitted"] <= grown["accepted"] + grown["verify"]


def test_completion_less_trimmed_is_what_clients_got(served: Serving) -> None:
    check_what_clients_got(served)


def test_clients_that_hang_up_leave_a_finished_generation(served: Serving) -> None:
    before, before_vllm, trimmed = served.totals(), served.vllm(), served.trimmed()
    answers = served.ask(aborted())
    assert all(answer.hung_up for answer in answers)
    totals = served.settle(before["generations"] + 2)
    assert totals["completion"] - before["completion"] >= sum(answer.tokens for answer in answers)
    # vLLM's frontend counts what it handed on; what the engine committed after the client had gone is the difference.
    handed_on = served.vllm()["completion"] - before_vllm["completion"]
    assert totals["completion"] - before["completion"] >= handed_on
    assert wait_for(lambda: totals["completion"] - before["completion"] - (served.trimmed() - trimmed) == handed_on, 10)


def test_two_requests_in_turn_and_two_at_once_under_one_request_id(served: Serving) -> None:
    before = served.totals()
    same = {"X-Request-Id": "the-very-same-request"}
    for _ in range(2):
        served.ask(short(1, 7, same))
    served.ask(short(2, 7, same), at_once=2)
    totals = served.settle(before["generations"] + 4)
    assert totals["completion"] - before["completion"] == 4 * 7


def test_a_receiver_that_dies_and_comes_back_costs_no_request_and_no_count(served: Serving) -> None:
    before = served.totals()
    answers: list[Answer] = []

    def traffic() -> None:
        for _ in range(6):
            answers.extend(served.ask(short(10, 7), at_once=5))
            time.sleep(0.7)  # idle long enough to be flushed

    clients = threading.Thread(target=traffic)
    clients.start()
    assert wait_for(lambda: len(answers) >= 10, 30)
    served.receiver.stop()
    assert wait_for(lambda: len(answers) >= 40, 60)
    served.receiver.start()
    clients.join(60)
    assert len(answers) == 60
    served.ask(short(1, 7))
    # The exporter gives a batch that it could not send up after a while (10 s); totals are cumulative.
    totals = served.settle(before["generations"] + 61, seconds=40)
    assert totals["completion"] - before["completion"] == 61 * 7


def test_no_id_is_in_any_exported_byte(served: Serving) -> None:
    check_no_id_left(served)
    check_attributes(served, {0})


def test_what_an_idle_engine_did_is_out_within_a_second_and_outlives_the_shutdown(served: Serving) -> None:
    # The last test: it stops the server, the way an operator does, with vLLM's default (the engine is killed at once).
    before = served.totals()
    served.ask(short(20, 7))
    start = time.monotonic()
    served.settle(before["generations"] + 20, seconds=5)
    assert time.monotonic() - start < 2  # the export interval is 60 s
    served.server.stop()
    assert served.totals()["generations"] == before["generations"] + 20
    check_attributes(served, {0})
