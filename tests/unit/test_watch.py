"""The live view: what it shows, on which screen, and how it comes to it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    AGGREGATION_TEMPORALITY_DELTA,
)
from opentelemetry.sdk.metrics import Counter, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, PeriodicExportingMetricReader
from rich.console import Console

from examples.vllm_demo.server import free_port
from otel_specdec import GenerationExemplarFilter, GenerationReport, SpecCounts, SpecDecRecorder, names, views
from otel_specdec.cli import otlp
from otel_specdec.cli.json_api import ApiError
from otel_specdec.cli.main import main
from otel_specdec.cli.prometheus import Prometheus
from otel_specdec.cli.screen import Screen
from otel_specdec.cli.windows import Group, Named, Observation, Windows
from otel_specdec.names import Metric
from tests.unit.scripts import environment

CHAIN = (95, 85, 70, 50, 30)
"""Accepted drafts by position, of 100 steps that proposed five each."""


def observations(model: str, *, source: str = "engine", positions: Sequence[int] = CHAIN) -> Iterator[Observation]:
    accepted = sum(positions)
    full = "accept_rate,acceptance_length,tokens_per_verify"
    values: list[tuple[Metric, str, int]] = [
        (Metric.ACCEPTED, "accept_rate", accepted),
        (Metric.PROPOSED, "accept_rate", 100 * len(positions)),
        (Metric.VERIFY, "acceptance_length,tokens_per_verify", 100),
        (Metric.COMPLETION, "tokens_per_verify", accepted + 120),
        (Metric.EMITTED, "acceptance_length", accepted + 100),
        (Metric.GENERATIONS, full, 1_000),
    ]
    shared = {names.SOURCE: source, names.PROVIDER: "vllm", names.MODEL: model, names.METHOD: "eagle3"}
    for metric, ratio_set, value in values:
        yield Observation(metric, (metric, model, source), {**shared, names.RATIO_SET: ratio_set}, value, 0, 1, True)
    for position, value in enumerate(positions):
        for metric, number in ((Metric.POSITION_ACCEPTED, value), (Metric.POSITION_PROPOSED, 100)):
            attributes = {**shared, names.POSITION: position}
            yield Observation(metric, (metric, model, source, position), attributes, number, 0, 1, True)


def pools(*models: str, **more: Any) -> list[Group]:
    windows = Windows()
    for number, model in enumerate(models):
        found = list(observations(model, **more))
        named = [
            Named(metric, series, attributes, f"chatcmpl-{number:032x}", "0.1", "", 1_000 + number, value)
            for metric, series, attributes, value, *_ in found[:6]
        ]
        windows.observe(found, named)
    return windows.groups()


def screen(groups: list[Group], width: int = 80, height: int = 24, *, color: bool = False, **more: Any) -> list[str]:
    """The lines of one screen."""
    out = StringIO()
    console = Console(
        file=out, width=width, height=height, force_terminal=True, no_color=not color, color_system="standard",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(Screen(groups, "12:00:00 · OTLP/HTTP on http://127.0.0.1:4318", **more))
    text = out.getvalue()
    assert color or not re.search(r"\033\[[0-9;]*3[0-9]", text)
    return re.sub(r"\033\[[0-9;]*m", "", text).rstrip("\n").split("\n")


def names_of(number: int) -> list[str]:
    return [f"meta-llama/Llama-3.{each}-70B-Instruct" for each in range(number)]


def test_one_model_in_full_on_80_by_24() -> None:
    lines = screen(pools("tiny"))
    text = "\n".join(line.rstrip() for line in lines)
    assert text.split("\n", 1)[1] == "\n".join(
        [
            "tokens/verify has tokens of steps without drafts in it: compare it with itself",
            "tiny · eagle3 · vllm engine",
            "            acceptance length accept rate tokens/verify coverage generations",
            "1 min                   4.300       66.0%         4.500     100%       1,000",
            "5 min                   4.300       66.0%         4.500     100%       1,000",
            "since start             4.300       66.0%         4.500     100%       1,000",
            "position accept rate, 5 min               with k = acceptance length",
            "       0 ███████████████████████· 95.0%          1             1.950",
            "       1 ████████████████████···· 85.0%          2             2.800",
            "       2 █████████████████······· 70.0%          3             3.500",
            "       3 ████████████············ 50.0%          4             4.000",
            "       4 ███████················· 30.0%          5             4.300",
            "latest generations, by what they did since the export before",
            f"{time.strftime('%H:%M:%S', time.localtime(1))}  chatcmpl-{0:032x}  [0.1]  length 4.30  accept…",
        ]
    )


@pytest.mark.parametrize("models", [0, 1, 2, 3, 4, 5, 19, 20, 21, 40, 200])
@pytest.mark.parametrize("size", [(80, 24), (120, 50), (60, 12), (80, 4)])
def test_a_screen_fits_its_terminal(models: int, size: tuple[int, int]) -> None:
    width, height = size
    lines = screen(pools(*names_of(models)), width, height, remarks=["a remark"])
    assert len(lines) <= max(height, 6)  # a head and a line of it, however low
    assert max(map(len, lines)) <= width


def test_twenty_models_on_80_by_24_have_a_line_each() -> None:
    lines = screen(pools(*names_of(20)))
    assert len(lines) == 24
    for number in range(20):
        (line,) = [line for line in lines if re.match(rf"meta-llama/Llama-3\.{number}-70B-Instruct ", line)]
        assert re.search(r" 4\.300 +66\.0% +4\.500 +100% +1,000$", line.rstrip())


def test_where_there_are_more_models_than_lines_it_shows_the_busiest_and_says_so() -> None:
    windows = Windows()
    for number, model in enumerate(names_of(40)):
        windows.observe(observations(model, positions=[number, 0]))
    lines = screen(windows.groups())
    assert "… and 21 with less to do: enlarge the terminal, or choose with --model" in lines[-1]
    shown = [int(match[1]) for line in lines if (match := re.match(r"meta-llama/Llama-3\.(\d+)-", line))]
    assert shown == sorted(range(21, 40), key=str)


def test_what_all_have_in_common_is_in_the_head_and_names_are_cut_in_the_middle() -> None:
    windows = Windows()
    for number, model in enumerate(names_of(8)):
        windows.observe(observations(model, source="engine" if number % 2 else "response"))
    lines = screen(windows.groups(), 70)
    assert lines[2].startswith("5 min · eagle3 ")
    assert lines[3].split() == ["model", "counted", "by", "length", "rate", "verify", "age", "ations"]
    assert lines[4].startswith("Llama-3.…nstruct vllm engine ")


def test_engine_and_responses_are_never_one_line() -> None:
    windows = Windows()
    for source in ("engine", "response"):
        windows.observe(observations("tiny", source=source))
    text = "\n".join(screen(windows.groups(), height=60))
    assert "tiny · eagle3 · vllm engine" in text
    assert "tiny · eagle3 · vllm response" in text


def test_a_ratio_without_denominator_is_a_dash() -> None:
    windows = Windows()
    windows.observe(each for each in observations("tiny") if each.metric is Metric.COMPLETION)
    (line,) = [line.rstrip() for line in screen(windows.groups()) if line.startswith("5 min")]
    assert line == "5 min                       –           –             –        –           0"


def test_coverages_that_differ_are_told_apart() -> None:
    windows = Windows()
    windows.observe(
        each._replace(attributes={**each.attributes, names.RATIO_SET: "acceptance_length"})
        for each in observations("tiny")
        if each.metric is Metric.GENERATIONS
    )
    assert " 100/0/0 " in screen(windows.groups())[5]


# Real exports


def record(provider: MeterProvider, number: int, model: str = "tiny") -> None:
    counts = SpecCounts(accepted=10, proposed=16, verify=4, completion=15, emitted=14)
    report = GenerationReport(
        f"cmpl-{number}", counts, model=model, provider="vllm", method="eagle", accepted_by_position=(4, 3, 2, 1),
        proposed_by_position=(4, 4, 4, 4),
    )  # fmt: skip
    SpecDecRecorder(provider).record(report)


@contextmanager
def exporting(port: int, temporality: AggregationTemporality) -> Iterator[MeterProvider]:
    exporter = OTLPMetricExporter(
        f"http://127.0.0.1:{port}/v1/metrics", preferred_temporality={Counter: temporality}, timeout=5
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    provider = MeterProvider([reader], views=views(), exemplar_filter=GenerationExemplarFilter())
    yield provider
    provider.shutdown()


def started(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "otel_specdec.cli", "watch", *arguments]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Whatever happens, it does not stay."""
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def wait_for_port(port: int) -> None:
    import socket

    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


