"""Real responses of the real server, with per-request metrics on: what is read of them is what the engine counted.

The engine counts in its own process (`opentelemetry-instrument`), under `specdec.source` = `engine`; a recorder here
counts the same generations from the responses, as `response`, into the same receiver. Requests go one at a time, so that
what a counter grows by is that request's.

`python -m tests.vllm.test_payloads_vllm` records the answers, the engine's numbers beside them, for the unit tests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from examples.vllm_demo.tiny_model import LETTERS, Models, ensure_models, token_id
from otel_specdec import SpecDecRecorder, counts_from_payload
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric
from tests.unit.recorded import DIFFERENT_VLLM, FOLDER, Case, check_vllm, payload_of
from tests.vllm.serving import MODEL, Serving, serving

ROOT = Path(__file__).resolve().parents[2]
KNOWN = LETTERS + "ab"
WRONG = "9".join(LETTERS[:15]) + "9a"
CHAT = [{"role": "user", "content": LETTERS}]
PAIRS = '{"a": 1, "b": 2}{"a": 1, "b": 2}'
SHARED = (LETTERS * 6)[:129]
"""One token more than a block of the KV cache: the second time, that token alone is left to prefill."""
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
SERVER = ["--per-request-spec-decode-metrics", "detailed", "--enable-prefix-caching"]

# name: path, body, generations
ASKED: dict[str, tuple[str, dict[str, Any], int]] = {
    "completion": ("/v1/completions", {"prompt": KNOWN, "max_tokens": 30}, 1),
    "completion, streamed": ("/v1/completions", {"prompt": LETTERS + "cd", "max_tokens": 30, **STREAM}, 1),
    "drafts partly right": ("/v1/completions", {"prompt": "abcdexxxabcdefgyyyab", "max_tokens": 24}, 1),
    "drafts wrong": ("/v1/completions", {"prompt": WRONG, "max_tokens": 10}, 1),
    "no drafts": ("/v1/completions", {"prompt": "5", "max_tokens": 8}, 1),
    "one token": ("/v1/completions", {"prompt": LETTERS + "ef", "max_tokens": 1}, 1),
    "cut off in a block": ("/v1/completions", {"prompt": LETTERS + "gh", "max_tokens": 3}, 1),
    "ends by itself": ("/v1/completions", {"prompt": "UVWXYZ-UV", "max_tokens": 40}, 1),
    "stop token": ("/v1/completions", {"prompt": LETTERS + "ij", "max_tokens": 40, "stop_token_ids": [token_id("q")]}, 1),
    "stop string": ("/v1/completions", {"prompt": LETTERS + "ab", "max_tokens": 40, "stop": ["ij"]}, 1),
    "stop string, streamed": ("/v1/completions", {"prompt": LETTERS + "ab", "max_tokens": 40, "stop": ["ij"], **STREAM}, 1),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 24}, 1),
    "chat, streamed": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 25, **STREAM}, 1),
    "chat, continuous usage": (
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 26, "stream": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        1,
    ),
    "streamed, usage not asked for": ("/v1/completions", {"prompt": LETTERS + "kl", "max_tokens": 9, "stream": True}, 1),
    "two prompts": ("/v1/completions", {"prompt": [LETTERS + "mn", "xyz"], "max_tokens": 12}, 2),
    "two sequences": ("/v1/completions", {"prompt": LETTERS + "op", "max_tokens": 13, "n": 2, "temperature": 1.0}, 2),
    "two sequences, streamed": (
        "/v1/completions", {"prompt": LETTERS + "qr", "max_tokens": 13, "n": 2, "temperature": 1.0, **STREAM}, 2,
    ),
    "shared beginning": ("/v1/completions", {"prompt": SHARED, "max_tokens": 11}, 1),
    "prefix-cache hit": ("/v1/completions", {"prompt": SHARED, "max_tokens": 11}, 1),
    "grammar refuses drafts": (
        "/v1/completions", {"prompt": KNOWN, "max_tokens": 30, "structured_outputs": {"regex": "cdef[0-9]{4}gh"}}, 1,
    ),
    "grammar refuses all": (
        "/v1/completions", {"prompt": KNOWN, "max_tokens": 30, "structured_outputs": {"regex": "c[0-9]{4}gh"}}, 1,
    ),
    "grammar: json": (
        "/v1/completions",
        {"prompt": PAIRS + "{", "max_tokens": 30, "structured_outputs": {"json": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}},
        1,
    ),
    "structured": ("/v1/completions", {"prompt": PAIRS + "{", "max_tokens": 30, "structured_outputs": {"regex": "[a-z]{9}"}}, 1),
}  # fmt: skip


def ask(served: Serving, path: str, body: dict[str, Any]) -> Case:
    """One request, and its answer as the client got it, byte for byte what JSON says."""
    sent = {"model": MODEL, "temperature": 0, **body}
    case: Case = {"path": path, "request": sent}
    with httpx.Client(base_url=served.server.url, timeout=60, trust_env=False) as client:
        if not body.get("stream"):
            answer = client.post(path, json=sent)
            assert answer.status_code == 200, answer.text
            return {**case, "response": answer.json()}
        chunks = []
        with client.stream("POST", path, json=sent) as stream:
            assert stream.status_code == 200
            for line in stream.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunks.append(json.loads(line.removeprefix("data: ")))
    return {**case, "chunks": chunks}


def engine_counts(served: Serving) -> dict[str, Any]:
    """What the engine has counted so far: totals, and tokens by position."""
    counts: dict[str, Any] = {
        field: int(served.receiver.totals(metric.value, **{"specdec.source": "engine"}))
        for field, metric in {**METRIC_OF_FIELD, "generations": Metric.GENERATIONS}.items()
    }
    for name, metric in (("accepted_by_position", Metric.POSITION_ACCEPTED), ("proposed_by_position", Metric.POSITION_PROPOSED)):
        counts[name] = [
            int(served.receiver.totals(metric.value, **{"specdec.source": "engine", "specdec.position": position}))
            for position in range(4)
        ]
    return counts


def grown(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [new - old for new, old in zip(value, before[name], strict=True)]
        if isinstance(value, list)
        else value - before[name]
        for name, value in now.items()
    }


def ask_alone(served: Serving, path: str, body: dict[str, Any], generations: int) -> Case:
    """One request with the engine's own counts of it as `truth`."""
    before = engine_counts(served)
    case = ask(served, path, body)
    assert served.receiver.wait(lambda _: engine_counts(served)["generations"] >= before["generations"] + generations, 15)
    truth = grown(engine_counts(served), before)
    assert truth["generations"] == generations
    return {**case, "truth": truth}


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, Path(tmp_path_factory.mktemp("server")), extra_args=SERVER) as served:
        yield served


