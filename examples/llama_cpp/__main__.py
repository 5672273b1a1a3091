from __future__ import annotations

import argparse
import contextlib
import json
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.llama_cpp.adapter import LlamaCpp
from examples.rollouts.replay import Replay, cases
from otel_specdec import SpecDecRecorder, pool

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, path: str, request: dict[str, Any], server: LlamaCpp) -> None:
    """One request, as a client sends it; what comes back is counted as it passes."""
    body = json.dumps(request).encode()
    post = urllib.request.Request(url + path, body, {"content-type": "application/json"})
    with _DIRECT.open(post, timeout=60) as answer:
        if request.get("stream"):
            stream = server.stream()
            for line in answer:
                stream.add(line)
        else:
            server.count(answer.read())


def requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and requests, those for which there is a recorded answer."""
    for name, case in cases("llama_cpp").items():
        if "no speculation" not in name:
            yield case["path"], dict(case["request"])


def show(pooled: Iterable[Any]) -> None:
    for each in pooled:
        print(
            f"{each.attributes['gen_ai.provider.name']}: {each.generations} generations, "
            f"{each.totals['completion']} tokens; accept rate {each.ratios['accept_rate']:.4f}, "
            f"of {each.coverage['accept_rate']:.0%} of the generations"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.llama_cpp")
    parser.add_argument("--server", help="the server's base URL; recorded answers without one")
    options = parser.parse_args()
    reader = InMemoryMetricReader()
    server = LlamaCpp(SpecDecRecorder(MeterProvider([reader]), speculation=True))
    with contextlib.ExitStack() as stack:
        url = options.server or stack.enter_context(Replay("llama_cpp")).url
        for path, request in requests():
            ask(url, path, request, server)
    show(pool(reader.get_metrics_data(), by=["gen_ai.provider.name"]))


if __name__ == "__main__":
    main()
