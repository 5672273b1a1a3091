"""Real responses of the real server, with per-request metrics on: what is read of them is what the engine counted.

The engine counts in its own process (`opentelemetry-instrument`), under `specdec.source` = `engine`; a recorder here
counts the same generations from the responses, as `response`, into the same receiver. Requests go one at a time, so
that what a counter grows by is that request's.

`python -m tests.vllm.test_payloads_vllm` records the answers, the engine's numbers beside them, for the unit tests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from examples.rollouts import gateway
from examples.vllm_demo.tiny_model import LETTERS, Models, ensure_models, token_id
from otel_specdec import SpecDecRecorder, counts_from_payload, pool
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric
from tests.unit.recorded import DIFFERENT_VLLM, FOLDER, Case, check_vllm, payload_of
from tests.vllm.serving import MODEL, Serving, serving

ROOT = Path(__file__).resolve().parents[2]
KNOWN = LETTERS + "ab"
WRONG = "9".join(LETTERS[:15]) + "9a"
PAIRS = '{"a": 1, "b": 2}{"a": 1, "b": 2}'
SHARED = (LETTERS * 6)[:129]
"""One token more than a block of the KV cache: the second time, that token alone is left to prefill."""
COUNTED = {**METRIC_OF_FIELD, "generations": Metric.GENERATIONS}
POSITIONS = {"accepted_by_position": Metric.POSITION_ACCEPTED, "proposed_by_position": Metric.POSITION_PROPOSED}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SERVER = ["--per-request-spec-decode-metrics", "detailed", "--enable-prefix-caching"]


class Asked(NamedTuple):
    """A request, and the number of sequences that it asks for."""

    path: str
    body: dict[str, Any]
    generations: int = 1


def text(prompt: str | list[str], max_tokens: int, generations: int = 1, **more: Any) -> Asked:
    return Asked("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, **more}, generations)


def chat(max_tokens: int, **more: Any) -> Asked:
    messages = [{"role": "user", "content": LETTERS}]
    return Asked("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens, **more})


def structured(prompt: str, **grammar: Any) -> Asked:
    return text(prompt, 30, structured_outputs=grammar)


TWO: dict[str, Any] = {"n": 2, "temperature": 1.0}
CONTINUOUS: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED = {
    "completion": text(KNOWN, 30),
    "completion, streamed": text(LETTERS + "cd", 30, **STREAM),
    "drafts partly right": text("abcdexxxabcdefgyyyab", 24),
    "drafts wrong": text(WRONG, 10),
    "no drafts": text("5", 8),
    "one token": text(LETTERS + "ef", 1),
    "cut off in a block": text(LETTERS + "gh", 3),
    "ends by itself": text("UVWXYZ-UV", 40),
    "stop token": text(LETTERS + "ij", 40, stop_token_ids=[token_id("q")]),
    "stop string": text(KNOWN, 40, stop=["ij"]),
    "stop string, streamed": text(KNOWN, 40, stop=["ij"], **STREAM),
    "chat": chat(24),
    "chat, streamed": chat(25, **STREAM),
    "chat, continuous usage": chat(26, **CONTINUOUS),
    "streamed, usage not asked for": text(LETTERS + "kl", 9, stream=True),
    "two prompts": text([LETTERS + "mn", "xyz"], 12, generations=2),
    "two sequences": text(LETTERS + "op", 13, generations=2, **TWO),
    "two sequences, streamed": text(LETTERS + "qr", 13, generations=2, **TWO, **STREAM),
    "shared beginning": text(SHARED, 11),
    "prefix-cache hit": text(SHARED, 11),
    "grammar refuses some drafts": structured(KNOWN, regex="cdef[0-9]{4}gh"),
    "grammar refuses most drafts": structured(KNOWN, regex="c[0-9]{4}gh"),
    "grammar: json": structured(PAIRS + "{", json=OBJECT),
    "grammar: no drafts": structured(PAIRS + "{", regex="[a-z]{9}"),
}


def ask(served: Serving, asked: Asked) -> Case:
    """One request, and its answer as JSON has it."""
    sent = {"model": MODEL, "temperature": 0, **asked.body}
    case: Case = {"path": asked.path, "request": sent}
    with httpx.Client(base_url=served.server.url, timeout=60, trust_env=False) as client:
        if not sent.get("stream"):
            answer = client.post(asked.path, json=sent)
            assert answer.status_code == 200, answer.text
            return {**case, "response": answer.json()}
        with client.stream("POST", asked.path, json=sent) as stream:
            assert stream.status_code == 200
            data = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    return {**case, "chunks": [json.loads(chunk) for chunk in data if chunk != "[DONE]"]}


def counts(served: Serving, source: str) -> dict[str, Any]:
    """What has been received from this source so far: totals, and tokens by position."""
    totals = served.receiver.totals
    counted: dict[str, Any] = {
        field: int(totals(metric.value, **{"specdec.source": source})) for field, metric in COUNTED.items()
    }
    for field, metric in POSITIONS.items():
        filters: list[dict[str, Any]] = [{"specdec.source": source, "specdec.position": i} for i in range(4)]
        counted[field] = [int(totals(metric.value, **each)) for each in filters]
    return counted


def grown(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [new - old for new, old in zip(value, before[name], strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in now.items()
    }


def ask_alone(served: Serving, asked: Asked) -> Case:
    """One request, with the engine's own counts of it as `truth`."""
    before = counts(served, "engine")
    case = ask(served, asked)
    finished = before["generations"] + asked.generations
    assert served.receiver.wait(lambda _: counts(served, "engine")["generations"] >= finished, 15)
    truth = grown(counts(served, "engine"), before)
    assert truth["generations"] == asked.generations
    return {**case, "truth": truth}


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, Path(tmp_path_factory.mktemp("server")), extra_args=SERVER) as served:
        yield served


