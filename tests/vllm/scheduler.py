"""vLLM's real `Scheduler` and `AsyncScheduler` without an engine: synthetic model outputs, step by step.

What a test says here is what the model runner would have said: which tokens each scheduled request generated.
Everything else (scheduling, drafts, trimming, aborts, preemption) is vLLM's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.vllm_demo.tiny_model import Models
from otel_specdec import VLLMSpecDecInstrumentor
from tests.vllm import versions
from tests.vllm.engine import TOTALS, points

K = 4
DRAFT = [11, 12, 13, 14]
BLOCK_SIZE = 32


class Rig:
    """A real scheduler of class `name` (`Scheduler` or `AsyncScheduler`), instrumented for an in-memory reader.

    It speculates with n-grams unless told otherwise. Use it as a context manager: it instruments, and puts all back.
    """

    def __init__(
        self,
        models: Models,
        name: str = "Scheduler",
        *,
        speculation: dict[str, Any] | None = None,
        data_parallel_index: int = 0,
        provider: MeterProvider | None = None,
        max_num_seqs: int = 16,
    ) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = provider or MeterProvider([self.reader], shutdown_on_exit=False)
        self.name = name
        self.config = _config(models, speculation, data_parallel_index, max_num_seqs)
        self.config.scheduler_config.async_scheduling = name == "AsyncScheduler"

    def __enter__(self) -> Rig:
        VLLMSpecDecInstrumentor().instrument(meter_provider=self.provider)
        self.scheduler = self.new_scheduler()
        return self

    def __exit__(self, *_: object) -> None:
        VLLMSpecDecInstrumentor().uninstrument()

    def new_scheduler(self) -> Any:
        return self.make(versions.scheduler_class(self.name))

    def make(self, kind: Any) -> Any:
        return versions.make_scheduler(kind, self.config, BLOCK_SIZE)

    def add(self, request_id: str, *, max_tokens: int = 1000, prompt: int = 64, **settings: Any) -> Any:
        """Put a request into the queue and return vLLM's own object of it."""
        request = versions.make_request(request_id, list(range(4, 4 + prompt)), max_tokens=max_tokens, **settings)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def update(self, step: Any, generated: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Hand the scheduler what the model generated; returns the tokens that go out, by request."""
        self.result = self.scheduler.update_from_output(step, versions.make_output(step, generated))
        self.outputs = versions.outputs_by_client(self.result)
        return {o.request_id: list(o.new_token_ids) for out in self.outputs.values() for o in out.outputs}

    def step(self, generated: Mapping[str, list[int]]) -> dict[str, list[int]]:
        return self.update(self.schedule(), generated)

    def draft(self, *request_ids: str, tokens: list[int] | None = None) -> None:
        """Give running requests these drafts (default: `DRAFT`) for the next step: the synchronous scheduler only."""
        drafts = {request_id: list(DRAFT if tokens is None else tokens) for request_id in request_ids}
        versions.give_drafts(self.scheduler, drafts)

    def preempt(self, request_id: str) -> None:
        versions.preempt(self.scheduler, request_id)

    def abort(self, request_ids: Any) -> Any:
        from vllm.v1.request import RequestStatus

        return self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def counted(self) -> dict[str, int]:
        """Our counters' totals by field, and generations."""
        totals = dict.fromkeys(TOTALS, 0)
        for name, _, value in points(self.reader):
            for field, metric in TOTALS.items():
                if name == metric.value:
                    totals[field] += value
        return totals

    def reported(self) -> tuple[int, int, int] | None:
        """vLLM's own figures of the last step: drafts, draft tokens, accepted tokens."""
        for outputs in self.outputs.values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats:
                return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
        return None


def _config(models: Models, speculation: dict[str, Any] | None, data_parallel_index: int, max_num_seqs: int) -> Any:
    config = versions.engine_config(
        model=str(models.target),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(2048, 16 * max_num_seqs),
        enforce_eager=True,
        enable_prefix_caching=False,
        speculative_config=speculation
        or {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    )
    config.cache_config.block_size = BLOCK_SIZE  # as an argument 0.9 refuses it, for want of Intel's kernels
    versions.set_engine_index(config, data_parallel_index)
    return config
