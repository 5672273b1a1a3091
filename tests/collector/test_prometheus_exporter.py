"""`OTEL_METRICS_EXPORTER=prometheus` and an engine of several processes: one has the port, and the others are told."""

from __future__ import annotations

from pathlib import Path

from examples.vllm_demo.server import free_port
from tests.unit import vllm_stand_in
from tests.unit.scripts import run

SERVER = """
import json, subprocess, sys, urllib.request
from opentelemetry import metrics
from opentelemetry.instrumentation import auto_instrumentation

{initialize}
from otel_specdec.instrumentors import VLLMSpecDecInstrumentor, vllm_plugin
from tests.unit.vllm_stand_in import MODULE, Steps
import importlib

vllm_plugin()
steps = Steps(importlib.import_module(MODULE))
steps.add("a", limit=6)
steps.step(a=(0, 1))
steps.step(a=(4, 5))
has_provider = type(metrics.get_meter_provider()).__name__ == "MeterProvider"
children = []
if sys.argv[1:] == []:
    child = subprocess.run([sys.executable, "-c", {me!r}, "child"], capture_output=True, text=True, timeout=60)
    children = [child.returncode, json.loads(child.stdout.splitlines()[-1]), child.stderr]
with urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=10) as page:
    served = [line for line in page.read().decode().splitlines() if line.startswith("specdec_accepted_tokens_total")]
# Its first page has every point twice.
print(json.dumps([has_provider, bool(steps.scheduler.returned), sorted(set(served)), *children]))
"""


def server(tmp_path: Path, initialize: str) -> tuple[list[object], str]:
    vllm_stand_in.write(tmp_path)
    port = free_port()
    me = SERVER.replace("{initialize}", initialize).replace("{port}", str(port)).replace("{me!r}", "None")
    script = SERVER.replace("{initialize}", initialize).replace("{port}", str(port)).replace("{me!r}", repr(me))
    variables = {
        "OTEL_METRICS_EXPORTER": "prometheus", "OTEL_TRACES_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none",
        "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1", "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
    }  # fmt: skip
    ended = run(script, path=tmp_path, env=variables)
    return ended.value, ended.log


def test_the_second_process_under_opentelemetry_instrument_counts_nothing_and_says_what_to_use(tmp_path: Path) -> None:
    value, _ = server(tmp_path, "auto_instrumentation.initialize()")
    has_provider, engine_answered, served, status, child, log = value
    assert (has_provider, engine_answered) == (True, True)
    assert len(served) == 1  # type: ignore[arg-type]  # JSON
    assert served[0].endswith(" 4.0")  # type: ignore[index]  # JSON
    # The SDK's own start fails there, and loads no instrumentor; what vLLM's plugin then finds is the taken port.
    assert status == 0
    assert child == [False, True, served]
    assert "Address already in use" in str(log)
    assert "have metrics pushed instead, by OTEL_METRICS_EXPORTER=otlp" in str(log)


def test_so_does_the_second_one_by_the_plugin_alone(tmp_path: Path) -> None:
    value, _ = server(tmp_path, "")
    has_provider, engine_answered, served, status, child, log = value
    assert (has_provider, engine_answered) == (False, True)  # a provider of ours, not the global one
    assert len(served) == 1  # type: ignore[arg-type]  # JSON
    assert status == 0
    assert child == [False, True, served]
    assert "have metrics pushed instead, by OTEL_METRICS_EXPORTER=otlp" in str(log)
