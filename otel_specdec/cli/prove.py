"""`otel-specdec doctor --prove`: a known request to a live, idle server, and what its counters say of it.

The counters are read from a Prometheus, or from an OTLP port of the doctor's own that the server exports to. What an
engine counted before is taken off: by its values in Prometheus, or, at the own port, by the export that an earlier
request of the doctor's brought about (an idle engine exports after half a second). So on the own port the request is
sent again until the engine that served it had been heard of before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from otel_specdec import names
from otel_specdec.cli.findings import PROBLEM, Finding, State, Topic, exit_status, show
from otel_specdec.cli.json_api import ApiError, ask
from otel_specdec.cli.prometheus import Prometheus
from otel_specdec.cli.windows import FIELDS, Named, Observation
from otel_specdec.names import Metric

PROOF: Final = Topic("Proof")
_TOKENS: Final = 24
_PROMPT: Final = "one two three four one two three four one two three four one two"
"""It repeats itself, so that n-gram drafts are found."""
_ROUNDS: Final = 4
_LOOKBACK: Final = 300
_FLUSHED: Final = 2.0
"""Seconds after an answer in which an idle engine has exported what it did: half a second, and the way."""


class ProofError(RuntimeError):
    """The proof cannot be made; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What the client got: the response's id, and how many tokens; `by` says where that number is from."""

    response_id: str
    tokens: int
    by: str


