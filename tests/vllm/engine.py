"""The real engine in this process, with our counters, an independent count and vLLM's own metrics beside each other."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from examples.vllm_demo.tiny_model import Models
from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import POSITION, Metric
from tests.vllm.witness import Witness, witnessing

K = 4
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TOTALS = {**METRIC_OF_FIELD, "generations": Metric.GENERATIONS}


@dataclass
class Engine:
    """One `LLM`, and what has been counted of it three times over."""

    llm: Any
    witness: Witness
    reader: InMemoryMetricReader
    _last: Counter[tuple[str, int]] = field(default_factory=Counter)
    _last_vllm: Counter[str] = field(default_factory=Counter)

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def ids(self, text: str) -> list[int]:
        return list(self.llm.get_tokenizer().encode(text))

    def token(self, character: str) -> int:
        return int(self.llm.get_tokenizer().convert_tokens_to_ids(character))

    def start(self) -> None:
        """Forget what came before: the next figures are of what follows."""
        self.witness.reset()
        self.counted()
        self.reported()

    def generate(self, prompts: Any, sampling: Any) -> list[Any]:
        """Every output sequence that the client gets for these prompts."""
        self.start()
        results = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [sequence for result in results for sequence in result.outputs]

    def points(self) -> list[tuple[str, dict[str, Any], int]]:
        return points(self.reader)

    def counted(self) -> dict[str, int]:
        """What our counters have grown by since the last call: totals by field, positions as
        `accepted_at`/`proposed_at`."""
        now: Counter[tuple[str, int]] = Counter()
        for name, attributes, value in self.points():
            now[name, attributes.get(POSITION, -1)] += value
        grown = {key: value - self._last[key] for key, value in now.items()}
        self._last = now
        totals = {field: grown.get((metric.value, -1), 0) for field, metric in TOTALS.items()}
        self.accepted_at = _by_position(grown, Metric.POSITION_ACCEPTED)
        self.proposed_at = _by_position(grown, Metric.POSITION_PROPOSED)
        return totals

    def reported(self) -> dict[str, int]:
        """What vLLM's own metrics have grown by since the last call."""
        now = Counter({m.name: m.value for m in self.llm.get_metrics() if m.name in VLLM_NAMES and hasattr(m, "value")})
        grown = {short: now[name] - self._last_vllm[name] for name, short in VLLM_NAMES.items()}
        self._last_vllm = now
        return grown

    def check(self, sequences: list[Any] | None = None) -> dict[str, int]:
        """Our counters equal the independent count, positions too, and the client's tokens; returns them."""
        counted = self.counted()
        assert counted == self.witness.totals()
        assert self.accepted_at == self.witness.accepted_at
        assert self.proposed_at == self.witness.proposed_at
        if sequences is not None:
            assert counted["completion"] == sum(len(sequence.token_ids) for sequence in sequences)
            assert counted["generations"] == len(sequences)
        return counted


VLLM_NAMES = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:generation_tokens": "completion",
    "vllm:num_preemptions": "preemptions",
}


def points(reader: InMemoryMetricReader) -> list[tuple[str, dict[str, Any], int]]:
    """Every point of a collection: metric name, attributes, value."""
    data = reader.get_metrics_data()
    return [
        (metric.name, dict(point.attributes or {}), int(point.value))
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]


def _by_position(grown: dict[tuple[str, int], int], metric: Metric) -> Counter[int]:
    return +Counter({position: value for (name, position), value in grown.items() if name == metric.value})


@contextmanager
def running_engine(models: Models, speculation: dict[str, Any] | None = NGRAM, **settings: Any) -> Iterator[Engine]:
    """The engine of `LLM(...)`, instrumented for an in-memory reader of its own."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler in this process, where the in-memory reader is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    options = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enforce_eager": True,
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
    } | settings
    with witnessing() as witness:
        VLLMSpecDecInstrumentor().instrument(meter_provider=provider)
        try:
            llm = LLM(str(models.target), speculative_config=speculation, **options)
            yield Engine(llm, witness, reader)
            llm.llm_engine.engine_core.shutdown()
            del llm
        finally:
            VLLMSpecDecInstrumentor().uninstrument()
            gc.collect()
            cleanup_dist_env_and_memory()
            provider.shutdown()
