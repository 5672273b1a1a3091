"""A gateway before an OpenAI-compatible server: it passes requests and answers on, and counts what the answers say.

The counters of a streamed answer come with its last chunks, if they were asked for: the gateway asks
(`stream_options.include_usage`; SGLang's `return_spec_tokens_details` where it is told that there is one), puts the
chunks' counters together as they pass (`StreamedResponse`) and counts them once, at the end. A client that did not ask
for usage does not see the chunks that came for the gateway.

    python -m examples.rollouts.gateway [--upstream http://127.0.0.1:8000] [--port 8080] [--sglang] [--model NAME]

Without an upstream it shows itself on recorded answers of vLLM and SGLang. Loopback and standard library only: an
example, not a proxy for production.
"""

from __future__ import annotations

import argparse
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.rollouts.replay import LOOPBACK, Replay, cases
from otel_specdec import SpecDecRecorder, StreamedResponse, pool

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Gateway:
    """`with Gateway(upstream, recorder) as gateway:` serves at `gateway.url` until the end of the block.

    `sglang`: whether to ask for SGLang's details. `model`: the model's name in the engine's own metrics, where it is
    not the one in its answers.
    """

    def __init__(
        self, upstream: str, recorder: SpecDecRecorder, *, sglang: bool = False, model: str | None = None, port: int = 0
    ) -> None:
        self.upstream = upstream.rstrip("/")
        self.recorder = recorder
        self.model = model
        self.ask_more: dict[str, Any] = {"return_spec_tokens_details": True} if sglang else {}
        self._server = _Server((LOOPBACK, port), _Handler)
        self._server.gateway = self
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def __enter__(self) -> Gateway:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gateway", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, payload: object) -> None:
        """Count one answer."""
        self.recorder.record_payload(payload, model=self.model)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    gateway: Gateway


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        gateway = self.server.gateway
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked_for_usage = bool((request.get("stream_options") or {}).get("include_usage"))
        request |= gateway.ask_more
        if request.get("stream"):
            request["stream_options"] = {**(request.get("stream_options") or {}), "include_usage": True}
        post = urllib.request.Request(
            gateway.upstream + self.path, json.dumps(request).encode(), {"content-type": "application/json"}
        )
        try:
            with _DIRECT.open(post, timeout=60) as answer:
                if request.get("stream"):
                    self._stream(answer, with_usage=asked_for_usage)
                else:
                    body = answer.read()
                    self._answer(200, body)
                    gateway.count(body)
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.read())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, lines: Iterator[bytes], *, with_usage: bool) -> None:
        """Pass events on as they come. Where the client hangs up there is no usage, so nothing to count."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        response = StreamedResponse()
        withheld = False
        try:
            for line in lines:
                response.add(line)
                if line.strip():
                    withheld = not with_usage and _is_for_the_gateway(line)
                if not withheld:  # the empty line after an event goes with it
                    self.wfile.write(line)
        except ConnectionError:
            self.close_connection = True
        self.server.gateway.count(response.payload)

    def log_message(self, format: str, *args: object) -> None:
        """Not one line a request on the terminal."""


def _is_for_the_gateway(line: bytes) -> bool:
    """Whether an event has no choice: the chunks with usage and details."""
    if not line.startswith(b"data: {"):
        return False
    return not json.loads(line.removeprefix(b"data: ")).get("choices")


def post(url: str, path: str, request: dict[str, Any]) -> bytes:
    """What a client gets."""
    body = json.dumps(request).encode()
    with _DIRECT.open(
        urllib.request.Request(url + path, body, {"content-type": "application/json"}), timeout=60
    ) as answer:
        text: bytes = answer.read()
        return text


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rollouts.gateway", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--upstream", help="the server's base URL; recorded answers without one")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--sglang", action="store_true", help="ask for SGLang's details")
    parser.add_argument("--model", help="the model's name in the engine's own metrics")
    options = parser.parse_args()

    reader = InMemoryMetricReader()
    recorder = SpecDecRecorder(MeterProvider([reader]))
    if options.upstream is None:
        for engine in ("vllm", "sglang"):
            with Replay(engine) as server, Gateway(server.url, recorder, sglang=engine == "sglang") as gateway:
                for case in cases(engine).values():
                    if case["path"].startswith("/v1/"):
                        post(gateway.url, case["path"], dict(case["request"]))
    else:
        with Gateway(
            options.upstream, recorder, sglang=options.sglang, model=options.model, port=options.port
        ) as gateway:
            input(f"serving at {gateway.url}; Enter ends it\n")
    for pooled in pool(reader.get_metrics_data(), by=["gen_ai.provider.name"]):
        print(
            f"{pooled.attributes.get('gen_ai.provider.name')}: {pooled.generations} generations, "
            f"accept rate {pooled.ratios['accept_rate']:.4f}"
        )


if __name__ == "__main__":
    main()
