"""A wrapper around an asynchronous engine in the manner of verl's `vLLMHttpServer`: token ids in, token ids out.

Such a server calls `AsyncLLM.generate` itself and has no HTTP response to read, but the last `RequestOutput` holds the
same numbers (`CompletionOutput.spec_decode_metrics`, vLLM 0.30 on with `per_request_spec_decode_metrics`). It makes one
payload of them and hands that over; what a worker then calls its metrics comes from summed counters.

`python -m examples.rollouts.async_server` runs it around a stand-in that yields what the real engine said; the tests
run it around the real `AsyncLLM` too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from examples.rollouts.replay import cases
from otel_specdec import GenerationReport, SpecDecRecorder, pool


class Engine(Protocol):
    """The one method of vLLM's `AsyncLLM` that is needed here."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Yield `RequestOutput`s, the last one with `finished`."""


@dataclass(frozen=True)
class TokenOutput:
    """What the trainer gets; `report` goes with the sample, to be counted with its batch or not at all."""

    token_ids: Sequence[int]
    stop_reason: str | None
    report: GenerationReport | None


class AsyncServer:
    """Generates, and counts each generation under the id that the engine was given for it."""

    def __init__(self, engine: Engine, recorder: SpecDecRecorder, *, model: str, method: str) -> None:
        self._engine = engine
        self._recorder = recorder
        self._model = model
        self._method = method

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Any, *, session_id: str | None = None, request_id: str = ""
    ) -> TokenOutput:
        request_id = request_id or uuid.uuid4().hex
        final: Any = None
        async for output in self._engine.generate({"prompt_token_ids": list(prompt_ids)}, sampling_params, request_id):
            final = output
        if final is None:
            raise RuntimeError(f"the engine said nothing of {request_id}")
        (sequence,) = final.outputs
        reports = self._recorder.record_payload(
            payload_of(final), session_id=session_id, provider="vllm", model=self._model, method=self._method
        )
        return TokenOutput(sequence.token_ids, sequence.finish_reason, reports[0] if reports else None)


def payload_of(output: Any) -> dict[str, Any]:
    """A `RequestOutput` of one sequence in the form of vLLM's HTTP response."""
    (sequence,) = output.outputs
    metrics = getattr(sequence, "spec_decode_metrics", None)  # vLLM before 0.30 has none: unknown, not 0
    return {
        "id": output.request_id,
        "usage": {"completion_tokens": len(sequence.token_ids)},
        "metrics": {"speculative_decoding": metrics.to_dict()} if metrics is not None else None,
    }


class StandIn:
    """Yields what the real engine said of the recorded requests, one after the other."""

    def __init__(self) -> None:
        recorded = [
            case["response"] for case in cases("vllm").values() if len(case.get("response", {}).get("choices", ())) == 1
        ]
        self._responses = iter(recorded)
        self.number = len(recorded)

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        response = next(self._responses)
        tokens = [0] * response["usage"]["completion_tokens"]
        metrics = (response["metrics"] or {}).get("speculative_decoding")
        for finished in (False, True):
            await asyncio.sleep(0)
            yield SimpleNamespace(
                request_id=request_id,
                finished=finished,
                outputs=[
                    SimpleNamespace(
                        token_ids=tokens if finished else tokens[:1],
                        finish_reason=response["choices"][0]["finish_reason"] if finished else None,
                        spec_decode_metrics=SimpleNamespace(to_dict=lambda: metrics) if finished and metrics else None,
                    )
                ],
            )


async def serve(server: AsyncServer, number: int) -> list[TokenOutput]:
    """So many requests at once, as the workers of a rollout send them."""
    return await asyncio.gather(*(server.generate([1, 2, 3], None, session_id="step 1") for _ in range(number)))


def main() -> None:
    reader = InMemoryMetricReader()
    engine = StandIn()
    server = AsyncServer(
        engine, SpecDecRecorder(MeterProvider([reader]), speculation=True), model="tiny", method="ngram"
    )
    outputs = asyncio.run(serve(server, engine.number))
    print(f"{len(outputs)} generations, {sum(len(output.token_ids) for output in outputs)} tokens")
    (pooled,) = pool(reader.get_metrics_data())
    print(f"accept rate {pooled.ratios['accept_rate']:.4f}, covered {pooled.coverage['accept_rate']:.0%}")


if __name__ == "__main__":
    main()
