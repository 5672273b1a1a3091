"""The real engine and the real server on this machine's CPU, and what a client is told of each generation."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.sglang.server import SglangServer
from examples.vllm_demo.otlp_receiver import OtlpReceiver, Point
from examples.vllm_demo.server import LOOPBACK, otlp_environment, total
from examples.vllm_demo.tiny_model import Models
from otel_specdec.names import Metric
from tests.vllm.engine import TOTALS

KERNELS = Path(__file__).with_name("cpu_kernels")
CPU = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(KERNELS)}
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "mem_fraction_static": 0.4,
    "max_running_requests": 4,
    "max_total_tokens": 2048,
    "context_length": 512,
    "disable_radix_cache": True,
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
}
MODEL = "tiny"
GREEDY = {"temperature": 0, "ignore_eos": True}
KNOWN = "abcdefghijklmnopqrstuvwxyzab"
"""A prompt that the tiny model goes on with as the alphabet, so that drafts are right where the trie knows it."""


def arguments(**settings: Any) -> list[str]:
    """The settings as the server's command line has them."""
    found = ["--skip-server-warmup"]
    for name, value in {**SETTINGS, **settings}.items():
        if value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return found


def told(answers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What final answers say of themselves, summed; one that ended at the prefill says nothing of drafts."""
    sums = dict.fromkeys(("accepted", "verify", "completion", "emitted", "generations"), 0)
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["finish_reason"] is not None
        verify, accepted = meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0)
        steps = meta.get("spec_correct_drafts_histogram", [])
        assert (sum(steps), sum(k * number for k, number in enumerate(steps))) == (verify, accepted)
        sums["accepted"] += accepted
        sums["verify"] += verify
        sums["completion"] += meta["completion_tokens"]
        sums["emitted"] += meta["completion_tokens"] - 1 - meta["num_retractions"]
        sums["generations"] += 1
    return sums


@dataclass
class Serving:
    """A server, its receiver, and every id that a client has seen."""

    server: SglangServer
    receiver: OtlpReceiver
    seen: set[str] = field(default_factory=set)

    def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(
            self.server.url + path, json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
            data = answer.read()
        return json.loads(data) if data else None

    def answer(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """A request's `response`, or the `chunks` of its stream."""
        body = json.dumps(request).encode()
        ask = urllib.request.Request(self.server.url + path, body, {"content-type": "application/json"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=120) as answer:
            if not request.get("stream"):
                return {"response": json.loads(answer.read())}
            return {"chunks": [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]}

    def generate(
        self, prompt: str | list[str], *, headers: Mapping[str, str] | None = None, **request: Any
    ) -> list[Any]:
        """The final answers of `/generate`."""
        sampling = {**GREEDY, **request.pop("sampling", {})}
        answers = self.post("/generate", {"text": prompt, "sampling_params": sampling, **request}, headers)
        answers = answers if isinstance(answers, list) else [answers]
        self.seen |= {answer["meta_info"]["id"] for answer in answers}
        return answers

    def stream(
        self, prompt: str, *, hang_up_after: int | None = None, abort_after: int | None = None, **request: Any
    ) -> list[Any]:
        """The parts of a streamed answer; the client may hang up after so many, or have the request aborted."""
        sampling = {**GREEDY, **request.pop("sampling", {})}
        connection = http.client.HTTPConnection(LOOPBACK, self.server.port, timeout=120)
        try:
            body = json.dumps({"text": prompt, "sampling_params": sampling, "stream": True, **request})
            connection.request("POST", "/generate", body, {"content-type": "application/json"})
            parts = []
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    parts.append(json.loads(line[6:]))
                    self.seen.add(parts[-1]["meta_info"]["id"])
                    if len(parts) == abort_after:
                        self.post("/abort_request", {"rid": parts[-1]["meta_info"]["id"]})
                    if len(parts) == hang_up_after:
                        break
            return parts
        finally:
            connection.close()

    def totals(self, **filters: str | int) -> dict[str, int]:
        """Our counters' totals as they were last received; without proposed tokens where there is no point of them."""
        return {
            name: int(self.receiver.totals(metric.value, **filters))
            for name, metric in TOTALS.items()
            if self.receiver.streams(metric.value)
        }

    def settle(self, generations: int, seconds: float = 20) -> dict[str, int]:
        """Wait until so many finished generations were received in all, and return the totals."""
        arrived = self.receiver.wait(lambda receiver: receiver.totals(Metric.GENERATIONS.value) >= generations, seconds)
        totals = self.totals()
        assert arrived, (totals, self.server.log_tail())
        assert totals["generations"] == generations
        return totals

    def verify_calls(self) -> int:
        """SGLang's own counter of verify steps."""
        return int(total(self.server.metrics(), "sglang:spec_verify_calls_total") or 0)

    def points(self) -> list[Point]:
        """The last point of each of our streams."""
        return [point for metric in Metric for point in self.receiver.streams(metric.value)]

    def lines(self) -> list[str]:
        """Our own lines in the server's log."""
        return [line for line in self.server.log_path.read_text().splitlines() if "otel_specdec counts" in line]


@contextmanager
def serving(
    models: Models,
    folder: Path,
    *,
    instrument: bool = True,
    env: Mapping[str, str] | None = None,
    extra_args: Sequence[str] = (),
    **settings: Any,
) -> Iterator[Serving]:
    """Start both. The export interval is the SDK's own 60 s: what comes sooner comes by our flush of an idle engine."""
    with OtlpReceiver() as receiver:
        server = SglangServer(
            models.target,
            served_name=MODEL,
            instrument=instrument,
            env={**otlp_environment(receiver.http_endpoint, service="tests", interval_ms=60_000), **CPU, **(env or {})},
            extra_args=[*arguments(**settings), *extra_args],
            work_dir=folder,
            start_seconds=500,
            progress=_progress(),
        )
        with server:
            yield Serving(server, receiver)
        print(server.log_tail(5))


def _progress() -> Any:
    last = [-30.0]

    def say(elapsed: float, _line: str) -> None:
        if elapsed - last[0] >= 30:
            last[0] = elapsed
            print(f"server: {elapsed:.0f} s", flush=True)

    return say


def check_points(serving: Serving, processes: int) -> None:
    """Every point says whose it is; each process has each series once; no id that a client has seen was exported."""
    points = serving.points()
    assert len({point.attributes["specdec.process"] for point in points}) == processes
    for point in points:
        assert point.scope_name == "otel_specdec"
        assert (point.kind, point.monotonic, point.temporality) == ("sum", True, "cumulative")
        assert point.attributes["gen_ai.request.model"] == MODEL
        assert point.attributes["gen_ai.provider.name"] == "sglang"
        assert point.attributes["specdec.method"] == "ngram"
        assert point.attributes["specdec.source"] == "engine"
        assert point.attributes["specdec.engine.index"] == 0
        assert str(point.attributes["specdec.process"]).startswith("tokenizer-")
    assert len({(point.metric, tuple(sorted(point.attributes.items()))) for point in points}) == len(points)
    assert serving.seen
    for id_ in serving.seen:
        # The exemplars alone may hold it, and they say so under their own key.
        for point in points:
            assert id_ not in map(str, point.attributes.values())
