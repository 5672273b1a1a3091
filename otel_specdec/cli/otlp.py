"""OTLP metrics as they come over HTTP on loopback: a small server, and points decoded from what it receives.

Needs opentelemetry-proto (the extra `cli`). The server runs on daemon threads of whoever reads the counters: `watch`,
`doctor --prove`, the demos, tests. Traces and logs are answered and thrown away.
"""

from __future__ import annotations

import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2

from otel_specdec.cli.windows import BY_NAME, Named, Observation
from otel_specdec.names import CHOICE, RESPONSE_ID

AttributeValue = str | bool | int | float | bytes | tuple[Any, ...] | dict[str, Any] | None
Temporality = Literal["cumulative", "delta", "unspecified"]

LOOPBACK: Final = "127.0.0.1"
METRICS_PATH: Final = "/v1/metrics"
PATHS: Final = (METRICS_PATH, "/v1/traces", "/v1/logs")
LONGEST_POST: Final = 64 << 20
"""Bytes, before and after gzip: far above any metrics request, far below the memory."""

_TEMPORALITIES: Mapping[int, Temporality] = {
    metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE: "cumulative",
    metrics_pb2.AGGREGATION_TEMPORALITY_DELTA: "delta",
}


@dataclass(frozen=True)
class Exemplar:
    """One exemplar of a point; trace and span ids in hex, empty where there are none."""

    filtered_attributes: Mapping[str, AttributeValue]
    value: int | float
    time_unix_nano: int
    trace_id: str
    span_id: str


@dataclass(frozen=True)
class Point:
    """One number point of a sum or a gauge, with all that is said about it up to its resource.

    `monotonic` is False and `temporality` "unspecified" for a gauge.
    """

    scope_name: str
    scope_version: str
    scope_attributes: Mapping[str, AttributeValue]
    schema_url: str
    metric: str
    description: str
    unit: str
    kind: Literal["sum", "gauge"]
    monotonic: bool
    temporality: Temporality
    value: int | float
    attributes: Mapping[str, AttributeValue]
    resource_attributes: Mapping[str, AttributeValue]
    start_unix_nano: int
    time_unix_nano: int
    exemplars: tuple[Exemplar, ...]

    @property
    def stream(self) -> tuple[object, ...]:
        """What a cumulative value belongs to: metric, scope, resource, attributes and start time."""
        return (
            self.metric, self.scope_name, _key(self.resource_attributes), _key(self.attributes), self.start_unix_nano,
        )  # fmt: skip

    def matches(self, filters: Mapping[str, AttributeValue]) -> bool:
        """Whether each filtered attribute has that value here; the point's own come before the resource's."""
        return all(
            self.attributes.get(name, self.resource_attributes.get(name)) == value for name, value in filters.items()
        )


