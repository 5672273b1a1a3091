"""A real vLLM server and a receiver for what it exports: what the server tests have in common."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from examples.vllm_demo.otlp_receiver import Exemplar, OtlpReceiver, Point
from examples.vllm_demo.server import VllmServer, otlp_environment, total
from examples.vllm_demo.tiny_model import LETTERS, Models
from examples.vllm_demo.traffic import Answer, Ask, complete, greedy_mix, send_now
from otel_specdec.names import Metric
from tests.vllm.engine import TOTALS

MODEL = "tiny"
KNOWN = LETTERS + "ab"
VLLM = {
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "completion": "vllm:generation_tokens_total",
}


@dataclass
class Serving:
    """A server, its receiver, and every id and text that a client has sent or seen."""

    server: VllmServer
    receiver: OtlpReceiver
    seen: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    def ask(self, asks: Sequence[Ask], at_once: int = 8) -> list[Answer]:
        """Send requests; every one of them must be answered."""
        # On a small machine with something beside it, requests have taken the better part of a minute.
        answers = send_now(self.server.url, MODEL, asks, at_once=at_once, seconds_each=300, seconds=600)
        assert [answer.error for answer in answers if answer.error] == []
        self.seen |= {answer.response_id for answer in answers}
        self.seen |= {value for ask in asks for value in ask.headers.values()}
        self.texts |= set(strings([ask.body for ask in asks]))
        self.texts |= {sequence.text for answer in answers for sequence in answer.sequences}
        return answers

    def totals(self, **filters: str | int) -> dict[str, int]:
        """Our counters' totals as they were last received."""
        return {field: int(self.receiver.totals(metric.value, **filters)) for field, metric in TOTALS.items()}

    def settle(self, generations: int, seconds: float = 15) -> dict[str, int]:
        """Wait until so many finished generations were received in all, and return the totals."""
        arrived = self.receiver.wait(lambda receiver: receiver.totals(Metric.GENERATIONS.value) >= generations, seconds)
        totals = self.totals()
        assert arrived, totals
        assert totals["generations"] == generations
        return totals

    def trimmed(self, **filters: str | int) -> int:
        """Completed tokens that the front ends did not hand on."""
        return int(self.receiver.totals(Metric.TRIMMED.value, **filters))

    def vllm(self) -> dict[str, int]:
        """vLLM's own counters, by our names, over all its engines."""
        samples = self.server.metrics()
        return {name: int(total(samples, metric) or 0) for name, metric in VLLM.items()}

    def points(self) -> list[Point]:
        """The last point of each of our streams."""
        return [point for metric in Metric for point in self.receiver.streams(metric.value)]

    def exemplars(self, response_id: str) -> dict[str, list[Exemplar]]:
        """Every exemplar received that names this response, by metric."""
        found: dict[str, list[Exemplar]] = {}
        for point in self.receiver.points():
            for exemplar in point.exemplars:
                if exemplar.filtered_attributes.get("gen_ai.response.id") == response_id:
                    found.setdefault(point.metric, []).append(exemplar)
        return found


