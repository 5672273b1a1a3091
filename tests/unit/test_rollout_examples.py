"""The examples run, and count what the recorded engines counted."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
import urllib.error
from typing import Any

import pytest

from examples.rollouts import agentic_session, async_server, gateway, slime_rollout
from examples.rollouts.replay import Replay, cases
from otel_specdec import RolloutSession, SpecDecRecorder
from tests.unit.collected import Meter
from tests.unit.recorded import DIFFERENT_SGLANG, DIFFERENT_VLLM, SGLANG_K, payload_of, recorded

FIELDS = ("accepted", "proposed", "verify", "completion")


def sums(truths: list[dict[str, Any]]) -> dict[str, int]:
    return {field: sum(truth[field] for truth in truths) for field in FIELDS}


def with_proposed(truth: dict[str, Any]) -> dict[str, Any]:
    return {**truth, "proposed": SGLANG_K * truth["verify"]}


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.mark.parametrize("name", ["slime_rollout", "agentic_session", "async_server", "gateway"])
def test_an_example_runs_and_says_what_the_counters_say(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    importlib.import_module(f"examples.rollouts.{name}").main()
    assert "generations" in capsys.readouterr().out


# A rollout function


def samples(*names: str) -> list[slime_rollout.Sample]:
    return [slime_rollout.Sample(n, dict(recorded("sglang")[name]["request"])) for n, name in enumerate(names)]


NATIVE = ["native", "native, drafts partly right", "native, drafts wrong", "native, stop token", "native, stop string"]


def test_a_rollout_step_counts_what_the_engine_counted(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    with Replay("sglang") as server:
        step = slime_rollout.generate_rollout(server.url, samples(*NATIVE, "native, one token"), 1, recorder)
        summary = asyncio.run(step)
    truths = [with_proposed(recorded("sglang")[name]["truth"][0]) for name in NATIVE]
    assert summary.totals == {**sums(truths), "completion": sums(truths)["completion"] + 1}
    assert summary.ratios["accept_rate"] == sums(truths)["accepted"] / sums(truths)["proposed"]
    assert summary.coverage["accept_rate"] == 5 / 6
    assert meter.totals() == {**summary.totals, "generations": 6}
    assert meter.pooled(["gen_ai.provider.name"]).attributes["gen_ai.provider.name"] == "sglang"
    assert summary.per_sample_means() == {}  # one sample has no counters


def test_a_generation_that_was_interrupted_is_counted_once_with_the_sum_of_its_parts(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider)
    (sample,) = samples("native, aborted")
    with Replay("sglang") as server:
        first = asyncio.run(slime_rollout.generate_rollout(server.url, [sample], 1, recorder))
        assert (first.generations, sample.status) == (0, "aborted")
        sample = slime_rollout.Sample(**json.loads(json.dumps(vars(sample))))  # it waits in a buffer
        sample.request = dict(recorded("sglang")["native"]["request"])
        second = asyncio.run(slime_rollout.generate_rollout(server.url, [sample], 2, recorder))
    truths = [with_proposed(recorded("sglang")[name]["truth"][0]) for name in ("native, aborted", "native")]
    assert second.totals == sums(truths)
    assert second.generations == 1
    assert sample.reports[0]["session_id"] == "step 1"
    assert meter.totals() == {**sums(truths), "generations": 1}


def test_ranks_send_json_and_are_merged(meter: Meter) -> None:
    recorder = SpecDecRecorder(meter.provider)
    ranks = []
    with Replay("sglang") as server:
        for rank in range(3):
            its = samples(NATIVE[rank], NATIVE[rank + 1])
            for sample in its:
                sample.index += 10 * rank
            summary = asyncio.run(slime_rollout.generate_rollout(server.url, its, 1, recorder))
            ranks.append(json.dumps(summary.as_dict()))
    together = slime_rollout.merged(ranks)
    assert meter.totals() == {**together.totals, "generations": together.generations}
    assert meter.pooled().ratios == together.ratios
    assert together.generations == 6


# An agentic session


def test_a_shared_beginning_is_counted_once_and_a_dead_end_not_at_all(meter: Meter) -> None:
    names = ["chat", "completion", "drafts partly right", "drafts wrong"]
    turns = [(recorded("vllm")[name]["path"], dict(recorded("vllm")[name]["request"])) for name in names]
    session = RolloutSession("task")
    with Replay("vllm") as server:
        agentic_session.rollout(server.url, turns, session)
    summary = agentic_session.count(session, SpecDecRecorder(meter.provider))
    truths = [recorded("vllm")[name]["truth"] for name in names[:3]]
    assert (summary.reports, summary.generations, summary.duplicates) == (4, 3, 1)
    assert summary.totals == sums(truths)
    assert meter.totals() == {**sums(truths), "generations": 3}


# An asynchronous server


def test_a_wrapped_engine_counts_each_generation_under_its_request_id(meter: Meter) -> None:
    engine = async_server.StandIn()
    recorder = SpecDecRecorder(meter.provider, speculation=True)
    server = async_server.AsyncServer(engine, recorder, model="tiny", method="ngram")
    outputs = asyncio.run(async_server.serve(server, engine.number))
    whole = [case for case in cases("vllm").values() if len(case.get("response", {}).get("choices", ())) == 1]
    told = [payload_of(dict(case)) for case in whole]
    metrics = [answer["metrics"]["speculative_decoding"] for answer in told if answer["metrics"]]
    assert meter.totals() == {
        "accepted": sum(each["num_accepted_draft_tokens"] for each in metrics),
        "proposed": sum(each["num_draft_tokens"] for each in metrics),
        "verify": sum(each["num_spec_steps"] for each in metrics),
        "completion": sum(answer["usage"]["completion_tokens"] for answer in told),
        "generations": engine.number,
    }
    assert meter.pooled().coverage["accept_rate"] == len(metrics) / engine.number
    assert len({output.report.generation_id for output in outputs if output.report}) == engine.number
    (attributes,) = {
        (point.attributes["gen_ai.request.model"], point.attributes["specdec.method"]) for point in meter.points()
        if "gen_ai.request.model" in point.attributes
    }  # fmt: skip
    assert attributes == ("tiny", "ngram")


# A gateway


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gateway_changes_no_answer(meter: Meter, engine: str) -> None:
    with Replay(engine) as server, gateway.Gateway(server.url, SpecDecRecorder(meter.provider)) as before:
        for case in through_openai(engine).values():
            got = gateway.post(before.url, case["path"], case["request"])
            assert got == gateway.post(server.url, case["path"], case["request"])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_gateway_counts_what_the_engine_counted_streamed_or_not(meter: Meter, engine: str) -> None:
    different = DIFFERENT_VLLM if engine == "vllm" else DIFFERENT_SGLANG
    asked = {name: case for name, case in through_openai(engine).items() if name not in different}
    recorder = SpecDecRecorder(meter.provider)
    with Replay(engine) as server, gateway.Gateway(server.url, recorder, sglang=engine == "sglang") as before:
        for case in asked.values():
            gateway.post(before.url, case["path"], case["request"])
    truths = [truth for case in asked.values() for truth in truths_of(case)]
    assert meter.totals() == {**sums(truths), "generations": len(truths)}
    assert meter.dropped() == {}


def through_openai(engine: str) -> dict[str, Any]:
    return {name: case for name, case in recorded(engine).items() if case["path"].startswith("/v1/")}


def truths_of(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each generation."""
    return [*map(with_proposed, case["truth"])] if isinstance(case["truth"], list) else [case["truth"]]


