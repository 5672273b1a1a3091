"""The offline `sglang.Engine` with our counters in this process: sums, and ratios of sums, without any collector.

    python -m examples.sglang.offline MODEL [NAME=VALUE of sglang.Engine ...]

Instrument before the engine is made. To run it without an accelerator, see docs/sglang.md.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import SGLangSpecDecInstrumentor, pool

SPECULATION = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
PROMPTS = ["abcdefghijklmnopqrstuvwxyzab", "the cat sat on the mat and the cat sat on", "1, 2, 3, 4, 1, 2, 3,"]


def setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", type=setting)
    asked = parser.parse_args()

    reader = InMemoryMetricReader()
    SGLangSpecDecInstrumentor().instrument(meter_provider=MeterProvider([reader]))

    import sglang

    engine = sglang.Engine(model_path=asked.model, log_level="error", **{**SPECULATION, **dict(asked.settings)})
    try:
        answers = engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 48})
        for answer in answers:
            print(f"  {answer['text']!r:.70}")
        for pooled in pool(reader.get_metrics_data()):
            print(pooled)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