@pytest.mark.parametrize("temporality", [AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA])
def test_once_as_json_of_real_exports_of_either_temporality(temporality: AggregationTemporality) -> None:
    port = free_port()
    process = started("--once", "--json", "--collect", "2.5", "--port", str(port))
    with ended(process):
        wait_for_port(port)
        with exporting(port, temporality) as provider:
            record(provider, 1)
            provider.force_flush()
            record(provider, 2)
            record(provider, 3)
            provider.force_flush()
            out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    (group,) = json.loads(out)["groups"]
    assert group["attributes"] == {
        names.SOURCE: "response", names.PROVIDER: "vllm", names.MODEL: "tiny", names.METHOD: "eagle",
    }  # fmt: skip
    pooled = group["windows"]["since_start"]
    assert pooled["totals"] == {"accepted": 30, "proposed": 48, "verify": 12, "completion": 45, "emitted": 42}
    assert pooled["generations"] == 3
    assert pooled["ratios"] == {"acceptance_length": 3.5, "accept_rate": 0.625, "tokens_per_verify": 3.75}
    assert pooled["accept_rate_by_position"] == {"0": 1.0, "1": 0.75, "2": 0.5, "3": 0.25}
    assert pooled["acceptance_length_by_k"] == {"1": 2.0, "2": 2.75, "3": 3.25, "4": 3.5}
    assert group["windows"]["1_min"] == pooled  # it began while we watched
    assert {each["id"] for each in group["latest"]} == {"cmpl-1", "cmpl-2", "cmpl-3"}
    assert group["latest"][0]["counts"] == {
        "accepted": 10, "proposed": 16, "verify": 4, "completion": 15, "emitted": 14,
    }  # fmt: skip


