"""An OTLP/HTTP backend on loopback that behaves as badly as it is told to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest


class Backend:
    """Takes metrics on `port` (0: any).

    `mode` says how it takes what comes: `ok`; `slow`, after `slow_s` or once `answer` is set; `busy`, `refuse` and
    `broken`, with an error; anything else, by hanging up. `last` is by metric the sum of the points that it got last,
    `asked` is set when anything came.
    """

    def __init__(self, port: int = 0) -> None:
        self.mode = "ok"
        self.slow_s = 60.0
        self.answer = threading.Event()
        self.asked = threading.Event()
        self.last: dict[str, int] = {}
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                backend.asked.set()
                status = {"ok": 200, "slow": 200, "busy": 503, "refuse": 400, "broken": 500}.get(backend.mode)
                if backend.mode == "slow":
                    backend.answer.wait(backend.slow_s)
                if status is None:  # hangs up
                    self.close_connection = True
                    return
                if status == 200:
                    backend.take(ExportMetricsServiceRequest.FromString(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        serve = {"poll_interval": 0.02}
        threading.Thread(target=self.server.serve_forever, kwargs=serve, daemon=True).start()

    def take(self, request: ExportMetricsServiceRequest) -> None:
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    self.last[metric.name] = sum(point.as_int for point in metric.sum.data_points)

    def stop(self) -> None:
        self.answer.set()
        self.server.shutdown()
        self.server.server_close()