def test_a_gateway_counts_a_stream_once_and_hides_what_it_asked_for_itself(meter: Meter) -> None:
    case = recorded("vllm")["completion, streamed"]
    asked = {name: value for name, value in case["request"].items() if name != "stream_options"}
    recorder = SpecDecRecorder(meter.provider)
    with Replay("vllm") as server, gateway.Gateway(server.url, recorder) as before:
        events = gateway.post(before.url, case["path"], asked).decode().split("\n\n")
        assert len([event for event in events if event.startswith("data: {")]) == len(case["chunks"]) - 1
        assert "usage" not in json.loads(events[-3].removeprefix("data: "))
        assert events[-2:] == ["data: [DONE]", ""]
        assert meter.totals() == {**sums([case["truth"]]), "generations": 1}
        events = gateway.post(before.url, case["path"], case["request"]).decode().split("\n\n")
        assert (
            json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == case["truth"]["completion"]
        )
    assert meter.dropped() == {"duplicate": 1}  # the recorded answer has one id


def test_a_gateway_passes_errors_on_and_counts_nothing(meter: Meter) -> None:
    with Replay("vllm") as server, gateway.Gateway(server.url, SpecDecRecorder(meter.provider)) as before:
        with pytest.raises(urllib.error.HTTPError) as refused:
            gateway.post(before.url, "/v1/completions", {"prompt": "never recorded"})
        assert refused.value.code == 404
        refused.value.close()
    assert meter.points() == []


def test_a_client_that_hangs_up_does_the_gateway_no_harm(meter: Meter) -> None:
    case = recorded("vllm")["completion, streamed"]
    body = json.dumps(case["request"]).encode()
    with Replay("vllm") as server, gateway.Gateway(server.url, SpecDecRecorder(meter.provider)) as before:
        host, _, port = before.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            head = f"POST {case['path']} HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.recv(1)
        assert gateway.post(before.url, case["path"], case["request"])
    assert meter.totals()["generations"] == 1
