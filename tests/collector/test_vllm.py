"""A real vLLM server: straight into Prometheus, and by way of the collector; every token that clients got is there."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from collector.mixin.prometheus_names import MODEL
from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import VllmServer, otlp_environment
from examples.vllm_demo.tiny_model import LETTERS, Models, ensure_models
from examples.vllm_demo.traffic import Answer, Ask, complete, greedy_mix, send_now
from tests.collector import recorded
from tests.collector.conftest import RULES
from tests.collector.panels import for_everything, panel_targets
from tests.collector.processes import BUILD, Collector, Prometheus, eventually, free_port

KNOWN = LETTERS + "ab"
K = 4


@pytest.fixture(scope="module")
def models() -> Models:
    return ensure_models(BUILD / "models")


@dataclass
class Served:
    """A server whose counters end in this Prometheus."""

    server: VllmServer
    prometheus: Prometheus

    def ask(self, asks: Sequence[Ask], at_once: int = 8) -> list[Answer]:
        answers = send_now(self.server.url, "tiny", asks, at_once=at_once)
        assert [answer.error for answer in answers if answer.error] == []
        return answers

    def settle(self) -> None:
        """Wait until everything that was counted so far is in a recorded window."""
        time.sleep(2.5)  # an export
        recorded.wait_for_window_after(self.prometheus, time.time())


@contextmanager
def serving(models: Models, folder: Path, rules: Sequence[Path], *, by_collector: bool) -> Iterator[Served]:
    with ExitStack() as stack:
        traces = stack.enter_context(OtlpReceiver())  # vLLM keeps no trace context of a request without such an address
        server = VllmServer(
            models.target, instrument=True, work_dir=folder / "vllm", max_num_seqs=32, start_seconds=400
        )
        server.port = free_port()  # known before the start, to be scraped
        scrape = {"engines": f"127.0.0.1:{server.port}"}
        prometheus = stack.enter_context(Prometheus(folder / "prometheus", rules, scrape=scrape))
        endpoint = prometheus.otlp
        if by_collector:
            endpoint = stack.enter_context(Collector(folder / "collector", prometheus.otlp, window="2s")).http
        server.env = {
            **otlp_environment(endpoint, service="vllm", interval_ms=1000),
            "OTEL_RESOURCE_ATTRIBUTES": "service.version=1.0,deployment.environment.name=test",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        server.extra_args = [
            "--disable-uvicorn-access-log", "--otlp-traces-endpoint", f"{traces.http_endpoint}/v1/traces",
        ]  # fmt: skip
        with server:
            yield Served(server, prometheus)
        print(server.log_tail(5))


def known_lengths() -> list[Ask]:
    """Each prompt ends in the second alphabet, so after the first token, by prefill, every draft is right."""
    return [complete(f"{tokens} tokens", KNOWN, tokens) for tokens in [2, 3, 6, 7, 11, 13, 16, 21, 40] * 4]


def emitted_and_steps(answers: Sequence[Answer]) -> tuple[int, int]:
    """Counted by the client: all tokens but the first came from verify steps of k + 1 tokens, the last one trimmed."""
    after_prefill = [answer.tokens - 1 for answer in answers]
    return sum(after_prefill), sum(math.ceil(tokens / (K + 1)) for tokens in after_prefill)


def check_ratios(served: Served) -> None:
    """All traffic of known lengths: completion is the clients' token ids, acceptance length the client's own count."""
    answers = served.ask(known_lengths())
    assert all(answer.as_expected() for answer in answers)
    served.settle()
    totals = recorded.totals(served.prometheus)
    emitted, steps = emitted_and_steps(answers)
    assert totals["tiny", "engine", "numerator.tokens_per_verify"] == sum(answer.tokens for answer in answers)
    assert totals["tiny", "engine", "numerator.acceptance_length"] == emitted
    assert totals["tiny", "engine", "denominator.acceptance_length"] == steps
    assert totals["tiny", "engine", "generations"] == len(answers)
    assert totals["tiny", "engine", "covered.acceptance_length"] == len(answers)
    assert recorded.check_quotients(served.prometheus) > 0
    print(f"completion {sum(answer.tokens for answer in answers)}, acceptance length {emitted}/{steps}")


def check_a_mix(served: Served) -> None:
    """Every way to end: completion is the token ids, and what the engine went on to do behind a stop string.

    vLLM looks for stop strings in its frontend and then aborts the request, so the engine may run on by some steps,
    by more of them the busier the machine is, and at most to the request's own limit.
    """
    before = recorded.totals(served.prometheus)["tiny", "engine", "numerator.tokens_per_verify"]
    answers = served.ask(greedy_mix())
    served.settle()
    after = recorded.totals(served.prometheus)["tiny", "engine", "numerator.tokens_per_verify"]
    got = sum(answer.tokens for answer in answers)
    usage = sum(int((answer.usage or {})["completion_tokens"]) for answer in answers if answer.usage)
    stopped = [answer for answer in answers if "stop" in answer.ask.body]
    assert len(stopped) == 2
    assert got <= after - before <= got + sum(answer.ask.body["max_tokens"] - answer.tokens for answer in stopped)
    assert usage >= got


def check_exemplars(served: Served) -> None:
    """Each generation is found by the id that its client saw, with the trace that the client began."""
    for _ in range(3):
        trace, span = secrets.token_hex(16), secrets.token_hex(8)
        headers = {"traceparent": f"00-{trace}-{span}-01", "X-Request-Id": secrets.token_hex(6)}
        ask = complete("traced", KNOWN, 13)
        answer = served.ask([Ask(ask.name, ask.body, headers=headers)])[0]

        def found(response_id: str = answer.response_id) -> list[Any]:
            exemplars = served.prometheus.exemplars("specdec_completion_tokens_total")
            return [one for one in exemplars if one["labels"].get("gen_ai.response.id") == response_id]

        assert eventually(lambda f=found: bool(f()), 15, 0.5), served.prometheus.exemplars('{__name__=~"specdec_.+"}')  # type: ignore[misc]
        exemplar = found()[0]
        assert exemplar["labels"]["trace_id"] == trace
        # What it did since the export before, which on a slow machine may lie in the middle of it.
        assert 0 < float(exemplar["value"]) <= answer.tokens == 13
        assert exemplar["series"][MODEL] == "tiny"


def check_reconciliation(served: Served) -> None:
    """Ours beside vLLM's own, scraped from the same server: the same tokens.

    vLLM's front end counts what it handed on and what it cut off behind a stop string, and not what came after that.
    """

    def total(counter: str) -> float:
        return sum(value.value for value in served.prometheus.query(counter))

    def agree() -> bool:
        completion, trimmed = total("specdec_completion_tokens_total"), total("specdec_trimmed_tokens_total")
        return (
            total("specdec_accepted_tokens_total") == total("vllm:spec_decode_num_accepted_tokens_total")
            and completion - trimmed <= total("vllm:generation_tokens_total") <= completion
        )

    assert eventually(agree, 20, 0.5)  # ours is pushed when the engine goes idle, vLLM's is scraped when it is time
    for name in ("specdec:reconciliation:difference_rate5m", "specdec:engine_acceptance_length:ratio_rate5m"):
        assert served.prometheus.query(name), name


def check_dashboards(served: Served) -> None:
    """Every panel's query runs on this data; only those about faults are empty, for there was none."""
    targets = panel_targets()
    empty = set()
    for title, target in targets:
        expression = for_everything(target["expr"])
        if target.get("exemplar"):
            assert served.prometheus.exemplars(expression), title
            assert served.prometheus.query(expression) == []  # it draws no line
        elif not [value for value in served.prometheus.query(expression) if math.isfinite(value.value)]:
            empty.add(title)
    print(f"{len(targets)} queries, empty: {sorted(empty)}")
    assert empty == {"Dropped reports", "Instrumentation errors"}


