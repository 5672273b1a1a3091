"""vLLM's real `Scheduler` and `AsyncScheduler` without an engine: synthetic model outputs, step by step.

What a test says here is what the model runner would have said: which tokens each scheduled request generated.
Everything else (scheduling, drafts, trimming, aborts, preemption) is vLLM's own code.
"""

from __future__ import annotations

import os
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.vllm_demo.tiny_model import Models
from otel_specdec import VLLMSpecDecInstrumentor
from tests.vllm.engine import TOTALS, points

K = 4
DRAFT = [11, 12, 13, 14]
BLOCK_SIZE = 32


class Rig:
    """A real scheduler of class `name` (`Scheduler` or `AsyncScheduler`), instrumented for an in-memory reader.

    With `speculation` None it does not speculate. Use it as a context manager: it instruments, and puts all back.
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
        import torch
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.config.cache_config.num_gpu_blocks = 4096
        return {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}[self.name](
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=4096, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def add(self, request_id: str, *, max_tokens: int = 1000, prompt: int = 64, **settings: Any) -> Any:
        """Put a request into the queue and return vLLM's own object of it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(range(4, 4 + prompt)),
            sampling_params=sampling,
            pooling_params=None,
            **settings,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def update(self, step: Any, generated: dict[str, list[int]]) -> dict[str, list[int]]:
        """Hand the scheduler what the model generated; returns the tokens that go out, by request."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[list(generated.get(request_id, [])) for request_id in ids],
        )
        self.result = self.scheduler.update_from_output(step, output)
        return {o.request_id: list(o.new_token_ids) for out in self.result.values() for o in out.outputs}

    def step(self, generated: dict[str, list[int]]) -> dict[str, list[int]]:
        return self.update(self.schedule(), generated)

    def draft(self, *request_ids: str, tokens: list[int] | None = None) -> None:
        """Give running requests these drafts (default: `DRAFT`) for the next step: the synchronous scheduler only."""
        from vllm.v1.outputs import DraftTokenIds

        drafts = [list(DRAFT if tokens is None else tokens) for _ in request_ids]
        self.scheduler.update_draft_token_ids(DraftTokenIds(list(request_ids), drafts))

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
        for outputs in self.result.values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.spec_decoding_stats
            if stats:
                return stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens
        return None


def _config(models: Models, speculation: dict[str, Any] | None, data_parallel_index: int, max_num_seqs: int) -> Any:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(models.target),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(2048, 16 * max_num_seqs),
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        speculative_config=speculation
        or {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    ).create_engine_config()
    config.parallel_config.data_parallel_index = data_parallel_index
    return config
