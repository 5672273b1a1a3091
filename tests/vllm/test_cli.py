"""`otel-specdec doctor` and `watch` beside the demo's server, held against the token ids that its clients got."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import VllmServer, free_port, otlp_environment, total
from examples.vllm_demo.tiny_model import Models
from examples.vllm_demo.traffic import Answer, Ask, greedy_mix, send_now, sequences
from tests.vllm.serving import MODEL, VLLM, wait_for


class Live:
    """A server that exports to a port on which now the doctor, now the watch listens."""

    def __init__(self, server: VllmServer, port: int) -> None:
        self.server = server
        self.port = port

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "otel_specdec.cli", *arguments, "--port", str(self.port)]

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        answers = send_now(self.server.url, MODEL, asks)
        assert [answer.error for answer in answers if answer.error] == []
        return answers


@pytest.fixture(scope="module")
def live(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    port = free_port()
    env = otlp_environment(f"http://127.0.0.1:{port}", service="tests", interval_ms=60_000)
    folder = Path(tmp_path_factory.mktemp("server"))
    with VllmServer(
        models.target, served_name=MODEL, instrument=True, env=env, work_dir=folder, start_seconds=400
    ) as server:
        yield Live(server, port)


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    ended = subprocess.run(
        command, env={**plain, **(env or {})}, capture_output=True, text=True, timeout=200, check=False
    )
    return ended.returncode, json.loads(ended.stdout), ended.stderr


def test_the_doctor_finds_everything_in_place_without_importing_vllm(models: Models) -> None:
    """The sixth setup: vLLM under the server, asked with the server's own command line and variables."""
    with OtlpReceiver(grpc=False) as receiver:
        server = VllmServer(models.target, instrument=True, port=1)
        env = otlp_environment(receiver.http_endpoint, service="tests")
        script = (
            "import sys; from otel_specdec.cli.main import main; status = main(sys.argv[1:]); "
            "assert not {'vllm', 'torch'} & set(sys.modules); sys.exit(status)"
        )
        status, found, errors = run([sys.executable, "-c", script, "doctor", "--json", "--", *server.command()], env)
    assert (status, errors) == (0, "")
    by_check = {each["check"]: each for each in found["findings"]}
    assert "engine.vllm.front_end" not in by_check
    assert by_check["engine.vllm"]["says"].endswith("Every hook is there, by its source.")
    assert by_check["endpoint"]["says"] == f"{receiver.http_endpoint}/v1/metrics took an empty export (HTTP 200)."
    for check in ("engine.vllm", "speculation", "entry_points", "auto", "children", "sdk", "endpoint", "exemplars"):
        assert by_check[check]["state"] == "ok", by_check[check]
    assert by_check["trace_headers"]["do"] == "Add --otlp-traces-endpoint URL if clients send traceparent."


def test_the_proof_holds_on_a_live_server(live: Live) -> None:
    status, found, errors = run(live.command("doctor", "--json", "--prove", live.server.url))
    assert status == 0, (found, errors, live.server.log_tail())
    assert {each["state"] for each in found["findings"]} == {"ok"}
    by_check = {each["check"]: each["says"] for each in found["findings"]}
    assert by_check["completion"] == "24 completion tokens were counted, and 24 came back."
    assert by_check["request"].endswith("with 24 token ids.")
    assert "An exemplar names cmpl-" in by_check["exemplar"]


def test_watch_shows_what_the_clients_got(live: Live) -> None:
    watch = subprocess.Popen(
        live.command("watch", "--once", "--json", "--collect", "25"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for(lambda: listens(live.port), 20)
        mix = [ask for ask in greedy_mix() if not ask.body.get("stop")]
        live.ask(mix[-2:])  # an idle engine exports: from here on the windows know what is new
        time.sleep(3)
        answers = live.ask(mix)
        out, errors = watch.communicate(timeout=60)
    finally:
        watch.kill()
        watch.wait(10)
    assert (watch.returncode, errors) == (0, "")
    found = json.loads(out)
    (group,) = found["groups"]
    assert group["attributes"] == {
        "specdec.source": "engine",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": MODEL,
        "specdec.method": "ngram",
    }
    assert (found["errors"], found["dropped_reports"], found["remark"]) == ({}, {}, "")
    minute, start = group["windows"]["1_min"], group["windows"]["since_start"]
    assert minute["totals"]["completion"] == sum(answer.tokens for answer in answers)
    assert minute["generations"] == len(sequences(answers))
    assert set(minute["coverage"].values()) == {1.0}
    # Since the start of the engine, vLLM itself counted the same tokens.
    samples = live.server.metrics()
    assert start["totals"]["completion"] == total(samples, VLLM["completion"])
    assert start["totals"]["accepted"] == total(samples, VLLM["accepted"])
    totals, ratios = minute["totals"], minute["ratios"]
    assert ratios["acceptance_length"] == totals["emitted"] / totals["verify"]
    assert ratios["accept_rate"] == totals["accepted"] / totals["proposed"]
    assert ratios["tokens_per_verify"] == totals["completion"] / totals["verify"]
    # With as many drafts as there were, every k gives at most what was accepted, and one token more.
    lengths = minute["acceptance_length_by_k"]
    assert list(lengths) == ["1", "2", "3", "4"]
    assert lengths["4"] == pytest.approx(1 + totals["accepted"] / totals["verify"])
    tokens = {answer.response_id: answer.tokens for answer in answers if len(answer.sequences) == 1}
    known = [each for each in group["latest"] if each["id"] in tokens]
    assert known
    for each in known:
        # Its share of the last export: the whole, unless a collection came while it ran.
        assert 0 < each["counts"]["completion"] <= tokens[each["id"]]


def listens(port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