@pytest.fixture(scope="module")
def provider(served: Serving) -> Iterator[MeterProvider]:
    """This process's own, into the engine's receiver; `force_flush` alone exports."""
    exporter = OTLPMetricExporter(endpoint=f"{served.receiver.http_endpoint}/v1/metrics")
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], Resource.create({"service.name": "tests"}), shutdown_on_exit=False)
    yield provider
    provider.shutdown()


@pytest.fixture(scope="module")
def recorder(provider: MeterProvider) -> SpecDecRecorder:
    return SpecDecRecorder(provider)


@pytest.mark.parametrize("name", ASKED)
def test_a_live_response_says_what_the_engine_counted(served: Serving, recorder: SpecDecRecorder, name: str) -> None:
    path, body, generations = ASKED[name]
    case = ask_alone(served, path, body, generations)
    check_vllm(name, case)
    recorder.record_payload(payload_of(case), method="ngram")
    if generations > 1:
        assert counts_from_payload(payload_of(case)).completion == case["truth"]["completion"]


def test_engine_and_responses_count_the_same_generations_and_nothing_adds_them_up(
    served: Serving, provider: MeterProvider
) -> None:
    # Unlisted requests only: the recorder adds nothing for a response that says nothing about drafts.
    names = [name for name in ASKED if name not in DIFFERENT_VLLM]
    before = engine_counts(served)
    again = SpecDecRecorder(provider)
    recorded_before = response_counts(served)
    for name in names:
        path, body, _ = ASKED[name]
        again.record_payload(payload_of(ask(served, path, body)), session_id="again", model=MODEL, method="ngram")
    assert served.receiver.wait(lambda _: engine_counts(served)["generations"] >= before["generations"] + len(names), 20)
    assert provider.force_flush()
    engine = grown(engine_counts(served), before)
    response = grown(response_counts(served), recorded_before)
    print("engine", engine, "response", response)
    assert response["generations"] == engine["generations"] == len(names)
    assert response["completion"] == engine["completion"]
    sources = {point.attributes["specdec.source"] for point in served.points()}
    assert sources == {"engine", "response"}


def response_counts(served: Serving) -> dict[str, Any]:
    return {
        field: int(served.receiver.totals(metric.value, **{"specdec.source": "response"}))
        for field, metric in {**METRIC_OF_FIELD, "generations": Metric.GENERATIONS}.items()
    }


def record() -> None:
    """Ask everything once and write the answers down."""
    models = ensure_models(ROOT / "build" / "models")
    with tempfile.TemporaryDirectory() as folder, serving(models, Path(folder), extra_args=SERVER) as served:
        from vllm import __version__ as version

        cases = {name: ask_alone(served, *asked) for name, asked in ASKED.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    head = {"engine": f"vllm {version}, ngram, k = 4, {' '.join(SERVER)}, on a CPU",
            "truth": "what our counters in the engine's process grew by"}  # fmt: skip
    text = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    (FOLDER / "vllm").mkdir(exist_ok=True)
    (FOLDER / "vllm" / "openai.json").write_text(f'{{\n{text} "cases": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    record()
