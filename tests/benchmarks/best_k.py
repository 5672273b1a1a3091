"""What the best-k rule says against what really comes: one run at k = 5, and runs at k = 1 to 4 on the same prompts.

    build/venvs/vllm/bin/python -m tests.benchmarks.best_k

A real engine for each k, a process each, exports to a real Prometheus with the stock rules; the prediction is the
recorded `specdec:best_k_acceptance_length:ratio_rate5m` of the run at 5, the truth is emitted / verify of the run at k.
The rule cannot be exact. It looks at steps before trimming, so it is too high where generations are short; and a step
of a smaller k begins at other tokens than those of a larger one did.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.vllm_demo.tiny_model import LETTERS, Models, ensure_models
from tests.collector.processes import BUILD, COLLECTOR, ROOT, Prometheus, eventually

LARGEST = 5


@dataclass(frozen=True)
class Outcome:
    """One k of one kind of drafts."""

    drafts: str
    k: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def prompts() -> list[str]:
    """Texts after which n-gram drafts are right for a while, and then not; the same in every run."""
    dice = random.Random(5)
    made = []
    for _ in range(48):
        parts = []
        for _ in range(6):
            start = dice.randrange(20)
            parts.append(LETTERS[start : start + dice.randint(3, 9)])
            parts.append(dice.choice("0123456789") * dice.randint(1, 3))
        begin = dice.randrange(24)
        made.append("".join(parts) + LETTERS[begin : begin + 2])
    return made


def run_engine(models: Models, endpoint: str, drafts: str, k: int, most_tokens: int) -> None:
    """Generate with this k and export all of it, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    from otel_specdec import VLLMSpecDecInstrumentor

    exporter = OTLPMetricExporter(f"{endpoint}/v1/metrics")
    resource = Resource({"service.name": f"{drafts}-{k}", "service.instance.id": "1"})
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, 500)], resource=resource)
    VLLMSpecDecInstrumentor().instrument(meter_provider=provider)
    from vllm import LLM, SamplingParams

    speculation: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if drafts != "ngram":
        speculation = {"method": "draft_model", "model": str(models.draft)}
    llm = LLM(
        str(models.target), speculative_config={**speculation, "num_speculative_tokens": k}, dtype="float32",
        max_model_len=512, max_num_seqs=16, enforce_eager=True, kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    provider.force_flush()  # zeros, before there is anything to count
    time.sleep(1.5)
    lengths = random.Random(7)
    sampling = [SamplingParams(temperature=0, max_tokens=lengths.randint(8, most_tokens)) for _ in prompts()]
    llm.generate(prompts(), sampling, use_tqdm=False)
    provider.force_flush()
    time.sleep(1.0)
    provider.force_flush()


def in_its_own_process(endpoint: str, drafts: str, k: int, most_tokens: int) -> None:
    """A second engine in one process fails in vLLM 0.32."""
    command = [sys.executable, "-m", "tests.benchmarks.best_k", endpoint, drafts, str(k), str(most_tokens)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr[-3000:])


def measure(folder: Path, drafts: Sequence[str], ks: Sequence[int], most_tokens: int = 120) -> list[Outcome]:
    """Every k in `ks` for each kind of drafts, beside what the run at `LARGEST` says of it."""
    ensure_models(BUILD / "models")
    rules = [COLLECTOR / "prometheus" / "rules" / "specdec.rules.yml"]
    with Prometheus(folder / "prometheus", rules, features=()) as prometheus:
        # Two processes at a time, for there are two cores here.
        with ThreadPoolExecutor(2) as two:
            runs = [
                two.submit(in_its_own_process, prometheus.otlp, kind, k, most_tokens)
                for kind in drafts
                for k in (LARGEST, *ks)
            ]
            predicted: dict[tuple[str, int], float] = {}
            for run in runs:
                run.result(timeout=600)
                for kind in drafts:  # while the five minutes of the rule still hold that run
                    found = prometheus.query(f'specdec:best_k_acceptance_length:ratio_rate5m{{job="{kind}-{LARGEST}"}}')
                    predicted |= {(kind, int(value.labels["k"])): value.value for value in found}
        outcomes = []
        for kind in drafts:
            for k in ks:
                above, below = (
                    prometheus.value(f'sum({name}{{job="{kind}-{k}"}})')
                    or prometheus.value(f'sum(last_over_time({name}{{job="{kind}-{k}"}}[1h]))')
                    for name in ("specdec_emitted_tokens_total", "specdec_verify_steps_total")
                )
                assert above
                assert below
                assert eventually(lambda key=(kind, k): key in predicted, 1), predicted  # type: ignore[misc]
                outcomes.append(Outcome(kind, k, predicted[kind, k], above / below))
        return outcomes


def main() -> int:
    if len(sys.argv) == 5:
        endpoint, kind, k, most_tokens = sys.argv[1:]
        run_engine(ensure_models(BUILD / "models"), endpoint, kind, int(k), int(most_tokens))
        return 0
    with tempfile.TemporaryDirectory(prefix="best-k-") as folder:
        outcomes = measure(Path(folder), ("ngram", "draft_model"), (1, 2, 3, 4))
    print("drafts       k  predicted  measured   error")
    for each in outcomes:
        print(f"{each.drafts:11} {each.k:2}  {each.predicted:9.3f}  {each.measured:8.3f}  {each.error:+6.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
