"""The proof: a known request to a server, its counters, and what is said where they do not agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader

from examples.vllm_demo.server import free_port
from otel_specdec import GenerationExemplarFilter, names, views
from otel_specdec.cli.findings import Finding, State
from otel_specdec.cli.main import main
from otel_specdec.cli.prove import Answer, Seen, increase, judge
from otel_specdec.cli.windows import Observation
from otel_specdec.counts import ALL_RATIOS, SpecCounts
from otel_specdec.engines import EngineDescription, Increment, Picked, Taken
from otel_specdec.instrumentors import EngineCounters, logger
from otel_specdec.names import Metric

HONEST = SpecCounts(accepted=15, proposed=24, verify=6, completion=24, emitted=21)


class Tally:
    """What an adapter would tell."""

    ended = False

    def __init__(self) -> None:
        self.increments: list[Increment] = []
        self.picked: list[Picked] = []

    def take(self) -> Taken:
        taken, self.increments, self.picked = Taken(self.increments, self.picked), [], []
        return taken


@dataclass
class Engine:
    """A server with an OpenAI-compatible API whose engine is counted by the real pool, and flushed when it is idle."""

    provider: MeterProvider
    tell: Callable[[int], list[SpecCounts]] = lambda number: [HONEST]
    """What is counted for the n-th request."""
    ids: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally()
        engine = EngineDescription(
            provider="vllm", model="tiny", method="eagle", max_drafts=4, index=0, ratios=ALL_RATIOS
        )
        EngineCounters(self.provider, logger).engine_started(engine, self.tally, lambda: True)

    def answer(self, path: str, body: dict[str, Any] | None, key: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "tiny"}]}
        assert body is not None
        self.requests.append({**body, "key": key})
        number = len(self.requests)
        for counts in self.tell(number):
            increment = Increment(counts, 1)
            self.tally.increments.append(increment)
            self.tally.picked.append(Picked(f"cmpl-{number}", 1_000_000 * number, 0.5, [increment]))
        choice = {"text": "", **({"token_ids": list(range(24))} if self.ids else {})}
        return {"id": f"cmpl-{number}", "choices": [choice], "usage": {"completion_tokens": 24}}


@contextmanager
def serving(receiver: str, temporality: AggregationTemporality, **more: Any) -> Iterator[tuple[str, Engine]]:
    """A server that exports to `receiver`, the base of an OTLP/HTTP endpoint."""
    exporter = OTLPMetricExporter(f"{receiver}/v1/metrics", preferred_temporality={Counter: temporality})
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], views=views(), exemplar_filter=GenerationExemplarFilter())
    engine = Engine(provider, **more)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def reply(self, body: dict[str, Any] | None) -> None:
            answer = engine.answer(self.path, body, self.headers.get("authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())
            if body is not None:
                Thread(target=provider.force_flush, daemon=True).start()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", engine
    finally:
        server.shutdown()
        server.server_close()
        provider.shutdown()


def proved(capsys: Any, temporality: AggregationTemporality, **more: Any) -> tuple[int, dict[str, Any], Engine]:
    """The exit status, the findings by check, and the server that was asked."""
    port = free_port()
    with serving(f"http://127.0.0.1:{port}", temporality, **more) as (url, engine):
        status = main(["doctor", "--json", "--prove", url, "--port", str(port), "--wait", "10"])
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == status
    return status, {each["check"]: each for each in found["findings"]}, engine


TEMPORALITIES = [AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA]


@pytest.mark.parametrize("temporality", TEMPORALITIES)
def test_an_honest_engine_is_proved(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, temporality: AggregationTemporality
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    status, found, engine = proved(capsys, temporality)
    assert status == 0
    assert {each["state"] for each in found.values()} == {"ok"}
    assert found["completion"]["says"] == "24 completion tokens were counted, and 24 came back."
    assert found["request"]["says"].endswith("with 24 token ids.")
    assert found["accepted"]["says"] == "15 accepted ≤ 24 proposed."
    assert found["emitted_by_steps"]["says"] == "21 emitted ≤ 15 accepted + 6 verify."
    assert found["emitted_by_completion"]["says"] == "21 emitted ≤ 24 completion."
    assert "names cmpl-" in found["exemplar"]["says"]
    # Of cumulative values the first ones are what was counted before: it asked a second time.
    assert len(engine.requests) == (2 if temporality is AggregationTemporality.CUMULATIVE else 1)
    assert engine.requests[0]["return_token_ids"] is True
    assert engine.requests[0]["key"] == "Bearer secret"
    assert "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("counts", "check"),
    [
        (SpecCounts(15, 24, 6, 23, 21), "completion"),
        (SpecCounts(15, 14, 6, 24, 21), "accepted"),
        (SpecCounts(15, 24, 6, 24, 22), "emitted_by_steps"),
        (SpecCounts(30, 30, 6, 24, 25), "emitted_by_completion"),
    ],
)
def test_counters_that_do_not_agree_are_a_problem(capsys: Any, counts: SpecCounts, check: str) -> None:
    status, found, _ = proved(capsys, AggregationTemporality.DELTA, tell=lambda number: [counts])
    assert status == 1
    assert [name for name, each in found.items() if each["state"] == "problem"] == [check]
    assert found[check]["do"]


def test_a_server_that_serves_somebody_else_too_proves_nothing(capsys: Any) -> None:
    status, found, _ = proved(capsys, AggregationTemporality.DELTA, tell=lambda number: [HONEST, HONEST])
    assert status == 1
    assert found["idle"]["says"].startswith("2 generations were counted while one was asked for")


def test_where_nothing_is_counted_it_says_how_the_server_must_export(capsys: Any) -> None:
    port = free_port()
    with serving(f"http://127.0.0.1:{port}", AggregationTemporality.DELTA, tell=lambda number: []) as (url, _):
        assert main(["doctor", "--prove", url, "--port", str(port), "--wait", "1"]) == 1
    said = capsys.readouterr()
    assert "PROBLEM  No finished generation of model tiny was counted within 1 s." in said.out
    how = f"OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port}"
    assert how in " ".join(said.out.split())
    assert how in said.err  # at once, so that there is time to do it


def test_a_server_without_token_ids_is_believed_its_usage(capsys: Any) -> None:
    status, found, _ = proved(capsys, AggregationTemporality.DELTA, ids=False)
    assert status == 0
    assert found["request"]["says"].endswith("with 24 tokens by its usage.")


def test_what_an_engine_cannot_tell_is_a_note_and_no_problem() -> None:
    found = judge(Answer("x", 5, "token ids"), {Metric.GENERATIONS: 1, Metric.COMPLETION: 5, Metric.VERIFY: 2})
    assert states(found) == {"generations": State.OK, "completion": State.OK, "unknown": State.NOTE}
    assert "accepted, proposed, emitted" in found[-1].says


def test_a_request_without_a_draft_proves_little_and_it_says_so() -> None:
    counts = {Metric.GENERATIONS: 1, Metric.COMPLETION: 5, Metric.VERIFY: 0}
    assert states(judge(Answer("x", 5, "token ids"), counts))["verify"] is State.WARNING


def states(findings: list[Finding]) -> dict[str, State]:
    return {each.check: each.state for each in findings}


def test_no_server_no_model_and_no_api_are_status_1(capsys: Any) -> None:
    port = str(free_port())
    assert main(["doctor", "--prove", f"http://127.0.0.1:{port}", "--port", port]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["doctor", "--json", "--prove", f"http://127.0.0.1:{port}", "--port", port]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["state"] == "problem"


def seen(value: int, *, time: int, start: int = 1, series: str = "s", model: str = "m", source: str = "engine") -> Seen:
    attributes = {names.MODEL: model, names.SOURCE: source}
    found = Seen("m")
    found.take([Observation(Metric.COMPLETION, series, attributes, value, start, time)], [])
    return found


def test_only_the_model_s_engine_counts() -> None:
    assert seen(1, time=2, model="n").values == {}
    assert seen(1, time=2, source="response").values == {}


def test_the_increase_is_that_of_the_same_life_and_of_a_new_one_all() -> None:
    before = seen(10, time=100)
    assert increase(before, seen(14, time=200)).counts == {Metric.COMPLETION: 4}
    assert increase(before, seen(3, time=200, start=150)).counts == {Metric.COMPLETION: 3}
    assert increase(before, seen(30, time=200, start=150)).counts == {Metric.COMPLETION: 30}


def test_a_series_that_was_never_heard_of_and_is_older_is_a_stranger() -> None:
    before = seen(10, time=100)
    other = increase(before, seen(5, time=200, series="other"))
    assert (other.counts, other.strangers) == ({}, True)
    born = increase(before, seen(5, time=200, start=150, series="other"))
    assert (born.counts, born.strangers) == ({Metric.COMPLETION: 5}, False)
