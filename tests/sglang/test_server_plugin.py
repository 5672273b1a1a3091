"""SGLang's own plugin alone, without `opentelemetry-instrument`: a provider of ours, made as the environment says."""

from __future__ import annotations

from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from tests.sglang.serving import KNOWN, check_points, serving, told


def test_by_the_plugin_alone(models: Models, tmp_path: Path) -> None:
    with serving(models, tmp_path, instrument=False) as served:
        answers = served.generate([KNOWN, "the cat"], sampling={"max_new_tokens": 30})
        assert served.settle(2) == told(answers)
        check_points(served, processes=1)
        assert len(served.lines()) == 1
        assert "a MeterProvider of its own" in served.lines()[0]