@pytest.fixture(scope="module")
def cases(served: Serving) -> dict[str, Case]:
    return {name: ask_alone(served, asked) for name, asked in ASKED.items()}


@pytest.mark.parametrize("name", ASKED)
def test_a_live_response_says_what_the_engine_counted(cases: dict[str, Case], name: str) -> None:
    check_vllm(name, cases[name])


@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if asked.generations > 1])
def test_one_usage_summed_over_sequences_is_the_engine_s_sum(cases: dict[str, Case], name: str) -> None:
    assert counts_from_payload(payload_of(cases[name])).completion == cases[name]["truth"]["completion"]


def test_engine_and_responses_count_the_same_generations_and_nothing_adds_them_up(
    served: Serving, cases: dict[str, Case]
) -> None:
    exporter = OTLPMetricExporter(endpoint=f"{served.receiver.http_endpoint}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], Resource.create({"service.name": "tests"}), shutdown_on_exit=False)
    recorder = SpecDecRecorder(provider)
    both = [case for name, case in cases.items() if name not in DIFFERENT_VLLM]
    for case in both:
        recorder.record_payload(payload_of(case), method="ngram")
    provider.shutdown()

    response = counts(served, "response")
    for field in ("accepted", "proposed", "verify", "completion", "generations"):
        assert response[field] == sum(case["truth"][field] for case in both), field
    engine = counts(served, "engine")
    assert engine["generations"] == sum(asked.generations for asked in ASKED.values())
    # Whoever sums over `specdec.source` counts twice; every point says which it is, and a filter keeps them apart.
    assert {point.attributes["specdec.source"] for point in served.points()} == {"engine", "response"}
    assert served.receiver.totals(Metric.GENERATIONS.value) == engine["generations"] + len(both)


@pytest.mark.parametrize("name", ["completion", "chat, streamed", "streamed, usage not asked for"])
def test_a_gateway_before_the_real_server_counts_what_the_engine_counted(served: Serving, name: str) -> None:
    reader = InMemoryMetricReader()
    recorder = SpecDecRecorder(MeterProvider([reader], shutdown_on_exit=False))
    asked = ASKED[name]
    before = counts(served, "engine")
    with gateway.Gateway(served.server.url, recorder) as proxy:
        answer = gateway.post(proxy.url, asked.path, {"model": MODEL, "temperature": 0, **asked.body})
    assert served.receiver.wait(lambda _: counts(served, "engine")["generations"] > before["generations"], 15)
    truth = grown(counts(served, "engine"), before)
    (pooled,) = pool(reader.get_metrics_data())
    assert dict(pooled.totals) == {field: truth[field] for field in ("accepted", "proposed", "verify", "completion")}
    assert pooled.generations == truth["generations"] == 1
    assert (b'"usage"' in answer) == (name != "streamed, usage not asked for")


def record() -> None:
    """Ask everything once and write the answers down."""
    models = ensure_models(ROOT / "build" / "models")
    with tempfile.TemporaryDirectory() as folder, serving(models, Path(folder), extra_args=SERVER) as served:
        from vllm import __version__ as version

        cases = {name: ask_alone(served, asked) for name, asked in ASKED.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    head = {"engine": f"vllm {version}, ngram, k = 4, {' '.join(SERVER)}, on a CPU",
            "truth": "what our counters in the engine's process grew by"}  # fmt: skip
    text = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    (FOLDER / "vllm").mkdir(exist_ok=True)
    (FOLDER / "vllm" / "openai.json").write_text(f'{{\n{text} "cases": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    record()