def test_straight_into_prometheus(models: Models, tmp_path: Path, short_exact_rules: Path) -> None:
    rules = [short_exact_rules, RULES / "specdec.rules.yml"]
    with serving(models, tmp_path, rules, by_collector=False) as served:
        check_ratios(served)
        check_a_mix(served)
        check_exemplars(served)
        check_reconciliation(served)
        check_dashboards(served)


def test_by_way_of_the_collector(models: Models, tmp_path: Path, short_exact_rules: Path) -> None:
    rules = [short_exact_rules, RULES / "specdec_collector.rules.yml"]
    with serving(models, tmp_path, rules, by_collector=True) as served:
        check_ratios(served)
        emitted, steps = (
            sum(value for _, samples in served.prometheus.samples(name, 600) for _, value in samples)
            for name in ("specdec_pool_numerator_acceptance_length", "specdec_pool_denominator_acceptance_length")
        )
        totals = recorded.totals(served.prometheus)
        assert emitted == totals["tiny", "engine", "numerator.acceptance_length"]
        assert steps == totals["tiny", "engine", "denominator.acceptance_length"]
        time.sleep(1.5)
        assert served.prometheus.value("specdec:acceptance_length:ratio_rate5m") == pytest.approx(emitted / steps)
        check_exemplars(served)
        check_dashboards(served)
