"""The real SGLang server with our counters, and what they say of a few requests.

    python -m examples.sglang MODEL [--prompt TEXT] [-- any argument of sglang.launch_server ...]

It starts `opentelemetry-instrument python -m sglang.launch_server` with n-gram speculation (or the speculation that you
give), and a small OTLP receiver on loopback; sends a prompt a few times, and prints sums and ratios of sums. To run it
without an accelerator, see docs/sglang.md.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from pathlib import Path

from examples.sglang.server import SglangServer
from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import otlp_environment
from otel_specdec.names import RATIOS, Metric

NGRAM = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]
REQUESTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="abcdefghijklmnopqrstuvwxyzab")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("arguments", nargs="*", help="arguments of sglang.launch_server, after --")
    asked = parser.parse_args()
    speculation = [] if any("speculative-algorithm" in each for each in asked.arguments) else NGRAM
    with OtlpReceiver() as receiver:
        server = SglangServer(
            asked.model,
            served_name=asked.model.name,
            instrument=True,
            env=otlp_environment(receiver.http_endpoint, service="sglang-example"),
            extra_args=[*speculation, *asked.arguments],
            start_seconds=600,
        )
        print("starting the server ...", flush=True)
        with server:
            for _ in range(REQUESTS):
                complete(server.url, server.served_name, asked.prompt, asked.max_tokens)
            if not receiver.wait(lambda it: it.totals(Metric.GENERATIONS.value) >= REQUESTS, seconds=30):
                raise SystemExit("the counters did not arrive:\n" + server.log_tail())
            time.sleep(0.1)
        for metric in Metric:
            if receiver.streams(metric.value) and not metric.value.startswith("specdec.position"):
                print(f"{metric.value:32} {receiver.totals(metric.value)}")
        for ratio, (numerator, denominator) in RATIOS.items():
            top, bottom = (covered(receiver, metric, ratio) for metric in (numerator, denominator))
            print(f"{ratio:32} " + (f"{top / bottom:.3f}" if bottom else "not known here"))


def covered(receiver: OtlpReceiver, metric: Metric, ratio: str) -> float:
    """The sum of the points that may enter this ratio."""
    points = receiver.streams(metric.value)
    return sum(point.value for point in points if ratio in str(point.attributes["specdec.ratio_set"]).split(","))


def complete(url: str, model: str, prompt: str, max_tokens: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300) as answer:
        choice = json.load(answer)["choices"][0]
    print(f"  {choice['text']!r:.70}  ({choice['finish_reason']})", flush=True)


if __name__ == "__main__":
    main()
