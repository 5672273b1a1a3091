"""A server that answers what real servers answered to the same requests, recorded in tests/unit/payloads.

For examples and tests without an engine: loopback only, one thread for each connection, ended by `with`. A request that
was not recorded gets 404. Standard library only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

LOOPBACK = "127.0.0.1"
RECORDED = Path(__file__).resolve().parents[2] / "tests" / "unit" / "payloads"

Case = Mapping[str, Any]
"""`path`, `request`, `response` or `chunks`, and `truth`: what the engine itself counted."""


def cases(engine: str) -> dict[str, Case]:
    """The recorded requests and answers of `vllm` or `sglang`, by name."""
    files = sorted((RECORDED / engine).glob("*.json"))
    return {name: case for path in files for name, case in json.loads(path.read_text("utf-8"))["cases"].items()}


class Replay:
    """`with Replay("sglang") as server:` serves at `server.url` until the end of the block."""

    def __init__(self, engine: str) -> None:
        answers: dict[str, Case] = {}
        for case in cases(engine).values():
            answers.setdefault(_key(case["path"], case["request"]), case)
        self._server = ThreadingHTTPServer((LOOPBACK, 0), _handler(answers))
        self._server.daemon_threads = True
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"

    def __enter__(self) -> Replay:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="replay", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _key(path: str, request: Mapping[str, Any]) -> str:
    """What makes two requests the same: not what a gateway adds to learn of the counters."""
    asked = {
        name: value for name, value in request.items() if name not in ("stream_options", "return_spec_tokens_details")
    }
    return f"{path} {json.dumps(asked, sort_keys=True)}"


def _handler(answers: Mapping[str, Case]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            case = answers.get(_key(self.path, request))
            if case is None:
                self._answer(404, "application/json", json.dumps({"error": {"message": "not recorded"}}))
            elif "chunks" in case:
                events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in case["chunks"])
                self._answer(200, "text/event-stream", f"{events}data: [DONE]\n\n")
            else:
                self._answer(200, "application/json", json.dumps(case["response"]))

        def _answer(self, status: int, form: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("content-type", form)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Not one line a request on the terminal."""

    return Handler
