"""A small OTLP receiver on loopback: metrics over HTTP/protobuf and gRPC, decoded and kept in memory.

It runs in the process of whoever reads the counters (the demo, a test), on daemon threads of its own, and keeps every
request until it goes: right for minutes of traffic, not for days. Traces and logs are answered and thrown away.
Needs opentelemetry-proto; grpcio only where gRPC is on.

    with OtlpReceiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint, ...}
        receiver.wait(lambda received: received.totals("specdec.generations") == 3, seconds=30)
"""

from __future__ import annotations

import gzip
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2

AttributeValue = str | bool | int | float | bytes | tuple[Any, ...] | dict[str, Any] | None
Temporality = Literal["cumulative", "delta", "unspecified"]

_LOOPBACK = "127.0.0.1"
_SERVICES = {  # path of the HTTP post -> name of the gRPC service
    "/v1/metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "/v1/traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "/v1/logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}
_TEMPORALITIES: Mapping[int, Temporality] = {
    metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE: "cumulative",
    metrics_pb2.AGGREGATION_TEMPORALITY_DELTA: "delta",
}
_LONGEST_POST = 64 << 20  # bytes, before and after gzip: far above any metrics request, far below the memory


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


class OtlpReceiver:
    """Receives OTLP on loopback between `start` and `stop`, as often as wanted, always on the same ports.

    Ports given as 0 are chosen at the first start and kept, so a restart looks to an exporter like one receiver that
    was away. A stop closes open connections too: an exporter's kept-alive one would otherwise be served on. What was
    received stays. Every method may be called from any thread.
    """

    def __init__(self, *, http: bool = True, grpc: bool = True, http_port: int = 0, grpc_port: int = 0) -> None:
        """Nothing listens before `start` (or `with`); OSError there if a port is taken."""
        self._wanted = (http, grpc)
        self._ports = [http_port, grpc_port]
        self._http: _HttpServer | None = None
        self._grpc: Any = None  # a grpc.Server: grpcio has no types
        self._arrived = threading.Condition()
        self._requests: list[ExportMetricsServiceRequest] = []
        self._raw: list[bytes] = []

    def __enter__(self) -> OtlpReceiver:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> OtlpReceiver:
        """Listen; does nothing where it listens already."""
        http, grpc = self._wanted
        try:
            if http and self._http is None:
                self._http = _HttpServer(self._ports[0], self._receive)
                self._ports[0] = self._http.server_address[1]
                threading.Thread(
                    target=self._http.serve_forever, args=(0.05,), name="otlp-receiver-http", daemon=True
                ).start()
            if grpc and self._grpc is None:
                self._grpc, self._ports[1] = _start_grpc(self._ports[1], self._receive)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop listening and close every connection; does nothing where nothing listens."""
        if self._http is not None:
            self._http.close()
            self._http = None
        if self._grpc is not None:
            self._grpc.stop(None).wait(5)
            self._grpc = None

    @property
    def http_endpoint(self) -> str:
        """Base URL for OTLP/HTTP (an exporter adds `/v1/metrics`); RuntimeError before the first start."""
        return self._endpoint(0)

    @property
    def grpc_endpoint(self) -> str:
        """URL for OTLP/gRPC, without TLS; RuntimeError before the first start."""
        return self._endpoint(1)

    @property
    def requests(self) -> list[ExportMetricsServiceRequest]:
        """Every metrics request so far, in order of arrival; histograms and the like are found only here."""
        with self._arrived:
            return list(self._requests)

    @property
    def raw(self) -> list[bytes]:
        """The bytes of every metrics request, unpacked where they came with gzip: to search for what must not leak."""
        with self._arrived:
            return list(self._raw)

    def clear(self) -> None:
        """Forget what was received so far."""
        with self._arrived:
            self._requests.clear()
            self._raw.clear()

    def points(self, metric: str | None = None) -> list[Point]:
        """Every number point received, in order of arrival, or those of one metric."""
        return [point for request in self.requests for point in decode(request, metric)]

    def streams(self, metric: str, **filters: AttributeValue) -> list[Point]:
        """The last point of each stream of a metric, narrowed by attributes (as in `totals`)."""
        last: dict[tuple[object, ...], Point] = {}
        for point in self.points(metric):
            known = last.get(point.stream)
            # An exporter's retry may come late; of equal times the later arrival counts.
            if known is None or point.time_unix_nano >= known.time_unix_nano:
                last[point.stream] = point
        return [point for point in last.values() if point.matches(filters)]

    def totals(self, metric: str, **filters: AttributeValue) -> int | float:
        """The sum over a metric's streams of each one's last value; 0 where nothing came (see `streams`).

        A restart of the producer is a new stream (another start time), so its earlier life counts too. Filters are
        attributes of the point, or of its resource: `totals("http.requests", **{"http.method": "GET"})`.
        ValueError for a metric with delta points: their last value is not a total.
        """
        streams = self.streams(metric, **filters)
        if any(point.temporality == "delta" for point in streams):
            raise ValueError(f"{metric} came as deltas")
        return sum(point.value for point in streams)

    def wait(self, ready: Callable[[OtlpReceiver], bool], seconds: float) -> bool:
        """Ask `ready` now and at every arrival, for so many seconds at most; whether it came true."""
        end = time.monotonic() + seconds
        while True:
            with self._arrived:
                seen = len(self._requests)
            if ready(self):  # outside the lock: it may take its time, arrivals go on
                return True
            with self._arrived:
                left = end - time.monotonic()
                if left <= 0 or not self._arrived.wait_for(lambda: len(self._requests) != seen, left):  # noqa: B023
                    return False

    def _endpoint(self, which: int) -> str:
        if not self._ports[which]:
            raise RuntimeError("the receiver was not started, or not for this protocol")
        return f"http://{_LOOPBACK}:{self._ports[which]}"

    def _receive(self, path: str, body: bytes) -> None:
        """Take one post; DecodeError for metrics that are none."""
        if path != "/v1/metrics":
            return
        request = ExportMetricsServiceRequest.FromString(body)
        with self._arrived:
            self._requests.append(request)
            self._raw.append(body)
            self._arrived.notify_all()


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


class _HttpServer(ThreadingHTTPServer):
    """The HTTP half: a thread for each connection, all of them cut by `close`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, receive: Callable[[str, bytes], None]) -> None:
        self.receive = receive
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__((_LOOPBACK, port), _Post)

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
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that `close` cut is no news; the default prints a traceback."""


class _Post(BaseHTTPRequestHandler):
    """Answers one connection's posts."""

    protocol_version = "HTTP/1.1"  # keep-alive, as exporters expect
    timeout = 300  # seconds of silence before an abandoned connection gives its thread back
    server: _HttpServer

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if not 0 <= length <= _LONGEST_POST:
            self.close_connection = True  # the body is still in the way
            return self._answer(413)
        body = self.rfile.read(length)
        if self.path not in _SERVICES:
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


def _start_grpc(port: int, receive: Callable[[str, bytes], None]) -> tuple[Any, int]:
    """Start the gRPC half and return the server and its port."""
    import grpc  # late: not everybody needs it, and it costs tens of milliseconds and threads

    def answer(path: str) -> Callable[[bytes, Any], bytes]:
        def export(body: bytes, context: Any) -> bytes:
            try:
                receive(path, body)
            except DecodeError as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return b""  # an empty export response

        return export

    server = grpc.server(
        futures.ThreadPoolExecutor(4, thread_name_prefix="otlp-receiver-grpc"),
        # without this a taken port is shared in silence, and half of the exports go to somebody else
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _LONGEST_POST)],
    )
    for path, service in _SERVICES.items():
        # no (de)serialisers: the handler gets the raw bytes, which `raw` keeps
        method: Any = grpc.unary_unary_rpc_method_handler(answer(path))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    try:
        bound = server.add_insecure_port(f"{_LOOPBACK}:{port}")
    except RuntimeError as error:
        raise OSError(f"port {port} is taken") from error
    server.start()
    return server, bound
