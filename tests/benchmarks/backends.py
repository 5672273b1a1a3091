"""What clients of a vLLM server feel of a backend that is slow, busy or gone: latency beside that with a good one.

    build/venvs/vllm/bin/python -m tests.benchmarks.backends [--cycles 4] [--requests 120] [--clients 16]

One real server under `opentelemetry-instrument` exports every second. In each cycle the backend is good, then takes
10 s for each answer, then answers 503, then is gone; each time the same requests are sent. Printed are median and
quartiles of the 50th and 99th percentile over the cycles, the difference from the good backend of the same cycle, the
memory of the engine's process before and after, and whether the backend had every token in the end. Needs the
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

from examples.vllm_demo.server import VllmServer, otlp_environment
from examples.vllm_demo.tiny_model import LETTERS, ensure_models
from tests.unit.otlp_backend import Backend
from tests.vllm.serving import processes_of

TOKENS = 32
MODES = ("good", "slow", "busy", "gone")


async def latencies(server: VllmServer, requests: int, clients: int) -> list[float]:
    """Milliseconds of each request, ascending."""
    turn = asyncio.Semaphore(clients)
    found: list[float] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        prompt = LETTERS + LETTERS[: 2 + number % 20]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        async with turn:
            start = time.perf_counter()
            (await client.post("/v1/completions", json=body)).raise_for_status()
            found.append((time.perf_counter() - start) * 1000)

    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
        await asyncio.gather(*(one(client, number) for number in range(requests)))
    return sorted(found)


def engine_mib(server: VllmServer) -> float:
    (pid,) = (pid for pid in processes_of(server) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    fields = Path(f"/proc/{pid}/status").read_text().split()
    return int(fields[fields.index("RssAnon:") + 1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    models = ensure_models(Path(__file__).resolve().parents[2] / "build" / "models")
    backend = Backend()
    backend.slow_s = 10
    port = backend.port
    results: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    sent = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = otlp_environment(f"http://127.0.0.1:{port}", service="benchmark", interval_ms=1000)
        server = VllmServer(
            models.target,
            instrument=True,
            env=environment,
            work_dir=Path(folder),
            max_num_seqs=options.clients,
            extra_args=["--disable-uvicorn-access-log"],
        )
        with server:
            for cycle in range(-1, options.cycles):  # one to warm up
                for mode in MODES:
                    if mode == "gone":
                        backend.stop()
                    else:
                        backend.mode = {"good": "ok"}.get(mode, mode)
                    time.sleep(2)
                    found = asyncio.run(latencies(server, options.requests, options.clients))
                    sent += len(found)
                    if cycle >= 0:
                        results[mode].append((found[len(found) // 2], found[int(0.99 * len(found))]))
                    elif mode == "good":
                        before = engine_mib(server)
                    if mode == "gone":
                        backend = Backend(port)
                        backend.slow_s = 10
            after = engine_mib(server)
            deadline = time.monotonic() + 40
            while backend.last.get("specdec.completion_tokens") != sent * TOKENS and time.monotonic() < deadline:
                time.sleep(0.2)
            got = backend.last.get("specdec.completion_tokens", 0)
    backend.stop()
    for index, title in enumerate(("p50", "p99")):
        good = [pair[index] for pair in results["good"]]
        for mode in MODES:
            values = [pair[index] for pair in results[mode]]
            low, median, high = statistics.quantiles(values, n=4)
            line = f"{title} {mode:5} {median:7.1f} ms, quartiles {low:7.1f} … {high:7.1f}"
            if mode != "good":
                low, middle, high = statistics.quantiles(
                    [100 * (value / base - 1) for value, base in zip(values, good, strict=True)], n=4
                )
                line += f"; beside the good one of its cycle {middle:+.1f} %, {low:+.1f} … {high:+.1f} %"
            print(line)
    print(f"the engine's process: {before:.1f} MiB after the first requests, {after:.1f} MiB at the end")
    print(f"tokens at the backend when it was good again: {got:,} of {sent * TOKENS:,}")


if __name__ == "__main__":
    main()