def decode(request: ExportMetricsServiceRequest, metric: str | None = None) -> list[Point]:
    """The number points of one request, or those of one metric."""
    points: list[Point] = []
    for resource in request.resource_metrics:
        resource_attributes = _attributes(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for described in scope.metrics:
                kind = described.WhichOneof("data")
                if (metric is not None and described.name != metric) or (kind != "sum" and kind != "gauge"):
                    continue
                series = described.sum if kind == "sum" else described.gauge
                points += (
                    Point(
                        scope_name=scope.scope.name,
                        scope_version=scope.scope.version,
                        scope_attributes=_attributes(scope.scope.attributes),
                        schema_url=scope.schema_url,
                        metric=described.name,
                        description=described.description,
                        unit=described.unit,
                        kind=kind,
                        monotonic=described.sum.is_monotonic,
                        temporality=_TEMPORALITIES.get(described.sum.aggregation_temporality, "unspecified"),
                        value=_number(point),
                        attributes=_attributes(point.attributes),
                        resource_attributes=resource_attributes,
                        start_unix_nano=point.start_time_unix_nano,
                        time_unix_nano=point.time_unix_nano,
                        exemplars=tuple(map(_exemplar, point.exemplars)),
                    )
                    for point in series.data_points
                )
    return points


def observations(request: ExportMetricsServiceRequest) -> tuple[list[Observation], list[Named]]:
    """What one request says of our counters, and the generations that its exemplars name."""
    observed: list[Observation] = []
    named: list[Named] = []
    for point in decode(request):
        metric = BY_NAME.get(point.metric)
        if metric is None:
            continue
        series = metric, _key(point.resource_attributes), _key(point.attributes)
        delta = point.temporality == "delta"
        observed.append(
            Observation(
                metric, series, point.attributes, int(point.value), point.start_unix_nano, point.time_unix_nano, delta
            )
        )
        named += (
            Named(
                metric, series, point.attributes, str(exemplar.filtered_attributes[RESPONSE_ID]),
                str(exemplar.filtered_attributes.get(CHOICE, "")), exemplar.trace_id,
                exemplar.time_unix_nano // 1_000_000, int(exemplar.value),
            )
            for exemplar in point.exemplars
            if RESPONSE_ID in exemplar.filtered_attributes
        )  # fmt: skip
    return observed, named


def _exemplar(exemplar: metrics_pb2.Exemplar) -> Exemplar:
    return Exemplar(
        filtered_attributes=_attributes(exemplar.filtered_attributes),
        value=_number(exemplar),
        time_unix_nano=exemplar.time_unix_nano,
        trace_id=exemplar.trace_id.hex(),
        span_id=exemplar.span_id.hex(),
    )


def _number(holder: metrics_pb2.NumberDataPoint | metrics_pb2.Exemplar) -> int | float:
    return holder.as_int if holder.WhichOneof("value") == "as_int" else holder.as_double


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(map(_value, value.array_value.values))
    if kind == "kvlist_value":
        return dict(_attributes(value.kvlist_value.values))
    result: AttributeValue = None if kind is None else getattr(value, kind)
    return result


def _key(attributes: Mapping[str, AttributeValue]) -> tuple[tuple[str, str], ...]:
    """Attributes as something that hashes; `repr` keeps 1, True and "1" apart."""
    return tuple(sorted((name, repr(value)) for name, value in attributes.items()))


@contextmanager
def listening(port: int, receive: Callable[[str, bytes], None]) -> Iterator[tuple[str, str]]:
    """Receive on a thread of its own, on this port of loopback (0: any).

    Yields its URL, and the variables with which a server exports to it.

    Raises:
        OSError: the port cannot be had, in words.
    """
    try:
        server = HttpServer(port, receive)
    except OSError as error:
        raise OSError(f"port {port} cannot be listened on ({error.strerror}): choose another one with --port") from None
    threading.Thread(target=server.serve_forever, args=(0.05,), name="otlp", daemon=True).start()
    url = f"http://{LOOPBACK}:{server.server_address[1]}"
    variables = "OTEL_METRICS_EXPORTER=otlp OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    try:
        yield url, f"{variables} OTEL_EXPORTER_OTLP_ENDPOINT={url}"
    finally:
        server.close()


class HttpServer(ThreadingHTTPServer):
    """Takes posts on loopback: a thread for each connection, all of them cut by `close`.

    `receive` is called with path and body; its `DecodeError` becomes a 400. OSError where the port is taken; 0 is any.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, receive: Callable[[str, bytes], None]) -> None:
        self.receive = receive
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__((LOOPBACK, port), _Post)

    def close(self) -> None:
        """Stop accepting, free the port, cut what is connected."""
        self.shutdown()
        self.server_close()
        with self._open_lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other end was first

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remember the connection (see `socketserver`)."""
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection (see `socketserver`)."""
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that `close` cut is no news; the default prints a traceback."""


class _Post(BaseHTTPRequestHandler):
    """Answers one connection's posts."""

    protocol_version = "HTTP/1.1"  # keep-alive, as exporters expect
    timeout = 300  # seconds of silence before an abandoned connection gives its thread back
    server: HttpServer

    def do_POST(self) -> None:
        """Hand one export on, and answer with what became of it."""
        length = int(self.headers.get("content-length") or 0)
        if not 0 <= length <= LONGEST_POST:
            self.close_connection = True  # the body is still in the way
            return self._answer(413)
        body = self.rfile.read(length)
        if self.path not in PATHS:
            return self._answer(404)
        if self.headers.get_content_type() != "application/x-protobuf":
            return self._answer(415)
        try:
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            self.server.receive(self.path, body)
        except (DecodeError, OSError, EOFError, zlib.error):
            return self._answer(400)
        return self._answer(200)

    def _answer(self, status: int) -> None:
        """Answer without a body: an empty export response is zero bytes long."""
        self.send_response(status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Not one line a post on the terminal."""