@contextmanager
def serving(
    models: Models,
    folder: Path,
    *,
    protocol: str = "http/protobuf",
    interval_ms: int = 60_000,
    instrument: bool = True,
    extra_args: Sequence[str] = (),
    api_servers: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    """Start both. The export interval is the SDK's own 60 s: what comes sooner comes by our flush of an idle engine.

    `RECEIVER` in an extra argument stands for the receiver's HTTP endpoint.
    """
    with OtlpReceiver() as receiver:
        endpoint = receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint
        server = VllmServer(
            models.target,
            served_name=MODEL,
            instrument=instrument,
            env={
                **otlp_environment(endpoint, service="tests", protocol=protocol, interval_ms=interval_ms),
                **(env or {}),
            },
            extra_args=[
                "--disable-uvicorn-access-log",
                *(each.replace("RECEIVER", receiver.http_endpoint) for each in extra_args),
            ],
            api_servers=api_servers,
            max_num_seqs=32,
            work_dir=folder,
            start_seconds=400,
            progress=_progress(),
        )
        with server:
            yield Serving(server, receiver)
        print(server.log_tail(5))


def _progress() -> Callable[[float, str], None]:
    last = [-30.0]

    def say(elapsed: float, line: str) -> None:
        if elapsed - last[0] >= 30:
            last[0] = elapsed
            print(f"server: {elapsed:.0f} s, {line}", flush=True)

    return say


def short(number: int, max_tokens: int = 3, headers: Mapping[str, str] | None = None) -> list[Ask]:
    """Requests of the same length whose every draft is right."""
    ask = complete("short", KNOWN, max_tokens)
    return [Ask(ask.name, ask.body, headers=headers or {}) for _ in range(number)]


def check_two_hundred_of_three_tokens(serving: Serving, generations_before: int = 0) -> None:
    """200 requests from 32 clients, three tokens each: one by prefill, two of five by one verified block."""
    before = serving.totals()
    before_vllm = serving.vllm()
    answers = serving.ask(short(200), at_once=32)
    assert sum(answer.tokens for answer in answers) == 600
    totals = serving.settle(generations_before + 200)
    grown = {name: totals[name] - before[name] for name in totals}
    assert grown == {
        "accepted": 800,
        "proposed": 800,
        "verify": 200,
        "completion": 600,
        "emitted": 400,
        "generations": 200,
    }
    assert grown["emitted"] / grown["verify"] == 2.0
    after_vllm = serving.vllm()
    reported = {name: after_vllm[name] - before_vllm[name] for name in VLLM}
    assert 1 + reported["accepted"] / reported["drafts"] == 5.0  # what vLLM logs as "Mean acceptance length"
    assert {name: reported[name] for name in ("accepted", "proposed", "completion")} == {
        name: grown[name] for name in ("accepted", "proposed", "completion")
    }


def strings(value: Any) -> Iterator[str]:
    """Every string in a request's body."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings(list(value.values()))
    elif isinstance(value, Sequence):
        for each in value:
            yield from strings(each)


def check_what_clients_got(serving: Serving) -> None:
    """Completion less trimmed is what clients got, to the token, with stop strings and without, streamed or not."""
    before, trimmed_before = serving.totals(), serving.trimmed()
    asks = [*(ask for ask in greedy_mix() if ask.name.startswith("stop string")), *greedy_mix()] * 3
    answers = serving.ask(asks)
    totals = serving.settle(before["generations"] + sum(len(answer.sequences) for answer in answers))
    got = sum(answer.tokens for answer in answers)
    usage = sum(int((answer.usage or {})["completion_tokens"]) for answer in answers)
    assert got == usage
    completed = totals["completion"] - before["completion"]
    assert completed > got
    assert wait_for(lambda: completed - (serving.trimmed() - trimmed_before) == got, 10), (
        completed, serving.trimmed() - trimmed_before, got,
    )  # fmt: skip


def check_no_id_left(serving: Serving) -> None:
    """No id that a client has seen is anywhere in an exported byte, but for the exemplars, which are there to name
    it; and nothing of what clients sent and got in words, exemplars included."""
    assert serving.seen
    texts = {text.encode() for text in serving.texts if len(text) >= 8}  # a shorter one may be a part of some name
    assert texts
    for request in serving.receiver.requests:
        assert not [text for text in texts if text in request.SerializeToString()]
    for request in serving.receiver.requests:
        bare = ExportMetricsServiceRequest.FromString(request.SerializeToString())
        for resource in bare.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.sum.data_points:
                        del point.exemplars[:]
        exported = bare.SerializeToString()
        for each in serving.seen:
            for form in (each, each.removeprefix("cmpl-").removeprefix("chatcmpl-")):
                assert form.encode() not in exported


def check_attributes(serving: Serving, engines: set[int], front_ends: int = 1) -> None:
    """Each engine and front end once, under an index or process of its own; the served name and the method on every
    point."""
    # The server is healthy when one of its API servers is; the others come when they come.
    assert serving.receiver.wait(lambda receiver: len(receiver.streams(Metric.TRIMMED.value)) >= front_ends, 120)
    every = serving.points()
    trimmed = [point for point in every if point.metric == Metric.TRIMMED.value]
    counting = sorted(str(point.attributes["specdec.process"]) for point in trimmed)
    assert counting == [f"api-{number}" for number in range(front_ends)], counting
    points = [point for point in every if point not in trimmed]
    assert {point.attributes["specdec.engine.index"] for point in points} == engines
    assert {point.attributes["specdec.process"] for point in points} == {f"engine-{index}" for index in engines}
    for point in every:
        assert point.attributes["gen_ai.request.model"] == MODEL
        assert point.attributes["gen_ai.provider.name"] == "vllm"
        assert point.attributes["specdec.method"] == "ngram"
        assert point.attributes["specdec.source"] == "engine"
        assert point.scope_name == "otel_specdec"
        assert (point.kind, point.monotonic, point.temporality) == ("sum", True, "cumulative")
    per_engine = len(points) / len(engines)
    assert per_engine == 6 + 2 * 4
    # One stream of each series: nothing was exported twice, by another process or after a restart.
    assert len({(point.metric, tuple(sorted(point.attributes.items()))) for point in every}) == len(every)


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def processes_of(server: VllmServer) -> list[int]:
    """The process ids of the server's own group."""
    pid = server.pid
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == pid:
                    found.append(int(entry.name))
            except ProcessLookupError:
                continue
    return found
