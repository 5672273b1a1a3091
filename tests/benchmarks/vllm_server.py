"""What a vLLM server feels of it: throughput and p99 with and without, round by round, in one run.

    python -m tests.benchmarks.vllm_server [--rounds 12] [--requests 120] [--clients 16]

Two real servers are up at once, one under `opentelemetry-instrument` with our instrumentor and an OTLP receiver, one
under it with our instrumentor switched off and the same exporter; rounds of the same requests go to one, then to the
other, in changing order. Printed are the medians and, for the spread, the quartiles of the rounds. Needs the
environment `vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import VllmServer, otlp_environment
from examples.vllm_demo.tiny_model import LETTERS, ensure_models


async def round_of(server: VllmServer, requests: int, clients: int) -> tuple[float, float]:
    """Requests a second, and the 99th percentile of their latency in milliseconds."""
    turn = asyncio.Semaphore(clients)
    latencies: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": LETTERS + LETTERS[: 2 + number % 20],
            "max_tokens": 32,
            "temperature": 0,
        }
        async with turn:
            start = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            latencies.append((time.perf_counter() - start) * 1000)

    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(requests)))
        seconds = time.perf_counter() - start
    return requests / seconds, sorted(latencies)[int(0.99 * len(latencies))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    models = ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")
    results: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with OtlpReceiver(grpc=False) as receiver, tempfile.TemporaryDirectory() as folder:
        environment = otlp_environment(receiver.http_endpoint, service="benchmark", interval_ms=5000)
        off = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "specdec_vllm"}
        servers = {
            name: VllmServer(
                models.target,
                instrument=True,
                env=environment | extra,
                work_dir=Path(folder) / name,
                max_num_seqs=options.clients,
                extra_args=["--disable-uvicorn-access-log"],
            )
            for name, extra in (("without", off), ("with", {}))
        }
        with servers["without"], servers["with"]:
            for number in range(-2, options.rounds):  # two to warm up
                order = list(servers) if number % 2 else list(reversed(servers))
                for name in order:
                    result = asyncio.run(round_of(servers[name], options.requests, options.clients))
                    if number >= 0:
                        results[name].append(result)
    for index, title in enumerate(("requests/s", "p99, ms")):
        values = {name: [result[index] for result in each] for name, each in results.items()}
        medians = {name: statistics.median(each) for name, each in values.items()}
        for name, each in values.items():
            low, _, high = statistics.quantiles(each, n=4)
            print(f"{title:12} {name:8} median {medians[name]:8.1f}   quartiles {low:8.1f} … {high:8.1f}")
        pairs = [100 * (b / a - 1) for a, b in zip(values["without"], values["with"], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        print(f"{title:12} with / without, pair by pair: {middle:+.1f} %, quartiles {low:+.1f} … {high:+.1f} %")


if __name__ == "__main__":
    main()
