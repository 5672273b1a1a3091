"""`LLM(...)` in a user's own program, with its engine in a forked or spawned process that the end of the program
stops."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.vllm_demo.otlp_receiver import OtlpReceiver
from examples.vllm_demo.server import otlp_environment
from examples.vllm_demo.tiny_model import Models
from otel_specdec.names import Metric

SCRIPT = Path(__file__).with_name("offline_script.py")


@pytest.mark.parametrize(
    ("way", "method"), [("instrumented", "fork"), ("plugin", "spawn"), ("own", "fork"), ("own", "spawn")]
)
def test_a_program_that_just_ends_loses_nothing(models: Models, tmp_path: Path, way: str, method: str) -> None:
    with OtlpReceiver(grpc=False) as receiver:
        python = Path(sys.executable)
        command = [str(python), str(SCRIPT), str(models.target), way]
        if way == "instrumented":
            command.insert(0, str(python.with_name("opentelemetry-instrument")))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        environment |= otlp_environment(receiver.http_endpoint, service="offline", interval_ms=60_000)
        environment |= {"VLLM_WORKER_MULTIPROC_METHOD": method, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(SCRIPT.parents[2])}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        result = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, output[-3000:]
        found = re.search(r"TOKENS (\d+)", output)
        assert found is not None, output[-3000:]
        assert "Traceback" not in output, output[-3000:]
        assert receiver.totals(Metric.COMPLETION.value) == int(found[1]), output[-3000:]
        assert receiver.totals(Metric.GENERATIONS.value) == 5
        processes = {point.attributes["specdec.process"] for point in receiver.points(Metric.GENERATIONS.value)}
        assert processes == {"engine-0"}