class Server:
    """An OpenAI-compatible server; a key is taken from OPENAI_API_KEY, and never shown."""

    def __init__(self, url: str, seconds: float) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self._seconds = seconds

    def model(self) -> str:
        """The first served model, whose name is on the counters."""
        models = self._ask("/v1/models").get("data") or ()
        if not models:
            raise ProofError(f"{self._base} serves no model")
        return str(models[0]["id"])

    def complete(self, model: str) -> Answer:
        """Send the known request. Where no token ids are returned, its usage tells their number."""
        body = {
            "model": model,
            "prompt": _PROMPT,
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._ask("/v1/completions", body)
        ids = [choice.get("token_ids") for choice in answer.get("choices", ())]
        if ids and all(isinstance(each, list) for each in ids):
            return Answer(str(answer.get("id")), sum(map(len, ids)), "token ids")
        tokens = (answer.get("usage") or {}).get("completion_tokens")
        if not isinstance(tokens, int):
            raise ProofError(f"{self._base} returns neither token ids nor their number")
        return Answer(str(answer.get("id")), tokens, "tokens by its usage")

    def _ask(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        found = ask(self._base + path, self._seconds, data, headers)
        if not isinstance(found, dict):
            raise ProofError(f"{self._base}{path} is no OpenAI-compatible API")
        return found


@dataclass
class Seen:
    """The last value of every series of one model, counted in the engine; deltas are added up, from 0."""

    model: str
    values: dict[Hashable, Observation] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    deltas: bool = False

    def take(self, observations: list[Observation], named: list[Named]) -> None:
        """Add what came."""
        for now in observations:
            attributes = now.attributes
            if attributes.get(names.MODEL) != self.model or attributes.get(names.SOURCE) != names.ENGINE:
                continue
            last = self.values.get(now.series)
            if last is not None and now.time <= last.time:
                continue
            if now.delta:
                self.deltas = True
                now = now._replace(value=now.value + (last.value if last else 0))
            self.values[now.series] = now
        self.named.update(each.response_id for each in named)


@dataclass(frozen=True)
class Increase:
    """What was added between two looks: by counter; and whether something appeared whose earlier value is not known."""

    counts: Mapping[Metric, int]
    strangers: bool


def increase(before: Seen, after: Seen) -> Increase:
    """What was added in between; of a series that is new, only what began anew is known."""
    counts: Counter[Metric] = Counter()
    strangers = False
    latest = max((each.time for each in before.values.values()), default=0)
    for series, now in after.values.items():
        last = before.values.get(series)
        if last is not None:
            value = now.value - last.value if now.value >= last.value and now.start == last.start else now.value
        elif after.deltas or 0 < latest < now.start:
            value = now.value
        else:
            strangers = strangers or now.value > 0
            continue
        counts[now.metric] += value
    return Increase(counts, strangers)


Look = Callable[[], Seen]


@contextmanager
def _own_port(port: int, model: str) -> Iterator[tuple[Look, str]]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    from otel_specdec.cli.otlp import METRICS_PATH, listening, observations

    seen, lock = Seen(model), threading.Lock()

    def receive(path: str, body: bytes) -> None:
        if path == METRICS_PATH:
            came = observations(ExportMetricsServiceRequest.FromString(body))
            with lock:
                seen.take(*came)

    def look() -> Seen:
        with lock:
            return Seen(model, dict(seen.values), set(seen.named), deltas=seen.deltas)

    with listening(port, receive) as (url, variables):
        how = f"The server must export to it: {variables}"
        print(f"Listening for OTLP/HTTP on {url}. {how}", file=sys.stderr, flush=True)
        yield look, how


@contextmanager
def _by_prometheus(url: str, model: str) -> Iterator[tuple[Look, str]]:
    prometheus = Prometheus(url)

    def look() -> Seen:
        seen = Seen(model)
        seen.take(prometheus.samples(_LOOKBACK), prometheus.exemplars(_LOOKBACK, time.time()))
        return seen

    yield (
        look,
        f"Ask {prometheus.url} for specdec_generations_total, and run `otel-specdec doctor` where the server runs.",
    )


def run(options: argparse.Namespace) -> int:
    """Send, read, compare, print; returns the exit status."""
    try:
        findings = prove(options)
    except (ProofError, ApiError, OSError) as error:
        if options.json:
            show([PROOF.problem("proof", str(error), "See `otel-specdec doctor --help`.")], as_json=True)
        else:
            print(f"otel-specdec doctor: {error}", file=sys.stderr)
        return PROBLEM
    show(findings, as_json=options.json)
    return exit_status(findings)


def prove(options: argparse.Namespace) -> list[Finding]:
    """The findings of one proof."""
    server = Server(options.prove, max(60.0, options.timeout))
    model = server.model()
    feed = _by_prometheus(options.prometheus, model) if options.prometheus else _own_port(options.port, model)
    with feed as (look, how):
        end = time.monotonic() + options.wait
        for _ in range(_ROUNDS):
            before = look()
            answer = server.complete(model)
            after = _wait(look, before, end, 0.2 if not options.prometheus else 1.0)
            grown = increase(before, after)
            if grown.counts.get(Metric.GENERATIONS):
                _settle(look, answer, end)
                return [_sent(model, answer), *judge(answer, grown.counts), _named(answer, look())]
            if not grown.strangers:
                break
        return [
            _sent(model, answer),
            PROOF.problem(
                "arrived",
                f"No finished generation of model {model} was counted within {options.wait:g} s.",
                how,
            ),
        ]


def _wait(look: Look, before: Seen, end: float, pause: float) -> Seen:
    """Look again until a generation is counted or the time is over; strangers are given time to export all they did."""
    answered = time.monotonic()
    while True:
        after = look()
        grown = increase(before, after)
        flushed = grown.strangers and time.monotonic() > answered + _FLUSHED
        if grown.counts.get(Metric.GENERATIONS) or flushed or time.monotonic() > end:
            return after
        time.sleep(pause)


def _settle(look: Look, answer: Answer, end: float) -> None:
    """Exemplars are stored a moment after their samples."""
    soon = min(end, time.monotonic() + 3)
    while answer.response_id not in look().named and time.monotonic() < soon:
        time.sleep(0.2)


def _sent(model: str, answer: Answer) -> Finding:
    return PROOF.ok("request", f"{model} answered {answer.response_id} with {answer.tokens} {answer.by}.")


def judge(answer: Answer, counts: Mapping[Metric, int]) -> list[Finding]:
    """What the counters say of one generation, held against what its client got and against each other."""
    known = {name: counts[metric] for metric, name in FIELDS.items() if metric in counts}
    generations = counts.get(Metric.GENERATIONS, 0)
    if generations != 1:
        return [
            PROOF.problem(
                "idle",
                f"{generations} generations were counted while one was asked for: somebody else was served too.",
                "Run the proof while the server is idle.",
            )
        ]
    findings = [PROOF.ok("generations", "1 generation was counted, and 1 was asked for.")]
    report = "Please report this, with the versions that `otel-specdec doctor` prints."
    completion = known.get("completion")
    equal = completion == answer.tokens
    findings.append(
        PROOF.finding(
            "completion",
            State.OK if equal else State.PROBLEM,
            f"{completion} completion tokens were counted, and {answer.tokens} came "
            f"back{'' if equal else ': they differ'}.",
            "" if equal else report,
        )
    )
    for check, left, right in _INEQUALITIES:
        if known.keys() >= {left, *right}:
            holds = known[left] <= sum(known[name] for name in right)
            bound = " + ".join(f"{known[name]} {name}" for name in right)
            said = f"{known[left]} {left} {'≤' if holds else 'is above'} {bound}."
            findings.append(PROOF.finding(check, State.OK if holds else State.PROBLEM, said, "" if holds else report))
    lacking = [name for name in FIELDS.values() if name not in known]
    if lacking:
        findings.append(
            PROOF.note(
                "unknown",
                f"Unknown on this engine and configuration: {', '.join(lacking)}.",
                "See what each version can tell: docs/sglang.md, docs/versions.md.",
            )
        )
    if not known.get("verify"):
        findings.append(
            PROOF.warning(
                "verify",
                "No draft was verified: the request had none, or the engine does not speculate.",
                "Look at the server's speculative configuration.",
            )
        )
    return findings


_INEQUALITIES: Final = (
    ("accepted", "accepted", ("proposed",)),
    ("emitted_by_steps", "emitted", ("accepted", "verify")),
    ("emitted_by_completion", "emitted", ("completion",)),
)


def _named(answer: Answer, seen: Seen) -> Finding:
    if answer.response_id in seen.named:
        return PROOF.ok("exemplar", f"An exemplar names {answer.response_id}.")
    return PROOF.note(
        "exemplar",
        f"No exemplar names {answer.response_id}.",
        "See the part Exemplars of `otel-specdec doctor`; Prometheus needs --enable-feature=exemplar-storage.",
    )
