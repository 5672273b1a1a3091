"""verl's way: the wrapper of examples/rollouts around the real `AsyncLLM`; engine and responses count the same.

The engine core is a process of its own here, which counts as a plugin and exports to the receiver.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.rollouts.async_server import AsyncServer, TokenOutput
from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import otlp_environment
from examples.vllm_demo.tiny_model import LETTERS, Models, token_id
from otel_specdec import SpecDecRecorder, pool
from otel_specdec.counts import METRIC_OF_FIELD
from otel_specdec.names import Metric
from tests.vllm.engine import NGRAM

TOKENS = [7, 9, 12, 30]


async def generate(models: Models, recorder: SpecDecRecorder) -> list[TokenOutput]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    settings: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20, "per_request_spec_decode_metrics": "summary",
    }  # fmt: skip
    args = AsyncEngineArgs(str(models.target), speculative_config=NGRAM, **settings)
    engine = AsyncLLM.from_engine_args(args)
    try:
        server = AsyncServer(engine, recorder, model="tiny", method="ngram")
        prompt = [token_id(letter) for letter in LETTERS + "ab"]

        def sampling(max_tokens: int) -> Any:
            return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)

        asked = (server.generate(prompt, sampling(tokens), session_id="step 1") for tokens in TOKENS)
        outputs = await asyncio.wait_for(asyncio.gather(*asked), 120)
        await asyncio.sleep(2)  # an idle engine core is flushed within about a second; its shutdown kills it
        return outputs
    finally:
        engine.shutdown()


def test_engine_and_wrapper_count_the_same_generations(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = InMemoryMetricReader()
    recorder = SpecDecRecorder(MeterProvider([reader], shutdown_on_exit=False))
    with OtlpReceiver() as receiver:
        environment = otlp_environment(receiver.http_endpoint, service="rollout", interval_ms=60_000)
        for name, value in {**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.chdir(tmp_path)
        outputs = asyncio.run(generate(models, recorder))
        assert [len(output.token_ids) for output in outputs] == TOKENS
        assert receiver.wait(lambda _: receiver.totals(Metric.GENERATIONS.value) >= len(TOKENS), 10)
        engine = {field: receiver.totals(metric.value) for field, metric in METRIC_OF_FIELD.items()}
        assert {point.attributes["specdec.source"] for point in receiver.points()} == {"engine"}
    (pooled,) = pool(reader.get_metrics_data())
    assert pooled.attributes == {"specdec.source": "response"}
    assert pooled.generations == len(TOKENS)
    assert dict(pooled.totals) == {field: engine[field] for field in ("accepted", "proposed", "verify", "completion")}
    assert pooled.coverage["accept_rate"] == 1.0
