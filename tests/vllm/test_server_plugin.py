"""vLLM's own plugin alone, without `opentelemetry-instrument`: a provider of ours, made as the environment says."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.vllm_demo.tiny_model import Models
from tests.vllm.serving import check_attributes, check_no_id_left, check_two_hundred_of_three_tokens, serving, short


def ours(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "otel_specdec" in line]


def test_by_the_plugin_alone(models: Models, tmp_path: Path) -> None:
    with serving(models, tmp_path, instrument=False) as served:
        check_two_hundred_of_three_tokens(served)
        check_attributes(served, {0})
        check_no_id_left(served)
        lines = ours(served.server.log_path)
        assert len(lines) == 1, lines
        assert "a MeterProvider of its own" in lines[0]


@pytest.mark.parametrize(
    "env",
    [{"OTEL_METRICS_EXPORTER": "none"}, {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "specdec_vllm"}],
    ids=["not-asked-for", "disabled"],
)
def test_nothing_of_ours_starts_where_metrics_are_not_wanted(
    models: Models, tmp_path: Path, env: dict[str, str]
) -> None:
    with serving(models, tmp_path, instrument=False, env=env) as served:
        served.ask(short(2))
        assert not served.receiver.wait(lambda receiver: bool(receiver.requests), 2)
        assert ours(served.server.log_path) == []
