"""A small OTLP receiver on loopback: metrics over HTTP/protobuf and gRPC, decoded and kept in memory.

It runs in the process of whoever reads the counters (the demo, a test), on daemon threads of its own, and keeps every
request until it goes: right for minutes of traffic, not for days. Traces and logs are answered and thrown away.
Needs opentelemetry-proto; grpcio only where gRPC is on.

    with OtlpReceiver() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint, ...}
        receiver.wait(lambda received: received.totals("specdec.generations") == 3, seconds=30)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from types import TracebackType
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from otel_specdec.cli.otlp import (
    LONGEST_POST,
    LOOPBACK,
    METRICS_PATH,
    AttributeValue,
    Exemplar,
    HttpServer,
    Point,
    decode,
)

__all__ = ["AttributeValue", "Exemplar", "OtlpReceiver", "Point", "decode"]

_SERVICES = {  # path of the HTTP post -> name of the gRPC service
    METRICS_PATH: "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "/v1/traces": "opentelemetry.proto.collector.trace.v1.TraceService",
    "/v1/logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}


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
        self._http: HttpServer | None = None
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
                self._http = HttpServer(self._ports[0], self._receive)
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
        return f"http://{LOOPBACK}:{self._ports[which]}"

    def _receive(self, path: str, body: bytes) -> None:
        """Take one post; DecodeError for metrics that are none."""
        if path != METRICS_PATH:
            return
        request = ExportMetricsServiceRequest.FromString(body)
        with self._arrived:
            self._requests.append(request)
            self._raw.append(body)
            self._arrived.notify_all()


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
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", LONGEST_POST)],
    )
    for path, service in _SERVICES.items():
        # no (de)serialisers: the handler gets the raw bytes, which `raw` keeps
        method: Any = grpc.unary_unary_rpc_method_handler(answer(path))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    try:
        bound = server.add_insecure_port(f"{LOOPBACK}:{port}")
    except RuntimeError as error:
        raise OSError(f"port {port} is taken") from error
    server.start()
    return server, bound