def test_of_a_request_ours_alone_is_taken_with_its_temporality_and_its_named_exemplars() -> None:
    request = ExportMetricsServiceRequest()
    scope = request.resource_metrics.add().scope_metrics.add()
    delta, cumulative = AGGREGATION_TEMPORALITY_DELTA, AGGREGATION_TEMPORALITY_CUMULATIVE
    for name, temporality in (
        ("specdec.verify_steps", delta),
        ("specdec.verify_steps", cumulative),
        ("http.requests", cumulative),
    ):
        metric = scope.metrics.add(name=name)
        metric.sum.aggregation_temporality = temporality
        point = metric.sum.data_points.add(as_int=5, start_time_unix_nano=1, time_unix_nano=2)
        point.exemplars.add(as_int=5, time_unix_nano=3_000_000)  # of a trace, say
        exemplar = point.exemplars.add(as_int=5, time_unix_nano=3_000_000)
        exemplar.filtered_attributes.add(key=names.RESPONSE_ID).value.string_value = "cmpl-1"
    observed, named = otlp.observations(request)
    assert [(each.metric, each.value, each.start, each.time, each.delta) for each in observed] == [
        (Metric.VERIFY, 5, 1, 2, True),
        (Metric.VERIFY, 5, 1, 2, False),
    ]
    assert [(each.response_id, each.time_ms, each.value) for each in named] == [("cmpl-1", 3, 5)] * 2


def test_once_where_nothing_arrives_is_status_1_and_says_how_to_export(capsys: Any) -> None:
    port = free_port()
    assert main(["watch", "--once", "--wait", "0.1", "--port", str(port)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing heard yet" in out
    assert f"OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:{port}" in out


def test_a_port_that_is_taken_is_status_1(capsys: Any) -> None:
    with prometheus({}) as (url, _):
        port = url.rsplit(":", 1)[1]
        assert main(["watch", "--once", "--port", port]) == 1
    assert f"port {port} cannot be listened on" in capsys.readouterr().err


def test_live_on_a_terminal_it_draws_in_place_follows_a_resize_and_ends_with_ctrl_c() -> None:
    port = free_port()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "otel_specdec.cli", "watch", "--port", str(port), "--refresh", "0.2"],
        env=environment(TERM="xterm-256color"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 65_536):
                shown.append(part)
        except OSError:
            pass

    reading = Thread(target=read, daemon=True)
    reading.start()
    with ended(process):
        wait_for_port(port)
        with exporting(port, AggregationTemporality.CUMULATIVE) as provider:
            for number, model in enumerate(names_of(20)):
                record(provider, number, model)
            provider.force_flush()
            assert arrives(shown, b"Llama-3.19-")
            assert b"acceptance length" not in b"".join(shown)  # 20 models on 24 lines: a line each
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 140, 100, 0, 0))
            os.killpg(process.pid, signal.SIGWINCH)
            assert arrives(shown, b"acceptance length")  # now there is room for more
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
        assert process.wait(20) == 0
    reading.join(5)
    os.close(ours)
    text = b"".join(shown)
    assert b"Traceback" not in text
    assert text.count(b"\033[?1049h") == text.count(b"\033[?1049l") == 1  # the other screen, and back
    assert text.rindex(b"\033[?25h") > text.rindex(b"\033[?25l")  # the cursor is there again


