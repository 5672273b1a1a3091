"""What a user's own program does: `LLM(...)`, a few prompts, the end. Run by test_offline.py in a process of its own.

argv: the model's folder; `own` to make a MeterProvider of its own and instrument by hand. Prints the token ids it got.
"""

import sys


def main() -> None:
    if sys.argv[2] == "own":
        from opentelemetry import metrics
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        from otel_specdec import VLLMSpecDecInstrumentor

        metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
        VLLMSpecDecInstrumentor().instrument()

    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    prompts = ["abcdefghijklmnopqrstuvwxyz" + "ab" * n for n in range(1, 6)]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=33), use_tqdm=False)
    print("TOKENS", sum(len(sequence.token_ids) for result in results for sequence in result.outputs), flush=True)


if __name__ == "__main__":
    main()
