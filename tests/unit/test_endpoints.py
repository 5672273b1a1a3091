"""Whether metrics would get through: asked of real servers on loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from otel_specdec.cli.endpoints import GRPC, HTTP, ask, endpoint_of, shown
from tests.unit.test_doctor import closed_port, receiver

ENDPOINT, METRICS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"


@pytest.mark.parametrize(
    ("exporter", "environ", "endpoint"),
    [
        (HTTP, {}, "http://localhost:4318/v1/metrics"),
        (HTTP, {ENDPOINT: "http://c:4318"}, "http://c:4318/v1/metrics"),
        (HTTP, {ENDPOINT: "http://c:4318/"}, "http://c:4318/v1/metrics"),
        (HTTP, {ENDPOINT: "http://c/base"}, "http://c/base/v1/metrics"),
        (HTTP, {METRICS: "http://c/all/of/it", ENDPOINT: "http://d"}, "http://c/all/of/it"),
        (GRPC, {}, "http://localhost:4317"),
        (GRPC, {ENDPOINT: "http://c:4317"}, "http://c:4317"),
        (GRPC, {METRICS: "c:4317", ENDPOINT: "http://d"}, "c:4317"),
    ],
)
def test_the_endpoint_is_the_one_of_the_exporters(exporter: str, environ: dict[str, str], endpoint: str) -> None:
    assert endpoint_of(exporter, environ) == endpoint


def test_the_endpoint_is_the_one_that_the_http_exporter_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    for environ in ({}, {ENDPOINT: "http://c:4318/"}, {ENDPOINT: "http://c/base"}, {METRICS: "http://c/all"}):
        with monkeypatch.context() as patch:
            for name in (ENDPOINT, METRICS):
                patch.delenv(name, raising=False)
            for name, value in environ.items():
                patch.setenv(name, value)
            exporter = OTLPMetricExporter()
            assert exporter._endpoint == endpoint_of(HTTP, environ)
            exporter.shutdown()


def test_what_may_be_secret_in_an_endpoint_is_not_shown() -> None:
    assert shown("https://me:secret@c:4318/v1/metrics?token=secret") == "https://c:4318/v1/metrics"
    assert shown("c:4317") == "c:4317"


def test_an_empty_export_with_the_headers_of_the_environment_is_taken() -> None:
    with receiver() as (url, posts):
        answer = ask(HTTP, 2, {ENDPOINT: url, "OTEL_EXPORTER_OTLP_HEADERS": "x-token=top%20secret, x-other=1"})
    assert answer.reachable
    ((path, headers, body),) = posts
    assert (path, body, headers["content-type"]) == ("/v1/metrics", b"", "application/x-protobuf")
    assert (headers["x-token"], headers["x-other"]) == ("top secret", "1")
    assert "secret" not in answer.says + answer.do


@pytest.mark.parametrize(
    ("status", "reachable", "says"),
    [
        (404, False, "not to OTLP metrics (HTTP 404)"),
        (302, False, "not to OTLP metrics (HTTP 302)"),
        (401, False, "it wants credentials"),
        (403, False, "it wants credentials"),
        (400, True, "answers (HTTP 400"),
        (429, True, "answers (HTTP 429"),
        (503, False, "answers with HTTP 503"),
    ],
)
def test_every_answer_says_something(status: int, reachable: bool, says: str) -> None:
    with receiver(status) as (url, _):
        answer = ask(HTTP, 2, {ENDPOINT: url})
    assert answer.reachable is reachable
    assert says in answer.says
    assert bool(answer.do) is not reachable


def test_a_redirect_is_not_followed() -> None:
    with receiver() as (other, posts), receiver(302, f"{other}/v1/metrics") as (url, _):
        answer = ask(HTTP, 2, {ENDPOINT: url})
    assert answer.reachable is False
    assert "(HTTP 302)" in answer.says
    assert posts == []


@pytest.mark.parametrize("exporter", [HTTP, GRPC])
def test_a_closed_port(exporter: str) -> None:
    answer = ask(exporter, 2, {ENDPOINT: closed_port()})
    assert answer.reachable is False
    assert "Nothing answers at http://127.0.0.1" in answer.says


@contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("exporter", [HTTP, GRPC])
def test_a_port_that_says_nothing_does_not_hold_us_up(exporter: str) -> None:
    with silent() as url:
        assert ask(exporter, 0.2, {ENDPOINT: url}).reachable is False


def test_a_real_receiver_of_both_protocols_and_each_at_the_other_s_port() -> None:
    with OtlpReceiver() as real:
        http, grpc = {ENDPOINT: real.http_endpoint}, {ENDPOINT: real.grpc_endpoint}
        assert ask(HTTP, 5, http).reachable
        assert ask(GRPC, 5, grpc).reachable
        assert real.points() == []
        crossed = ask(GRPC, 5, http)
        assert crossed.reachable is False
        assert "is it an OTLP/HTTP port?" in crossed.says
        crossed = ask(HTTP, 5, grpc)
        assert crossed.reachable is False


def test_tls_where_there_is_none_is_said() -> None:
    def hang_up(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=(server,), daemon=True).start()
        answer = ask(GRPC, 2, {ENDPOINT: f"https://127.0.0.1:{server.getsockname()[1]}"})
    assert answer.reachable is False
    assert "TLS" in answer.says


def test_grpc_through_a_proxy_is_not_looked_at() -> None:
    answer = ask(GRPC, 2, {ENDPOINT: "http://collector.test:4317", "https_proxy": "http://proxy.test:3128"})
    assert answer.reachable is None
    assert "https_proxy" in answer.says


@pytest.mark.parametrize(
    ("exporter", "url"), [(HTTP, "collector:4318"), (HTTP, "http://[::1"), (GRPC, "unix:///run/c")]
)
def test_an_endpoint_that_is_none(exporter: str, url: str) -> None:
    answer = ask(exporter, 1, {METRICS: url})
    assert not answer.reachable
    assert answer.do