def arrives(shown: list[bytes], what: bytes, seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while what not in b"".join(shown):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_live_without_a_terminal_it_prints_plain_screens_and_ends_when_told(how: signal.Signals, status: int) -> None:
    port = free_port()
    process = started("--port", str(port), "--refresh", "0.2")
    with ended(process):
        wait_for_port(port)
        with exporting(port, AggregationTemporality.CUMULATIVE) as provider:
            record(provider, 1)
            provider.force_flush()
        time.sleep(1)
        process.send_signal(how)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (status, "")
    assert "\033" not in out
    assert out.count("tiny · eagle · vllm response") > 1


def test_a_reader_that_has_read_enough_ends_it_without_a_word() -> None:
    port = free_port()
    process = started("--json", "--port", str(port), "--refresh", "0.1")
    with ended(process):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["groups"] == []
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_model_narrows_what_is_shown() -> None:
    port = free_port()
    process = started("--once", "--json", "--collect", "2", "--model", "3.1", "--port", str(port))
    with ended(process):
        wait_for_port(port)
        with exporting(port, AggregationTemporality.CUMULATIVE) as provider:
            for number, model in enumerate(names_of(3)):
                record(provider, number, model)
            provider.force_flush()
        out, _ = process.communicate(timeout=30)
    assert [group["attributes"][names.MODEL] for group in json.loads(out)["groups"]] == names_of(3)[1:2]


# A Prometheus: its API from a table here, itself in tests/collector/test_watch.py


@contextmanager
def prometheus(answers: Mapping[str, object], status: int = 200) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serves `answers` by the last part of the path; and what was asked: path, authorization."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            asked.append((f"{self.path} {body['query'][0]}", self.headers.get("authorization", "")))
            data = json.dumps({"status": "success", "data": answers[self.path.rsplit("/", 1)[1]]}).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


LABELS = {
    "__name__": "specdec_verify_steps_total",
    "gen_ai_request_model": "m",
    "specdec_method": "eagle",
    "specdec_source": "engine",
    "specdec_ratio_set": "acceptance_length",
    "job": "server",
}


@pytest.mark.parametrize("dots", [False, True])
def test_prometheus_names_of_either_translation_are_read(dots: bool) -> None:
    labels = LABELS
    if dots:  # translation_strategy: NoTranslation
        labels = {name.replace("gen_ai_request_", "gen_ai.request.").replace("specdec_", "specdec."): value
                  for name, value in LABELS.items()} | {"__name__": "specdec.verify_steps"}  # fmt: skip
    table = {"query": {"resultType": "matrix", "result": [{"metric": labels, "values": [[10.5, "1"], [20, "3"]]}]}}
    with prometheus(table) as (url, asked):
        first, second = Prometheus(url).samples(60)
    assert first.metric is Metric.VERIFY
    assert (first.value, first.time, second.value) == (1, 10_500_000_000, 3)
    assert first.series == second.series
    assert first.attributes == {
        names.MODEL: "m", names.METHOD: "eagle", names.SOURCE: "engine", names.RATIO_SET: "acceptance_length",
    }  # fmt: skip
    assert asked[0][0].endswith("[60s]")


def test_prometheus_with_a_password_gets_it_and_nobody_sees_it() -> None:
    with prometheus({"query": {"result": []}}) as (url, asked):
        client = Prometheus(url.replace("//", "//me:sec%20ret@"))
        assert client.samples(60) == []
    assert asked[0][1] == "Basic bWU6c2VjIHJldA=="
    assert "ret@" not in client.url


def test_what_prometheus_does_not_do_is_an_error_that_says_it() -> None:
    with prometheus({"query": {}}, status=503) as (url, _), pytest.raises(ApiError, match="HTTP 503"):
        Prometheus(url).samples(60)
    with pytest.raises(ApiError, match="does not answer"):
        Prometheus(url).samples(60)
    with pytest.raises(ApiError, match="no http"):
        Prometheus("localhost:9090")
    with prometheus({}) as (url, _), pytest.raises(ApiError):
        Prometheus(url).samples(60)


def test_watch_reads_windows_and_generations_from_a_prometheus_at_once(capsys: Any) -> None:
    now = time.time()
    exemplar = {"labels": {"gen_ai_response_id": "cmpl-1"}, "value": "4", "timestamp": now - 5}
    table = {
        "query": {"result": [{"metric": LABELS, "values": [[now - 100, "10"], [now - 40, "14"], [now - 2, "15"]]}]},
        "query_exemplars": [{"seriesLabels": LABELS, "exemplars": [exemplar]}],
    }
    with prometheus(table) as (url, _):
        assert main(["watch", "--once", "--json", "--prometheus", url]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["windows"]["1_min"]["totals"] == {"verify": 5}
    assert group["windows"]["since_start"]["totals"] == {"verify": 15}
    assert [(each["id"], each["counts"]) for each in group["latest"]] == [("cmpl-1", {"verify": 4})]


def test_pool_says_what_every_smaller_k_would_have_given() -> None:
    from otel_specdec import pool

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    record(provider, 1)
    (pooled,) = pool(reader.get_metrics_data())
    assert pooled.acceptance_length_by_k == {1: 2.0, 2: 2.75, 3: 3.25, 4: 3.5}
    provider.shutdown()
